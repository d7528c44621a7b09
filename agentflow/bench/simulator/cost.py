"""How long a forward pass and a transfer take: published model shapes on published hardware rates.

A pass is as long as the slower of two things (a roofline): its arithmetic at the accelerator's peak rate, or the
bytes it reads at the memory's bandwidth, each reduced by an efficiency.

Shapes, from the models' ``config.json`` on Hugging Face:

- Qwen/Qwen3-14B: 40 layers, hidden 5120, 40 heads, 8 KV heads, head size 128, MLP 17408, vocabulary 151936, untied.
- Qwen/Qwen3-32B: 64 layers, hidden 5120, 64 heads, 8 KV heads, head size 128, MLP 25600, vocabulary 151936, untied.
- meta-llama/Llama-3.1-8B: 32 layers, hidden 4096, 32 heads, 8 KV heads, head size 128, MLP 14336, vocabulary 128256,
  untied.

Rates, from NVIDIA's data sheets (SXM versions; dense BF16, without sparsity; PCIe for one direction, half of the
figure printed there, which is for both):

- A100 80GB: 312 TFLOPS, 2,039 GB/s, PCIe 4.0 x16 32 GB/s.
- H100 80GB: 989 TFLOPS, 3,350 GB/s, PCIe 5.0 x16 64 GB/s.
- H200 141GB: 989 TFLOPS, 4,800 GB/s, PCIe 5.0 x16 64 GB/s.

The efficiencies are assumptions, not published figures; :class:`Efficiency` names each. A comparison of policies
on one machine hardly depends on them; absolute seconds do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from agentflow.errors import UsageError

__all__ = [
    "Cost",
    "Efficiency",
    "HARDWARE",
    "Hardware",
    "MODELS",
    "ModelShape",
    "Prefill",
    "RooflineCost",
    "pool_tokens",
]


class Prefill(NamedTuple):
    """One request's share of a prefill pass: ``new`` tokens computed after ``cached`` ones."""

    new: int
    cached: int

    @property
    def pairs(self) -> float:
        """Query-key pairs that attention looks at."""
        return self.new * (self.cached + (self.new + 1) / 2)


class Cost(Protocol):
    """Seconds that an engine's work takes."""

    @property
    def load_overlaps(self) -> bool:
        """Whether loading from the host runs beside the prefill that waits for it, layer by layer."""
        ...

    def prefill(self, work: Sequence[Prefill]) -> float:
        """Seconds of one prefill pass over several requests."""
        ...

    def decode(self, batch: int, kv_tokens: int, steps: int = 1) -> float:
        """Seconds of ``steps`` decode steps of ``batch`` requests whose contexts hold ``kv_tokens`` in all at the
        first; every step adds ``batch`` to that. Must grow with ``steps``."""
        ...

    def transfer(self, tokens: int) -> float:
        """Seconds to move the KV of ``tokens`` tokens between device and host, one way."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated MLP, in 16-bit weights and KV."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int
    bytes_per_number: int = 2

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers, without embeddings and output head: ``L (2 h q + 2 h k + 3 h m)`` with hidden
        size ``h``, query width ``q``, key width ``k`` and MLP width ``m``; norms left out."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        return self.layers * self.hidden * (2 * query + 2 * key + 3 * self.mlp)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, embeddings and output head included."""
        return self.bytes_per_number * (self.layer_parameters + 2 * self.hidden * self.vocabulary)

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights that a pass reads: all but the input embeddings, of which it reads a few rows."""
        return self.bytes_per_number * (self.layer_parameters + self.hidden * self.vocabulary)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of one token."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.bytes_per_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator: peak dense 16-bit FLOP/s, memory bytes and bytes/s, PCIe bytes/s one way."""

    name: str
    flops: float
    memory: float
    bandwidth: float
    pcie: float


