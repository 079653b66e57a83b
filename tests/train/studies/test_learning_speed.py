"""Which algorithm learns faster: every number by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mismatch_cli.train.studies.learning_speed import (
    AREA,
    CONTRADICTED,
    FINAL,
    NO_INTERVAL,
    NOT_MEASURED,
    NOT_REACHED,
    NOT_SHOWN,
    ONE_SEED_EACH,
    SECONDS,
    SHOWN,
    STEPS,
    Claim,
    mean_of,
    mean_reward,
    reward_to_reach,
)
from mismatch_cli.train.studies.training import TrainingAnalysis
from tests.train.training_runs import run_of


def claim_of(own: list[list[float | None]], rival: list[list[float | None]], **more: Any) -> Claim:
    sides = [
        [run_of(rewards, name, seed, **more) for seed, rewards in enumerate(curves)]
        for name, curves in (("a", own), ("b", rival))
    ]
    return Claim("a", "b", *sides)


def answers(claim: Claim) -> dict[str, str]:
    return {row.measure: row.answer for row in claim.rows}


FAST = [[0.1, 0.3, 0.9, 0.9], [0.1, 0.4, 0.9, 0.9], [0.1, 0.35, 0.8, 0.9]]
SLOW = [[0.1, 0.2, 0.3, 0.6], [0.1, 0.2, 0.35, 0.8], [0.1, 0.25, 0.3, 0.6]]


def test_the_reward_to_reach_is_half_way_up() -> None:
    curves = [np.array([0.2, 0.5, np.nan]), np.array([np.nan, 0.4, 0.8])]
    assert reward_to_reach(curves) == pytest.approx(((0.2 + 0.4) / 2 + 0.8) / 2)
    assert reward_to_reach([np.array([np.nan])]) is None and reward_to_reach([]) is None


def test_the_mean_reward_of_a_step_is_over_the_runs_that_have_one() -> None:
    runs = [run_of([0.1, None, 0.4]), run_of([0.2, None], first=1), run_of([0.6], first=3)]
    mean_N = mean_reward(runs, np.array([1, 2, 3, 5]))
    assert mean_N.tolist() == pytest.approx([0.15, np.nan, 0.5, np.nan], rel=1e-12, nan_ok=True)


def test_where_a_run_reaches_a_reward() -> None:
    """Exactly, between two steps, across one without a reward, at once, never, without any."""
    run = run_of([0.1, 0.3, None, 0.7, 0.2], first=4, seconds={"update": 2.0, "sync": 1.0})
    for reward, step in ((0.1, 4), (0.05, 4), (0.3, 5), (0.4, 5.5), (0.7, 7), (0.71, np.inf)):
        assert STEPS.value(run, reward) == pytest.approx(step)
        assert SECONDS.value(run, reward) == pytest.approx(3 * (step - 4))
    assert STEPS.value(run, None) is STEPS.value(run_of([None]), 0.5) is None
    assert SECONDS.value(run_of([0.1, 0.9]), 0.5) is None
    # Of a step without times nothing is known: it counts as none
    (*_, last) = run.records
    last["reward"], run.records[1]["seconds"] = 0.9, {"evaluate": 5.0}
    late = run_of([0.1, 0.3, None, 0.7, 0.9], first=4)
    for record, other in zip(late.records, run.records, strict=True):
        record["seconds"] = other["seconds"]
    assert SECONDS.value(late, 0.9) == pytest.approx(9)


def test_the_mean_of_a_measure_is_over_the_runs_that_have_it() -> None:
    runs = [run_of([0.2, 0.8]), run_of([0.5, 0.9]), run_of([None])]
    assert mean_of(AREA, runs, None).value == pytest.approx(0.6)
    assert mean_of(STEPS, runs, 0.5).value == pytest.approx(1.25)
    reached = mean_of(STEPS, runs[:2], 0.85)
    assert (reached.value, reached.note) == (None, "1 of 2 runs")
    assert mean_of(SECONDS, runs, 0.5).value is None


def test_the_numbers_are_those_of_a_hand() -> None:
    seconds = {"sample": 2.0, "update": 1.0, "evaluate": 50.0, "record": 9.0}
    claim = claim_of(FAST, SLOW, seconds=seconds, bad_over_tokens=0.1)
    assert claim.reward == pytest.approx((0.1 + 0.9) / 2)
    area, steps, time = (claim.row(measure) for measure in (AREA, STEPS, SECONDS))
    assert area is not None and steps is not None and time is not None
    apart_S = np.mean(FAST, axis=1) - np.mean(SLOW, axis=1)
    half = 4.303 * apart_S.std(ddof=1) / np.sqrt(3)
    difference = area.difference
    assert (difference.value, difference.low, difference.high) == pytest.approx(
        (apart_S.mean(), apart_S.mean() - half, apart_S.mean() + half)
    )
    assert list(claim.by_seed.values()) == pytest.approx(apart_S.tolist())
    # Between steps 2 and 3, 0.3 to 0.9 and so on; 3 s each, evaluations and traces left out
    fast = [2 + 0.2 / 0.6, 2 + 0.1 / 0.5, 2 + 0.15 / 0.45]
    slow = [3 + 0.2 / 0.3, 3 + 0.15 / 0.45, 3 + 0.2 / 0.3]
    assert (steps.own.value, steps.rival.value) == pytest.approx((np.mean(fast), np.mean(slow)))
    assert time.own.value == pytest.approx(3 * (np.mean(fast) - 1))
    assert answers(claim) == {
        "area": SHOWN,
        "steps_to_reward": SHOWN,  # fewer are better
        "seconds_to_reward": SHOWN,
        "bad_over_tokens": NOT_SHOWN,  # equal
    }
    other = Claim("b", "a", claim.rival_runs, claim.own_runs)
    assert set(answers(other).values()) == {CONTRADICTED, NOT_SHOWN}


def test_a_pilot_whose_difference_was_computed_by_hand() -> None:
    """Reward for rare first tokens, 16 updates a rollout: + 0.154 ± 0.115, paired over 3 seeds; here
    from rewards of two digits.
    """
    clipped = """.12 .18 .34 .57 .73 .83 .91
                 .15 .21 .34 .43 .56 .80 .83
                 .16 .20 .32 .42 .57 .76 .84"""
    trusted = """.12 .20 .48 .75 .92 .96 .96
                 .15 .23 .51 .81 .91 .97 .96
                 .16 .22 .52 .82 .90 .96 .99"""
    curves = [np.array(text.split(), dtype=float).reshape(3, 7) for text in (trusted, clipped)]
    claim = claim_of(*(rewards.tolist() for rewards in curves))
    difference = claim.area.difference
    assert difference.value is not None and difference.high is not None
    assert (difference.value, difference.high - difference.value) == pytest.approx(
        (0.154, 0.115), abs=0.002
    )
    assert claim.answer == SHOWN


def test_the_final_reward_is_left_out_where_it_is_the_mean_of_all_steps() -> None:
    assert claim_of([[0.1] * 10], [[0.2] * 10]).row(FINAL) is None
    row = claim_of([[0.1] * 12], [[0.2] * 11]).row(FINAL)
    assert row is not None and row.own.value == pytest.approx(0.1)


def test_runs_that_do_not_reach_the_reward_are_named() -> None:
    claim = claim_of(FAST, [SLOW[0], [0.1, 0.1, 0.1, 0.2]])
    row = claim.row(STEPS)
    assert row is not None and row.answer == NOT_REACHED and row.not_reached_by == ["b-seed-1"]
    assert row.difference.value is None
    assert (row.own.value is not None, row.rival.note) == (True, "1 of 2 runs")
    assert claim.row(SECONDS) is None  # no times were recorded


def test_without_an_interval_nothing_is_shown() -> None:
    assert claim_of(FAST[:1], SLOW[:1]).answer == ONE_SEED_EACH
    assert claim_of([[0.2], [0.3]], [[0.1], [0.2]]).answer == NO_INTERVAL
    assert claim_of([[None]], [[0.1]]).answer == NOT_MEASURED
    apart = claim_of([[0.2]], [[0.1]])
    (late,) = apart.rival_runs
    late.records[0]["step"] = 9
    assert apart.answer == NOT_MEASURED


def test_only_the_steps_that_both_share_count() -> None:
    short = claim_of([[0.1, 0.3]], [[0.1, 0.2, 0.9, 0.9]])
    assert short.area.difference.value == pytest.approx(0.05)
    step_N, estimates = short.by_step
    assert step_N.tolist() == [1, 2]
    assert [estimate.value for estimate in estimates] == pytest.approx([0, 0.1])


def test_the_first_algorithm_is_compared_with_each_other_and_a_named_pair_alone() -> None:
    rates = (1e-4, 3e-4)
    runs = [run_of([0.1, 0.2], n, config={"learning_rate": rate}) for rate in rates for n in "abc"]
    titles = [claim.title for claim in TrainingAnalysis(runs).claims]
    assert titles == [
        f"a − {rival} · learning rate {rate}" for rate in ("0.0001", "0.0003") for rival in "bc"
    ]
    named = TrainingAnalysis(runs, claimed=("c", "a"))
    assert [claim.title for claim in named.claims] == [
        "c − a · learning rate 0.0001",
        "c − a · learning rate 0.0003",
    ]
    # Each with a rate of its own: compared, and named by it
    (across,) = TrainingAnalysis([runs[0], runs[4]], claimed=("a", "b")).claims
    assert across.title == "a · learning rate 0.0001 − b · learning rate 0.0003"
    assert [claim["answer"] for claim in named.to_json()["claims"]] == ["one seed"] * 2
