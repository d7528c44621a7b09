"""A cache alone: the calls of a trace one after another, without time, in pages of one size on one tier.

What policies keep decides here and nothing else, and what is possible at best is known: :func:`most_hits`.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from agentflow.bench.simulator.content import Links
from agentflow.bench.simulator.future import nominal_order
from agentflow.bench.simulator.informed import informed
from agentflow.bench.simulator.run import ORACLE, request_id
from agentflow.bench.traces.model import Trace, TraceCall, TraceWorkflow
from agentflow.cache.leaves import Leaves, Scoring
from agentflow.cache.ledger import NodeRecord
from agentflow.cache.policy import CallArrived, CallFinished, PolicySpec, Touched, spec_name
from agentflow.errors import UsageError
from agentflow.events import (
    AgentEnded,
    AgentStarted,
    StateSuperseded,
    ToolEnded,
    ToolStarted,
    WorkflowEnded,
    WorkflowStarted,
)
from agentflow.runtime import Runtime

__all__ = ["CacheReplay", "cache_replay", "most_hits"]

#: The number of a page: two pages have the same one if they hold the same tokens after the same tokens.
Page = int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReplay:
    """Pages of prompts that were there, of all; calls that were ``skipped`` did not fit into the cache alone."""

    policy: str
    hit_pages: int
    prompt_pages: int
    evicted_pages: int
    calls: int
    skipped: int
    page: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' pages that were there."""
        return self.hit_pages / self.prompt_pages if self.prompt_pages else 0.0


@dataclass(slots=True)
class _Step:
    """One call: its path of pages, of which the first ``prompt`` are its prompt's."""

    time: float
    workflow: TraceWorkflow
    call: TraceCall
    path: array[Page]
    prompt: int


def cache_replay(trace: Trace, policy: PolicySpec | Sequence[PolicySpec], capacity: int, page: int = 16) -> CacheReplay:
    """Replay a trace on a cache of ``capacity`` tokens in pages of ``page`` tokens.

    Calls come in nominal order (as if none took time) and are served at once, one after another; the clock of the
    policies shows the nominal time. Only whole pages are cached, a page only together with all before it, and a
    call's whole path, answer included, must fit while it is served. A prompt that is cached to its end counts
    as a hit to its end. Raises :class:`~agentflow.errors.UsageError` for a capacity below one page.
    """
    specs: list[PolicySpec] = [policy] if isinstance(policy, str | dict) else list(policy)
    return _Replay(trace, informed(specs, trace), capacity, page).run()


def most_hits(trace: Trace, capacity: int, page: int = 16) -> CacheReplay:
    """The most hits that any policy can have in :func:`cache_replay`, without running one.

    For each page, keeping it from one use to the next one earns a hit if that reads it as part of a prompt. The
    largest set of such intervals that fits at every call is found by dropping the latest end where too many
    overlap (see :class:`agentflow.cache.baselines.oracle.Belady`). That a page is of use only with all before it
    is not asked for here, so this bounds all policies, and the oracle reaches it on traces in which no answer is
    written twice after the same prompt. O(n log n) in the pages of all calls.
    """
    pages = _capacity(capacity, page)
    steps, skipped = _steps(trace, pages, page)
    # A use is a call's number, doubled, and one more if it reads the page as part of its prompt.
    ahead: dict[Page, int] = {}
    following: list[array[int]] = []
    for number in range(len(steps) - 1, -1, -1):
        step = steps[number]
        following.append(array("q", (ahead.get(p, 0) for p in step.path)))
        for place, p in enumerate(step.path):
            ahead[p] = 2 * number + (place < step.prompt)
    following.reverse()
    hits = dropped = across = 0
    kept: list[int] = []  # ends of kept intervals, negated so that the latest comes first; past ones may linger
    ending = [0] * len(steps)
    for number, step in enumerate(steps):
        hits += ending[number]
        across -= ending[number]
        while across > pages - len(step.path):
            ending[-heapq.heappop(kept)] -= 1
            across -= 1
            dropped += 1
        if len(kept) > 1_000 + 2 * across:
            kept = [end for end in kept if -end > number]
            heapq.heapify(kept)
        for use in following[number]:
            if use & 1:
                heapq.heappush(kept, -(use >> 1))
                ending[use >> 1] += 1
                across += 1
    prompts = sum(s.prompt for s in steps)
    return CacheReplay(
        policy="most_hits",
        hit_pages=hits,
        prompt_pages=prompts,
        evicted_pages=dropped,
        calls=len(steps),
        skipped=skipped,
        page=page,
    )


