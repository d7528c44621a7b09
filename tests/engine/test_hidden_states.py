"""Hidden states of prompts' last tokens, taken inside the real SGLang without a forward pass of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from agentflow.engine.base import Call, Completion, Coordinates, Sampling
from agentflow.engine.embedded import EmbeddedEngine
from agentflow.engine.models import random_model

pytestmark = pytest.mark.engine


@pytest.fixture
def keeping(engine: EmbeddedEngine) -> Iterator[EmbeddedEngine]:
    """The session's engine, which keeps hidden states."""
    engine.control("hidden", {"keep": True})
    yield engine
    engine.control("hidden", {"keep": False})


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1_000, 40_000) for _ in range(tokens)]


def ask(engine: EmbeddedEngine, ids: list[int], n: int = 4) -> Completion:
    at = Coordinates(workflow="w", agent="a")
    return engine.generate(Call(token_ids=ids, at=at, sampling=Sampling(max_tokens=n, ignore_eos=True)))


def kept(engine: EmbeddedEngine, *requests: str) -> dict[str, npt.NDArray[np.float32]]:
    found = engine.control("hidden", {"requests": list(requests)})[0]["hidden"]
    return {request: np.array(vector, np.float32) for request, vector in found.items()}


def expected(prompts: list[list[int]]) -> list[npt.NDArray[np.float32]]:
    """The same from a forward pass of transformers, which shares no code with SGLang's."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(random_model().path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids])).last_hidden_state[0, -1].numpy() for ids in prompts]


def test_the_vector_is_that_of_the_prompts_last_token(keeping: EmbeddedEngine) -> None:
    prompts = [prompt(seed, tokens) for seed, tokens in ((1, 5), (2, 300), (3, 64), (4, 1))]
    prompts.append([*prompts[1], *prompt(5, 20)])  # its beginning is cached by then
    with ThreadPoolExecutor(3) as pool:  # so that several are prefilled in one batch, others while some decode
        answers = list(pool.map(lambda ids: ask(keeping, ids, 12), prompts[:-1]))
    answers.append(ask(keeping, prompts[-1]))
    assert answers[-1].usage.cached_device >= 299
    found = kept(keeping, *(a.request_id for a in answers))
    for answer, reference in zip(answers, expected(prompts), strict=True):
        vector = found[answer.request_id]
        assert vector.shape == reference.shape
        assert np.abs(vector - reference).max() < 1e-4 * max(1.0, np.abs(reference).max())


def test_nothing_is_kept_unless_somebody_wants_it(engine: EmbeddedEngine) -> None:
    answer = ask(engine, prompt(7, 30))
    assert kept(engine, answer.request_id) == {}
