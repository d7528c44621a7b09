"""Speculative agent execution: the next agent's call of the model is made before the agent is reached.

While an agent runs and the engine has room, the model call with which its probable successor would begin is made on
the state that it would probably see. When the successor is reached and asks exactly that (same tokens, same sampling),
it gets the answer; in every other case the call is stopped and forgotten. Only the model is asked: no tool runs, no
state is written, nothing is reported for a call that was not taken.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentflow.cache.ledger import Ledger
from agentflow.cache.policy import Observation
from agentflow.cache.survival import OUTSIDE, Transitions
from agentflow.errors import UsageError
from agentflow.events import AgentEnded, AgentStarted, WorkflowEnded, WorkflowPaused
from agentflow.runtime.guards import Done, Guard, Proceed, StartAgent, Work

__all__ = ["Bet", "Speculation"]

_WORKFLOWS = 10_000
#: Values of an agent, and agents, of which is counted what they write; the longest value, in characters.
_VALUES, _LONGEST = 64, 2_000


@dataclass(slots=True)
class Bet:
    """A call made early for ``agent``. ``key`` is what it asks, known once it is asked."""

    workflow: str
    agent: str
    after: int
    future: Future[Done] = field(default_factory=Future)
    key: str = ""
    tokens: int = 0
    began: float = 0.0
    cancel: Callable[[], Any] = lambda: None

    def spent(self) -> Done:
        """What the call used, as far as is known: all of it once it is done, its prompt before."""
        future = self.future
        if future.done() and not future.cancelled() and future.exception() is None:
            return future.result()
        return Done(value=None, ok=False, prompt_tokens=self.tokens)


class Speculation(Guard):
    """Starts at most ``most`` agents early at once, and only while no more than ``busy`` model calls run.

    An agent is started early when it followed the running one in at least ``threshold`` of the learned transitions, and
    when at least ``accept`` of the latest bets on that transition were taken (each transition is given ``trials``
    bets to show it). ``observe`` is O(agents).
    """

    name: ClassVar[str] = "speculation"
    precedence: ClassVar[int] = 30

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        threshold: float = 0.6,
        accept: float = 0.3,
        trials: int = 4,
        busy: int = 4,
        most: int = 2,
    ) -> None:
        super().__init__(ledger, clock)
        if not 0 < threshold <= 1 or not 0 <= accept <= 1 or trials < 1 or busy < 0 or most < 1:
            raise UsageError("speculation: threshold and accept must be from 0 to 1, trials and most at least 1")
        self.threshold = threshold
        self.accept = accept
        self.trials = trials
        self.busy = busy
        self.most = most
        self._graphs: OrderedDict[str, Transitions] = OrderedDict()
        self._places: OrderedDict[str, tuple[Transitions, int, str]] = OrderedDict()
        self._bets: dict[tuple[str, str], Bet] = {}
        #: Taken share of the latest bets on a transition, and how many there were.
        self._taken: OrderedDict[tuple[int, int, int], list[float]] = OrderedDict()
        #: What each agent of each graph wrote lately, and how often.
        self._written: OrderedDict[tuple[str, str], OrderedDict[str, tuple[Any, int]]] = OrderedDict()
        self._wanted: deque[StartAgent] = deque(maxlen=64)
        self._running = 0
        self._counts: Counter[str] = Counter()
        self._seconds = {"saved": 0.0, "wasted": 0.0}

    # -- observe ---------------------------------------------------------------------------------------

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, AgentStarted) and observation.agent is not None:
            self._entered(observation.workflow, observation.agent)
        elif isinstance(observation, AgentEnded):
            if observation.next:
                self._forget(observation.workflow, keep=observation.next)
        elif isinstance(observation, WorkflowEnded | WorkflowPaused):
            self._forget(observation.workflow)
            place = self._places.pop(observation.workflow, None)
            if place is not None and isinstance(observation, WorkflowEnded):
                place[0].learn(place[1], OUTSIDE)

    def _entered(self, workflow: str, agent: str) -> None:
        known = self.ledger.workflows.get(workflow)
        graph = (known.graph if known is not None else None) or ""
        transitions = self._graphs.get(graph)
        if transitions is None:
            transitions = self._graphs[graph] = Transitions(agents=32, threshold=self.threshold)
            if len(self._graphs) > 64:
                self._graphs.popitem(last=False)
        number = transitions.number(agent)
        if number is None:
            return
        place = self._places.get(workflow)
        before = place[1] if place is not None and place[0] is transitions else OUTSIDE
        transitions.learn(before, number)
        self._forget(workflow, keep=(agent,))
        self._places[workflow] = (transitions, number, agent)
        self._places.move_to_end(workflow)
        if len(self._places) > _WORKFLOWS:
            gone, _ = self._places.popitem(last=False)
            self._forget(gone)
        for following, probability in transitions.following(number)[:1]:
            name = next((n for n, i in transitions.names.items() if i == following), None)
            if name is not None and self._worth(transitions, number, following):
                self._wanted.append(StartAgent(workflow, name, f"follows {agent} ({probability:.0%})", probability))

    def _worth(self, transitions: Transitions, before: int, after: int) -> bool:
        share, bets = self._taken.get((id(transitions), before, after), (0.0, 0))
        return bets < self.trials or share >= self.accept

    # -- act -------------------------------------------------------------------------------------------

    def start(self) -> Sequence[StartAgent]:
        wanted = list(self._wanted)
        self._wanted.clear()
        room = self.most - len(self._bets)
        if room <= 0 or self._running > self.busy:
            self._counts["no_room"] += len(wanted)
            return ()
        return wanted[:room]

    def begin(self, effect: StartAgent) -> Bet | None:
        """A bet on what ``effect`` says, to be filled by whoever makes the call; None when one is open already."""
        with self.lock:
            place = self._places.get(effect.workflow)
            key = (effect.workflow, effect.agent)
            if place is None or key in self._bets or place[2] == effect.agent:
                return None
            bet = self._bets[key] = Bet(effect.workflow, effect.agent, place[1], began=self.clock())
            self._counts["started"] += 1
            return bet

    def wrote(self, graph: str, agent: str, value: Any) -> None:
        """An agent wrote ``value`` to the state. Short values are counted, the newest ones of the newest agents."""
        try:
            text = value if isinstance(value, str) else repr(value)
        except Exception:  # it cannot be told from others
            return
        if len(text) > _LONGEST:
            return
        with self.lock:
            seen = self._written.setdefault((graph, agent), OrderedDict())
            self._written.move_to_end((graph, agent))
            _, count = seen.pop(text, (None, 0))
            seen[text] = (value, count + 1)
            if len(seen) > _VALUES:
                seen.popitem(last=False)
            if len(self._written) > _VALUES:
                self._written.popitem(last=False)

    def usual(self, graph: str, agent: str) -> Any:
        """What the agent wrote most often, if that was at least half of the time and twice; else None."""
        with self.lock:
            seen = self._written.get((graph, agent))
            if not seen:
                return None
            value, count = max(seen.values(), key=lambda pair: pair[1])
            return value if count >= 2 and 2 * count >= sum(n for _, n in seen.values()) else None

    # -- on the way of calls ---------------------------------------------------------------------------

    async def around(self, work: Work, proceed: Proceed) -> Done:
        if work.kind != "model":
            return await proceed()
        with self.lock:
            self._running += 1
        try:
            return await self._take(work, proceed)
        finally:
            with self.lock:
                self._running -= 1

    async def _take(self, work: Work, proceed: Proceed) -> Done:
        if work.workflow is None or work.agent is None:
            return await proceed()
        with self.lock:
            bet = self._bets.pop((work.workflow, work.agent), None)
        if bet is None:
            return await proceed()
        if not bet.key or bet.key != work.key:
            self._lost(bet, "mismatched")
            return await proceed()
        asked = self.clock()
        try:
            done = await asyncio.wrap_future(bet.future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                bet.cancel()
                raise
            self._lost(bet, "failed")
            return await proceed()
        except Exception:
            self._lost(bet, "failed")
            return await proceed()
        if not done.ok:
            self._lost(bet, "failed")
            return await proceed()
        waited = self.clock() - asked
        with self.lock:
            self._settle(bet, True)
            self._counts["taken"] += 1
            self._seconds["saved"] += max(0.0, done.seconds - waited)
        done.source = "speculation"
        return done

    def stats(self) -> Mapping[str, float]:
        seconds = {f"seconds_{name}": round(value, 6) for name, value in self._seconds.items()}
        return {"open": len(self._bets), **self._counts, **seconds}

    # -- bets ------------------------------------------------------------------------------------------

    def _forget(self, workflow: str, *, keep: Sequence[str] = ()) -> None:
        """The workflow goes another way: stop what was begun for agents other than ``keep``."""
        with self.lock:
            for key in [k for k in self._bets if k[0] == workflow and k[1] not in keep]:
                self._lost(self._bets.pop(key), "not_reached")

    def _lost(self, bet: Bet, how: str) -> None:
        with self.lock:
            self._counts[how] += 1
            self._counts["wasted"] += 1
            self._settle(bet, False)
            done = bet.future.done() and not bet.future.cancelled() and bet.future.exception() is None
            if done:
                result = bet.future.result()
                self._counts["wasted_tokens"] += result.prompt_tokens - result.cached_tokens + result.output_tokens
                self._seconds["wasted"] += result.seconds
            else:
                self._seconds["wasted"] += self.clock() - bet.began
        bet.cancel()

    def _settle(self, bet: Bet, taken: bool) -> None:
        place = self._places.get(bet.workflow)
        transitions = place[0] if place is not None else None
        after = transitions.names.get(bet.agent) if transitions is not None else None
        if transitions is None or after is None:
            return
        seen = self._taken.setdefault((id(transitions), bet.after, after), [0.0, 0])
        seen[1] += 1
        seen[0] += (float(taken) - seen[0]) / min(seen[1], 16)
        if len(self._taken) > 4_096:
            self._taken.popitem(last=False)
