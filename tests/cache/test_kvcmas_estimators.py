"""Estimators of KV deltas on small cases worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from agentflow.cache.kvcmas.anchors import Anchor, Features, make_anchor  # noqa: E402
from agentflow.cache.kvcmas.estimators import Query, entropy, match  # noqa: E402
from agentflow.cache.kvcmas.kernel import TokenKernel  # noqa: E402
from agentflow.cache.kvcmas.kvcomm import KVComm  # noqa: E402
from agentflow.cache.kvcmas.methods import METHODS  # noqa: E402
from agentflow.cache.kvcmas.ridge import Ridge  # noqa: E402
from agentflow.cache.kvcmas.segment import SegmentSum  # noqa: E402
from agentflow.cache.kvcmas.token_id import TokenId  # noqa: E402

LAYERS, WIDTH = 3, 4
ESTIMATORS = {name: m.estimator for name, m in METHODS.items() if m.estimator is not None}


def assert_close(found: Any, want: Any, atol: float = 1e-5, rtol: float = 1e-5) -> None:
    """As ``torch.testing.assert_close``, which imports sympy, seconds of it."""
    assert found.shape == want.shape
    assert torch.allclose(found, want, atol=atol, rtol=rtol), f"off by {(found - want).abs().max()}"


def features(tokens: int, *, seed: int) -> Features:
    made = torch.Generator().manual_seed(seed)
    return Features(*(torch.randn(LAYERS, tokens, WIDTH, generator=made) for _ in range(2)))


def shifted(base: Features, keys: float, values: float) -> Features:
    """The base with numbers added everywhere but in layer 0."""
    out = Features(base.keys + keys, base.values + values)
    out.keys[0], out.values[0] = base.keys[0], base.values[0]
    return out


def anchor(base: Features, keys: float, values: float, tokens: Any = None, rank: int | None = None) -> Anchor:
    ids = range(base.keys.shape[1]) if tokens is None else tokens
    return make_anchor(list(ids), base, shifted(base, keys, values), rank=rank)


def query(base: Features, tokens: Any = None) -> Query:
    return Query(tuple(range(base.keys.shape[1]) if tokens is None else tokens), base)


def test_distance_of_a_segment_to_anchors() -> None:
    base = features(6, seed=1)
    twice = Features(2 * base.keys, 2 * base.values)
    longer = Features(*(torch.cat([f, f], 1) for f in base))
    found = match(query(base), [anchor(base, 1, 1), anchor(twice, 1, 1), anchor(longer, 1, 1)])
    assert_close(found.both, torch.tensor([0.0, 1.0, 0.0]), atol=1e-5, rtol=0)


def test_segment_sum_weighs_deltas_by_distance() -> None:
    base = features(6, seed=1)
    twice = Features(2 * base.keys, 2 * base.values)
    found = SegmentSum(temperature=0.5).fit([anchor(base, 1.0, 2.0), anchor(twice, 3.0, -2.0)]).predict(query(base))
    first = 1 / (1 + math.exp(-1 / 0.5))  # relative squared distances are 0 and 1
    assert_close(found.delta.keys[1:], torch.full((2, 6, WIDTH), first + 3 * (1 - first)))
    assert_close(found.delta.values[1:], torch.full((2, 6, WIDTH), 2 * first - 2 * (1 - first)))
    assert found.distance == pytest.approx(0, abs=1e-5)
    assert list(found.shares.values()) == pytest.approx([first, 1 - first])


def test_segment_sum_leaves_out_anchors_that_end_before_a_position() -> None:
    base = features(6, seed=1)
    short = Features(base.keys[:, :2], base.values[:, :2])
    found = SegmentSum().fit([anchor(base, 1.0, 1.0), anchor(short, 3.0, 3.0)]).predict(query(base))
    assert_close(found.delta.values[1, 0], torch.full((WIDTH,), 2.0))  # both at distance 0
    assert_close(found.delta.values[1, 4], torch.full((WIDTH,), 1.0))
    alone = SegmentSum().fit([anchor(short, 3.0, 3.0)]).predict(query(base))
    assert torch.equal(alone.delta.values[:, 2:], torch.zeros(LAYERS, 4, WIDTH))


def test_token_id_takes_the_mean_of_the_same_token() -> None:
    one, two = anchor(features(4, seed=1), 1, 1, [7, 8, 7, 9]), anchor(features(4, seed=2), 3, 5, [7, 5, 5, 9])
    found = TokenId(head=0).fit([one, two]).predict(query(features(3, seed=3), [7, 9, 1234]))
    values = found.delta.values[1, :, 0].tolist()
    assert values == pytest.approx([(1 + 1 + 5) / 3, 3, 3])  # 7 three times, 9 in both; unknown: the mean of all
    assert found.distance == pytest.approx(1 / 3)


def test_token_id_treats_a_segments_start_by_its_offset() -> None:
    one, two = anchor(features(4, seed=1), 1, 1, [7, 8, 7, 9]), anchor(features(4, seed=2), 3, 5, [1, 5, 5, 9])
    found = TokenId(head=1).fit([one, two]).predict(query(features(2, seed=3), [8, 8]))
    assert found.delta.values[1, :, 0].tolist() == pytest.approx([3, 1])


def test_token_id_needs_no_table_of_tokens_by_anchor_tokens() -> None:
    tokens, few = 800, [anchor(features(800, seed=n), n, n, range(n, 800 + n), rank=1) for n in range(4)]
    asked = query(features(tokens, seed=9))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(o.numel() for o in (out,) if isinstance(o, torch.Tensor))])
            return out

    fitted = TokenId().fit(few)
    with Watch():
        found = fitted.predict(asked)
    assert found.delta.values[1, 50, 0].item() == pytest.approx(1.5, rel=1e-3)
    assert largest <= 4 * LAYERS * tokens * WIDTH


def test_ridge_finds_a_linear_rule() -> None:
    mix = torch.randn(2 * WIDTH, 2 * WIDTH, generator=torch.Generator().manual_seed(9))

    def rule(base: Features) -> Features:
        out = torch.cat([base.keys, base.values], 2) @ mix + 0.5
        return Features(base.keys + out[..., :WIDTH], base.values + out[..., WIDTH:])

    bases = [features(40, seed=n) for n in range(3)]
    fitted = Ridge(components=2 * WIDTH, penalty=1e-8).fit(
        [make_anchor(range(40), b, rule(b), rank=None) for b in bases]
    )
    new = features(11, seed=77)
    found = fitted.predict(query(new)).delta
    assert_close(found.keys[1:], (rule(new).keys - new.keys)[1:], atol=1e-3, rtol=1e-3)
    assert_close(found.values[1:], (rule(new).values - new.values)[1:], atol=1e-3, rtol=1e-3)


def test_kernel_gives_an_exact_repeat_its_own_delta() -> None:
    bases = [features(30, seed=n) for n in range(4)]
    anchors = [anchor(b, n, 10 * n) for n, b in enumerate(bases)]
    found = TokenKernel(components=8).fit(anchors).predict(query(bases[2]))
    assert_close(found.delta.values[1:], torch.full((2, 30, WIDTH), 20.0), atol=0.3, rtol=0)
    assert found.shares[anchors[2]] > 0.95
    assert found.distance < 0.01
    assert found.entropy < 0.2


def test_kernel_is_a_weighted_mean() -> None:
    """Two landmarks of one token each in one dimension; the weights by hand."""
    bases = [Features(*(torch.full((LAYERS, 1, 1), x) for _ in range(2))) for x in (0.0, 2.0)]
    anchors = [anchor(b, 0, v, [n]) for n, (b, v) in enumerate(zip(bases, (1.0, 5.0), strict=True))]
    kernel = TokenKernel(components=1, bandwidth=0.5, place=0.0)
    here = Features(*(torch.full((LAYERS, 1, 1), 0.5) for _ in range(2)))
    found = kernel.fit(anchors).predict(query(here, [3]))
    # Squared distances .5^2 : 1.5^2, in units of the anchors' 2^2 apart; the width shrinks to the nearest, 1/16.
    width = 0.5 * 1 / 16
    odds = math.exp(-(1.5**2 - 0.5**2) / 4 / width)
    assert found.delta.values[1, 0, 0].item() == pytest.approx((1 + 5 * odds) / (1 + odds), rel=1e-3)


def test_kernel_keeps_no_more_landmarks_than_told() -> None:
    bases = [features(50, seed=n) for n in range(4)]
    anchors = [anchor(b, n, 10 * n) for n, b in enumerate(bases)]
    small = TokenKernel(components=8, landmarks=40).fit(anchors)
    large = TokenKernel(components=8, landmarks=4000).fit(anchors)
    assert small.nbytes < large.nbytes
    assert sum(small.predict(query(features(20, seed=50))).shares.values()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("nearest", [8, 25, 60])
def test_kernel_finds_the_twins_of_a_long_segment_among_the_landmarks_it_weighs(nearest: int) -> None:
    bases = [features(60, seed=n) for n in range(4)]
    anchors = [anchor(b, 1.0 * n, 10.0 * n) for n, b in enumerate(bases)]
    found = TokenKernel(components=8, nearest=nearest).fit(anchors).predict(query(bases[2]))
    assert found.delta.values.shape == (LAYERS, 60, WIDTH)
    assert_close(found.delta.values[1:], torch.full((LAYERS - 1, 60, WIDTH), 20.0), rtol=0.02, atol=0.1)
    assert max(found.shares, key=lambda a: found.shares[a]) is anchors[2]
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-4)


def test_kvcomm_weighs_each_position_by_mean_absolute_difference() -> None:
    base = features(3, seed=1)
    moved = Features(base.keys + 1.0, base.values + 2.0)  # |difference| 1 for keys, 2 for values
    short = Features(base.keys[:, :2], base.values[:, :2])
    usable = [anchor(base, 1.0, 1.0), anchor(moved, 0.0, 0.0)]
    found = KVComm().fit([*usable, anchor(short, 50.0, 50.0)]).predict(query(base))
    assert found.delta.keys[1, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-4)
    assert found.delta.values[2, 2, 0].item() == pytest.approx(1 / (1 + math.exp(-2)), rel=1e-4)
    nothing = KVComm().fit([anchor(short, 50.0, 50.0)]).predict(query(base))
    assert not nothing.delta.keys.any()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("tokens", [1, 2, 25])
def test_every_estimator_leaves_layer_0_alone_and_shares_sum_to_one(name: str, tokens: int) -> None:
    anchors = [anchor(features(8 + n, seed=n), 0.1 * n, 0.2, rank=2) for n in range(3)]
    found = ESTIMATORS[name].fit(anchors).predict(query(features(tokens, seed=9)))
    assert found.delta.keys.shape == found.delta.values.shape == (LAYERS, tokens, WIDTH)
    assert not found.delta.keys[0].any()
    assert not found.delta.values[0].any()
    assert torch.isfinite(found.delta.keys).all()
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-4)
    assert 0 <= found.entropy <= 1 + 1e-6


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_delta_in_any_anchor_gives_no_delta(name: str) -> None:
    anchors = [anchor(features(20 + n, seed=n), 0, 0, rank=2) for n in range(3)]
    found = ESTIMATORS[name].fit(anchors).predict(query(features(15, seed=9)))
    assert not found.delta.keys.any()
    assert not found.delta.values.any()


def test_entropy_is_that_of_equal_weights_divided_out() -> None:
    assert entropy([0.25] * 4) == pytest.approx(1)
    assert entropy([1.0, 0.0, 0.0]) == pytest.approx(0)
    assert entropy([0.5, 0.5, 0, 0]) == pytest.approx(0.5)
    assert entropy([1.0]) == 0
