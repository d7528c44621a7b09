"""Our control methods on SGLang's HTTP server, as ``POST /agentflow/<method>``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentflow.engine.sglang import control
from agentflow.errors import EngineFailure

__all__ = ["hooks"]


def hooks() -> dict[str, Callable[..., Any]]:
    """AROUND hooks by the dotted path of what they wrap."""
    return {"sglang.srt.entrypoints.http_server._setup_and_run_http_server": with_routes}


def with_routes(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Add the routes to the app just before it starts to serve."""
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints import http_server

    async def handle(method: str, request: Request) -> JSONResponse:
        if method not in control.METHODS:
            return JSONResponse({"error": f"unknown method {method[:40]!r}"}, status_code=404)
        try:
            body = await request.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return JSONResponse({"error": "the body must be a JSON object"}, status_code=400)
        manager = http_server.get_global_state().tokenizer_manager
        try:
            replies = await control.call(manager, method, body)
        except EngineFailure as error:
            return JSONResponse({"error": str(error)}, status_code=409)
        return JSONResponse({"replies": replies})

    # The types live in this function, so the annotations must be given as objects.
    handle.__annotations__ = {"method": str, "request": Request}
    http_server.app.add_api_route("/agentflow/{method}", handle, methods=["POST"], response_model=None)
    return original(*args, **kwargs)
