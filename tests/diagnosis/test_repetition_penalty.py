"""A penalty on tokens seen before, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import repetition_penalty
from mismatch_cli.diagnosis.checks.repetition_penalty import PenaltyFit
from mismatch_cli.diagnosis.group_estimates import slope_over_prompts
from tests.diagnosis.samples import SampleColumns


def checked(nats: float, error: float, left: float, monkeypatch):
    """The finding for a fit that leaves such a share of a gap of 0.5."""
    fit = PenaltyFit(nats, error, np.full(4, 0.5 * left), "the top K")
    monkeypatch.setattr(repetition_penalty, "from_topk", lambda _: fit)
    monkeypatch.setattr(repetition_penalty, "from_log_odds", lambda _: pytest.fail("not needed"))
    return repetition_penalty.check(SimpleNamespace(sample=SimpleNamespace(d_N=np.full(4, 0.5))))


@pytest.mark.parametrize(
    ("nats", "error", "left", "status"),
    [
        (0.011, 0.0001, 0.0, "found"),
        (0.009, 0.0001, 0.0, "clear"),
        (-0.011, 0.0001, 0.0, "found"),
        (-0.009, 0.0001, 0.0, "clear"),
        (0.61, 0.1, 0.0, "found"),
        (0.59, 0.1, 0.0, "clear"),
        (0.7, 0.1, 0.79, "found"),
        (0.7, 0.1, 0.81, "clear"),
        (0.7, 0.1, 1.5, "clear"),
    ],
)
def test_a_penalty_is_large_certain_and_a_fifth_of_the_gap(nats, error, left, status, monkeypatch):
    finding = checked(nats, error, left, monkeypatch)
    assert (finding.check, finding.status, finding.effect) == ("repetition-penalty", status, nats)
    assert finding.measure == "nats on tokens seen before"
    assert finding.evidence == (
        ("π over μ on tokens seen before, relative to others, nats", nats),
        ("its standard error over prompts", error),
        ("fitted from", "the top K"),
    )


def test_the_side_with_the_penalty_is_the_one_that_gives_less(monkeypatch):
    for nats, side in ((0.7, "rollout"), (-0.7, "trainer")):
        finding = checked(nats, 0.01, 0.1, monkeypatch)
        assert finding.sentence.startswith(f"The {side} gives tokens that are already in the")
        assert "0.7 nats less" in finding.sentence
        assert finding.left_N.tolist() == [0.05] * 4


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (0.001, "would have found ≥ 0.01 nats"),
        (0.1, "would have found ≥ 0.6 nats"),
        (np.inf, "no power: too few prompts"),
    ],
)
def test_the_penalty_that_would_have_been_found(error, reason, monkeypatch):
    assert checked(0.001, error, 0.0, monkeypatch).reason == reason


def test_without_a_fit_a_penalty_is_untested():
    sample = SampleColumns(
        topk_logq_TK=None, topk_logp_TK=None, topk_seen_TK=None, seen_T=None, index_N=np.arange(3)
    )
    finding = repetition_penalty.check(SimpleNamespace(sample=sample))
    assert (finding.check, finding.status) == ("repetition-penalty", "untested")
    assert finding.reason.startswith("too few tokens that are already in the context")


def ranks_of(q_NK, d_NK, seen_NK, usable_NK=None) -> repetition_penalty._Ranks:
    q_NK = np.array(q_NK, dtype=float)
    if usable_NK is None:
        usable_NK = np.ones(q_NK.shape, dtype=bool)
    return repetition_penalty._Ranks(q_NK, np.array(d_NK), np.array(seen_NK), usable_NK)


def test_a_part_of_the_tokens_has_its_own_ranks():
    ranks = ranks_of(
        [[1, 2], [3, 4], [5, 6]], [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]],
        [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], np.array([[True, True], [True, False], [False, True]])
    )  # fmt: skip
    part = ranks.of_tokens(np.array([False, True, True]))
    assert part.q_NK.tolist() == [[3, 4], [5, 6]]
    assert part.d_NK.tolist() == [[0.3, 0.4], [0.5, 0.6]]
    assert part.seen_NK.tolist() == [[1, 0], [1, 1]]
    assert part.usable_NK.tolist() == [[True, False], [False, True]]


def test_seen_ids_have_their_log_probability_down_to_twelve_nats():
    ranks = ranks_of(
        [[-1.0, -13.0, -2.0, -3.0]], np.zeros((1, 4)), [[1.0, 1.0, 0.0, 1.0]],
        np.array([[True, True, True, False]])
    )  # fmt: skip
    assert ranks.seen_q_NK.tolist() == [[-1.0, -12.0, 0.0, 0.0]]
    assert ranks.centred_M(ranks.q_NK).tolist() == pytest.approx([13 / 3, -23 / 3, 10 / 3])


def penalised_ranks(rng, tokens: int, shift: float, slope: float):
    """log μ of five ids, which are all there are, whether each was seen, and log π: the logits of
    seen ids are moved by shift + slope · log μ.
    """
    q_TK = np.log(rng.dirichlet(np.full(5, 2.0), tokens))
    seen_TK = rng.random((tokens, 5)) < 0.5
    moved_TK = np.where(seen_TK, shift + slope * q_TK, 0.0)
    raw_TK = q_TK + moved_TK
    return q_TK, seen_TK, raw_TK - np.log(np.exp(raw_TK).sum(axis=1, keepdims=True))


def topk_sample(rng, tokens: int = 600, shift: float = -0.4, slope: float = 0.1):
    """A sample of which the second rank was drawn."""
    q_TK, seen_TK, p_TK = penalised_ranks(rng, tokens, shift, slope)
    group_N = np.arange(tokens) % 16
    return SampleColumns(
        topk_logq_TK=q_TK,
        topk_logp_TK=p_TK,
        topk_seen_TK=seen_TK,
        seen_T=seen_TK[:, 1],
        logq_T=q_TK[:, 1],
        logp_T=p_TK[:, 1],
        d_N=p_TK[:, 1] - q_TK[:, 1],
        index_N=np.arange(tokens),
        group_N=group_N,
        half_N=group_N % 2,
    )


def test_a_penalty_on_all_ids_is_fitted_exactly_and_leaves_nothing(rng):
    """The contrast is that of seen ids with others at equal log μ."""
    sample = topk_sample(rng)
    fit = repetition_penalty.from_topk(sample)
    assert np.abs(sample.d_N).mean() > 0.1
    assert fit.left_N == pytest.approx(0.0, abs=1e-6)
    assert fit.source == "top-5 log-probabilities"
    columns = []
    for value_NK in (
        sample.topk_seen_TK.astype(float), sample.topk_logq_TK,
        sample.topk_logp_TK - sample.topk_logq_TK,
    ):  # fmt: skip
        columns.append((value_NK - value_NK.mean(axis=1, keepdims=True)).ravel())
    seen_M, q_M, d_M = columns
    (nats, _), *_ = np.linalg.lstsq(np.stack([seen_M, q_M], axis=1), d_M, rcond=None)
    assert fit.nats == pytest.approx(nats)
    assert 0 < fit.error < 0.05


def test_each_half_is_predicted_from_the_fit_of_the_other(monkeypatch, rng):
    """A fit that gives the mean log μ of the tokens that it was given shows which they were."""
    sample = topk_sample(rng, tokens=40 * 16)
    monkeypatch.setattr(repetition_penalty, "_fit_shift", lambda ranks: (ranks.q_NK.mean(), 7.0))
    monkeypatch.setattr(
        repetition_penalty,
        "_predict_gap",
        lambda ranks, logq_N, seen_N, shift, slope: logq_N + 10 * seen_N + 100 * shift + slope,
    )
    left_N = repetition_penalty.from_topk(sample).left_N
    means = [sample.topk_logq_TK[sample.half_N == half].mean() for half in (1, 0)]
    predicted_N = sample.logq_N + 10 * sample.seen_T + 100 * np.array(means)[sample.half_N] + 7
    assert left_N == pytest.approx(sample.d_N - predicted_N)


def test_two_hundred_ids_must_differ_from_the_others_of_their_token(rng):
    sample = topk_sample(rng, tokens=41)
    sample.topk_seen_TK[:] = False
    sample.topk_seen_TK[:40, 0] = True
    assert repetition_penalty.from_topk(sample) is not None
    sample.topk_seen_TK[39] = True
    assert repetition_penalty.from_topk(sample) is None


def test_ranks_without_the_sampled_tokens_contexts_show_no_penalty(rng):
    sample = topk_sample(rng)
    sample.seen_T = None
    assert repetition_penalty.from_topk(sample) is None


def test_ranks_without_a_value_or_without_contexts():
    nan = np.nan
    sample = SampleColumns(
        topk_logq_TK=np.array([[-1.0, -2.0, nan], [9.0, 9.0, 9.0], [-0.5, -1.5, -3.0]]),
        topk_logp_TK=np.array([[-1.5, -1.0, -2.0], [9.0, 9.0, 9.0], [-0.5, -2.0, -13.0]]),
        topk_seen_TK=np.array([[True, False, True], [False] * 3, [False, True, True]]),
        index_N=np.array([0, 2]),
    )
    ranks = repetition_penalty._ranks(sample)
    assert ranks.q_NK.tolist() == [[-1.0, -2.0, -np.inf], [-0.5, -1.5, -3.0]]
    assert ranks.d_NK.tolist() == [[-0.5, 1.0, 0.0], [0.0, -0.5, 0.0]]
    assert ranks.seen_NK.tolist() == [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]
    assert ranks.usable_NK.tolist() == [[True, True, False], [True, True, False]]
    for name in ("topk_logp_TK", "topk_seen_TK"):
        assert repetition_penalty._ranks(SampleColumns(**{**vars(sample), name: None})) is None


def test_a_shift_and_a_slope_are_those_of_seen_ids(rng):
    q_TK, seen_TK, p_TK = penalised_ranks(rng, 50, 0.3, -0.2)
    fit = repetition_penalty._fit_shift(ranks_of(q_TK, p_TK - q_TK, seen_TK.astype(float)))
    assert fit == pytest.approx((0.3, -0.2))


def test_the_gap_of_a_token_is_predicted_from_its_other_ids():
    """The second of four ids was sampled; the last is unknown. By its two other ids the shift of
    the position is 0.3 nats, beside the overall one of 0.1.
    """
    q_K = np.log([0.4, 0.3, 0.2])
    slope, shift = 0.05, 0.1
    d_K = np.array([0.3 + slope * q_K[0] + 0.7, 9.0, 0.7])
    ranks = ranks_of(
        [[*q_K, -np.inf]], [[*d_K, 0.0]], [[1.0, 1.0, 0.0, 1.0]],
        np.array([[True, True, True, False]]),
    )  # fmt: skip
    # Seen and not: half a unit off their mean on either side
    own_shift = (2 * 0.5 * 0.15 + 0.5 * shift) / (2 * 0.25 + 0.5)
    grown = [0.4 * np.exp(own_shift + slope * q_K[0]), 0.3 * np.exp(own_shift + slope * q_K[1])]
    log_sum = np.log(sum(grown) + 0.3)
    for is_seen in (True, False):
        gap_N = repetition_penalty._predict_gap(
            ranks, np.array([q_K[1]]), np.array([is_seen]), shift, slope
        )
        own = own_shift + slope * q_K[1] if is_seen else 0.0
        assert gap_N == pytest.approx([own - log_sum])


def test_rare_tokens_are_moved_as_at_twelve_nats_and_some_mass_is_always_left():
    ranks = ranks_of([[np.log(0.5), np.log(0.5)]], [[0.0, 0.0]], [[1.0, 1.0]])
    gap_N = repetition_penalty._predict_gap(ranks, np.array([-20.0]), np.array([True]), -50.0, 1.0)
    assert gap_N == pytest.approx([-50.0 - 12.0 - np.log(1e-6)])


def test_a_contrast_is_a_slope_with_log_mu_regressed_out(rng):
    group_M = np.repeat(np.arange(8), 5)
    q_M = 0.1 * rng.normal(size=40)
    x_M = 5.0 * q_M + rng.normal(size=40)
    y_M = 2.0 * x_M - 7.0 * q_M + rng.normal(size=40)
    nats, error = repetition_penalty._contrast(x_M, q_M, y_M, group_M)
    design = np.stack([x_M, q_M], axis=1)
    assert nats == pytest.approx(np.linalg.lstsq(design, y_M, rcond=None)[0][0])
    on_q = [v_M - q_M * (v_M @ q_M) / (q_M @ q_M) for v_M in (x_M, y_M)]
    assert error == pytest.approx(slope_over_prompts(*on_q, group_M)[1])
    constant = repetition_penalty._contrast(x_M, np.zeros(40), y_M, group_M)
    assert constant == pytest.approx(slope_over_prompts(x_M, y_M, group_M))


def odds_sample(seen_T: np.ndarray, odds_T: np.ndarray, moved_T: np.ndarray) -> SampleColumns:
    tokens = len(seen_T)
    logq_T, logp_T = -np.logaddexp(0, -odds_T), -np.logaddexp(0, -moved_T)
    group_N = np.arange(tokens) % 16
    return SampleColumns(
        seen_T=seen_T,
        logq_T=logq_T,
        logp_T=logp_T,
        d_N=logp_T - logq_T,
        index_N=np.arange(tokens),
        group_N=group_N,
        half_N=group_N % 2,
    )


def test_the_contrast_of_log_odds_is_that_of_seen_tokens_at_equal_log_odds(rng):
    """Seen tokens are more probable, and lose 1 nat; a slope says nothing of the penalty."""
    seen_T = rng.random(900) < 0.4
    odds_T = rng.uniform(-4.0, -1.0, 900) + seen_T
    noise_T = 0.01 * rng.normal(size=900)
    sample = odds_sample(seen_T, odds_T, odds_T - 1.0 * seen_T + 0.02 * odds_T + noise_T)
    fit = repetition_penalty.from_log_odds(sample)
    gap_T = -1.0 * seen_T + 0.02 * odds_T + noise_T
    design = np.stack([seen_T, odds_T, np.ones(900)], axis=1)
    (nats, *_), *_ = np.linalg.lstsq(design, gap_T, rcond=None)
    assert fit.nats == pytest.approx(nats)
    assert nats == pytest.approx(-1.0, abs=0.05)
    centred = [v_T - v_T.mean() for v_T in (seen_T.astype(float), odds_T, gap_T)]
    expected = repetition_penalty._contrast(*centred, sample.group_N)
    assert fit.error == pytest.approx(expected[1])
    assert fit.source == "the sampled tokens' log-odds, approximate"


@pytest.mark.parametrize(("penalised", "others", "fits"), [
    (200, 200, True), (199, 200, False), (200, 199, False),
])  # fmt: skip
def test_log_odds_of_two_hundred_tokens_of_either_kind(penalised, others, fits, rng):
    """Beside fifty of each kind that are nearly certain."""
    seen_T = np.repeat([True, False, True, False], [penalised, others, 50, 50])
    odds_T = np.where(np.arange(len(seen_T)) < penalised + others, -2.0, 8.0)
    sample = odds_sample(seen_T, odds_T, odds_T + 0.1 * rng.normal(size=len(seen_T)))
    assert (repetition_penalty.from_log_odds(sample) is not None) == fits
    sample.seen_T = None
    assert repetition_penalty.from_log_odds(sample) is None


def test_noise_fits_a_penalty_and_its_mirror_image_alike(rng):
    """Then the contrast counts as 0."""
    seen_T = rng.random(900) < 0.5
    odds_T = rng.uniform(-4.0, -1.0, 900)
    penalised = odds_sample(seen_T, odds_T, odds_T + 0.5 * seen_T)
    assert repetition_penalty.from_log_odds(penalised).nats == pytest.approx(0.5, abs=0.01)
    noise_T = rng.normal(size=900)
    noisy = odds_sample(seen_T, odds_T, odds_T + 0.1 * seen_T + noise_T)
    assert repetition_penalty.from_log_odds(noisy).nats == 0.0


def test_a_mirrored_penalty_explains_no_more_than_its_size():
    """Seen tokens gain 0.2 nats, which leaves 0.5 on 160 others; mirrored, it takes 0.2 of these
    but would take all of them if it were larger.
    """
    seen_T = np.arange(2900) < 900
    odds_T = np.full(2900, -8.0) + 1e-3 * np.sin(np.arange(2900))
    moved_T = odds_T + np.where(seen_T, 0.2, 0.0)
    moved_T[900:1060] += 0.5
    odds_T, moved_T = odds_T + 3, moved_T + 3
    fit = repetition_penalty.from_log_odds(odds_sample(seen_T, odds_T, moved_T))
    assert fit.nats == pytest.approx(0.2 - 160 * 0.5 / 2000, abs=1e-3)


def test_the_penalty_of_a_half_is_that_of_nine_tenths_of_the_others_moves():
    """Of the first half eleven penalised tokens moved by 0 to 1, of the second by −1 and less."""
    move_N = np.array([*np.linspace(0, 1, 11), 99.0, *np.linspace(-2, -1, 11), 99.0])
    half_N = np.repeat([0, 1], 12)
    penalised_N = move_N < 99
    sample = SimpleNamespace(half_N=half_N)
    penalty_N = repetition_penalty._penalty_N(sample, move_N, penalised_N)
    assert penalty_N == pytest.approx(np.where(half_N == 1, 0.9, 0.0))
    none_N = np.zeros(24, dtype=bool)
    assert not repetition_penalty._penalty_N(sample, move_N, none_N).any()


def test_seen_tokens_move_up_to_the_penalty_and_others_down_by_it():
    """Log-odds of seen tokens between −1 and −1 + 0.5, of others between −1 − 0.5 and −1."""
    seen_N = np.array([True, True, True, False, False, False])
    moved_N = np.array([-1.2, -0.7, -0.3, -1.7, -1.3, -0.9])
    logp_N = -np.logaddexp(0, -moved_N)
    low, middle, high = (-np.logaddexp(0, 1 - by) for by in (-0.5, 0.0, 0.5))
    x_N = np.full(6, -1.0)
    sample = SampleColumns(logp_T=logp_N, index_N=np.arange(6))
    left_N = repetition_penalty._beyond(sample, x_N, seen_N, np.full(6, 0.5))
    expected_N = [
        logp_N[0] - middle, 0.0, logp_N[2] - high, logp_N[3] - low, 0.0, logp_N[5] - middle
    ]  # fmt: skip
    assert left_N == pytest.approx(expected_N)
