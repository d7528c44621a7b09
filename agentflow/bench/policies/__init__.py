"""What each policy of the runtime layer does for its load, against the same load without it."""

from agentflow.bench.policies.model import Experiment, Finding
from agentflow.bench.policies.run import EXPERIMENTS, run_experiments

__all__ = ["EXPERIMENTS", "Experiment", "Finding", "run_experiments"]
