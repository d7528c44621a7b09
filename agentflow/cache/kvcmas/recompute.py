"""Which tokens of a corrected segment are computed through the model after all."""

from __future__ import annotations

from typing import Literal

import torch

from agentflow.cache.kvcmas.anchors import Features

__all__ = ["Choice", "change", "choose"]

#: ``first``: the segment's first tokens. ``change``: those whose values are predicted to change most. ``both``: half
#: of each.
Choice = Literal["first", "change", "both"]


def change(delta: Features, base: Features) -> torch.Tensor:
    """How much each token's values are predicted to change, (tokens,): norms relative to the layer's, over layers."""
    size = base.values.norm(dim=2).mean(1, keepdim=True).clamp_min(1e-12)
    out: torch.Tensor = (delta.values.norm(dim=2) / size).mean(0)
    return out


def choose(
    tokens: int, share: float, how: Choice, scores: torch.Tensor | None = None, *, exact: int = 0, min_run: int = 1
) -> tuple[int, ...]:
    """Sorted offsets of ``share`` of ``tokens``, none of them among the first ``exact``.

    ``min_run`` > 1 chooses whole stretches of so many neighbours by the sum of their scores: each run costs an extend
    pass of its own. Without scores (or with all of them equal) the first tokens are taken.
    """
    free = tokens - exact
    count = min(free, round(share * tokens))
    if count <= 0:
        return ()
    first = count if scores is None or how == "first" else (count + 1) // 2 if how == "both" else 0
    chosen = set(range(exact, exact + first))
    if len(chosen) < count:
        assert scores is not None
        chosen.update(_highest(scores, exact + first, count - first, min_run))
    return tuple(sorted(chosen))


def _highest(scores: torch.Tensor, start: int, count: int, run: int) -> list[int]:
    rest = scores[start:].float().cpu()
    run = max(1, min(run, count))
    if run == 1:
        order = torch.sort(rest, descending=True, stable=True).indices[:count]
        return [start + int(i) for i in order]
    pad = -len(rest) % run
    sums = torch.nn.functional.pad(rest, (0, pad)).reshape(-1, run).sum(1)
    out: list[int] = []
    for block in torch.sort(sums, descending=True, stable=True).indices.tolist():
        stretch = range(start + block * run, min(start + (block + 1) * run, start + len(rest)))
        out += stretch[: count - len(out)]
        if len(out) == count:
            break
    return out
