"""An agent as a node of a graph: it calls the model, runs the tools asked for, and writes its answer to the state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, ToolMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.types import Command
from pydantic import BaseModel, ValidationError

from agentflow.engine.base import Engine
from agentflow.engine.chat_model import AgentflowChat
from agentflow.engine.context import binder, current, current_run, run_for
from agentflow.engine.workflow import WorkflowRun
from agentflow.errors import OutputError, OutputInvalid, UsageError
from agentflow.events import SegmentProduced, StateSuperseded
from agentflow.graph._early import start_early, wrote
from agentflow.graph.agent import Agent
from agentflow.graph.answer import AgentAnswer, StopReason
from agentflow.graph.handler import NodeBinder
from agentflow.graph.prompt import Prompt, to_messages
from agentflow.graph.tool_node import tool_executor
from agentflow.tools import ToolExecutor

__all__ = ["AgentNode", "PromptFunction", "Writes", "positional_count"]

#: From the state to the agent's prompt; async functions are for graphs run asynchronously.
PromptFunction: TypeAlias = Callable[[Any], Any]
#: A state key for the answer's value, or a function from the answer (and the state) to an update or ``Command``.
Writes: TypeAlias = str | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Ask:
    """Wanted: what ``model`` says to ``messages``."""

    model: Runnable[Any, Any]
    messages: Sequence[BaseMessage]


@dataclass(frozen=True, slots=True)
class _Use:
    """Wanted: answers to the tool calls of ``message``."""

    message: AIMessage
    state: Any


_Steps: TypeAlias = Generator[_Ask | _Use, Any, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class AgentSpec:
    """An agent in its place in a graph."""

    agent: Agent
    prompt: PromptFunction | None
    writes: Writes | None
    history: str | None
    producers: Mapping[str, str]
    executor: ToolExecutor | None
    writes_state: bool = False


class AgentNode(Runnable[Any, Any]):
    """One step: the agent's prompt, the model's answer, rounds of tools, and the update of the state."""

    def __init__(self, spec: AgentSpec, model: BaseChatModel | None = None) -> None:
        self.spec = spec
        self.name = spec.agent.name
        self._model = model
        self._ready = _Ready.of(spec.agent, model) if model is not None else None

    def bound_to(self, model: BaseChatModel) -> AgentNode:
        """The same node on a chat model."""
        return AgentNode(self.spec, model)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Run the step, blocking this thread."""
        prompt = self.spec.prompt(input) if self.spec.prompt is not None else None
        if inspect.isawaitable(prompt):
            _discard(prompt)
            raise UsageError(f"agent {self.name!r} has an async prompt function: run the graph with ainvoke or arun")
        steps = self._steps(input, prompt)
        try:
            wanted = next(steps)
            while True:
                if isinstance(wanted, _Ask):
                    wanted = steps.send(wanted.model.invoke(wanted.messages, config))
                else:
                    assert self.spec.executor is not None
                    wanted = steps.send(self.spec.executor.run(wanted.message, state=wanted.state, config=config))
        except StopIteration as stop:
            return stop.value

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Run the step."""
        prompt = self.spec.prompt(input) if self.spec.prompt is not None else None
        if inspect.isawaitable(prompt):
            prompt = await prompt
        steps = self._steps(input, prompt)
        try:
            wanted = next(steps)
            while True:
                if isinstance(wanted, _Ask):
                    wanted = steps.send(await wanted.model.ainvoke(wanted.messages, config))
                else:
                    assert self.spec.executor is not None
                    answers = await self.spec.executor.arun(wanted.message, state=wanted.state, config=config)
                    wanted = steps.send(answers)
        except StopIteration as stop:
            return stop.value

    def _steps(self, state: Any, prompt: Prompt | None) -> _Steps:
        """The step as a series of wishes, so that it is written once for sync and async."""
        spec, ready = self.spec, self._ready or self._inherited()
        run = _enter(ready.engine)
        step = current.get().step
        bound = binder.get()
        scope = bound.node if run is not None and run.guards and isinstance(bound, NodeBinder) else None
        if scope is not None and run is not None:
            start_early(scope, run, self, state)
        past = list(_get(state, spec.history) or []) if spec.history else []
        asked = self._asked(state, prompt)
        talk = [*ready.head, *past, *asked]
        new: list[BaseMessage] = list(asked)
        commands: list[Any] = []
        rounds, stopped = 0, "answer"
        message: AIMessage | None = None
        value: Any = None

        while ready.talk is not None:
            message = yield _Ask(ready.talk, [*talk, *new[len(asked) :]])
            new.append(message)
            if not (message.tool_calls or message.invalid_tool_calls):
                break
            if rounds == spec.agent.max_tool_rounds or spec.executor is None:
                stopped = "tool_limit"
                new += _refused(message, spec.agent.max_tool_rounds)
                break
            rounds += 1
            answers = yield _Use(message, state)
            for answer in answers:
                _sort(answer, message, new, commands)

        if ready.structured is not None:
            value = _parsed(spec.agent, message) if message is not None and stopped == "answer" else None
            if value is None:
                got = yield _Ask(ready.structured, [*talk, *new[len(asked) :]])
                message, value = _checked(spec.agent, got)
                new.append(message)
        assert message is not None
        text = str(message.text)
        answer = AgentAnswer(
            agent=self.spec.agent.name,
            text=text,
            value=text if ready.structured is None else value,
            message=message,
            messages=tuple(new),
            tool_rounds=rounds,
            stopped=_stop_reason(stopped),
        )
        if run is not None:
            self._report(run, step, message)
        if scope is not None and run is not None:
            wrote(scope, run, self, answer.value)
        update = self._update(answer, state)
        return [update, *commands] if commands else update

    def opening(self, state: Any) -> list[BaseMessage] | None:
        """The messages with which the agent would begin on ``state``; None when that takes an async prompt function."""
        ready = self._ready or self._inherited()
        prompt = self.spec.prompt(state) if self.spec.prompt is not None else None
        if inspect.isawaitable(prompt):
            _discard(prompt)
            return None
        past = list(_get(state, self.spec.history) or []) if self.spec.history else []
        return [*ready.head, *past, *self._asked(state, prompt)]

    def first_model(self) -> Runnable[Any, Any]:
        """The model that the agent asks first."""
        ready = self._ready or self._inherited()
        model = ready.talk if ready.talk is not None else ready.structured
        assert model is not None
        return model

    def _asked(self, state: Any, prompt: Prompt | None) -> list[BaseMessage]:
        if self.spec.prompt is None:
            messages = _get(state, "messages")
            if not messages:
                raise UsageError(
                    f"agent {self.name!r} has no prompt function and the state's 'messages' is empty: give prompt="
                )
            return to_messages(messages)
        try:
            return to_messages(prompt if prompt is not None else "", producers=self.spec.producers)
        except UsageError as error:
            raise UsageError(f"agent {self.name!r}: {error}") from None

    def _report(self, run: WorkflowRun, step: int | None, message: AIMessage) -> None:
        if isinstance(self.spec.writes, str):
            tokens = message.usage_metadata["output_tokens"] if message.usage_metadata else 0
            run.emit(SegmentProduced, agent=self.spec.agent.name, step=step, slot=self.spec.writes, tokens=tokens)
        used = run.agents.get(self.spec.agent.name)
        if self.spec.history is None and self.spec.prompt is not None and used is not None and used.calls > 1:
            run.emit(StateSuperseded, agent=self.spec.agent.name, step=step)

    def _update(self, answer: AgentAnswer, state: Any) -> Any:
        writes, history = self.spec.writes, self.spec.history
        if writes is None:
            update: Any = {} if history else {"messages": self._own(answer)}
        elif isinstance(writes, str):
            update = {writes: answer.value}
        else:
            update = writes(answer, state) if self.spec.writes_state else writes(answer)
        if history is None:
            return update
        if update is None or isinstance(update, Mapping):
            return {**(update or {}), history: list(answer.messages)}
        if isinstance(update, Command) and (update.update is None or isinstance(update.update, Mapping)):
            return replace(update, update={**(update.update or {}), history: list(answer.messages)})
        raise UsageError(f"agent {self.name!r}: with history=, writes must return a dict or a Command with a dict")

    def _own(self, answer: AgentAnswer) -> list[BaseMessage]:
        """The new messages without those that were in the state before."""
        return list(answer.messages) if self.spec.prompt is not None else _after_input(answer)

    def _inherited(self) -> _Ready:
        """On the model of the graph around this one."""
        bound = binder.get()
        model = bound.node.root.binding.model if isinstance(bound, NodeBinder) else None
        if model is None:
            raise UsageError(
                f"agent {self.spec.agent.name!r} has no model: compile the graph with engine=..., or use it inside one"
                " that has"
            )
        return _Ready.of(self.spec.agent, model)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A chat model prepared for an agent: plain or with tools, and for structured answers."""

    head: Sequence[BaseMessage]
    talk: Runnable[Any, Any] | None
    structured: Runnable[Any, Any] | None
    engine: Engine | None

    @classmethod
    def of(cls, agent: Agent, model: BaseChatModel) -> _Ready:
        engine = getattr(model, "engine", None)
        options = agent.sampling if agent.adapter is None else {**agent.sampling, "adapter": agent.adapter}
        sampled: Any = model.bind(**options) if options else model
        talk: Any = None
        structured: Any = None
        if agent.tools:
            tools = list(tool_executor(agent.tools).tools.values())
            talk = model.bind_tools(tools, **options)
            if isinstance(model, AgentflowChat):  # the same prompt up to the answer, so that its KV is found again
                options = {**options, "tools": [convert_to_openai_tool(t) for t in tools]}
        elif agent.output is None:
            talk = sampled
        if agent.output is not None:
            structured = model.with_structured_output(agent.output, include_raw=True, **options)
        head = [SystemMessage(agent.instructions)] if agent.instructions else []
        return cls(head, talk, structured, engine if isinstance(engine, Engine) else None)


