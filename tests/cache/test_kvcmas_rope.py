"""Moving keys: against transformers' own rotary code, there and back, and what is refused."""

from __future__ import annotations

import math
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from agentflow.cache.kvcmas.frequencies import Frequencies, frequencies, rope_parameters  # noqa: E402
from agentflow.cache.kvcmas.rope import Rope, unsupported  # noqa: E402
from agentflow.errors import UsageError  # noqa: E402

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

#: Name, transformers module, prefix of its classes, settings.
VARIANTS = [
    ("llama", "llama", "Llama", {}),
    ("llama 3 scaling", "llama", "Llama", {"rope_scaling": LLAMA3}),
    ("linear", "llama", "Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("yarn", "llama", "Llama", {"rope_scaling": YARN}),
    (
        "yarn, not truncated",
        "qwen3",
        "Qwen3",
        {"rope_scaling": {**YARN, "truncate": False, "beta_fast": 16}, "head_dim": 16},
    ),
    ("large theta, own head size", "qwen2", "Qwen2", {"rope_theta": 1e6, "head_dim": 32}),
    ("half of each head", "phi", "Phi", {"partial_rotary_factor": 0.5}),
    ("neighbours", "cohere", "Cohere", {}),
    ("neighbours, half of each head", "glm", "Glm", {"partial_rotary_factor": 0.5, "head_dim": 16}),
]


def assert_close(found: Any, want: Any, atol: float = 1e-5, rtol: float = 1e-5) -> None:
    """As ``torch.testing.assert_close``, which imports sympy, seconds of it."""
    assert found.shape == want.shape
    assert torch.allclose(found, want, atol=atol, rtol=rtol), f"off by {(found - want).abs().max()}"


def theirs(module: str, prefix: str, settings: dict[str, Any], keys: Any, start: int) -> tuple[Any, dict[str, Any]]:
    """Keys (tokens, heads, head size) as transformers rotates them, and the config as a dict."""
    configuration = import_module(f"transformers.models.{module}.configuration_{module}")
    modeling = import_module(f"transformers.models.{module}.modeling_{module}")
    config = getattr(configuration, f"{prefix}Config")(**{**SMALL, **settings})
    rotary = getattr(modeling, f"{prefix}RotaryEmbedding")(config)
    positions = torch.arange(start, start + keys.shape[0])[None]
    cos, sin = rotary(keys[None], positions)
    per_head = keys.transpose(0, 1)[None]  # (1, heads, tokens, head size)
    dim = cos.shape[-1]
    turn = modeling.apply_rotary_pos_emb
    if module == "glm" or dim == per_head.shape[-1]:
        turned = turn(per_head, per_head, cos, sin)[1]
    else:
        part = turn(per_head[..., :dim], per_head[..., :dim], cos, sin)[1]
        turned = torch.cat([part, per_head[..., dim:]], -1)
    return turned[0].transpose(0, 1), config.to_dict()


@pytest.mark.slow  # importing transformers' models takes seconds
@pytest.mark.parametrize(("module", "prefix", "settings"), [v[1:] for v in VARIANTS], ids=[v[0] for v in VARIANTS])
def test_keys_are_rotated_as_transformers_rotates_them(module: str, prefix: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    size = settings.get("head_dim", 16)
    plain = torch.randn(9, 2, size)
    stored, config = theirs(module, prefix, settings, plain, start=37)
    rope = Rope.of(config)
    assert_close(rope.rotate(plain, 37), stored, atol=2e-5, rtol=2e-5)
    assert_close(rope.unrotate(stored, 37), plain, atol=2e-5, rtol=2e-5)
    later, _ = theirs(module, prefix, settings, plain, start=120)
    assert_close(rope.shift(stored, 83), later, atol=5e-5, rtol=5e-5)
    assert_close(rope.shift(later, -83), stored, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (LLAMA3, None),
        ({"rope_type": "linear", "factor": 4.0}, None),
        (YARN, None),
        ({**YARN, "truncate": False, "beta_fast": 16}, None),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}, None),
        # SGLang makes its table once, for ``factor`` times the context; transformers reaches that at that length.
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
    ],
)
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any], length: int | None) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = rope_parameters({**SMALL, "rope_scaling": scaling})
    config = SimpleNamespace(**SMALL, head_dim=16, rope_parameters=parameters, standardize_rope_params=lambda: None)
    want, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=length)
    ours = frequencies(parameters, 16, 256)
    assert_close(ours.inverse.float(), want, atol=1e-8, rtol=1e-5)
    assert ours.factor == pytest.approx(factor)


