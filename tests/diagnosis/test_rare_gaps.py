"""A confident policy in 16 bits: few tokens can move, and few of these do."""

from __future__ import annotations

import numpy as np
import pytest

from lab.pool import Pool
from mismatch_cli.diagnosis.checks import heavy_tail, step_change, uneven_responses
from mismatch_cli.diagnosis.rare_gaps import RARE, is_rare
from tests.diagnosis.conftest import finding_of, judged, sampled_alone, whole
from tests.diagnosis.samples import SampleColumns

COLD = 0.1  # the temperature
SHAPES = (heavy_tail.NAME, uneven_responses.NAME, step_change.NAME)


def sample_of(gap_N: np.ndarray) -> SampleColumns:
    """A hundred tokens of probability one half."""
    logq_T = np.full(len(gap_N), np.log(0.5))
    columns = {"logq_T": logq_T, "logp_T": logq_T - gap_N, "d_N": -gap_N}
    return SampleColumns(index_N=np.arange(len(gap_N)), **columns)


@pytest.mark.parametrize(("moved", "nats", "rare"), [
    (20, 0.3, True),
    (49, 0.3, True),
    (50, 0.3, False),  # as many as not
    (20, 1.1, False),  # further than a step
    (0, 0.3, False),
])  # fmt: skip
def test_the_gap_is_rare_where_few_tokens_have_one_of_a_step_at_most(moved, nats, rare):
    gap_N = np.zeros(100)
    gap_N[:moved] = nats
    assert is_rare(sample_of(gap_N), step=1.0) is rare


def test_certain_tokens_could_not_have_moved():
    """A thousand of them without a gap do not make that of the others rare."""
    uncertain = sample_of(np.full(100, 0.1))
    certain_N = np.full(1000, -1e-6)
    columns = {
        name: np.append(getattr(uncertain, name), certain_N) for name in ("logq_T", "logp_T")
    }
    d_N = columns["logp_T"] - columns["logq_T"]
    assert not is_rare(SampleColumns(index_N=np.arange(1100), d_N=d_N, **columns), step=1.0)


def stepwise(pool: Pool, dtype: str) -> Pool:
    """A policy at temperature 0.1, of whose uncertain tokens one in eight moves by half a nat in
    its log-odds; all of these are in the first steps.
    """
    rng, cold = np.random.default_rng(0), sampled_alone(whole(pool))
    logq_T = cold.tokens["logp_rollout"].astype(np.float64)
    odds_T = (logq_T - np.log(-np.expm1(np.minimum(logq_T, -1e-9)))) / COLD
    moves_T = rng.random(len(odds_T)) < 1 / 8
    moves_T &= cold.rows["step"][cold.response_T] < 3
    for side, shift_T in (("rollout", 0.0), ("trainer", 0.5 * moves_T)):
        values_T = -np.logaddexp(0, -(odds_T + shift_T))
        cold.tokens[f"logp_{side}"] = np.minimum(values_T, 0).astype(np.float32)
    cold.about = {side: {"dtype": dtype, "temperature": COLD} for side in ("rollout", "trainer")}
    return cold


def test_steps_of_few_tokens_are_no_shape_of_a_gap_in_16_bits(bf16_pool):
    cold = stepwise(bf16_pool, "bfloat16")
    about = cold.about | {"config": {"sampling": {"temperature": COLD}}}
    diagnosis = judged(cold, about)
    for check in SHAPES:
        finding = finding_of(diagnosis, check)
        assert finding.status == "untested" and RARE in finding.reason, finding
    assert not diagnosis.evidence.subsets


def test_in_float32_the_same_gap_has_a_shape(bf16_pool):
    diagnosis = judged(stepwise(bf16_pool, "float32"))
    assert {finding.check for finding in diagnosis.found} & set(SHAPES)
