"""Options that are handed on to LangGraph: it drops those that it does not know, so they are looked at here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from agentflow.errors import UsageError

__all__ = ["refuse_unknown"]

#: Taken by LangGraph beside its signatures, under older names.
_DEPRECATED = frozenset({"retry", "input", "checkpoint_during"})


def refuse_unknown(options: Iterable[str], what: str, own: Callable[..., Any], langgraphs: Callable[..., Any]) -> None:
    """Raise :class:`~agentflow.errors.UsageError` for an option that neither ``own`` nor ``langgraphs`` takes."""
    known = _names(own) | _names(langgraphs)
    unknown = sorted(set(options) - known - _DEPRECATED)
    if not unknown:
        return
    near = difflib.get_close_matches(unknown[0], sorted(_names(own)), n=1) or difflib.get_close_matches(
        unknown[0], sorted(known), n=1
    )
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
    raise UsageError(f"{what} takes no {', '.join(map(repr, unknown))}: {hint}")


@cache
def _names(function: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)) - {"self"}
