"""Rotary frequencies of a model, out of its config: default, linear, dynamic NTK, YaRN and Llama 3 scaling.

They are those of SGLang 0.5.23. For dynamic NTK that means frequencies fixed for the longest context, where other
libraries change them with the length of the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from agentflow.errors import UsageError

__all__ = ["Frequencies", "SCALINGS", "frequencies", "rope_parameters"]


class Frequencies(NamedTuple):
    """Radians a position for each pair of dimensions, float64 of shape (pairs,), and the factor on cos and sin."""

    inverse: torch.Tensor
    factor: float


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of a ``config.json``, older form (``rope_scaling``) or newer (``rope_parameters``).

    Always holds ``rope_type``, ``rope_theta`` and ``partial_rotary_factor``.
    """
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        found.update(config.get(name) or {})
    found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    theta = found.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or 10000.0
    found["rope_theta"] = float(theta)
    for name in ("partial_rotary_factor", "rotary_pct"):
        if config.get(name) is not None:
            found.setdefault("partial_rotary_factor", float(config[name]))
    found.setdefault("partial_rotary_factor", 1.0)
    return found


def frequencies(parameters: Mapping[str, Any], dim: int, context: int) -> Frequencies:
    """Frequencies for ``dim`` rotated dimensions of a model trained for ``context`` positions.

    Raises UsageError for a ``rope_type`` that is not in :data:`SCALINGS`.
    """
    kind = parameters["rope_type"]
    if kind not in SCALINGS:
        raise UsageError(f"rotary scaling {kind!r} is not known here; known: {', '.join(SCALINGS)}")
    return SCALINGS[kind](parameters, dim, context)


def _plain(theta: float, dim: int) -> torch.Tensor:
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _default(p: Mapping[str, Any], dim: int, context: int) -> Frequencies:
    return Frequencies(_plain(p["rope_theta"], dim), 1.0)


def _linear(p: Mapping[str, Any], dim: int, context: int) -> Frequencies:
    return Frequencies(_plain(p["rope_theta"], dim) / p.get("factor", 1.0), 1.0)


def _dynamic(p: Mapping[str, Any], dim: int, context: int) -> Frequencies:
    """NTK-aware scaling of the base (Hunyuan's ``alpha``, or for a context ``factor`` times as long)."""
    factor = p.get("factor", 1.0)
    stretch = p["alpha"] if "alpha" in p else factor * factor - (factor - 1)
    return Frequencies(_plain(p["rope_theta"] * stretch ** (dim / (dim - 2)), dim), 1.0)


def _yarn(p: Mapping[str, Any], dim: int, context: int) -> Frequencies:
    """YaRN (arXiv 2309.00071): slow pairs are interpolated, fast ones kept, with a ramp between."""
    theta, factor = p["rope_theta"], p.get("factor", 1.0)
    trained = p.get("original_max_position_embeddings") or context

    def pair_turning(times: float) -> float:
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(p.get("beta_fast") or 32), pair_turning(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high if high != low else high + 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    plain = _plain(theta, dim)
    kept = (1 - ramp) * p.get("extrapolation_factor", 1)
    inverse = plain / factor * (1 - kept) + plain * kept
    return Frequencies(inverse, _yarn_factor(p, factor))


def _yarn_factor(p: Mapping[str, Any], factor: float) -> float:
    def grow(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    both = p.get("mscale") and p.get("mscale_all_dim")
    return (grow(p["mscale"]) / grow(p["mscale_all_dim"]) if both else grow(1.0)) * float(p.get("attn_factor", 1.0))


def _llama3(p: Mapping[str, Any], dim: int, context: int) -> Frequencies:
    """Llama 3.1: pairs with long waves are slowed by ``factor``, those with short waves kept, with a blend between."""
    plain = _plain(p["rope_theta"], dim)
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    turns = p.get("original_max_position_embeddings", context) * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return Frequencies(plain * ((1 - kept) / factor + kept), 1.0)


#: Scalings that are known, by ``rope_type``.
SCALINGS = {"default": _default, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3}
