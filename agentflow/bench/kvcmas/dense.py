"""The default model outside the engine: dense prefills, extensions of a cache, and recomputation inside one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from agentflow.cache.kvcmas.types import SegmentKV

__all__ = ["DenseModel", "Extension", "joined"]


class Extension(NamedTuple):
    """KV of the tokens that were computed, and log-probabilities (positions kept, vocabulary)."""

    kv: SegmentKV
    logprobs: torch.Tensor


def joined(*parts: SegmentKV) -> SegmentKV:
    """KV of neighbouring spans as one."""
    return SegmentKV(torch.cat([p.keys for p in parts], 1), torch.cat([p.values for p in parts], 1), parts[0].start)


class _Slots:
    """A layer's cache in which new KV takes given places among the old. Writes into the tensors it is given."""

    is_compileable = is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
        self.keys, self.values, self._places = keys, values, places

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Put in new KV (1, heads, tokens, head size); all of it, old and new."""
        self.keys[:, :, self._places], self.values[:, :, self._places] = keys, values
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """How many tokens there are."""
        return int(self.keys.shape[2])


class DenseModel:
    """A transformers model on the CPU in float32. ``config`` is its config.json as a dict."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.config: dict[str, Any] = self._model.config.to_dict()

    def ids(self, text: str) -> list[int]:
        """Token ids of a piece of text, without special tokens added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @torch.inference_mode()
    def extend(self, past: SegmentKV | None, tokens: Sequence[int], *, keep: int = 1) -> Extension:
        """Compute ``tokens`` after ``past``, which starts at position 0; log-probabilities of the last ``keep``."""
        from transformers import DynamicCache

        cache = DynamicCache()
        before = 0
        if past is not None:
            before = past.tokens
            for layer in range(past.keys.shape[0]):
                cache.update(past.keys[layer].transpose(0, 1)[None], past.values[layer].transpose(0, 1)[None], layer)
        out = self._model(
            input_ids=torch.tensor([list(tokens)]),
            position_ids=torch.arange(before, before + len(tokens))[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=max(keep, 1),
        )
        keys = torch.stack([layer.keys[0, :, before:].transpose(0, 1) for layer in cache.layers])
        values = torch.stack([layer.values[0, :, before:].transpose(0, 1) for layer in cache.layers])
        return Extension(SegmentKV(keys, values, before), out.logits[0].log_softmax(-1))

    @torch.inference_mode()
    def read(
        self,
        before: SegmentKV,
        segment: SegmentKV,
        tokens: Sequence[int],
        offsets: Sequence[int],
        after: Sequence[int] = (),
        *,
        keep: int = 1,
    ) -> Extension:
        """Recompute a segment's ``offsets`` and go on with ``after``: the segment, and the last log-probabilities.

        In one pass: every layer writes the new KV of all these tokens, then each looks at what stands before it. That
        equals one pass after the other over runs of neighbours.
        """
        from transformers import DynamicCache

        if not offsets and not after:
            return Extension(segment, torch.empty(0))
        shape = (segment.keys.shape[0], len(after), *segment.keys.shape[2:])
        room = SegmentKV(torch.zeros(shape), torch.zeros(shape), segment.end)
        whole = joined(before, segment, room)
        places = torch.tensor([before.tokens + n for n in offsets] + list(range(segment.end, segment.end + len(after))))
        cache = DynamicCache()
        cache.layers = [
            _Slots(whole.keys[layer].transpose(0, 1)[None], whole.values[layer].transpose(0, 1)[None], places)
            for layer in range(whole.keys.shape[0])
        ]
        out = self._model(
            input_ids=torch.tensor([[*(tokens[n] for n in offsets), *after]]),
            position_ids=places[None],
            attention_mask=(torch.arange(whole.tokens)[None] <= places[:, None])[None, None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=max(keep, 1),
        )
        return Extension(whole.part(before.tokens, segment.end), out.logits[0].log_softmax(-1))

    def greedy(self, past: SegmentKV, tokens: Sequence[int], count: int) -> list[int]:
        """The ``count`` most likely next tokens after ``past`` and ``tokens``, one by one."""
        out: list[int] = []
        fed = list(tokens)
        while len(out) < count:
            step = self.extend(past, fed)
            past = joined(past, step.kv)
            fed = [int(step.logprobs[-1].argmax())]
            out += fed
        return out
