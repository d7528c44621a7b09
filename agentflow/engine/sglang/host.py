"""The engine's host process: SGLang's own main process, apart from the user's.

SGLang sets a global event-loop policy, takes over signals, re-imports ``__main__`` in its children and kills
its own process tree when one of them fails. All of that happens here, where it harms nobody. The process is
started by :mod:`agentflow.engine._host_process` as ``python -m agentflow.engine.sglang.host FD``, talks over
that socket only, and ends with it.

Messages in: ``("generate", id, arguments, forced)``, ``("cancel", id)``, ``("abort", id)``,
``("control", number, method, body)``, ``("close",)``. Messages out: ``("phase", text)``, ``("ready", facts)``,
``("failed", error, text)``, ``("out", id, text, token ids, meta or None, first token seconds)``,
``("error", id, error, text)``, ``("reply", number, replies)``, ``("refused", number, text)``, ``("died", text)``.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from importlib.metadata import entry_points
from multiprocessing.connection import wait
from typing import Any, NoReturn

from agentflow.engine._channel import areceive, pack, receive
from agentflow.engine.sglang.arguments import ServerOptions, server_arguments
from agentflow.errors import SetupError

__all__ = ["main"]

#: Seconds that a last message gets to leave before the process ends.
_LAST_WORD = 0.5


def main(fd: int) -> None:
    """Run until the other end of socket ``fd`` closes or asks for the end."""
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the user's Ctrl-C is for the user's process
    first = receive(sock)
    if first is None:
        return
    options: ServerOptions = first[1]
    threading.Thread(target=_end_with_parent, args=(sock, os.getppid()), daemon=True).start()
    try:
        sock.sendall(pack(("phase", "loading torch")))
        engine, cpu = _start(sock, options)
    except BaseException as error:
        sock.sendall(pack(("failed", type(error).__name__, str(error))))
        _end(1)
    engine.loop.run_until_complete(_Host(engine, sock, cpu).serve())
    engine.shutdown()
    _end(0)


def _check_installed() -> None:
    groups = ("sglang.srt.plugins", "sglang.srt.platforms")
    if not all(any(e.value.startswith("agentflow.") for e in entry_points(group=group)) for group in groups):
        raise SetupError(
            "agentflow is importable here but not installed, so SGLang cannot find its plugin: install it"
            " (`uv sync`, or `pip install -e .` in its folder)"
        )


def _start(sock: socket.socket, options: ServerOptions) -> tuple[Any, bool]:
    _check_installed()
    from agentflow.engine.sglang import cpu_platform, launch, memory, quick_start

    cpu = cpu_platform.activate() is not None
    if cpu:
        options = memory.fit(options)
        quick_start.prepare(options.model_path)
    sock.sendall(pack(("phase", "loading SGLang")))
    arguments = server_arguments(options, cpu=cpu)
    engine_class = launch.engine_class(fork=cpu, unwanted=sock)
    sock.sendall(pack(("phase", "starting the scheduler and loading the model")))
    return engine_class(**arguments), cpu


def _end_with_parent(sock: socket.socket, parent: int) -> None:
    """End this process, and with it SGLang's, when the parent is gone, however it went."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    while True:
        if poll.poll(1000) or os.getppid() != parent:
            time.sleep(_LAST_WORD)  # a polite end may be on its way
            _end(1)


def _end(status: int) -> NoReturn:
    for child in mp.active_children():
        child.kill()
    folder = os.environ.get("AGENTFLOW_HOST_FOLDER")
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)


