"""Keys of approximate KV in the radix tree: token ids that no exact call can have.

A corrected call computes on KV that is only nearly right, so everything from its first corrected token on is
approximate. In the tree's keys the token ids from there on carry a namespace in the bits above any vocabulary. So the
exact beginning is shared with exact calls, and an exact key never leads to approximate KV.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np

__all__ = ["NAMESPACE_BITS", "approximate_key", "broken_paths", "is_approximate", "marked"]

#: Bits of a key's token ids that are the token's own. Vocabularies are far smaller.
NAMESPACE_BITS = 40


def marked(token_ids: array[int], boundary: int, namespace: int) -> array[int]:
    """A copy of ``token_ids`` that is in ``namespace`` (1 or more) from position ``boundary`` on."""
    ids = np.array(token_ids, dtype=np.int64)
    ids[boundary:] += namespace << NAMESPACE_BITS
    out = array("q")
    out.frombytes(ids.tobytes())
    return out


def approximate_key(key: Any, boundary: int, namespace: int) -> Any:
    """The SGLang ``RadixKey`` for the same tokens, approximate from ``boundary`` on."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(
        marked(key.token_ids, boundary, namespace),
        key.extra_key,
        is_bigram=key.is_bigram,
        limit=key.limit,
        cache_salt=key.cache_salt,
    )


def with_key(params: Any, boundary: int, namespace: int) -> Any:
    """SGLang's match or insert parameters with their key approximate from ``boundary`` on."""
    return replace(params, key=approximate_key(params.key, boundary, namespace))


def is_approximate(token_id: int) -> bool:
    """Whether a token id of a key stands for approximate KV."""
    return token_id >> NAMESPACE_BITS > 0


def broken_paths(nodes: Any, root: Any) -> list[str]:
    """What is wrong with the tree's namespaces: exact tokens below approximate ones, or both in one node."""
    problems = []
    for node in nodes:
        if node is root:
            continue
        kinds = {t >> NAMESPACE_BITS for t in node.key.raw_token_ids()}
        if len(kinds) > 1:
            problems.append(f"node {node.id} mixes namespaces {sorted(kinds)}")
        above = node.parent
        if above is not None and above is not root:
            over = above.key.raw_token_ids()[-1] >> NAMESPACE_BITS
            if over and kinds != {over}:
                problems.append(f"node {node.id} of namespaces {sorted(kinds)} hangs below namespace {over}")
    return problems
