"""Moving keys from one position to another.

An engine stores keys after their rotary embedding, which turns pairs of dimensions by an angle that grows with the
position. Turning back (:meth:`Rope.unrotate`) gives keys that no longer depend on where the segment stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from agentflow.cache.kvcmas.frequencies import SCALINGS, Frequencies, frequencies, rope_parameters
from agentflow.errors import UsageError

__all__ = ["Rope", "unsupported"]

#: Models whose pairs are halves of the head (dimension i with i + half), as GPT-NeoX has them.
_HALVES = frozenset(
    {
        "arcee", "gemma", "gpt_neox", "granite", "granitemoe", "internlm2", "internlm3", "llama", "mistral", "mixtral",
        "nemotron", "olmo", "olmo2", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss",
        "stablelm", "starcoder2",
    }
)  # fmt: skip
#: Models whose pairs are neighbours (dimension 2i with 2i + 1), as GPT-J has them.
_NEIGHBOURS = frozenset({"gptj", "cohere", "glm", "glm4", "ernie4_5"})


class Rope:
    """Rotary embedding of one model.

    ``halves`` tells which dimensions form a pair: i and i + half of the rotated part (GPT-NeoX, Llama, Qwen), or 2i
    and 2i + 1 (GPT-J). Only the first ``2 * pairs`` dimensions of a head are turned. Arithmetic is in float32 and the
    result has the keys' type; angles are made in float64, so that far positions lose nothing.
    """

    def __init__(self, turning: Frequencies, head_size: int, *, halves: bool = True) -> None:
        self.head_size = head_size
        self.halves = halves
        self.dim = 2 * int(turning.inverse.shape[0])
        if self.dim > head_size:
            raise UsageError(f"{self.dim} rotated dimensions do not fit heads of {head_size}")
        self.factor = turning.factor
        self._inverse = turning.inverse.double()

    @classmethod
    def of(cls, config: Mapping[str, Any] | Any, *, halves: bool | None = None) -> Rope:
        """From a ``config.json`` as a dict, or a transformers config.

        ``halves`` overrides what is known of the model type. Raises UsageError with the reason of
        :func:`unsupported` where there is one.
        """
        known = _as_dict(config)
        if (reason := unsupported(known, halves=halves)) is not None:
            raise UsageError(f"keys of this model cannot be moved: {reason}")
        parameters = rope_parameters(known)
        head = _head_size(known)
        dim = known.get("rotary_dim") or int(head * parameters["partial_rotary_factor"])
        turning = frequencies(parameters, int(dim), int(known.get("max_position_embeddings") or 2048))
        return cls(turning, head, halves=known.get("model_type") in _HALVES if halves is None else halves)

    def rotate(self, keys: torch.Tensor, start: int) -> torch.Tensor:
        """Keys (..., tokens, KV heads, head size) as they are stored at positions ``start``, ``start + 1``, ..."""
        return self._turn(keys, self._angles(start, keys), self.factor, 1)

    def unrotate(self, keys: torch.Tensor, start: int) -> torch.Tensor:
        """The inverse of :meth:`rotate`."""
        return self._turn(keys, self._angles(start, keys), 1 / self.factor, -1)

    def shift(self, keys: torch.Tensor, by: int) -> torch.Tensor:
        """Rotated keys as they would be ``by`` positions later (earlier if negative); a copy even for 0."""
        if by == 0:
            return keys.clone()
        angles = (self._inverse * abs(by)).reshape(1, 1, -1)
        return self._turn(keys, angles, 1.0, 1 if by > 0 else -1)

    def _angles(self, start: int, keys: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(start, start + keys.shape[-3], dtype=torch.float64)
        return (positions[:, None] * self._inverse).unsqueeze(1)

    def _turn(self, keys: torch.Tensor, angles: torch.Tensor, factor: float, sign: int) -> torch.Tensor:
        """``angles``: (tokens or 1, 1, pairs)."""
        cos = (angles.cos() * factor).to(keys.device, torch.float32)
        sin = (angles.sin() * (sign * factor)).to(keys.device, torch.float32)
        out = keys.to(torch.float32, copy=True)
        # A CPU turns one layer after another: what lies between stays in its cache.
        for part in range(len(out)) if out.dim() > 3 and out.device.type == "cpu" else (slice(None),):
            self._turn_in_place(out[part][..., : self.dim], cos, sin)
        return out.to(keys.dtype)

    def _turn_in_place(self, turned: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        if self.halves:
            one, other = turned[..., : self.dim // 2], turned[..., self.dim // 2 :]
        else:
            one, other = turned[..., 0::2], turned[..., 1::2]
        first, second = one.clone(), other.clone()
        one.copy_(first * cos - second * sin)
        other.copy_(second * cos + first * sin)


def unsupported(
    config: Mapping[str, Any] | Any, *, kv_dtype: str | None = None, halves: bool | None = None
) -> str | None:
    """Why KV of a model cannot be corrected, in a few words; None when it can.

    ``kv_dtype`` is the engine's KV cache type (SGLang's ``kv_cache_dtype``): ``auto`` and 16 or 32 bit floats are
    fine. ``halves`` given says that the style of pairs is known to the caller.
    """
    known = _as_dict(config)
    if kv_dtype and kv_dtype.lower().removeprefix("torch.") not in _PLAIN_KV:
        return f"quantised KV ({kv_dtype})"
    if known.get("kv_lora_rank"):
        return "multi-head latent attention"
    windowed = known.get("use_sliding_window", bool(known.get("sliding_window")))
    kinds = {k for k in known.get("layer_types") or () if k != "full_attention"}
    if (windowed and known.get("sliding_window")) or "sliding_attention" in kinds or known.get("attention_chunk_size"):
        return "sliding window or chunked attention"
    if kinds or known.get("layers_block_type") or known.get("hybrid_override_pattern"):
        return f"layers other than full attention ({', '.join(sorted(map(str, kinds))) or 'hybrid'})"
    if any(known.get(name) for name in ("no_rope_layers", "no_rope_layer_interval", "dual_chunk_attention_config")):
        return "layers with different rotary embeddings"
    if known.get("is_encoder_decoder") or known.get("text_config") or known.get("vision_config"):
        return "not a text-only decoder"
    for name in ("alibi", "position_embedding_type"):
        if known.get(name) not in (None, False, "rope", "rotary"):
            return "positions that are not rotary"
    parameters = rope_parameters(known)
    if parameters.get("mrope_section") or parameters.get("use_fope") or known.get("use_mrope"):
        return "rotary embedding in several position axes"
    if parameters["rope_type"] not in SCALINGS:
        return f"rotary scaling {parameters['rope_type']!r}"
    model = known.get("model_type")
    if halves is None and model not in _HALVES and model not in _NEIGHBOURS:
        return f"model type {model!r}, whose rotary embedding is not known here"
    return None


_PLAIN_KV = frozenset({"auto", "float32", "float16", "bfloat16", "half", "float", "bf16", "fp16"})


def _as_dict(config: Mapping[str, Any] | Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    out: dict[str, Any] = config.to_dict()
    return out


def _head_size(config: Mapping[str, Any]) -> int:
    if config.get("head_dim"):
        return int(config["head_dim"])
    width = config.get("hidden_size") or config["n_embd"]
    return int(width // (config.get("num_attention_heads") or config["n_head"]))