class _Host:
    """Serves one connection on SGLang's event loop."""

    def __init__(self, engine: Any, sock: socket.socket, cpu: bool) -> None:
        self.engine = engine
        self.manager = engine.tokenizer_manager
        self.sock = sock
        self.cpu = cpu
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.background: set[asyncio.Task[None]] = set()
        self.forced: str | None = None

    async def serve(self) -> None:
        reader, self.writer = await asyncio.open_connection(sock=self.sock)
        loop = asyncio.get_running_loop()
        self.manager.auto_create_handle_loop()
        if self.manager._subprocess_watchdog is not None:
            self.manager._subprocess_watchdog.stop()  # ours sees a death at once
        loop.add_signal_handler(signal.SIGQUIT, self._die, "one of the engine's processes reported a failure")
        loop.add_signal_handler(signal.SIGTERM, self._die, "the engine's host process was asked to end")
        threading.Thread(target=self._watch_children, args=(loop,), daemon=True).start()
        self._send(("ready", self._facts()))
        while (message := await areceive(reader)) is not None and message[0] != "close":
            self._handle(message)

    def _facts(self) -> dict[str, Any]:
        info = self.engine._scheduler_init_result.scheduler_infos[0]
        return {
            "pool_tokens": info["max_total_num_tokens"],
            "context_length": self.manager.context_len,
            "vocab_size": self.manager.model_config.vocab_size,
            "children": {p.pid: p.name for p in mp.active_children()},
            "device": "cpu" if self.cpu else "accelerator",
        }

    def _handle(self, message: tuple[Any, ...]) -> None:
        kind, key = message[0], message[1]
        if kind == "generate":
            task = asyncio.create_task(self._generate(*message[1:]))
            self.tasks[key] = task
            task.add_done_callback(lambda ended: self._ended(key, ended))
        elif kind == "cancel":
            if (running := self.tasks.get(key)) is not None:
                running.cancel()
        elif kind == "abort":
            # After the first step of a task created just now, which makes the request known.
            asyncio.get_running_loop().call_soon(self.manager.abort_request, key)
        elif kind == "control":
            background = asyncio.create_task(self._control(*message[1:]))
            self.background.add(background)
            background.add_done_callback(self.background.discard)

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        self.tasks.pop(request_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._send(("error", request_id, type(error).__name__, str(error)))  # nobody waits for ever

    async def _generate(self, request_id: str, arguments: dict[str, Any], forced: bool) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        if forced:
            arguments["custom_logit_processor"] = self._forced_tokens()
        request = GenerateReqInput(rid=request_id, **arguments)
        outputs = self.manager.generate_request(request, None)
        begun = time.perf_counter()
        first = 0.0
        text_sent, ids_sent = 0, 0
        next_output = asyncio.ensure_future(anext(outputs))
        try:
            await asyncio.sleep(0)  # lets SGLang register the request
            state = self.manager.rid_to_state.get(request_id)
            while True:
                output = await next_output
                first = first or time.perf_counter() - begun
                meta = output["meta_info"]
                done = meta["finish_reason"] is not None
                if done and not request.stream and state is not None:
                    first = max(0.0, state.time_stats.first_token_time - state.time_stats.created_time)
                text, ids = output["text"], output["output_ids"]
                new = (text[text_sent:], list(ids[ids_sent:]))
                text_sent, ids_sent = len(text), len(ids)
                self._send(("out", request_id, *new, meta if done else None, first))
                if done:
                    return
                next_output = asyncio.ensure_future(anext(outputs))
        except Exception as error:
            self._send(("error", request_id, type(error).__name__, str(error)))
        finally:
            # Leaving SGLang's generator aborts in the scheduler what is not finished; it must stand still for that.
            next_output.cancel()
            await asyncio.wait({next_output})
            await outputs.aclose()

    async def _control(self, number: int, method: str, body: dict[str, Any]) -> None:
        from agentflow.engine.sglang import control

        try:
            self._send(("reply", number, await control.call(self.manager, method, body)))
        except Exception as error:
            self._send(("refused", number, str(error)))

    def _forced_tokens(self) -> str:
        if self.forced is None:
            from agentflow.engine.sglang.forced import forced_tokens_processor

            self.forced = forced_tokens_processor()
        return self.forced

    def _send(self, message: tuple[Any, ...]) -> None:
        self.writer.write(pack(message))

    def _watch_children(self, loop: asyncio.AbstractEventLoop) -> None:
        children = {p.sentinel: p for p in mp.active_children()}
        ended = children[wait(list(children))[0]]  # type: ignore[index]
        ended.join(1.0)
        code = ended.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        hint = ", perhaps by the system for lack of memory" if code == -signal.SIGKILL else ""
        loop.call_soon_threadsafe(self._die, f"the process {ended.name} (pid {ended.pid}) {how}{hint}")

    def _die(self, reason: str) -> None:
        self._send(("died", reason))
        asyncio.get_running_loop().call_later(_LAST_WORD / 5, _end, 1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
