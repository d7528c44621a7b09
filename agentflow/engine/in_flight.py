"""Which calls run right now, by the place in a workflow they belong to, so that they can be stopped from outside.

A thread that waits for a call cannot be interrupted. Who learns that nobody wants its answer any more (a
cancelled run whose node is a plain function) stops the call itself, with :func:`abort_calls`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from agentflow.engine.base import Call, Engine

__all__ = ["abort_calls", "calls_in_flight", "tracked"]

_lock = threading.Lock()
_running: dict[str, tuple[Engine, Call]] = {}


@contextmanager
def tracked(engine: Engine, call: Call) -> Iterator[None]:
    """Note that ``call`` runs on ``engine`` while this is open."""
    with _lock:
        _running[call.request_id] = (engine, call)
    try:
        yield
    finally:
        with _lock:
            _running.pop(call.request_id, None)


def calls_in_flight(workflow: str, *, agent: str | None = None, branch: str | None = None) -> list[Call]:
    """Calls of a workflow that run now; with ``agent`` or ``branch``, only theirs."""
    return [call for _, call in _matching(workflow, agent, branch)]


def abort_calls(workflow: str, *, agent: str | None = None, branch: str | None = None) -> int:
    """Abort the calls of a workflow that run now, and say how many there were."""
    found = _matching(workflow, agent, branch)
    for engine, call in found:
        engine.abort(call.request_id)
    return len(found)


def _matching(workflow: str, agent: str | None, branch: str | None) -> list[tuple[Engine, Call]]:
    with _lock:
        return [
            (engine, call)
            for engine, call in _running.values()
            if call.at.workflow == workflow
            and (agent is None or call.at.agent == agent)
            and (branch is None or call.at.branch == branch)
        ]
