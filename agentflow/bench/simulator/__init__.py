"""A discrete-event simulator of SGLang engines, driving the same policy objects as the real ones."""

from agentflow.bench.simulator.calibrate import CalibratedCost, DecodeSample, PrefillSample, TransferSample
from agentflow.bench.simulator.config import Arrivals, EngineSpec
from agentflow.bench.simulator.cost import (
    HARDWARE,
    MODELS,
    Cost,
    Efficiency,
    Hardware,
    ModelShape,
    Prefill,
    RooflineCost,
    pool_tokens,
)
from agentflow.bench.simulator.informed import informed
from agentflow.bench.simulator.replay import CacheReplay, cache_replay, most_hits
from agentflow.bench.simulator.result import CallResult, SimResult, WorkflowResult, percentile
from agentflow.bench.simulator.run import engine_of, request_id, simulate

__all__ = [
    "Arrivals",
    "CacheReplay",
    "CalibratedCost",
    "CallResult",
    "Cost",
    "DecodeSample",
    "Efficiency",
    "EngineSpec",
    "HARDWARE",
    "Hardware",
    "MODELS",
    "ModelShape",
    "Prefill",
    "PrefillSample",
    "RooflineCost",
    "SimResult",
    "TransferSample",
    "WorkflowResult",
    "cache_replay",
    "engine_of",
    "informed",
    "most_hits",
    "percentile",
    "pool_tokens",
    "request_id",
    "simulate",
]
