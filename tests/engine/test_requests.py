"""SGLang's words about a request, read without an engine."""

from __future__ import annotations

from agentflow.cache.decision import Decision
from agentflow.engine.sglang import wire
from agentflow.engine.sglang.requests import usage_of


def corrected(seq: int, tokens: int, **terms: float) -> Decision:
    return Decision(
        seq=seq, time=0.0, kind="correct", policy="kvcmas:default", reason="shared", tokens=tokens, terms=terms
    )


def test_what_is_corrected_after_a_preemption_is_not_counted_beside_what_was_cached_before() -> None:
    """SGLang's counts are those of the first prefill, and so are ours: together they are at most the prompt."""
    meta = {"prompt_tokens": 1_000, "completion_tokens": 5, "cached_tokens": 900}
    first = usage_of({**meta, "cached_tokens": 100, wire.META_KEY: [None, wire.reply([corrected(1, 800)])]})
    assert (first.corrected, first.cached) == (800, 900)
    again = usage_of({**meta, wire.META_KEY: [None, wire.reply([corrected(1, 800, again=1.0)])]})
    assert (again.corrected, again.cached) == (0, 900)
    both = [corrected(1, 60), corrected(2, 800, again=1.0)]
    assert usage_of({**meta, wire.META_KEY: [None, wire.reply(both)]}).corrected == 60
