"""Runs of one prompt as rows of one batch, so that a single forward computes what a fill plan leaves to compute.

SGLang extends a request by one contiguous run of tokens after its prefix. A plan leaves several runs, with filled
tokens between them. Each becomes a row of the batch: same request, same slots, its own prefix length. Within a layer an
attention backend writes the new keys and values of all rows to the pool before any row reads it, so a later run sees
the earlier ones, as it would in a pass of its own. Backends that do so are in :data:`BACKENDS`.

The scheduler's batch stays as it is: slots, budgets, results and sampling are those of an ordinary extend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

__all__ = ["BACKENDS", "Rows", "fold", "hooks"]

#: Attention backends that write a batch's keys and values before they read the pool, all rows alike.
BACKENDS = frozenset({"torch_native", "triton"})

#: Runs by place in the batch that is being run, set by the hook around ``forward_batch_generation``.
_current: tuple[Any, dict[int, list[tuple[int, int]]]] | None = None


class Rows:
    """A batch folded into rows. ``keep`` are the places of each request's last row; ``batch`` is SGLang's."""

    def __init__(self, batch: Any, keep: list[int]) -> None:
        self.batch = batch
        self.keep = keep


def fold(batch: Any, runs: dict[int, list[tuple[int, int]]]) -> Rows:
    """A copy of an extend ``batch`` with a row for each run.

    ``runs`` maps places in the batch to (first, end) positions. Each request's runs lie in its extend and end with it.
    """
    import torch

    reqs: list[Any] = []
    prefixes: list[int] = []
    lengths: list[int] = []
    source: list[int] = []
    tokens: list[Any] = []
    keep: list[int] = []
    offset = 0
    for place, req in enumerate(batch.reqs):
        prefix, extend = batch.prefix_lens[place], batch.extend_lens[place]
        for first, end in runs.get(place) or [(prefix, prefix + extend)]:
            reqs.append(req)
            source.append(place)
            prefixes.append(first)
            lengths.append(end - first)
            tokens.append(torch.arange(offset + first - prefix, offset + end - prefix))
        keep.append(len(reqs) - 1)
        offset += extend
    picked = torch.cat(tokens).to(batch.input_ids.device)
    ends = [p + n for p, n in zip(prefixes, lengths, strict=True)]
    rows = torch.tensor(source)
    device = batch.seq_lens.device
    out = copy(batch)
    out.reqs = reqs
    out.input_ids = batch.input_ids[picked]
    out.prefill_input_ids_cpu = None
    out.out_cache_loc = batch.out_cache_loc[picked]
    out.req_pool_indices = batch.req_pool_indices[rows.to(batch.req_pool_indices.device)]
    out.req_pool_indices_cpu = batch.req_pool_indices_cpu[rows]
    out.prefix_lens = prefixes
    out.extend_lens = lengths
    out.extend_num_tokens = sum(lengths)
    out.seq_lens = torch.tensor(ends, dtype=batch.seq_lens.dtype, device=device)
    out.seq_lens_cpu = torch.tensor(ends, dtype=torch.int64)
    out.seq_lens_sum = sum(ends)
    out.orig_seq_lens = batch.orig_seq_lens[rows.to(device)]
    out.extend_logprob_start_lens = list(lengths)
    out.multimodal_inputs = [None] * len(reqs)
    # Sampling goes on with the batch itself.
    out.sampling_info = None
    out.has_grammar = False
    out.spec_info = None
    return Rows(out, keep)


def hooks() -> dict[str, Callable[..., Any]]:
    """AROUND hooks by the dotted path of what they wrap."""
    return {
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": forward_batch_generation,
        "sglang.srt.model_executor.model_runner.ModelRunner.forward": forward,
    }


def forward_batch_generation(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Note which runs of the batch are to be computed, if not all of it."""
    global _current
    runs = runs_of(batch)
    if not runs:
        return original(worker, batch, *args, **kwargs)
    _current = (batch, runs)
    try:
        return original(worker, batch, *args, **kwargs)
    finally:
        _current = None


def forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the rows in the batch's place, and hand back the logits of each request's last row."""
    global _current
    if _current is None or runner.is_draft_worker:
        return original(runner, forward_batch, *args, **kwargs)
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from agentflow.engine.sglang import hidden_states
    from agentflow.engine.sglang.correction import checks

    (batch, runs), _current = _current, None
    rows = fold(batch, runs)
    folded = ForwardBatch.init_new(
        rows.batch,
        runner,
        capture_hidden_mode=forward_batch.capture_hidden_mode,
        return_hidden_states_before_norm=forward_batch.return_hidden_states_before_norm,
    )
    hidden_states.rearranged(rows.keep)
    checks.rearranged(rows.keep)
    out = original(runner, folded, *args, **kwargs)
    out.logits_output.next_token_logits = out.logits_output.next_token_logits[rows.keep]
    return out


def runs_of(batch: Any) -> dict[int, list[tuple[int, int]]]:
    """The runs of those requests of an extend batch that are not to be computed as a whole.

    None of a batch in which any request wants log-probabilities or hidden states of its prompt: SGLang counts rows.
    """
    if batch is None or not batch.forward_mode.is_extend() or batch.return_logprob or batch.return_hidden_states:
        return {}
    out = {}
    decoding: Sequence[Any] = batch.decoding_reqs or ()
    for place, req in enumerate(batch.reqs):
        state = getattr(req, "agentflow", None)
        plan = getattr(getattr(state, "correction", None), "plan", None)
        if plan is None or not plan.fills or any(req is d for d in decoding):
            continue
        first = batch.prefix_lens[place]
        end = first + batch.extend_lens[place]
        runs = plan.runs(first, end)
        if runs != [(first, end)]:
            out[place] = runs
    return out
