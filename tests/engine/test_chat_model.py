"""The chat model: LangChain's contract over any engine, with what LangGraph does to models."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypedDict

import pytest
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel, field_validator

from agentflow.engine.base import Chunk, Completion, Coordinates, Sampling, Usage
from agentflow.engine.chat_model import DEFAULT_MAX_TOKENS, AgentflowChat
from agentflow.engine.context import current, current_run
from agentflow.engine.in_flight import abort_calls, calls_in_flight
from agentflow.engine.scripted import Answer, ScriptedEngine, tool_call
from agentflow.engine.workflow import WorkflowRun
from agentflow.errors import (
    BadRequest,
    BadSampling,
    CallAborted,
    EngineTimeout,
    OutputInvalid,
    OutputTruncated,
    UsageError,
)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def whole(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    return total


# -- answers ---------------------------------------------------------------------------------------------------


async def test_every_way_to_ask_gives_the_same_answer() -> None:
    text = "An answer of several words, long enough to come in pieces."
    with ScriptedEngine([text] * 4) as engine:
        model = AgentflowChat(engine)
        answers: list[AIMessage] = [
            model.invoke("q"),
            await model.ainvoke("q"),
            whole(list(model.stream("q"))),
            whole([c async for c in model.astream("q")]),
        ]
    for answer in answers:
        assert answer.content == text
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["total_tokens"] == (
            answer.usage_metadata["input_tokens"] + answer.usage_metadata["output_tokens"]
        )
        meta = answer.response_metadata
        assert meta["finish_reason"] == "stop"
        assert meta["model_name"] == "scripted"
        assert meta["request_id"].startswith("call-")
        assert meta["token_ids"] == [*engine.tokenizer.encode(text), *engine.tokenizer.eos_token_ids]
        assert meta["decisions"] == []
        assert set(meta["timings"]) == {"queue", "first_token", "total"}
    assert len({tuple(c.token_ids) for c in engine.calls}) == 1


class CachedEngine(ScriptedEngine):
    """A double that reports cached tokens, to see where they go."""

    def stream(self, call: Any) -> Iterator[Chunk]:
        for chunk in super().stream(call):
            if chunk.completion is not None:
                usage = Usage(prompt_tokens=10, completion_tokens=2, cached_device=4, cached_host=2, corrected=1)
                done = chunk.completion
                yield Chunk(completion=Completion(request_id=done.request_id, text=done.text, token_ids=done.token_ids,
                                                  finish=done.finish, usage=usage, model="m"))  # fmt: skip
            else:
                yield chunk


def test_cached_tokens_reach_langchains_own_sums() -> None:
    with CachedEngine(["a", "b"]) as engine, get_usage_metadata_callback() as sums:
        model = AgentflowChat(engine)
        answer = model.invoke("q")
        model.invoke("q")
    assert answer.usage_metadata == {
        "input_tokens": 10,
        "output_tokens": 2,
        "total_tokens": 12,
        "input_token_details": {"cache_read": 7},
    }
    assert answer.response_metadata["cached_tokens"] == {"device": 4, "host": 2, "corrected": 1}
    assert sums.usage_metadata["m"]["input_token_details"] == {"cache_read": 14}


def test_sampling_of_model_and_call() -> None:
    with ScriptedEngine(lambda c: "x", context_length=1000) as engine:
        model = AgentflowChat(engine, temperature=0.5, top_k=3, stop=["END"], time_limit=9)
        model.invoke("q")
        model.invoke("q", max_tokens=7, temperature=0.0, stop="X", seed=1, time_limit=None, ignore_eos=True)
        model.bind(regex="[ab]+", forced_tokens=[1, 2]).invoke("q", stop=["A", "B"])
        AgentflowChat(engine, max_tokens=5).invoke("q")
    first, second, third, fourth = (c.sampling for c in engine.calls)
    assert first == Sampling(max_tokens=DEFAULT_MAX_TOKENS, temperature=0.5, top_k=3, stop=("END",))
    assert second == Sampling(max_tokens=7, temperature=0.0, top_k=3, stop=("X",), seed=1, ignore_eos=True)
    assert (third.regex, third.forced_tokens, third.stop) == ("[ab]+", (1, 2), ("A", "B"))
    assert fourth.max_tokens == 5
    assert [c.time_limit for c in engine.calls] == [9, None, 9, None]


def test_the_default_answer_length_fits_the_context() -> None:
    with ScriptedEngine(["x", "x"], context_length=100) as engine:
        AgentflowChat(engine).invoke("q")
        engine.pool_tokens = 90  # type: ignore[attr-defined]
        AgentflowChat(engine).invoke("q")
    assert [c.sampling.max_tokens + len(c.token_ids) for c in engine.calls] == [100, 90]


def test_unknown_and_bad_arguments_are_refused() -> None:
    with ScriptedEngine([]) as engine:
        model = AgentflowChat(engine)
        with pytest.raises(UsageError, match=r"unknown argument max_length, tempo"):
            model.invoke("q", tempo=1, max_length=3)
        with pytest.raises(BadSampling, match="temperature"):
            model.invoke("q", temperature=-1)
        assert not engine.calls


async def test_the_time_limit_of_a_call() -> None:
    with ScriptedEngine(["slow", "slow"], delay=60) as engine:
        model = AgentflowChat(engine, time_limit=0.02)
        with pytest.raises(EngineTimeout):
            model.invoke("q")
        with pytest.raises(EngineTimeout):
            await model.ainvoke("q")


# -- messages --------------------------------------------------------------------------------------------------


def test_messages_of_every_role() -> None:
    with ScriptedEngine(["x"]) as engine:
        AgentflowChat(engine).invoke(
            [
                SystemMessage("s"),
                HumanMessage([{"type": "text", "text": "u"}, "v"]),
                AIMessage([{"type": "text", "text": "a"}, {"type": "reasoning", "reasoning": "hidden"}]),
                ToolMessage("t", tool_call_id="c"),
                ChatMessage("d", role="developer"),
            ]
        )
    (call,) = engine.calls
    assert engine.prompt(call) == "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n"
        for role, text in [("system", "s"), ("user", "uv"), ("assistant", "a"), ("tool", "t"), ("system", "d")]
    ) + ("<|im_start|>assistant\n")


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "file"])
def test_images_and_other_media_are_refused(kind: str) -> None:
    with ScriptedEngine([]) as engine, pytest.raises(BadRequest, match=rf"message 1 \(user\).*{kind}.*text only"):
        AgentflowChat(engine).invoke([SystemMessage("s"), HumanMessage([{"type": kind, kind: {"url": "x"}}])])
    with ScriptedEngine([]) as engine, pytest.raises(BadRequest, match="RemoveMessage"):
        AgentflowChat(engine)._generate([RemoveMessage(id="x")])


def test_shared_parts_become_segments() -> None:
    with ScriptedEngine(["x"]) as engine:
        part = {"type": "text", "text": "the plan", "slot": "plan", "producer": "planner"}
        AgentflowChat(engine).invoke([SystemMessage("s"), HumanMessage(["Plan: ", part])])
    (call,) = engine.calls
    (segment,) = [s for s in call.segments if s.kind == "shared"]
    assert (segment.slot, segment.producer) == ("plan", "planner")
    assert engine.tokenizer.decode(call.token_ids[segment.start : segment.start + segment.length]) == "the plan"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_in_the_history_keeps_its_tokens(streamed: bool) -> None:
    script = [["I add.", tool_call("add", a=1, b=2)], "three", "bye"]
    with ScriptedEngine(script) as engine:  # type: ignore[arg-type]
        model = AgentflowChat(engine).bind_tools([add])
        history: list[BaseMessage] = [HumanMessage("1 + 2?")]
        for follow_up in ("3", None, None):
            answer = whole(list(model.stream(history))) if streamed else model.invoke(history)  # type: ignore[arg-type]
            history.append(answer)
            history.append(ToolMessage(follow_up, tool_call_id="c") if follow_up else HumanMessage("next"))
    calls = list(engine.calls)
    for earlier, later, answer in zip(calls, calls[1:], (history[1], history[3]), strict=False):
        computed = [*earlier.token_ids, *answer.response_metadata["token_ids"]]
        assert list(later.token_ids[: len(computed)]) == computed


def test_an_edited_answer_is_sent_as_edited() -> None:
    with ScriptedEngine([["I add.", tool_call("add", a=1, b=2)], "x", "x", "x"]) as engine:  # type: ignore[list-item]
        model = AgentflowChat(engine).bind_tools([add])
        answer = model.invoke("q")
        for update in (
            {"content": "Edited."},
            {"tool_calls": [{**answer.tool_calls[0], "args": {"a": 5, "b": 5}}]},
            {"tool_calls": []},
        ):
            model.invoke([HumanMessage("q"), answer.model_copy(update=update)])
    edited, changed, without = (engine.prompt(c) for c in list(engine.calls)[1:])
    assert "Edited.\n<tool_call>" in edited
    assert "I add." not in edited
    assert '{"a": 5, "b": 5}' in changed
    assert '"a": 1' not in changed
    assert "I add.<|im_end|>" in without


def test_changing_arguments_in_place_changes_what_is_sent_and_nothing_else() -> None:
    with ScriptedEngine([[tool_call("add", a=1, b=[2])]] * 2 + ["x"]) as engine:  # type: ignore[list-item]
        model = AgentflowChat(engine).bind_tools([add])
        answer = model.invoke("q")
        answer.tool_calls[0]["args"]["b"].append(99)
        assert model.invoke("q").tool_calls[0]["args"] == {"a": 1, "b": [2]}
        model.invoke([HumanMessage("q"), answer])
    assert '"b": [2, 99]' in engine.prompt(engine.calls[-1])


def test_messages_survive_a_checkpoint() -> None:
    with ScriptedEngine([[tool_call("add", a=1, b=2)], "x"]) as engine:
        model = AgentflowChat(engine).bind_tools([add])
        answer = model.invoke("q")
        stored = AIMessage.model_validate(json.loads(answer.model_dump_json()))
        model.invoke([HumanMessage("q"), stored])
    first, second = engine.calls
    computed = [*first.token_ids, *answer.response_metadata["token_ids"]]
    assert list(second.token_ids[: len(computed)]) == computed


def test_counting_tokens() -> None:
    with ScriptedEngine(["x"]) as engine:
        model = AgentflowChat(engine)
        messages = convert_to_messages([("system", "be brief"), ("user", "hello")])
        model.bind_tools([add]).invoke(messages)
        assert model.get_num_tokens_from_messages(messages, [add]) == len(engine.calls[0].token_ids)
        assert model.get_num_tokens("hello") == len(engine.tokenizer.encode("hello"))


# -- tools -----------------------------------------------------------------------------------------------------


async def test_tool_calls_come_out_of_every_way_to_ask() -> None:
    reply: Any = ["Let me see.", tool_call("add", a=1, b=2), tool_call("nonsense"), '<tool_call>{"name": "add", ']
    with ScriptedEngine([reply] * 4) as engine:
        model = AgentflowChat(engine).bind_tools([add])
        answers = [
            model.invoke("q"),
            await model.ainvoke("q"),
            whole(list(model.stream("q"))),  # type: ignore[arg-type]
            whole([c async for c in model.astream("q")]),  # type: ignore[misc]
        ]
    for answer in answers:
        assert answer.content == "Let me see."
        assert [(c["name"], c["args"]) for c in answer.tool_calls] == [("add", {"a": 1, "b": 2}), ("nonsense", {})]
        assert [c["name"] for c in answer.invalid_tool_calls] == ["add"]
        ids = [c["id"] for c in [*answer.tool_calls, *answer.invalid_tool_calls]]
        assert len(set(ids)) == 3
        assert all(ids)


def test_text_is_streamed_and_calls_are_not_shown_as_text() -> None:
    with ScriptedEngine([["Let me see what that gives.", tool_call("add", a=1, b=2)]]) as engine:  # type: ignore[list-item]
        chunks = list(AgentflowChat(engine).bind_tools([add]).stream("q"))
    texts = [str(c.content) for c in chunks]
    assert sum(bool(t) for t in texts) > 1
    assert "".join(texts) == "Let me see what that gives."


def test_calls_are_text_where_no_tools_are_bound() -> None:
    with ScriptedEngine([tool_call("add", a=1, b=2)] * 2) as engine:
        model = AgentflowChat(engine)
        assert "<tool_call>" in str(model.invoke("q").content)
        assert not model.bind_tools([add], tool_choice="none").invoke("q").tool_calls  # type: ignore[attr-defined]
        assert "<tools>" not in engine.prompt(engine.calls[-1])


def test_500_calls_in_one_message() -> None:
    with ScriptedEngine([[tool_call("add", a=i, b=i) for i in range(500)]]) as engine:  # type: ignore[list-item]
        answer = AgentflowChat(engine).bind_tools([add]).invoke("q")
    assert [c["args"]["a"] for c in answer.tool_calls] == list(range(500))


@pytest.mark.parametrize(
    "choice", ["any", "required", True, "add", {"type": "function", "function": {"name": "add"}}, {"name": "add"}]
)
def test_a_forced_call_is_held_to_its_schema(choice: Any) -> None:
    with ScriptedEngine([{"name": "add", "arguments": {"a": 1, "b": 2}}]) as engine:
        answer = AgentflowChat(engine).bind_tools([add], tool_choice=choice).invoke("q")
    schema = engine.calls[0].sampling.json_schema
    assert schema is not None
    assert schema["properties"]["name"] == {"const": "add"}
    assert schema["properties"]["arguments"]["required"] == ["a", "b"]
    assert answer.tool_calls[0]["args"] == {"a": 1, "b": 2}
    assert answer.content == ""


@pytest.mark.parametrize("streamed", [False, True])
def test_a_forced_call_that_is_cut_is_invalid(streamed: bool) -> None:
    cut = Answer(text='{"name": "add", "arguments": {"a": 1', finish="length")
    with ScriptedEngine([cut]) as engine:
        model = AgentflowChat(engine).bind_tools([add], tool_choice="any")
        answer = whole(list(model.stream("q"))) if streamed else model.invoke("q")  # type: ignore[arg-type]
    assert answer.content == ""
    assert not answer.tool_calls
    assert len(answer.invalid_tool_calls) == 1


def test_an_unknown_tool_choice() -> None:
    with ScriptedEngine([]) as engine, pytest.raises(UsageError, match=r"'sub' is none of the tools \['add'\]"):
        AgentflowChat(engine).bind_tools([add], tool_choice="sub")


# -- structured output -----------------------------------------------------------------------------------------


class Plan(BaseModel):
    """A plan."""

    steps: list[str]

    @field_validator("steps")
    @classmethod
    def some(cls, steps: list[str]) -> list[str]:
        if not steps:
            raise ValueError("a plan has steps")
        return steps


class PlanDict(TypedDict):
    """A plan."""

    steps: list[str]


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
@pytest.mark.parametrize("schema", [Plan, PlanDict, Plan.model_json_schema()], ids=["class", "typed_dict", "json"])
async def test_structured_output(schema: Any, method: str) -> None:
    value: dict[str, Any] = {"steps": ["a", "b"]}
    reply = {"name": "PlanDict" if schema is PlanDict else "Plan", "arguments": value}
    with ScriptedEngine([reply if method == "function_calling" else value] * 4) as engine:
        model = AgentflowChat(engine).with_structured_output(schema, method=method)
        expected = Plan(**value) if schema is Plan else value
        assert model.invoke("q") == expected
        assert await model.ainvoke("q") == expected
        raw = AgentflowChat(engine).with_structured_output(schema, method=method, include_raw=True)
        both = raw.invoke("q")
        assert (await raw.ainvoke("q"))["parsed"] == expected
    assert both["parsed"] == expected
    assert both["parsing_error"] is None
    assert isinstance(both["raw"], AIMessage)
    schema_sent = json.dumps(engine.calls[0].sampling.json_schema)
    assert '"steps"' in schema_sent
    assert "array" in schema_sent


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_truncation_is_reported_as_such(method: str) -> None:
    cut = Answer(text='{"steps": ["a", "b', finish="length")
    with ScriptedEngine([cut] * 3) as engine:
        model = AgentflowChat(engine).with_structured_output(Plan, method=method)
        with pytest.raises(OutputTruncated, match="raise max_tokens") as caught:
            model.invoke("q")
        assert '{"steps": ["a", "b' in caught.value.text
        with pytest.raises(OutputTruncated):
            await model.ainvoke("q")
        both = AgentflowChat(engine).with_structured_output(Plan, method=method, include_raw=True).invoke("q")
    assert isinstance(both["parsing_error"], OutputTruncated)
    assert both["parsed"] is None
    assert both["raw"].response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("reply", "schema", "match"),
    [
        ({"steps": []}, Plan, "a plan has steps"),
        ("no json", Plan, "Expecting value"),
        ({"other": 1}, PlanDict, "missing: steps"),
        ([1], PlanDict, "an object was asked for"),
    ],
)
def test_what_no_grammar_can_check_is_checked(reply: Any, schema: Any, match: str) -> None:
    with ScriptedEngine([reply]) as engine, pytest.raises(OutputInvalid, match=match):
        AgentflowChat(engine).with_structured_output(schema).invoke("q")


def test_no_schema() -> None:
    with ScriptedEngine([]) as engine:
        with pytest.raises(UsageError, match="no schema"):
            AgentflowChat(engine).with_structured_output(7)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="method must be"):
            AgentflowChat(engine).with_structured_output(Plan, method="magic")


def test_response_format_of_openai() -> None:
    with ScriptedEngine([{"steps": ["a"]}]) as engine:
        wanted = {"type": "json_schema", "json_schema": {"name": "Plan", "schema": Plan.model_json_schema()}}
        AgentflowChat(engine).invoke("q", response_format=wanted)
    assert engine.calls[0].sampling.json_schema == Plan.model_json_schema()


# -- workflows -------------------------------------------------------------------------------------------------


async def test_calls_carry_coordinates_and_are_recorded() -> None:
    with ScriptedEngine(lambda c: "x") as engine:
        model = AgentflowChat(engine, agent="fallback")
        run = WorkflowRun(engine, "w1")
        model.invoke("q")
        current_run.set(run)
        current.set(Coordinates(workflow="w1", agent="coder", step=3, branch="b"))
        await model.ainvoke("q")
        model.invoke("q")
        list(model.stream("q"))
        [c async for c in model.astream("q")]
        current.set(Coordinates(workflow="w1"))
        model.invoke("q")
    assert engine.calls[0].at == Coordinates(agent="fallback")
    assert all(c.at == Coordinates(workflow="w1", agent="coder", step=3, branch="b") for c in list(engine.calls)[1:5])
    assert engine.calls[5].at.agent == "fallback"
    assert run.agents["coder"].calls == 4
    assert run.agents["coder"].usage.prompt_tokens == sum(len(c.token_ids) for c in list(engine.calls)[1:5])


async def test_cancelling_aborts_the_call() -> None:
    with ScriptedEngine(["slow one", "slow two"], delay=60) as engine:
        model = AgentflowChat(engine)

        async def stream() -> None:
            async for _ in model.astream("q"):
                pass

        for work in (model.ainvoke("q"), stream()):
            task = asyncio.ensure_future(work)
            await until(lambda: engine.stats().running == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.stats().running == 0
        assert [c.request_id for c in engine.calls] == list(engine.aborted)


def test_a_stream_closed_early_aborts_the_call() -> None:
    with ScriptedEngine(["one two three four five six seven eight nine ten"]) as engine:
        stream = AgentflowChat(engine).stream("q")
        next(stream)
        assert calls_in_flight("w") == []
        stream.close()  # type: ignore[attr-defined]
        assert engine.stats().running == 0
        assert len(engine.aborted) == 1


async def test_a_thread_whose_caller_is_gone_is_stopped_from_outside() -> None:
    with ScriptedEngine(["slow", "slow"], delay=60) as engine:
        model = AgentflowChat(engine)
        errors: list[BaseException] = []

        def node(agent: str) -> None:
            current.set(Coordinates(workflow="w1", agent=agent))
            try:
                model.invoke("q")
            except CallAborted as error:
                errors.append(error)

        threads = [threading.Thread(target=node, args=(a,)) for a in ("planner", "coder")]
        for thread in threads:
            thread.start()
        await until(lambda: len(calls_in_flight("w1")) == 2)
        assert [c.at.agent for c in calls_in_flight("w1", agent="coder")] == ["coder"]
        assert abort_calls("other") == 0
        assert abort_calls("w1", agent="coder") == 1
        await until(lambda: len(errors) == 1)
        assert abort_calls("w1") == 1
        for thread in threads:
            thread.join()
        assert len(errors) == 2
        assert calls_in_flight("w1") == []


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 (the engine has nothing to wait on)
        await asyncio.sleep(0.001)


# -- LangGraph -------------------------------------------------------------------------------------------------


def graph(model: Any) -> Any:
    def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    async def aagent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    from langchain_core.runnables import RunnableLambda

    builder = StateGraph(MessagesState)
    builder.add_node("agent", RunnableLambda(agent, aagent))
    builder.add_node("tools", ToolNode([add]))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", lambda s: "tools" if s["messages"][-1].tool_calls else "__end__")
    builder.add_edge("tools", "agent")
    return builder.compile()


async def test_a_graph_with_tools_in_every_stream_mode() -> None:
    script = [["Adding now.", tool_call("add", a=1, b=2)], "It is three, as everybody knows."] * 2
    with ScriptedEngine(script) as engine:  # type: ignore[arg-type]
        app = graph(AgentflowChat(engine).bind_tools([add]))
        shown = "".join(
            str(m.content) for m, _ in app.stream({"messages": [("user", "1+2")]}, stream_mode="messages")
            if isinstance(m, AIMessageChunk)
        )  # fmt: skip
        assert shown == "Adding now.It is three, as everybody knows."
        updates = [u async for u in app.astream({"messages": [("user", "1+2")]}, stream_mode="updates")]
    assert [next(iter(u)) for u in updates] == ["agent", "tools", "agent"]
    assert updates[1]["tools"]["messages"][0].content == "3"


async def test_events_of_the_second_version_are_streamed() -> None:
    with ScriptedEngine(["several words of an answer"]) as engine:
        app = graph(AgentflowChat(engine).bind_tools([add]))
        kinds: AsyncIterator[Any] = app.astream_events({"messages": [("user", "q")]}, version="v2")
        seen = [e["event"] async for e in kinds]
    assert seen.count("on_chat_model_stream") > 1
    assert seen.count("on_chat_model_end") == 1
