"""Round trips between the framework and the schedulers, outside of requests.

They travel as SGLang's ``dumper_control`` requests (a method name and a JSON body, answered by every
scheduler), which the plugin answers when the method begins with :data:`PREFIX`. A server started with the
plugin offers the same methods as ``POST /agentflow/<method>``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentflow.cache.decision import Decision
from agentflow.engine.base import EngineStats
from agentflow.errors import EngineFailure

__all__ = ["METHODS", "PREFIX", "call", "decisions", "stats"]

PREFIX = "agentflow."
#: Methods and the fields of their bodies: events {batch}, stats {}, decisions {since}, check {}, flush {},
#: hidden {requests, keep} (hidden states of the last tokens of prompts, kept from ``keep`` true until false), and
#: configure {policies, reset, audit, device_tokens, host_tokens, correction}: with ``reset`` the cache is emptied and
#: each tier may be limited to fewer tokens than it has; ``correction`` says how KV of shared segments is corrected.
METHODS = frozenset({"events", "stats", "decisions", "configure", "check", "flush", "hidden"})


async def call(tokenizer_manager: Any, method: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Ask every scheduler; one reply each, in rank order.

    Must run on the event loop of ``tokenizer_manager``. Raises :class:`~agentflow.errors.EngineFailure` when a
    scheduler refuses (for ``configure``: an unknown policy).
    """
    from sglang.srt.managers.io_struct import DumperControlReqInput

    results = await tokenizer_manager.dumper_control(DumperControlReqInput(method=PREFIX + method, body=dict(body)))
    replies: list[dict[str, Any]] = []
    for result in results:
        if not result.success:
            raise EngineFailure(f"the engine refused {method!r}: {result.error}")
        replies += result.response
    return replies


def stats(replies: Sequence[Mapping[str, Any]]) -> EngineStats:
    """The replies to ``stats`` as one snapshot, summed over data-parallel schedulers."""
    summed = (
        "running", "waiting", "device_total", "device_free", "device_cached", "device_held", "host_total", "host_free"
    )  # fmt: skip
    counters: dict[str, int] = {}
    for reply in replies:
        for name, value in reply.get("counters", {}).items():
            counters[name] = counters.get(name, 0) + value
    first = replies[0] if replies else {}
    return EngineStats(
        policy=first.get("policy", ""),
        workflows_live=max((r.get("workflows_live", 0) for r in replies), default=0),
        workflows_paused=max((r.get("workflows_paused", 0) for r in replies), default=0),
        counters=counters,
        details=first.get("details", {}),
        **{name: sum(r.get(name, 0) for r in replies) for name in summed},
    )


def decisions(replies: Sequence[Mapping[str, Any]]) -> list[Decision]:
    """The replies to ``decisions``, ordered by time."""
    out = [Decision.from_json(d) for reply in replies for d in reply.get("decisions", ())]
    out.sort(key=lambda d: (d.time, d.seq))
    return out
