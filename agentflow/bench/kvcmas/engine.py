"""Time to first token in the real engine: four agents that read one document, under each method of reuse.

A workflow is a chain: each agent's prompt holds the document, new in every workflow, behind instructions of its own,
and what the agents before it wrote. Answers are given tokens, the same under all methods, so that prompts are too.
Whatever a method needs besides is counted: a reference that is prefilled alone adds its time to the first call that
needs it, and estimating happens inside the calls. Anchors come from workflows before the measurement, which are dense.
Every load is run twice for each method, without reuse and with it, so that both are measured at the same time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from agentflow.bench.kvcmas.data import AGENTS, Agent, load_items
from agentflow.bench.kvcmas.summarise import summarise
from agentflow.engine.base import Call, Coordinates, Engine, Reuse, Sampling, Segment
from agentflow.engine.embedded import EmbeddedEngine
from agentflow.errors import EngineFailure
from agentflow.events import WorkflowEnded

__all__ = ["METHODS", "QUICK", "STANDARD", "Load", "Size", "run_engine_bench"]

#: Compared methods by their names in the engine, the one that all are compared with first.
METHODS = ("nonshared", "fullshared", "cacheblend", "kvcomm", "unchained", "default")
#: Those that need the document prefilled alone.
_CONTEXT_FREE = frozenset({"kvcomm", "unchained"})
#: Tokens of each answer.
ANSWER = 16
#: Room for anchors, so much that full-dimension ones fit too.
POOL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """``workflows`` with documents of ``tokens`` each; they come at ``gap`` seconds apart on average (None: one after
    another)."""

    tokens: int
    workflows: int
    gap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """``anchors`` workflows, with documents of ``anchor_tokens``, come before all loads. ``checked`` workflows of each
    length are run again for quality. ``repetitions`` of every load."""

    loads: tuple[Load, ...]
    anchors: int
    anchor_tokens: int
    checked: int
    repetitions: int = 1


STANDARD = Size(
    loads=(
        Load(tokens=512, workflows=3),
        Load(tokens=512, workflows=6, gap=20.0),
        Load(tokens=512, workflows=6, gap=10.0),
        Load(tokens=1024, workflows=2),
        Load(tokens=2048, workflows=1),
        Load(tokens=4096, workflows=1),
    ),
    anchors=4,
    anchor_tokens=512,
    checked=1,
)
QUICK = Size(
    loads=(Load(tokens=512, workflows=3), Load(tokens=2048, workflows=1)), anchors=3, anchor_tokens=512, checked=1
)


@dataclass(frozen=True, slots=True)
class _Prompt:
    agent: str
    ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    answer: tuple[int, ...]


class Workflows:
    """Makes the prompts of workflows, each with a document of its own."""

    def __init__(self, engine: Engine, folder: Path, *, seed: int) -> None:
        self._encode = engine.tokenizer.encode
        items = load_items(folder, 600, seed=seed, longest=10_000)
        self._text: Iterator[int] = iter(
            [token for item in items for token in self._encode(f"{item.question}\n{item.answer}\n\n")] * 20
        )

    def document(self, tokens: int) -> list[int]:
        """The next ``tokens`` tokens of maths problems and code, with their answers."""
        return [next(self._text) for _ in range(tokens)]

    def prompts(self, tokens: int) -> list[_Prompt]:
        """A workflow's four prompts."""
        document = self.document(tokens)
        answers: list[tuple[str, list[int]]] = []
        out = []
        for agent in AGENTS:
            out.append(self._prompt(agent, document, answers))
            answers.append((agent.name, list(out[-1].answer)))
        return out

    def _prompt(self, agent: Agent, document: list[int], answers: Sequence[tuple[str, list[int]]]) -> _Prompt:
        ids: list[int] = []
        segments: list[Segment] = []

        def add(part: Sequence[int], slot: str | None = None, producer: str | None = None) -> None:
            kind: Any = "private" if slot is None else "shared"
            segments.append(Segment(kind, len(ids), len(part), slot, producer))
            ids.extend(part)

        add(self._encode(f"<|im_start|>system\n{agent.instructions}<|im_end|>\n<|im_start|>user\n"))
        add(document, "document")
        for writer, answer in answers:
            add(self._encode(f"{agent.glue}{writer}: "))
            add(answer, f"answer of {writer}", writer)
        add(self._encode(f"<|im_end|>\n<|im_start|>assistant{agent.closing}"))
        return _Prompt(agent.name, tuple(ids), tuple(segments), tuple(self.document(ANSWER)))


