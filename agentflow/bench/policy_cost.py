"""What policies cost: microseconds of ``observe`` and of a score, and the size of their state after many events.

``python -m agentflow.bench.policy_cost`` measures agentflow's own; ``--policy NAME`` (or ``module:Class``) others. The
load is a stream of workflows of eight agents and their calls, each with its events, touches of nodes and evictions.
A figure is the median over batches of the mean of a batch, in one thread of this process.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from agentflow.cache.ledger import NodeRecord
from agentflow.cache.policy import (
    CallArrived,
    CallFinished,
    Evicted,
    Observation,
    Policy,
    PolicySpec,
    PoolState,
    Touched,
    WaitingCall,
    spec_name,
)
from agentflow.events import AgentEnded, AgentStarted, Event, ToolEnded, ToolStarted, WorkflowEnded, WorkflowStarted
from agentflow.runtime import Runtime

__all__ = ["POLICIES", "Cost", "main", "measure", "size_of"]

#: The policies that the engine drives, and of the framework's those that observe events.
POLICIES = ("cachesage", "fairness", "shaping", "admission", "adapters", "safety", "speculation", "lifecycle")
#: Microseconds that are the aim.
OBSERVE_LIMIT, SCORE_LIMIT = 2.0, 5.0
_AGENTS = tuple(f"agent-{i}" for i in range(8))
_BATCH = 200


class Cost(NamedTuple):
    """Medians in microseconds; bytes of the policy's own state after ``events`` observations. None: it has none."""

    policy: str
    observe: float | None
    score_node: float | None
    score_call: float | None
    state_bytes: int
    events: int


class _Load:
    """Observations as an engine would give them, with the runtime's ledger kept up to date."""

    def __init__(self, runtime: Runtime, seed: int = 0) -> None:
        self.runtime = runtime
        self.rng = random.Random(seed)
        self.now = 0.0
        self.nodes = [NodeRecord(i, 100, 0.0) for i in range(512)]
        self.anchors = [NodeRecord(1_000 + i, 300, 0.0) for i in range(len(_AGENTS))]
        for key, node in enumerate(self.anchors):
            node.anchor = key + 1
        self.calls: list[WaitingCall] = []
        self._seq = 0
        self._flows = 0

    def observations(self) -> Iterator[Observation]:
        """For ever: workflows of four to eight steps, sixteen at once."""
        flows = [self._flow() for _ in range(16)]
        while True:
            i = self.rng.randrange(len(flows))
            found = next(flows[i], None)
            if found is None:
                flows[i] = self._flow()
                continue
            self.now += 0.001
            yield found

    def _flow(self) -> Iterator[Observation]:
        self._flows += 1
        name = f"w{self._flows}"
        tenant = f"tenant-{self._flows % 5}"
        yield self._event(WorkflowStarted, name, graph="g", tenant=tenant)
        for step in range(self.rng.randrange(4, 9)):
            agent = step if self.rng.random() < 0.8 else self.rng.randrange(len(_AGENTS))
            yield self._event(AgentStarted, name, agent=_AGENTS[agent])
            request = f"{name}-{step}"
            call = self.runtime.call(name, _AGENTS[agent], None, request)
            yield CallArrived(request, call, 600, agent + 1, 300)
            self.calls.append(WaitingCall(request, call, 600, 300, self.now, anchor=agent + 1))
            del self.calls[:-64]
            for node in (self.anchors[agent], *self.rng.sample(self.nodes, 2)):
                self.runtime.ledger.touch(node, call)
                yield Touched(node, call)
            yield PoolState(50_000, 1_000)
            yield CallFinished(request, call, 600, 300, 50)
            yield Evicted(self.rng.choice(self.nodes), "device")
            yield self._event(ToolStarted, name, tool="t", call_id=request)
            yield self._event(ToolEnded, name, tool="t", call_id=request, duration=0.1)
            yield self._event(AgentEnded, name, agent=_AGENTS[agent])
        yield self._event(WorkflowEnded, name)

    def _event(self, kind: type[Event], workflow: str, **fields: Any) -> Event:
        self._seq += 1
        event = kind(workflow=workflow, seq=self._seq, time=self.now, **fields)
        self.runtime.ledger.observe(event)
        return event