def _enter(engine: Engine | None) -> WorkflowRun | None:
    """Begin the agent's step in the surrounding workflow and make its coordinates the current ones."""
    bound = binder.get()
    if isinstance(bound, NodeBinder):
        engine = engine or bound.node.root.binding.engine
        return bound(engine) if engine is not None else None
    return run_for(engine) if engine is not None else current_run.get()


def _after_input(answer: AgentAnswer) -> list[BaseMessage]:
    for i, message in enumerate(answer.messages):
        if message is answer.message or (isinstance(message, AIMessage) and message.tool_calls):
            return list(answer.messages[i:])
    return [answer.message]


def _sort(answer: Any, message: AIMessage, new: list[BaseMessage], commands: list[Any]) -> None:
    """Keep a tool's answer in the talk, and a command that it gave for the graph."""
    if isinstance(answer, ToolMessage):
        new.append(answer)
        return
    for command in answer if isinstance(answer, list) else [answer]:
        update = command.update if isinstance(command, Command) else None
        if isinstance(update, Mapping) and "messages" in update:
            ids = {c["id"] for c in message.tool_calls}
            said = [m for m in update["messages"] if isinstance(m, ToolMessage) and m.tool_call_id in ids]
            new += said
            command = replace(command, update={k: v for k, v in update.items() if k != "messages"})
        commands.append(command)


