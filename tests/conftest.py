"""Fixtures of the whole suite: one real engine a session, on a tiny random model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from agentflow.engine.embedded import EmbeddedEngine

# transformers imports sentencepiece where it is installed, and its extension module (0.2.1) crashes now and then while
# the interpreter ends, after all tests have passed. No test needs it.
sys.modules["sentencepiece"] = None  # type: ignore[assignment]

#: KV pool of the shared engine, in tokens: small, so that memory pressure is cheap to make.
POOL_TOKENS = 4096


@pytest.fixture(scope="session")
def _shared_engine() -> Iterator[EmbeddedEngine]:
    from agentflow.engine.embedded import EmbeddedEngine
    from agentflow.engine.models import random_model

    with EmbeddedEngine(random_model().path, max_total_tokens=POOL_TOKENS, host_ratio=2.0) as engine:
        yield engine


@pytest.fixture
def engine(_shared_engine: EmbeddedEngine) -> EmbeddedEngine:
    """The session's engine on a tiny random model, its cache and counters empty, its policy ``lifecycle``."""
    _shared_engine.flush()
    _shared_engine.configure(policies=["lifecycle"], reset=True)
    return _shared_engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the engine; it runs last, so that quick failures come first."""
    for item in items:
        if "engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)
