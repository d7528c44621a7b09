"""Policies to compare with, each after a public rule that its docstring names."""

from agentflow.cache.baselines.lru import LRU
from agentflow.cache.policy import Policy

__all__ = ["LRU", "POLICIES"]

POLICIES: tuple[type[Policy], ...] = (LRU,)
