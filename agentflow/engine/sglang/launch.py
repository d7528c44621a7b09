"""SGLang's Engine, started faster where that is safe.

SGLang spawns its scheduler and detokenizer, and each imports everything anew. On a CPU they can be forked from
the process that has just imported it all, which takes about half the time. With an accelerator they are
spawned: its driver does not survive a fork.
"""

from __future__ import annotations

import multiprocessing as mp
import signal
import socket
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["engine_class"]


def engine_class(*, fork: bool, unwanted: socket.socket) -> type:
    """The class to start. ``unwanted`` is a socket that forked children must not keep open."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
    from sglang.srt.managers.scheduler import run_scheduler_process

    class NamingEngine(Engine):  # type: ignore[misc]
        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
            if fork:
                mp.set_start_method("fork", force=True)
            result, processes = super()._launch_scheduler_processes(*args, **kwargs)
            _name(processes, "scheduler")
            return result, processes

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> Any:
            processes, names = super()._launch_detokenizer_subprocesses(*args, **kwargs)
            _name(processes, "detokenizer")
            return processes, names

    if fork:
        NamingEngine.run_scheduler_process_func = staticmethod(_as_new(run_scheduler_process, unwanted))
        NamingEngine.run_detokenizer_process_func = staticmethod(_as_new(run_detokenizer_process, unwanted))
    return NamingEngine


def _name(processes: Iterable[Any], name: str) -> None:
    for number, process in enumerate(processes):
        process.name = name if number == 0 else f"{name} {number}"


def _as_new(run: Callable[..., None], unwanted: socket.socket) -> Callable[..., None]:
    """Undo what a forked child inherited and a spawned one would not have, then run."""

    def in_child(*args: Any, **kwargs: Any) -> None:
        from sglang.srt import plugins

        unwanted.close()
        plugins._plugins_loaded = False  # plugins do other things in a scheduler than in the main process
        for number in (signal.SIGQUIT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        run(*args, **kwargs)

    return in_child
