"""Anchors of agents in the real cache: their tokens by hash, which nodes lie within one, and computing one ahead.

An anchor is the beginning that an agent's calls share: its system prompt and tools. It is computed ahead by a request
of the scheduler's own that holds nothing else, asks for a single token, and is answered to nobody.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from agentflow.cache.policy import WarmUp
from agentflow.engine.sglang.effects import make_room

__all__ = ["Anchors", "cached", "computed", "hooks", "is_internal", "warm_up"]

#: Anchors whose tokens are kept, and the longest that is, in tokens: 16 MiB at most.
LIMIT = 256
LONGEST = 8_192
#: Ids of requests of our own begin with it.
WARM_UP = "agentflow-warm-up-"


class Anchors:
    """The newest anchors seen by one scheduler."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[int, array[int]] = OrderedDict()
        self._sent = 0
        #: Requests of our own under way: decision, anchor, tokens that were missing.
        self.out: dict[str, tuple[int, int, int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def seen(self, req: Any, tokens: int) -> int:
        """The hash of the request's first ``tokens`` tokens, 0 when they are no anchor that could be used again."""
        if not 0 < tokens <= LONGEST or req.lora_id is not None or req.extra_key is not None:
            return 0
        ids = array("q", req.origin_input_ids[:tokens])
        key = int.from_bytes(blake2b(ids.tobytes(), digest_size=7).digest(), "little") or 1
        self._tokens[key] = ids
        self._tokens.move_to_end(key)
        if len(self._tokens) > LIMIT:
            self._tokens.popitem(last=False)
        req.agentflow_anchor = (key, tokens)
        return key

    def tokens(self, key: int) -> array[int] | None:
        """The tokens of an anchor, None when it was forgotten."""
        return self._tokens.get(key)

    def next_id(self) -> str:
        """The id of the next request of our own."""
        self._sent += 1
        return f"{WARM_UP}{self._sent}"

    @staticmethod
    def mark(core: Any, req: Any) -> None:
        """Note on the nodes that the request used which of them lie within its anchor."""
        key, tokens = getattr(req, "agentflow_anchor", None) or (0, 0)
        if not key or req.last_node is None:
            return
        path = []
        node = core.node_by_id(req.last_node)
        while node is not core.root_node:
            path.append(node)
            node = node.parent
        end = 0
        for node in reversed(path):
            end += len(node.key)
            if end > tokens:
                return
            core.record(node).anchor = key


def is_internal(req: Any) -> bool:
    """Whether a request is one of our own."""
    return isinstance(req.rid, str) and req.rid.startswith(WARM_UP)


def warm_up(scheduler: Any, cache: Any, effect: WarmUp) -> bool:
    """Compute an anchor ahead if it is not cached, displacing no more than the effect allows."""
    tokens = cache.anchors.tokens(effect.anchor)
    if tokens is None:
        return False
    missing = len(tokens) - cached(cache, tokens)
    if missing <= 0 or not make_room(cache, missing + 1, effect.displace, None):
        return False
    rid = cache.anchors.next_id()
    decision = cache.runtime.log.add(
        "warm",
        time=cache.clock(),
        policy=cache.runtime.name,
        reason=effect.reason,
        tokens=missing,
        request=rid,
        terms={"value": effect.value},
    )
    cache.anchors.out[rid] = (decision.seq, effect.anchor, missing)
    _submit(scheduler, rid, tokens)
    cache.runtime.counters["warm_ups"] += 1
    cache.runtime.counters["warm_up_tokens"] += missing
    return True


def _submit(scheduler: Any, rid: str, tokens: Sequence[int]) -> None:
    """Put a request of our own for ``tokens`` into the scheduler's queue, as if it had come from outside."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    sampling.normalize(None)
    scheduler.handle_generate_request(
        TokenizedGenerateReqInput(
            rid=rid,
            input_text="",
            input_ids=array("q", tokens),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            time_stats=APIServerReqTimeStats(),
        )
    )


def cached(cache: Any, tokens: Sequence[int]) -> int:
    """How many of the first ``tokens`` are on the device now. Counts as no use of them."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    core = cache.tree_core
    key = RadixKey(array("q", tokens))
    node, at = core.root_node, 0
    while at + cache.page_size <= len(tokens):
        child = node.children.get(key.child_key_at(at, cache.page_size))
        if child is None or child.evicted:
            break
        own = child.key.raw_token_ids()
        common = _common(own, tokens, at)
        at += common
        if common < len(own):
            break
        node = child
    return at


def computed(cache: Any, req: Any) -> None:
    """Note what a request of our own computed: nobody owns it, it is within the anchor, and the decision for it is
    settled when it is used or goes."""
    core = cache.tree_core
    seq, key, _ = cache.anchors.out.get(req.rid, (0, 0, 0))
    if req.last_node is not None:
        node = core.node_by_id(req.last_node)
        while node is not core.root_node:
            record = core.record(node)
            if not record.owners and not record.anonymous:
                record.shared = True
                record.prefetched_by = seq
                record.anchor = key
            node = node.parent
    if req.finished():
        cache.anchors.out.pop(req.rid, None)


def _common(own: Sequence[int], tokens: Sequence[int], at: int) -> int:
    limit = min(len(own), len(tokens) - at)
    for i in range(limit):
        if own[i] != tokens[at + i]:
            return i
    return limit


def hooks() -> dict[str, Callable[..., Any]]:
    """AROUND hooks by the dotted path of what they wrap."""
    streamer = "sglang.srt.managers.scheduler_components.output_streamer"
    return {f"{streamer}.SchedulerOutputStreamer.stream_output": stream_output}


def stream_output(original: Callable[..., Any], streamer: Any, reqs: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Nobody waits for the answers to requests of our own."""
    if any(is_internal(r) for r in reqs):
        reqs = [r for r in reqs if not is_internal(r)]
        if not reqs:
            return None
    return original(streamer, reqs, *args, **kwargs)
