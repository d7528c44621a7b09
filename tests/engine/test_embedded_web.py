"""The embedded engine behind a FastAPI app: coroutine, plain and streaming endpoints at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from agentflow.engine.base import Call, Sampling
from agentflow.engine.embedded import EmbeddedEngine

fastapi = pytest.importorskip("fastapi")  # comes with SGLang


async def test_endpoints_of_all_kinds_at_once(engine: EmbeddedEngine) -> None:
    from fastapi.responses import StreamingResponse

    app = fastapi.FastAPI()

    def call() -> Call:
        return Call(
            token_ids=engine.tokenizer.encode("Tell me about foxes."),
            sampling=Sampling(max_tokens=8, ignore_eos=True, temperature=0.0),
        )

    wanted = (await engine.agenerate(call())).text

    @app.get("/coroutine")
    async def coroutine() -> str:
        return (await engine.agenerate(call())).text

    @app.get("/plain")
    def plain() -> str:
        return engine.generate(call()).text

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            async for chunk in engine.astream(call()):
                yield chunk.text

        return StreamingResponse(pieces())

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
        paths = ["/coroutine", "/plain", "/stream"] * 3
        answers = await asyncio.gather(*(client.get(path) for path in paths))
    for path, answer in zip(paths, answers, strict=True):
        assert answer.status_code == 200
        assert (answer.text if path == "/stream" else answer.json()) == wanted
