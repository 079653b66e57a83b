"""The order of metrics on the page, and the keys by which their values are read."""

from __future__ import annotations

import pytest

from mismatch_cli.base.json_form import to_json
from mismatch_cli.metrics.gap_table import RESPONSES, SEQUENCE, metrics_in_group
from mismatch_cli.metrics.update_table import CLIPPING, THEORY, TRAINING, update_record
from tests.metrics.clipping.world import (
    EVERYTHING,
    PLAIN,
    plain_algorithms,
    result_of,
    summarise,
    world,
)

UNITS = {"share", "tokens", "probability", "nats", "reward", "1", "s", "probability or nats"}


@pytest.mark.parametrize(
    ("group", "keys"),
    [
        ("Ratio π/μ", ["ratio_mean", "ratio_min"]),
        (SEQUENCE, ["sequence_slope", "sequence_kl"]),
        (RESPONSES, ["reward_mean", "equal_rewards_share"]),
    ],
)
def test_what_matters_most_of_a_group_comes_first(group: str, keys: list[str]) -> None:
    assert [metric.key for metric in metrics_in_group(group)][:2] == keys


def test_rows_have_the_keys_of_the_values_that_they_explain() -> None:
    summary = summarise(world(0, 20), needs=PLAIN, algorithms=plain_algorithms(), theory=True)
    numbers = summary.result(0)
    assert set(THEORY) == set(to_json(numbers.theory)) - {"tv_max_of", "kl_max_of"}
    assert set(CLIPPING) >= set(THEORY) | {"blocked", "mu_blocked", "over_tokens"}
    assert update_record(numbers)["blocked"] == numbers.algorithms[-1].blocked.all.value


def test_rows_have_the_keys_of_the_errors_of_an_approximation() -> None:
    result = result_of(world(0, 20), needs=EVERYTHING, algorithms=plain_algorithms())
    errors = {"mean", "bias", "rank_correlation", "wrong_mask"}
    assert errors <= set(result["approximation"]["rows"][0]) & set(CLIPPING)


def test_a_key_is_one_word_for_programs_and_a_label_is_for_people() -> None:
    for table in (CLIPPING, TRAINING):
        for key, metric in table.items():
            assert key.isidentifier() and key.isascii() and key.islower(), key
            assert metric.unit in UNITS, key
