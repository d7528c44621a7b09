"""From chat messages to token ids with exact segment boundaries.

The chat template is rendered with marks in place of the parts of the messages; what stands between the marks
is the template's own text. All pieces are tokenised one by one and put together, so that every boundary
between pieces is a boundary between tokens, the tokens of a message never depend on what follows it, and the
same text gives the same tokens in every prompt. What users and tools write cannot end a message or begin another
one: in it the spelling of a special token is plain text.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from agentflow.engine._dialect import Dialect
from agentflow.engine.base import Segment, Tokenizer
from agentflow.errors import BadRequest

__all__ = ["BuiltPrompt", "PromptBuilder"]

Message: TypeAlias = Mapping[str, Any]
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt. ``segments`` cover ``token_ids`` without gap or overlap.

    ``unsplit`` says why the template could not be split into pieces; the prompt is then one private segment. The
    first ``anchor`` tokens are the template's own text, the tools and the private part of the system prompt.
    """

    token_ids: list[int]
    segments: tuple[Segment, ...]
    text: str
    unsplit: str | None = None
    anchor: int = 0


@dataclass(slots=True)
class _Part:
    """A stretch of one message's content. ``message`` is the position of its message, ``mark`` stands for it."""

    text: str
    message: int
    role: str
    slot: str | None = None
    producer: str | None = None
    ids: tuple[int, ...] | None = None
    mark: str = ""


@dataclass(slots=True)
class _Piece:
    """Text that is tokenised on its own. ``ids`` are given where the tokens are known already.

    ``outside`` text is a user's or a tool's: nothing in it is a special token.
    """

    text: str
    slot: str | None = None
    producer: str | None = None
    ids: tuple[int, ...] | None = None
    outside: bool = False
    anchors: bool = True


@dataclass(slots=True)
class _Laid:
    """Messages as the template gets them, and their parts."""

    messages: list[dict[str, Any]]
    parts: list[_Part] = field(default_factory=list)


