"""Adapter preloading: the LoRA adapter of the agent that will probably run next is in device memory before it is asked
for.

Which adapter an agent runs with, and who follows whom, is learned from the calls.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from agentflow.cache.ledger import Ledger
from agentflow.cache.policy import CallArrived, LoadAdapter, Observation, Policy
from agentflow.cache.survival import OUTSIDE, Transitions
from agentflow.errors import UsageError
from agentflow.events import AgentStarted, WorkflowEnded

__all__ = ["AdapterPreload"]

_WORKFLOWS = 10_000
_AGENTS = 64


class AdapterPreload(Policy):
    """Asks for the adapters of agents that follow a running one with at least ``threshold`` probability.

    Asks once per call of an agent, and never for the adapter that the step itself runs with.
    """

    name: ClassVar[str] = "adapters"

    def __init__(self, ledger: Ledger, clock: Callable[[], float], *, threshold: float = 0.3) -> None:
        super().__init__(ledger, clock)
        if not 0 < threshold <= 1:
            raise UsageError("adapters: threshold must be above 0 and at most 1")
        self._transitions = Transitions(agents=_AGENTS, window=2_048, threshold=threshold)
        self._places: OrderedDict[str, int] = OrderedDict()
        self._adapters: dict[int, str | None] = {}
        self._wanted: dict[str, LoadAdapter] = {}
        self._counts: Counter[str] = Counter()

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, CallArrived):
            self._arrived(observation)
        elif isinstance(observation, AgentStarted) and observation.agent is not None:
            self._entered(observation.workflow, observation.agent)
        elif isinstance(observation, WorkflowEnded):
            before = self._places.pop(observation.workflow, None)
            if before is not None:
                self._transitions.learn(before, OUTSIDE)

    def act(self) -> Sequence[LoadAdapter]:
        if not self._wanted:
            return ()
        wanted, self._wanted = list(self._wanted.values()), {}
        self._counts["asked_for"] += len(wanted)
        return wanted

    def stats(self) -> Mapping[str, float]:
        return {"agents": len(self._transitions.names), "adapters": len(set(self._adapters.values())), **self._counts}

    def _arrived(self, seen: CallArrived) -> None:
        thread = seen.call.thread
        if thread is None or thread.agent is None:
            return
        if not thread.workflow.sends_events or thread.workflow.id not in self._places:
            self._entered(thread.workflow.id, thread.agent)
        number = self._transitions.number(thread.agent)
        if number is not None:
            self._adapters[number] = seen.adapter
            if seen.adapter is not None:
                self._wanted.pop(seen.adapter, None)
            self._look_ahead(number, thread.agent)

    def _entered(self, workflow: str, agent: str) -> None:
        number = self._transitions.number(agent)
        if number is None:
            return
        self._transitions.learn(self._places.get(workflow, OUTSIDE), number)
        self._places[workflow] = number
        self._places.move_to_end(workflow)
        if len(self._places) > _WORKFLOWS:
            self._places.popitem(last=False)

    def _look_ahead(self, number: int, agent: str) -> None:
        """Want the adapters of those that follow. Not before the agent's own call has come: its adapter goes first."""
        mine = self._adapters.get(number)
        for following, probability in self._transitions.following(number):
            adapter = self._adapters.get(following)
            if adapter is not None and adapter != mine:
                reason = f"{agent} is followed by an agent that runs with it ({probability:.0%})"
                self._wanted[adapter] = LoadAdapter(adapter, reason, probability)
