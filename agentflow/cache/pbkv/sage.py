"""The learned predictor's network: GraphSAGE over the call graph, attention over the path, the model's hidden state.

Importing this module loads torch; ``learned`` does it when a learned backbone is used.

The network corrects a first-order Markov chain: its logits are the chain's plus what it has learned, and before
training the correction is nothing. Agents are scored by the dot product with their embeddings, so their set is open.
The end is forecast as a hazard per step, so that its probability never falls with the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from agentflow.cache.pbkv.graph_data import FEATURES, CallGraph
from agentflow.cache.pbkv.inputs import CONTEXT, LENGTH, PER_AGENT, RUNS, Inputs
from agentflow.cache.pbkv.layers import Drawn, Dropout, MeanConvolution, RelationalConvolution

__all__ = ["Network", "Shape", "forecast", "network_arrays", "tensors_of"]

#: Share of the hidden states that are left out while learning.
WITHOUT = 0.25

Backbone = Literal["sage", "rgcn"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What fixes the network's tensors. ``hidden`` is the size of the model's hidden state, 0 where it is not used.

    The switches leave out one of the three signals each, for ablations.
    """

    backbone: Backbone = "sage"
    steps: int = 4
    width: int = 32
    hidden: int = 0
    dropout: float = 0.1
    use_current: bool = True
    use_path: bool = True
    use_text: bool = True


