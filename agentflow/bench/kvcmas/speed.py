"""Time to first token of four agents over one long shared context, by a cost model: what no CPU can be timed at.

Service times come from :class:`~agentflow.bench.simulator.cost.RooflineCost`; what correction adds is counted in
bytes moved and operations of plain, unfused tensor code. Workflows arrive at random (Poisson); each stays on one
accelerator, whose prefills run one after the other in the order of arrival; its agents follow one another, each after
the answer of the one before, whose decoding is taken to cost no prefill time. The first agent's prefill is dense
under every way. All preparation occupies the accelerator: context-free references before they are used, and the
decomposition of anchors after a dense prefill that the threshold asked for.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from agentflow.bench.simulator.cost import Prefill, RooflineCost

__all__ = ["UNCHAINED", "WAYS", "Load", "Way", "simulate", "speed_claims", "speed_table"]

#: The paper's rank and anchors; of the token kernel: landmarks kept and weighed, components.
_RANK, _ANCHORS, _LANDMARKS, _WEIGHED, _COMPONENTS = 32, 10, 2048, 512, 33
#: Share of peak FLOP/s that small batched matrix products reach. An assumption, as those of ``Efficiency``.
_SMALL = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a later agent gets the shared context. ``reference`` prefills it once more, without context, per workflow.
    Tokens that are recomputed are the context's ``first`` ones, or spread over all of it."""

    name: str
    estimate: Literal["none", "full", "segment", "kernel"] | None = None
    recompute: float = 0.0
    first: bool = False
    layers_first: int = 0
    reference: bool = False
    always: bool = False


WAYS: tuple[Way, ...] = (
    Way(name="NonShared"),
    Way(name="FullShared", estimate="none", always=True),
    Way(name="CacheBlend-like, 15 %", estimate="none", recompute=0.15, layers_first=2, always=True),
    Way(name="KVComm", estimate="full", reference=True),
    Way(name="segment, unchained", estimate="segment", reference=True),
    Way(name="segment, chained (paper)", estimate="segment"),
    Way(name="token-kernel", estimate="kernel"),
    Way(name="token-kernel + first 20 %", estimate="kernel", recompute=0.20, first=True),
)
UNCHAINED = "segment, unchained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """``rate`` calls a second over ``replicas`` accelerators; ``shared`` tokens of context and ``private`` ones before
    and after it per call; ``reuse`` is the share of later agents' segments that are accepted (ways that are ``always``
    right away accept all); ``answer`` seconds of decoding before the next agent."""

    shared: int = 32_768
    private: int = 512
    rate: float = 8.0
    replicas: int = 16
    agents: int = 4
    workflows: int = 400
    reuse: float = 0.8
    answer: float = 2.0
    seed: int = 0


def pool_bytes(way: Way, cost: RooflineCost, load: Load) -> float:
    """Bytes of the anchors of one slot on all edges."""
    if way.estimate in (None, "none"):
        return 0.0
    m = cost.model
    width = m.kv_heads * m.head_size
    numbers = load.shared * width if way.estimate == "full" else _RANK * (load.shared + width)
    return 4.0 * _ANCHORS * (load.agents - 1) * m.layers * numbers * m.bytes_per_number


def estimate_seconds(way: Way, cost: RooflineCost, load: Load) -> float:
    """Moving keys, and whatever the estimator computes, for one shared context."""
    if way.estimate is None:
        return 0.0
    m, tokens = cost.model, load.shared
    width = m.kv_heads * m.head_size
    moved = 2.0 * tokens * m.kv_bytes
    flops = 0.0
    if way.estimate == "full":
        moved += 4.0 * _ANCHORS * m.layers * tokens * width * m.bytes_per_number
    elif way.estimate == "segment":
        moved += 4.0 * _ANCHORS * m.layers * _RANK * (tokens + width) * m.bytes_per_number
        flops = 8.0 * m.layers * _ANCHORS * tokens * _RANK * width
    elif way.estimate == "kernel":
        looked = m.layers * _WEIGHED + _LANDMARKS  # one layer ranks all landmarks
        moved += 4.0 * 4 * tokens * looked  # distances, weights: written and read, 4 bytes each
        flops = 2.0 * tokens * (looked * (_COMPONENTS + 2 * _RANK) + 2 * m.layers * _ANCHORS * _RANK * width)
        flops += 2.0 * m.layers * tokens * 2 * width * _COMPONENTS
    rate, speed = cost.hardware.bandwidth * cost.efficiency.memory, cost.hardware.flops * _SMALL
    return moved / rate + flops / speed + cost.efficiency.pass_seconds


def anchor_seconds(way: Way, cost: RooflineCost, load: Load) -> float:
    """Making an anchor of one dense prefill: four randomised decompositions a layer, six products each."""
    if way.estimate in (None, "none"):
        return 0.0
    m = cost.model
    width = m.kv_heads * m.head_size
    copied = (
        4.0 * m.layers * load.shared * width * m.bytes_per_number / (cost.hardware.bandwidth * cost.efficiency.memory)
    )
    if way.estimate == "full":
        return copied
    flops = 4.0 * m.layers * 6 * 2 * load.shared * width * (_RANK + 8)
    return 6 * copied + flops / (cost.hardware.flops * _SMALL)


def corrected_seconds(way: Way, cost: RooflineCost, load: Load) -> float:
    """A later agent's prefill with its shared context corrected."""
    private = cost.prefill([Prefill(load.private, load.shared)])
    again = round(way.recompute * load.shared)
    before = load.private // 2 if way.first else (load.shared - again) // 2  # tokens that they follow, on average
    extra = cost.prefill([Prefill(again, before)]) if again else 0.0
    first = way.layers_first / cost.model.layers * cost.prefill([Prefill(load.shared, load.private)])
    return private + estimate_seconds(way, cost, load) + extra + first


