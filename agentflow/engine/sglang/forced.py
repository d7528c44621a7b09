"""Replay of recorded calls: the tokens of an answer are given, and the model only computes their KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["PARAMETER", "forced_tokens_processor"]

#: Where the tokens are in a request's ``custom_params``.
PARAMETER = "agentflow_forced_tokens"


def forced_tokens_processor() -> str:
    """The logit processor as SGLang takes it with a request: it forces ``custom_params[PARAMETER]`` one by one.

    Once the tokens are used up, sampling goes on as usual.
    """
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class ForcedTokens(CustomLogitProcessor):  # type: ignore[misc]
        def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
            for row, parameters in enumerate(custom_param_list or ()):
                tokens = parameters["agentflow_forced_tokens"]
                position = len(parameters["__req__"].output_ids)
                if position < len(tokens):
                    logits[row, :] = -float("inf")
                    logits[row, tokens[position]] = 0.0
            return logits

    return str(ForcedTokens.to_str())
