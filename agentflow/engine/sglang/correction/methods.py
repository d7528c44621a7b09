"""Correction methods by name, for one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentflow.cache.kvcmas import Correction
from agentflow.engine.sglang.correction.options import CorrectionOptions
from agentflow.errors import UsageError

__all__ = ["PRESETS", "make_corrector"]

#: Methods as they are compared: arguments of :class:`~agentflow.cache.kvcmas.corrector.Corrector`.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {"method": "token-kernel"},
    "fullshared": {"method": "none"},
    "cacheblend": {"method": "cacheblend"},
    "kvcomm": {"method": "kvcomm", "reference": "context-free"},
    "unchained": {"method": "token-kernel", "reference": "context-free"},
}


def make_corrector(options: CorrectionOptions, config: Any) -> Correction:
    """The corrector that ``options`` ask for, for the model of a transformers ``config``. Raises UsageError."""
    from agentflow.cache.kvcmas.corrector import Corrector
    from agentflow.cache.kvcmas.methods import METHODS
    from agentflow.cache.kvcmas.rope import Rope

    chosen = PRESETS.get(options.method) or ({"method": options.method} if options.method in METHODS else None)
    if chosen is None:
        known = ", ".join(sorted({*PRESETS, *METHODS, "nonshared"}))
        raise UsageError(f"no KV correction method {options.method!r}; known: {known}")
    try:
        return Corrector(Rope.of(config), **{**chosen, **options.corrector})
    except TypeError as error:
        raise UsageError(f"correction option corrector: {error}") from error
