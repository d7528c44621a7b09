"""Starts the engine's host process, speaks with it, and notices its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import agentflow
from agentflow import errors
from agentflow.engine._channel import areceive, pack
from agentflow.errors import EngineDied, EngineFailure, EngineTimeout, NotEnoughMemory, PlatformUnsupported, SetupError

__all__ = ["HostProcess"]

log = logging.getLogger("agentflow.engine.sglang")

#: Lines of the host's output that are kept for error messages.
_TAIL = 200
#: What SGLang and torch say when memory is short.
_MEMORY_SIGNS = ("out of memory", "not enough memory", "outofmemory", "memoryerror", "cannot allocate", "exit code: -9")


class HostProcess:
    """One run of the host. Its coroutines belong to one event loop; :meth:`kill` may be called from anywhere.

    ``on_message`` gets every message but those of the start, ``on_end`` the reason when the host is gone.
    """

    def __init__(self, on_message: Callable[[tuple[Any, ...]], None], on_end: Callable[[EngineFailure], None]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._output: deque[str] = deque(maxlen=_TAIL)
        self._last_words = ""
        self._folder: Path | None = None
        self._killed = False

    @property
    def pid(self) -> int | None:
        """Process id of the host, which is also that of its process group."""
        return self._process.pid if self._process is not None else None

    async def start(
        self, options: Any, environment: Mapping[str, str], time_limit: float, on_phase: Callable[[str], None]
    ) -> dict[str, Any]:
        """Start the host and wait until its engine is ready; returns the facts that it reports.

        Raises a :class:`~agentflow.errors.SetupError` that says why it did not start.
        """
        ours, theirs = socket.socketpair()
        try:
            self._popen(theirs, environment)
            reader, self._writer = await asyncio.open_connection(sock=ours)
        finally:
            theirs.close()
        self.send(("start", options))
        try:
            async with asyncio.timeout(time_limit):
                facts = await self._ready(reader, on_phase)
        except TimeoutError:
            self.kill()
            raise EngineTimeout(
                f"the engine was not ready after {time_limit:.0f} seconds; give a larger start_timeout.{self._tail()}"
            ) from None
        except BaseException:
            self.kill()
            raise
        self._reading = asyncio.create_task(self._read(reader))
        return facts

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message; one to a host that is gone is lost."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(message))

    async def stop(self, time_limit: float = 5.0) -> None:
        """Ask the host to end, and end it by force after ``time_limit`` seconds."""
        if self._process is None:
            return
        if self._reading is not None:
            self._reading.cancel()
        self.send(("close",))
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, time_limit)
        self.kill()
        if self._writer is not None:
            self._writer.close()

    def kill(self) -> None:
        """End the host and everything that it started, at once."""
        process, self._killed = self._process, True
        if process is None:
            return
        # The group first: after the leader was reaped, its number may belong to others.
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def abandon(self) -> None:
        """Forget the host in a forked child of its owner: it goes on, for the owner."""
        if self._writer is not None:
            sock = self._writer.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                os.close(sock.fileno())
        self._process = self._writer = self._folder = None

    def _popen(self, theirs: socket.socket, environment: Mapping[str, str]) -> None:
        if not sys.executable:
            raise PlatformUnsupported("the embedded engine starts a Python process, and sys.executable is not set here")
        self._folder = Path(tempfile.mkdtemp(prefix="agentflow-"))
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHONWARNINGS")}
        env.update(environment)
        env["AGENTFLOW_HOST_FOLDER"] = str(self._folder)
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "agentflow-inductor"))
        if "GOMP_SPINCOUNT" not in env:
            # Threads of OpenMP that spin while they wait for one another starve each other on a machine that does
            # anything else: with one core taken, a start and its work took over four times as long.
            env.setdefault("OMP_WAIT_POLICY", "passive")
        env["TMPDIR"] = str(self._folder)  # SGLang leaves its sockets behind; the folder goes with the host
        root = str(Path(agentflow.__file__).resolve().parent.parent)
        if root not in (p.rstrip("/") for p in sys.path if p.endswith("site-packages")):
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            # -P: nothing in the current folder may pass for a module of ours.
            [sys.executable, "-P", "-m", "agentflow.engine.sglang.host", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env=env,
        )
        threading.Thread(target=self._keep_output, args=(self._process,), name="agentflow-output", daemon=True).start()

    def _keep_output(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for raw in lines:
                line = raw.decode(errors="replace").rstrip()
                if line:
                    self._output.append(line)
                    log.debug("%s", line)

    async def _ready(self, reader: asyncio.StreamReader, on_phase: Callable[[str], None]) -> dict[str, Any]:
        while (message := await areceive(reader)) is not None:
            kind = message[0]
            if kind == "phase":
                on_phase(message[1])
            elif kind == "ready":
                facts: dict[str, Any] = message[1]
                return facts
            elif kind == "failed":
                raise self._start_error(message[1], message[2])
        await self._status()
        raise self._start_error("", "its process ended")

    def _start_error(self, name: str, text: str) -> Exception:
        known = getattr(errors, name, None) if name in errors.__all__ else None
        if known is not None and issubclass(known, SetupError):
            return known(text)  # type: ignore[no-any-return]
        said = (text + " ".join(self._output)).lower()
        if any(sign in said for sign in _MEMORY_SIGNS):
            return NotEnoughMemory(
                "the engine did not start for lack of memory: lower max_total_tokens or host_ratio, or take a smaller"
                f" model. SGLang said: {text}{self._tail()}"
            )
        return SetupError(f"the engine did not start: {name + ': ' if name else ''}{text}{self._tail()}")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (message := await areceive(reader)) is not None:
            if message[0] == "died":
                self._last_words = message[1]
            else:
                self._on_message(message)
        status = await self._status()
        if self._killed:
            return
        self.kill()
        reason = self._last_words or f"its host process ended ({status})"
        self._on_end(EngineDied(f"the engine died: {reason}. restart() starts it anew{self._tail()}"))

    async def _status(self) -> str:
        """How the process ended, once it has; it may still be going down."""
        assert self._process is not None
        for _ in range(100):
            if (code := self._process.poll()) is not None:
                return f"killed by signal {-code}" if code < 0 else f"status {code}"
            await asyncio.sleep(0.01)
        return "it closed its connection"

    def _tail(self, lines: int = 15) -> str:
        kept = list(self._output)[-lines:]
        return "\nIts last output:\n  " + "\n  ".join(kept) if kept else ""