class PromptBuilder:
    """Builds prompts for one model. Thread-safe; build one per tokenizer and keep it.

    Messages are dicts as OpenAI writes them: ``role``, ``content`` (text, or a list of text parts of which
    those with a ``slot`` are shared, with the ``producer`` that wrote them), ``tool_calls`` with arguments as
    an object. An assistant message may carry ``generated`` (``text`` and ``token_ids`` of the answer it was):
    where the ids decode to the text, they are used as they are, so that the KV of the answer is found again.

    ``counters`` counts prompts, pieces tokenised and found, answers spliced, and per reason the prompts that
    could not be split. Tokens of pieces are kept up to ``cache_tokens``, least recently used dropped first.
    """

    def __init__(self, tokenizer: Tokenizer, *, cache_tokens: int = 1_000_000) -> None:
        self.counters: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._dialect = Dialect(tokenizer)
        self._encoded: _Cache[tuple[str, bool], tuple[int, ...]] = _Cache(cache_tokens)
        self._decoded: _Cache[tuple[int, ...], str] = _Cache(cache_tokens)

    def build(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
    ) -> BuiltPrompt:
        """The prompt for ``messages``. Raises ``BadRequest`` for content that is no text."""
        listed = [self._prepared(m) for m in messages]
        adapted, tools = self._dialect.adapt(listed, tools)
        laid = _lay_out(adapted)
        plain = self._tokenizer.render(laid.messages, tools=tools, add_generation_prompt=add_generation_prompt)
        self.counters["prompts"] += 1
        reason: str | None = "tokenizer"
        if self._dialect.splits:
            pieces = self._split(laid, plain, tools, add_generation_prompt)
            if pieces is not None:
                return self._assemble(pieces, plain)
            reason = "template"
        self.counters[f"unsplit_{reason}"] += 1
        return self._assemble([_Piece(plain)], plain, unsplit=reason)

    def _prepared(self, message: Message) -> dict[str, Any]:
        """The message with its content as parts, and a generated answer as the one part it was."""
        out = {k: v for k, v in message.items() if k != "generated"}
        out["content"] = _parts_of(message)
        generated = message.get("generated")
        if generated is not None:
            ids = self._answer_ids(generated)
            if ids is not None:
                out["content"] = [{"text": generated["text"], "ids": ids}]
                out.pop("tool_calls", None)
        return out

    def _answer_ids(self, generated: Mapping[str, Any]) -> tuple[int, ...] | None:
        ids = tuple(generated["token_ids"])
        while ids and ids[-1] in self._tokenizer.eos_token_ids:
            ids = ids[:-1]
        text = self._decoded.get(ids)
        if text is None:
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            self._decoded.put(ids, text, len(ids))
        return ids if ids and text == generated["text"] else None

    def _split(
        self, laid: _Laid, plain: str, tools: Sequence[Message] | None, add_generation_prompt: bool
    ) -> list[_Piece] | None:
        """The pieces of ``plain``; None when the template treats marks otherwise than text.

        A template may look into some messages (thoughts of an assistant, answers of tools); those are left
        unmarked in further tries.
        """
        opening, closing = _marks(plain)
        tries: tuple[Callable[[_Part], bool], ...] = (
            lambda p: True,
            lambda p: p.slot is not None or p.role != "assistant",
            lambda p: p.slot is not None or p.role in ("system", "user"),
            lambda p: p.slot is not None,
        )
        tried: list[_Part] | None = None
        for number, wanted in enumerate(tries):
            parts = [p for p in laid.parts if p.text.strip() and wanted(p)]
            if parts == tried:
                continue
            tried = parts
            for i, part in enumerate(parts):
                part.mark = f"{opening}{i}{closing}"
            try:
                marked = self._tokenizer.render(
                    _marked(laid, parts), tools=tools, add_generation_prompt=add_generation_prompt
                )
            except BadRequest:
                continue
            pieces = _walk(re.split(f"{opening}(\\d+){closing}", marked), parts, plain, self._dialect)
            if pieces is not None:
                self.counters["partly_split"] += number > 0
                if not _anchored(laid, parts):
                    pieces[0].anchors = False
                return pieces
        return None

    def _assemble(self, pieces: Iterable[_Piece], text: str, *, unsplit: str | None = None) -> BuiltPrompt:
        ids: list[int] = []
        segments: list[Segment] = []
        anchor = 0 if unsplit is not None else None
        for piece in pieces:
            start = len(ids)
            if anchor is None and not piece.anchors:
                anchor = start
            if piece.ids is not None:
                self.counters["answers_spliced"] += 1
                ids += piece.ids
            else:
                ids += self._encode(piece.text, piece.outside)
            length = len(ids) - start
            if not length:
                continue
            if piece.slot is not None:
                segments.append(Segment("shared", start, length, piece.slot, piece.producer))
            elif segments and segments[-1].kind == "private":
                segments[-1] = Segment("private", segments[-1].start, segments[-1].length + length)
            else:
                segments.append(Segment("private", start, length))
        return BuiltPrompt(ids, tuple(segments), text, unsplit, len(ids) if anchor is None else anchor)

    def _encode(self, text: str, outside: bool) -> tuple[int, ...]:
        ids = self._encoded.get((text, outside))
        if ids is None:
            encode = self._tokenizer.encode_plain if outside else self._tokenizer.encode
            ids = tuple(encode(text))
            self._encoded.put((text, outside), ids, len(ids))
            self.counters["pieces_tokenised"] += 1
        else:
            self.counters["pieces_found"] += 1
        return ids


