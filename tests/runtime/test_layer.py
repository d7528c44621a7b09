"""The four primitives, their order of precedence, and that no policy can hurt."""

import logging
from collections.abc import Callable, Sequence

import pytest

from agentflow.cache.ledger import CallRef, Ledger, NodeRecord
from agentflow.cache.policy import (
    Explanation,
    Observation,
    Policy,
    Prefetch,
    Score,
    Touched,
    WaitingCall,
    check_policies,
    policy_names,
    register_policy,
)
from agentflow.errors import UsageError
from agentflow.events import WorkflowEnded, WorkflowStarted
from agentflow.runtime import DecisionLog, Runtime


def node(n: int, tokens: int = 10) -> NodeRecord:
    return NodeRecord(n, tokens, 0.0)


class Small(Policy):
    """Evicts small nodes first; runs short calls first; wants every small node that it saw back."""

    name = "small"

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, Touched):
            self.seen = observation.node.id

    def score_node(self, node: NodeRecord) -> Score:
        return (float(node.tokens),)

    def score_call(self, call: WaitingCall) -> Score:
        return (float(call.tokens),)

    def act(self) -> Sequence[Prefetch]:
        return [Prefetch(self.seen, "seen before")]

    def explain(self, node: NodeRecord) -> Explanation:
        return Explanation(f"small: {node.tokens}", {"tokens": float(node.tokens)})


class Broken(Policy):
    name = "broken"

    def observe(self, observation: Observation) -> None:
        raise RuntimeError("observe")

    def score_node(self, node: NodeRecord) -> Score:
        raise RuntimeError("score")

    def score_call(self, call: WaitingCall) -> Score:
        return ("high",)  # type: ignore[return-value]

    def act(self) -> Sequence[Prefetch]:
        raise RuntimeError("act")

    def predict(self, horizon: int) -> list:
        raise RuntimeError("predict")

    def explain(self, node: NodeRecord) -> Explanation:
        raise RuntimeError("explain")


class NotANumber(Policy):
    name = "not-a-number"

    def score_node(self, node: NodeRecord) -> Score:
        return (float("nan"),)


for _policy in (Small, Broken, NotANumber):
    register_policy(_policy.name, _policy)


def ranked(runtime: Runtime, nodes: Sequence[NodeRecord], recency: Sequence[float]) -> list[int]:
    pairs = sorted(zip(nodes, recency, strict=True), key=lambda p: runtime.score_node(*p))
    return [n.id for n, _ in pairs]


def waiting(tokens: int) -> WaitingCall:
    return WaitingCall("r", CallRef(None), tokens, 0, 0.0)


def test_without_an_opinion_recency_decides() -> None:
    runtime = Runtime(["lru"])
    assert not runtime.ranks_nodes
    assert ranked(runtime, [node(1), node(2), node(3)], [2.0, 3.0, 1.0]) == [3, 1, 2]
    assert runtime.score_call(waiting(1)) == ()


def test_retired_goes_first_and_recency_breaks_ties() -> None:
    runtime = Runtime(["lifecycle"])
    live, old, older = node(1), node(2), node(3)
    runtime.ledger.touch(live, runtime.call("v", "a", None, "r1"))
    for n in (old, older):
        runtime.ledger.touch(n, runtime.call("w", "a", None, "r2"))
    runtime.observe(WorkflowEnded(workflow="w", seq=1))
    assert ranked(runtime, [live, old, older], [1.0, 3.0, 2.0]) == [3, 2, 1]


def test_policies_rank_in_order_of_precedence() -> None:
    nodes = [node(1, 30), node(2, 20), node(3, 10)]
    for order, expected in ((["lifecycle", "small"], [3, 1, 2]), (["small", "lifecycle"], [3, 2, 1])):
        runtime = Runtime(order)
        runtime.ledger.touch(nodes[1], runtime.call("w", "a", None, "r"))
        assert ranked(runtime, nodes, [1.0, 2.0, 3.0]) == expected


def test_effects_and_observations_reach_and_leave_the_policy() -> None:
    runtime = Runtime(["small"])
    assert runtime.acts
    assert runtime.watches_nodes
    runtime.observe(Touched(node(5), CallRef(None)))
    assert runtime.act() == [Prefetch(5, "seen before")]
    assert runtime.score_call(waiting(7)) == (7.0,)


def test_a_failing_policy_is_left_out_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(["broken", "lifecycle"])
    with caplog.at_level(logging.ERROR, logger="agentflow.runtime"):
        assert runtime.score_node(node(1), 5.0) == (0.0, 5.0)
        assert runtime.score_node(node(2), 6.0) == (0.0, 6.0)
    assert runtime.counters["policy_errors"] == 1
    assert runtime.counters["policies_left_out"] == 1
    assert [p.name for p in runtime.policies] == ["lifecycle"]
    assert len(caplog.records) == 2  # what failed, and that it is left out


