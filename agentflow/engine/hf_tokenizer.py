"""Tokenizers of Hugging Face models, without importing torch or transformers where that can be avoided.

A folder (or hub repository) that holds ``tokenizer.json`` is read by the ``tokenizers`` library alone, in
milliseconds. Anything else goes through ``transformers.AutoTokenizer``.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentflow.engine._chat_template import ChatTemplate
from agentflow.engine.base import Tokenizer
from agentflow.errors import BadRequest, ModelNotFound

__all__ = ["HfTokenizer", "load_tokenizer"]

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)
#: Template variables that name special tokens.
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class HfTokenizer:
    """A Hugging Face tokenizer with its chat template. Thread-safe; see ``Tokenizer`` for the methods."""

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int], bool], str],
        *,
        encode_plain: Callable[[str], Sequence[int]],
        template: ChatTemplate,
        eos_token_ids: Iterable[int],
    ) -> None:
        self._encode = encode
        self._encode_plain = encode_plain
        self._decode = decode
        self._template = template
        self._eos = frozenset(eos_token_ids)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    def encode(self, text: str) -> list[int]:
        return list(self._encode(_checked(text)))

    def encode_plain(self, text: str) -> list[int]:
        return list(self._encode_plain(_checked(text)))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._decode(ids, skip_special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        return self._template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)


def load_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer of a model folder, or of a repository on the Hugging Face hub.

    Raises :class:`~agentflow.errors.ModelNotFound` when there is no tokenizer at ``source``.
    """
    folder = _local(source)
    if folder is not None and (folder / "tokenizer.json").is_file():
        return _from_folder(folder)
    return _from_transformers(str(source))


def _local(source: str | Path) -> Path | None:
    """``source`` as a folder; the few small files of a hub repository are brought to the hub's cache."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(source), allow_patterns=list(_FILES)))
    except ImportError:
        return None
    except Exception as error:  # the hub's own errors: no such repository, no network, not allowed
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelNotFound(f"no tokenizer at {str(source)!r}: not a folder, and the hub said: {reason}") from error


def _from_folder(folder: Path) -> HfTokenizer:
    from tokenizers import Tokenizer as Backend

    config = _json(folder / "tokenizer_config.json")
    tokens = _special_tokens({**_json(folder / "special_tokens_map.json"), **config})
    jinja = folder / "chat_template.jinja"
    source = jinja.read_text(encoding="utf-8") if jinja.is_file() else config.get("chat_template")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    eos = _eos_ids(folder)
    if (named := tokens.get("eos_token")) is not None and (named_id := backend.token_to_id(named)) is not None:
        eos.add(named_id)
    return _over_backend(backend, ChatTemplate(source, tokens), eos)


def _over_backend(backend: Any, template: ChatTemplate, eos: Iterable[int]) -> HfTokenizer:
    return HfTokenizer(
        lambda text: backend.encode(text, add_special_tokens=False).ids,
        lambda ids, skip: backend.decode(list(ids), skip_special_tokens=skip),
        encode_plain=_plain_encoder(backend),
        template=template,
        eos_token_ids=eos,
    )


def _plain_encoder(backend: Any) -> Callable[[str], Sequence[int]]:
    """Encodes without special tokens, by a second backend that is made when the first text needs it."""
    special = [t for t in backend.get_added_tokens_decoder().values() if t.special]
    always = any(t.normalized for t in special)  # what spells such a token is known only after normalising
    spelt = re.compile("|".join(re.escape(t.content) for t in special)) if special else None
    lock = threading.Lock()
    made: list[Any] = []

    def encode(text: str) -> Sequence[int]:
        if spelt is None or not (always or spelt.search(text)):
            return backend.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]
        with lock:
            if not made:
                plain = type(backend).from_str(backend.to_str())
                plain.encode_special_tokens = True
                made.append(plain)
        return made[0].encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]

    return encode


def _checked(text: str) -> str:
    """``text``, unless it cannot be written as UTF-8, which is what tokenizers read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"the text holds half a character at position {error.start} ({text[error.start]!r}, a lone surrogate): it"
            " was decoded wrongly; read it again, for example with errors='replace'"
        ) from None
    return text


def _from_transformers(source: str) -> HfTokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelNotFound(
            f"{source!r} has no tokenizer.json, and reading other tokenizers needs the transformers package"
        ) from error
    try:
        hf: Any = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"no tokenizer at {source!r}: {str(error).splitlines()[0]}") from error
    template = ChatTemplate(hf.chat_template, _special_tokens(hf.special_tokens_map))
    eos = _eos_ids(Path(source)) | ({hf.eos_token_id} if isinstance(hf.eos_token_id, int) else set())
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is not None:
        return _over_backend(backend, template, eos)
    lock = threading.Lock()  # tokenizers written in Python promise nothing about threads

    def encode(text: str) -> list[int]:
        with lock:
            return list(hf.encode(text, add_special_tokens=False))

    def encode_plain(text: str) -> list[int]:
        with lock:
            return list(hf.encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode(ids: Sequence[int], skip: bool) -> str:
        with lock:
            return str(hf.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False))

    return HfTokenizer(encode, decode, encode_plain=encode_plain, template=template, eos_token_ids=eos)


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelNotFound(f"{path.name} of the model is not JSON: {error}") from error
    return data if isinstance(data, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _eos_ids(folder: Path) -> set[int]:
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        ids.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    return ids
