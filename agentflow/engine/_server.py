"""HTTP to one SGLang server: JSON both ways, server-sent events, and which failures are worth another try."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from agentflow.engine.sglang.requests import request_error
from agentflow.errors import RemoteError

__all__ = ["Server", "TransientError"]

T = TypeVar("T")

#: Statuses of a server that is starting, overloaded, or behind a proxy that cannot reach it right now.
_TRANSIENT = frozenset({429, 502, 503, 504})
#: Longest wait that a server's ``Retry-After`` is followed for, in seconds.
_LONGEST_WAIT = 30.0


class TransientError(RemoteError):
    """A failure that may be gone on another try. ``retry_after`` is the wait the server asked for, in seconds."""

    def __init__(self, message: str, *, status: int = 0, retry_after: float = 0.0) -> None:
        super().__init__(message, status=status)
        self.retry_after = retry_after


class Server:
    """One server. All coroutines belong to one event loop.

    ``connect_limit`` is the time to reach it, in seconds; nothing here limits how long an answer takes.
    Failures come as :class:`~agentflow.errors.RemoteError`; a request that the server refuses as unusable
    comes as a :class:`~agentflow.errors.BadRequest`.
    """

    def __init__(
        self, url: str, *, api_key: str | None, headers: Mapping[str, str] | None, connect_limit: float, retries: int
    ) -> None:
        self.url = url.rstrip("/")
        self.retried = 0
        self._retries = retries
        sent = dict(headers or {})
        if api_key is not None:
            sent["Authorization"] = f"Bearer {api_key}"
        self._client = httpx.AsyncClient(
            headers=sent,
            timeout=httpx.Timeout(None, connect=connect_limit),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def get(self, path: str) -> Any:
        """The JSON at ``path``, or None for an empty answer."""
        return await self._json("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that answers ``body``, or None for an empty answer."""
        return await self._json("POST", path, body)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The messages of a streamed answer, one by one."""
        try:
            async with self._client.stream("POST", self.url + path, json=body) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise self._error(response)
                async for data in _event_data(response):
                    yield _message(data)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    async def with_retries(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do ``work``; after a :class:`TransientError` again, up to ``retries`` times, waiting longer each time."""
        back_off = wait_exponential_jitter(multiplier=0.1, max=5.0, jitter=0.1)

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome is not None else None
            asked = error.retry_after if isinstance(error, TransientError) else 0.0
            return max(back_off(state), min(asked, _LONGEST_WAIT))

        def count(state: RetryCallState) -> None:
            self.retried += 1

        async def attempt() -> T:
            return await work()

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(TransientError),
            stop=stop_after_attempt(self._retries + 1),
            wait=wait,
            before_sleep=count,
            reraise=True,
        )
        try:
            return await retrying(attempt)
        except TransientError as error:
            tries = f" ({self._retries + 1} tries)" if self._retries else ""
            raise RemoteError(f"{error}{tries}", status=error.status) from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            response = await self._client.request(method, self.url + path, json=body)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if response.status_code >= 400:
            raise self._error(response)
        if not response.content.strip():
            return None
        try:
            return response.json()
        except ValueError as error:
            raise RemoteError(f"{self.url}{path} answered with something that is no JSON") from error

    def _unreachable(self, error: httpx.TransportError) -> TransientError:
        what = (
            "cannot reach" if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) else "lost the connection to"
        )
        return TransientError(f"{what} the SGLang server at {self.url}: {str(error) or type(error).__name__}")

    def _error(self, response: httpx.Response) -> Exception:
        status = response.status_code
        text = _error_text(response)
        if status in _TRANSIENT:
            return TransientError(
                f"the SGLang server at {self.url} answered {status}: {text}",
                status=status,
                retry_after=_seconds(response.headers.get("retry-after")),
            )
        if status in (401, 403):
            return RemoteError(
                f"the SGLang server at {self.url} refused the key ({status}): give api_key=", status=status
            )
        if status in (400, 422):
            return request_error("ValueError", text)
        return RemoteError(
            f"the SGLang server at {self.url} answered {status} on {response.request.url.path}: {text}", status=status
        )


async def _event_data(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The ``data`` of each event. Lines end at a line feed only: JSON text may hold any other line separator."""
    held = b""
    async for piece in response.aiter_bytes():
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data
    if held.startswith(b"data:") and held[5:].strip() not in (b"", b"[DONE]"):
        raise TransientError("the server's stream ended in the middle of a message")


def _message(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except ValueError as error:
        raise RemoteError("the server's stream holds a message that is no JSON") from error
    if not isinstance(message, dict):
        raise RemoteError("the server's stream holds a message that is no JSON object")
    if (failure := message.get("error")) is not None:
        details = failure if isinstance(failure, dict) else {"message": str(failure)}
        text, code = str(details.get("message")), details.get("code")
        if code in _TRANSIENT:
            raise TransientError(f"the server answered {code}: {text}", status=code)
        if code in (None, 400):
            raise request_error("ValueError", text)
        raise RemoteError(f"the server answered {code}: {text}", status=code if isinstance(code, int) else 0)
    return message


def _error_text(response: httpx.Response) -> str:
    try:
        data = response.json()
    except ValueError:
        return response.text[:500]
    error = data.get("error", data.get("detail", data)) if isinstance(data, dict) else data
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)[:500]


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text)) if text is not None else 0.0
    except ValueError:
        return 0.0
