"""Policies to compare with, each after a public rule that its docstring names."""

from agentflow.cache.baselines.autellix import Autellix
from agentflow.cache.baselines.continuum import Continuum, ContinuumPreview
from agentflow.cache.baselines.infercept import InferCept
from agentflow.cache.baselines.kvflow import KVFlow, KVFlowOracle
from agentflow.cache.baselines.lru import LRU
from agentflow.cache.baselines.oracle import Belady
from agentflow.cache.baselines.session import SessionReferenced
from agentflow.cache.baselines.strategies import FIFO, LFU, SLRU, Priority
from agentflow.cache.policy import Policy

__all__ = [
    "FIFO",
    "LFU",
    "LRU",
    "POLICIES",
    "SLRU",
    "Autellix",
    "Belady",
    "Continuum",
    "ContinuumPreview",
    "InferCept",
    "KVFlow",
    "KVFlowOracle",
    "Priority",
    "SessionReferenced",
]

POLICIES: tuple[type[Policy], ...] = (
    LRU,
    LFU,
    SLRU,
    FIFO,
    Priority,
    SessionReferenced,
    KVFlow,
    KVFlowOracle,
    ContinuumPreview,
    Continuum,
    InferCept,
    Autellix,
    Belady,
)
