"""The engine protocol: what a call is, what comes back, and what every engine can do.

An engine takes token ids with the coordinates of the call (workflow, agent, step, segments), answers with a
:class:`Completion`, and takes in events about the workflow between calls. Sync and async twins may be used
at once and from any thread.
"""

from __future__ import annotations

import numbers
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, get_args

from agentflow.cache.decision import Decision
from agentflow.errors import BadSampling, EmptyPrompt, PromptTooLong, UsageError
from agentflow.events import Event
from agentflow.runtime.guards import Guards

__all__ = [
    "Call",
    "Chunk",
    "Completion",
    "Coordinates",
    "Engine",
    "EngineStats",
    "FinishReason",
    "Reuse",
    "Sampling",
    "Segment",
    "Timings",
    "Tokenizer",
    "Usage",
    "check_call",
    "check_reuse",
    "new_id",
]

FinishReason = Literal["stop", "length", "abort"]
#: Whether a call may use other agents' KV of shared segments, corrected: ``corrected``, or ``exact`` for not.
Reuse = Literal["exact", "corrected"]


def new_id(prefix: str) -> str:
    """A fresh id such as ``call-3f2a...``, unique across processes."""
    return f"{prefix}-{uuid.uuid4().hex[:20]}"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``start .. start + length`` of a prompt.

    A ``private`` segment belongs to one agent (its instructions, its glue text). A ``shared`` one fills the
    slot ``slot`` with text that several agents read; ``producer`` is the agent that wrote it, None for text
    from outside (the user's question).
    """

    kind: Literal["private", "shared"]
    start: int
    length: int
    slot: str | None = None
    producer: str | None = None


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where in a workflow a call belongs. ``branch`` tells parallel tasks of one agent apart."""

    workflow: str | None = None
    agent: str | None = None
    step: int | None = None
    branch: str | None = None
    parent: str | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose tokens.

    ``temperature`` 0 is greedy. ``json_schema`` (a JSON schema as a dict) or ``regex`` constrain the text by
    grammar; at most one of them. ``ignore_eos`` keeps going to ``max_tokens``.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None
    ignore_eos: bool = False
    #: Tokens that replace whatever is sampled, one by one (replay of recorded calls).
    forced_tokens: tuple[int, ...] | None = None

    def check(self) -> None:
        """Raise :class:`~agentflow.errors.BadSampling` for a value outside its range."""
        bad: list[str] = []
        kinds = {
            "temperature": numbers.Real,
            "top_p": numbers.Real,
            "top_k": numbers.Integral,
            "seed": numbers.Integral,
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if (isinstance(value, bool) or not isinstance(value, kind)) and not (name == "seed" and value is None):
                bad.append(f"{name} must be {'a number' if kind is numbers.Real else 'an integer'}, got {value!r}")
        if isinstance(self.stop, str) or not all(isinstance(s, str) for s in self.stop):
            bad.append(f"stop must be a list of strings, got {self.stop!r}")
        if bad:
            raise BadSampling("; ".join(bad))
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            bad.append(f"max_tokens must be an integer of at least 1, got {self.max_tokens!r}")
        if not 0.0 <= self.temperature <= 100.0:  # also refuses NaN
            bad.append(f"temperature must be between 0 and 100, got {self.temperature!r}")
        if not 0.0 < self.top_p <= 1.0:
            bad.append(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if self.top_k != -1 and self.top_k < 1:
            bad.append(f"top_k must be at least 1, or -1 for all tokens, got {self.top_k!r}")
        if any(not s for s in self.stop):
            bad.append("stop strings must not be empty")
        if self.json_schema is not None and self.regex is not None:
            bad.append("give json_schema or regex, not both")
        if bad:
            raise BadSampling("; ".join(bad))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One generate call: a prompt as token ids, where it belongs, and how to sample.

    ``segments`` cover the prompt without gap or overlap, or are empty when nothing is known of its parts.
    ``time_limit`` is in seconds, from submission to the last token; None means no limit. The first ``anchor`` tokens
    are the agent's own in every call (its system prompt and tools), 0 when not known. ``adapter`` is the LoRA adapter
    to run with, by the name under which the engine knows it.
    """

    token_ids: Sequence[int]
    segments: tuple[Segment, ...] = ()
    anchor: int = 0
    adapter: str | None = None
    at: Coordinates = Coordinates()
    sampling: Sampling = Sampling()
    request_id: str = field(default_factory=lambda: new_id("call"))
    time_limit: float | None = None
    #: ``corrected`` opts in to KV of shared segments that is another agent's, corrected, and so only nearly exact.
    reuse: Reuse = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a call. ``cached_*`` and ``corrected`` are parts of ``prompt_tokens``.

    ``cached_device`` tokens were found in device memory, ``cached_host`` loaded from host memory, ``corrected``
    reused from another agent with a correction; the rest was computed.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_device: int = 0
    cached_host: int = 0
    corrected: int = 0

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        return self.cached_device + self.cached_host + self.corrected

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cached_device=self.cached_device + other.cached_device,
            cached_host=self.cached_host + other.cached_host,
            corrected=self.corrected + other.corrected,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of a call as its caller saw them: to the first token, and in all. 0.0 where not known.

    Of a call that was not streamed the engine reports when its first token was there. ``queue`` is the time before the
    engine began to work on it, as the engine reports it.
    """

    queue: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What came of a call. ``finish`` ``length`` means that ``max_tokens`` cut it."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason
    usage: Usage = Usage()
    timings: Timings = Timings()
    decisions: tuple[Decision, ...] = ()
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a streamed answer: the text and token ids that are new. The last one carries ``completion``."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    completion: Completion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine. Token counts are slots of the KV pool; ``counters`` only ever grow.

    ``device_total == device_free + device_cached + device_held`` when the engine is idle (integrity).
    """

    policy: str = ""
    running: int = 0
    waiting: int = 0
    device_total: int = 0
    device_free: int = 0
    device_cached: int = 0
    device_held: int = 0
    host_total: int = 0
    host_free: int = 0
    workflows_live: int = 0
    workflows_paused: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


class Tokenizer(Protocol):
    """The part of a tokenizer that agentflow uses."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, with no token added; special tokens written in it are recognised."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Ids of ``text`` from outside: what is spelt like a special token is text like any other."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The model's chat template applied to OpenAI-style messages, as text."""
        ...


class Engine(ABC):
    """Runs calls. Thread-safe; sync and async callers may share one engine.

    Contract of every engine: a :class:`~agentflow.errors.BadRequest` is raised before anything is sent;
    cancelling an ``agenerate`` or closing a stream early aborts the work in the engine; after :meth:`close`
    every call raises :class:`~agentflow.errors.EngineClosed`; :meth:`emit` never blocks and never raises.
    """

    #: Name of the model, as results report it.
    model: str = ""
    #: Tokens of prompt and answer together that the model can take.
    context_length: int = 0
    #: The policies that the framework drives for this engine's calls, None when none were chosen.
    guards: Guards | None = None

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @abstractmethod
    async def agenerate(self, call: Call) -> Completion:
        """Run a call to its end."""

    @abstractmethod
    def generate(self, call: Call) -> Completion:
        """Run a call to its end, blocking this thread."""

    @abstractmethod
    def astream(self, call: Call) -> AsyncIterator[Chunk]:
        """Run a call and yield its text as it comes; the last chunk carries the completion."""

    @abstractmethod
    def stream(self, call: Call) -> Iterator[Chunk]:
        """Like :meth:`astream`, blocking this thread."""

    @abstractmethod
    def emit(self, event: Event) -> None:
        """Tell the engine about the workflow. Buffered and sent on soon; order is kept."""

    @abstractmethod
    async def aflush(self) -> None:
        """Wait until every event emitted before is with the scheduler."""

    @abstractmethod
    def flush(self) -> None:
        """Like :meth:`aflush`, blocking this thread."""

    @abstractmethod
    async def astats(self) -> EngineStats:
        """Ask the engine how it is."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Like :meth:`astats`, blocking this thread."""

    @abstractmethod
    def decisions(self, *, since: int = 0) -> list[Decision]:
        """Decisions with ``seq > since``, oldest first, as far as the bounded log still holds them."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Stop the call ``request_id``, if it runs. Its caller gets a completion with finish ``abort``."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Calls in flight fail with ``EngineClosed``. Closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


def check_reuse(reuse: object) -> None:
    """Raise :class:`~agentflow.errors.UsageError` for anything but a value of :data:`Reuse`."""
    if reuse not in get_args(Reuse):
        raise UsageError(f"reuse must be 'exact' or 'corrected', got {reuse!r}")


def check_call(call: Call, *, context_length: int, pool_tokens: int | None = None) -> None:
    """Raise a :class:`~agentflow.errors.BadRequest` for a call that can never run.

    ``context_length`` and ``pool_tokens`` (slots of the KV pool) bound prompt and answer together.
    """
    call.sampling.check()
    check_reuse(call.reuse)
    n = len(call.token_ids)
    if n == 0:
        raise EmptyPrompt("the prompt is empty: a call needs at least one token")
    wanted = n + call.sampling.max_tokens
    if wanted > context_length:
        raise PromptTooLong(
            f"prompt of {n} tokens and max_tokens={call.sampling.max_tokens} make {wanted}, over the model's context of"
            f" {context_length}: shorten the prompt or lower max_tokens"
        )
    if pool_tokens is not None and wanted > pool_tokens:
        raise PromptTooLong(
            f"prompt of {n} tokens and max_tokens={call.sampling.max_tokens} make {wanted}, over the KV pool of"
            f" {pool_tokens} tokens: shorten the prompt, lower max_tokens, or start the engine with a larger"
            " max_total_tokens"
        )