def simulate(way: Way, cost: RooflineCost, load: Load) -> list[float]:
    """Seconds to the first token of every call. The same arrivals and acceptances for every way."""
    pick = random.Random(load.seed)
    dense = cost.prefill([Prefill(load.shared + load.private, 0)])
    corrected = corrected_seconds(way, cost, load) if way.estimate else dense
    alone = cost.prefill([Prefill(load.shared, 0)]) if way.reference else 0.0
    making = anchor_seconds(way, cost, load)
    free, living = [0.0] * load.replicas, [0] * load.replicas
    events: list[tuple[float, int, int]] = []
    now = 0.0
    for number in range(load.workflows):
        now += pick.expovariate(load.rate / load.agents)
        events.append((now, number, 0))
    takes = [[pick.random() < load.reuse for _ in range(load.agents)] for _ in range(load.workflows)]
    home: dict[int, int] = {}
    waits: list[float] = []
    while events:
        now, number, agent = heapq.heappop(events)
        if agent == 0:
            home[number] = min(range(load.replicas), key=lambda r: (living[r], free[r]))
            living[home[number]] += 1
        where = home[number]
        accepted = agent > 0 and way.estimate is not None and (way.always or takes[number][agent])
        first = max(now, free[where]) + (corrected if accepted else dense)
        free[where] = first
        if agent == 0:
            free[where] += alone
        elif not accepted:
            free[where] += making
        waits.append(first - now)
        if agent + 1 < load.agents:
            heapq.heappush(events, (first + load.answer, number, agent + 1))
        else:
            living[where] -= 1
    return waits


def speed_claims(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The paper's two claims on speed, on every model and accelerator."""
    out = []
    for row in rows:
        place = f"{row['model']} on {row['hardware']}"
        if row["way"] in ("token-kernel", "token-kernel + first 20 %"):
            name = f"{place}: {row['way']}, mean TTFT of NonShared over its own"
            met = row["speedup"] >= 2.0
            out.append({"name": name, "target": "at least 2", "measured": row["speedup"], "met": met, "note": ""})
        if row["way"] == "segment, chained (paper)":
            name = f"{place}: chained, mean TTFT below unchained by"
            met = row["below_unchained"] >= 0.34
            found = row["below_unchained"]
            out.append({"name": name, "target": "at least 0.34", "measured": found, "met": met, "note": ""})
    return out


def speed_table(load: Load | None = None, *, setups: Sequence[tuple[str, str]] | None = None) -> list[dict[str, Any]]:
    """A row for each way on each model and accelerator: TTFT, service time, and whether its anchors fit.

    Ratios are of means: where about half of the calls are dense, a median sees only one of the two kinds. The number of
    accelerators is the least at which NonShared keeps up (load below 0.9).
    """
    rows = []
    for model, hardware in setups or (
        ("llama-3.1-8b", "a100-80g"),
        ("llama-3.1-8b", "h100"),
        ("qwen3-14b", "a100-80g"),
        ("qwen3-14b", "h100"),
    ):
        cost = RooflineCost.of(model, hardware)
        base = load or Load()
        dense = cost.prefill([Prefill(base.shared + base.private, 0)])
        replicas = int(base.rate * dense / 0.9) + 1
        here = Load(
            shared=base.shared, private=base.private, rate=base.rate, replicas=replicas, agents=base.agents,
            workflows=base.workflows, reuse=base.reuse, answer=base.answer, seed=base.seed,
        )  # fmt: skip
        plain = simulate(WAYS[0], cost, here)
        unchained = simulate(next(w for w in WAYS if w.name == UNCHAINED), cost, here)
        for way in WAYS:
            ttft = simulate(way, cost, here)
            room = cost.hardware.memory * 0.88 - cost.model.weight_bytes
            rows.append(
                {
                    "model": model,
                    "hardware": hardware,
                    "replicas": replicas,
                    "way": way.name,
                    "mean": fmean(ttft),
                    "median": median(ttft),
                    "corrected": corrected_seconds(way, cost, here) if way.estimate else dense,
                    "speedup": fmean(plain) / fmean(ttft),
                    "below_unchained": 1 - fmean(ttft) / fmean(unchained),
                    "pool_bytes": pool_bytes(way, cost, here),
                    "fits": pool_bytes(way, cost, here) + (here.shared + here.private) * cost.model.kv_bytes <= room,
                }
            )
    return rows