class _Cache(Generic[K, V]):
    """Least recently used values, bounded by the sum of their weights."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._weight = 0
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            found = self._items.get(key)
            if found is None:
                return None
            self._items.move_to_end(key)
            return found[0]

    def put(self, key: K, value: V, weight: int) -> None:
        weight += 16  # what an entry costs even when its value is empty
        with self._lock:
            if key in self._items:
                return
            self._items[key] = (value, weight)
            self._weight += weight
            while self._weight > self._limit and self._items:
                self._weight -= self._items.popitem(last=False)[1][1]


def _parts_of(message: Message) -> list[dict[str, Any]]:
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [{"text": content}] if content else []
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            parts.append({"text": part})
        elif isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            parts.append(dict(part))
        else:
            kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
            raise BadRequest(
                f"a {message['role']} message holds content of type {kind!r}; agentflow models take text only:"
                " put what the model needs of it into words"
            )
    return [p for p in parts if p["text"]]


def _lay_out(messages: Sequence[Message]) -> _Laid:
    laid = _Laid([])
    for number, message in enumerate(messages):
        parts = [
            _Part(p["text"], number, message["role"], p.get("slot"), p.get("producer"), p.get("ids"))
            for p in message["content"]
            if p["text"]
        ]
        laid.parts += parts
        laid.messages.append({**message, "content": "".join(p.text for p in parts)})
    return laid


def _marked(laid: _Laid, parts: Sequence[_Part]) -> list[dict[str, Any]]:
    chosen = {id(p) for p in parts}
    contents: dict[int, list[str]] = {}
    for part in laid.parts:
        contents.setdefault(part.message, []).append(part.mark if id(part) in chosen else part.text)
    return [{**m, "content": "".join(contents.get(i, ()))} for i, m in enumerate(laid.messages)]


def _anchored(laid: _Laid, marked: Sequence[_Part]) -> bool:
    """Whether nothing but the template, the tools and private system text comes before the first other marked part."""
    first = next((i for i, m in enumerate(laid.messages) if m["role"] != "system"), None)
    opening = next((p for p in laid.parts if p.role != "system" or p.slot is not None), None)
    if opening is None:
        return first is None
    return any(opening is p for p in marked) and (opening.role == "system" or opening.message == first)


def _marks(text: str) -> tuple[str, str]:
    """Two characters that ``text`` does not hold."""
    free = (c for c in map(chr, range(0xE000, 0xF8FF)) if c not in text)
    return next(free), next(free)


def _walk(marked: Sequence[str], parts: Sequence[_Part], plain: str, dialect: Dialect) -> list[_Piece] | None:
    """Follow the marked rendering along the plain one; a template may strip the ends of a message's content.

    ``marked`` alternates template text and numbers of parts. None when the two do not fit together.
    """
    pieces: list[_Piece] = []
    glue = marked[0]
    if not plain.startswith(glue):
        return None
    pieces += _glue(glue, None, None, dialect)
    at = len(glue)
    for i in range(1, len(marked), 2):
        part = parts[int(marked[i])]
        glue = marked[i + 1]
        last = i + 2 >= len(marked)
        for text in (part.text, part.text.strip(), part.text.lstrip(), part.text.rstrip()):
            end = at + len(text) + len(glue)
            if (
                plain.startswith(text, at)
                and plain.startswith(glue, at + len(text))
                and (not last or end == len(plain))
            ):
                break
        else:
            return None
        ids = part.ids if text == part.text else None
        pieces.append(_Piece(text, part.slot, part.producer, ids, outside=part.role != "assistant"))
        pieces[-1].anchors = part.role == "system" and part.slot is None
        following = None if last else parts[int(marked[i + 2])]
        pieces += _glue(glue, part, following, dialect)
        at = end
    return pieces if at == len(plain) else None


def _glue(text: str, before: _Part | None, after: _Part | None, dialect: Dialect) -> Iterator[_Piece]:
    """The template's text between two parts, cut where the message before it ends."""
    if before is not None and (after is None or after.message != before.message):
        tail = dialect.tail(before.role)
        if tail and text.startswith(tail):
            yield _Piece(tail)
            text = text[len(tail) :]
    if text:
        yield _Piece(text)
