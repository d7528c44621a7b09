"""A cost model fitted to passes measured on a real engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agentflow.bench.simulator.cost import Prefill
from agentflow.errors import UsageError

__all__ = ["CalibratedCost", "DecodeSample", "PrefillSample", "TransferSample"]


class PrefillSample(NamedTuple):
    """A measured prefill pass."""

    work: tuple[Prefill, ...]
    seconds: float


class DecodeSample(NamedTuple):
    """``steps`` decode steps of ``batch`` requests that began with ``kv_tokens`` of context in all."""

    batch: int
    kv_tokens: int
    seconds: float
    steps: int = 1


class TransferSample(NamedTuple):
    """A measured transfer between device and host."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedCost:
    """Linear in the quantities that the roofline depends on; every coefficient is at least 0.

    - a prefill pass: ``p_pass + p_request * requests + p_token * new + p_pair * pairs``, with ``pairs`` the query-key
      pairs of attention;
    - a decode step: ``d_pass + d_request * batch + d_kv * kv_tokens``;
    - a transfer: ``t_pass + t_token * tokens``.
    """

    p_pass: float = 0.0
    p_request: float = 0.0
    p_token: float = 0.0
    p_pair: float = 0.0
    d_pass: float = 0.0
    d_request: float = 0.0
    d_kv: float = 0.0
    t_pass: float = 0.0
    t_token: float = 0.0
    load_overlaps: bool = False

    @classmethod
    def fit(
        cls,
        prefills: Sequence[PrefillSample],
        decodes: Sequence[DecodeSample],
        transfers: Sequence[TransferSample] = (),
        *,
        load_overlaps: bool = False,
    ) -> CalibratedCost:
        """Least squares of relative errors, so that short passes count as much as long ones.

        Raises :class:`~agentflow.errors.UsageError` without samples of both kinds of pass.
        """
        if not prefills or not decodes:
            raise UsageError("a calibration needs samples of prefill and of decode passes")
        p = _fit(
            [
                (1.0, float(len(s.work)), float(sum(w.new for w in s.work)), sum(w.pairs for w in s.work))
                for s in prefills
            ],
            [s.seconds for s in prefills],
        )
        d = _fit(
            [
                (
                    float(s.steps),
                    float(s.steps * s.batch),
                    s.steps * s.kv_tokens + s.batch * s.steps * (s.steps - 1) / 2,
                )
                for s in decodes
            ],
            [s.seconds for s in decodes],
        )
        t = (
            _fit([(1.0, float(s.tokens)) for s in transfers], [s.seconds for s in transfers])
            if transfers
            else [0.0, 0.0]
        )
        return cls(
            p_pass=p[0],
            p_request=p[1],
            p_token=p[2],
            p_pair=p[3],
            d_pass=d[0],
            d_request=d[1],
            d_kv=d[2],
            t_pass=t[0],
            t_token=t[1],
            load_overlaps=load_overlaps,
        )

    def prefill(self, work: Sequence[Prefill]) -> float:
        new = sum(w.new for w in work)
        pairs = sum(w.pairs for w in work)
        return self.p_pass + self.p_request * len(work) + self.p_token * new + self.p_pair * pairs

    def decode(self, batch: int, kv_tokens: int, steps: int = 1) -> float:
        held = steps * kv_tokens + batch * steps * (steps - 1) / 2
        return steps * (self.d_pass + self.d_request * batch) + self.d_kv * held

    def transfer(self, tokens: int) -> float:
        return self.t_pass + self.t_token * tokens

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CalibratedCost:
        """The inverse of :meth:`to_json`. Raises UsageError for keys that are not its own."""
        try:
            return cls(**data)
        except TypeError as error:
            raise UsageError(f"this is no calibration: {error}") from error


def _fit(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Coefficients of at least 0: a coefficient that comes out negative is left out and the rest fitted again."""
    if any(s <= 0 for s in seconds):
        raise UsageError("measured times must be positive")
    target = np.asarray(seconds, dtype=np.float64)
    matrix: npt.NDArray[np.float64] = np.asarray(rows, dtype=np.float64) / target[:, None]
    columns = list(range(matrix.shape[1]))
    out = [0.0] * matrix.shape[1]
    while columns:
        scale = np.linalg.norm(matrix[:, columns], axis=0)
        scale[scale == 0] = 1.0
        found, *_ = np.linalg.lstsq(matrix[:, columns] / scale, np.ones(len(target)), rcond=None)
        values = found / scale
        worst = int(np.argmin(found))
        if found[worst] >= 0:
            for column, value in zip(columns, values, strict=True):
                out[column] = float(value)
            break
        del columns[worst]
    return out
