"""Arguments and memory of an engine on this machine, and the parts of HiCache that a CPU needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentflow.engine.sglang import memory
from agentflow.engine.sglang.arguments import RADIX_CACHE, ServerOptions, command_line, server_arguments
from agentflow.engine.sglang.quick_start import _other_models
from agentflow.errors import NotEnoughMemory

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "bfloat16"}))
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    return tmp_path


def test_a_cpu_gets_torch_and_an_accelerator_keeps_sglangs_choices() -> None:
    options = ServerOptions(model_path="m", max_total_tokens=100)
    cpu, gpu = server_arguments(options, cpu=True), server_arguments(options, cpu=False)
    assert (cpu["device"], cpu["dtype"], cpu["attention_backend"]) == ("cpu", "float32", "torch_native")
    assert not {"device", "dtype", "attention_backend", "hicache_io_backend"} & gpu.keys()
    for arguments in (cpu, gpu):
        assert arguments["radix_cache_backend"] == RADIX_CACHE
        assert arguments["enable_hierarchical_cache"]
        assert arguments["max_total_tokens"] == 100


def test_stock_cache_no_host_tier_and_own_arguments() -> None:
    options = ServerOptions(model_path="m", stock_cache=True, host_ratio=0, extra={"dtype": "bfloat16"})
    arguments = server_arguments(options, cpu=True)
    assert "radix_cache_backend" not in arguments
    assert "enable_hierarchical_cache" not in arguments
    assert arguments["dtype"] == "bfloat16"


def test_the_command_line_says_the_same() -> None:
    extra = {"port": 30000, "log_level": None, "numa_node": [0, 1], "sleep_on_idle": False}
    flags = command_line(ServerOptions(model_path="m", extra=extra), cpu=True)
    assert flags[:2] == ["--model-path", "m"]
    assert flags[flags.index("--port") + 1] == "30000"
    assert flags[flags.index("--numa-node") + 1 :][:2] == ["0", "1"]
    assert "--enable-cache-report" in flags
    assert not {"--log-level", "--sleep-on-idle"} & set(flags)


def test_kv_of_a_token_takes_keys_and_values_of_every_layer() -> None:
    assert memory.kv_bytes_per_token(CONFIG) == 2 * 2 * 2 * 16 * 4
    assert memory.kv_bytes_per_token({"model_type": "odd"}) is None


def test_the_pool_fits_the_machine_or_the_start_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 2_000_000_000)
    options = ServerOptions(model_path=str(folder), host_ratio=1.0)
    assert memory.fit(options).max_total_tokens == memory.DEFAULT_POOL
    token = 2 * memory.kv_bytes_per_token(CONFIG)  # type: ignore[operator]
    most = (2_000_000_000 - 1_500_000_000 - 2000) // token  # weights take twice their bfloat16 size
    fits = ServerOptions(model_path=str(folder), host_ratio=1.0, max_total_tokens=most)
    assert memory.fit(fits).max_total_tokens == most
    with pytest.raises(NotEnoughMemory, match=r"2\.0 GB are free: lower max_total_tokens"):
        memory.fit(ServerOptions(model_path=str(folder), host_ratio=1.0, max_total_tokens=most + 1))
    monkeypatch.setattr(memory, "available_bytes", lambda: 1_000_000_000)
    with pytest.raises(NotEnoughMemory):
        memory.fit(options)


def test_this_machine_has_memory() -> None:
    available = memory.available_bytes()
    assert available is not None
    assert available > 0


def test_only_the_modules_of_an_architecture_are_loaded() -> None:
    others = _other_models({"LlamaForCausalLM"})
    assert len(others) > 100
    assert "llama" not in others
    assert _other_models({"NobodyHasThisForCausalLM"}) == []
    assert _other_models(set()) == []
