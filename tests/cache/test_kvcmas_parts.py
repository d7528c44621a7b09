"""Parts of KV correction that are not estimators: truncation, the anchor pool, what to recompute, threshold, guard."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from agentflow.cache.kvcmas.anchors import AnchorPool, Features, anchor_nbytes, make_anchor  # noqa: E402
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
        pool.use(EDGE, {kept[0]: 0.5, kept[2]: 0.5})
    pool.add(EDGE, anchor(10, seed=900))
    assert kept[1] not in pool.of(EDGE)
    assert kept[0] in pool.of(EDGE)
    assert len(pool) == 3
    assert pool.evicted == 1


def test_pool_replaces_an_anchor_of_the_same_tokens() -> None:
    pool = AnchorPool(per_edge=3)
    old, new = anchor(10, ids=range(10)), anchor(10, seed=5, ids=range(10))
    pool.add(EDGE, old)
    pool.use(EDGE, {old: 7.0})
    pool.add(EDGE, new)
    assert list(pool.of(EDGE)) == [new]
    assert new.uses > 5
    assert pool.has(EDGE, range(10))
    assert not pool.has(OTHER, range(10))


@pytest.mark.parametrize("least", [1, 2, 3])
def test_pool_stays_within_its_bytes_over_a_long_run(least: int) -> None:
    pick = random.Random(3)
    ready = [anchor(pick.randint(4, 40), seed=s) for s in range(20)]
    limit = 6 * max(a.nbytes for a in ready)
    pool = AnchorPool(per_edge=4, max_bytes=limit, least=least)
    edges = [Edge(str(n), "a", "b") for n in range(5)]
    for _ in range(1000):
        one = pick.choice(ready)
        edge = pick.choice(edges)
        home = next((e for e in pool.edges for a in pool.of(e) if a is one), None)
        if home is not None:
            pool.use(home, {one: pick.random()})
            continue
        before = {e: len(pool.of(e)) for e in edges}
        changed = pool.add(edge, one)
        short = [e for e in pool.edges if len(pool.of(e)) < min(least, before[e])]
        assert not short  # no edge is left with too few by eviction
        assert edge in changed or before == {e: len(pool.of(e)) for e in edges}
        held = [a for e in pool.edges for a in pool.of(e)]
        assert pool.nbytes == sum(a.nbytes for a in held) <= limit
        assert pool.full_nbytes == sum(a.full_nbytes for a in held)
        assert all(0 < len(pool.of(e)) <= 4 for e in pool.edges)
    assert pool.evicted > 100
    assert pool.refused > 100 or least == 1


def test_pool_keeps_no_anchor_larger_than_itself() -> None:
    pool = AnchorPool(max_bytes=10)
    assert not pool.add(EDGE, anchor(10))
    assert len(pool) == 0
    assert pool.refused == 1
    assert pool.shrink(EDGE) is None


def crowd(pool: AnchorPool, rounds: range, agents: range) -> None:
    """Rounds in which agents want a segment each: those whose edge is usable use it, others offer an anchor."""
    for n in rounds:
        for agent in agents:
            edge = Edge("document", "a", str(agent))
            held = pool.of(edge)
            if len(held) >= pool.least:
                pool.use(edge, dict.fromkeys(held, 1 / len(held)))
            else:
                pool.add(edge, anchor(10, seed=100 * n + agent))


def usable(pool: AnchorPool) -> set[str]:
    return {edge.target for edge in pool.edges if len(pool.of(edge)) >= pool.least}


@pytest.mark.parametrize("agents", [4, 7, 20])
def test_edges_that_fit_stay_usable_however_many_want_room(agents: int) -> None:
    pool = AnchorPool(max_bytes=6 * anchor(10).nbytes, least=2)
    crowd(pool, range(2), range(agents))
    assert usable(pool) == {"0", "1", "2"}
    crowd(pool, range(2, 20), range(agents))
    assert usable(pool) == {"0", "1", "2"}
    assert pool.evicted == pool.short == 0
    assert pool.refused == 20 * (agents - 3)


def test_edges_out_of_use_give_way() -> None:
    pool = AnchorPool(max_bytes=6 * anchor(10).nbytes, least=2)
    crowd(pool, range(5), range(6))
    crowd(pool, range(5, 15), range(2, 5))  # edge 2 goes on, 0 and 1 are not seen again
    assert usable(pool) == {"2", "3", "4"}
    crowd(pool, range(15, 25), range(2, 20))
    assert usable(pool) == {"2", "3", "4"}


def test_an_edge_takes_what_others_can_spare_before_it_displaces_any() -> None:
    size = anchor(10).nbytes
    pool = AnchorPool(max_bytes=6 * size, least=2)
    for n in range(6):
        pool.add(EDGE, anchor(10, seed=100 * n))
    assert len(pool.of(EDGE)) == 6
    assert pool.add(OTHER, anchor(10, seed=700))
    assert (len(pool.of(EDGE)), len(pool.of(OTHER)), pool.short) == (4, 1, 1)  # room for another is set aside
    assert pool.add(EDGE, anchor(10, seed=800)) == (EDGE,)  # in place of one of its own
    assert pool.add(OTHER, anchor(10, seed=900)) == (OTHER,)
    assert (len(pool.of(EDGE)), len(pool.of(OTHER)), pool.short) == (4, 2, 0)


def test_room_for_fits_is_set_aside_too() -> None:
    size = anchor(10).nbytes
    pool = AnchorPool(max_bytes=5 * size, least=2)
    for n in range(2):
        pool.add(EDGE, anchor(10, seed=100 * n))
    pool.fitted(EDGE, size)
    assert not pool.wants(OTHER, (1,), size)  # two anchors and a fit as large as the first edge's
    assert pool.add(EDGE, anchor(10, seed=500))
    assert list(pool.beside) == [EDGE]


@pytest.mark.parametrize("tokens", [3, 5, 40])
@pytest.mark.parametrize("ranks", [(2, None), (1, 3), (None, None)])
def test_the_size_of_an_anchor_is_known_beforehand(tokens: int, ranks: tuple[int | None, int | None]) -> None:
    base = Features(noise(2, tokens, 8).half(), noise(2, tokens, 8, seed=1).half())
    made = make_anchor(range(tokens), base, Features(2 * base.keys, 3 * base.values), rank=ranks[0], base_rank=ranks[1])
    assert anchor_nbytes(base, rank=ranks[0], base_rank=ranks[1]) == made.nbytes


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


@pytest.mark.parametrize(
    ("outcomes", "tau"),
    [
        ([(0.5, 0.0)] * 6 + [(0.5, 1.0)] * 6, 0.0),
        ([(0.2, 0.0)] * 6 + [(0.5, 0.0)] * 3 + [(0.5, 1.0)] * 3, 0.2),
        ([(0.2, 0.0)] * 6 + [(0.5, 0.1)] * 3 + [(0.5, 0.2)] * 3 + [(0.7, 9.0)], 0.5),
        ([(0.0, 0.0)] * 6 + [(0.0, 1.0)] * 6, -1.0),
        ([(0.2, 0.0)] * 6 + [(0.5, float("nan"))] * 6, 0.2),
    ],
)
def test_a_bound_on_kl_takes_all_of_a_tie_or_none(outcomes: list[tuple[float, float]], tau: float) -> None:
    threshold = Threshold(target_kl=0.1)
    for uncertainty, kl in outcomes:
        threshold.outcome(uncertainty, kl)
    assert threshold.tau == tau


def test_an_uncertainty_that_is_not_finite_is_refused_and_forgotten() -> None:
    threshold = Threshold(target_reuse=0.5, window=8)
    for n in range(40):
        assert not threshold.accepts(float("nan"))
        assert not threshold.accepts(float("inf"))
        threshold.accepts(n % 8)
    assert threshold.tau == 3


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
