"""What happened when, for plots: calls, workflows, decisions, and who held the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentflow.bench.simulator.result import CallResult

if TYPE_CHECKING:
    from agentflow.bench.simulator.engine import Engine

__all__ = ["Timeline"]


class Timeline:
    """Collects rows, each with ``time`` in seconds, ``kind`` and ``engine``:

    - ``workflow_started`` and ``workflow_ended`` with ``workflow``;
    - ``call`` with its workflow, agent, tokens, and the times ``arrived``, ``admitted``, ``first_token``, ``finished``;
    - ``memory``: device tokens ``free``, ``private`` to running requests, ``locked`` and evictable in the tree, those
      ``live`` and ``retired``, ``host`` tokens, requests ``running`` and ``waiting``, and ``owners``, tokens by the
      workflow that used a node last;
    - ``decision`` with the decision as JSON.

    A memory row costs O(nodes).
    """

    def __init__(self, sample_seconds: float) -> None:
        self.sample_seconds = sample_seconds
        self._rows: list[dict[str, Any]] = []
        self._next = 0.0

    def add(self, time: float, kind: str, engine: int, **fields: Any) -> None:
        """Append a row."""
        self._rows.append({"time": time, "kind": kind, "engine": engine, **fields})

    def call(self, call: CallResult) -> None:
        """Append a finished call."""
        self.add(
            call.finished,
            "call",
            call.engine,
            workflow=call.workflow,
            call=call.call,
            agent=call.agent,
            outcome=call.outcome,
            arrived=call.arrived,
            admitted=call.admitted,
            first_token=call.first_token,
            finished=call.finished,
            prompt_tokens=call.prompt_tokens,
            cached_device=call.cached_device,
            cached_host=call.cached_host,
            output_tokens=call.output_tokens,
        )

    def due(self, now: float) -> bool:
        """Whether the next sample of memory is due."""
        return now >= self._next

    def sample(self, now: float, engines: Sequence[Engine]) -> None:
        """Append the state of every engine's memory."""
        self._next = now + self.sample_seconds
        for number, engine in enumerate(engines):
            tree, ledger = engine.tree, engine.runtime.ledger
            owners: dict[str, int] = {}
            retired = 0
            for node in tree.nodes.values():
                if not node.device:
                    continue
                last = next(reversed(node.record.owners), None) if node.record.owners else None
                name = last.workflow.id if last is not None else ""
                owners[name] = owners.get(name, 0) + node.tokens
                if not node.lock and not ledger.is_live(node.record):
                    retired += node.tokens
            held = tree.evictable + tree.protected
            self.add(
                now,
                "memory",
                number,
                free=tree.free,
                private=tree.spec.pool_tokens - tree.free - held,
                locked=tree.protected,
                live=tree.evictable - retired,
                retired=retired,
                host=tree.spec.host_tokens - tree.host_free,
                running=len(engine.running),
                waiting=len(engine.waiting),
                owners=owners,
            )

    def rows(self, engines: Sequence[Engine]) -> list[dict[str, Any]]:
        """All rows in order of time, the engines' decisions among them."""
        for number, engine in enumerate(engines):
            for decision in engine.runtime.log.since(0):
                self.add(decision.time, "decision", number, decision=decision.to_json())
        return sorted(self._rows, key=lambda row: row["time"])
