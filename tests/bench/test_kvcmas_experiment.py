"""The KVCMAS experiment: its data, its measures, and the experiment itself on a tiny random model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from agentflow.bench.kvcmas.data import AGENTS, load_items, near_duplicate  # noqa: E402
from agentflow.bench.kvcmas.journal import Journal  # noqa: E402
from agentflow.bench.kvcmas.measures import drift, errors, interval, rank_correlation  # noqa: E402
from agentflow.bench.kvcmas.summary import claims, tables  # noqa: E402
from agentflow.cache.kvcmas.types import SegmentKV  # noqa: E402
from agentflow.cli import main  # noqa: E402
from agentflow.errors import UsageError  # noqa: E402

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of the same form as the real ones."""
    maths, code = tmp_path / "gsm8k", tmp_path / "humaneval"
    maths.mkdir()
    code.mkdir()
    problems = [
        {
            "question": f"Tom has {n} apples and buys {n} more. How many?",
            "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>\n#### {2 * n}",
        }
        for n in range(2, 12)
    ]
    tasks = [
        {
            "name": f"T{n}",
            "entry_point": f"f{n}",
            "prompt": f"def f{n}(x):\n",
            "test": f"def check(c):\n    assert c({n}) == 1\n",
        }
        for n in range(4)
    ]
    (maths / "gsm8k_test_first660.jsonl").write_text("\n".join(map(json.dumps, problems)))
    (code / "humaneval_first100.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    return tmp_path


def test_items_are_mixed_and_the_same_every_time(folder: Path) -> None:
    items = load_items(folder, 9, seed=3)
    assert items == load_items(folder, 9, seed=3)
    assert sum(i.name.startswith("T") for i in items) == 3
    assert len({i.name for i in items}) == 9
    assert all("<<" not in i.answer for i in items)
    with pytest.raises(UsageError, match="40 items asked for"):
        load_items(folder, 40)


def test_missing_data_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--data"):
        load_items(tmp_path, 3)


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kvcmas", "--data", str(tmp_path)]) != 0
    assert "--data" in capsys.readouterr().err
    assert main(["bench", "kvcmas", "--items", "1"]) != 0
    assert "--items" in capsys.readouterr().err


def test_a_near_duplicate_is_near_and_no_duplicate() -> None:
    text = "Tom has 3 apples and buys 12 more"
    assert near_duplicate(text) != text
    assert near_duplicate(text).split()[:2] == ["Tom", "has"]
    words = "a text of many words without any number in it at all for the test of it"
    assert sum(a != b for a, b in zip(words.split(), near_duplicate(words).split(), strict=True)) in (1, 2)


def test_drift_of_distributions() -> None:
    dense = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log()
    found = drift(dense, other)
    assert found.kl == pytest.approx((0.9 * math.log(9) + 0.1 * math.log(1 / 9)) / 2, rel=1e-4)
    assert (found.agreement, found.first) == (0.5, 1.0)
    assert drift(dense, dense).kl == 0


def test_errors_are_relative_to_the_dense_kv_and_to_reuse_unchanged() -> None:
    dense, zero = torch.full((3, 2, 1, 2), 2.0), torch.zeros(3, 2, 1, 2)
    kv, off, far = (SegmentKV(dense + x, dense - x, 0) for x in (0.0, 1.0, 2.0))
    assert errors(off, kv, far) == pytest.approx(
        {"keys/C": 0.5, "keys/delta": 0.5, "values/C": 0.5, "values/delta": 0.5}
    )
    assert errors(kv, kv, far)["keys/C"] == 0
    assert not zero.any()


def test_interval_holds_the_figure_and_narrows() -> None:
    few = interval({str(n): [n % 7] for n in range(20)})
    many = interval({str(n): [n % 7] for n in range(2000)})
    assert few.low < few.value < few.high
    assert many.high - many.low < (few.high - few.low) / 3
    assert interval({"a": [1.0, 1.0], "b": [1.0]}) == (1, 1, 1)


def test_rank_correlation_by_hand() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9486833)
    assert rank_correlation([1, 1], [1, 2]) == 0


