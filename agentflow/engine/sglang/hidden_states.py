"""The hidden state of each prompt's last token, taken during its ordinary prefill.

SGLang's logits processor picks the last tokens' hidden states, after the model's last norm, to compute their logits.
What it picked is copied there, so that no forward pass is added and no request is asked to return them. On an
accelerator the copy goes to pinned memory and is waited for where SGLang processes the batch's results.

A prefill that runs as one captured graph with its logits does not come by here: then there are no hidden states, and
predictors do without.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from agentflow.cache.policy import Prefilled
from agentflow.engine.sglang.radix_cache import AgentRadixCache

__all__ = ["HiddenStates", "answer", "get_pruned_states", "hooks", "process_batch_result", "rearranged", "run_batch"]

logger = logging.getLogger("agentflow.engine")

#: Vectors kept of requests at once; the oldest go.
LIMIT = 1_024
#: Requests whose vectors one reply carries.
REPLY = 256

Vector = npt.NDArray[np.float32]


@dataclass(slots=True)
class _Copy:
    """Rows (requests, hidden size) on their way to the host."""

    rows: Any
    done: Any = None

    def row(self, place: int) -> Vector:
        if self.done is not None:
            self.done.synchronize()
            self.done = None
        found: Vector = self.rows[place].numpy().copy()
        return found


@dataclass(slots=True)
class HiddenStates:
    """A scheduler's hidden states. ``keep`` says that they are kept although no policy wants them.

    ``vectors`` holds those of the newest ``limit`` requests.
    """

    limit: int = LIMIT
    keep: bool = False
    vectors: OrderedDict[str, Vector] = field(default_factory=OrderedDict)
    _current: dict[str, int] | None = None
    _copied: OrderedDict[str, tuple[_Copy, int]] = field(default_factory=OrderedDict)

    def begin(self, places: dict[str, int] | None) -> None:
        """The next batch to run has these requests, whose prompts it ends, at these places; None: nothing to take."""
        self._current = places

    def rearranged(self, places: list[int]) -> None:
        """The requests at places 0, 1, ... of the batch under way stand at ``places`` of what is really run."""
        if self._current:
            self._current = {request: places[place] for request, place in self._current.items()}

    @property
    def waits(self) -> bool:
        """Whether rows of the batch under way are wanted."""
        return bool(self._current)

    @property
    def unsettled(self) -> bool:
        """Whether any request's vector was copied and not asked for yet."""
        return bool(self._copied)

    def take(self, picked: Any) -> None:
        """The rows (requests, hidden size) of the batch under way are there: copy them, the first time they come by."""
        places, self._current = self._current, None
        if not places or max(places.values()) >= picked.shape[0]:
            return
        copy = _copied(picked)
        for request, place in places.items():
            self._copied[request] = (copy, place)
        while len(self._copied) > self.limit:
            self._copied.popitem(last=False)

    def settle(self, request: str) -> Vector | None:
        """The request's vector, once its batch was run."""
        found = self._copied.pop(request, None)
        if found is None:
            return None
        copy, place = found
        vector = copy.row(place)
        self.vectors[request] = vector
        while len(self.vectors) > self.limit:
            self.vectors.popitem(last=False)
        return vector

    def clear(self) -> None:
        """Forget all."""
        self.vectors.clear()
        self._copied.clear()
        self._current = None


#: Of this process's scheduler: there is one in a process.
_STATES = HiddenStates()


def answer(body: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to the control request ``hidden``: vectors of ``requests``; ``keep`` starts or ends keeping."""
    if "keep" in body:
        _STATES.keep = bool(body["keep"])
        if not _STATES.keep:
            _STATES.clear()
    wanted: Iterable[str] = list(body.get("requests") or ())[:REPLY]
    return {"hidden": {r: _STATES.vectors[r].tolist() for r in wanted if r in _STATES.vectors}}


def rearranged(places: list[int]) -> None:
    """See :meth:`HiddenStates.rearranged`."""
    _STATES.rearranged(places)


def hooks() -> dict[str, Callable[..., Any]]:
    """AROUND hooks by the dotted path of what they wrap."""
    return {
        "sglang.srt.managers.scheduler.Scheduler.run_batch": run_batch,
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result": process_batch_result,
        "sglang.srt.layers.logits_processor.LogitsProcessor._get_pruned_states": get_pruned_states,
    }


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Have the hidden states of a prefill taken, where anybody wants them."""
    cache = scheduler.tree_cache
    if not isinstance(cache, AgentRadixCache) or not batch.forward_mode.is_extend():
        return original(scheduler, batch, *args, **kwargs)
    if _STATES.keep or cache.runtime.wants_hidden:
        _safely(cache, lambda: _STATES.begin(_ending(batch)))
    try:
        return original(scheduler, batch, *args, **kwargs)
    finally:
        _STATES.begin(None)


def get_pruned_states(original: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any) -> Any:
    """Take what the logits processor picked."""
    result = original(processor, *args, **kwargs)
    if _STATES.waits:
        try:
            states, sampled = result[0], result[3]
            _STATES.take(states if sampled is None else states[sampled])
        except Exception:
            _STATES.begin(None)
            logger.exception("hidden states could not be taken; the request is not affected")
    return result


def process_batch_result(
    original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    """Tell policies of the prompts that were computed, before SGLang tells who is done."""
    cache = scheduler.tree_cache
    if _STATES.unsettled and isinstance(cache, AgentRadixCache) and batch.forward_mode.is_extend():
        for req in batch.reqs:
            _safely(cache, partial(_tell, cache, req))
    return original(scheduler, batch, result, *args, **kwargs)


def _tell(cache: AgentRadixCache, req: Any) -> None:
    vector = _STATES.settle(req.rid)
    state = getattr(req, "agentflow", None)
    if vector is None or state is None or not cache.runtime.wants_hidden:
        return
    cache.runtime.observe(Prefilled(req.rid, state.call, vector))
    if state.call.thread is not None:
        cache.tree_core.heard_of(state.call.thread.workflow.id)


def _safely(cache: AgentRadixCache, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        cache.runtime.counters["internal_errors"] += 1
        if cache.runtime.counters["internal_errors"] <= 3:
            logger.exception("hidden states could not be taken; requests are not affected")


def _ending(batch: Any) -> dict[str, int]:
    """Requests of the batch whose prompt it computes to the end, and their places; not those that decode along."""
    decoding = {r.rid for r in batch.decoding_reqs or ()}
    return {
        req.rid: place
        for place, (req, length) in enumerate(zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True))
        if req.rid not in decoding and not req.output_ids and length >= len(req.origin_input_ids)
    }


def _copied(rows: Any) -> _Copy:
    import torch

    if rows.device.type == "cpu":
        return _Copy(rows.detach().to(torch.float32, copy=True))
    here = torch.empty(rows.shape, dtype=torch.float32, pin_memory=True)
    here.copy_(rows.detach(), non_blocking=True)
    done = torch.get_device_module(rows.device).Event()
    done.record()
    return _Copy(here, done)
