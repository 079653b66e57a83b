"""Reduces the hypotheses from hundreds to a few of each kind, so that reading responses again is
fast.
"""

from __future__ import annotations

import pytest

from mismatch_cli.diagnosis import model, readings


def few_hypotheses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(readings, "FACTORS", (0.5, 4.0))
    patch.setattr(readings, "BASE_FACTORS", (0.25, 4.0))
    patch.setattr(readings, "YARN_FACTORS", (4.0,))
    patch.setattr(readings, "MOST_MISSING", 1)
    patch.setattr(readings, "_MOST_PADDING", 6)
    patch.setattr(readings, "_STEPS", 1)
    patch.setattr(readings, "_ROUND", (32,))
    patch.setattr(model, "_FEW", 3)
