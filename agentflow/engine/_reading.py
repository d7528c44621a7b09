"""The answer of an SGLang server, put together from the messages it comes in."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from agentflow.engine._server import TransientError
from agentflow.engine.base import Call, Chunk, Completion, Timings
from agentflow.engine.sglang import wire
from agentflow.engine.sglang.requests import finish_of, usage_of
from agentflow.errors import RemoteError

__all__ = ["Reading", "following"]


class Reading:
    """Puts the messages of one answer together."""

    def __init__(self, call: Call, model: str, *, incremental: bool) -> None:
        self.done = False
        self.ids: list[int] = []
        self._text = ""
        self._call = call
        self._model = model
        self._incremental = incremental
        self._begun = time.perf_counter()
        self._first = 0.0

    def take(self, message: Mapping[str, Any]) -> Chunk:
        """What is new in ``message``; with the completion when the answer is over."""
        try:
            meta, text, ids = message["meta_info"], message["text"], message["output_ids"]
        except (KeyError, TypeError) as error:
            raise RemoteError(f"the server's answer cannot be read: no {error}") from error
        if not self._incremental:
            text, ids = text[len(self._text) :], ids[len(self.ids) :]
        self._text += text
        self.ids += ids
        now = time.perf_counter() - self._begun
        came_at_once = not self._first
        if self.ids:
            self._first = self._first or now
        if meta["finish_reason"] is None:
            return Chunk(text=text, token_ids=tuple(ids))
        self.done = True
        reply = wire.reply_of(meta)
        first = reply.first_seconds or self._first if came_at_once else self._first
        completion = Completion(
            request_id=self._call.request_id,
            text=self._text,
            token_ids=tuple(self.ids),
            finish=finish_of(meta),
            usage=usage_of(meta),
            timings=Timings(queue=reply.queue_seconds, first_token=first, total=now),
            decisions=reply.decisions,
            model=self._model,
        )
        return Chunk(text=text, token_ids=tuple(ids), completion=completion)


async def following(source: AsyncGenerator[dict[str, Any], None], reading: Reading | None) -> dict[str, Any]:
    """The next message. Once tokens have come, a lost connection is final."""
    try:
        return await anext(source)
    except StopAsyncIteration:
        error: RemoteError = TransientError("the server closed the connection before its answer was complete")
    except TransientError as lost:
        error = lost
    if reading is None:
        raise error
    raise RemoteError(
        f"{error}; the answer had {len(reading.ids)} tokens by then and was not tried again", status=error.status
    ) from error