class Network(nn.Module):
    """From a call graph and paths over it to logits of agents and of the end, ``steps`` at once.

    With ``geometric`` its graph layers are torch-geometric's, otherwise the same in plain torch: parameters of one
    fit the other. First weights and dropout are drawn from a generator of its own, of ``seed``.
    """

    def __init__(self, shape: Shape, *, geometric: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.generator = torch.Generator().manual_seed(seed)
        with Drawn(self.generator):
            self._build(shape, geometric)

    def _build(self, shape: Shape, geometric: bool) -> None:
        width = shape.width
        self.describe = nn.Linear(FEATURES, width)
        sage: Any = MeanConvolution
        relational: Any = RelationalConvolution
        if geometric:
            from agentflow.cache.pbkv.geometric import relational_convolution as relational
            from agentflow.cache.pbkv.geometric import sage_convolution as sage
        if shape.backbone == "sage":
            self.onward = sage(width)
            self.back = sage(width)
        else:
            # Relations: how many steps lie between the two agents, and the same backwards.
            self.relations = relational(width, 8)
        self.mix = nn.Linear(2 * width if shape.backbone == "sage" else width, width)
        self.places = nn.Embedding(LENGTH, width)
        self.runs = nn.Embedding(RUNS, width)
        self.query = nn.Linear(width + CONTEXT, 2 * width)
        self.key = nn.Linear(width, 2 * width)
        self.value = nn.Linear(width, 2 * width)
        self.text = nn.Linear(shape.hidden, width) if shape.hidden else None
        self.fuse = nn.Sequential(
            nn.Linear(width + 2 * width + CONTEXT + width + 1, 2 * width),
            nn.GELU(),
            Dropout(shape.dropout, self.generator),
        )
        self.chooses = nn.Linear(2 * width, shape.steps * width)
        self.target = nn.Linear(width, width)
        self.weighs = nn.Linear(2 * width, shape.steps * PER_AGENT)
        self.ends = nn.Linear(2 * width, shape.steps)
        self.trust = nn.Parameter(torch.ones(2, shape.steps))
        self.temperature = nn.Parameter(torch.ones(2, shape.steps), requires_grad=False)
        self.drop = Dropout(shape.dropout, self.generator)
        for layer in (self.chooses, self.weighs, self.ends):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def embed(self, features: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        """Embeddings (agents, width) from features, edges (2, e) and the edges' relations (e)."""
        x = torch.tanh(self.describe(features))
        if self.shape.backbone == "sage":
            near = edges[:, kinds == 0]
            # Messages go from row 0 to row 1: an agent hears of those before it, and of those after it.
            heard = torch.cat([self.onward(x, near), self.back(x, near.flip(0))], dim=1)
        else:
            both = torch.cat([edges, edges.flip(0)], dim=1)
            kind = kinds.clamp(max=3)
            heard = self.relations(x, both, torch.cat([kind, kind + 4]))
        return cast(Tensor, x + self.mix(torch.relu(self.drop(heard))))

    def forward(self, embedded: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probabilities of agents given a next call (b, steps, agents), and log-odds of the end (b, steps)."""
        shape, path = self.shape, given["path"]
        b, n = len(path), len(embedded)
        known = torch.cat([embedded, embedded.new_zeros(1, shape.width)])
        rows = path.remainder(n + 1).flatten()  # -1 is the row of zeros
        held = known.index_select(0, rows).view(b, LENGTH, shape.width)
        context = given["context"] * float(shape.use_path)
        current = held[:, 0] * float(shape.use_current)
        fused = torch.cat([current, self._path(held, given, context), context, self._text(given, b)], dim=1)
        state = self.fuse(fused)
        wanted = self.chooses(state).view(b, shape.steps, shape.width)
        scores = wanted @ self.target(embedded).T / math.sqrt(shape.width)
        if shape.use_path:
            weights = self.weighs(state).view(b, shape.steps, PER_AGENT)
            scores = scores + weights @ given["agents"].transpose(1, 2)
        scores = scores + self.trust[0][:, None] * given["markov"][:, :, :n]
        scores = scores / self.temperature[0][:, None]
        scores = scores.masked_fill(~given["allowed"][:, None], -1e9)
        ends = (self.ends(state) + self.trust[1] * given["markov"][:, :, n]) / self.temperature[1]
        return torch.log_softmax(scores, dim=-1), ends

    def _path(self, held: Tensor, given: dict[str, Tensor], context: Tensor) -> Tensor:
        """Scaled dot-product attention, of two heads, from the newest call over all of the path."""
        b, width = len(held), self.shape.width
        if not self.shape.use_path:
            return held.new_zeros(b, 2 * width)
        tokens = held + self.places.weight + self.runs.weight.index_select(0, given["runs"].flatten()).view_as(held)
        query = self.query(torch.cat([held[:, 0], context], dim=1)).view(b, 2, width)
        there = given["path"] >= 0
        there[:, 0] = True
        # Keys and values are linear in the tokens: the query is turned to the tokens instead, and their weighted sum is
        # turned to a value. The keys' bias is the same for all of a path and falls out of the softmax.
        turned = torch.einsum("bhd,hdw->bhw", query, self.key.weight.view(2, width, width))
        scores = turned @ tokens.transpose(1, 2) / math.sqrt(width)
        weights = torch.softmax(scores.masked_fill(~there[:, None], -torch.inf), dim=-1)
        found = torch.einsum("bhw,hdw->bhd", weights @ tokens, self.value.weight.view(2, width, width))
        found = found + self.value.bias.view(2, width)
        return self.drop(found.reshape(b, 2 * width))  # type: ignore[no-any-return]

    def _text(self, given: dict[str, Tensor], b: int) -> Tensor:
        if self.text is None or not self.shape.use_text:
            return given["context"].new_zeros(b, self.shape.width + 1)
        there = given["has_hidden"]
        if self.training:  # so that it learns to do without, too
            there = there * (torch.rand(there.shape, generator=self.generator) > WITHOUT)
        return torch.cat([self.drop(torch.tanh(self.text(given["hidden"]))) * there, there], dim=1)

    def probabilities(self, agents: Tensor, ends: Tensor) -> Tensor:
        """Distributions (b, steps, agents + 1), the end last, from what :meth:`forward` gives."""
        alive = torch.cumprod(torch.sigmoid(-ends), dim=1)[:, :, None]
        return torch.cat([agents.exp() * alive, 1.0 - alive], dim=-1)


def tensors_of(inputs: Inputs) -> dict[str, Tensor]:
    """The inputs as tensors that share their memory."""
    return {name: torch.from_numpy(getattr(inputs, name)) for name in Inputs.__slots__}


def network_arrays(graph: CallGraph) -> tuple[Tensor, Tensor, Tensor]:
    """What :meth:`Network.embed` takes, of a graph."""
    edges, kinds = graph.edge_lists()
    return torch.from_numpy(graph.features()), torch.from_numpy(edges), torch.from_numpy(kinds)


def forecast(network: Network, embedded: Tensor, inputs: Inputs) -> npt.NDArray[np.float32]:
    """Distributions (b, steps, agents + 1) as arrays, without gradients."""
    with torch.inference_mode():
        given: Any = tensors_of(inputs)
        return cast("npt.NDArray[np.float32]", network.probabilities(*network(embedded, given)).numpy())
