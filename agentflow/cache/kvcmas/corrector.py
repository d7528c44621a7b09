"""The corrector: anchors, an estimator, a choice of tokens to recompute, a threshold and a guard, as one.

corrector = Corrector(Rope.of(config))
found = corrector.estimate(Edge("question", "planner", "coder"), token_ids, source, start)
if isinstance(found, Refusal): ...          # prefill densely, then
    corrector.learn(edge, token_ids, source, target)
...
corrector.work()                            # when idle: what learn put off
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from agentflow.cache.kvcmas.anchors import Anchor, AnchorPool, Features, anchor_nbytes, make_anchor
from agentflow.cache.kvcmas.estimators import Fitted, Prediction, Query
from agentflow.cache.kvcmas.guard import Guard
from agentflow.cache.kvcmas.methods import Method, method
from agentflow.cache.kvcmas.recompute import Choice, change, choose
from agentflow.cache.kvcmas.rope import Rope
from agentflow.cache.kvcmas.threshold import Threshold
from agentflow.cache.kvcmas.types import CONTEXT_FREE, Edge, Estimate, Refusal, SegmentKV
from agentflow.errors import UsageError

__all__ = ["Corrector", "Reference", "Signal"]

Reference = Literal["chained", "context-free"]
#: What uncertainty is: ``distance`` to the nearest anchors, normalised ``entropy`` of the matching weights (as in the
#: paper), or ``head``: the error on first tokens that were computed anyway (see :meth:`Corrector.confirm`).
Signal = Literal["distance", "entropy", "head"]


class _Pending(NamedTuple):
    edge: Edge
    tokens: tuple[int, ...]
    source: Features
    target: Features


class Corrector:
    """Corrects segments of one model; implements :class:`~agentflow.cache.kvcmas.types.Correction`.

    ``method`` is a name in :data:`~agentflow.cache.kvcmas.methods.METHODS`. ``reference`` says which source belongs
    to an edge; :meth:`edge` makes it. ``rank`` and ``anchors`` are the paper's r (of which some methods give
    more to differences than to bases, see ``Method``) and V; ``pool_bytes`` bounds anchors
    and what estimators hold beside them. ``recompute`` is the share of tokens to compute through the model and
    ``choice`` how they are found, in runs of at least ``min_run``; None takes the method's own. ``tau``,
    ``target_reuse`` or ``target_kl`` bound the uncertainty, which ``signal`` measures. An edge needs ``min_anchors``.
    ``queue`` bounds the candidates that wait for :meth:`work` in full dimension.

    Raises UsageError for values that cannot be.
    """

    def __init__(
        self,
        rope: Rope,
        *,
        method: str | Method = "token-kernel",
        reference: Reference = "chained",
        rank: int | None = 32,
        anchors: int = 10,
        pool_bytes: int = 256 << 20,
        recompute: float | None = None,
        choice: Choice | None = None,
        min_run: int = 1,
        signal: Signal = "distance",
        tau: float | None = None,
        target_reuse: float | None = None,
        target_kl: float | None = None,
        min_anchors: int = 2,
        queue: int = 8,
        guard: Guard | None = None,
        seed: int = 0,
    ) -> None:
        self.method = method_of(method)
        self.name = method if isinstance(method, str) else method.title
        self.rope = rope
        self.reference: Reference = reference
        self.rank = rank if self.method.low_rank else None
        self._ranks = _split(self.rank, self.method.base_share)
        self.recompute = self.method.recompute if recompute is None else recompute
        self.choice: Choice = choice or self.method.choice
        self.min_run = min_run
        self.signal: Signal = signal
        self.min_anchors = min_anchors
        self.threshold = Threshold(tau=tau, target_reuse=target_reuse, target_kl=target_kl)
        self.guard = guard or Guard()
        self.pool = AnchorPool(per_edge=anchors, max_bytes=pool_bytes, least=min_anchors)
        self._check(reference, tau, target_reuse, target_kl, queue)
        self._queue = queue
        self._seed = seed
        self._pending: deque[_Pending] = deque()
        self._stale: OrderedDict[Edge, None] = OrderedDict()
        self._fitted: dict[Edge, Fitted] = {}
        self._unfit: set[Edge] = set()
        self._counts: Counter[str] = Counter()

    def _check(self, reference: str, *values: float | None) -> None:
        tau, reuse, kl, queue = values
        if reference not in ("chained", "context-free"):
            raise UsageError(f"reference is 'chained' or 'context-free', not {reference!r}")
        if sum(v is not None for v in (tau, reuse, kl)) > 1:
            raise UsageError("tau, target_reuse and target_kl exclude one another: give one")
        if not 0 <= self.recompute <= 1 or (reuse is not None and not 0 <= reuse <= 1):
            raise UsageError("recompute and target_reuse are shares, between 0 and 1")
        if (self.rank is not None and self.rank < 1) or self.pool.per_edge < 0 or self.min_run < 1 or (queue or 0) < 0:
            raise UsageError("rank and min_run are at least 1; anchors and queue at least 0")
        if self.min_anchors < 1 or 0 < self.pool.per_edge < self.min_anchors or self.pool.max_bytes < 0:
            raise UsageError(
                "min_anchors is at least 1 and at most anchors (unless these are 0); pool_bytes at least 0"
            )
        if any(v is not None and not v >= 0 for v in (tau, kl)):
            raise UsageError("tau and target_kl are at least 0")
        if self.choice not in ("first", "change", "both") or self.signal not in ("distance", "entropy", "head"):
            raise UsageError("choice is 'first', 'change' or 'both'; signal 'distance', 'entropy' or 'head'")

    @property
    def learns(self) -> bool:
        """Whether the method uses anchors at all."""
        return self.method.estimator is not None

    def edge(self, slot: str, source: str, target: str) -> Edge:
        """The edge on which a segment that ``source`` has is corrected for ``target``, given the reference."""
        return Edge(slot, source if self.reference == "chained" else CONTEXT_FREE, target)

    def estimate(
        self, edge: Edge, token_ids: Sequence[int], source: SegmentKV, start: int, *, exact: int = 0
    ) -> Estimate | Refusal:
        """See :class:`~agentflow.cache.kvcmas.types.Correction`. An estimator's failure becomes a refusal."""
        self._shapes(token_ids, source)
        if not 0 <= exact <= source.tokens:
            raise UsageError(f"exact is a number of the segment's {source.tokens} tokens, not {exact}")
        if not self.guard.allows(edge):
            return self._refuse("edge is off", {})
        if not _finite(source):
            return self._refuse("source is not finite", {})
        if self.method.estimator is None:
            moved = self._moved(source, start, None)
            if not _finite(moved):
                return self._refuse("estimate is not finite", {})
            chosen = choose(moved.tokens, self.recompute, "first", exact=exact, min_run=self.min_run)
            self._counts["estimates"] += 1
            return Estimate(kv=moved, recompute=chosen, confidence=0.0, method=self.name)
        fitted = self._fitted.get(edge)
        known = len(self.pool.of(edge))
        if known < self.min_anchors:
            return self._refuse("too few anchors", {"anchors": known})
        if fitted is None:
            return self._refuse("fit failed" if edge in self._unfit else "not fitted yet", {"anchors": known})
        try:
            return self._estimate(edge, fitted, token_ids, source, start, exact)
        except Exception as error:  # whatever an estimator does, the request goes on
            self._counts["failed"] += 1
            self._counts[f"failed: {type(error).__name__}"] += 1
            return self._refuse("estimator failed", {})

    @torch.no_grad()
    def _estimate(
        self, edge: Edge, fitted: Fitted, token_ids: Sequence[int], source: SegmentKV, start: int, exact: int
    ) -> Estimate | Refusal:
        base = self._features(source, start)
        found = fitted.predict(Query(tuple(token_ids), base))
        terms = {"distance": found.distance, "entropy": found.entropy}
        numbers = (found.distance, found.entropy, *found.shares.values())
        if not _finite(found.delta) or not all(map(math.isfinite, numbers)):
            return self._refuse("estimate is not finite", terms)
        self.pool.use(edge, found.shares)
        confidence = 1 / (1 + found.distance) if self.signal != "entropy" else 1 - found.entropy
        if self.signal != "head":
            uncertainty = found.distance if self.signal == "distance" else found.entropy
            accepted = self.threshold.accepts(uncertainty)
            if math.isfinite(self.threshold.tau):
                terms["tau"] = self.threshold.tau
            if not accepted:
                return self._refuse("uncertain", terms)
        scores = change(found.delta, base)
        terms["change"] = float(scores.mean())
        kv = self._moved(source, start, found)
        if not _finite(kv):  # too large for the source's float type
            return self._refuse("estimate is not finite", terms)
        chosen = choose(kv.tokens, self.recompute, self.choice, scores, exact=exact, min_run=self.min_run)
        self._counts["estimates"] += 1
        return Estimate(kv=kv, recompute=chosen, confidence=confidence, method=self.name, terms=terms)

    @torch.no_grad()
    def confirm(self, estimate: Estimate, head: SegmentKV) -> Estimate | Refusal:
        """Weigh an estimate once the segment's first tokens are computed: ``head`` is their KV.

        The uncertainty is the relative squared error of the estimated values there. With the signal ``head`` it
        decides; with others the estimate only gets the term ``head``. Raises UsageError when shapes do not fit.
        """
        n = head.tokens
        if not n or head.values.shape != estimate.kv.values[:, :n].shape:
            raise UsageError(f"a head of {tuple(head.values.shape)} for KV of {tuple(estimate.kv.values.shape)}")
        there, mine = head.values.float(), estimate.kv.values[:, :n].float()
        error = float((there - mine).square().sum() / there.square().sum().clamp_min(1e-12))
        terms = {**estimate.terms, "head": error}
        if self.signal == "head":
            accepted = self.threshold.accepts(error)
            if math.isfinite(self.threshold.tau):
                terms["tau"] = self.threshold.tau
            if not accepted:
                return self._refuse("uncertain", terms)
        confidence = 1 / (1 + error) if self.signal == "head" else estimate.confidence
        return Estimate(
            kv=estimate.kv, recompute=estimate.recompute, confidence=confidence, method=estimate.method, terms=terms
        )

    def learn(self, edge: Edge, token_ids: Sequence[int], source: SegmentKV, target: SegmentKV) -> bool:
        """See :class:`~agentflow.cache.kvcmas.types.Correction`."""
        self._shapes(token_ids, source, target)
        tokens = tuple(token_ids)
        waiting = any(p.edge == edge and p.tokens == tokens for p in self._pending)
        if not self.learns or waiting or self.pool.has(edge, tokens):
            return False
        if len(self._pending) >= self._queue:
            self._counts["queue full"] += 1
            return False
        base = self._features(source, target.start, keep=True)
        self._pending.append(_Pending(edge, tokens, base, self._features(target, target.start, keep=True)))
        return True

    def adopt(self, edge: Edge, anchor: Anchor) -> None:
        """Take an anchor that exists already, of another corrector of the same model; :meth:`work` fits it.

        Raises UsageError when it is not finite, or not of this model.
        """
        if not anchor.finite or self._form not in (None, anchor.form):
            raise UsageError(f"an anchor that is not finite, or of {anchor.form} layers and features, not {self._form}")
        self._changed(self.pool.add(edge, anchor))

    def work(self, *, until: Callable[[], bool] | None = None) -> int:
        """See :class:`~agentflow.cache.kvcmas.types.Correction`. A candidate that cannot be decomposed is dropped."""
        while self._pending or self._stale:
            try:
                self._step()
            except Exception:
                self._counts["failed"] += 1
            if until is not None and until():
                break
        return len(self._pending) + len(self._stale)

    @torch.no_grad()
    def _step(self) -> None:
        if self._pending:
            edge, tokens, source, target = self._pending.popleft()
            base_rank, rank = self._ranks
            if not self.pool.wants(edge, tokens, anchor_nbytes(source, rank=rank, base_rank=base_rank)):
                return
            anchor = make_anchor(tokens, source, target, rank=rank, base_rank=base_rank, seed=self._seed)
            if not anchor.finite:
                raise ValueError("anchor is not finite")
            changed = self.pool.add(edge, anchor)
            self._changed(changed)
            self._counts["learned"] += bool(changed)
            return
        edge, _ = self._stale.popitem(last=False)
        if self.method.estimator is None or len(anchors := self.pool.of(edge)) < self.min_anchors:
            return
        try:
            fitted = self.method.estimator.fit(anchors)
        except Exception:  # the fit that there was, if any, goes on
            self._counts["failed: fit"] += 1
            self._unfit.add(edge)
            raise
        self._unfit.discard(edge)
        self._fitted[edge] = fitted
        self.pool.fitted(edge, fitted.nbytes)
        self._counts["fits"] += 1
        while self.nbytes > self.pool.max_bytes and (home := self.pool.shrink(edge)) is not None:
            self._changed([home])

    def _changed(self, edges: Sequence[Edge]) -> None:
        """Anchors of these edges changed: fit them again, and forget fits that lost their room."""
        for edge in edges:
            self._stale[edge] = None
            if edge not in self.pool.beside:
                self._fitted.pop(edge, None)
            if not self.pool.of(edge):
                self._unfit.discard(edge)

    def drifted(self, edge: Edge, kl: float, agreement: float, *, confidence: float | None = None) -> bool:
        """See :class:`~agentflow.cache.kvcmas.types.Correction`. ``guard.verdict(edge)`` holds the record."""
        if confidence is not None and confidence > 0:
            self.threshold.outcome(1 - confidence if self.signal == "entropy" else 1 / confidence - 1, kl)
        self._counts["checks"] += 1
        return self.guard.check(edge, kl, agreement)

    @property
    def nbytes(self) -> int:
        """Bytes of anchors and of what estimators hold beside them."""
        return self.pool.nbytes + sum(f.nbytes for f in self._fitted.values())

    def stats(self) -> Mapping[str, float]:
        """See :class:`~agentflow.cache.kvcmas.types.Correction`."""
        return {
            **self._counts,
            "anchors": len(self.pool),
            "anchor_bytes": self.pool.nbytes,
            "anchor_bytes_full": self.pool.full_nbytes,
            "fitted_bytes": self.nbytes - self.pool.nbytes,
            "pending": len(self._pending),
            "pending_bytes": sum(m.nbytes for p in self._pending for m in (*p.source, *p.target)),
            "evicted": self.pool.evicted,
            "anchors_refused": self.pool.refused,
            "edges": len(self.pool.edges),
            "edges_short": self.pool.short,
            "edges_off": self.guard.off,
            **({"tau": self.threshold.tau} if math.isfinite(self.threshold.tau) else {}),
        }

    @property
    def _form(self) -> tuple[int, int] | None:
        """Layers and features of what was learnt, if anything."""
        if self._pending:
            keys = self._pending[0].source.keys
            return keys.shape[0], keys.shape[-1]
        return self.pool.form

    def _shapes(self, token_ids: Sequence[int], *kvs: SegmentKV) -> None:
        size, form = self.rope.head_size, self._form
        for kv in kvs:
            if kv.keys.dim() != 4 or kv.keys.shape != kv.values.shape or kv.keys.shape[-1] != size:
                raise UsageError(
                    "keys and values are (layers, tokens, KV heads, head size) with heads of"
                    f" {size}; got {tuple(kv.keys.shape)} and {tuple(kv.values.shape)}"
                )
            if len(token_ids) != kv.tokens or not kv.tokens:
                raise UsageError(f"{len(token_ids)} token ids for KV of {kv.tokens} tokens")
            layers, _, heads, _ = kv.keys.shape
            form = form or (layers, heads * size)
            if form != (layers, heads * size):
                raise UsageError(
                    f"KV of {layers} layers and {heads} KV heads beside that of {form[0]} layers and {form[1] // size}"
                )

    def _features(self, kv: SegmentKV, start: int, *, keep: bool = False) -> Features:
        """De-rotated keys (or as rotated from ``start``, as the method wants) and values; with ``keep`` in the KV's own
        type and apart from its memory, else in float32."""
        keys = kv.keys if keep else kv.keys.float()
        keys = self.rope.unrotate(keys, kv.start) if self.method.derotated else self.rope.shift(keys, start - kv.start)
        values = kv.values.clone() if keep else kv.values.float()
        return Features(keys.flatten(2), values.flatten(2))

    def _moved(self, source: SegmentKV, start: int, found: Prediction | None) -> SegmentKV:
        keys, values = self.rope.shift(source.keys, start - source.start), source.values.clone()
        if found is not None:
            delta = found.delta.keys.reshape(source.keys.shape)
            turned = self.rope.rotate(delta, start) if self.method.derotated else delta
            keys = (keys.float() + turned).to(keys.dtype)
            values = (values.float() + found.delta.values.reshape(source.values.shape)).to(values.dtype)
        return SegmentKV(keys, values, start)

    def _refuse(self, reason: str, terms: Mapping[str, float]) -> Refusal:
        self._counts[f"refused: {reason}"] += 1
        return Refusal(reason, terms)


def _finite(tensors: Features | SegmentKV) -> bool:
    """Whether keys and values have neither NaN nor infinity: a sum has one if any number does, and costs little.

    Sums of half floats, which hold no more than 65,504, are made in single.
    """
    wide = torch.float32 if tensors.keys.dtype is torch.float16 else None
    return all(math.isfinite(float(t.sum(dtype=wide))) for t in (tensors.keys, tensors.values))


def _split(rank: int | None, share: float) -> tuple[int | None, int | None]:
    """Ranks of bases and of differences, whose sum is twice ``rank``."""
    if rank is None:
        return None, None
    base = max(1, round(share * rank))
    return base, 2 * rank - base


def method_of(given: str | Method) -> Method:
    """A method by name, or the one given."""
    return method(given) if isinstance(given, str) else given
