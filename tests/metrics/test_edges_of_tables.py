"""The order of metrics on the page."""

from __future__ import annotations

import pytest

from mismatch_cli.metrics.gap_table import RESPONSES, SEQUENCE, in_group


@pytest.mark.parametrize(
    ("group", "keys"),
    [
        ("Ratio π/μ", ["ratio_mean", "ratio_min"]),
        (SEQUENCE, ["sequence_slope", "sequence_kl"]),
        (RESPONSES, ["reward_mean", "equal_rewards_share"]),
    ],
)
def test_what_matters_most_of_a_group_comes_first(group: str, keys: list[str]) -> None:
    assert [metric.key for metric in in_group(group)][:2] == keys
