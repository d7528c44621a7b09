"""What the embedded engine checks and tells beside its calls."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from agentflow.engine.base import Call
from agentflow.errors import BadRequest, EngineTimeout, PlatformUnsupported

__all__ = ["Health", "check_ids", "check_platform", "time_limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How an engine is. ``round_trip`` is the time its scheduler took to answer, in seconds."""

    alive: bool
    detail: str
    round_trip: float | None = None
    host_pid: int | None = None
    children: Mapping[int, str] = field(default_factory=dict)
    calls_running: int = 0


@contextlib.asynccontextmanager
async def time_limit(call: Call) -> AsyncGenerator[None, None]:
    """Raise :class:`~agentflow.errors.EngineTimeout` when the body takes longer than the call allows."""
    try:
        async with asyncio.timeout(call.time_limit):
            yield
    except TimeoutError:
        raise EngineTimeout(
            f"call {call.request_id} had no complete answer within its time limit of {call.time_limit:g} seconds;"
            " it was aborted, and what it had computed stays in the cache"
        ) from None


def check_ids(ids: Sequence[int], vocab_size: int, where: str) -> None:
    """Raise :class:`~agentflow.errors.BadRequest` for ids that the model does not have."""
    # SGLang does not check them, and its scheduler dies of one that is out of range.
    try:
        low, high = (min(ids), max(ids)) if ids else (0, 0)
    except TypeError:
        raise BadRequest(f"{where} must hold token ids, which are integers") from None
    if not (isinstance(low, int) and isinstance(high, int) and low >= 0 and high < vocab_size):
        raise BadRequest(
            f"{where} holds token id {low if low < 0 else high}; the model has {vocab_size} tokens, from 0"
        )


def check_platform() -> None:
    """Raise :class:`~agentflow.errors.PlatformUnsupported` where the embedded engine cannot run."""
    if sys.platform != "linux":
        raise PlatformUnsupported(
            f"the embedded engine runs on Linux, and this is {sys.platform}: use RemoteEngine with a server on a Linux"
            " machine, or ScriptedEngine for tests"
        )
