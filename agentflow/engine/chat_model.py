"""``AgentflowChat``: a LangChain chat model over any engine."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field

from agentflow.engine._messages import Expected, answer_chunk, answer_message, to_dicts
from agentflow.engine._structured import json_schema_of, reader, with_raw
from agentflow.engine.base import Call, Chunk, Completion, Engine, Reuse, Sampling
from agentflow.engine.context import current, default_reuse, run_for
from agentflow.engine.guarded import aguarded, done_of, early, guarded, guards_now, refuse, work_of
from agentflow.engine.in_flight import tracked
from agentflow.engine.prompt import PromptBuilder
from agentflow.engine.tool_calls import ContentGate, tool_call_schema
from agentflow.engine.workflow import WorkflowRun
from agentflow.errors import CallAborted, UsageError
from agentflow.runtime.guards import Done, Guards

__all__ = ["AgentflowChat", "DEFAULT_MAX_TOKENS"]

#: Tokens that an answer may have when nobody says how many; fewer where the context ends before.
DEFAULT_MAX_TOKENS = 512

_SAMPLING = ("temperature", "top_p", "top_k", "seed", "json_schema", "regex", "ignore_eos", "forced_tokens")
#: Arguments that LangChain passes along and that mean nothing here.
_IGNORED = frozenset(
    {"stream", "ls_structured_output_format", "structured_output_format", "parallel_tool_calls", "strict"}
)
_builders: WeakKeyDictionary[Engine, PromptBuilder] = WeakKeyDictionary()
_builders_lock = threading.Lock()


def builder_of(engine: Engine) -> PromptBuilder:
    """The engine's prompt builder, shared by all chat models over it."""
    with _builders_lock:
        if engine not in _builders:
            _builders[engine] = PromptBuilder(engine.tokenizer)
        return _builders[engine]


