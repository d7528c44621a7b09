"""The scripted engine keeps the contract of an engine, and fails when its script does not fit."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agentflow.engine._scripted_tokenizer import ScriptedTokenizer
from agentflow.engine.base import Call, Coordinates, Sampling
from agentflow.engine.guard import ENV_VAR, check_real_engine_allowed, forbid_real_engines
from agentflow.engine.scripted import LOG_LIMIT, Answer, ScriptedEngine, tool_call
from agentflow.errors import (
    BadSampling,
    EmptyPrompt,
    EngineClosed,
    EngineTimeout,
    PromptTooLong,
    RealEngineForbidden,
    ScriptError,
)
from agentflow.events import WorkflowStarted

TOKENIZER = ScriptedTokenizer()


def call(text: str = "hello", *, agent: str | None = None, **fields: object) -> Call:
    return Call(token_ids=TOKENIZER.encode(text), at=Coordinates(agent=agent), **fields)  # type: ignore[arg-type]


async def until_running(engine: ScriptedEngine, calls: int) -> None:
    while engine.stats().running < calls:  # noqa: ASYNC110 (the engine has nothing to wait on)
        await asyncio.sleep(0.001)


@given(st.text())
def test_the_tokenizer_loses_nothing(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert [i for p in TOKENIZER.pieces(text) for i in TOKENIZER.encode(p)] == ids


def test_unknown_ids_decode_to_a_replacement() -> None:
    assert TOKENIZER.decode([1 << 40, -3]) == "\N{REPLACEMENT CHARACTER}" * 2


class Plan(BaseModel):
    steps: list[str]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("plain", "plain"),
        ({"a": 1}, '{"a": 1}'),
        ([1, 2], "[1, 2]"),
        (Plan(steps=["x"]), '{"steps":["x"]}'),
        (tool_call("add", a=1), '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        (
            ["Now:", tool_call("t")],
            'Now:\n<tool_call>\n{"name": "t", "arguments": {}}\n</tool_call>',
        ),
        (Answer(text={"a": 1}), '{"a": 1}'),
        (lambda c: f"{len(c.token_ids)} tokens", "2 tokens"),
    ],
)
def test_kinds_of_answers(reply: object, text: str) -> None:
    with ScriptedEngine([reply]) as engine:  # type: ignore[list-item]
        done = engine.generate(call())
    assert done.text == text
    assert TOKENIZER.decode(done.token_ids) == text
    assert done.token_ids[-1] in TOKENIZER.eos_token_ids
    assert done.usage.prompt_tokens == 2
    assert done.usage.completion_tokens == len(done.token_ids)
    assert done.usage.cached == 0


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError])
def test_exceptions_are_raised(error: BaseException | type[BaseException]) -> None:
    with ScriptedEngine([error]) as engine, pytest.raises((KeyError, RuntimeError)):
        engine.generate(call())
    assert engine.stats().running == 0


def test_a_script_per_agent() -> None:
    script = {"planner": ["p1", "p2"], "coder": lambda c: f"code {c.at.agent}", "*": ["other"]}
    with ScriptedEngine(script) as engine:  # type: ignore[arg-type]
        assert engine.generate(call(agent="planner")).text == "p1"
        assert engine.generate(call(agent="coder")).text == "code coder"
        assert engine.generate(call(agent=None)).text == "other"
        assert engine.generate(call(agent="planner")).text == "p2"
        with pytest.raises(ScriptError, match=r"ran out.*planner"):
            engine.generate(call(agent="planner"))
    assert [c.at.agent for c in engine.calls_of("coder")] == ["coder"]


def test_an_agent_without_script() -> None:
    with ScriptedEngine({"planner": []}) as engine, pytest.raises(ScriptError, match=r"no script for agent 'coder'"):
        engine.generate(call(agent="coder"))


def test_a_script_that_is_left_over_fails() -> None:
    engine = ScriptedEngine({"planner": ["a", "b"]})
    with pytest.raises(ScriptError, match=r"2 of 'planner'"):
        engine.assert_consumed()
    with pytest.raises(ScriptError, match="left over"):
        engine.close()
    engine.close()  # closing twice is fine


async def test_another_exception_is_not_masked() -> None:
    with pytest.raises(KeyError, match="mine"), ScriptedEngine(["left"]):
        raise KeyError("mine")
    with pytest.raises(KeyError, match="mine"):
        async with ScriptedEngine(["left"]):
            raise KeyError("mine")
    with pytest.raises(ScriptError):
        async with ScriptedEngine(["left"]):
            pass


def test_a_script_must_be_a_list_or_a_function() -> None:
    with pytest.raises(ScriptError, match="not str"):
        ScriptedEngine("text")
    with ScriptedEngine([object()]) as engine, pytest.raises(ScriptError, match="cannot answer with object"):  # type: ignore[list-item]
        engine.generate(call())


async def test_streams_add_up() -> None:
    text = "The quick brown fox, jumping; over a lazy dog. And sö on and on."
    with ScriptedEngine([text, text]) as engine:
        sync = list(engine.stream(call()))
        asynchronous = [c async for c in engine.astream(call())]
    for chunks in (sync, asynchronous):
        assert len(chunks) > 3
        assert all(c.completion is None for c in chunks[:-1])
        done = chunks[-1].completion
        assert done is not None
        assert "".join(c.text for c in chunks) == done.text == text
        assert tuple(i for c in chunks for i in c.token_ids) == done.token_ids


async def test_cancelling_stops_and_is_noted() -> None:
    with ScriptedEngine(["slow"], delay=60) as engine:
        running = call()
        task = asyncio.create_task(engine.agenerate(running))
        await until_running(engine, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert list(engine.aborted) == [running.request_id]
        assert engine.stats().running == 0


def test_closing_a_stream_early_is_noted() -> None:
    with ScriptedEngine(["one two three four five six seven eight nine ten"]) as engine:
        stream = engine.stream(call())
        next(stream)
        stream.close()
        assert len(engine.aborted) == 1


async def test_abort_ends_the_answer() -> None:
    with ScriptedEngine(["slow", "slow"], delay=60) as engine:
        first, second = call(), call()
        with ThreadPoolExecutor() as threads:
            future = threads.submit(engine.generate, first)
            task = asyncio.create_task(engine.agenerate(second))
            await until_running(engine, 2)
            engine.abort(first.request_id)
            engine.abort(second.request_id)
            engine.abort("unknown")
            assert (await task).finish == "abort"
            assert future.result(10).finish == "abort"


async def test_closing_fails_calls_in_flight() -> None:
    engine = ScriptedEngine(["slow", "slow"], delay=60)
    with ThreadPoolExecutor() as threads:
        future = threads.submit(engine.generate, call())
        task = asyncio.create_task(engine.agenerate(call()))
        await until_running(engine, 2)
        engine.close()
        with pytest.raises(EngineClosed):
            await task
        with pytest.raises(EngineClosed):
            future.result(10)
    with pytest.raises(EngineClosed):
        engine.generate(call())


async def test_the_time_limit_holds() -> None:
    with ScriptedEngine(["slow", "slow"], delay=60) as engine:
        with pytest.raises(EngineTimeout):
            engine.generate(call(time_limit=0.01))
        with pytest.raises(EngineTimeout):
            await engine.agenerate(call(time_limit=0.01))
        assert len(engine.aborted) == 2


def test_unusable_calls_are_refused_before_the_script_is_touched() -> None:
    with ScriptedEngine(["answer"], context_length=20) as engine:
        with pytest.raises(EmptyPrompt):
            engine.generate(call(""))
        with pytest.raises(PromptTooLong):
            engine.generate(call(sampling=Sampling(max_tokens=19)))
        with pytest.raises(BadSampling):
            engine.generate(call(sampling=Sampling(temperature=-1)))
        assert engine.generate(call(sampling=Sampling(max_tokens=18))).text == "answer"


def test_stop_strings_cut() -> None:
    with ScriptedEngine(["one STOP two"]) as engine:
        done = engine.generate(call(sampling=Sampling(stop=("two", "STOP"))))
    assert done.text == "one "
    assert done.token_ids[-1] not in TOKENIZER.eos_token_ids


def test_two_event_loops_one_after_the_other() -> None:
    with ScriptedEngine(["a", "b"], delay=0.001) as engine:
        assert asyncio.run(engine.agenerate(call())).text == "a"
        assert asyncio.run(engine.agenerate(call())).text == "b"


def test_many_threads_get_each_answer_once() -> None:
    with ScriptedEngine([str(i) for i in range(200)]) as engine, ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda _: engine.generate(call()).text, range(200)))
    assert sorted(texts, key=int) == [str(i) for i in range(200)]


def test_logs_are_bounded() -> None:
    with ScriptedEngine(lambda c: "x") as engine:
        for i in range(LOG_LIMIT + 10):
            engine.emit(WorkflowStarted(workflow="w", seq=i))
        assert len(engine.events) == LOG_LIMIT
        assert engine.stats().counters["events"] == LOG_LIMIT + 10


def test_real_engines_can_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    check_real_engine_allowed()
    with forbid_real_engines():
        with forbid_real_engines(), pytest.raises(RealEngineForbidden):
            check_real_engine_allowed()
        caught: list[BaseException] = []

        def elsewhere() -> None:
            try:
                check_real_engine_allowed()
            except RealEngineForbidden as error:
                caught.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(caught) == 1
        with ScriptedEngine(["still works"]) as engine:
            assert engine.generate(call()).text == "still works"
    check_real_engine_allowed()
    monkeypatch.setenv(ENV_VAR, "1")
    with pytest.raises(RealEngineForbidden, match=ENV_VAR):
        check_real_engine_allowed()


def test_no_real_engine_starts_while_forbidden() -> None:
    from agentflow.engine.embedded import EmbeddedEngine
    from agentflow.engine.remote import RemoteEngine

    with forbid_real_engines():
        with pytest.raises(RealEngineForbidden):
            EmbeddedEngine()
        with pytest.raises(RealEngineForbidden):
            RemoteEngine("http://127.0.0.1:1")