def measure(spec: PolicySpec, *, events: int = 1_000_000, samples: int = 400) -> Cost:
    """Cost of one policy. ``samples`` batches are timed, after which observations go on until there were ``events``."""
    clock = [0.0]
    runtime = Runtime([spec], clock=lambda: clock[0])
    policy = runtime.policies[0]
    load = _Load(runtime)
    stream = load.observations()
    taken = 0

    def feed(number: int) -> float:
        nonlocal taken
        batch = [next(stream) for _ in range(number)]
        clock[0] = load.now
        began = time.perf_counter_ns()
        for each in batch:
            policy.observe(each)
        spent = time.perf_counter_ns() - began
        taken += number
        policy.act()
        return spent / number / 1_000

    feed(20 * _BATCH)
    observed, nodes, calls = [], [], []
    for _ in range(samples):
        observed.append(feed(_BATCH))
        nodes.append(_timed(policy.score_node, [*load.anchors, *load.rng.sample(load.nodes, 56)]))
        calls.append(_timed(policy.score_call, load.calls))
    while taken < events:
        feed(min(2_000, events - taken))
    own = {k: v for k, v in vars(policy).items() if k not in ("ledger", "clock", "lock")}
    return Cost(
        policy=spec_name(spec),
        observe=statistics.median(observed) if _has(policy, "observe") else None,
        score_node=statistics.median(nodes) if _has(policy, "score_node") else None,
        score_call=statistics.median(calls) if _has(policy, "score_call") else None,
        state_bytes=size_of(own, {id(runtime.ledger), *map(id, runtime.ledger.workflows.values())}),
        events=taken,
    )


def _has(policy: Policy, method: str) -> bool:
    return getattr(type(policy), method) is not getattr(Policy, method)


def _timed(function: Callable[[Any], Any], items: Sequence[Any]) -> float:
    """Microseconds a call."""
    began = time.perf_counter_ns()
    for item in items:
        function(item)
    return (time.perf_counter_ns() - began) / max(1, len(items)) / 1_000


def size_of(thing: object, seen: set[int]) -> int:
    """Bytes of a thing and all that it holds, except what is in ``seen``."""
    todo, total = [thing], 0
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | Callable):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        if isinstance(each, dict):
            todo += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            todo += each
        elif hasattr(each, "__dict__"):
            todo.append(vars(each))
        todo += [getattr(each, slot) for slot in getattr(type(each), "__slots__", ()) if hasattr(each, slot)]
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or JSON. The exit code is 1 when a median is over its limit."""
    parser = argparse.ArgumentParser(prog="python -m agentflow.bench.policy_cost", description=__doc__)
    parser.add_argument("--policy", action="append", metavar="NAME", help="measure this one (again for more)")
    parser.add_argument(
        "--events", type=int, default=1_000_000, metavar="N", help="observations before the state is sized"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    costs = [measure(name, events=given.events) for name in given.policy or POLICIES]
    if given.json:
        sys.stdout.write(json.dumps([c._asdict() for c in costs]) + "\n")
    else:
        lines = [f"{'policy':<14}{'observe us':>12}{'score node us':>15}{'score call us':>15}{'state KB':>10}"]
        for c in costs:
            cells = "".join(
                f"{'-' if v is None else f'{v:.2f}':>{w}}"
                for v, w in ((c.observe, 12), (c.score_node, 15), (c.score_call, 15))
            )
            lines.append(f"{c.policy:<14}{cells}{c.state_bytes / 1_000:>10.1f}")
        lines.append(
            f"aims: observe {OBSERVE_LIMIT:g} us, scores {SCORE_LIMIT:g} us; state after {given.events:,} observations"
        )
        sys.stdout.write("\n".join(lines) + "\n")
    over = [
        c
        for c in costs
        if (c.observe or 0.0) > OBSERVE_LIMIT or max(c.score_node or 0.0, c.score_call or 0.0) > SCORE_LIMIT
    ]
    return int(bool(over))


if __name__ == "__main__":
    raise SystemExit(main())