@pytest.mark.parametrize(("halves", "pairs"), [(True, [(0, 2), (1, 3)]), (False, [(0, 1), (2, 3)])])
def test_pairs_turn_by_position_times_frequency(halves: bool, pairs: list[tuple[int, int]]) -> None:
    rope = Rope(Frequencies(torch.tensor([1.0, 0.1], dtype=torch.float64), 1.5), 6, halves=halves)
    keys = torch.arange(1.0, 7.0).reshape(1, 1, 6)
    turned = rope.rotate(keys, 3)[0, 0].tolist()
    for (a, b), angle in zip(pairs, (3.0, 0.3), strict=True):
        x, y = a + 1.0, b + 1.0
        assert turned[a] == pytest.approx(1.5 * (x * math.cos(angle) - y * math.sin(angle)), rel=1e-5)
        assert turned[b] == pytest.approx(1.5 * (y * math.cos(angle) + x * math.sin(angle)), rel=1e-5)
    assert turned[4:] == [5.0, 6.0]  # beyond the rotated part


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_there_and_back(halves: bool, dtype: Any) -> None:
    rope = Rope.of({"model_type": "llama", **SMALL}, halves=halves)
    keys = torch.randn(3, 20, 2, 16).to(dtype)
    back = rope.unrotate(rope.rotate(keys, 100), 100)
    assert back.dtype == dtype
    room = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.005}[dtype]
    assert_close(back, keys, atol=room, rtol=room)


def test_no_shift_gives_the_same_bits_in_other_memory() -> None:
    rope = Rope.of({"model_type": "llama", **SMALL})
    keys = torch.randn(2, 5, 2, 16)
    moved = rope.shift(keys, 0)
    assert torch.equal(moved, keys)
    assert moved.data_ptr() != keys.data_ptr()


def test_far_positions_lose_nothing() -> None:
    rope = Rope.of({"model_type": "llama", **SMALL, "rope_theta": 1e6})
    keys = torch.randn(1, 4, 2, 16)
    far = rope.shift(rope.rotate(keys, 1_000_000), -999_900)
    assert_close(far, rope.rotate(keys, 100), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": 4096}, "sliding window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding window"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "other than full attention"),
        ({"kv_lora_rank": 512}, "latent"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "several position axes"),
        ({"model_type": "something-new"}, "something-new"),
        ({"no_rope_layers": [1, 0]}, "different rotary"),
        ({"vision_config": {"depth": 2}}, "text-only"),
        ({"alibi": True}, "not rotary"),
    ],
)
def test_what_cannot_be_moved_is_refused_with_a_reason(change: dict[str, Any], words: str) -> None:
    config = {"model_type": "llama", **SMALL, **change}
    reason = unsupported(config)
    assert reason is not None
    assert words in reason
    with pytest.raises(UsageError, match="cannot be moved"):
        Rope.of(config)


def test_what_can_be_moved() -> None:
    assert unsupported({"model_type": "llama", **SMALL}) is None
    assert unsupported({"model_type": "qwen2", **SMALL, "sliding_window": 4096, "use_sliding_window": False}) is None
    assert unsupported({"model_type": "llama", **SMALL}, kv_dtype="auto") is None
    assert unsupported({"model_type": "llama", **SMALL}, kv_dtype="torch.bfloat16") is None
    assert "quantised" in (unsupported({"model_type": "llama", **SMALL}, kv_dtype="fp8_e5m2") or "")
    assert unsupported({"model_type": "something-new", **SMALL}, halves=True) is None
