"""The lives of one engine, told line by line as JSON. Written like a user's script: no ``__main__`` guard."""

import asyncio
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentflow.engine.base import Call, Sampling
from agentflow.engine.embedded import EmbeddedEngine
from agentflow.engine.models import random_model
from agentflow.events import WorkflowStarted

LONG = Sampling(max_tokens=1200, ignore_eos=True)


def tell(step: str, **facts: Any) -> None:
    print(json.dumps({"step": step, **facts}), flush=True)  # noqa: T201


def pids() -> list[int]:
    health = engine.health()
    assert health.host_pid is not None
    return [health.host_pid, *health.children]


def long_call() -> Call:
    return Call(token_ids=engine.tokenizer.encode("A very long story:"), sampling=LONG)


def text() -> str:
    return engine.generate(Call(token_ids=[500, 501, 502], sampling=Sampling(max_tokens=8))).text


def failure(work: Any) -> str:
    try:
        work()
    except Exception as error:
        messages.append(str(error))
        return type(error).__name__
    return "none"


def kill_with_calls_in_flight(step: str, pid: int) -> None:
    ways = [
        lambda: engine.generate(long_call()),
        lambda: asyncio.run(engine.agenerate(long_call())),
        lambda: list(engine.stream(long_call())),
    ]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(failure, way) for way in ways]
        deadline = time.monotonic() + 20.0
        while (stats := engine.stats()).running + stats.waiting < 3:
            assert time.monotonic() < deadline, f"the calls do not run: {stats}"
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        errors = [r.result(30) for r in running]
        seconds = time.monotonic() - begun
    later = failure(lambda: engine.generate(long_call()))
    tell(step, errors=errors, seconds=seconds, later=later, alive=engine.health().alive, message=messages[-1])


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
messages: list[str] = []
made: list[EmbeddedEngine] = []
starter = threading.Thread(  # a thread that ends: the engine must not end with it
    target=lambda: made.append(EmbeddedEngine(random_model().path, max_total_tokens=4096, host_ratio=1.0))
)
starter.start()
starter.join()
engine = made[0]
tell("started", pids=pids(), text=text())

kill_with_calls_in_flight("host killed", pids()[0])

engine.restart()
tell("restarted", pids=pids(), text=text())

threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    engine.generate(long_call())
    interruption = "none"
except KeyboardInterrupt:
    interruption = "KeyboardInterrupt"
deadline = time.monotonic() + 2.0
while engine.stats().running and time.monotonic() < deadline:
    pass
tell("interrupted", error=interruption, idle=engine.stats().running == 0)

scheduler = next(pid for pid, name in engine.health().children.items() if name == "scheduler")
kill_with_calls_in_flight("scheduler killed", scheduler)

engine.close()
engine.close()
engine.emit(WorkflowStarted(workflow="late"))  # never raises
engine.abort("nobody")
tell(
    "closed",
    errors=[
        failure(text),
        failure(lambda: list(engine.stream(long_call()))),
        failure(engine.stats),
        failure(engine.restart),
    ],
)