def test_a_journal_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.part"
    one = Journal(path, {"seed": 1})
    one.add("a", {"methods": [{"x": 1}]})
    one.add("b", {"methods": [{"x": 2}]})
    with path.open("a") as file:
        file.write('{"item": "c", "rows": {"me')  # killed while writing
    two = Journal(path, {"seed": 1})
    assert two.rows("abc") == {"methods": [{"x": 1}, {"x": 2}]}
    assert two.rows("b") == {"methods": [{"x": 2}]}
    two.add("c", {"methods": [{"x": 3}]})
    assert list(Journal(path, {"seed": 1}).done) == ["a", "b", "c"]
    assert not Journal(path, {"seed": 2}).done
    two.close()
    assert not path.exists()


def row(method: str, item: str, kl: float, error: float, **more: Any) -> dict[str, Any]:
    found = {"item": item, "slot": "question", "method": method, "kl": kl, "agreement": 1.0, "first": 1.0, "tokens": 10}
    found |= {f"{p}/{k}": error for p in ("keys", "values") for k in ("C", "delta")}
    return found | {"recomputed": 1, "runs": 1.0, "distance": 0.1, "entropy": 0.5, "head": 0.1} | more


def test_summary_compares_on_the_same_segments() -> None:
    rows = {
        "methods": [
            *(row("FullShared", n, 1.0, 1.0) for n in "abcd"),
            *(row("token-kernel", n, 0.5, 0.8) for n in "abcd"),
            *(row("token-kernel + first 20 %", n, 0.3 if n != "d" else 2.0, 0.8) for n in "abcd"),
            row("ridge", "a", 0.25, 0.9),
        ],
        "repeats": [
            row("x", "a", 0, e, anchor=k)
            for k, e in (("exact repeat", 0.2), ("near duplicate", 0.7), ("unrelated", 0.9))
        ],
        "chain": [row("x", "a", 0, 0.5, hops=1, source="chained")],
    }
    lines = {line["method"]: line for line in tables(rows)["methods"]}
    assert lines["ridge"]["kl_ratio"] == pytest.approx(0.25)
    assert lines["ridge"]["segments"] == 1
    assert lines["token-kernel + first 20 %"]["better"][0] == 0.75
    met = {c["name"]: c["met"] for c in claims(rows, {"anchor_bytes": {"full": 50.0, "low_rank": 10.0}})}
    assert met["exact repeat, keys: error / delta"]
    assert not met["near duplicate, values: error / delta"]
    assert met["token-kernel + first 20 %: share of segments with KL below FullShared"]
    assert not met["token-kernel + first 20 %: mean KL against FullShared"]
    assert met["bytes of an anchor in full dimension / low rank"]


@pytest.fixture(scope="module")
def model() -> Any:
    from agentflow.bench.kvcmas.dense import DenseModel
    from agentflow.engine.models import random_model

    return DenseModel(str(random_model().path))


@pytest.mark.slow  # importing transformers' models takes seconds
def test_recomputing_in_one_pass_equals_run_by_run(model: Any) -> None:
    from agentflow.bench.kvcmas.dense import joined

    before = model.extend(None, model.ids("You are a planner.")).kv
    ids = model.ids("Tom has three apples and buys twelve more of them. How many has he now?")
    right = model.extend(before, ids).kv
    made = torch.Generator().manual_seed(0)
    bad = SegmentKV(*(t + torch.randn(t.shape, generator=made) for t in right[:2]), right.start)
    whole, n = joined(before, bad), before.tokens
    for first, end in ((0, 2), (5, 8), (12, 13)):
        new = model.extend(SegmentKV(whole.keys[:, : n + first], whole.values[:, : n + first], 0), ids[first:end]).kv
        whole.keys[:, n + first : n + end], whole.values[:, n + first : n + end] = new.keys, new.values
    after = model.ids(" Answer:")
    found, logprobs = model.read(before, bad, ids, [0, 1, 5, 6, 7, 12], after, keep=len(after))
    assert torch.allclose(found.keys, whole.keys[:, n:], atol=1e-4)
    assert torch.allclose(found.values, whole.values[:, n:], atol=1e-4)
    assert torch.allclose(logprobs, model.extend(whole, after, keep=len(after)).logprobs, atol=1e-3)
    everything = model.read(before, bad, ids, range(len(ids))).kv
    assert torch.allclose(everything.values, right.values, atol=1e-4)


