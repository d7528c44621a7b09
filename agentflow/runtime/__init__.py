"""The agent runtime layer: observe, score, predict, act."""

from agentflow.runtime.layer import Runtime
from agentflow.runtime.log import DecisionLog

__all__ = ["DecisionLog", "Runtime"]
