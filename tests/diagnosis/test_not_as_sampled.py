"""Tokens beside the recorded distribution, on a few whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import not_as_sampled
from mismatch_cli.diagnosis.group_estimates import mean_over_prompts
from tests.diagnosis.samples import SampleColumns


def sample_of(logq_T: np.ndarray, **columns: object) -> SampleColumns:
    tokens = len(logq_T)
    plain = {"topk_logq_TK": None, "entropy_T": None, "d_N": np.full(tokens, 0.01)}
    plain |= {"index_N": np.arange(tokens), "group_N": np.arange(tokens) % 50}
    return SampleColumns(logq_T=logq_T, **plain | columns)


def test_the_first_rank_is_missed_by_tokens_that_are_less_probable():
    """Equally probable ranks count as first, to 1e-4 nats or to a step of bfloat16; the third token
    has no ranks, and the last one does not count.
    """
    step = 2.0 * 2.0**-8
    ranks_TK = np.array([
        [-0.5, -1.0, -3.0], [-2.0, -2.0 - 0.9 * step, -2.0 - 1.1 * step], [-np.inf, 0.0, 0.0],
        [-1e-3, -1e-3 - 0.9e-4, -1e-3 - 1.1e-4], [-1.0, -9.0, -9.0], [9.0, 9.0, 9.0],
    ])  # fmt: skip
    logq_T = np.array([-1.0, -2.0 - 0.95 * step, -1.0, -1e-3 - 1.05e-4, -1.0, 9.0])
    sample = sample_of(logq_T, topk_logq_TK=ranks_TK, index_N=np.arange(5))
    sample.group_N = np.array([3, 4, 5, 6, 7])
    measure = not_as_sampled._by_first_rank(sample)
    mass_M = [
        np.exp(-0.5), np.exp(-2.0) + np.exp(-2.0 - 0.9 * step), 1.0, np.exp(-1.0)
    ]  # fmt: skip
    assert measure.expected_M == pytest.approx(1 - np.array(mass_M))
    assert measure.sampled_M.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert measure.group_M.tolist() == [3, 4, 6, 7]
    assert measure.resolution == 0.0
    assert not_as_sampled._by_first_rank(sample_of(logq_T)) is None


def test_the_mean_surprise_is_beside_the_trainers_entropy():
    """To four times the gap, by which both entropies may differ."""
    sample = sample_of(
        np.array([-1.0, -2.0, -9.0]),
        entropy_T=np.array([0.5, np.nan, 1.5]),
        d_N=np.array([0.1, -0.2, 0.3]),
        group_N=np.array([3, 4, 5]),
    )
    measure = not_as_sampled._by_entropy(sample)
    assert measure.expected_M.tolist() == [0.5, 1.5]
    assert measure.sampled_M.tolist() == [1.0, 9.0]
    assert measure.group_M.tolist() == [3, 5]
    assert measure.resolution == pytest.approx(0.8)
    sample.entropy_T = None
    assert not_as_sampled._by_entropy(sample) is None


def checked(sampled: float, scatter: float = 0.01, gap: float = 0.01, tokens: int = 400):
    """The finding where an entropy of 2 nats was recorded, for tokens of 50 prompt groups whose
    mean surprise scatters.
    """
    group_N = np.arange(tokens) % 50
    noise_G = np.resize([1.0, -1.0], 50) * scatter
    sample = sample_of(
        -(sampled + noise_G[group_N]),
        entropy_T=np.full(tokens, 2.0),
        d_N=np.full(tokens, gap),
        group_N=group_N,
    )
    return not_as_sampled.check(SimpleNamespace(sample=sample)), sample


@pytest.mark.parametrize(
    ("sampled", "scatter", "gap", "status"),
    [
        (2.21, 0.01, 0.01, "found"),
        (2.19, 0.01, 0.01, "clear"),
        (1.79, 0.01, 0.01, "found"),
        (1.81, 0.01, 0.01, "clear"),
        (2.21, 0.01, 0.054, "clear"),
        (2.21, 0.3, 0.01, "clear"),
        (1.79, 0.3, 0.01, "clear"),
    ],
    ids=["a tenth more", "less", "a tenth less", "more", "gap", "chance", "chance below"],
)
def test_tokens_are_not_as_sampled_by_a_tenth_and_six_standard_errors(
    sampled, scatter, gap, status
):
    finding, sample = checked(sampled, scatter, gap)
    assert (finding.check, finding.status) == ("not-as-sampled", status)
    assert finding.effect == pytest.approx(sampled / 2 - 1)
    assert finding.measure == "share of the expected"
    difference = mean_over_prompts(-sample.logq_T - 2.0, sample.group_N)
    shows = max(0.2, 4 * gap, 6 * difference.error) / 2
    assert finding.evidence == (
        ("mean −log μ of the sampled tokens, nats", pytest.approx(sampled)),
        ("mean entropy, nats", 2.0),
        ("z over prompts", pytest.approx(difference.z_from(0.0))),
        ("a share that would have been found", pytest.approx(shows)),
    )
    if status == "clear":
        assert finding.reason.startswith("would have found a difference of ≥ ")
    else:
        how = "less" if sampled > 2 else "more"
        assert finding.sentence.startswith(f"The sampled tokens are {how} probable than the rec")
        assert f"is {sampled:.3g} nats, and its entropy 2 (z = " in finding.sentence


def test_too_few_or_certain_tokens_are_untested():
    assert checked(2.21, tokens=200)[0].status == "found"
    few, _ = checked(2.21, tokens=199)
    assert (few.check, few.reason) == ("not-as-sampled", "fewer than 200 tokens")
    certain = sample_of(np.full(300, -0.1), entropy_T=np.zeros(300))
    finding = not_as_sampled.check(SimpleNamespace(sample=certain))
    assert (finding.status, finding.reason) == ("untested", "every token is certain")
    without = not_as_sampled.check(SimpleNamespace(sample=sample_of(np.full(300, -1.0))))
    assert without.reason == "the trace has neither top-K columns nor entropies"


def test_ranks_are_taken_before_entropies():
    """Half of the tokens are of the second rank, which has a tenth."""
    ranks_TK = np.tile(np.log([0.9, 0.1]), (400, 1))
    logq_T = np.where(np.arange(400) % 4 < 2, ranks_TK[:, 0], ranks_TK[:, 1])
    sample = sample_of(logq_T, topk_logq_TK=ranks_TK, entropy_T=np.full(400, 9.0))
    finding = not_as_sampled.check(SimpleNamespace(sample=sample))
    assert finding.effect == pytest.approx(4.0)
    assert [value for _, value in finding.evidence[:2]] == pytest.approx([0.5, 0.1])
