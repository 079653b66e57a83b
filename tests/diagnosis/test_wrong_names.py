"""Faults that were named wrongly: each is named as what it is or left unexplained, never as another
one, and no gap far above a healthy one gets a ✔.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lab.faults import (
    biased_token,
    minus_entropy,
    mixed_with_uniform,
    of_the_likeliest,
    response_mean,
    running_sum,
)
from lab.pool import Pool
from mismatch_cli.diagnosis.diagnose import FLOOR_STAGE, Findings, module
from mismatch_cli.report.pages.diagnosis import answer
from tests.diagnosis.conftest import finding_of, judged, judged_with_earlier, sampled_alone, whole
from tests.diagnosis.planted import BY_NAME

TIMES_HEALTHY = 3.0
Plant = Callable[[Pool], None]


def planted(plant: Callable[[Pool, float, np.random.Generator], None], severity: float) -> Plant:
    return lambda pool: plant(pool, severity, np.random.default_rng(5))


def with_dropout(pool: Pool) -> None:
    """What dropout makes of a trainer: flatter, and noisier than it is flat."""
    rng, logp_T = np.random.default_rng(0), pool.tokens["logp_trainer"].astype(np.float64)
    odds_T = logp_T - np.log(-np.expm1(np.minimum(logp_T, -1e-9)))
    odds_T = 0.97 * odds_T + rng.standard_t(2, len(odds_T)) * 0.3
    pool.tokens["logp_trainer"] = -np.logaddexp(0, -odds_T).astype(np.float32)
    pool.ranks.clear()


def swapped_in_pairs(pool: Pool) -> None:
    logp_T = pool.tokens["logp_trainer"]
    even = len(logp_T) // 2 * 2
    logp_T[:even] = logp_T[:even].reshape(-1, 2)[:, ::-1].reshape(-1)


def sorted_values(pool: Pool) -> None:
    for start, stop in zip(pool.offset_S1[:-1], pool.offset_S1[1:], strict=True):
        pool.tokens["logp_trainer"][start:stop] = np.sort(pool.tokens["logp_trainer"][start:stop])


ANOTHER = "another-quantity"
# How to plant each, and the names that are right with top-K columns and entropies, and without
FAULTS: dict[str, tuple[Plant, set[str], set[str]]] = {
    "dropout": (with_dropout, {"not-repeatable"}, {"not-repeatable"}),
    "minus entropy": (planted(minus_entropy, 1), {ANOTHER}, set()),
    "minus entropy in a part": (planted(minus_entropy, 0.15), {ANOTHER}, {"heavy-tail"}),
    "likeliest token": (planted(of_the_likeliest, 1), {ANOTHER}, set()),
    "response mean": (planted(response_mean, 0.12), {ANOTHER}, {ANOTHER}),
    "response mean, all": (planted(response_mean, 1), {ANOTHER}, {ANOTHER}),
    "running sum": (planted(running_sum, 0.1), {ANOTHER}, {ANOTHER}),
    "running sum, all": (planted(running_sum, 1), {ANOTHER}, {ANOTHER}),
    "2 % uniform": (planted(mixed_with_uniform, 0.02), {"uniform-mixture"}, {"uniform-mixture"}),
    "logit bias": (planted(biased_token, -3), {"biased-token"}, {"biased-token"}),
    "swapped in pairs": (swapped_in_pairs, {"columns-at-odds"}, set()),
    "sorted": (sorted_values, {"columns-at-odds"}, set()),
}


def causes(diagnosis: Findings) -> set[str]:
    """The faults with a name; rounding and an unexplained gap are none."""
    return {f.check for f in diagnosis.faults if module(f.check).STAGE < FLOOR_STAGE} - {"lm-head"}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8-kv"])
def test_no_wrong_name_and_no_tick_above_three_times_the_healthy_gap(pools, bf16_pool, name):
    pool = bf16_pool if name == "bfloat16" else pools[name]
    few = pool.take(np.arange(96))
    healthy = judged(few).evidence.gap.value
    wrong, green, named, expected = [], [], 0, 0
    for fault, (plant, *rights) in FAULTS.items():
        broken = whole(few)
        plant(broken)
        # Its columns: all, and as an import has them
        for right, pool in zip(rights, (broken, sampled_alone(whole(broken))), strict=True):
            diagnosis = judged(pool)
            names, gap = causes(diagnosis), diagnosis.evidence.gap.value
            if names - right:
                wrong.append((fault, names - right))
            if gap > TIMES_HEALTHY * healthy:
                expected, named = expected + bool(right), named + bool(names & right)
                if answer(diagnosis)[1] == "good":
                    green.append(fault)
    assert (wrong, green) == ([], [])
    assert named >= 0.8 * expected


def test_a_temperature_of_sampled_tokens_is_an_upper_bound(pools):
    broken = pools["fp8-kv"].take(np.arange(96))
    broken.use("temperature1.05")
    with_ranks = finding_of(judged(broken), "temperature")
    alone = finding_of(judged(sampled_alone(broken)), "temperature")
    assert with_ranks.status == alone.status == "found"
    assert alone.at_most and not with_ranks.at_most
    assert "upper bound" in alone.sentence and "upper bound" not in with_ranks.sentence


def stale(pool: Pool, share: float) -> tuple[Pool, np.ndarray]:
    """The first responses from older weights, and log π at these weights."""
    broken = whole(pool)
    older_T = broken.response_T < share * broken.num_responses
    broken.engine_uses("weights0.1", older_T)
    return broken, broken.variants["weights0.1"].logp_T


@pytest.mark.parametrize("name", ["float32", "fp8-kv"])
def test_stale_weights_in_part_of_the_responses_are_named_with_that_part(pools, name):
    for share in (0.1, 0.25, 0.5, 0.75):
        broken, earlier_T = stale(pools[name], share)
        diagnosis = judged_with_earlier(broken, earlier_T)
        finding = diagnosis.first_cause
        assert finding is not None and finding.check == "stale-weights", share
        count = int(finding.where.split()[1]) / broken.num_responses
        assert count == pytest.approx(share, abs=0.07)
        assert not diagnosis.is_unexplained


def test_current_weights_are_not_stale_whatever_the_earlier_ones_are(pools):
    healthy = whole(pools["fp8-kv"])
    finding = finding_of(
        judged_with_earlier(healthy, healthy.variants["weights0.1"].logp_T), "stale-weights"
    )
    assert finding.status == "clear" and finding.reason.startswith("would have found")


def test_stale_weights_count_whatever_else_the_gap_has(pools):
    """A temperature on one side makes most of the gap, and part of the engines are stale."""
    broken, earlier_T = stale(pools["float32"], 0.25)
    for logp_T in (broken.tokens["logp_trainer"], earlier_T):
        logp_T *= np.float32(0.99)
    assert "stale-weights" in causes(judged_with_earlier(broken, earlier_T))


def test_every_clear_answer_says_what_it_would_have_found(pools, bf16_pool):
    """And a trace of certain tokens gets no clear answer where only others would tell."""
    for pool in (pools["fp8-kv"], bf16_pool):
        clear = [f for f in judged(whole(pool)).findings if f.status == "clear" and not f.sentence]
        without = {f.check for f in clear if not f.reason.startswith("would have found ")}
        assert without <= {"growth-over-steps"}
    certain = bf16_pool.take(np.arange(96))
    for column in ("logp_rollout", "logp_trainer"):
        certain.tokens[column] = np.minimum(certain.tokens[column] * 1e-5, -1e-7)
    findings = {f.check: f for f in judged(sampled_alone(certain)).findings}
    for check in ("placeholders", "log-base"):
        assert findings[check].status == "untested", check
        assert findings[check].reason.startswith("no power: "), check


@pytest.mark.parametrize(("name", "severity", "check"), [
    ("log-probs stored in bfloat16", 1, "lm-head"),
    ("another base in the engine", 2, "log-base"),
    ("another base in the trainer", 10, "log-base"),
])  # fmt: skip
def test_what_follows_from_rounding_and_from_a_base_is_not_a_second_fault(
    bf16_pool, name, severity, check
):
    """Values beside unrounded ranks look less probable, and another base stretches the grid."""
    broken = whole(bf16_pool)
    BY_NAME[name].plant(broken, severity, np.random.default_rng(0))
    assert {finding.check for finding in judged(broken).found} <= {check, "logit-lattice"}
