"""Predictors by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentflow.cache.pbkv.forecast import Predictor
from agentflow.cache.pbkv.learned import Rgcn, Sage
from agentflow.cache.pbkv.markov import Markov
from agentflow.cache.pbkv.simple import Oracle, Uniform
from agentflow.errors import UsageError

__all__ = ["make_predictor"]


def make_predictor(backbone: str, options: Mapping[str, Any]) -> Predictor:
    """A predictor by its name: ``sage`` and ``rgcn`` (trained, from a file), ``markov``, ``uniform`` or ``oracle``."""
    known: dict[str, Any] = {p.name: p for p in (Sage, Rgcn, Markov, Uniform, Oracle)}
    if backbone not in known:
        raise UsageError(f"unknown predictor {backbone!r}; known: {', '.join(sorted(known))}")
    predictor: Predictor = known[backbone](**options)
    return predictor
