"""Hedging: who gets a second try, who wins, and that the loser is stopped."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from agentflow.errors import UsageError
from agentflow.runtime.guards import Done, Guards, Work
from agentflow.runtime.policies.hedging import Durations, Hedging


class Tool:
    """Answers when it is told to; ``tries`` are the answers waited for, in order."""

    def __init__(self) -> None:
        self.tries: list[asyncio.Future[Done]] = []
        self.started = asyncio.Event()

    async def __call__(self) -> Done:
        answer: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self.tries.append(answer)
        self.started.set()
        return await answer

    async def tried(self, times: int) -> None:
        while len(self.tries) < times:
            self.started.clear()
            await self.started.wait()


def guards_of(**options: object) -> Guards:
    guards = Guards(
        [{"name": "hedging", "min_samples": 2, "window": 8, "max_share": 1.0, "min_delay": 0.001, **options}]
    )
    learned = guards.guard("hedging")
    assert isinstance(learned, Hedging)
    for name in ("search", "send"):
        for _ in range(4):
            learned._learn(("tool", name), 0.001)
            learned._learn(("model", name), 0.001)
    return guards


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 10))  # type: ignore[arg-type]


def test_the_second_try_wins_and_the_first_is_cancelled() -> None:
    async def body() -> None:
        guards, tool = guards_of(), Tool()
        call = asyncio.create_task(guards.run(Work(kind="tool", name="search", pure=True), tool))
        await tool.tried(2)
        tool.tries[1].set_result(Done(value="second"))
        assert (await call).value == "second"
        assert tool.tries[0].cancelled()
        stats = guards.stats()["policies"]["hedging"]
        assert (stats["second_tries"], stats["second_won"], stats["cancelled"]) == (1, 1, 1)

    run(body)


def test_a_failure_does_not_win_while_another_try_runs() -> None:
    async def body() -> None:
        guards, tool = guards_of(), Tool()
        call = asyncio.create_task(guards.run(Work(kind="tool", name="search", pure=True), tool))
        await tool.tried(2)
        tool.tries[1].set_result(Done(value="failed", ok=False))
        await asyncio.sleep(0)
        assert not call.done()
        tool.tries[0].set_result(Done(value="first"))
        assert (await call).value == "first"

    run(body)


def test_when_all_tries_raise_the_error_is_the_works() -> None:
    async def body() -> None:
        guards, tool = guards_of(), Tool()
        call = asyncio.create_task(guards.run(Work(kind="tool", name="search", pure=True), tool))
        await tool.tried(2)
        for answer in tool.tries:
            answer.set_exception(LookupError("gone"))
        with pytest.raises(LookupError, match="gone"):
            await call
        assert guards.names == ("hedging",)  # the policy itself did nothing wrong

    run(body)


@pytest.mark.parametrize(
    "work",
    [Work(kind="tool", name="send", pure=False), Work(kind="model", name="send", pure=True)],
    ids=["side effects", "models are off"],
)
def test_never_twice(work: Work) -> None:
    async def body() -> None:
        guards, tool = guards_of(), Tool()
        call = asyncio.create_task(guards.run(work, tool))
        await tool.tried(1)
        await asyncio.sleep(0.05)  # far beyond the learned millisecond
        assert len(tool.tries) == 1
        tool.tries[0].set_result(Done(value="only"))
        assert (await call).value == "only"

    run(body)


def test_cancelling_the_call_cancels_both_tries() -> None:
    async def body() -> None:
        guards, tool = guards_of(), Tool()
        call = asyncio.create_task(guards.run(Work(kind="tool", name="search", pure=True), tool))
        await tool.tried(2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert all(t.cancelled() for t in tool.tries)

    run(body)


@pytest.mark.parametrize("fails", [False, True])
def test_the_answer_does_not_wait_for_the_slower_try(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        guards, tool = guards_of(), Tool()
        may_clean_up, tasks = asyncio.Event(), []

        async def proceed() -> Done:
            tasks.append(asyncio.current_task())
            try:
                return await tool()
            except asyncio.CancelledError:
                await may_clean_up.wait()
                if fails:
                    raise LookupError("while cleaning up") from None
                raise

        call = asyncio.create_task(guards.run(Work(kind="tool", name="search", pure=True), proceed))
        await tool.tried(2)
        tool.tries[1].set_result(Done(value="second"))
        assert (await call).value == "second"
        assert not tasks[0].done()
        may_clean_up.set()
        await asyncio.wait({tasks[0]})
        assert tasks[0].cancelled() is not fails

    run(body)
    gc.collect()
    said = [r.getMessage() for r in caplog.records]
    assert [("while cleaning up" in text) for text in said] == [True] * fails


def test_second_tries_stay_within_their_share() -> None:
    async def body() -> None:
        guards = guards_of(max_share=0.25)
        tools = [Tool() for _ in range(8)]
        calls = [asyncio.create_task(guards.run(Work(kind="tool", name="search", pure=True), t)) for t in tools]
        for tool in tools:
            await tool.tried(1)
        await asyncio.sleep(0.05)
        assert sum(len(t.tries) for t in tools) <= 8 + 2
        for tool in tools:
            for answer in tool.tries:
                answer.set_result(Done(value=1))
        await asyncio.gather(*calls)

    run(body)


def test_durations_are_a_sliding_window() -> None:
    durations = Durations(4)
    for seconds in (9.0, 1.0, 2.0, 3.0, 4.0):
        durations.add(seconds)
    assert len(durations) == 4
    assert durations.percentile(0.95) == 4.0
    assert durations.percentile(0.5) == 3.0


def test_bad_options() -> None:
    with pytest.raises(UsageError, match="percentile"):
        Guards([{"name": "hedging", "percentile": 1.0}])
