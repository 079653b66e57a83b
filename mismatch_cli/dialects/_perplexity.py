"""The metrics of verl's `compute_offpolicy_metrics`, which ms-swift and slime's mis.py took over.

They differ in what they average, in two clamps, and in whether the ratio of a response is a product or a mean.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mismatch_cli.dialects._line import ENGINE_GAP, Line
from mismatch_cli.dialects._moments import Moments, largest, least, mean
from mismatch_cli.dialects._quantities import MEAN_GAP, MINUS_LOG_P, MINUS_LOG_Q, OfResponses, Quantity, ResponseMeans

_OF_TRAINING, _OF_ROLLOUT = ResponseMeans(MINUS_LOG_P), ResponseMeans(MINUS_LOG_Q)
_ROWS: tuple[tuple[str, str, Quantity, Callable[[Moments], float]], ...] = (
    ("training_ppl", "E_y exp(−mean log π)", OfResponses(np.exp, _OF_TRAINING), mean),
    ("training_log_ppl", "E_y (−mean log π)", _OF_TRAINING, mean),
    ("rollout_ppl", "E_y exp(−mean log μ)", OfResponses(np.exp, _OF_ROLLOUT), mean),
    ("rollout_log_ppl", "E_y (−mean log μ)", _OF_ROLLOUT, mean),
    ("log_ppl_diff", "E_y (−mean d)", MEAN_GAP, mean),
    ("log_ppl_abs_diff", "E_y |mean d|", OfResponses(np.abs, MEAN_GAP), mean),
    ("log_ppl_diff_max", "max_y (−mean d)", MEAN_GAP, largest),
    ("log_ppl_diff_min", "min_y (−mean d)", MEAN_GAP, least),
    ("ppl_ratio", "E_y exp(−mean d)", OfResponses(np.exp, MEAN_GAP), mean),
)


def perplexity_lines(prefix: str, source: str) -> tuple[Line, ...]:
    """The lines under a framework's own prefix."""
    return tuple(
        Line(f"{prefix}{name}", ENGINE_GAP, formula, source, of=of, reduce=reduce)
        for name, formula, of, reduce in _ROWS
    )
