"""Correction of KV in one scheduler: plans, fills, and the caches and anchors that they start from.

A failure in here never reaches a request: whatever cannot be filled is computed, as if nobody had asked.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from agentflow.cache.decision import Decision
from agentflow.cache.kvcmas import CONTEXT_FREE, Correction, Edge, Estimate, Refusal
from agentflow.engine.base import Segment
from agentflow.engine.sglang.correction.checks import Checks, Watch
from agentflow.engine.sglang.correction.methods import make_corrector
from agentflow.engine.sglang.correction.options import CorrectionOptions
from agentflow.engine.sglang.correction.plan import Fill, FillPlan, fills_of
from agentflow.engine.sglang.correction.pool import KVPool, obstacle
from agentflow.engine.sglang.correction.sources import Found, Source, Sources

if TYPE_CHECKING:
    from agentflow.engine.sglang.correction.cache import CorrectingRadixCache

__all__ = ["Corrections", "Wish"]

logger = logging.getLogger("agentflow.engine")


class Wish:
    """What is kept on a request that may be corrected.

    ``boundary`` is the position from which its KV is approximate, None while all of it is exact; that KV is keyed by
    ``namespace`` until the call leaves the pool, whatever is configured meanwhile. ``cursor`` is how far the plan was
    carried out.
    """

    __slots__ = (
        "agent",
        "boundary",
        "captured",
        "cursor",
        "edges",
        "namespace",
        "plan",
        "segments",
        "watch",
        "workflow",
    )

    def __init__(self, workflow: str, agent: str, segments: tuple[Segment, ...]) -> None:
        self.workflow = workflow
        self.agent = agent
        self.segments = segments
        self.plan: FillPlan | None = None
        self.cursor = 0
        self.boundary: int | None = None
        self.namespace = 0
        self.captured = 0
        #: Edges that were corrected, with the confidence.
        self.edges: list[tuple[Edge, float]] = []
        #: Set when the call may be run again densely.
        self.watch: Watch | None = None


class _Capture(NamedTuple):
    """KV that is in the pool now: tokens, their slots, and where they stand.

    It becomes a source with ``keep``, and may become an anchor with ``learn``.
    """

    wish: Wish
    slot: str | None
    tokens: tuple[int, ...]
    slots: Any
    start: int
    exact: bool
    keep: bool
    learn: bool


class Corrections:
    """All of it for one cache. ``start`` is called once the scheduler is known."""

    def __init__(self, cache: CorrectingRadixCache, options: CorrectionOptions) -> None:
        self._cache = cache
        #: Goes up with every change, so that KV approximated otherwise is never found again.
        self.namespace = 0
        self.options = options
        self.obstacle: str | None = "the scheduler has not begun"
        self._scheduler: Any = None
        self._captures: deque[_Capture] = deque()
        self.use(options)

    # -- setting up ------------------------------------------------------------------------------------

    def use(self, options: CorrectionOptions, *, keep: bool = False) -> None:
        """Go on with other options; what was learnt and kept is forgotten, unless ``keep`` and they correct alike."""
        if keep and options.alike(self.options):
            self.options = options
            self.checks = Checks(self, options.check, options.check_tokens)
            return
        self.options = options
        self.namespace += 1
        self.sources = Sources(options.source_bytes)
        self.work_left = 0
        self._worked_at = 0.0
        self.checks = Checks(self, options.check, options.check_tokens)
        self.corrector: Correction | None = None
        self._random = random.Random(0)
        self._captures.clear()
        if self._scheduler is not None:
            self.start(self._scheduler)

    def check(self, options: CorrectionOptions) -> None:
        """Raise UsageError for options that cannot be used with this model."""
        if self._scheduler is not None and not options.off and obstacle(self._scheduler) is None:
            make_corrector(options, self._scheduler.model_config.hf_config)

    def start(self, scheduler: Any) -> None:
        """Look at the model and the pool, and make the corrector if they will do."""
        self._scheduler = scheduler
        self.obstacle = "correction is switched off" if self.options.off else obstacle(scheduler)
        if self.obstacle is None:
            self.pool = KVPool(scheduler)
            self.corrector = make_corrector(self.options, scheduler.model_config.hf_config)

    def forget(self) -> None:
        """The pool is emptied: nothing that waits to be read from it is there any more."""
        self._captures.clear()

    # -- a request -------------------------------------------------------------------------------------

    def wish(self, req: Any, hint: Any) -> Wish | None:
        """What a request that opted in may get. Says why not where it may not."""
        at = hint.at
        reason = self.obstacle
        if reason is None and at.workflow is None:
            reason = "the call belongs to no workflow"
        if reason is None and not hint.segments:
            reason = "the prompt's segments are not known"
        if reason is None and (req.return_logprob or req.return_hidden_states):
            reason = "log-probabilities or hidden states are wanted"
        if reason is None and (req.multimodal_inputs is not None or req.input_embeds is not None):
            reason = "the prompt is not text alone"
        if reason is None and req.lora_id is not None:
            reason = "the call runs with an adapter"
        if reason is not None:
            if not self.options.off:
                self._record("fallback", req, reason, len(req.origin_input_ids))
            return None
        segments = tuple(s for s in hint.segments if s.kind == "shared" and s.length >= self.options.minimum)
        alone = len(hint.segments) == 1 and bool(segments)
        return Wish(at.workflow, CONTEXT_FREE if alone else at.agent or "agent", segments)

    def prepare(self, batch: Any) -> None:
        """The slots of an extend batch are allocated: fill what the plans of its requests fill."""
        for req, first, new in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            wish = wish_of(req)
            if wish is None or any(req is d for d in batch.decoding_reqs or ()):
                continue
            try:
                self._prepare(req, wish, first, first + new, batch.return_logprob)
            except Exception:
                wish.plan = None
                self._count("internal_errors")
                logger.exception("filling request %s failed; it is computed instead", req.rid)

    def _prepare(self, req: Any, wish: Wish, first: int, end: int, plain: bool) -> None:
        if wish.plan is None or wish.cursor != first:
            wish.plan = wish.watch = None
            wish.edges = []
            if self.corrector is None or plain or wish.agent == CONTEXT_FREE or wish.namespace != self.namespace:
                return
            wish.plan = self._plan(req, wish, first)
            if req.retracted_stain:
                self._count("corrected_again")
        wish.cursor = end
        parts = wish.plan.within(first, end)
        if not parts:
            return
        row = self._cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        for part in parts:
            self.pool.write(row[part.start : part.end].long(), part)
        if wish.boundary is None or parts[0].start < wish.boundary:
            wish.boundary = parts[0].start

    def _plan(self, req: Any, wish: Wish, prefix: int) -> FillPlan:
        began = time.perf_counter()
        fills: list[Fill] = []
        confidence = 1.0
        shared = 0
        for segment in wish.segments:
            end = segment.start + segment.length
            skip = max(0, prefix - segment.start)
            if skip + self.options.minimum > segment.length:
                continue
            shared += segment.length - skip
            tokens = req.origin_input_ids[segment.start : end].tolist()
            found = self._estimate(wish, segment, tokens, skip)
            if isinstance(found, Refusal):
                self._record("fallback", req, found.reason, segment.length - skip, dict(found.terms))
                continue
            confidence = min(confidence, found.confidence)
            fills += fills_of(found, skip)
        plan = FillPlan(prefix, tuple(fills))
        if plan.tokens:
            prompt = len(req.origin_input_ids)
            terms = {
                "prompt": float(prompt),
                "cached": float(prefix),
                "computed": float(prompt - prefix - plan.tokens),
                "ratio": plan.tokens / shared,
                "confidence": confidence,
                "seconds": time.perf_counter() - began,
            }
            if req.retracted_stain:  # SGLang counts what was cached at the first prefill
                terms["again"] = 1.0
            made = self._record("correct", req, "shared segments of other agents", plan.tokens, terms)
            req.agentflow.corrected.append(made)
            # Of a call that was preempted, other positions are computed than a check would look at.
            wish.watch = None if req.retracted_stain else self.checks.pick(prompt)
            self._count("corrected_calls")
            self._count("corrected_tokens", plan.tokens)
        return plan

    def _estimate(self, wish: Wish, segment: Segment, tokens: list[int], skip: int) -> Estimate | Refusal:
        found = self._choose(wish, tokens, skip + self.options.minimum)
        if found is None:
            return Refusal("no other agent's KV of this segment is at hand", {})
        source, same = found
        edge = Edge(_slot(segment), source.agent, wish.agent)
        assert self.corrector is not None
        try:
            if self._random.random() < self.options.faults:
                raise RuntimeError("a fault was asked for")
            estimate = self.corrector.estimate(
                edge, tokens[:same], self.pool.near(source.kv.part(0, same)), segment.start, exact=skip
            )
        except Exception as error:
            self._count("estimates_failed")
            if not self.options.faults:
                logger.exception("estimating KV for %s failed; it is computed instead", edge)
            return Refusal(f"the estimator failed: {type(error).__name__}", {})
        if isinstance(estimate, Estimate):
            self.sources.used(source)
            wish.edges.append((edge, estimate.confidence))
        return estimate

    def _choose(self, wish: Wish, tokens: Sequence[int], minimum: int) -> Found | None:
        """The source to start from: the reference that the method wants, else none."""
        found = self._candidates(wish, tokens, minimum)
        # The longest; among those an exact one, and of those the first that there was.
        return max(found, key=lambda f: (f.tokens, f.source.exact), default=None)

    def _candidates(self, wish: Wish, tokens: Sequence[int], minimum: int) -> list[Found]:
        """Sources of the kind that the method's reference is."""
        free = getattr(self.corrector, "reference", "chained") == "context-free"
        found = self.sources.find(wish.workflow, tokens, minimum=minimum)
        return [f for f in found if (f.source.agent == CONTEXT_FREE) == free]

    # -- what becomes of it ----------------------------------------------------------------------------

    def computed(self, req: Any, wish: Wish, up_to: int) -> None:
        """The request's KV up to ``up_to`` is in the tree: note what is worth keeping."""
        prompt = len(req.origin_input_ids)
        if wish.namespace != self.namespace:
            return  # it began under another method
        if up_to >= prompt:
            wish.plan = None  # it is carried out; what it held can go
        if up_to < prompt or (wish.captured >= prompt and not req.finished()):
            return
        row = self._cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        if wish.captured < prompt:
            wish.captured = prompt
            for segment in wish.segments:
                end = segment.start + segment.length
                self._note(req, wish, row, _slot(segment), segment.start, end, segment.start)
        if req.finished() and up_to - prompt >= self.options.minimum and wish.agent != CONTEXT_FREE:
            ids = tuple(req.output_ids[: up_to - prompt])
            exact = wish.boundary is None
            self._captures.append(_Capture(wish, None, ids, row[prompt:up_to].long(), prompt, exact, True, False))

    def _note(self, req: Any, wish: Wish, row: Any, slot: str, first: int, end: int, start: int) -> None:
        tokens = tuple(req.origin_input_ids[first:end])
        exact = wish.boundary is None or wish.boundary >= end
        others = [f for f in self._candidates(wish, tokens, len(tokens)) if f.source.exact or not exact]
        learn = exact and wish.agent != CONTEXT_FREE and any(f.source.agent != wish.agent for f in others)
        if learn or not others:  # one exact source is enough: all edges start from it
            slots = row[first:end].long()
            self._captures.append(_Capture(wish, slot, tokens, slots, start, exact, not others, learn))

    def capture(self) -> None:
        """Read what was noted, before anything can displace it. Call it before a batch is formed."""
        while self._captures:
            noted = self._captures.popleft()
            try:
                self._capture(noted)
            except Exception:
                self._count("internal_errors")
                logger.exception("keeping KV of a shared segment failed; no request is affected")

    def _capture(self, noted: _Capture) -> None:
        wish = noted.wish
        kv = self.pool.read(noted.slots, noted.start)
        if noted.learn and noted.slot is not None and self.corrector is not None:
            found = self._choose(wish, noted.tokens, self.options.minimum)
            if found is not None and found.source.agent != wish.agent:
                edge = Edge(noted.slot, found.source.agent, wish.agent)
                same = found.tokens
                if self.corrector.learn(
                    edge, noted.tokens[:same], *(self.pool.near(k.part(0, same)) for k in (found.source.kv, kv))
                ):
                    self._count("anchors_offered")
                    self._worked_at = self._worked_at if self.work_left else time.monotonic()
                    self.work_left += 1
        if noted.keep and self.sources.add(Source(wish.workflow, wish.agent, noted.tokens, kv, noted.exact)):
            self._count("sources_kept")

    @property
    def something_to_do(self) -> bool:
        """Whether an idle engine has anchors to make or calls to check."""
        return bool(self.work_left) or self.checks.pending

    def waits(self, seconds: float) -> bool:
        """Whether there is work that nobody found time for in ``seconds``."""
        return bool(self.work_left) and time.monotonic() - self._worked_at > seconds

    def work(self, until: Callable[[], bool]) -> None:
        """Make anchors of what was learnt until ``until()``."""
        if self.corrector is None or not self.work_left:
            return
        self._worked_at = time.monotonic()
        self.work_left = 0  # if it fails, it is not tried again before there is more
        self.work_left = self.corrector.work(until=until)

    def checked(self, edges: list[tuple[Edge, float]], kl: float, agreement: float, request: str) -> None:
        """A corrected call was run again densely: tell the corrector of all edges that it used."""
        assert self.corrector is not None
        self._count("correction_checks")
        if not self.options.enforce:
            return
        for edge, confidence in edges:
            if self.corrector.drifted(edge, kl, agreement, confidence=confidence):
                self._cache.runtime.log.add(
                    "reject",
                    time=self._cache.clock(),
                    policy=f"kvcmas:{self.options.method}",
                    reason=f"corrected KV drifts: slot {edge.slot} from {edge.source} to {edge.target} is off",
                    agents=(edge.target,),
                    request=request,
                    terms={"kl": kl, "agreement": agreement},
                )
                self._count("correction_rejects")

    def stats(self) -> dict[str, Any]:
        """For ``EngineStats.details``."""
        return {
            "method": self.options.method,
            "obstacle": self.obstacle,
            "work_left": self.work_left,
            "sources": len(self.sources),
            "source_bytes": self.sources.bytes,
            "sources_dropped": self.sources.dropped,
            **self.checks.stats(),
            "corrector": dict(self.corrector.stats()) if self.corrector is not None else {},
        }

    # -- records ---------------------------------------------------------------------------------------

    def _record(self, kind: Any, req: Any, reason: str, tokens: int, terms: dict[str, float] | None = None) -> Decision:
        runtime = self._cache.runtime
        call = req.agentflow.call if getattr(req, "agentflow", None) is not None else None
        thread = call.thread if call is not None else None
        self._count(f"correction_{kind}s")
        return runtime.log.add(
            kind,
            time=self._cache.clock(),
            policy=f"kvcmas:{self.options.method}",
            reason=reason,
            tokens=tokens,
            workflows=(thread.workflow.id,) if thread is not None else (),
            agents=(thread.agent,) if thread is not None and thread.agent else (),
            request=req.rid,
            terms=terms,
        )

    def _count(self, what: str, by: int = 1) -> None:
        self._cache.runtime.counters[what] += by


def wish_of(req: Any) -> Wish | None:
    """What the request may get; None for an exact one."""
    state = getattr(req, "agentflow", None)
    found: Wish | None = getattr(state, "correction", None)
    return found


def _slot(segment: Segment) -> str:
    return segment.slot or segment.producer or "shared"
