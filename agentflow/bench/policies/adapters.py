"""Adapter preloading on the real engine: agents with a LoRA adapter each, and fewer slots than adapters."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentflow.bench.policies.model import Finding, median_of
from agentflow.engine.base import Call, Coordinates, Sampling
from agentflow.engine.workflow import WorkflowRun
from agentflow.events import AgentEnded, AgentStarted, WorkflowEnded, WorkflowStarted

__all__ = ["adapters", "write_adapter"]

AGENTS = ("plan", "code", "test", "review")
#: Slots for adapters on the device: two, for four.
SLOTS = 2


def write_adapter(folder: Path, model: Path, *, rank: int = 8, seed: int = 0) -> Path:
    """A random LoRA adapter for the attention projections of a Llama-like ``model``, in PEFT's format."""
    import numpy as np
    from safetensors.numpy import save_file

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    widths = {"q_proj": heads * head, "v_proj": (config.get("num_key_value_heads") or heads) * head}
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = rng.standard_normal((rank, hidden), dtype=np.float32)
            tensors[f"{at}.lora_B.weight"] = rng.standard_normal((width, rank), dtype=np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
        "base_model_name_or_path": str(model),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def adapters(repetitions: int, quick: bool) -> Finding:
    """Workflows of four agents one after another, each with an adapter of its own, two slots for them."""
    from agentflow.engine.embedded import EmbeddedEngine
    from agentflow.engine.models import random_model

    model = Path(random_model().path)
    with tempfile.TemporaryDirectory() as folder:
        paths = {a: write_adapter(Path(folder) / a, model, seed=i) for i, a in enumerate(AGENTS)}
        lora: dict[str, Any] = {
            "enable_lora": True,
            "lora_paths": [f"{name}={path}" for name, path in paths.items()],
            "max_loras_per_batch": SLOTS,
            "lora_backend": "torch_native",
        }
        with EmbeddedEngine(model, max_total_tokens=4_096, host_ratio=0.0, **lora) as engine:
            runs = {
                policy: [_once(engine, policy, 5 if quick else 20, seed) for seed in range(repetitions)]
                for policy in ("adapters", "lru")
            }
    mine, spread = median_of(runs["adapters"])
    base, _ = median_of(runs["lru"])
    return Finding(
        policy="adapters",
        mode="engine",
        aim="calls find their adapter loaded",
        met=mine["share found loaded"] > base["share found loaded"] + 0.3,
        figures={n: (mine[n], base[n]) for n in mine},
        spread=spread,
        note=f"{len(AGENTS)} agents with an adapter each, {SLOTS} slots; a tiny random model on a CPU, where "
        "loading one is a copy of 100 KB",
    )


def _once(engine: Any, policy: str, workflows: int, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    engine.flush()
    engine.configure(policies=[policy], reset=True)
    waits: list[float] = []
    for number in range(workflows):
        run = WorkflowRun(engine, f"w{number}")
        run.emit(WorkflowStarted, graph="g")
        for agent in AGENTS:
            run.emit(AgentStarted, agent=agent)
            engine.flush()
            ids: Sequence[int] = [rng.randrange(1_000, 30_000) for _ in range(64)]
            call = Call(
                token_ids=ids,
                at=Coordinates(workflow=run.workflow, agent=agent),
                sampling=Sampling(max_tokens=8, ignore_eos=True),
                adapter=agent,
            )
            began = time.perf_counter()
            chunks = engine.stream(call)
            next(iter(chunks))
            waits.append(time.perf_counter() - began)
            for _ in chunks:
                pass
            run.emit(AgentEnded, agent=agent)
        run.emit(WorkflowEnded)
        engine.flush()
    counters = engine.stats().counters
    found, missed = counters.get("adapter_hits", 0), counters.get("adapter_misses", 0)
    return {
        "share found loaded": found / max(1, found + missed),
        "ttft p50 ms": 1000 * statistics.median(waits),
        "loaded ahead": float(counters.get("adapters_preloaded", 0)),
        "loaded ahead and used": float(counters.get("adapters_preloaded_used", 0)),
    }
