"""torch's attention over a paged prefix, without work for tokens that are cached.

SGLang's ``torch_native`` backend runs every extend with a query for each token of the sequence, cached ones included,
so that a short extend after a long prefix costs as much attention as the whole prompt. On our CPU platform the same
attention is computed for the new tokens only, under a mask, where that is less. Rows of a batch that belong to one
request (see :mod:`agentflow.engine.sglang.correction.rows`) share one gather of its keys and values. A decode step
gathers whole rows of the pool, not single numbers: the same values, two to three times as fast.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["DECODE", "EXTEND", "decode_attention", "extend_attention", "hooks"]

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
DECODE = f"{_BACKEND}._run_sdpa_forward_decode"
EXTEND = f"{_BACKEND}._run_sdpa_forward_extend"
#: Rows of one request that are run one by one; more are run as one, under one mask.
SEPARATE_ROWS = 4
_MASKS_KEPT = 8

_masks: OrderedDict[tuple[Any, ...], Any] = OrderedDict()


class _Row(NamedTuple):
    """Queries ``first`` to ``end - 1`` of the batch, at positions from ``prefix``; ``length`` is prefix and queries."""

    first: int
    end: int
    prefix: int
    length: int


def hooks() -> dict[str, Callable[..., Any]]:
    """AROUND hooks by the dotted path of what they wrap; none on another platform than ours."""
    from agentflow.engine.sglang import cpu_platform

    if cpu_platform.activate() is None:
        return {}
    return {EXTEND: extend_attention, DECODE: decode_attention}


def extend_attention(
    original: Callable[..., Any],
    backend: Any,
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    extend_prefix_lens: Any,
    extend_seq_lens: Any,
    *rest: Any,
    **options: Any,
) -> Any:
    """Causal attention of a batch's new tokens; shapes as in SGLang: ``query`` and ``output`` (tokens, heads, size)."""
    if not _plain(query, rest, options, causal=True):
        return original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
            extend_seq_lens, *rest, **options,
        )  # fmt: skip
    scaling, enable_gqa = options.get("scaling"), options.get("enable_gqa", False)
    query = query.movedim(0, 1)
    first = 0
    groups: list[tuple[int, list[_Row]]] = []
    for request, length, prefix, new in zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_prefix_lens.tolist(),
        extend_seq_lens.tolist(),
        strict=True,
    ):
        row = _Row(first, first + new, prefix, length)
        first += new
        if groups and groups[-1][0] == request:
            groups[-1][1].append(row)
        else:
            groups.append((request, [row]))
    for request, rows in groups:
        slots = req_to_token[request, : max(r.length for r in rows)]
        keys, values = (_gathered(cache, slots, query) for cache in (k_cache, v_cache))
        for together in [rows] if len(rows) > SEPARATE_ROWS else [[r] for r in rows]:
            _attend(query, output, keys, values, together, scaling, enable_gqa)
    return output


def decode_attention(
    original: Callable[..., Any],
    backend: Any,
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    *rest: Any,
    **options: Any,
) -> Any:
    """Attention of one new token a request over all before it; ``query`` and ``output`` are (requests, heads, size)."""
    if not _plain(query, rest, options, causal=False):
        return original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *rest, **options
        )
    from torch.nn.functional import scaled_dot_product_attention as attention

    for row, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[request, :length]
        keys, values = (_gathered(cache, slots, query).unsqueeze(0) for cache in (k_cache, v_cache))
        new = query[row].unsqueeze(1).unsqueeze(0)
        found = attention(new, keys, values, enable_gqa=options.get("enable_gqa", False), scale=options.get("scaling"))
        output[row] = found[0, :, 0]
    return output


def _plain(query: Any, rest: tuple[Any, ...], options: dict[str, Any], *, causal: bool) -> bool:
    """Whether it is the attention that we compute: without an encoder, a window, or anything that we do not know."""
    known = {"scaling", "enable_gqa", "causal", "is_cross_attn", "sliding_window_size", "encoder_lens"}
    return (
        query.dim() == 3
        and all(r is None for r in rest[:1])  # encoder_lens
        and not rest[1:]
        and options.keys() <= known
        and bool(options.get("causal")) is causal
        and not options.get("is_cross_attn")
        and options.get("sliding_window_size") is None
        and options.get("encoder_lens") is None
    )


def _gathered(cache: Any, slots: Any, like: Any) -> Any:
    """The rows of a pool at ``slots``, heads first: (heads, slots, size)."""
    return cache.index_select(0, slots).movedim(0, 1).to(like.dtype)


def _attend(query: Any, output: Any, keys: Any, values: Any, rows: list[_Row], scaling: Any, gqa: bool) -> None:
    """Fill ``output`` for the queries of ``rows``, which are neighbours in the batch."""
    from torch.nn.functional import scaled_dot_product_attention as attention

    first, end = rows[0].first, rows[-1].end
    length = max(r.length for r in rows)
    keys, values = keys[:, :length].unsqueeze(0), values[:, :length].unsqueeze(0)
    new = query[:, first:end]
    if 2 * (end - first) <= length:
        mask = _mask(rows, length, new)
        found = attention(new.unsqueeze(0), keys, values, attn_mask=mask, enable_gqa=gqa, scale=scaling)
        output[first:end] = found.squeeze(0).movedim(1, 0)
        return
    # With so many queries torch's own causal kernel is faster, which wants one for every position.
    every = new.new_empty((new.shape[0], length, new.shape[2]))
    at = 0
    for row in rows:
        size = row.end - row.first
        every[:, row.prefix : row.length] = new[:, at : at + size]
        at += size
    found = attention(every.unsqueeze(0), keys, values, is_causal=True, enable_gqa=gqa, scale=scaling).squeeze(0)
    for row in rows:
        output[row.first : row.end] = found[:, row.prefix : row.length].movedim(1, 0)


def _mask(rows: list[_Row], length: int, like: Any) -> Any:
    """0 where a query sees a key, minus infinity where not: (queries, length). Layers of one forward share it."""
    import torch

    name = (length, like.dtype, *((r.prefix, r.length) for r in rows))
    found = _masks.get(name)
    if found is None:
        positions = torch.cat([torch.arange(r.prefix, r.length) for r in rows])
        hidden = torch.arange(length)[None, :] > positions[:, None]
        found = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
        _masks[name] = found
        while len(_masks) > _MASKS_KEPT:
            _masks.popitem(last=False)
    return found