MODELS: Mapping[str, ModelShape] = {
    m.name: m
    for m in (
        ModelShape(
            name="qwen3-14b",
            layers=40, hidden=5120, heads=40, kv_heads=8, head_size=128, mlp=17408, vocabulary=151936,
        ),
        ModelShape(
            name="qwen3-32b",
            layers=64, hidden=5120, heads=64, kv_heads=8, head_size=128, mlp=25600, vocabulary=151936,
        ),
        ModelShape(
            name="llama-3.1-8b",
            layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, mlp=14336, vocabulary=128256,
        ),
    )
}  # fmt: skip
HARDWARE: Mapping[str, Hardware] = {
    h.name: h
    for h in (
        Hardware(name="a100-80g", flops=312e12, memory=80e9, bandwidth=2.039e12, pcie=32e9),
        Hardware(name="h100", flops=989e12, memory=80e9, bandwidth=3.35e12, pcie=64e9),
        Hardware(name="h200", flops=989e12, memory=141e9, bandwidth=4.8e12, pcie=64e9),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the peak rates that a well-tuned engine reaches, and what a pass costs besides. Assumptions.

    ``prefill`` and ``attention`` are shares of peak FLOP/s, ``memory`` of HBM bandwidth, ``pcie`` of PCIe
    bandwidth, ``parallel`` of the sum of several accelerators. ``pass_seconds`` is launch and scheduling time of a
    pass, ``transfer_seconds`` that of a transfer.
    """

    prefill: float = 0.55
    attention: float = 0.35
    memory: float = 0.80
    pcie: float = 0.80
    parallel: float = 0.85
    pass_seconds: float = 0.002
    transfer_seconds: float = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost:
    """Cost of a model on ``gpus`` accelerators by tensor parallelism.

    Prefill of ``n`` new tokens after ``c`` cached ones, summed over the requests of a pass:

        arithmetic = 2 P n / (F e_p) + 4 L q n (c + (n + 1) / 2) / (F e_a) + 2 h v / (F e_p)
        memory     = (read + (c + n) kv) / (B e_m)

    with ``P`` parameters of the layers, ``q`` width of the queries, ``h v`` the output head (last token only), and
    ``read`` the bytes of the weights without input embeddings. A decode step of ``b`` requests with ``T`` tokens of
    context in all:

        arithmetic = 2 b (P + h v) / (F e_p) + 4 L q T / (F e_a)
        memory     = (read + T kv) / (B e_m)

    A pass takes the larger of the two, and ``pass_seconds``.
    """

    model: ModelShape
    hardware: Hardware
    gpus: int = 1
    efficiency: Efficiency = field(default_factory=Efficiency)
    load_overlaps: bool = True

    @classmethod
    def of(cls, model: str, hardware: str, *, gpus: int = 1, efficiency: Efficiency | None = None) -> RooflineCost:
        """By the names in :data:`MODELS` and :data:`HARDWARE`. Raises UsageError for names not there."""
        if model not in MODELS or hardware not in HARDWARE:
            raise UsageError(f"no cost model of {model} on {hardware}; known: {sorted(MODELS)} on {sorted(HARDWARE)}")
        return cls(model=MODELS[model], hardware=HARDWARE[hardware], gpus=gpus, efficiency=efficiency or Efficiency())

    @property
    def _share(self) -> float:
        return self.gpus * (self.efficiency.parallel if self.gpus > 1 else 1.0)

    def prefill(self, work: Sequence[Prefill]) -> float:
        m, e = self.model, self.efficiency
        flops, bandwidth = self.hardware.flops * self._share, self.hardware.bandwidth * self._share
        new = sum(w.new for w in work)
        held = new + sum(w.cached for w in work)
        pairs = sum(w.pairs for w in work)
        linear = 2 * m.layer_parameters * new + 2 * m.hidden * m.vocabulary * len(work)
        attention = 4 * m.layers * m.heads * m.head_size * pairs
        arithmetic = linear / (flops * e.prefill) + attention / (flops * e.attention)
        memory = (m.read_bytes + held * m.kv_bytes) / (bandwidth * e.memory)
        return max(arithmetic, memory) + e.pass_seconds

    def decode(self, batch: int, kv_tokens: int, steps: int = 1) -> float:
        m, e = self.model, self.efficiency
        flops, bandwidth = self.hardware.flops * self._share, self.hardware.bandwidth * self._share
        per_token = 4 * m.layers * m.heads * m.head_size / (flops * e.attention)
        fixed = 2 * batch * (m.layer_parameters + m.hidden * m.vocabulary) / (flops * e.prefill)
        arithmetic = (fixed + per_token * kv_tokens, per_token * batch)
        reads = m.kv_bytes / (bandwidth * e.memory)
        memory = (m.read_bytes / (bandwidth * e.memory) + reads * kv_tokens, reads * batch)
        return sum_of_larger(arithmetic, memory, steps) + steps * e.pass_seconds

    def transfer(self, tokens: int) -> float:
        e = self.efficiency
        return e.transfer_seconds + tokens * self.model.kv_bytes / (self.hardware.pcie * self.gpus * e.pcie)


def sum_of_larger(a: tuple[float, float], b: tuple[float, float], steps: int) -> float:
    """Sum over ``k < steps`` of the larger of two lines ``first + slope * k``, without a loop."""
    (a0, a1), (b0, b1) = a, b
    if a0 < b0:
        a0, a1, b0, b1 = b0, b1, a0, a1
    cut = steps
    if (b1 - a1) * steps > a0 - b0:  # the other line is larger from the cut on
        cut = min(steps, int((a0 - b0) / (b1 - a1)) + 1)
    total = cut * a0 + a1 * cut * (cut - 1) / 2
    rest = steps - cut
    return total + rest * (b0 + b1 * cut) + b1 * rest * (rest - 1) / 2


def pool_tokens(model: ModelShape, hardware: Hardware, *, gpus: int = 1, share: float = 0.88) -> int:
    """Tokens of KV that fit: ``(memory * share - weights) / KV bytes of a token`` over all ``gpus``.

    ``share`` is SGLang's ``mem_fraction_static``. Raises :class:`~agentflow.errors.UsageError` when the weights
    alone do not fit.
    """
    free = hardware.memory * gpus * share - model.weight_bytes
    if free < model.kv_bytes:
        raise UsageError(
            f"{model.name} needs {model.weight_bytes / 1e9:.1f} GB for weights and {gpus} x {hardware.name} gives"
            f" {hardware.memory * gpus * share / 1e9:.1f} GB: take more or larger accelerators"
        )
    return int(free / model.kv_bytes)
