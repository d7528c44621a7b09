"""Task level: three task agents and a reflector, every way against dense, and the reflector's answers scored.

Each task agent reads the question and writes; the reflector reads the question and what they wrote, and answers. The
question's KV goes from agent to agent (chained); an answer's KV is the one its author decoded. The task agents' texts
are held at what they write densely, so that the reflector's answers can be compared; over every text agreement is
teacher-forced, and the reflector also writes freely.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import comb
from typing import Any

import torch

from agentflow.bench.kvcmas.data import AGENTS, Agent, Item
from agentflow.bench.kvcmas.dense import DenseModel, joined
from agentflow.bench.kvcmas.measures import drift, interval
from agentflow.cache.kvcmas.corrector import Corrector
from agentflow.cache.kvcmas.rope import Rope
from agentflow.cache.kvcmas.types import Edge, Estimate, SegmentKV

__all__ = ["TASK_METHODS", "TaskSize", "run_tasks", "task_table"]

Row = dict[str, Any]

#: Name, and the corrector's settings.
TASK_METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("FullShared", {"method": "none"}),
    ("FullShared + first 15 %", {"method": "cacheblend"}),
    ("KVComm de-rotated", {"method": "kvcomm-derotated"}),
    ("segment (paper)", {"method": "segment"}),
    ("token-kernel", {"method": "token-kernel", "recompute": 0.0}),
    ("token-kernel + first 20 %", {"method": "token-kernel"}),
)
_LETTERS = "ABCD"
_SHOWN = (
    "kl",
    "agreement",
    "reflector kl",
    "reflector agreement",
    "same answer",
    "score",
    "same choice",
    "right choice",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSize:
    """``anchors`` tasks make the pool, ``tasks`` others are tested; each text has ``words`` tokens."""

    anchors: int = 6
    tasks: int = 16
    words: int = 32


@dataclass(slots=True)
class _Call:
    """One agent's prompt as it was computed: where its shared segments are, and how its text came out."""

    whole: SegmentKV
    segments: dict[str, SegmentKV] = field(default_factory=dict)
    logprobs: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    text: list[int] = field(default_factory=list)
    choice: int = -1


class _Workflow:
    def __init__(self, model: DenseModel, words: int) -> None:
        self.model = model
        self.words = words
        start = {a.name: f"<|im_start|>system\n{a.instructions}<|im_end|>\n<|im_start|>user\n" for a in AGENTS}
        self.prefix = {name: model.extend(None, model.ids(text)).kv for name, text in start.items()}
        self.closing = {a.name: model.ids(f"<|im_end|>\n<|im_start|>assistant{a.closing}") for a in AGENTS}
        self.glue = model.ids(AGENTS[-1].glue)
        self.between = [model.ids(f"\n\n{a.name} wrote:\n") for a in AGENTS[:-1]]
        self.letters = [model.ids(f" {letter}")[0] for letter in _LETTERS]

    @torch.inference_mode()
    def call(
        self, agent: Agent, parts: Sequence[tuple[str, list[int]]], give: Callable[..., Any], forced: list[int] | None
    ) -> _Call:
        """Compute an agent's prompt from its instructions and ``parts`` (slot, tokens), and its text.

        ``give(slot, agent, tokens, whole)`` returns an estimate of a slot's KV, or None to compute it. ``forced`` is
        the text to score; None writes it.
        """
        whole, out = self.prefix[agent.name], {}
        for slot, ids in parts:
            found = give(slot, agent, ids, whole) if slot else None
            if found is None:
                kv = self.model.extend(whole, ids).kv
            else:
                kv = self.model.read(whole, found.kv, ids, found.recompute).kv
            whole = joined(whole, kv)
            if slot:
                out[slot] = kv
        call = _Call(whole, out)
        closing = self.closing[agent.name]
        text = self.model.greedy(whole, closing, self.words) if forced is None else forced
        step = self.model.extend(whole, [*closing, *text], keep=len(text) + 1)
        call.text, call.logprobs = text, step.logprobs[:-1]
        call.segments["own"] = step.kv.part(len(closing), step.kv.tokens)
        return call

    def parts(self, agent: Agent, question: list[int], texts: Sequence[list[int]]) -> list[tuple[str, list[int]]]:
        """The question, and for the reflector what the others wrote."""
        out = [("question", question)]
        if agent is AGENTS[-1]:
            out.append(("", self.glue))
            for n, (between, text) in enumerate(zip(self.between, texts, strict=True)):
                out += [("", between), (f"text {n}", text)]
        return out

    @torch.inference_mode()
    def choose(self, call: _Call, options: Sequence[str]) -> int:
        """Which letter the reflector finds most likely when it is shown ``options``."""
        listed = "".join(f"\n{letter}) {text}" for letter, text in zip(_LETTERS, options, strict=True))
        ids = self.model.ids(f"\n\nChoose one:{listed}\nThe letter of the right answer is")
        found = self.model.extend(call.whole, ids).logprobs[-1, self.letters]
        return int(found.argmax())


