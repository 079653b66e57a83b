"""Ratios that only rows of data name."""

from mismatch_cli.rules.policies import Ratio

TRAINER_RECOMPUTED = Ratio("trainer", "recomputed")  # r′
TRAINER_AVERAGE = Ratio("trainer", "average")  # r̄
