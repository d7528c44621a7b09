"""Real calls with directed answers: what the agents are to say is known, everything else is as it would be live."""

from __future__ import annotations

from dataclasses import replace

from agentflow.bench.traces.record import TraceRecorder
from agentflow.engine.base import Call, Completion, Engine, Sampling
from agentflow.engine.scripted import ScriptedEngine

__all__ = ["Directed"]


class Directed(TraceRecorder):
    """Runs every call on ``engine`` and has it answer what ``script`` says: the tokens are forced one by one.

    For measurements and tests with live graphs and tools, in which every policy is to meet the same calls whatever a
    model would say. :meth:`noted` is called with each call and its completion. Only calls that are not streamed are
    directed.
    """

    def __init__(self, engine: Engine, script: ScriptedEngine) -> None:
        super().__init__(engine)
        self.script = script

    async def agenerate(self, call: Call) -> Completion:
        text = (await self.script.agenerate(replace(call, sampling=Sampling()))).text
        tokens = (*self.tokenizer.encode(text), min(self.tokenizer.eos_token_ids))
        forced = replace(call, sampling=Sampling(max_tokens=len(tokens), forced_tokens=tokens))
        completion = replace(await super().agenerate(forced), finish="stop")
        self.noted(call, completion)
        return replace(completion, text=text)

    def noted(self, call: Call, completion: Completion) -> None:
        """A call has its answer; ``completion`` has the engine's own text."""