def _capacity(capacity: int, page: int) -> int:
    if page < 1 or capacity < page:
        raise UsageError(f"a cache of {capacity} tokens holds no page of {page}")
    return capacity // page


def _steps(trace: Trace, pages: int, page: int) -> tuple[list[_Step], int]:
    """The calls whose paths fit, in nominal order, and how many do not."""
    links = Links()
    numbers: dict[tuple[int, int], Page] = {}  # by the link of the span that holds its last token, and its place
    steps: list[_Step] = []
    skipped = 0
    for time, workflow, call in nominal_order(trace):
        content = links.content(call.prompt, call.output)
        links_there = (content.links[bisect_left(content.ends, (k + 1) * page)] for k in range(content.tokens // page))
        path = array("q", (numbers.setdefault(p, len(numbers)) for p in zip(links_there, count(), strict=False)))
        if len(path) > pages:
            skipped += 1
        else:
            steps.append(_Step(time, workflow, call, path, call.prompt_tokens // page))
    return steps, skipped


class _PageFuture:
    """The oracle's knowledge: per page its uses, the next one last, encoded as in :func:`most_hits`."""

    def __init__(self, steps: Sequence[_Step], pages: dict[int, Page]) -> None:
        self.now = -1
        self._pages = pages
        self._uses: dict[Page, array[int]] = {}
        for number in range(len(steps) - 1, -1, -1):
            for place, p in enumerate(steps[number].path):
                uses = self._uses.get(p)
                if uses is None:
                    uses = self._uses[p] = array("q")
                uses.append(2 * number + (place < steps[number].prompt))

    def next_use(self, node: NodeRecord) -> float:
        """A page that is written anew before it is read is not needed."""
        uses = self._uses[self._pages[node.id]]
        while uses and uses[-1] >> 1 <= self.now:
            uses.pop()
        return float(uses[-1] >> 1) if uses and uses[-1] & 1 else math.inf


class _Node:
    __slots__ = ("children", "held", "page", "parent", "recency", "record")

    def __init__(self, page: Page, parent: _Node | None, record: NodeRecord) -> None:
        self.page = page
        self.parent = parent
        self.record = record
        self.children = 0
        self.held = False
        self.recency = 0.0


class _Replay:
    def __init__(self, trace: Trace, policies: Sequence[PolicySpec], capacity: int, page: int) -> None:
        self.page = page
        self.capacity = _capacity(capacity, page)
        self.steps, self.skipped = _steps(trace, self.capacity, page)
        self.now = 0.0
        self._pages: dict[int, Page] = {}
        self._future: _PageFuture | None = None
        specs = list(policies)
        if any(spec_name(p) == ORACLE for p in specs):
            self._future = _PageFuture(self.steps, self._pages)
            specs = [{"name": ORACLE, "future": self._future} if spec_name(p) == ORACLE else p for p in specs]
        self.runtime = Runtime(specs, clock=lambda: self.now, log_limit=16)
        runtime = self.runtime
        scoring = Scoring.ALWAYS
        if not runtime.ranks_nodes:
            scoring = Scoring.RECENCY
        elif runtime.scores_by_owner:
            scoring = Scoring.BY_OWNER
        self.leaves = Leaves(lambda r: runtime.score_node(r, 0.0)[:-1], scoring, clock=runtime.clock)
        self.nodes: dict[Page, _Node] = {}
        self.by_id: dict[int, _Node] = {}
        self.tick = 0.0
        self.last_id = 0
        self.evicted = 0
        self._seqs: dict[str, int] = {}

    def run(self) -> CacheReplay:
        left: dict[str, int] = {}
        for step in self.steps:
            left[step.workflow.id] = left.get(step.workflow.id, 0) + 1
        events = self._tool_events()
        hits = 0
        for number, step in enumerate(self.steps):
            while events and events[0][0] <= step.time:
                at, _, kind, workflow, fields = heapq.heappop(events)
                self.now = at
                self._tell(kind, workflow, **fields)
            self.now = step.time
            if self._future is not None:
                self._future.now = number
            if step.workflow.id not in self._seqs:
                self._tell(WorkflowStarted, step.workflow, graph=step.workflow.graph, tenant=step.workflow.tenant)
            self._tell(AgentStarted, step.workflow, agent=step.call.agent)
            hits += self._serve(step)
            self._tell(AgentEnded, step.workflow, agent=step.call.agent)
            if step.call.superseded:
                rid = request_id(step.workflow.id, step.call.id)
                self._tell(StateSuperseded, step.workflow, agent=step.call.agent, request=rid)
            left[step.workflow.id] -= 1
            if not left[step.workflow.id]:
                self._tell(WorkflowEnded, step.workflow)
        return CacheReplay(
            policy=self.runtime.name,
            hit_pages=hits,
            prompt_pages=sum(s.prompt for s in self.steps),
            evicted_pages=self.evicted,
            calls=len(self.steps),
            skipped=self.skipped,
            page=self.page,
        )

    def _serve(self, step: _Step) -> int:
        runtime = self.runtime
        rid = request_id(step.workflow.id, step.call.id)
        call = runtime.call(step.workflow.id, step.call.agent, step.call.branch, rid)
        self.leaves.changed(step.workflow.id)
        watches = runtime.watches_nodes
        if watches:
            runtime.observe(CallArrived(rid, call, step.call.prompt_tokens))
        found = 0
        path: list[_Node] = []
        for page in step.path:
            node = self.nodes.get(page)
            if node is None:
                break
            node.held = True
            self.leaves.discard(node.record)
            path.append(node)
            found += 1
        self._make_room(len(step.path) - found)
        for page in step.path[found:]:
            path.append(self._add(page, path[-1] if path else None))
        self.tick += len(path) + 1
        for depth, node in enumerate(path):
            node.recency = self.tick - depth  # as in SGLang a leaf is older than what is above it by a hair
            runtime.ledger.touch(node.record, call)
            if watches:
                runtime.observe(Touched(node.record, call))
            node.held = False
        if watches:
            hits = min(found, step.prompt) * self.page
            runtime.observe(CallFinished(rid, call, step.call.prompt_tokens, hits, step.call.output_tokens))
        self.leaves.changed(step.workflow.id)
        if path and not path[-1].children:
            self.leaves.add(path[-1].record, path[-1].recency)
        return min(found, step.prompt)

    def _add(self, page: Page, parent: _Node | None) -> _Node:
        self.last_id += 1
        record = NodeRecord(self.last_id, self.page, self.now)
        record.path_hash = page
        node = self.nodes[page] = self.by_id[record.id] = _Node(page, parent, record)
        self._pages[record.id] = page
        node.held = True
        if parent is not None:
            parent.children += 1
        return node

    def _make_room(self, pages: int) -> None:
        short = len(self.nodes) + pages - self.capacity
        if short <= 0:
            return
        self.leaves.start()
        for _ in range(short):
            record = self.leaves.pop()
            if record is None:
                raise RuntimeError("a path that fits the cache found nothing to evict")
            node = self.by_id.pop(record.id)
            del self.nodes[node.page]
            self.evicted += 1
            self.runtime.evicted(record, "evict", request=None)
            del self._pages[record.id]
            parent = node.parent
            if parent is not None:
                parent.children -= 1
                if not parent.children and not parent.held:
                    self.leaves.add(parent.record, parent.recency)

    def _tell(self, kind: Any, workflow: TraceWorkflow, **fields: Any) -> None:
        seq = self._seqs[workflow.id] = self._seqs.get(workflow.id, 0) + 1
        self.runtime.observe(kind(workflow=workflow.id, seq=seq, time=self.now, **fields))
        self.leaves.changed(workflow.id)

    def _tool_events(self) -> list[tuple[float, int, Any, TraceWorkflow, dict[str, Any]]]:
        events: list[tuple[float, int, Any, TraceWorkflow, dict[str, Any]]] = []
        for step in self.steps:
            ready = step.time - step.call.delay
            for number, tool in enumerate(step.call.tools):
                fields = {"tool": tool.name, "call_id": f"{step.call.id}/{number}", "agent": step.call.agent}
                begin = min(ready + tool.start, step.time)
                end = min(begin + tool.duration, step.time)
                outcome = tool.outcome if tool.outcome in ("ok", "error", "timeout", "cancelled") else "error"
                events.append((begin, len(events), ToolStarted, step.workflow, fields))
                last = {**fields, "duration": tool.duration, "outcome": outcome}
                events.append((end, len(events), ToolEnded, step.workflow, last))
        heapq.heapify(events)
        return events
