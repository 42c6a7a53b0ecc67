"""Ranges for activations whose scale is fixed beforehand: what of a histogram is kept, what is cut.

A histogram counts absolute values in equal bins from zero to the largest one seen. Called by
`calibration.py`.
"""

from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64

# dynamic: a scale per token, found while running. kl, percentile: one scale for a projection.
Range = Literal["dynamic", "kl", "percentile"]
RANGES: tuple[Range, ...] = get_args(Range)
NUM_BINS = 2048
LEVELS = 128  # absolute values that int8 tells apart
PERCENTILE = 99.99


def choose_range(counts: Float64[np.ndarray, " bins"], largest: float, method: Range) -> float:
    """The absolute value up to which activations are kept; what is above is cut off to it."""
    total = counts.sum()
    if not total or not largest:
        return largest
    if method == "percentile":
        kept = int(np.searchsorted(np.cumsum(counts), total * PERCENTILE / 100)) + 1
    else:
        ends = range(LEVELS, len(counts) + 1, LEVELS // 8)
        kept = min(ends, key=lambda end: divergence_if_cut(counts, end))
    return largest * min(kept, len(counts)) / len(counts)


def divergence_if_cut(counts: Float64[np.ndarray, " bins"], end: int) -> float:
    """KL divergence of the distribution from the one that is left after cutting and rounding.

    The method of TensorRT's 8-bit calibration: what is cut off counts in the last bin that is kept;
    rounding spreads what falls on a level evenly over the bins of that level that are not empty.
    """
    kept = counts[:end].copy()
    before = kept.copy()
    before[-1] += counts[end:].sum()
    level = np.arange(end) * LEVELS // end
    sums = np.bincount(level, kept, LEVELS)
    filled = np.bincount(level, before > 0, LEVELS)
    after = np.where(before > 0, sums[level] / np.maximum(filled[level], 1), 0.0)
    before, after = before / before.sum(), after / max(after.sum(), 1e-30)
    some = before > 0
    return float((before[some] * np.log(before[some] / np.maximum(after[some], 1e-30))).sum())
