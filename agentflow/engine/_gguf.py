"""Turns a Llama model in one GGUF file into a Hugging Face folder, with numpy alone: torch is never loaded.

Q and K rows are stored by GGUF in interleaved rotary order and are put back into the half-split order that
Hugging Face checkpoints use.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agentflow.errors import SetupError

__all__ = ["convert", "write_config", "write_tokenizer", "write_weights"]

Array = npt.NDArray[np.float32]

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
#: GGUF token type of special tokens.
_CONTROL = 3


def convert(gguf_path: Path, folder: Path) -> None:
    """Write the model of ``gguf_path`` (weights in float32, config, tokenizer, chat template) into ``folder``.

    Raises :class:`~agentflow.errors.SetupError` for a file that holds no Llama model.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(str(gguf_path))
    meta = _metadata(reader)
    if meta.get("general.architecture") != "llama":
        raise SetupError(f"{gguf_path} holds a {meta.get('general.architecture')} model; only llama can be converted")
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    weights: dict[str, Array] = {}
    for tensor in reader.tensors:
        name = _hub_name(tensor.name)
        if name is None:
            continue
        values: Array = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if name.endswith("q_proj.weight"):
            values = _half_split(values, heads)
        elif name.endswith("k_proj.weight"):
            values = _half_split(values, kv_heads)
        weights[name] = np.ascontiguousarray(values)
    write_weights(folder, weights)
    write_config(
        folder,
        vocab_size=weights["model.embed_tokens.weight"].shape[0],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        layers=meta["llama.block_count"],
        heads=heads,
        kv_heads=kv_heads,
        context_length=meta["llama.context_length"],
        rope_theta=meta["llama.rope.freq_base"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        tied="lm_head.weight" not in weights,
        bos_token_id=meta["tokenizer.ggml.bos_token_id"],
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
    )
    _write_tokenizer(meta, folder)


def write_tokenizer(gguf_path: Path, folder: Path) -> None:
    """Write only the tokenizer and chat template of ``gguf_path`` into ``folder``."""
    from gguf import GGUFReader

    _write_tokenizer(_metadata(GGUFReader(str(gguf_path))), folder)


def write_weights(folder: Path, weights: dict[str, Array]) -> None:
    """Write ``model.safetensors``."""
    from safetensors.numpy import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_config(
    folder: Path,
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    context_length: int,
    rope_theta: float,
    rms_norm_eps: float,
    tied: bool,
    bos_token_id: int,
    eos_token_id: int,
) -> None:
    """Write ``config.json`` and ``generation_config.json`` of a Llama model."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden_size // heads,
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        "rms_norm_eps": float(rms_norm_eps),
        "rope_theta": float(rope_theta),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": eos_token_id,
    }
    _write_json(folder / "config.json", config)
    generation = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": eos_token_id}
    _write_json(folder / "generation_config.json", generation)


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    # "smollm" is GPT-2's splitting with every digit on its own.
    single_digits = meta.get("tokenizer.ggml.pre") == "smollm"
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if single_digits
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokens[meta["tokenizer.ggml.eos_token_id"]]
    template = meta["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
            "eos_token": eos,
            "pad_token": eos,
            "unk_token": tokens[meta.get("tokenizer.ggml.unknown_token_id", 0)],
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": template,
        },
    )


def _metadata(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _hub_name(name: str) -> str | None:
    if name in _TOP:
        return _TOP[name]
    if name.startswith("blk."):
        _, layer, rest = name.split(".", 2)
        if rest in _BLOCK:
            return f"model.layers.{layer}.{_BLOCK[rest]}"
    return None


def _half_split(weights: Array, heads: int) -> Array:
    rows = weights.shape[0]
    return weights.reshape(heads, rows // heads // 2, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")
