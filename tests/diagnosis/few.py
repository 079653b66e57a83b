"""Reduces the hypotheses from hundreds to a few of each kind, so that reading responses again is
fast.
"""

from __future__ import annotations

import pytest

from mismatch_cli.diagnosis import hypotheses, model, readings


def few_hypotheses(patch: pytest.MonkeyPatch) -> None:
    for module in (readings, hypotheses):
        patch.setattr(module, "FACTORS", (0.5, 4.0))
        patch.setattr(module, "BASE_FACTORS", (0.25, 4.0))
    patch.setattr(hypotheses, "YARN_FACTORS", (4.0,))
    patch.setattr(hypotheses, "MOST_MISSING", 1)
    patch.setattr(hypotheses, "ROUND", (32,))
    patch.setattr(readings, "PADDINGS", (1, 4, 6))
    patch.setattr(readings, "STEPS", 1)
    patch.setattr(model, "FEW", 3)
