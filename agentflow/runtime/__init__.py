"""The agent runtime layer: observe, score, predict, act."""

from agentflow.runtime.guards import Guard, Guards
from agentflow.runtime.layer import Runtime
from agentflow.runtime.log import DecisionLog

__all__ = ["DecisionLog", "Guard", "Guards", "Runtime"]