def _refused(message: AIMessage, rounds: int) -> list[BaseMessage]:
    text = f"not run: the agent's limit of {rounds} rounds of tools is reached"
    calls = [*message.tool_calls, *message.invalid_tool_calls]
    return [ToolMessage(text, tool_call_id=c["id"] or "", name=c["name"] or "", status="error") for c in calls]


def _parsed(agent: Agent, message: AIMessage) -> Any:
    """The answer's text as the agent's output if it happens to be that already, else None."""
    if not (isinstance(agent.output, type) and issubclass(agent.output, BaseModel)):
        return None
    try:
        return agent.output.model_validate_json(str(message.text))
    except ValidationError:
        return None


def _checked(agent: Agent, got: Any) -> tuple[AIMessage, Any]:
    """Message and value of a structured answer; raises an OutputError for one that does not fit."""
    raw, value, error = got["raw"], got["parsed"], got["parsing_error"]
    if isinstance(error, OutputError):
        raise error
    if error is not None or value is None:
        text = str(raw.text)
        raise OutputInvalid(
            f"agent {agent.name!r} did not answer in the form of its output schema: {error or 'nothing was parsed'}",
            text=text,
        ) from error
    return raw, value


def _stop_reason(stopped: str) -> StopReason:
    return "tool_limit" if stopped == "tool_limit" else "answer"


def _get(state: Any, key: str) -> Any:
    return state.get(key) if isinstance(state, Mapping) else getattr(state, key, None)


def _discard(awaitable: Any) -> None:
    close = getattr(awaitable, "close", None)
    if close is not None:
        close()


def positional_count(function: Callable[..., Any]) -> int | None:
    """How many positional arguments ``function`` must be given; None when it cannot be told."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)