def run_tasks(model: DenseModel, items: Sequence[Item], size: TaskSize, say: Callable[[str], None]) -> list[Row]:
    """A row for each task and method: drift over all later agents' texts, the final answer, its score."""
    flow, rope = _Workflow(model, size.words), Rope.of(model.config)
    correctors = {
        name: Corrector(rope, anchors=size.anchors, pool_bytes=1 << 40, **options) for name, options in TASK_METHODS
    }
    rows: list[Row] = []
    for n, item in enumerate(items[: size.anchors + size.tasks]):
        say(f"task {n + 1} of {size.anchors + size.tasks}")
        question = model.ids(item.question)
        dense: list[_Call] = []
        for agent in AGENTS:
            parts = flow.parts(agent, question, [c.text for c in dense])
            dense.append(flow.call(agent, parts, lambda *_: None, None))
        if n < size.anchors:
            for corrector in correctors.values():
                _learn(corrector, flow, question, dense)
            continue
        options, right = _options(item, n)
        picked = flow.choose(dense[-1], options)
        rows.append(_row(item, "dense", dense, dense, model, picked, picked, right))
        for name, corrector in correctors.items():
            again = [dense[0]]
            for agent in AGENTS[1:]:
                parts = flow.parts(agent, question, [c.text for c in dense[:-1]])
                give = _giver(corrector, again)
                again.append(flow.call(agent, parts, give, dense[len(again)].text))
            free = _Call(again[-1].whole, text=model.greedy(again[-1].whole, flow.closing[AGENTS[-1].name], size.words))
            mine = flow.choose(again[-1], options)
            row = _row(item, name, again, dense, model, mine, picked, right)
            row["score"] = _score(item, model, free.text)
            row["same answer"] = float(free.text == dense[-1].text)
            rows.append(row)
    return rows


def task_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each method: means over tasks with 95 % intervals, and ``p``, the two-sided sign test of whether its
    final answers' KL differs from FullShared's."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    unchanged = {r["item"]: r["reflector kl"] for r in by_method[TASK_METHODS[0][0]]}
    out = []
    for name, found in by_method.items():
        line: dict[str, Any] = {"method": name, "tasks": len(found)}
        for what in _SHOWN:
            line[what] = interval({r["item"]: [r[what]] for r in found})
        pairs = [(r["reflector kl"], unchanged[r["item"]]) for r in found]
        line["p"] = _sign_test(sum(a < b for a, b in pairs), sum(a > b for a, b in pairs))
        out.append(line)
    return out


def _sign_test(less: int, more: int) -> float:
    """Two-sided; ties are left out."""
    total, few = less + more, min(less, more)
    return min(1.0, float(2 * sum(comb(total, k) for k in range(few + 1))) / float(2**total))


def _giver(corrector: Corrector, before: Sequence[_Call]) -> Callable[..., Estimate | None]:
    """Estimates out of what the agents before have: the question from the last one, texts from their authors."""

    def give(slot: str, agent: Agent, ids: list[int], whole: SegmentKV) -> Estimate | None:
        author = int(slot.split()[1]) if slot.startswith("text") else len(before) - 1
        source = before[author].segments["own" if slot.startswith("text") else slot]
        found = corrector.estimate(Edge(slot, AGENTS[author].name, agent.name), ids, source, whole.tokens)
        return found if isinstance(found, Estimate) else None

    return give


def _learn(corrector: Corrector, flow: _Workflow, question: list[int], dense: Sequence[_Call]) -> None:
    last = dense[-1]
    samples = [
        (Edge("question", a.name, b.name), question, dense[n].segments["question"], dense[n + 1].segments["question"])
        for n, (a, b) in enumerate(pairwise(AGENTS))
    ]
    samples += [
        (Edge(f"text {n}", a.name, AGENTS[-1].name), call.text, call.segments["own"], last.segments[f"text {n}"])
        for n, (a, call) in enumerate(zip(AGENTS, dense[:-1], strict=False))
    ]
    for sample in samples:
        corrector.learn(*sample)
    corrector.work()


def _row(
    item: Item, name: str, calls: Sequence[_Call], dense: Sequence[_Call], model: DenseModel, *choices: int
) -> Row:
    mine, picked, right = choices
    apart = [drift(b.logprobs, a.logprobs) for a, b in zip(calls[1:], dense[1:], strict=True)]
    row: Row = {"item": item.name, "method": name}
    row["kl"] = sum(d.kl for d in apart) / len(apart)
    row["agreement"] = sum(d.agreement for d in apart) / len(apart)
    row["reflector kl"], row["reflector agreement"] = apart[-1].kl, apart[-1].agreement
    row["score"] = _score(item, model, dense[-1].text)
    row["same answer"] = 1.0
    row["same choice"], row["right choice"] = float(mine == picked), float(mine == right)
    return row


def _score(item: Item, model: DenseModel, text: list[int]) -> float:
    """Whether the last number of a maths answer is the right one; 0 for coding tasks, whose code is not run."""
    found = re.findall(r"-?\d[\d,]*", model.tokenizer.decode(text))
    wanted = re.findall(r"-?\d[\d,]*", item.answer)
    return float(bool(found and wanted) and item.name.startswith("gsm8k") and found[-1] == wanted[-1])


def _options(item: Item, seed: int) -> tuple[list[str], int]:
    """Four options, one of them right: numbers near the right one, or for code the function's name among others."""
    numbers = re.findall(r"\d+", item.answer)
    value = int(numbers[-1]) if numbers else 7
    texts = [str(value + more) for more in (0, 1 + seed % 3, 5, 10)]
    if not item.name.startswith("gsm8k"):
        name = item.answer.split("\n")[0].removeprefix("Tests for ").rstrip(":")
        texts = [name, name + "_all", "solve", "main"]
    shift = seed % 4
    return texts[-shift:] + texts[:-shift] if shift else texts, shift
