"""Parts of KV correction that are not estimators: truncation, the anchor pool, what to recompute, threshold, guard."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from agentflow.cache.kvcmas.anchors import AnchorPool, Features, make_anchor  # noqa: E402
from agentflow.cache.kvcmas.guard import Guard  # noqa: E402
from agentflow.cache.kvcmas.lowrank import truncate  # noqa: E402
from agentflow.cache.kvcmas.recompute import change, choose  # noqa: E402
from agentflow.cache.kvcmas.subspace import principal  # noqa: E402
from agentflow.cache.kvcmas.threshold import Threshold  # noqa: E402
from agentflow.cache.kvcmas.types import Edge, Estimate, SegmentKV  # noqa: E402

EDGE, OTHER = Edge("question", "planner", "coder"), Edge("answer", "coder", "tester")


def noise(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def anchor(tokens: int, *, seed: int = 0, ids: Any = None, rank: int | None = 2) -> Any:
    base = Features(noise(2, tokens, 8, seed=seed), noise(2, tokens, 8, seed=seed + 1))
    target = Features(base.keys + 1, base.values + noise(2, tokens, 8, seed=seed + 2))
    return make_anchor(range(seed, seed + tokens) if ids is None else ids, base, target, rank=rank)


def test_a_matrix_of_low_rank_comes_back() -> None:
    z = noise(3, 50, 4) @ noise(3, 4, 30, seed=1)
    kept = truncate(z, 4)
    assert kept.right is not None
    assert torch.allclose(kept.dense(), z, atol=1e-3)
    assert torch.allclose(kept.right @ kept.right.mT, torch.eye(4).expand(3, 4, 4), atol=1e-4)
    assert torch.allclose(kept.energy(), z.square().sum(-1), rtol=1e-3, atol=1e-3)
    assert kept.nbytes == 3 * 4 * (50 + 30) * 4


def test_truncation_is_nearly_the_best_of_its_rank() -> None:
    z = noise(2, 200, 96) * torch.logspace(0, -2, 96)
    kept = truncate(z, 16)
    best = torch.linalg.svdvals(z)[:, 16:].square().sum(1).sqrt()
    off = (kept.dense() - z).flatten(1).norm(dim=1)
    assert (off <= 1.005 * best).all()
    assert torch.equal(truncate(z, 16).left, kept.left)  # the same every time


def test_a_matrix_too_small_to_gain_is_kept_whole() -> None:
    z = noise(2, 5, 8)
    for rank in (4, None):
        kept = truncate(z, rank)
        assert kept.right is None
        assert torch.equal(kept.dense(), z)
    assert truncate(z.half(), None).left.dtype == torch.float16


def test_the_shared_view_is_nearly_that_of_the_best_components() -> None:
    fading = torch.logspace(0, -1.5, 48)

    def base(seed: int) -> Features:
        return Features(noise(3, 90, 48, seed=seed) * fading + 0.7, 5 * noise(3, 90, 48, seed=seed + 50) * fading)

    anchors = [make_anchor(range(90), base(n), base(n), rank=16) for n in range(4)]
    space = principal(anchors, 8)
    halves = [
        torch.cat([m.dense() for m in ms], 1)
        for ms in zip(*((a.base_keys, a.base_values) for a in anchors), strict=True)
    ]
    plain = [h - h.mean(1, keepdim=True) for h in halves]
    joint = torch.cat([h / h.square().mean((1, 2), keepdim=True).sqrt() for h in plain], 2)
    best = torch.linalg.svdvals(joint)[:, :8].square().sum(1)
    view = space.of(Features(*halves))
    assert view.shape == (3, 360, 8)
    assert (view.square().sum((1, 2)) > 0.98 * best).all()
    assert view.mean(1).abs().max() < 1e-4
    assert torch.allclose(torch.cat([space.of_base(a) for a in anchors], 1), view, atol=1e-3)


def test_an_anchor_of_2048_tokens_takes_a_quarter_or_less() -> None:
    base = Features(noise(1, 2048, 192), noise(1, 2048, 192, seed=1))
    made = make_anchor(range(2048), base, Features(base.keys * 2, base.values * 3), rank=32)
    assert made.nbytes == 4 * 32 * (2048 + 192) * 4
    assert made.full_nbytes / made.nbytes > 3.7
    whole = make_anchor(range(2048), base, base, rank=None)
    assert whole.nbytes == whole.full_nbytes == made.full_nbytes


def test_pool_keeps_the_anchors_that_are_used() -> None:
    pool = AnchorPool(per_edge=3)
    kept = [anchor(10, seed=100 * n) for n in range(3)]
    for one in kept:
        pool.add(EDGE, one)
    for _ in range(5):
        pool.use({kept[0]: 0.5, kept[2]: 0.5})
    pool.add(EDGE, anchor(10, seed=900))
    assert kept[1] not in pool.of(EDGE)
    assert kept[0] in pool.of(EDGE)
    assert len(pool) == 3
    assert pool.evicted == 1


def test_pool_replaces_an_anchor_of_the_same_tokens() -> None:
    pool = AnchorPool(per_edge=3)
    old, new = anchor(10, ids=range(10)), anchor(10, seed=5, ids=range(10))
    pool.add(EDGE, old)
    pool.use({old: 7.0})
    pool.add(EDGE, new)
    assert list(pool.of(EDGE)) == [new]
    assert new.uses > 5
    assert pool.has(EDGE, range(10))
    assert not pool.has(OTHER, range(10))


def test_pool_stays_within_its_bytes_over_a_long_run() -> None:
    pick = random.Random(3)
    ready = [anchor(pick.randint(4, 40), seed=s) for s in range(20)]
    limit = 4 * max(a.nbytes for a in ready)
    pool = AnchorPool(per_edge=4, max_bytes=limit)
    edges = [Edge(str(n), "a", "b") for n in range(5)]
    for _ in range(1000):
        one = pick.choice(ready)
        edge = pick.choice(edges)
        if any(a is one for e in pool.edges for a in pool.of(e)):
            pool.use({one: pick.random()})
            continue
        assert edge in pool.add(edge, one)
        held = [a for e in pool.edges for a in pool.of(e)]
        assert pool.nbytes == sum(a.nbytes for a in held) <= limit
        assert pool.full_nbytes == sum(a.full_nbytes for a in held)
        assert all(0 < len(pool.of(e)) <= 4 for e in pool.edges)
    assert pool.evicted > 100


def test_pool_keeps_no_anchor_larger_than_itself() -> None:
    pool = AnchorPool(max_bytes=10)
    assert pool.add(EDGE, anchor(10)) == set()
    assert len(pool) == 0
    assert pool.shrink() is None


def test_change_is_relative_to_the_layers_values() -> None:
    base = Features(torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    delta = Features(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    delta.values[1, 2] = 1.0
    assert change(delta, base).tolist() == pytest.approx([0, 0, 0.5])


@pytest.mark.parametrize(
    ("how", "run", "want"),
    [
        ("first", 1, (0, 1, 2, 3)),
        ("change", 1, (1, 5, 6, 9)),
        ("both", 1, (0, 1, 5, 9)),
        ("change", 2, (4, 5, 8, 9)),
        ("change", 4, (4, 5, 6, 7)),
    ],
)
def test_what_is_recomputed(how: Any, run: int, want: tuple[int, ...]) -> None:
    scores = torch.tensor([0.0, 5, 0, 0, 2, 8, 4, 0, 3, 9])
    assert choose(10, 0.4, how, scores, min_run=run) == want


def test_tokens_known_to_be_right_are_not_recomputed() -> None:
    scores = torch.tensor([9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    assert choose(10, 0.3, "change", scores, exact=2) == (2, 3, 4)
    assert choose(10, 0.3, "first", exact=8) == (8, 9)
    assert choose(10, 0.0, "change", scores) == ()
    assert choose(10, 1.0, "both", scores) == tuple(range(10))
    assert choose(3, 0.5, "change", None) == (0, 1)


@pytest.mark.parametrize("how", ["first", "change", "both"])
def test_the_share_is_kept_for_any_run(how: Any) -> None:
    for tokens in (1, 2, 7, 64):
        for share in (0.1, 0.5, 0.9):
            for run in (1, 3, 16):
                found = choose(tokens, share, how, noise(tokens), min_run=run)
                assert len(found) == len(set(found)) == round(share * tokens)
                assert list(found) == sorted(found)
                assert all(0 <= n < tokens for n in found)


def test_runs_of_an_estimate() -> None:
    kv = SegmentKV(torch.zeros(1, 9, 1, 2), torch.zeros(1, 9, 1, 2), 5)
    found = Estimate(kv=kv, recompute=(0, 1, 4, 6, 7, 8), confidence=1, method="m")
    assert found.runs == ((0, 2), (4, 5), (6, 9))
    assert found.reused == 3
    assert (kv.end, kv.part(2, 4).start, kv.part(2, 4).tokens) == (14, 7, 2)


def test_threshold_without_a_target_accepts_everything() -> None:
    assert all(Threshold().accepts(u) for u in (0.0, 1.0, 1e9))


def test_a_higher_tau_accepts_more() -> None:
    assert [Threshold(tau=0.5).accepts(u) for u in (0.4, 0.5, 0.6)] == [True, True, False]


@pytest.mark.parametrize("target", [0.0, 0.3, 0.8, 1.0])
def test_threshold_keeps_a_target_reuse(target: float) -> None:
    pick = random.Random(1)
    threshold = Threshold(target_reuse=target, window=100)
    for _ in range(200):
        threshold.accepts(pick.random())
    # What comes is twice as uncertain from here on; the threshold follows.
    taken = [threshold.accepts(2 * pick.random()) for _ in range(600)]
    assert sum(taken[100:]) / 500 == pytest.approx(target, abs=0.06)


def test_threshold_keeps_a_target_kl() -> None:
    threshold = Threshold(target_kl=0.02, enough=10)
    for n in range(20):
        assert threshold.accepts(100.0) == (n < 10)  # nothing is known before ten outcomes
        uncertainty = (n % 10) / 10
        threshold.outcome(uncertainty, 0.1 * uncertainty)
    # KL is a tenth of the uncertainty: the mean up to .4 is .02.
    assert threshold.tau == pytest.approx(0.4)
    for _ in range(300):
        threshold.outcome(0.9, 0.001)
    assert threshold.accepts(100.0)


def test_guard_turns_an_edge_off_and_tries_it_again() -> None:
    guard = Guard(max_kl=0.1, enough=3, rest=4)
    assert [guard.check(EDGE, 0.5, 1.0) for _ in range(3)] == [False, False, True]
    verdict = guard.verdict(EDGE)
    assert verdict is not None
    assert verdict.reason == "KL above its bound"
    assert verdict.terms["kl"] == pytest.approx(0.5)
    assert guard.allows(OTHER)
    assert [guard.allows(EDGE) for _ in range(4)] == [False, False, False, True]
    assert guard.off == 0
    for _ in range(3):
        guard.check(EDGE, 0.01, 0.5)
    assert verdict.reason == "agreement below its bound"
    assert [guard.allows(EDGE) for _ in range(8)] == [False] * 7 + [True]  # twice as long
    for _ in range(40):
        assert not guard.check(EDGE, 0.01, 0.99)


def test_guard_takes_nonsense_for_the_worst_and_forgets_old_edges() -> None:
    guard = Guard(enough=1, edges=2)
    assert guard.check(EDGE, float("nan"), 1.0)
    for n in range(5):
        guard.check(Edge(str(n), "a", "b"), 0.0, 1.0)
    assert guard.verdict(EDGE) is None
    assert guard.off == 0
