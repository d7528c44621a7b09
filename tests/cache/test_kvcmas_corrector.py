"""The corrector as the engine uses it: what it gives, what it refuses, what it keeps."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from agentflow.cache.kvcmas import CONTEXT_FREE, Corrector, Edge, Estimate, Refusal, Rope, SegmentKV  # noqa: E402
from agentflow.cache.kvcmas.guard import Guard  # noqa: E402
from agentflow.cache.kvcmas.methods import METHODS, Method  # noqa: E402
from agentflow.errors import UsageError  # noqa: E402

LAYERS, HEADS, SIZE = 3, 2, 8
ROPE = Rope.of(
    {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 512}, halves=True
)
EDGE = Edge("question", "planner", "coder")
LEARNING = [name for name, m in METHODS.items() if m.estimator is not None]


def segment(tokens: int, start: int, *, seed: int, dtype: Any = torch.float32) -> SegmentKV:
    made = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(LAYERS, tokens, HEADS, SIZE, generator=made).to(dtype) for _ in range(2))
    return SegmentKV(keys, values, start)


def target_of(source: SegmentKV, start: int, by: float) -> SegmentKV:
    """As a dense prefill of another agent might give it: a constant more in all layers but the first."""
    plain = ROPE.unrotate(source.keys.float(), source.start)
    plain[1:] += by
    values = source.values.float().clone()
    values[1:] += 2 * by
    return SegmentKV(ROPE.rotate(plain, start).to(source.keys.dtype), values.to(source.keys.dtype), start)


def taught(method: str, *, by: float = 0.5, count: int = 4, dtype: Any = torch.float32, **options: Any) -> Corrector:
    corrector = Corrector(ROPE, method=method, **options)
    for n in range(count):
        source = segment(12 + n, 5, seed=n, dtype=dtype)
        assert corrector.learn(EDGE, range(n, 12 + 2 * n), source, target_of(source, 40, by)) == corrector.learns
    corrector.work()
    return corrector


def estimated(corrector: Corrector, source: SegmentKV, start: int, **options: Any) -> Estimate:
    found = corrector.estimate(EDGE, range(source.tokens), source, start, **options)
    assert isinstance(found, Estimate), found
    return found


def close(a: Any, b: Any, room: float = 1e-4) -> bool:
    return bool(torch.allclose(a.float(), b.float(), atol=room, rtol=room))


@pytest.mark.parametrize("method", METHODS)
def test_under_an_identical_prefix_nothing_changes(method: str) -> None:
    corrector = taught(method, by=0.0)
    source = segment(10, 40, seed=50)
    found = estimated(corrector, source, 40)
    assert close(found.kv.keys, source.keys, 2e-5)
    assert torch.equal(found.kv.values, source.values)
    assert found.kv.start == 40


@pytest.mark.parametrize("method", LEARNING)
def test_a_delta_that_is_the_same_everywhere_is_learned(method: str) -> None:
    corrector = taught(method)
    source = segment(10, 3, seed=50)
    want = target_of(source, 40, 0.5)
    found = estimated(corrector, source, 40)
    assert close(found.kv.values, want.values, 1e-3)
    assert close(found.kv.keys, want.keys, 1e-3)  # KVComm's too: its anchors stand where the target stands
    assert torch.equal(found.kv.values[0], source.values[0])
    assert close(found.kv.keys[0], ROPE.shift(source.keys, 37)[0])
    assert found.method == method
    assert 0 <= found.confidence <= 1


def test_derotated_anchors_serve_any_position_and_rotated_ones_do_not() -> None:
    source = segment(10, 3, seed=50)
    want = target_of(source, 200, 0.5)
    assert close(estimated(taught("kvcomm-derotated"), source, 200).kv.keys, want.keys, 1e-3)
    assert not close(estimated(taught("kvcomm"), source, 200).kv.keys, want.keys, 0.1)


def test_ranks_may_be_uneven_and_take_the_same_room() -> None:
    corrector, paper = (Corrector(ROPE, method=name, rank=4) for name in ("token-kernel", "segment"))
    source = segment(60, 5, seed=1)
    for one in (corrector, paper):
        one.learn(EDGE, range(60), source, target_of(source, 40, 0.5))
        one.work()
    anchor, other = corrector.pool.of(EDGE)[0], paper.pool.of(EDGE)[0]
    assert [m.left.shape[2] for m in (anchor.base_keys, anchor.delta_values)] == [3, 5]
    assert [m.left.shape[2] for m in (other.base_keys, other.delta_values)] == [4, 4]
    assert anchor.nbytes == other.nbytes


@pytest.mark.parametrize("method", METHODS)
def test_an_estimate_shares_no_memory_and_keeps_the_type(method: str) -> None:
    corrector = taught(method, dtype=torch.bfloat16)
    source = segment(10, 40, seed=50, dtype=torch.bfloat16)
    before = source.keys.clone()
    kv = estimated(corrector, source, 40).kv
    assert kv.keys.dtype == kv.values.dtype == torch.bfloat16
    kv.keys.zero_()
    kv.values.zero_()
    assert torch.equal(source.keys, before)
    assert source.values.any()


def test_learning_copies_what_it_is_given() -> None:
    corrector = Corrector(ROPE, min_anchors=1)
    source = segment(10, 0, seed=1)
    target = target_of(source, 40, 0.5)
    again = SegmentKV(source.keys.clone(), source.values.clone(), 0)
    corrector.learn(EDGE, range(10), source, target)
    for kv in (source, target):  # the engine hands these slots to others
        kv.keys.fill_(99)
        kv.values.fill_(99)
    corrector.work()
    assert close(estimated(corrector, again, 40).kv.values, target_of(again, 40, 0.5).values, 1e-3)


def test_recompute_is_a_share_and_leaves_out_exact_tokens() -> None:
    corrector = taught("token-kernel")
    source = segment(40, 0, seed=50)
    assert len(estimated(corrector, source, 40).recompute) == 8
    assert min(estimated(corrector, source, 40, exact=10).recompute) >= 10
    assert estimated(taught("cacheblend"), source, 40).runs == ((0, 6),)
    assert estimated(taught("none"), source, 40).recompute == ()
    assert estimated(taught("segment", recompute=0.5, choice="first"), source, 40).runs == ((0, 20),)


def test_refusals_have_reasons() -> None:
    corrector = Corrector(ROPE)
    source = segment(10, 0, seed=1)
    found = corrector.estimate(EDGE, range(10), source, 40)
    assert isinstance(found, Refusal)
    assert found.reason == "too few anchors"
    assert isinstance(Corrector(ROPE, method="none").estimate(EDGE, range(10), source, 40), Estimate)
    strict = taught("token-kernel", tau=0.0)
    found = strict.estimate(EDGE, range(10), source, 40)
    assert isinstance(found, Refusal)
    assert found.reason == "uncertain"
    assert found.terms["distance"] > found.terms["tau"] == 0
    assert strict.stats()["refused: uncertain"] == 1


def test_an_edge_that_drifts_is_off_until_its_rest_is_over() -> None:
    corrector = taught("token-kernel", guard=Guard(enough=2, rest=3))
    source = segment(10, 0, seed=1)
    assert not corrector.drifted(EDGE, 3.0, 0.1)
    assert corrector.drifted(EDGE, 3.0, 0.1, confidence=0.9)
    found = [corrector.estimate(EDGE, range(10), source, 40) for _ in range(3)]
    assert [type(f) for f in found] == [Refusal, Refusal, Estimate]
    assert found[0].reason == "edge is off"  # type: ignore[union-attr]
    assert corrector.stats()["edges_off"] == 0


def test_target_kl_learns_from_drift() -> None:
    corrector = taught("token-kernel", target_kl=0.01, guard=Guard(max_kl=1e9))
    source = segment(10, 0, seed=1)
    assert isinstance(corrector.estimate(EDGE, range(10), source, 40), Estimate)
    for _ in range(12):
        corrector.drifted(EDGE, 0.5, 0.9, confidence=0.5)
    assert isinstance(corrector.estimate(EDGE, range(10), source, 40), Refusal)


def test_the_head_decides_when_told_to() -> None:
    corrector = taught("token-kernel", signal="head", tau=0.05)
    source = segment(10, 3, seed=50)
    found = estimated(corrector, source, 40)
    right = target_of(source, 40, 0.5).part(0, 4)
    sure = corrector.confirm(found, right)
    assert isinstance(sure, Estimate)
    assert sure.terms["head"] < 0.01
    assert sure.confidence > 0.99
    wrong = SegmentKV(right.keys, right.values + 5, right.start)
    assert isinstance(corrector.confirm(found, wrong), Refusal)


class Failing:
    """An estimator that cannot."""

    def fit(self, anchors: Any) -> Any:
        return self

    nbytes = 0

    def predict(self, query: Any) -> Any:
        raise RuntimeError("no")


class NotFinite(Failing):
    """An estimator that gives NaN."""

    def predict(self, query: Any) -> Any:
        from agentflow.cache.kvcmas.estimators import Prediction

        nan = type(query.features)(*(torch.full_like(f, float("nan")) for f in query.features))
        return Prediction(nan, {}, 0.0, 0.0)


@pytest.mark.parametrize(
    ("estimator", "reason"), [(Failing(), "estimator failed"), (NotFinite(), "estimate is not finite")]
)
def test_a_failing_estimator_means_a_dense_prefill(estimator: Any, reason: str) -> None:
    corrector = taught(Method(title="broken", estimator=estimator))  # type: ignore[arg-type]
    found = corrector.estimate(EDGE, range(10), segment(10, 0, seed=1), 40)
    assert isinstance(found, Refusal)
    assert found.reason == reason
    assert corrector.stats()[f"refused: {reason}"] == 1


def test_candidates_that_are_not_finite_make_no_anchor() -> None:
    corrector = Corrector(ROPE)
    source = segment(10, 0, seed=1)
    corrector.learn(EDGE, range(10), source, SegmentKV(source.keys, source.values * float("nan"), 0))
    assert corrector.work() == 0
    assert corrector.stats()["anchors"] == 0
    assert corrector.stats()["failed"] == 1


def test_learning_is_bounded_and_takes_nothing_twice() -> None:
    corrector = Corrector(ROPE, queue=2)
    sources = [segment(10, 0, seed=n) for n in range(4)]
    taken = [corrector.learn(EDGE, range(n, n + 10), s, target_of(s, 9, 1)) for n, s in enumerate(sources)]
    assert taken == [True, True, False, False]
    assert corrector.stats()["queue full"] == 2
    assert not corrector.learn(EDGE, range(10), sources[0], target_of(sources[0], 9, 1))  # waits already
    assert corrector.work(until=lambda: True) == 2  # one anchor made: another waits, and the edge's fit
    assert corrector.work() == 0
    assert not corrector.learn(EDGE, range(10), sources[0], target_of(sources[0], 9, 1))
    assert corrector.stats()["anchors"] == 2
    assert not Corrector(ROPE, method="none").learn(EDGE, range(10), sources[0], sources[0])


def test_memory_stays_within_its_bound_over_a_long_run() -> None:
    pick = random.Random(5)
    limit = 60_000
    corrector = Corrector(ROPE, pool_bytes=limit, anchors=3, min_anchors=1, rank=2)
    edges = [Edge(str(n), "a", "b") for n in range(6)]
    kinds = set()
    for n in range(250):
        edge, tokens = pick.choice(edges), pick.randint(2, 30)
        source = segment(tokens, pick.randint(0, 9), seed=n)
        ids = [pick.randint(0, 99) for _ in range(tokens)]
        found = corrector.estimate(edge, ids, source, 50)
        kinds.add(type(found))
        corrector.learn(edge, ids, source, target_of(source, 50, 0.1))
        if pick.random() < 0.5:
            corrector.work(until=lambda: pick.random() < 0.3)
        if pick.random() < 0.3:
            corrector.drifted(edge, pick.random() / 8, 0.9)
    assert corrector.work() == 0
    assert corrector.nbytes <= limit
    assert kinds == {Estimate, Refusal}
    assert corrector.stats()["evicted"] > 10
    assert "failed" not in corrector.stats()


def test_the_context_free_reference_has_edges_of_its_own() -> None:
    assert Corrector(ROPE).edge("q", "planner", "coder") == Edge("q", "planner", "coder")
    free = Corrector(ROPE, reference="context-free")
    assert free.edge("q", "planner", "coder") == Edge("q", CONTEXT_FREE, "coder")


def test_anchors_can_be_taken_over() -> None:
    one, two = taught("segment"), Corrector(ROPE, method="token-kernel", recompute=0)
    for anchor in one.pool.of(EDGE):
        two.adopt(EDGE, anchor)
    two.work()
    source = segment(10, 3, seed=50)
    assert close(estimated(two, source, 40).kv.values, target_of(source, 40, 0.5).values, 1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "magic"},
        {"reference": "none"},
        {"tau": 0.1, "target_reuse": 0.5},
        {"recompute": 1.5},
        {"rank": 0},
        {"choice": "last"},
        {"recompute": -0.1},
        {"recompute": float("nan")},
        {"min_run": 0},
        {"min_anchors": 0},
        {"min_anchors": 3, "anchors": 2},
        {"anchors": -1},
        {"queue": -1},
        {"pool_bytes": -1},
        {"tau": float("nan")},
        {"target_kl": -1.0},
        {"target_reuse": 1.1},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Corrector(ROPE, **options)


def test_shapes_that_do_not_fit_are_refused() -> None:
    corrector = Corrector(ROPE, method="none")
    source = segment(10, 0, seed=1)
    with pytest.raises(UsageError, match="9 token ids"):
        corrector.estimate(EDGE, range(9), source, 0)
    with pytest.raises(UsageError, match="heads of 8"):
        corrector.estimate(EDGE, range(10), SegmentKV(source.keys[..., :4], source.values[..., :4], 0), 0)
    for exact in (-3, 11):
        with pytest.raises(UsageError, match="exact"):
            corrector.estimate(EDGE, range(10), source, 0, exact=exact)


def other_form(source: SegmentKV, form: str) -> SegmentKV:
    cut = {
        "more layers": lambda t: torch.cat([t, t]),
        "one layer": lambda t: t[:1],
        "fewer heads": lambda t: t[:, :, :1],
        "more heads": lambda t: torch.cat([t, t], 2),
    }[form]
    return SegmentKV(cut(source.keys), cut(source.values), source.start)


@pytest.mark.parametrize("form", ["more layers", "one layer", "fewer heads", "more heads"])
def test_kv_of_another_form_than_what_was_learnt_is_refused(form: str) -> None:
    source = segment(10, 0, seed=1)
    odd = other_form(source, form)
    for corrector in (Corrector(ROPE), taught("token-kernel")):
        with pytest.raises(UsageError, match="beside"):
            corrector.learn(EDGE, range(100, 110), source, odd)
    corrector = taught("token-kernel")
    anchors = len(corrector.pool)
    with pytest.raises(UsageError, match="beside"):
        corrector.estimate(EDGE, range(10), odd, 40)
    with pytest.raises(UsageError, match="beside"):
        corrector.learn(EDGE, range(100, 110), odd, odd)
    with pytest.raises(UsageError, match="anchor"):
        corrector.adopt(EDGE, taught_one(odd).pool.of(EDGE)[0])
    assert corrector.work() == 0
    assert len(corrector.pool) == anchors
    head = taught("token-kernel", signal="head")
    with pytest.raises(UsageError, match="a head of"):
        head.confirm(estimated(head, source, 40), odd)
    estimated(corrector, source, 40)


def taught_one(source: SegmentKV) -> Corrector:
    corrector = Corrector(ROPE, rank=1)
    corrector.learn(EDGE, range(source.tokens), source, source)
    corrector.work()
    return corrector


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("signal", ["distance", "entropy", "head"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_source_that_is_not_finite_gives_no_estimate(method: str, signal: Any, bad: float) -> None:
    corrector = taught(method, signal=signal, target_reuse=0.9)
    for part in range(2):
        for layer in range(LAYERS):
            source = segment(10, 3, seed=50)
            source[part][layer, 4, 1, 2] = bad
            found = corrector.estimate(EDGE, range(10), source, 40)
            assert isinstance(found, Refusal)
            assert found.reason == "source is not finite"
    estimated(corrector, segment(10, 3, seed=50), 40)


def test_an_estimate_too_large_for_the_float_type_is_refused() -> None:
    corrector = taught("segment", by=20000.0, dtype=torch.float16)
    source = segment(10, 3, seed=50, dtype=torch.float16)
    source.values[:] = 60000
    found = corrector.estimate(EDGE, range(10), source, 40)
    assert isinstance(found, Refusal)
    assert found.reason == "estimate is not finite"


@pytest.mark.parametrize("method", LEARNING)
@pytest.mark.parametrize("tokens", [10, 60])
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("of_target", [True, False])
def test_one_number_that_is_not_finite_makes_no_anchor(method: str, tokens: int, part: int, of_target: bool) -> None:
    corrector = taught(method, rank=2)
    anchors = len(corrector.pool)
    source = segment(tokens, 0, seed=99)
    target = target_of(source, 40, 0.5)
    (target if of_target else source)[part][2, 3, 0, 0] = float("nan")
    corrector.learn(EDGE, range(100, 100 + tokens), source, target)
    corrector.work()
    assert len(corrector.pool) == anchors
    assert corrector.stats()["failed"] == 1
    estimated(corrector, segment(10, 3, seed=50), 40)


class Tired(Failing):
    """An estimator that fits ``fits`` times."""

    def __init__(self, fits: int) -> None:
        self.fits = fits

    def fit(self, anchors: Any) -> Any:
        self.fits -= 1
        if self.fits < 0:
            raise RuntimeError("no")
        return METHODS["segment"].estimator.fit(anchors)  # type: ignore[union-attr]


def test_an_old_fit_goes_on_when_a_new_one_fails() -> None:
    corrector = taught(Method(title="tired", estimator=Tired(1)))  # type: ignore[arg-type]
    source = segment(30, 3, seed=9)
    corrector.learn(EDGE, range(100, 130), source, target_of(source, 40, 0.5))
    assert corrector.work() == 0
    assert corrector.stats()["failed: fit"] == 1
    estimated(corrector, source, 40)


def test_an_edge_without_a_fit_says_why() -> None:
    found = taught(Method(title="tired", estimator=Tired(0))).estimate(  # type: ignore[arg-type]
        EDGE, range(10), segment(10, 3, seed=50), 40
    )
    assert isinstance(found, Refusal)
    assert found.reason == "fit failed"


@pytest.mark.parametrize("agents", [5, 12])
def test_a_full_pool_goes_on_correcting_the_edges_that_fit(agents: int) -> None:
    """More edges than there is room for, in turn; then others in their place."""
    one = taught("token-kernel", count=2)
    corrector = Corrector(ROPE, pool_bytes=int(3.5 * one.nbytes))

    def turn(n: int, targets: range) -> list[int]:
        accepted = []
        for target in targets:
            edge, source = Edge("document", "a", str(target)), segment(12, 5, seed=n)
            ids = range(100 * n, 100 * n + 12)
            if isinstance(corrector.estimate(edge, ids, source, 40), Estimate):
                accepted.append(target)
            else:
                corrector.learn(edge, ids, source, target_of(source, 40, 0.5))
                corrector.work()
            assert corrector.nbytes <= corrector.pool.max_bytes
        return accepted

    for n in range(10):
        taken = turn(n, range(agents))
    assert len(taken) == 3
    fits = corrector.stats()["fits"]
    assert [turn(n, range(agents)) for n in range(10, 30)] == [taken] * 20
    assert corrector.stats()["fits"] == fits
    assert corrector.stats()["anchors_refused"] > 20
    assert corrector.stats()["edges_short"] == 0
    for n in range(30, 40):
        taken = turn(n, range(100, 100 + agents))
    assert len(taken) == 3
