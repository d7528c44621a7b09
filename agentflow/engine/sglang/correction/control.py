"""Correction in control requests: what ``configure`` changes and ``stats`` tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentflow.engine.sglang.correction.cache import CorrectingRadixCache
from agentflow.engine.sglang.correction.options import CorrectionOptions

__all__ = ["stats", "use", "wanted"]


def wanted(cache: Any, body: Mapping[str, Any]) -> CorrectionOptions | None:
    """The options that a ``configure`` request asks for, None to go on as before. Raises UsageError for bad ones.

    A reset without options goes back to those that the scheduler began with.
    """
    if not isinstance(cache, CorrectingRadixCache):
        return None
    given = body.get("correction")
    if given is not None:
        options = CorrectionOptions.read(given)
        cache.corrections.check(options)
        return options
    return CorrectionOptions.from_environment() if body.get("reset", True) else None


def use(cache: Any, options: CorrectionOptions | None, body: Mapping[str, Any]) -> None:
    """Go on with ``options``. What was learnt is forgotten, unless ``body`` asks for no reset and they only check more
    or less than before."""
    if options is not None and isinstance(cache, CorrectingRadixCache):
        cache.corrections.use(options, keep=not body.get("reset", True))


def stats(cache: Any) -> dict[str, Any]:
    """What ``EngineStats.details["correction"]`` says."""
    return cache.corrections.stats() if isinstance(cache, CorrectingRadixCache) else {}
