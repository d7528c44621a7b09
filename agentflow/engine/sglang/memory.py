"""What an engine needs of a machine's memory, told before it starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentflow.engine.sglang.arguments import ServerOptions
from agentflow.errors import NotEnoughMemory

__all__ = ["available_bytes", "fit", "kv_bytes_per_token"]

#: Device pool of an engine whose caller named none, in tokens, and the share of free memory it may take.
DEFAULT_POOL = 16_384
DEFAULT_SHARE = 0.3
_LEAST_POOL = 256
#: The processes themselves, without weights and KV, in bytes.
_BASE = 1_500_000_000
_FLOAT32 = 4


def fit(options: ServerOptions) -> ServerOptions:
    """Options with a pool size that fits this machine, for an engine on the CPU (float32).

    Raises :class:`~agentflow.errors.NotEnoughMemory` when the weights, or the pool asked for, do not fit.
    """
    config = _config(Path(options.model_path))
    token = kv_bytes_per_token(config)
    available = available_bytes()
    if token is None or available is None:
        return replace(options, max_total_tokens=options.max_total_tokens or DEFAULT_POOL)
    weights = _weight_bytes(Path(options.model_path), config)
    free = available - weights - _BASE
    per_token = token * (1 + max(options.host_ratio, 0.0))
    tokens = options.max_total_tokens
    if tokens is None:
        tokens = max(_LEAST_POOL, min(DEFAULT_POOL, int(max(free, 0) * DEFAULT_SHARE / per_token)))
    needed = weights + _BASE + tokens * per_token
    if needed > available:
        host_tier = tokens * (per_token - token)
        raise NotEnoughMemory(
            f"the engine needs about {_gb(needed)} ({_gb(weights)} for weights, {_gb(tokens * token)} for"
            f" {tokens} tokens of KV, {_gb(host_tier)} for the host tier, {_gb(_BASE)} for its processes) and"
            f" {_gb(available)} are free: lower max_total_tokens or host_ratio, take a smaller model, or free memory"
        )
    return replace(options, max_total_tokens=tokens)


def kv_bytes_per_token(config: dict[str, Any]) -> int | None:
    """Bytes of KV of one token in float32, or None for a model that says it in other words."""
    try:
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head = config.get("head_dim") or config["hidden_size"] // heads
        return int(2 * config["num_hidden_layers"] * kv_heads * head * _FLOAT32)
    except (KeyError, TypeError):
        return None


def available_bytes() -> int | None:
    """Memory that can be had now: the machine's, or the control group's if that is less. None if unknown."""
    found = [n for n in (_machine_available(), _group_available()) if n is not None]
    return min(found) if found else None


def _machine_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _group_available() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text(encoding="ascii"))
        reclaimable = 0
        for line in (group / "memory.stat").read_text(encoding="ascii").splitlines():
            if line.startswith("inactive_file "):
                reclaimable = int(line.split()[1])
        return max(0, int(limit) - used + reclaimable)
    except (OSError, ValueError):
        return None


def _config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _weight_bytes(folder: Path, config: dict[str, Any]) -> int:
    stored = sum(p.stat().st_size for p in folder.glob("*.safetensors")) or sum(
        p.stat().st_size for p in folder.glob("*.bin")
    )
    kept_as = str(config.get("torch_dtype") or config.get("dtype") or "")
    return stored * (2 if "16" in kept_as else 1)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