@pytest.mark.parametrize("primitive", ["score_call", "act", "predict", "observe", "evicted"])
def test_no_failure_of_a_policy_gets_out(primitive: str, caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(["broken"])
    for _ in range(30):
        if primitive == "score_call":
            assert runtime.score_call(waiting(1)) == ()
        elif primitive == "act":
            assert runtime.act() == []
        elif primitive == "predict":
            assert runtime.predict(3) == []
        elif primitive == "observe":
            runtime.observe(WorkflowStarted(workflow="w", seq=1))
        else:
            assert runtime.evicted(node(1), "evict", request=None).reason == "least recently used"
    assert runtime.counters["policies_left_out"] == 1
    assert runtime.counters["policy_errors"] <= 20


def test_a_score_that_cannot_be_compared_leaves_the_policy_out(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(["not-a-number"])
    assert runtime.score_node(node(1), 1.0) == (1.0,)
    assert runtime.counters["policies_left_out"] == 1


def test_an_eviction_leaves_a_record_that_explains_itself() -> None:
    runtime = Runtime(["lifecycle"])
    a = node(7, 12)
    runtime.ledger.touch(a, runtime.call("w", "planner", None, "r1"))
    runtime.observe(WorkflowEnded(workflow="w", seq=1))
    decision = runtime.evicted(a, "demote", request="r2")
    assert (decision.kind, decision.policy, decision.reason) == ("demote", "lifecycle", "retired: workflow w ended")
    assert (decision.workflows, decision.agents, decision.tokens) == (("w",), ("planner",), 12)
    runtime.settle(decision.seq, "regretted", 12)
    runtime.settle(decision.seq, "used", 12)
    assert decision.outcome == "regretted"
    assert runtime.counters["demote_regretted_tokens"] == 12


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(UsageError, match=r"unknown policy 'lifecyle'; known: .*lifecycle.*lru"):
        Runtime(["lifecyle"])
    assert {"lru", "lifecycle"} <= set(policy_names())


def test_a_policy_of_the_users_own_is_found_by_its_path() -> None:
    assert Runtime([f"{__name__}:Small"]).policies[0].name == "small"
    with pytest.raises(UsageError, match="cannot be imported"):
        Runtime(["tests.runtime.nowhere:Small"])
    with pytest.raises(UsageError, match="not a subclass"):
        Runtime(["agentflow.runtime:DecisionLog"])


def test_a_name_is_taken_once() -> None:
    with pytest.raises(UsageError, match="already registered"):
        register_policy("lru", Small)


def test_the_log_is_bounded_and_numbers_stay() -> None:
    log = DecisionLog(limit=10)
    for i in range(25):
        log.add("evict", time=float(i), policy="p", reason="r")
    assert [d.seq for d in log.since(0)] == list(range(16, 26))
    assert [d.seq for d in log.since(23)] == [24, 25]
    assert log.since(25) == []
    assert log.settle(1, "used") is None


class Tuned(Policy):
    name = "tuned"

    def __init__(self, ledger: Ledger, clock: Callable[[], float], *, weight: float = 1.0) -> None:
        super().__init__(ledger, clock)
        self.weight = weight


def test_options_reach_the_policy_and_unknown_ones_are_refused() -> None:
    runtime = Runtime([{"name": f"{__name__}:Tuned", "weight": 2.0}, "lifecycle"])
    assert isinstance(runtime.policies[0], Tuned)
    assert runtime.policies[0].weight == 2.0
    with pytest.raises(UsageError, match="does not take these options"):
        Runtime([{"name": "lifecycle", "weight": 2.0}])


def test_of_the_retired_what_several_workflows_used_goes_last() -> None:
    runtime = Runtime(["lifecycle"])
    common, private, live = node(1), node(2), node(3)
    for w in ("v", "w"):
        runtime.ledger.touch(common, runtime.call(w, "planner", None, f"r-{w}"))
    runtime.ledger.touch(private, runtime.call("w", "planner", None, "r2"))
    runtime.ledger.touch(live, runtime.call("u", "planner", None, "r3"))
    for w in ("v", "w"):
        runtime.observe(WorkflowEnded(workflow=w, seq=1))
    assert ranked(runtime, [live, common, private], [1.0, 2.0, 3.0]) == [2, 1, 3]
    head = common.split(9, 4)
    assert ranked(runtime, [live, head, private], [1.0, 2.0, 3.0]) == [2, 9, 3]


def test_policies_are_checked_before_an_engine_starts() -> None:
    check_policies(["lifecycle", {"name": "ttl", "budget": 0.5}, "my.own:Policy"])
    with pytest.raises(UsageError, match=r"write \['lru'\]"):
        check_policies("lru")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown policy"):
        check_policies(["lrru"])
    with pytest.raises(UsageError, match="does not take these options"):
        check_policies([{"name": "lru", "size": 3}])
