"""CacheTTL (arXiv 2511.02230): how long to keep what a turn left behind while its tool runs."""

from agentflow.cache.ttl.durations import Curve, Distribution, Exponential, Samples, product
from agentflow.cache.ttl.policy import TTL, CostBenefit
from agentflow.cache.ttl.recognise import command_word, recognise_tool
from agentflow.cache.ttl.retention import Lifetime, Retention
from agentflow.cache.ttl.solver import Solution, tau_star
from agentflow.cache.ttl.tools import ToolDurations, ToolKey
from agentflow.cache.ttl.utility import Memorability, MissCost, QueueingDelay

__all__ = [
    "Curve",
    "CostBenefit",
    "Distribution",
    "Exponential",
    "Lifetime",
    "Memorability",
    "MissCost",
    "QueueingDelay",
    "Retention",
    "Samples",
    "Solution",
    "TTL",
    "ToolDurations",
    "ToolKey",
    "command_word",
    "product",
    "recognise_tool",
    "tau_star",
]
