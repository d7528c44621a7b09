"""How far a forecast's probabilities are what they claim to be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["expected_calibration_error"]


def expected_calibration_error(confidence: npt.ArrayLike, right: npt.ArrayLike, *, bins: int = 10) -> float:
    """Mean distance between confidence and accuracy over ``bins`` equal intervals of confidence, by their weight.

    (Guo et al., ICML 2017.) ``confidence`` is that of the likeliest outcome, ``right`` whether it came about. 0 for
    no forecasts.
    """
    confident, hit = np.asarray(confidence, float), np.asarray(right, float)
    if confident.shape != hit.shape:
        raise ValueError(f"{confident.size} confidences for {hit.size} outcomes")
    if not confident.size:
        return 0.0
    which = np.clip((confident * bins).astype(int), 0, bins - 1)
    weight = np.bincount(which, minlength=bins)
    gap = np.abs(np.bincount(which, confident, bins) - np.bincount(which, hit, bins))
    return float(gap[weight > 0].sum() / confident.size)
