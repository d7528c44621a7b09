"""The remote engine and the chat model against ``python -m sglang.launch_server`` with the plugin, on a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from agentflow.engine.base import Call, Coordinates, Sampling
from agentflow.engine.chat_model import AgentflowChat
from agentflow.engine.remote import RemoteEngine
from agentflow.errors import BadSampling, EngineTimeout, OutputTruncated, PromptTooLong, RemoteError
from agentflow.events import WorkflowEnded, WorkflowStarted

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,  # a server of its own: part of `make test-all`
    pytest.mark.skipif(sys.platform != "linux", reason="SGLang runs on Linux"),
]
POOL_TOKENS = 2048
START_LIMIT = 300.0
#: Kinds of decisions that free device memory: with a host tier, KV moves there first.
MADE_ROOM = ("evict", "demote")


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    from agentflow.engine.models import random_model
    from agentflow.engine.sglang.arguments import ServerOptions, command_line

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ServerOptions(
        model_path=str(random_model().path),
        max_total_tokens=POOL_TOKENS,
        extra={"host": "127.0.0.1", "port": port, "skip_server_warmup": True},
    )
    output = tmp_path_factory.mktemp("server") / "output.txt"
    with output.open("wb") as log:
        started = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "sglang.launch_server",
                *command_line(options, cpu=not Path("/dev/nvidiactl").exists()),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "AGENTFLOW_POLICIES": "lifecycle"},
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(started, url, output)
        yield started, url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait(30)


def wait_until_up(process: subprocess.Popen[bytes], url: str, output: Path) -> None:
    deadline = time.monotonic() + START_LIMIT
    while True:
        tail = output.read_bytes()[-3000:].decode(errors="replace")
        assert process.poll() is None, f"the server ended with {process.returncode}:\n{tail}"
        assert time.monotonic() < deadline, f"the server did not come up:\n{tail}"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                return
        time.sleep(0.5)


@pytest.fixture
def remote(process: tuple[subprocess.Popen[bytes], str]) -> Iterator[RemoteEngine]:
    with RemoteEngine(process[1]) as made:
        made.configure(policies=["lifecycle"], reset=True)
        yield made


def call(remote: RemoteEngine, text: str, **fields: Any) -> Call:
    fields.setdefault("sampling", Sampling(max_tokens=8, ignore_eos=True))
    return Call(token_ids=remote.tokenizer.encode(text), **fields)


def until(condition: Callable[[], bool], *, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def idle(remote: RemoteEngine) -> bool:
    stats = remote.stats()
    return stats.running == 0 and stats.waiting == 0 and stats.device_held == 0


async def test_calls_of_every_kind_agree(remote: RemoteEngine) -> None:
    assert remote.has_plugin
    assert remote.pool_tokens == POOL_TOKENS
    assert remote.context_length == 8192
    assert await remote.ahealthy()
    first = remote.generate(call(remote, "word " * 100))
    second = await remote.agenerate(call(remote, "word " * 100))
    chunks = list(remote.stream(call(remote, "word " * 100)))
    achunks = [c async for c in remote.astream(call(remote, "word " * 100))]
    assert first.usage.cached == 0
    assert second.usage.cached_device >= first.usage.prompt_tokens - 1
    assert first.timings.total > 0
    for pieces in (chunks, achunks):
        assert len(pieces) > 2
        last = pieces[-1].completion
        assert last is not None
        assert (last.text, last.token_ids, last.finish) == (first.text, first.token_ids, "length")
        assert "".join(c.text for c in pieces) == first.text
        assert tuple(i for c in pieces for i in c.token_ids) == first.token_ids
        assert 0 < last.timings.first_token < last.timings.total
    assert second.token_ids == first.token_ids


def test_the_server_refuses_what_it_cannot_do(remote: RemoteEngine) -> None:
    with pytest.raises(PromptTooLong, match="KV pool of 2048"):
        remote.generate(call(remote, "word " * 2100))
    with pytest.raises(BadSampling):
        remote.generate(call(remote, "x", sampling=Sampling(max_tokens=4, regex="((((")))
    assert remote.generate(call(remote, "still there")).finish == "length"


def test_forced_tokens(remote: RemoteEngine) -> None:
    tokens = tuple(remote.tokenizer.encode("an answer that was recorded"))
    done = remote.generate(call(remote, "q", sampling=Sampling(max_tokens=len(tokens), forced_tokens=tokens)))
    assert done.token_ids == tokens
    assert done.text == "an answer that was recorded"


async def test_stopping_stops_the_work(remote: RemoteEngine) -> None:
    long = Sampling(max_tokens=1500, ignore_eos=True)
    task = asyncio.create_task(remote.agenerate(call(remote, "cancel me", sampling=long)))
    await asyncio.to_thread(until, lambda: remote.stats().running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(until, lambda: idle(remote), seconds=3)

    stream = remote.stream(call(remote, "close me", sampling=long))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    await asyncio.to_thread(until, lambda: idle(remote), seconds=3)

    with pytest.raises(EngineTimeout):
        await remote.agenerate(call(remote, "too slow", sampling=long, time_limit=0.3))
    await asyncio.to_thread(until, lambda: idle(remote), seconds=3)

    asked = call(remote, "abort me", sampling=long)
    task = asyncio.create_task(remote.agenerate(asked))
    await asyncio.to_thread(until, lambda: remote.stats().running == 1)
    remote.abort(asked.request_id)
    assert (await task).finish == "abort"
    await asyncio.to_thread(until, lambda: idle(remote), seconds=3)


async def test_events_reach_the_scheduler(remote: RemoteEngine) -> None:
    remote.emit(WorkflowStarted(workflow="w1", seq=1))
    remote.generate(call(remote, "takes the event along", at=Coordinates(workflow="w1", agent="a")))
    assert remote.stats().workflows_live == 1
    remote.emit(WorkflowStarted(workflow="w2", seq=1))
    await remote.aflush()
    assert (await remote.astats()).workflows_live == 2
    remote.emit(WorkflowEnded(workflow="w1", seq=2))
    remote.emit(WorkflowEnded(workflow="w2", seq=2))
    remote.flush()
    assert remote.stats().workflows_live == 0


def test_decisions_come_back(remote: RemoteEngine) -> None:
    for n in range(6):
        remote.emit(WorkflowStarted(workflow=f"w{n}", seq=1))
        at = Coordinates(workflow=f"w{n}", agent="a")
        done = remote.generate(call(remote, f"{n} " + "word " * 600, at=at))
        remote.emit(WorkflowEnded(workflow=f"w{n}", seq=2))
    evictions = [d for d in remote.decisions() if d.kind in MADE_ROOM]
    assert evictions
    assert all(d.reason for d in evictions)
    assert {w for d in evictions for w in d.workflows} <= {f"w{n}" for n in range(6)}
    assert any(d.kind in MADE_ROOM for d in done.decisions)
    newest = evictions[-1].seq
    assert remote.decisions(since=newest) == [d for d in remote.decisions() if d.seq > newest]


# -- the chat model on the smallest of models ----------------------------------------------------------------------


class Step(BaseModel):
    tool: Literal["search", "edit"]
    lines: int = Field(ge=0, le=9)


class Plan(BaseModel):
    done: bool
    first: Step


@tool
def edit(path: Literal["a.py", "b.py"], line: bool) -> str:
    """Edit a file."""
    return f"{path} {line}"


@tool
def stop(reason: Literal["done", "failed"]) -> str:
    """Stop."""
    return reason


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_structured_output_is_valid_whatever_the_model(remote: RemoteEngine, method: str) -> None:
    model = AgentflowChat(remote, max_tokens=200, temperature=1.0).with_structured_output(Plan, method=method)
    for n in range(3):
        assert isinstance(model.invoke(f"Plan number {n}", seed=n), Plan)
    assert isinstance(await model.ainvoke("Plan"), Plan)


def test_an_answer_cut_short_is_reported_as_such(remote: RemoteEngine) -> None:
    model = AgentflowChat(remote, max_tokens=3)
    with pytest.raises(OutputTruncated):
        model.with_structured_output(Plan).invoke("Plan")
    both = model.with_structured_output(Plan, include_raw=True).invoke("Plan")
    assert isinstance(both["parsing_error"], OutputTruncated)
    assert both["raw"].response_metadata["finish_reason"] == "length"


def test_forced_tool_calls_fit_their_schema(remote: RemoteEngine) -> None:
    for choice, names in (("any", {"edit", "stop"}), ("stop", {"stop"})):
        answer = AgentflowChat(remote).bind_tools([edit, stop], tool_choice=choice).invoke("Go on.")
        (made,) = answer.tool_calls
        assert made["name"] in names
        assert {"edit": edit, "stop": stop}[made["name"]].invoke(made["args"])


def test_a_growing_conversation_is_found_in_the_cache(remote: RemoteEngine) -> None:
    model = AgentflowChat(remote).bind_tools([edit, stop])
    history: list[BaseMessage] = [SystemMessage("You edit files. " * 10), HumanMessage("Edit a.py, please.")]
    made = 'I do.\n<tool_call>\n{"name":"stop",  "arguments": {"reason":"done"}}\n</tool_call>'
    known = 0
    for turn, text in enumerate(["I look at the file.", made, " Now it is done", made]):
        tokens = remote.tokenizer.encode(text)
        answer = model.invoke(history, forced_tokens=tokens, max_tokens=len(tokens))
        assert answer.response_metadata["token_ids"] == tokens
        assert bool(answer.tool_calls) == (text == made)
        assert answer.usage_metadata is not None
        cached = answer.usage_metadata["input_token_details"]["cache_read"]
        assert cached >= known, f"turn {turn}"
        # All of the prompt is cached now, and of the answer all but its last token, which was never computed.
        known = answer.usage_metadata["input_tokens"] + len(tokens) - 1
        told = ToolMessage("stopped", tool_call_id=answer.tool_calls[0]["id"]) if answer.tool_calls else None
        history += [answer, told or HumanMessage("And now?")]
    assert known > 200


def test_the_end_of_the_server_is_a_typed_error(
    process: tuple[subprocess.Popen[bytes], str], remote: RemoteEngine
) -> None:
    """Last in this module, since it ends the server."""
    stream = remote.stream(call(remote, "going", sampling=Sampling(max_tokens=1500, ignore_eos=True)))
    next(stream)
    os.killpg(process[0].pid, signal.SIGKILL)
    with pytest.raises(RemoteError, match="not tried again"):
        list(stream)
    with pytest.raises(RemoteError, match="cannot reach"):
        remote.generate(call(remote, "gone"))
    assert not remote.healthy()
