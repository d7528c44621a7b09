"""Memoization: what it saves, and that no answer is stale, another tenant's, or an error."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable

import pytest

from agentflow.errors import UsageError
from agentflow.runtime.guards import Done, Guards, Work
from agentflow.runtime.policies.memo import Memo


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def memo_of(guards: Guards) -> Memo:
    found = guards.guard("memo")
    assert isinstance(found, Memo)
    return found


def look_up(
    guards: Guards, answer: Callable[[], Done], *, key: str = "k", tenant: str | None = None, pure: bool = True
) -> Done:
    async def proceed() -> Done:
        return answer()

    work = Work(kind="tool", name="search", key=key, pure=pure, tenant=tenant)
    return asyncio.run(guards.run(work, proceed))


def test_equal_calls_are_answered_once() -> None:
    guards = Guards(["memo"], clock=Clock())
    made: list[int] = []

    def answer() -> Done:
        made.append(1)
        return Done(value=len(made), keep=True, size=10, seconds=2.0)

    assert [look_up(guards, answer).value for _ in range(4)] == [1, 1, 1, 1]
    stats = guards.stats()["policies"]["memo"]
    assert (stats["hits"], stats["misses"], stats["seconds_saved"]) == (3, 1, 6.0)


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"key": "other"}])
def test_another_tenant_or_another_question_gets_an_answer_of_its_own(other: dict[str, str]) -> None:
    guards = Guards(["memo"], clock=Clock())
    look_up(guards, lambda: Done(value="mine", keep=True, size=4), tenant="a")
    got = look_up(guards, lambda: Done(value="theirs", keep=True, size=4), **{"tenant": "a", **other})
    assert got.value == "theirs"


def test_errors_and_impure_tools_are_never_remembered() -> None:
    guards = Guards(["memo"], clock=Clock())
    look_up(guards, lambda: Done(value="failed", ok=False, keep=False, size=4))
    assert look_up(guards, lambda: Done(value="fine", keep=True, size=4)).value == "fine"
    look_up(guards, lambda: Done(value="first", keep=True, size=4), pure=False, key="x")
    assert look_up(guards, lambda: Done(value="second", keep=True, size=4), pure=False, key="x").value == "second"


def test_zero_stale_answers_whatever_happens() -> None:
    """A world that changes every 5 seconds at the latest, a time to live of 5: no answer may be older than that."""
    rng = random.Random(7)
    for _ in range(8):
        clock = Clock()
        clock.now = 0.0
        guards = Guards([{"name": "memo", "ttl": 5.0, "max_entries": 6, "max_bytes": 200}], clock=clock)
        for _ in range(200):
            clock.now += rng.choice([0.0, 0.1, 1.0, 4.9, 5.0])
            key, tenant = f"k{rng.randrange(8)}", rng.choice([None, "a", "b"])
            fails = rng.random() < 0.2
            asked = clock.now

            def answer(key: str = key, tenant: str | None = tenant, fails: bool = fails, clock: Clock = clock) -> Done:
                began = clock.now
                clock.now += rng.choice([0.0, 0.5, 6.0])  # the tool read the world when it began
                return Done(value=(key, tenant, began, fails), ok=not fails, keep=not fails, size=rng.randrange(1, 60))

            done = look_up(guards, answer, key=key, tenant=tenant)
            got_key, got_tenant, began, failed = done.value
            assert (got_key, got_tenant) == (key, tenant)
            if done.source == "memo":
                assert not failed
                assert asked - began < 5.0
        memo = memo_of(guards)
        assert memo.bytes <= 200
        assert memo.stats()["entries"] <= 6


def test_what_is_worth_least_goes_first() -> None:
    guards = Guards([{"name": "memo", "max_bytes": 300}], clock=Clock())
    for key, seconds in (("cheap", 0.01), ("dear", 10.0)):
        look_up(guards, lambda s=seconds: Done(value=s, keep=True, size=100, seconds=s), key=key)
    for n in range(5):
        look_up(guards, lambda: Done(value="new", keep=True, size=100, seconds=1.0), key=f"n{n}")
    assert look_up(guards, lambda: Done(value="computed", keep=True, size=1), key="dear").source == "memo"
    assert look_up(guards, lambda: Done(value="computed", keep=True, size=1), key="cheap").source == ""


def test_a_time_to_live_of_its_own() -> None:
    clock = Clock()
    guards = Guards([{"name": "memo", "ttl": 100.0, "ttls": {"search": 0.0}}], clock=clock)
    look_up(guards, lambda: Done(value=1, keep=True, size=1))
    assert look_up(guards, lambda: Done(value=2, keep=True, size=1)).value == 2


def test_what_one_run_does_to_its_answer_is_not_in_anothers() -> None:
    guards = Guards(["memo"], clock=Clock())
    for _ in range(3):
        done = look_up(guards, lambda: Done(value={"sources": ["a"]}, keep=True, size=1))
        assert done.value == {"sources": ["a"]}
        done.value["sources"].append("of this run")
    assert memo_of(guards).stats()["hits"] == 2


def test_an_answer_that_cannot_be_copied_is_not_kept() -> None:
    guards = Guards(["memo"], clock=Clock())
    for _ in range(2):
        assert look_up(guards, lambda: Done(value=[threading.Lock()], keep=True, size=1)).source == ""
    assert (guards.names, memo_of(guards).stats()["entries"]) == (("memo",), 0)


@pytest.mark.parametrize("asked_meanwhile", [True, False], ids=["the same", "something else"])
def test_an_answer_from_before_the_clock_was_set_back_is_not_given(asked_meanwhile: bool) -> None:
    """Its age is not known: an hour after the clock was set back by one, it seems to be new."""
    clock = Clock()
    clock.now = 10_000.0
    guards = Guards([{"name": "memo", "ttl": 10.0}], clock=clock)
    look_up(guards, lambda: Done(value="old", keep=True, size=1))
    clock.now -= 3_600
    look_up(guards, lambda: Done(value="new", keep=True, size=1), key="k" if asked_meanwhile else "other")
    clock.now += 3_601
    assert look_up(guards, lambda: Done(value="newest", keep=True, size=1)).value == "newest"


def test_an_answer_during_which_the_clock_was_set_back_is_not_kept() -> None:
    clock = Clock()
    clock.now = 10_000.0
    guards = Guards([{"name": "memo", "ttl": 10.0}], clock=clock)

    def answer() -> Done:
        clock.now = 9_000.0
        return Done(value="old", keep=True, size=1)

    look_up(guards, answer)
    assert memo_of(guards).stats()["entries"] == 0


def test_bad_options() -> None:
    with pytest.raises(UsageError, match="ttl"):
        Guards([{"name": "memo", "ttl": -1.0}])


def test_state_stays_bounded() -> None:
    guards = Guards([{"name": "memo", "max_entries": 50}], clock=Clock())
    memo = memo_of(guards)
    done = Done(value="x", keep=True, size=3, seconds=0.1)

    async def proceed() -> Done:
        return done

    async def many() -> None:
        for n in range(20_000):
            name = f"t{n % 3_000}"
            await memo.around(Work(kind="tool", name=name, key=f"{n % 700}", pure=True), proceed)

    asyncio.run(many())
    assert memo.stats()["entries"] <= 50
    assert len(memo._heap) <= 64 + 4 * 51
    assert len(memo._asked) <= 1_024
