"""Set-ups like those of the papers: more live workflows than the pool holds, and running calls that hold a minor part.

What a policy can choose between is what no running call holds. An engine that admits as many calls as fit gives nearly
all of its pool to running calls once workflows queue, and no policy makes a difference there, not even one that is
told the future. So engines here run at most ``RUNNING`` calls at once, as an operator sets it
(``--max-running-requests``) to bound the time between tokens, and hold the contexts of many more workflows.

Loads are closed loops (so many workflows at once, always) or arrive at a rate. Pools are the working set over the
pressure. For scale: beside Qwen3-14B an A100 with 80 GB has room for 250,000 tokens of KV, and two of them beside
Qwen3-32B for 287,000.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentflow.bench.comparisons.baselines import simulated_loads
from agentflow.bench.comparisons.loads import Load
from agentflow.bench.comparisons.model import Options
from agentflow.bench.simulator import RooflineCost

__all__ = ["ENGINE_RUNNING", "RUNNING", "Place", "few_at_once", "pbkv_engine_loads", "pbkv_places"]

#: Calls that an engine runs at once.
RUNNING = 8
#: The same on an engine on a CPU.
ENGINE_RUNNING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A load, the pressures to put it under, and the engine: a model on ``gpus`` A100."""

    load: Load
    pressures: tuple[float, ...]
    model: str = "qwen3-14b"
    gpus: int = 1

    @property
    def cost(self) -> RooflineCost:
        """What its passes cost."""
        return RooflineCost.of(self.model, "a100-80g", gpus=self.gpus)


def pbkv_places(options: Options) -> list[Place]:
    """The dynamic loads (HoVer- and SWE-bench-like) and the static one (FinanceBench-like), memory from ample to
    starved; the second place is the one whose timeline is kept."""
    small = options.size == "tiny"
    pressures = options.pick(tiny=(4.0,), quick=(4.0,), standard=(1.0, 2.0, 4.0, 8.0))
    scale = options.pick(tiny=0.2, quick=1.0, standard=1.0)
    claims, issues = options.pick(tiny=(6, 4), quick=(48, 48), standard=(96, 64))
    running = 2 if small else RUNNING
    hover = Load(name="hover", kind="hover", workflows=2 * claims, concurrency=claims, scale=scale, max_running=running)
    swebench = Load(
        name="swebench", kind="swebench", workflows=2 * issues, concurrency=issues, scale=scale,
        max_calls=options.pick(tiny=8, quick=24, standard=40), max_prompt=round(16_000 * scale), max_running=running,
    )  # fmt: skip
    finance = Load(
        name="financebench", kind="financebench", workflows=3 * claims, concurrency=claims, scale=scale,
        max_running=running,
    )  # fmt: skip
    pages = replace(finance, name="financebench, pages first", kind="financebench-pages-first")
    places = [
        Place(load=hover, pressures=pressures),
        Place(load=swebench, pressures=pressures),
        Place(load=finance, pressures=pressures[-1:]),
        Place(load=pages, pressures=options.pick(tiny=(1.0,), quick=(2.0,), standard=(1.0, 2.0, 4.0))),
    ]
    if small:
        return places
    arriving = replace(
        swebench, name="swebench, arriving", workflows=options.pick(tiny=0, quick=120, standard=200), concurrency=24,
        max_calls=30, rate=0.045,
    )  # fmt: skip
    asked = options.pick(tiny=(), quick=(3.0,), standard=(1.5, 3.0, 4.5))
    return [
        *places,
        Place(load=arriving, pressures=asked),
        Place(
            load=replace(arriving, name="swebench, arriving faster", workflows=arriving.workflows * 5 // 4, rate=0.06),
            pressures=asked[-1:],
        ),
        Place(
            load=replace(arriving, name="swebench, arriving, on 32B", rate=0.04), pressures=asked[-2:],
            model="qwen3-32b", gpus=2,
        ),
        Place(load=replace(pages, name="financebench, pages first, arriving", rate=0.45), pressures=pressures[-2:]),
    ]  # fmt: skip


def few_at_once(options: Options) -> list[Load]:
    """The same kinds with so few workflows that the queue is empty now and then, as prefetching needs."""
    return [replace(load, name=f"{load.name}, few at once") for load in simulated_loads(options)]


def pbkv_engine_loads(options: Options) -> dict[Load, tuple[float, ...]]:
    """Loads for a model on a CPU and their pressures: a dynamic one and a static one with short texts, tools that
    hardly wait, and many more workflows at once than calls that run."""
    workflows, calls = options.pick(tiny=(3, 4), quick=(12, 5), standard=(16, 6))
    common = Load(
        name="", kind="", workflows=workflows, concurrency=min(12, workflows), tool_scale=0.02, max_calls=calls,
        max_prompt=2_000, max_running=ENGINE_RUNNING,
    )  # fmt: skip
    dynamic = replace(common, name="hover", kind="hover", scale=0.2)
    static = replace(common, name="financebench, pages first", kind="financebench-pages-first", scale=0.15)
    if options.size == "tiny":
        return {dynamic: (2.0,)}
    return {dynamic: (1.5, 2.0, 3.0), static: (1.25, 1.5, 1.75)}