@pytest.mark.slow
def test_the_first_layer_needs_no_correction_and_an_identical_prefix_none_at_all(model: Any) -> None:
    from agentflow.cache.kvcmas import Corrector, Edge, Estimate, Rope

    rope = Rope.of(model.config)
    ids = model.ids("Tom has three apples and buys twelve more of them.")
    before = [model.extend(None, model.ids(text)).kv for text in ("You plan.", "You are the one who writes all code.")]
    there = [model.extend(kv, ids).kv for kv in before]
    plain = [rope.unrotate(kv.keys, kv.start) for kv in there]
    assert torch.allclose(plain[0][0], plain[1][0], atol=1e-4)
    assert torch.allclose(there[0].values[0], there[1].values[0], atol=1e-5)
    assert not torch.allclose(there[0].values[1], there[1].values[1], atol=1e-3)
    corrector, edge = Corrector(rope, min_anchors=1, recompute=0.0), Edge("q", "planner", "planner")
    corrector.learn(edge, ids, there[0], there[0])
    corrector.work()
    found = corrector.estimate(edge, ids, there[0], there[0].start)
    assert isinstance(found, Estimate)
    after = model.ids(" So")
    dense = model.read(before[0], there[0], ids, (), after).logprobs
    assert torch.equal(model.read(before[0], found.kv, ids, (), after).logprobs, dense)


@pytest.mark.slow
def test_the_experiment_runs(model: Any, folder: Path) -> None:
    from agentflow.bench.kvcmas.costs import measure_costs
    from agentflow.bench.kvcmas.experiment import Experiment, Size
    from agentflow.bench.kvcmas.show import shown

    size = Size(anchors=3, items=3, brief=1, repeats=1, chains=1)
    items = load_items(folder, size.needed)
    heard: list[str] = []
    rows = Experiment(model, heard.append).run(items, size, Journal(None, {}))
    assert {r["method"] for r in rows["methods"]} >= {"FullShared", "segment (paper)", "token-kernel + first 20 %"}
    assert {r["hops"] for r in rows["chain"]} == {1, 2, 3}
    assert all(math.isfinite(r["kl"]) and r["kl"] >= 0 for r in rows["methods"])
    assert "item 3 of 3" in heard
    exact = [r["values/delta"] for r in rows["repeats"] if r["anchor"] == "exact repeat"]
    unrelated = [r["values/delta"] for r in rows["repeats"] if r["anchor"] == "unrelated"]
    assert max(exact) < min(unrelated)
    costs = measure_costs(model, items, heard.append, anchors=2, repeats=1)
    assert costs["anchor_bytes"]["full"] > costs["anchor_bytes"]["low_rank"]
    assert {m["method"] for m in costs["methods"]} >= {"none", "segment", "token-kernel"}
    data = {"tables": tables(rows), "costs": costs, "claims": claims(rows, costs)}
    text = "\n".join(t.markdown() for t in shown(json.loads(json.dumps(data))))
    assert "KVComm as released" in text
    assert len(AGENTS) == 4


@pytest.mark.slow
def test_the_task_level_runs(model: Any, folder: Path) -> None:
    from agentflow.bench.kvcmas.tasks import TASK_METHODS, TaskSize, run_tasks, task_table

    size = TaskSize(anchors=2, tasks=3, words=5)
    rows = run_tasks(model, load_items(folder, 5), size, lambda _text: None)
    assert len(rows) == 3 * (1 + len(TASK_METHODS))
    dense = [r for r in rows if r["method"] == "dense"]
    assert all(r["kl"] == 0 and r["agreement"] == r["same choice"] == 1 for r in dense)
    assert any(r["kl"] > 0 for r in rows)
    lines = {line["method"]: line for line in task_table(rows)}
    assert lines["dense"]["kl"][0] == 0
    assert lines["FullShared"]["p"] <= 1


def test_the_real_data_has_enough_items() -> None:
    if not (DATA / "gsm8k").is_dir() or not (DATA / "humaneval").is_dir():
        pytest.skip("shared/data/gsm8k and humaneval are not here")
    items = load_items(DATA, 110)
    assert len({i.name for i in items}) == 110
