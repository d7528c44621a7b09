"""An item's dense KV under each agent, cut into its shared segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from agentflow.bench.kvcmas.data import AGENTS, Agent, Item
from agentflow.bench.kvcmas.dense import DenseModel, joined
from agentflow.cache.kvcmas.types import SegmentKV

__all__ = ["Place", "Prompts", "Tokens"]


class Tokens(NamedTuple):
    """Token ids of an item's two shared segments."""

    question: list[int]
    answer: list[int]

    def of(self, slot: str) -> list[int]:
        """By the slot's name."""
        return self.question if slot == "question" else self.answer


@dataclass(frozen=True, slots=True)
class Place:
    """One prompt of one agent, computed densely up to the end of the answer."""

    agent: Agent
    whole: SegmentKV
    spans: dict[str, tuple[int, int]]

    def segment(self, slot: str) -> SegmentKV:
        """The KV of a shared segment."""
        first, end = self.spans[slot]
        return SegmentKV(self.whole.keys[:, first:end], self.whole.values[:, first:end], first)

    def before(self, slot: str) -> SegmentKV:
        """The KV of everything before a shared segment."""
        first = self.spans[slot][0]
        return SegmentKV(self.whole.keys[:, :first], self.whole.values[:, :first], 0)


class Prompts:
    """Makes prompts of the experiment; each agent's instructions are computed once."""

    def __init__(self, model: DenseModel) -> None:
        self.model = model
        self._glue = {a.name: model.ids(a.glue) for a in AGENTS}
        self._closing = {a.name: model.ids(f"<|im_end|>\n<|im_start|>assistant{a.closing}") for a in AGENTS}
        self._prefix = {
            a.name: model.extend(
                None, model.ids(f"<|im_start|>system\n{a.instructions}<|im_end|>\n<|im_start|>user\n")
            ).kv
            for a in AGENTS
        }

    def tokens(self, item: Item) -> Tokens:
        """An item's segments as token ids."""
        return Tokens(self.model.ids(item.question), self.model.ids(item.answer))

    def dense(self, agent: Agent, tokens: Tokens) -> Place:
        """Prefill an agent's prompt through the answer."""
        prefix, glue = self._prefix[agent.name], self._glue[agent.name]
        rest = self.model.extend(prefix, tokens.question + glue + tokens.answer).kv
        first = prefix.tokens
        middle = first + len(tokens.question)
        answer = middle + len(glue)
        spans = {"question": (first, middle), "answer": (answer, answer + len(tokens.answer))}
        return Place(agent, joined(prefix, rest), spans)

    def alone(self, tokens: list[int]) -> SegmentKV:
        """The segment without anything before it: the context-free reference, which costs a prefill of its own."""
        return self.model.extend(None, tokens).kv

    def follow(self, place: Place, slot: str, tokens: Tokens, count: int) -> tuple[list[int], list[int]]:
        """What stands after a shared segment: private tokens, then ``count`` tokens to be compared.

        After the question they are the beginning of the answer; after the answer what the agent writes, densely.
        """
        if slot == "question":
            return self._glue[place.agent.name], tokens.answer[:count]
        closing = self._closing[place.agent.name]
        return closing, self.model.greedy(place.whole, closing, count)
