"""The quality guard's evidence: some corrected calls are run again densely while the engine has nothing else to do.

Of a corrected call that is picked, the hidden states are kept from which its first tokens were sampled. Later one
dense prefill of its prompt and those tokens gives the states that should have been there. Both, through the model's
head, give the distributions whose KL and agreement :meth:`~agentflow.cache.kvcmas.types.Correction.drifted` hears of.
The dense run is a request that the scheduler makes for itself: it reads exact KV only, leaves none, and answers nobody.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentflow.cache.kvcmas import Edge
from agentflow.engine.sglang.radix_cache import AgentRequest

if TYPE_CHECKING:
    from agentflow.engine.sglang.correction.manager import Corrections

__all__ = ["Checks", "Watch", "hooks", "last_run", "rearranged"]

#: Output tokens compared, and calls that wait for their check; the oldest go.
POSITIONS = 16
WAITING = 16


@dataclass(slots=True, eq=False)
class Watch:
    """Hidden states (hidden size,) of one request: the first is that of its prompt's last token.

    ``dense`` says that the request is a check: then the states of all positions from ``first`` on come from its
    prefill.
    """

    first: int
    dense: bool = False
    states: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Check:
    """A corrected call that waits: its tokens up to the last that is compared, and what it had."""

    tokens: array[int]
    corrected: Watch
    edges: list[tuple[Edge, float]]
    request: str
    dense: Watch | None = None
    req: Any = None


#: Checks that run, by request; there is one scheduler in a process.
_dense: dict[str, Watch] = {}
_last_run = 0.0
#: Watched requests of the batch under way, by their row.
_current: dict[int, tuple[Watch, int]] | None = None


class Checks:
    """Picks calls, runs them again and tells the corrector. One for each :class:`Corrections`."""

    def __init__(self, corrections: Corrections, share: float, limit: int) -> None:
        self._corrections = corrections
        self._share = share
        self._limit = limit
        self._random = random.Random(1)
        self._waiting: deque[_Check] = deque(maxlen=WAITING)
        self._running: _Check | None = None
        self._number = 0
        self.done = 0
        self.kl = 0.0
        self.agreement = 0.0

    @property
    def pending(self) -> bool:
        """Whether a check waits to run, or one that ran to be settled."""
        return bool(self._waiting) or self._running is not None

    def pick(self, prompt: int) -> Watch | None:
        """Whether to watch a corrected call whose prompt has ``prompt`` tokens."""
        if prompt > self._limit or self._random.random() >= self._share:
            return None
        return Watch(prompt - 1)

    def finished(self, req: Any, watch: Watch, edges: list[tuple[Edge, float]]) -> None:
        """A watched call ended: its check may come."""
        seen = min(len(watch.states), len(req.output_ids), POSITIONS)
        if seen and edges and not req.is_retracted:
            del watch.states[seen:]
            ids = req.origin_input_ids + req.output_ids[: seen - 1]
            self._waiting.append(_Check(ids, watch, edges, req.rid))

    def next(self, scheduler: Any) -> bool:
        """Nothing runs: settle the check that ran, begin another. True when one is in the queue now."""
        ended, self._running = self._running, None
        _dense.clear()
        if ended is not None and ended.dense is not None and len(ended.dense.states) == len(ended.corrected.states):
            self._settle(ended, scheduler)
        if not self._waiting:
            return False
        check = self._running = self._waiting.popleft()
        check.dense = Watch(check.corrected.first, dense=True)
        check.req = self._request(check, scheduler)
        scheduler._add_request_to_queue(check.req)
        return True

    def _request(self, check: _Check, scheduler: Any) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        sampling.normalize(scheduler.tokenizer)
        self._number += 1
        req = Req(
            f"agentflow-check-{self._number}",
            "",
            array("q", check.tokens),
            sampling,
            eos_token_ids=scheduler.model_config.hf_eos_token_id,
            vocab_size=scheduler.model_config.vocab_size,
        )
        req.tokenizer = scheduler.tokenizer
        req.skip_radix_cache_insert = True
        req.finished_output = True  # nobody waits for an answer
        runtime = scheduler.tree_cache.runtime
        req.agentflow = AgentRequest(runtime.call(None, None, None, req.rid), runtime.log.last_seq, runtime.clock())
        req.agentflow.left = True  # no policy hears of it
        assert check.dense is not None
        _dense[req.rid] = check.dense
        return req

    def _settle(self, check: _Check, scheduler: Any) -> None:
        assert check.dense is not None
        head = scheduler.tp_worker.model_runner.model.lm_head.weight
        kl, agreement = divergence(check.dense.states, check.corrected.states, head, scheduler.model_config.vocab_size)
        self.done += 1
        self.kl += kl
        self.agreement += agreement
        self._corrections.checked(check.edges, kl, agreement, check.request)

    def stats(self) -> dict[str, float]:
        """How many calls were checked, and how far they were apart on average."""
        n = max(self.done, 1)
        return {
            "checks": self.done,
            "checks_waiting": len(self._waiting),
            "kl": self.kl / n,
            "agreement": self.agreement / n,
        }


def divergence(dense: list[Any], corrected: list[Any], head: Any, vocabulary: int) -> tuple[float, float]:
    """Mean KL(dense || corrected) in nats and share of equal most likely tokens, from states (hidden size,)."""
    import torch

    with torch.no_grad():
        weight = head[:vocabulary]
        p, q = (
            torch.log_softmax((torch.stack(s).to(weight.device, weight.dtype) @ weight.T).float(), -1)
            for s in (dense, corrected)
        )
        kl = (p.exp() * (p - q)).sum(-1).clamp_min(0).mean()
        return float(kl), float((p.argmax(-1) == q.argmax(-1)).float().mean())


def hooks() -> dict[str, Callable[..., Any]]:
    """AROUND hooks by the dotted path of what they wrap."""
    return {
        "sglang.srt.managers.scheduler.Scheduler.run_batch": run_batch,
        "sglang.srt.layers.logits_processor.LogitsProcessor._get_pruned_states": get_pruned_states,
    }


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Note which rows of the batch are watched."""
    global _current, _last_run
    if not all(req.rid in _dense for req in batch.reqs):
        _last_run = time.monotonic()
    found = {}
    for row, req in enumerate(batch.reqs):
        watch = _watch_of(req)
        if watch is None or len(watch.states) > POSITIONS:
            continue
        if batch.forward_mode.is_extend():
            if batch.prefix_lens[row] + batch.extend_lens[row] > watch.first:
                found[row] = (watch, watch.first - batch.prefix_lens[row])
        else:
            found[row] = (watch, 0)
    _current = found or None
    try:
        return original(scheduler, batch, *args, **kwargs)
    finally:
        _current = None


