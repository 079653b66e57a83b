"""How the terms of single tokens become one loss: the factor of each response's tokens in a minibatch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mismatch_cli.errors import UsageError
from mismatch_cli.registry import unknown

# Of N responses with lengths |y| and at most T_max tokens each.
_SCALES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "sequence-sum": lambda length_S, longest: np.full(len(length_S), 1 / (len(length_S) * longest)),
    "sequence-mean": lambda length_S, _: 1 / (len(length_S) * np.maximum(length_S, 1)),
    "token-mean": lambda length_S, _: np.full(len(length_S), 1 / max(length_S.sum(), 1)),
}
AGGREGATIONS = tuple(_SCALES)


def response_scale(aggregation: str, length_S: np.ndarray, max_tokens: int) -> np.ndarray:
    """What every token of each response is multiplied with, float64.

    sequence-sum: 1/(N · T_max), the sum over a response by a constant, then the mean (Dr. GRPO, arXiv 2503.20783; the
    sanity test). sequence-mean: 1/(N · |y|), the only one that divides by a response's own length. token-mean: 1/Σ|y|.
    The terms of GSPO are its response's, each at all |y| tokens. A `UsageError` for another name.
    """
    if aggregation not in _SCALES:
        raise UsageError(unknown("aggregation", aggregation, AGGREGATIONS))
    return _SCALES[aggregation](np.asarray(length_S, dtype=np.int64), max_tokens)