def run_engine_bench(
    folder: Path,
    *,
    size: Size = STANDARD,
    model: str | None = None,
    methods: Sequence[str] = METHODS,
    seed: int = 1,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run all methods on one engine and give one JSON-ready result. ``say`` hears of progress.

    Raises UsageError when the data in ``folder`` is not there, and what an engine raises that cannot start.
    """
    longest = max(load.tokens for load in size.loads)
    pool = 4 * (longest + 1_000) + 4_000
    say("starting the engine")
    with EmbeddedEngine(model, max_total_tokens=pool, host_ratio=0.0) as engine:
        began = time.perf_counter()
        compared = [m for m in methods if m != METHODS[0]]
        rows = [row for method in compared for row in asyncio.run(_method(engine, folder, size, method, seed, say))]
        return {
            "title": "Time to first token with a document that four agents read",
            "model": engine.model,
            "size": asdict(size),
            "seed": seed,
            "seconds": time.perf_counter() - began,
            "rows": rows,
            "summary": summarise(rows, methods),
        }


async def _method(
    engine: EmbeddedEngine, folder: Path, size: Size, method: str, seed: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """All loads under one method: the same documents in the same order for each."""
    bench = _Bench(engine, Workflows(engine, folder, seed=seed), method, random.Random(seed))
    await engine.acontrol("configure", {"reset": True, "correction": {**bench.options, "check": 0.0}})
    rows: list[dict[str, Any]] = []
    for n in range(size.anchors):
        say(f"{method}: workflow {n + 1} of {size.anchors} to learn from")
        await bench.workflow(bench.made.prompts(size.anchor_tokens), method)
        await bench.settled()
    for load in size.loads * size.repetitions:
        say(f"{method}: documents of {load.tokens} tokens, {_pace(load)}")
        flows = [bench.made.prompts(load.tokens) for _ in range(load.workflows)]
        starts = bench.starts(load)
        for name in (METHODS[0], method):
            await bench.empty()
            rows += [{"beside": method, **row} for row in await bench.load(load, flows, starts, name)]
    for tokens in dict.fromkeys(load.tokens for load in size.loads):
        say(f"{method}: quality at {tokens} tokens")
        await bench.empty()
        rows.append(await bench.quality(tokens, size.checked))
    return rows


class _Bench:
    """One method on the engine."""

    def __init__(self, engine: EmbeddedEngine, made: Workflows, method: str, rng: random.Random) -> None:
        self.engine = engine
        self.made = made
        self.method = method
        self.rng = rng
        self.number = 0
        self.options: dict[str, Any] = {
            "method": method,
            "check_tokens": 1 << 20,
            "enforce": False,
            "corrector": {"pool_bytes": POOL_BYTES},
        }

    async def workflow(self, prompts: Sequence[_Prompt], method: str) -> list[dict[str, Any]]:
        """One workflow's calls, in order, by the bench's method or by none."""
        self.number += 1
        name = f"{method}-{self.number}"
        extra = 0.0
        out = []
        for place, prompt in enumerate(prompts):
            if place == 1 and method in _CONTEXT_FREE:
                extra = await self.reference(name, prompt)
            out.append(await self.call(name, method, prompt, place, extra if place == 1 else 0.0))
        self.engine.emit(WorkflowEnded(workflow=name, seq=1, time=time.time()))
        return out

    async def reference(self, name: str, prompt: _Prompt) -> float:
        """Prefill the document alone; the seconds it took."""
        segment = next(s for s in prompt.segments if s.slot == "document")
        began = time.perf_counter()
        await self.engine.agenerate(
            Call(
                token_ids=prompt.ids[segment.start : segment.start + segment.length],
                segments=(Segment("shared", 0, segment.length, segment.slot),),
                at=Coordinates(workflow=name, agent="reference"),
                sampling=Sampling(max_tokens=1, ignore_eos=True),
                reuse="corrected",
            )
        )
        return time.perf_counter() - began

    async def call(self, name: str, method: str, prompt: _Prompt, place: int, extra: float) -> dict[str, Any]:
        reuse: Reuse = "exact" if method == METHODS[0] else "corrected"
        asked = Call(
            token_ids=prompt.ids,
            segments=prompt.segments,
            at=Coordinates(workflow=name, agent=prompt.agent),
            sampling=Sampling(max_tokens=ANSWER, forced_tokens=prompt.answer),
            reuse=reuse,
        )
        async for chunk in self.engine.astream(asked):  # only a stream shows when the first token came
            done = chunk.completion
        assert done is not None
        terms: Mapping[str, float] = next((d.terms for d in done.decisions if d.kind == "correct"), {})
        return {
            "method": method,
            "workflow": self.number,
            "place": place,
            "ttft": done.timings.first_token + extra,
            "queue": done.timings.queue,
            "reference": extra,
            "estimating": terms.get("seconds", 0.0),
            "prompt": done.usage.prompt_tokens,
            "cached": done.usage.cached_device,
            "corrected": done.usage.corrected,
            "shared": sum(s.length for s in prompt.segments if s.kind == "shared"),
        }

    def starts(self, load: Load) -> list[float] | None:
        """Seconds after the beginning at which a load's workflows start; None for one after another."""
        if load.gap is None:
            return None
        gaps = [self.rng.expovariate(1 / load.gap) for _ in range(load.workflows - 1)]
        return list(accumulate(gaps, initial=0.0))

    async def load(
        self, load: Load, flows: Sequence[Sequence[_Prompt]], starts: Sequence[float] | None, method: str
    ) -> list[dict[str, Any]]:
        """All workflows of a load, at its pace."""
        rows: list[dict[str, Any]] = []
        running: list[asyncio.Task[list[dict[str, Any]]]] = []
        began = time.perf_counter()
        for number, prompts in enumerate(flows):
            if starts is None:
                rows += await self.workflow(prompts, method)
                continue
            await asyncio.sleep(max(0.0, began + starts[number] - time.perf_counter()))
            running.append(asyncio.create_task(self.workflow(prompts, method)))
        for task in running:
            rows += await task
        return [{"kind": "call", "tokens": load.tokens, "gap": load.gap, **row} for row in rows]

    async def quality(self, tokens: int, workflows: int) -> dict[str, Any]:
        """Mean KL and agreement over the tokens of the answers of corrected calls."""
        await self.check(1.0)
        for _ in range(workflows):
            await self.workflow(self.made.prompts(tokens), self.method)
        found = await self.settled()
        await self.check(0.0)
        kept = {k: found[k] for k in ("checks", "kl", "agreement")}
        return {"kind": "quality", "method": self.method, "tokens": tokens, **kept}

    async def empty(self) -> None:
        """Empty the radix cache, once the last call has left the scheduler."""
        deadline = time.monotonic() + 30
        while True:
            try:
                await self.engine.acontrol("flush", {})
                return
            except EngineFailure as error:
                if "is busy" not in str(error) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)

    async def check(self, share: float) -> None:
        await self.engine.acontrol("configure", {"reset": False, "correction": {**self.options, "check": share}})

    async def settled(self) -> dict[str, Any]:
        """Wait until anchors are made and checks are done; what the engine says of corrections."""
        while True:
            found = dict((await self.engine.astats()).details["correction"])
            if not found["work_left"] and not found["checks_waiting"]:
                return found
            await asyncio.sleep(0.1)


def _pace(load: Load) -> str:
    return "one workflow after another" if load.gap is None else f"a workflow every {load.gap:g} s"