def last_run() -> float:
    """When a call was last computed, on the monotonic clock; checks do not count."""
    return _last_run


def rearranged(places: list[int]) -> None:
    """The requests at places 0, 1, ... of the batch under way stand at ``places`` of what is really run."""
    global _current
    if _current:
        _current = {places[row]: found for row, found in _current.items()}


def get_pruned_states(original: Callable[..., Any], processor: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the states that are watched, out of all (tokens, hidden size) or of those that were picked."""
    global _current
    result = original(processor, states, *args, **kwargs)
    if _current:
        found, _current = _current, None
        metadata = args[-1] if args else kwargs["logits_metadata"]
        picked = result[0] if result[3] is None else result[0][result[3]]
        for row, (watch, first) in found.items():
            if watch.dense:
                lengths = metadata.extend_seq_lens_cpu
                begin = sum(lengths[:row])
                taken = states[begin + max(first, 0) : begin + lengths[row]]
            else:
                taken = picked[row : row + 1]
            watch.states += list(taken.detach().to("cpu", copy=True).unbind(0))
    return result


def _watch_of(req: Any) -> Watch | None:
    if _dense and req.rid in _dense:
        return _dense[req.rid]
    wish = getattr(getattr(req, "agentflow", None), "correction", None)
    found: Watch | None = getattr(wish, "watch", None)
    return found
