"""SGLang's Engine, started faster where that is safe.

SGLang spawns its scheduler and detokenizer, and each imports everything anew. On a CPU they can be forked from
the process that has just imported it all, which takes about half the time. With an accelerator they are
spawned: its driver does not survive a fork.
"""

from __future__ import annotations

import multiprocessing as mp
import signal
import socket
from typing import Any

__all__ = ["engine_class"]


def engine_class(*, fork: bool, unwanted: socket.socket) -> type:
    """The class to start. ``unwanted`` is a socket that forked children must not keep open."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
    from sglang.srt.managers.scheduler import run_scheduler_process

    if not fork:
        return Engine  # type: ignore[no-any-return]

    def scheduler(*args: Any, **kwargs: Any) -> None:
        _as_new(unwanted, "scheduler")
        run_scheduler_process(*args, **kwargs)

    def detokenizer(*args: Any, **kwargs: Any) -> None:
        _as_new(unwanted, "detokenizer")
        run_detokenizer_process(*args, **kwargs)

    class ForkingEngine(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(scheduler)
        run_detokenizer_process_func = staticmethod(detokenizer)

        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
            mp.set_start_method("fork", force=True)
            return super()._launch_scheduler_processes(*args, **kwargs)

    return ForkingEngine


def _as_new(unwanted: socket.socket, name: str) -> None:
    """Undo what a forked child inherited and a spawned one would not have."""
    from sglang.srt import plugins

    unwanted.close()
    plugins._plugins_loaded = False  # plugins do other things in a scheduler than in the main process
    mp.current_process().name = name
    for number in (signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
