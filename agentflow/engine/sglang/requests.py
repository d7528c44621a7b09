"""Calls in SGLang's words. Imports no SGLang: the remote engine and the embedded one both use it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentflow.engine.base import FinishReason, Sampling, Usage
from agentflow.engine.sglang import wire
from agentflow.engine.sglang.forced import PARAMETER
from agentflow.errors import BadRequest, BadSampling, EngineFailure

__all__ = ["finish_of", "request_error", "sampling_params", "usage_of"]


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """SGLang's ``sampling_params``. Forced tokens need our logit processor on the request besides."""
    out: dict[str, Any] = {"max_new_tokens": sampling.max_tokens, "temperature": sampling.temperature}
    if sampling.temperature > 0:
        out |= {"top_p": sampling.top_p, "top_k": sampling.top_k}
        if sampling.seed is not None:
            out["sampling_seed"] = sampling.seed
    if sampling.stop:
        out["stop"] = list(sampling.stop)
    if sampling.ignore_eos or sampling.forced_tokens is not None:
        out["ignore_eos"] = True
    if sampling.json_schema is not None:
        out["json_schema"] = json.dumps(sampling.json_schema, default=dict)
    if sampling.regex is not None:
        out["regex"] = sampling.regex
    if sampling.forced_tokens is not None:
        out["custom_params"] = {PARAMETER: list(sampling.forced_tokens)}
    return out


def usage_of(meta: Mapping[str, Any]) -> Usage:
    """Token counts of a finished request's ``meta_info``, cached ones by tier."""
    details = meta.get("cached_tokens_details") or {}
    cached = meta.get("cached_tokens") or 0
    host = details.get("host") or 0
    # What was corrected after a preemption is not in SGLang's counts either, which are those of the first prefill.
    corrected = [d.tokens for d in wire.reply_of(meta).decisions if d.kind == "correct" and "again" not in d.terms]
    return Usage(
        prompt_tokens=meta.get("prompt_tokens") or 0,
        completion_tokens=meta.get("completion_tokens") or 0,
        cached_device=details.get("device", cached - host) or 0,
        cached_host=host,
        corrected=corrected[-1] if corrected else 0,
    )


def finish_of(meta: Mapping[str, Any]) -> FinishReason:
    """Why a request ended. Raises what :func:`request_error` says for one that SGLang refused."""
    reason = meta.get("finish_reason") or {}
    kind = reason.get("type")
    if kind == "abort":
        status = reason.get("status_code")
        if status is not None:
            raise request_error("ValueError" if status == 400 else "HTTPException", str(reason.get("message")))
        return "abort"
    return "length" if kind == "length" else "stop"


def request_error(name: str, text: str) -> Exception:
    """The error for an exception ``name`` that SGLang raised for a request."""
    if name in ("ValueError", "TypeError"):
        lowered = text.lower()
        if any(word in lowered for word in ("grammar", "schema", "regex", "temperature", "top_p", "top_k")):
            return BadSampling(f"the engine refused the call: {text}")
        return BadRequest(f"the engine refused the call: {text}")
    return EngineFailure(f"the call failed in the engine: {name}: {text}")
