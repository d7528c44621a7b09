"""Fixtures of the whole suite: one real engine a session, on a tiny random model.

The engine starts in the background while tests that need none run, and so does what else takes long by itself.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agentflow.errors import RealEngineForbidden

if TYPE_CHECKING:
    from agentflow.engine.embedded import EmbeddedEngine

# transformers imports sentencepiece where it is installed, and its extension module (0.2.1) crashes now and then while
# the interpreter ends, after all tests have passed. No test needs it.
sys.modules["sentencepiece"] = None  # type: ignore[assignment]

#: KV pool of the shared engine, in tokens: small, so that memory pressure is cheap to make.
POOL_TOKENS = 4096
#: The same of the engine with SGLang's own radix cache, and its host tier.
STOCK_POOL, STOCK_HOST = 2_000, 3_000
SCRIPTS = Path(__file__).parent / "engine" / "scripts"


def _start_engine() -> EmbeddedEngine:
    from agentflow.engine.embedded import EmbeddedEngine
    from agentflow.engine.models import random_model

    return EmbeddedEngine(random_model().path, max_total_tokens=POOL_TOKENS, host_ratio=2.0)


def _start_stock_engine() -> EmbeddedEngine:
    from agentflow.engine.embedded import EmbeddedEngine
    from agentflow.engine.models import random_model

    ratio = STOCK_HOST / STOCK_POOL
    return EmbeddedEngine(random_model().path, max_total_tokens=STOCK_POOL, host_ratio=ratio, stock_cache=True)


def _run_script(name: str) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, "-W", "error", SCRIPTS / name] if name == "lives.py" else [sys.executable, SCRIPTS / name]
    return subprocess.run(script, capture_output=True, text=True, timeout=400, check=False)


#: What takes long and is begun as soon as it is known that a test will want it: by the name of its fixture.
_JOBS: dict[str, Callable[[], Any]] = {
    "_shared_engine": _start_engine,
    "contract": partial(_run_script, "contract.py"),
    "stock_engine": _start_stock_engine,
    "lives": partial(_run_script, "lives.py"),
}
_worker = ThreadPoolExecutor(1)
_begun: dict[str, Future[Any]] = {}


def _result(name: str) -> Any:
    try:
        return _begun[name].result()
    except RealEngineForbidden:  # a test forbade engines just when it was to start
        return _JOBS[name]()


@pytest.fixture(scope="session")
def _shared_engine() -> Iterator[EmbeddedEngine]:
    with _result("_shared_engine") as engine:
        yield engine


@pytest.fixture(scope="session")
def stock_engine() -> Iterator[EmbeddedEngine]:
    """An engine with SGLang's own radix cache, its default LRU, and two tiers of STOCK_POOL and STOCK_HOST tokens."""
    with _result("stock_engine") as engine:
        yield engine


@pytest.fixture(scope="session")
def contract() -> subprocess.CompletedProcess[str]:
    """What ``scripts/contract.py`` said of the SGLang that is installed."""
    done: subprocess.CompletedProcess[str] = _result("contract")
    return done


@pytest.fixture(scope="session")
def lives() -> subprocess.CompletedProcess[str]:
    """What ``scripts/lives.py`` told of the lives of one engine."""
    done: subprocess.CompletedProcess[str] = _result("lives")
    return done


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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin what the tests that were chosen will wait for."""
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if not session.config.option.collectonly:
        _begun.update({name: _worker.submit(job) for name, job in _JOBS.items() if name in wanted})


def pytest_runtest_setup() -> None:
    """torch's threads wait for each other while the cores are busy with what began in the background: one is faster."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def pytest_unconfigure() -> None:
    """Nothing that was begun outlives the session, whoever waited for it."""
    _worker.shutdown(cancel_futures=True)
    for future in _begun.values():
        with contextlib.suppress(Exception, CancelledError):
            getattr(future.result(), "close", lambda: None)()