class AgentflowChat(BaseChatModel):
    """A chat model whose answers come from ``engine``.

    Sampling set here holds for all its calls; each value may be given per call as well
    (``model.invoke(messages, max_tokens=50)`` or ``model.bind(temperature=0.7)``). Calls made inside a workflow
    carry its coordinates and count in its report; ``agent`` names the agent of calls made outside one.

    An answer's ``usage_metadata`` counts cached tokens in ``input_token_details.cache_read``; its
    ``response_metadata`` holds ``finish_reason``, ``request_id``, ``timings`` (seconds), ``cached_tokens`` by
    tier, ``token_ids`` and the ``decisions`` taken for the call.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    engine: Engine = Field(exclude=True, repr=False)
    agent: str | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: list[str] | None = None
    #: Seconds that a call may take; None means no limit.
    time_limit: float | None = None
    #: The LoRA adapter that calls run with, by the name under which the engine knows it.
    adapter: str | None = None
    #: ``corrected`` lets calls use other agents' KV of what they share, corrected; None does as the graph does.
    reuse: Reuse | None = None

    def __init__(self, engine: Engine, **options: Any) -> None:
        super().__init__(**{"engine": engine, **options})

    @property
    def _llm_type(self) -> str:
        return "agentflow"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.engine.model, "temperature": self.temperature, "max_tokens": self.max_tokens}

    def get_num_tokens(self, text: str) -> int:
        """Tokens of ``text`` in the engine's tokenizer."""
        return len(self.engine.tokenizer.encode(text))

    def get_num_tokens_from_messages(self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that ``messages`` make, the chat template's own text included."""
        listed = [convert_to_openai_tool(t) for t in tools] if tools else None
        return len(builder_of(self.engine).build(to_dicts(messages), tools=listed).token_ids)

    def bind_tools(
        self,
        tools: Sequence[Mapping[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """A model that may call ``tools``.

        ``tool_choice``: ``"auto"`` (the default); ``"none"``; ``"any"``, ``"required"`` or True for some tool;
        the name of one tool. A forced call is held to its schema by grammar.
        """
        listed = [convert_to_openai_tool(t if not isinstance(t, Mapping) else dict(t)) for t in tools]
        _forced(tool_choice, listed)
        if tool_choice is not None:
            kwargs["tool_choice"] = tool_choice
        return super().bind(tools=listed, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: str = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A model that answers with objects of ``schema``: a pydantic class, a TypedDict or a JSON schema.

        The text is held to the schema by grammar, so that it is valid whatever the model (``strict`` adds
        nothing to that). ``method`` ``"json_schema"`` and ``"json_mode"`` read the text, ``"function_calling"``
        a forced tool call. An answer cut at ``max_tokens`` raises
        :class:`~agentflow.errors.OutputTruncated`; with ``include_raw`` it is the ``parsing_error`` of
        ``{"raw", "parsed", "parsing_error"}``. Further arguments are sampling, as for a call.
        """
        if method not in ("json_schema", "json_mode", "function_calling"):
            raise UsageError(f"method must be json_schema, json_mode or function_calling, got {method!r}")
        by_call = method == "function_calling"
        shape = json_schema_of(schema)
        noted = {"kwargs": {"method": method}, "schema": shape}
        if by_call:
            model = self.bind_tools([schema], tool_choice="any", ls_structured_output_format=noted, **kwargs)
        else:
            model = super().bind(json_schema=shape, ls_structured_output_format=noted, **kwargs)
        read = reader(schema, from_call=by_call)
        if include_raw:
            return RunnableMap({"raw": model}) | RunnableLambda(with_raw(read))
        return model | RunnableLambda(read)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        asked = self._ask(messages, stop, kwargs)
        if (guards := guards_now(self.engine)) and early.get() is None:
            return asked.result(guarded(self.engine, asked.call, guards))
        with tracked(self.engine, asked.call):
            completion = self.engine.generate(asked.call)
        return asked.result(completion)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        asked = self._ask(messages, stop, kwargs)
        ahead = early.get()
        if ahead is not None:
            return asked.result(await ahead.run(self.engine, asked.call))
        if guards := guards_now(self.engine):
            return asked.result(await aguarded(self.engine, asked.call, guards))
        with tracked(self.engine, asked.call):
            completion = await self.engine.agenerate(asked.call)
        return asked.result(completion)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        asked = self._ask(messages, stop, kwargs)
        asked.begin_stream()
        source: Any = self.engine.stream(asked.call)
        closes = closing(source) if hasattr(source, "close") else nullcontext()
        with asked.accounted(), tracked(self.engine, asked.call), closes:
            for chunk in source:
                for out in asked.chunks(chunk):
                    if run_manager is not None:
                        run_manager.on_llm_new_token(str(out.message.content), chunk=out)
                    yield out

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        asked = self._ask(messages, stop, kwargs)
        asked.begin_stream()
        source: Any = self.engine.astream(asked.call)
        with asked.accounted(), tracked(self.engine, asked.call):
            async with aclosing(source) if hasattr(source, "aclose") else nullcontext():
                async for chunk in source:
                    for out in asked.chunks(chunk):
                        if run_manager is not None:
                            await run_manager.on_llm_new_token(str(out.message.content), chunk=out)
                        yield out

    def _ask(self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> _Asked:
        """Turn LangChain's arguments into a call. Raises ``UsageError`` for an argument that does not exist."""
        options = {k: v for k, v in kwargs.items() if k not in _IGNORED}
        tools = options.pop("tools", None) or None
        choice = options.pop("tool_choice", None)
        if choice == "none":
            tools = None
        if (wanted := options.pop("response_format", None)) is not None:
            options.setdefault("json_schema", json_schema_of(wanted))
        expected: Expected = "calls" if tools else "text"
        if tools and (forced := _forced(choice, tools)) is not None:
            expected = "call"
            options["json_schema"] = forced
        prompt = builder_of(self.engine).build(to_dicts(messages), tools=tools)
        limit = options.pop("time_limit", self.time_limit)
        request_id = options.pop("request_id", None)
        adapter = options.pop("adapter", self.adapter)
        reuse = options.pop("reuse", self.reuse)
        sampling = self._sampling(options, stop, room=self._room() - len(prompt.token_ids))
        run = run_for(self.engine)
        at = current.get()
        call = Call(
            token_ids=prompt.token_ids,
            segments=prompt.segments,
            anchor=prompt.anchor,
            adapter=adapter,
            reuse=reuse or (run.reuse if run is not None else default_reuse.get()),
            at=replace(at, agent=self.agent) if at.agent is None and self.agent is not None else at,
            sampling=sampling,
            time_limit=limit,
            **({"request_id": request_id} if request_id is not None else {}),
        )
        return _Asked(call, self.engine, expected, run, ContentGate() if expected == "calls" else None)

    def _room(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        pool = getattr(self.engine, "pool_tokens", None)
        return min(self.engine.context_length, pool) if pool is not None else self.engine.context_length

    def _sampling(self, options: dict[str, Any], stop: Sequence[str] | None, *, room: int) -> Sampling:
        max_tokens = options.pop("max_tokens", self.max_tokens)
        if max_tokens is None:
            max_tokens = max(1, min(DEFAULT_MAX_TOKENS, room))
        values: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        values["seed"] = self.seed
        for name in _SAMPLING:
            if (value := options.pop(name, None)) is not None:
                values[name] = value
        if options:
            raise UsageError(
                f"unknown argument {', '.join(sorted(options))} for a model call: known are max_tokens, stop,"
                f" time_limit, request_id, adapter, reuse, tools, tool_choice, response_format, {', '.join(_SAMPLING)}"
            )
        if "forced_tokens" in values:
            values["forced_tokens"] = tuple(values["forced_tokens"])
        stops = stop if stop is not None else self.stop or ()
        return Sampling(max_tokens=max_tokens, stop=tuple([stops] if isinstance(stops, str) else stops), **values)


def _forced(choice: Any, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The schema that ``tool_choice`` holds the answer to, None where the model is free."""
    if choice is None or choice is False or choice in ("auto", "none"):
        return None
    if isinstance(choice, Mapping):
        choice = choice.get("function", choice).get("name", choice.get("type"))
    if choice is True or choice in ("any", "required"):
        return tool_call_schema(tools)
    names = [t["function"]["name"] for t in tools]
    if choice not in names:
        raise UsageError(f"tool_choice {choice!r} is none of the tools {names}, nor auto, none, any or required")
    return tool_call_schema(tools, choice)


@dataclass(slots=True)
class _Asked:
    """A call on its way, and what its answer is to become."""

    call: Call
    engine: Engine
    expected: Expected
    run: WorkflowRun | None
    gate: ContentGate | None
    passed: int = 0
    tokens: int = 0
    guards: tuple[Guards, ...] = ()

    def begin_stream(self) -> None:
        """Ask the guards whether the call may be made; they hear how it went, and are not around it."""
        self.guards = guards_now(self.engine)
        if self.guards:
            refuse(self.guards, work_of(self.call))

    @contextmanager
    def accounted(self) -> Iterator[None]:
        """A stream that is left before its end was used as far as it came: the guards hear of that."""
        try:
            yield
        finally:
            used = Done(value=None, ok=False, prompt_tokens=len(self.call.token_ids), output_tokens=self.tokens)
            for each in self.guards:
                each.finished(work_of(self.call), used)

    def result(self, completion: Completion) -> ChatResult:
        """The answer as LangChain's result; the workflow's report gets it too."""
        self._record(completion)
        message = answer_message(completion, self._raw(completion), self.expected)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def chunks(self, chunk: Chunk) -> Iterator[ChatGenerationChunk]:
        """A chunk of the answer as LangChain's chunks; text that may begin a tool call is held back."""
        text = chunk.text
        self.tokens += len(chunk.token_ids)
        if self.expected == "call":
            text = ""
        elif self.gate is not None:
            text = self.gate.feed(text)
        if text:
            self.passed += len(text)
            yield ChatGenerationChunk(message=AIMessageChunk(content=text))
        if chunk.completion is not None:
            guards, self.guards = self.guards, ()
            for each in guards:
                each.finished(work_of(self.call), done_of(chunk.completion))
            self._record(chunk.completion)
            raw = self._raw(chunk.completion)
            message = answer_chunk(chunk.completion, raw, self.expected, passed=self.passed)
            yield ChatGenerationChunk(message=message)

    def _record(self, completion: Completion) -> None:
        if self.run is not None:
            self.run.record(self.call.at, completion)
        if completion.finish == "abort":
            raise CallAborted(
                f"call {completion.request_id} was aborted after {len(completion.token_ids)} tokens; its text is lost,"
                " what it computed stays cached"
            )

    def _raw(self, completion: Completion) -> str:
        """The text with the special tokens that mark tool calls, where the ids say the same as the text."""
        if self.expected == "text":
            return completion.text
        tokenizer = self.engine.tokenizer
        ids = completion.token_ids
        while ids and ids[-1] in tokenizer.eos_token_ids:
            ids = ids[:-1]
        if tokenizer.decode(ids) != completion.text:
            return completion.text
        return tokenizer.decode(ids, skip_special_tokens=False)
