"""Older weights in the engine, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import stale_weights
from mismatch_cli.diagnosis.far_responses import Subset
from mismatch_cli.diagnosis.group_estimates import Mean, slope_over_prompts
from tests.diagnosis.samples import SampleColumns

Ways = stale_weights._Ways
ROUNDED = {"rollout": {"dtype": "bfloat16"}, "trainer": {"dtype": "float32"}}


def sample_of(d_N: np.ndarray, response_N: np.ndarray, **columns: object) -> SampleColumns:
    """Tokens that all count, with log μ = −1, each response of another prompt."""
    plain = {"typical_N": np.ones(len(d_N)), "num_responses": int(response_N.max()) + 1}
    plain |= {"group_N": response_N, "logq_T": np.full(len(d_N), -1.0)}
    return SampleColumns(
        d_N=d_N, response_T=response_N, index_N=np.arange(len(d_N)), **plain | columns
    )


def test_the_way_of_a_response_is_the_slope_of_its_gap_on_the_step(rng):
    """Three responses of 9, 12 and 10 tokens; of the last, two were not scored. Gaps are in units
    of 0.5 to 2, and capped at ten of them.
    """
    response_N = np.repeat([0, 1, 2], [9, 12, 10])
    unit_N = rng.uniform(0.5, 2.0, 31)
    now_N = rng.normal(size=31)
    earlier_N = now_N - np.array([1.0, 0.1, 0.6])[response_N] * rng.normal(size=31)
    now_N[3], earlier_N[15] = 50.0, -60.0
    earlier_N[[22, 25]] = np.nan
    sample = sample_of(now_N, response_N, typical_N=unit_N, group_N=np.array([0, 5, 7])[response_N])
    ways = stale_weights.ways_of_responses(SimpleNamespace(sample=sample), earlier_N)
    d_N = np.clip(now_N / unit_N, -10, 10)
    s_N = np.clip((now_N - earlier_N) / unit_N, -10, 10)
    scored_N = np.isfinite(earlier_N)
    for s in range(3):
        own_N = (response_N == s) & scored_N
        d, step = d_N[own_N], s_N[own_N]
        way = (d @ step) / (step @ step)
        error = np.sqrt(((step * (d - way * step)) ** 2).sum()) / (step @ step)
        assert ways.way_S[s] == pytest.approx(way)
        assert ways.error_S[s] == pytest.approx(error)
        better = np.abs(earlier_N[own_N]).sum() < 0.8 * np.abs(now_N[own_N]).sum()
        assert ways.better_S[s] == better
    group_M = sample.group_N[scored_N]
    of_all = slope_over_prompts(s_N[scored_N], d_N[scored_N], group_M)
    assert (ways.way, ways.error) == pytest.approx(of_all)


@pytest.mark.parametrize(("earlier", "better"), [(0.79, True), (0.81, False)])
def test_an_earlier_checkpoint_is_better_if_it_leaves_four_fifths(earlier, better):
    sample = sample_of(np.full(16, 0.5), np.repeat([0, 1], 8))
    ways = stale_weights.ways_of_responses(
        SimpleNamespace(sample=sample), np.full(16, 0.5 * earlier)
    )
    assert ways.better_S.tolist() == [better, better]


def test_a_response_tells_if_eight_tokens_were_scored_and_its_checkpoints_differ():
    """Of the first response seven tokens were scored, of the second eight; both checkpoints score
    the third alike.
    """
    response_N = np.repeat([0, 1, 2], 8)
    earlier_N = np.where(response_N == 2, 0.5, 0.0)
    earlier_N[0] = np.nan
    sample = sample_of(np.full(24, 0.5), response_N)
    ways = stale_weights.ways_of_responses(SimpleNamespace(sample=sample), earlier_N)
    assert np.isfinite(ways.error_S).tolist() == [False, True, False]
    assert ways.way_S.tolist() == [1.0, 1.0, 0.0]


def ways_of(way: list[float], errors: list[float] | None = None, **fields: object) -> Ways:
    plain = {"better_S": np.ones(len(way), dtype=bool), "way": 0.5, "error": 0.01} | fields
    return Ways(np.array(way), np.array(errors or [0.1] * len(way)), **plain)


def test_a_response_is_stale_beyond_the_middle_if_it_tells():
    ways = ways_of(
        [0.61, 0.59, 0.9, 0.9, 0.9],
        [0.149, 0.149, 0.151, 0.149, np.inf],
        better_S=np.array([True, True, True, False, True]),
    )
    assert ways.decided_S.tolist() == [True, True, False, True, False]
    assert ways.stale_S.tolist() == [True, False, False, False, False]
    assert ways.rows == (
        ("on the way from the current (0) to the earlier checkpoint (1)", 0.5),
        ("its standard error over prompts", 0.01),
        ("responses that tell both apart", 3),
        ("of these at the earlier one", 1),
    )


@pytest.mark.parametrize(
    ("way", "undecided", "stale"),
    [
        ([1, 1, 0, 0, 0.5], 0, 2),
        ([1, 1, 0.39, 0.39, 0.5], 0, 2),
        ([1, 1, 0.41, 0, 0.5], 0, None),
        ([1, 0, 0, 0, 0], 0, None),
        ([1, 1, 1, 1, 0], 0, None),
        ([1, 1, 0, 0, 0.5, 0.5], 0, None),
        ([1, 1, 0, 0], 3, 2),
        ([1] * 3 + [0] * 297, 0, 3),
        ([1] * 2 + [0] * 298, 0, None),
        ([1] * 2 + [0] * 100, 198, 2),
    ],
    ids=["four of five", "nearer", "in between", "one stale", "one current", "four of six",
         "others do not tell", "one in a hundred", "fewer", "of those that tell"],
)  # fmt: skip
def test_stale_responses_are_a_part_if_nearly_all_are_at_one_of_both_ends(
    way, undecided, stale, monkeypatch
):
    """Two responses at each end at least, and four fifths at either."""
    calls = []
    monkeypatch.setattr(
        stale_weights, "shared_by", lambda *arguments: calls.append(arguments) or "all of step 3"
    )
    error = [0.1] * len(way) + [0.2] * undecided
    ways = ways_of([*way, *[0.0] * undecided], error)
    evidence = SimpleNamespace(sample="sample", traces="traces")
    part = ways.stale_among_current(evidence)
    if stale is None:
        assert part is None
        return
    assert part.inside_S.tolist() == ways.stale_S.tolist() and part.inside_S.sum() == stale
    assert part.among_S.tolist() == ways.decided_S.tolist()
    assert part.shared == "all of step 3"
    [(sample, inside_S, among_S, traces)] = calls
    assert (sample, traces) == ("sample", "traces")
    assert inside_S.sum() == stale and among_S.sum() == len(way)


@pytest.mark.parametrize(
    ("decided", "error", "power"),
    [
        (3, 0.01, "it in ≥ 67 % of the 3 responses that can show it"),
        (0, 0.01, "it in ≥ 4 % of the responses"),
        (0, 0.2, "it in ≥ 80 % of the responses"),
        (0, 0.3, "no power: both checkpoints are alike beside the noise"),
        (0, np.inf, "no power: both checkpoints are alike beside the noise"),
        (0, np.nan, "no power: both checkpoints are alike beside the noise"),
    ],
)
def test_the_share_of_stale_responses_that_would_have_been_found(decided, error, power):
    errors = [0.1] * decided + [0.5] * (5 - decided)
    assert ways_of([0.0] * 5, errors, error=error).power == power


def fit_of(other_d_N: np.ndarray, factor: float = 0.5, fits: bool = True):
    mean = Mean(0.1, 0.005, len(other_d_N), 4)
    return stale_weights.OtherWeightsFit(mean, mean, factor, fits, other_d_N)


def test_stale_responses_lose_their_gap_to_the_earlier_checkpoint_and_others_keep_theirs():
    """The second response is stale. Of the first and the second one token each was not scored:
    these shrink by 5.4/6 as the others do.
    """
    d_N = np.array([0.2, 0.4, 0.2, 1.0, 2.0, -3.0])
    other_d_N = np.array([0.9, np.nan, 0.9, np.nan, 1.5, -3.1])
    sample = sample_of(d_N, np.array([0, 0, 0, 1, 1, 1]))
    stale = Subset(np.array([False, True]), np.array([True, True]), "all of step 3")
    rows = (("tokens", 4),)
    finding = stale_weights._mixed_finding(
        SimpleNamespace(sample=sample), fit_of(other_d_N), stale, rows
    )
    shrinks = (0.2 + 0.2 + 1.5 + 3.1) / (0.2 + 0.2 + 2.0 + 3.0)
    assert finding.left_N == pytest.approx([0.2, 0.4 * shrinks, 0.2, shrinks, 1.5, -3.1])
    assert (finding.check, finding.status, finding.effect) == ("stale-weights", "found", 0.5)
    assert finding.where == "in 1 of 2 responses, all of step 3"
    assert finding.sentence == (
        "The engine has the weights of the earlier checkpoint in 1 of 2 responses, all of step 3: "
        "the gap there is 2.5 nats to the current one and 2.3 to the earlier one."
    )
    assert finding.evidence == rows


def test_other_weights_are_compared_on_the_tokens_that_they_scored(rng):
    """Gaps of 0.5 ± 0.1 beside 0.2 ± 0.1, in 20 prompt groups; a tenth was not scored."""
    group_N = np.repeat(np.arange(20), 10)
    d_N = rng.uniform(0.4, 0.6, 200) * rng.choice([-1, 1], 200)
    other_logp_T = -1.0 + rng.uniform(0.1, 0.3, 200)
    other_logp_T[::10] = np.nan
    sample = sample_of(d_N, group_N)
    fit = stale_weights.fit_other_weights(SimpleNamespace(sample=sample), other_logp_T)
    scored_N = np.isfinite(other_logp_T)
    assert fit.now.value == pytest.approx(np.abs(d_N[scored_N]).mean())
    assert fit.other.value == pytest.approx((other_logp_T + 1)[scored_N].mean())
    assert fit.factor == pytest.approx(fit.other.value / fit.now.value)
    assert (fit.now.count, fit.other.count, fit.fits) == (180, 180, True)
    np.testing.assert_allclose(fit.d_N, other_logp_T + 1)


@pytest.mark.parametrize(("other", "noise", "fits"), [
    (0.78, 0.0, True), (0.82, 0.0, False), (0.7, 0.2, True), (0.7, 1.5, False), (1.3, 0.0, False),
])  # fmt: skip
def test_other_weights_fit_if_they_leave_four_fifths_beyond_chance(other, noise, fits):
    """In 20 prompt groups, whose differences scatter by `noise` times the gap."""
    noise_N = 1e-6 + noise * np.resize([1.0, -1.0], 20)
    d_N = np.full(20, 0.5) * (2 + noise_N)
    other_logp_T = -1 + np.full(20, other)
    sample = sample_of(d_N, np.arange(20))
    fit = stale_weights.fit_other_weights(SimpleNamespace(sample=sample), other_logp_T)
    assert fit.factor == pytest.approx(other, rel=1e-5)
    assert fit.fits == fits


@pytest.mark.parametrize(
    ("now", "error", "reason"),
    [
        (0.1, 0.001, "would have found a gap that is 20 % smaller"),
        (0.1, 0.01, "would have found a gap that is 40 % smaller"),
        (0.1, 0.026, "no power: too few prompts"),
        (0.0, 0.1, "no power: too few prompts"),
    ],
)
def test_weights_that_do_not_fit_name_the_gap_that_would_have_been_found(now, error, reason):
    fit = fit_of(np.zeros(3), 0.95, fits=False)._replace(now=Mean(now, error, 3, 30))
    finding = stale_weights.finding_of("rounded-weights", None, fit, "times", (("a", 1),), "No.")
    assert (finding.check, finding.reason) == ("rounded-weights", reason)
    if finding.status == "clear":
        assert (finding.effect, finding.measure) == (0.95, "times")
        assert finding.evidence == (("a", 1),)


def test_an_engine_of_16_bits_is_narrower_than_a_trainer_of_32():
    for about, dtype in (
        (ROUNDED, "bfloat16"),
        ({"rollout": ROUNDED["trainer"], "trainer": ROUNDED["rollout"]}, None),
        ({"rollout": ROUNDED["trainer"], "trainer": ROUNDED["trainer"]}, None),
        ({}, None),
    ):
        assert stale_weights.narrower(SimpleNamespace(about=about)) == dtype


class Model:
    """Gives every token the same log-probability, and notes under which hypothesis."""

    def __init__(self, gap: float, tokens: int) -> None:
        self.gap, self.tokens, self.names = gap, tokens, []

    def logp_T(self, hypothesis):
        self.names.append(hypothesis.name)
        return np.full(self.tokens, self.gap - 1)


def checked(other: float, rounded: float | None = None, about=ROUNDED, mixed: bool = False):
    """The finding for twenty responses of ten tokens with a gap of 0.5 ± 0.05, beside an earlier
    checkpoint and rounded weights that leave other gaps; `mixed`: half of them are current.
    """
    rng = np.random.default_rng(0)
    response_N = np.repeat(np.arange(20), 10)
    d_N = rng.uniform(0.45, 0.55, 200) * rng.choice([-1, 1], 200)
    sample = sample_of(d_N, response_N)
    other_d_N = other * np.sign(d_N)
    if mixed:
        is_current_N = response_N < 10
        d_N[is_current_N] *= 0.02
        other_d_N[is_current_N] -= 0.5 * np.sign(d_N[is_current_N])
    evidence = SimpleNamespace(
        sample=sample,
        about=about,
        earlier_logp_T=other_d_N - 1,
        model=None if rounded is None else Model(rounded, 200),
        traces=None,
    )
    return stale_weights.check(evidence), evidence


def test_without_an_earlier_checkpoint_it_is_requested():
    finding = stale_weights.check(SimpleNamespace(earlier_logp_T=None))
    assert (finding.check, finding.status) == ("stale-weights", "untested")
    assert finding.reason == "needs an earlier checkpoint"
    assert finding.needs == "--earlier-model MODEL"


def test_the_rows_are_both_gaps_and_the_way():
    finding, evidence = checked(other=0.1)
    mean = np.abs(evidence.sample.d_N).mean()
    assert finding.status == "found" and finding.effect == pytest.approx(0.1 / mean)
    labels = [label for label, _ in finding.evidence]
    assert labels[:3] == [
        "mean |Δlog p| to the current checkpoint, nats", "to the earlier one, nats", "tokens"
    ]  # fmt: skip
    assert [value for _, value in finding.evidence[:3]] == pytest.approx([mean, 0.1, 200])
    assert len(labels) == 7
    assert finding.left_N == pytest.approx(0.1 * np.sign(evidence.sample.d_N))


@pytest.mark.parametrize(
    ("other", "rounded", "status", "hint"),
    [
        (0.1, None, "found", True),
        (0.1, 0.3, "found", False),
        (0.1, 0.109, "clear", False),
        (0.1, 0.111, "found", False),
        (0.45, 0.47, "untested", False),
        (0.45, 0.2, "clear", False),
        (0.3, 0.29, "clear", False),
    ],
)
def test_weights_that_rounding_brings_as_near_are_not_stale(other, rounded, status, hint):
    finding, evidence = checked(other, rounded)
    assert finding.status == status
    assert ("--trainer-model tells the two apart" in finding.sentence) == hint
    if rounded is not None:
        (name,) = evidence.model.names
        assert "bfloat16" in name
    if finding.evidence and rounded is not None:
        assert finding.evidence[-1] == (
            "to the current one in bfloat16, nats", pytest.approx(rounded)
        )  # fmt: skip
    if status == "clear":
        assert finding.reason == (
            "the current checkpoint in bfloat16 fits as well: see rounded-weights"
        )
        assert finding.effect == pytest.approx(other / 0.5, rel=0.02)


def test_a_trainer_as_narrow_as_the_engine_rounds_nothing():
    finding, evidence = checked(0.1, 0.1, about={})
    assert finding.status == "found" and not evidence.model.names
    finding, _ = checked(0.1, about={})
    assert finding.sentence == (
        f"The engine is closer to the earlier checkpoint: that gap is {finding.effect:.2g} times "
        "the gap to the current one."
    )


def test_half_of_the_responses_may_be_stale(monkeypatch):
    monkeypatch.setattr(stale_weights, "shared_by", lambda *_: "")
    finding, evidence = checked(0.0, mixed=True)
    assert finding.where.startswith("in 10 of 20 responses") and finding.effect == 0.5
    is_current_N = evidence.sample.response_T < 10
    assert finding.left_N == pytest.approx(np.where(is_current_N, evidence.sample.d_N, 0.0))
