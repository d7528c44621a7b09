"""A small Llama with random weights, for tests and benchmarks in which text does not matter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agentflow.engine._gguf import write_config, write_weights

__all__ = ["write_random_llama"]

_HEADS = 4
_KV_HEADS = 2


def write_random_llama(
    folder: Path,
    tokenizer: Path,
    *,
    layers: int,
    hidden_size: int,
    context_length: int,
    seed: int,
    vocab_size: int | None = None,
) -> None:
    """Write the model into ``folder``, with the tokenizer files of the folder ``tokenizer``, whose vocabulary it has
    where ``vocab_size`` is None.

    Weights are scaled so that every layer changes the hidden state about as much as it carries on: an answer
    then depends on the whole prompt, and wrong KV shows up as a different text.
    """
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer / name, folder / name)
    vocab = vocab_size or len(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    rng = np.random.default_rng(seed)
    head = hidden_size // _HEADS
    inner = 2 * hidden_size

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / columns**0.5)

    weights: dict[str, npt.NDArray[np.float32]] = {
        "model.embed_tokens.weight": rng.standard_normal((vocab, hidden_size), dtype=np.float32),
        "model.norm.weight": np.ones(hidden_size, dtype=np.float32),
        "lm_head.weight": matrix(vocab, hidden_size),
    }
    for i in range(layers):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.input_layernorm.weight": np.ones(hidden_size, dtype=np.float32),
            f"{layer}.post_attention_layernorm.weight": np.ones(hidden_size, dtype=np.float32),
            f"{layer}.self_attn.q_proj.weight": matrix(_HEADS * head, hidden_size, 2.0),
            f"{layer}.self_attn.k_proj.weight": matrix(_KV_HEADS * head, hidden_size, 2.0),
            f"{layer}.self_attn.v_proj.weight": matrix(_KV_HEADS * head, hidden_size, 4.0),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden_size, _HEADS * head, 2.0),
            f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden_size, 2.0),
            f"{layer}.mlp.up_proj.weight": matrix(inner, hidden_size, 2.0),
            f"{layer}.mlp.down_proj.weight": matrix(hidden_size, inner),
        }
    write_weights(folder, weights)
    write_config(
        folder,
        vocab_size=vocab,
        hidden_size=hidden_size,
        intermediate_size=inner,
        layers=layers,
        heads=_HEADS,
        kv_heads=_KV_HEADS,
        context_length=context_length,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
        tied=False,
        bos_token_id=1,
        eos_token_id=2,
    )
