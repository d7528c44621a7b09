"""Seeds of single calls, which SGLang obeys only under its deterministic inference.

That mode needs kernels that a CPU does not have. Its sampler takes a seed for every row of a batch and needs a
kernel only for the noise, which torch makes here. Calls without a seed get one of their own.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from agentflow.engine.sglang import cpu_platform

if TYPE_CHECKING:
    import torch

__all__ = ["install", "multinomial_with_seed"]


def install() -> bool:
    """Make the scheduler obey ``sampling_seed``. False, and nothing is changed, on another platform than ours."""
    if cpu_platform.activate() is None:
        return False
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    sampler.multinomial_with_seed = multinomial_with_seed
    original = SamplingBatchInfo.from_schedule_batch
    if getattr(original, "agentflow_seeds", False):
        return True

    def from_schedule_batch(cls: type, batch: Any, vocab_size: int) -> Any:
        import torch

        info = original.__func__(cls, batch, vocab_size)
        if info.sampling_seed is None:
            seeds = [_seed(req) for req in batch.reqs]
            info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
        return info

    from_schedule_batch.agentflow_seeds = True  # type: ignore[attr-defined]
    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)
    return True


def multinomial_with_seed(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One index a row of ``logprobs`` (n, m), drawn by its seed and position alone; shape (n, 1).

    The largest of the log-probabilities plus Gumbel noise is a draw from their distribution.
    """
    import torch

    rows, columns = logprobs.shape
    noise = torch.empty(rows, columns, dtype=torch.float64)
    for row, (number, position) in enumerate(zip(seed.tolist(), positions.view(-1).tolist(), strict=True)):
        generator = torch.Generator().manual_seed((number * 1_000_003 + position) % 2**63)
        torch.rand(columns, generator=generator, dtype=torch.float64, out=noise[row])
    gumbel = noise.clamp_(min=1e-300).log_().neg_().log_().neg_()
    return (logprobs + gumbel).argmax(dim=1, keepdim=True)


def _seed(req: Any) -> int:
    given = req.sampling_params.sampling_seed
    if given is not None:
        return int(given)
    return random.Random(req.rid).getrandbits(31)  # ids are unique, and a retracted call keeps its seed
