"""The switch that keeps real engines out of a user's tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from agentflow.errors import RealEngineForbidden

__all__ = ["ENV_VAR", "check_real_engine_allowed", "forbid_real_engines", "real_engines_forbidden"]

#: Set to 1 to forbid real engines for a whole process.
ENV_VAR = "AGENTFLOW_FORBID_REAL_ENGINES"

_lock = threading.Lock()
_forbidden = 0


@contextmanager
def forbid_real_engines() -> Iterator[None]:
    """While it is open, starting or calling an embedded or remote engine raises ``RealEngineForbidden``.

    It holds for all threads of the process. Scripted engines go on working.
    """
    global _forbidden
    with _lock:
        _forbidden += 1
    try:
        yield
    finally:
        with _lock:
            _forbidden -= 1


def real_engines_forbidden() -> bool:
    """Whether :func:`forbid_real_engines` is open or the environment variable is set."""
    return _forbidden > 0 or os.environ.get(ENV_VAR, "").strip().lower() in ("1", "true", "yes", "on")


def check_real_engine_allowed() -> None:
    """Raise :class:`~agentflow.errors.RealEngineForbidden` when real engines are forbidden. Costs a microsecond."""
    if real_engines_forbidden():
        raise RealEngineForbidden(
            f"real engines are forbidden here (forbid_real_engines() or {ENV_VAR}=1): use ScriptedEngine in this test"
        )
