"""The fit of a temperature, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import temperature
from mismatch_cli.diagnosis.checks.temperature import TemperatureFit
from mismatch_cli.diagnosis.evidence import Evidence
from mismatch_cli.diagnosis.group_estimates import as_normal, slope_over_prompts
from tests.diagnosis.samples import SampleColumns

TOPK = TemperatureFit(1.5, 0.01, (1.4, 1.6), (1.2, 1.7), "top-3 log-probabilities", topk=True)
SAMPLED = TemperatureFit(1.5, 0.01, (1.4, 1.6), (1.2, 1.7), "log-odds", topk=False)


def sharpened(p: float, beta: float, spread: float) -> float:
    """log of p at another temperature, where all other ids are equally probable: one of 1 − p, or
    so many that each has e^−spread of it.
    """
    rest = np.exp(spread) * ((1 - p) * np.exp(-spread)) ** beta
    return float(np.log(p**beta / (p**beta + rest)))


def test_what_is_left_is_beyond_both_ways_to_spread_the_rest():
    """β is 1.2 in the first half and 0.7 in the second; tokens are above, between and below."""
    p_N, beta_N = np.array([0.5, 0.4, 0.3, 0.6, 0.45]), np.array([1.2, 1.2, 1.2, 0.7, 0.7])
    bounds = [
        sorted(sharpened(p, beta, spread) for spread in (0.0, 6.0))
        for p, beta in zip(p_N, beta_N, strict=True)
    ]
    low_N, high_N = np.array(bounds).T
    assert (high_N - low_N).min() > 0.05
    logp_N = np.array([high_N[0] + 0.2, (low_N[1] + high_N[1]) / 2, low_N[2] - 0.3, 0.0, 0.0])
    logp_N[3:] = high_N[3] + 0.1, low_N[4] - 0.4
    sample = SampleColumns(
        logq_T=np.log(p_N),
        logp_T=logp_N,
        index_N=np.arange(5),
        d_N=logp_N - np.log(p_N),
        half_N=np.array([0, 0, 0, 1, 1]),
        topk_logq_TK=np.zeros((5, 2)),
    )
    left_N, takes = temperature._left_by(sample, SAMPLED, np.array([1.2, 0.7]))
    assert left_N == pytest.approx([0.2, 0.0, -0.3, 0.1, -0.4], abs=1e-12)
    assert takes == pytest.approx(1 - 1.0 / np.abs(sample.d_N).sum())


def test_ranks_are_known_and_the_rest_is_spread_below_the_last_of_them():
    """The last rank is missing, as is a sampled token that is rarer than all ranks; in the second
    token it is one of them; the third token has more mass than 1 by rounding.
    """
    nan = np.nan
    ranks_TK = np.log(np.array([[0.5, 0.2, nan], [9, 9, 9], [0.6, 0.3, 0.05], [0.8, 0.2, 1e-3]]))
    ranks_TK[3, 2] = -np.inf
    ranks_TK[3, 0] = np.log(0.81)
    logq_T = np.log(np.array([0.1, 9, 0.05, 0.81]))
    sample = SampleColumns(logq_T=logq_T, topk_logq_TK=ranks_TK, index_N=np.array([0, 2, 3]))
    known_NK, rest_N, likeliest_N = temperature._known_and_rest(sample, use_topk=True)
    with np.errstate(divide="ignore"):
        expected_NK = np.log(np.array([[0.5, 0.2, 0, 0.1], [0.6, 0.3, 0.05, 0], [0.81, 0.2, 0, 0]]))
    np.testing.assert_allclose(known_NK, expected_NK)
    assert rest_N == pytest.approx([0.2, 0.05, 0.0])
    assert likeliest_N == pytest.approx(np.log([0.2, 0.05, 0.2]))
    sample.topk_logq_TK = None
    for use_topk in (True, False):
        known_NK, rest_N, likeliest_N = temperature._known_and_rest(sample, use_topk=use_topk)
        assert known_NK == pytest.approx(np.log([[0.1], [0.05], [0.81]]))
        assert rest_N == pytest.approx([0.9, 0.95, 0.19])
        assert likeliest_N == pytest.approx(np.log([0.9, 0.95, 0.19]))


def test_a_certain_token_has_no_rest():
    """A log-probability of 0, and one above it by rounding."""
    sample = SampleColumns(logq_T=np.array([0.0, 1e-7]), topk_logq_TK=None, index_N=np.arange(2))
    _, rest_N, likeliest_N = temperature._known_and_rest(sample, use_topk=False)
    assert rest_N.tolist() == [0.0, 0.0]
    assert likeliest_N == pytest.approx(np.log([1e-300, 1e-300]))


def test_with_ranks_what_is_left_is_beyond_the_exact_power():
    """Three ids are all there is."""
    ranks_TK = np.log(np.array([[0.5, 0.3, 0.2], [0.7, 0.2, 0.1]]))
    beta_N = np.array([1.3, 0.8])
    powers_NK = np.exp(beta_N[:, None] * ranks_TK)
    at_beta_N = np.log(powers_NK[:, 1] / powers_NK.sum(axis=1))
    logp_T = at_beta_N + np.array([0.25, -0.5])
    sample = SampleColumns(
        logq_T=ranks_TK[:, 1],
        logp_T=logp_T,
        index_N=np.arange(2),
        d_N=logp_T - ranks_TK[:, 1],
        half_N=np.arange(2),
        topk_logq_TK=ranks_TK,
    )
    left_N, _ = temperature._left_by(sample, TOPK, beta_N)
    assert left_N == pytest.approx([0.25, -0.5])


def fitted(beta_of_halves: tuple[float, float], tokens: int = 400):
    """A fit through values whose slope is another one in each half of eight prompt groups."""
    rng = np.random.default_rng(0)
    group_M = np.arange(tokens) % 8
    x_M = rng.normal(size=tokens)
    slope_M = np.array(beta_of_halves)[group_M % 2]
    y_M = slope_M * x_M + 0.1 * rng.normal(size=tokens)
    sample = SimpleNamespace(half_G=np.arange(8) % 2)
    return temperature._fit(sample, x_M, y_M, group_M, "here", topk=True), (x_M, y_M, group_M)


def test_a_slope_is_between_those_of_y_on_x_and_of_x_on_y():
    fit, (x_M, y_M, group_M) = fitted((1.5, 1.2))
    down, up = (x_M @ y_M) / (x_M @ x_M), (x_M @ y_M) / (y_M @ y_M)
    assert fit.beta == pytest.approx(np.sqrt(down / up))
    assert fit.bounds == pytest.approx((down, 1 / up))
    assert fit.bounds[0] < fit.beta < fit.bounds[1]
    assert fit.error == pytest.approx(slope_over_prompts(x_M, y_M, group_M)[1])
    assert (fit.source, fit.topk) == ("here", True)


def test_each_half_gets_the_slope_of_the_other():
    fit, _ = fitted((1.5, 1.2))
    assert fit.of_other_half == pytest.approx((1.2, 1.5), abs=0.05)


def test_a_slope_takes_two_hundred_values_and_rises_in_both_halves():
    assert fitted((1.5, 1.2), tokens=200)[0] is not None
    assert fitted((1.5, 1.2), tokens=199)[0] is None
    assert fitted((0.7, 0.8))[0].beta == pytest.approx(0.75, abs=0.02)
    assert fitted((-1.5, 2.5))[0] is None
    assert fitted((2.5, -1.5))[0] is None
    assert fitted((-1.5, -1.5))[0] is None


def test_ranks_are_usable_above_twelve_nats_on_both_sides():
    q_TK = np.array([[-1.0, -2.0, -12.0], [9.0, 9.0, 9.0], [-1.0, -11.9, -2.0]])
    p_TK = np.array([[-1.1, -2.1, -3.1], [9.0, 9.0, 9.0], [-1.1, -3.1, -12.1]])
    sample = SampleColumns(topk_logq_TK=q_TK, topk_logp_TK=p_TK, index_N=np.array([0, 2]))
    q_NK, p_NK, usable_NK = temperature.ranks_of(sample)
    np.testing.assert_array_equal(q_NK, q_TK[[0, 2]])
    np.testing.assert_array_equal(p_NK, p_TK[[0, 2]])
    assert usable_NK.tolist() == [[True, True, False], [True, True, False]]
    for name in ("topk_logq_TK", "topk_logp_TK"):
        assert temperature.ranks_of(SampleColumns(**{**vars(sample), name: None})) is None


def test_values_are_centred_over_the_ids_of_their_own_token():
    v_NK = np.array([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0], [7.0, 8.0, 12.0], [9.0, 3.0, 9.0]])
    among_NK = np.array([[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0]]) > 0
    assert temperature.centred(v_NK, among_NK).tolist() == [
        [-0.5, 0.5, 0.0],
        [0.0, 0.0, 0.0],
        [-2.0, -1.0, 3.0],
        [0.0, 0.0, 0.0],
    ]


def test_the_top_ids_of_a_token_are_fitted_around_their_mean():
    """π is μ^1.25 up to the normaliser of each token, which says nothing."""
    rng = np.random.default_rng(1)
    q_TK = -rng.uniform(1.0, 8.0, (160, 2))
    p_TK = 1.25 * q_TK + rng.normal(size=(160, 1))
    p_TK[3, 0] = -np.inf
    group_N = np.arange(160) % 8
    sample = SampleColumns(
        topk_logq_TK=q_TK,
        topk_logp_TK=p_TK,
        index_N=np.arange(160),
        group_N=group_N,
        half_G=np.arange(8) % 2,
    )
    fit = temperature._from_topk(sample)
    assert fit.beta == pytest.approx(1.25) and fit.error < 1e-9
    assert fit.source == "top-2 log-probabilities" and not fit.is_bound


def test_log_odds_are_fitted_around_their_mean_where_they_are_below_seven():
    """π's odds are μ's to the power 1.25, times a constant; two tokens are beyond rounding."""
    rng = np.random.default_rng(2)
    odds_T = rng.uniform(-4.0, 4.0, 300)
    moved_T = 1.25 * odds_T + 0.5
    odds_T[:2], moved_T[:2] = (7.1, 1.0), (1.0, -7.1)
    group_N = np.arange(300) % 8
    sample = SampleColumns(
        logq_T=-np.logaddexp(0, -odds_T),
        logp_T=-np.logaddexp(0, -moved_T),
        index_N=np.arange(300),
        group_N=group_N,
        half_G=np.arange(8) % 2,
    )
    x_M, y_M, group_M = temperature._odds(sample)
    assert x_M == pytest.approx(odds_T[2:] - odds_T[2:].mean())
    assert y_M == pytest.approx(moved_T[2:] - moved_T[2:].mean())
    assert group_M.tolist() == group_N[2:].tolist()
    fit = temperature._from_log_odds(sample)
    assert fit.beta == pytest.approx(1.25) and fit.is_bound
    chosen_N = np.arange(300) < 3
    assert [len(part) for part in temperature._odds(sample, chosen_N)] == [1, 1, 1]
    assert [len(part) for part in temperature._odds(sample, chosen_N & ~chosen_N)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("of_seen", "of_others", "differs"),
    [
        ((1.19, 0.01), (1.1, 0.01), True),
        ((1.17, 0.01), (1.1, 0.01), False),
        ((1.1, 0.01), (1.19, 0.01), True),
        ((0.8, 0.01), (0.9, 0.01), True),
        ((1.19, 0.03), (1.1, 0.01), False),
        ((1.19, 0.01), (1.1, 0.03), False),
        ((1.1, 0.01), (1.0, 0.01), True),
        ((1.0, 0.01), (1.1, 0.01), True),
        (None, (1.1, 0.01), False),
        ((1.1, 0.01), None, False),
    ],
)
def test_slopes_on_seen_tokens_differ_by_their_ratio_and_their_errors(
    of_seen, of_others, differs, monkeypatch
):
    """β − 1 is nearly twice as large on one part, by more than three standard errors."""
    slopes = iter([slope and (*slope, (1.0, 1.0)) for slope in (of_seen, of_others)])
    monkeypatch.setattr(temperature, "_slope", lambda *_: next(slopes))
    sample = SampleColumns(
        seen_T=np.arange(400) < 200,
        index_N=np.arange(400),
        logq_T=np.full(400, -1.0),
        logp_T=np.full(400, -1.0),
        group_N=np.zeros(400, dtype=int),
    )
    assert temperature.differs_where_seen(sample) == differs


@pytest.mark.parametrize("in_context", [199, 201])
def test_both_parts_need_two_hundred_tokens(in_context, monkeypatch):
    monkeypatch.setattr(temperature, "_slope", lambda *_: pytest.fail("too few tokens"))
    sample = SampleColumns(
        seen_T=np.arange(400) < in_context,
        index_N=np.arange(400),
        logq_T=np.full(400, -1.0),
        logp_T=np.full(400, -1.0),
        group_N=np.zeros(400, dtype=int),
    )
    assert not temperature.differs_where_seen(sample)
    sample.seen_T = None
    assert not temperature.differs_where_seen(sample)


def gap_evidence(d_N: np.ndarray, high: float, **columns: object) -> SimpleNamespace:
    """A gap of these tokens, each a prompt of its own, and up to which it is expected."""
    sample = SampleColumns(d_N=d_N, group_N=np.arange(len(d_N)), **columns)
    return SimpleNamespace(
        sample=sample,
        gap=SimpleNamespace(value=float(np.abs(d_N).mean())),
        expected=SimpleNamespace(high=high, share_by_grid=None),
        about={},
        sampling={},
    )


@pytest.mark.parametrize(
    ("fit", "left", "high", "lean", "is_like_one"),
    [
        (TOPK, 0.9, 0.0, 1, True),
        (SAMPLED, 0.019, 0.0, 1, True),
        (SAMPLED, 0.021, 0.0, 0, False),
        (SAMPLED, 0.09, 0.1, 0, True),
        (SAMPLED, 0.11, 0.1, 0, False),
        (SAMPLED, 0.09, 0.2, 0, True),
        (SAMPLED, 0.11, 0.2, 0, False),
        (SAMPLED, 0.09, 0.1, 1, False),
        (SAMPLED, 0.09, 0.1, -1, True),
    ],
    ids=["the top ids", "a tenth", "more than expected", "as expected", "more", "less than half",
         "more than half", "no distribution", "other sign"],
)  # fmt: skip
def test_sampled_tokens_show_a_temperature_by_the_noise_that_it_leaves(
    fit, left, high, lean, is_like_one
):
    """Of a gap of 0.2; the mean ratio is far from 1 where all gaps have one sign."""
    d_N = np.linspace(0.19, 0.21, 100) * (lean or np.resize([1.0, -1.0], 100))
    left_N = left * np.resize([1.0, -1.0], 100)
    assert temperature._is_like_one(gap_evidence(d_N, high), fit, left_N) == is_like_one


@pytest.mark.parametrize(
    ("takes", "mirrored", "by_grid", "status"),
    [
        (0.26, -0.5, None, "found"),
        (0.24, -0.5, None, "clear"),
        (0.36, 0.12, None, "clear"),
        (0.36, 0.10, None, "found"),
        (0.16, -0.5, 0.4, "found"),
        (0.14, -0.5, 0.4, "clear"),
        (0.11, 0.0, 0.9, "found"),
        (0.09, 0.0, 0.9, "clear"),
    ],
)
def test_a_temperature_explains_a_quarter_more_than_its_mirror_image(
    takes, mirrored, by_grid, status, monkeypatch
):
    """A quarter of what rounding does not make, and a tenth at least."""
    left_of = {1.2: np.full(100, 0.01), 0.8: np.full(100, 0.02)}
    takes_of = {1.2: takes, 0.8: mirrored}
    fit = TemperatureFit(1.5, 0.0, (1.5, 1.5), (1.2, 1.7), "the manifest", topk=True)
    monkeypatch.setattr(temperature, "_stated", lambda _: fit)
    monkeypatch.setattr(
        temperature, "_left_by", lambda _, __, b: (left_of[b[0]], takes_of[round(b[0], 9)])
    )
    columns = {"logq_T": np.full(100, -1.0), "logp_T": np.full(100, -0.9)}
    evidence = gap_evidence(np.full(100, 0.1), 0.2, index_N=np.arange(100), **columns)
    evidence.expected.share_by_grid = by_grid
    finding = temperature.check(evidence)
    assert (finding.check, finding.status, finding.effect) == ("temperature", status, 1.5)
    assert finding.evidence[-2:] == (
        ("share of the gap that β explains", takes),
        ("that 2 − β would explain", mirrored),
    )
    if status == "found":
        assert finding.left_N is left_of[1.2] and not finding.at_most


def test_a_stated_temperature_is_that_of_the_engine_over_that_of_the_trainer(monkeypatch):
    monkeypatch.setattr(temperature, "temperatures_of", lambda about: about)
    evidence = SimpleNamespace(about=(0.75, 0.5), sample=SampleColumns(topk_logq_TK=None))
    stated = temperature._stated(evidence)
    assert (stated.beta, stated.error, stated.source) == (1.5, 0.0, "the manifest")
    assert stated.bounds == stated.of_other_half == (1.5, 1.5)
    evidence.about = (0.8, 0.8)
    assert temperature._stated(evidence) is None


def sixty_four_equal_tokens() -> SampleColumns:
    """At p = e^−1, 0.1 nats apart, in 32 groups of prompts."""
    return SampleColumns(
        logq_T=np.full(64, -1.0),
        logp_T=np.full(64, -0.9),
        index_N=np.arange(64),
        d_N=np.full(64, 0.1),
        group_N=np.arange(64) % 32,
    )


def test_the_temperature_of_a_share_of_the_gap_is_that_which_moves_as_much():
    """At p = e^−1 the log-odds are −log(e − 1): 1 % of them times 1 − p, or 30 % of the gap."""
    odds = np.log(np.e - 1)
    sample = sixty_four_equal_tokens()
    fit = TemperatureFit(1.0, 0.0, (1.0, 1.0), (1.0, 1.0), "top-3", topk=True)
    size = 0.3 * 0.1 / (odds * (1 - np.exp(-1)))
    assert temperature.power(sample, fit, 0.3) == f"a temperature of ≥ {1 + size:.4g} times"


def test_rows_name_the_fit_with_its_error_and_its_bounds():
    evidence = SimpleNamespace(
        sampling={"temperature": 0.7}, about={"trainer": {"temperature": 0.9}}
    )
    assert temperature._rows(evidence, TOPK, 0.6, -0.1) == (
        ("fitted β = T of the rollout / T of the trainer", 1.5),
        ("its standard error over prompts, of the fit alone", 0.01),
        ("the same if all noise is the trainer's", 1.4),
        ("if all noise is the rollout's", 1.6),
        ("fitted from", "top-3 log-probabilities"),
        ("temperature in the manifest", 0.7),
        ("the trainer's", 0.9),
        ("share of the gap that β explains", 0.6),
        ("that 2 − β would explain", -0.1),
    )


@pytest.mark.parametrize(
    ("error", "bounds", "least", "size"),
    [
        (0.0, (1.0, 1.0), 0.0, "1.004"),
        (0.0, (0.7, 1.1), 0.0, "1.3"),
        (0.0, (0.9, 1.2), 0.0, "1.2"),
        (0.02, (1.0, 1.0), 0.0, None),
    ],
    ids=["the least", "noise of the trainer", "noise of the rollout", "chance"],
)
def test_the_temperature_that_would_have_been_found_is_beyond_noise_and_chance(
    error, bounds, least, size
):
    """Of 32 groups of prompts, six normal standard errors are more of Student's."""
    sample = sixty_four_equal_tokens()
    fit = TemperatureFit(1.0, error, bounds, (1.0, 1.0), "top-3", topk=True)
    if size is None:
        times = float(temperature.power(sample, fit, least).split()[4])
        assert as_normal((times - 1) / error, 32) == pytest.approx(6.0, rel=0.02)
    else:
        assert temperature.power(sample, fit, least) == f"a temperature of ≥ {size} times"


@pytest.mark.parametrize(("noise", "says"), [(0.99, "1.99 times"), (1.01, "no power")])
def test_twice_the_temperature_is_the_most_that_would_have_been_found(noise, says):
    sample = SampleColumns(
        logq_T=np.full(64, -1.0),
        logp_T=np.full(64, -1.0),
        index_N=np.arange(64),
        d_N=np.zeros(64),
        group_N=np.arange(64) % 32,
        num_counted=64,
    )
    fit = TemperatureFit(1.0, 0.0, (1.0, 1.0 + noise), (1.0, 1.0), "top-3", topk=True)
    assert says in temperature.power(sample, fit, 0.0)


@pytest.mark.parametrize("groups", [10, 32, 10**6])
def test_six_standard_errors_are_more_of_few_prompts(groups):
    """Wallace's formula, solved for t."""
    degrees = groups - 1
    z = 6 * (8 * degrees + 3) / (8 * degrees + 1)
    t = np.sqrt(degrees * np.expm1(z**2 / degrees))
    assert temperature._t_of_z(groups) == pytest.approx(t, rel=5e-3)


@pytest.mark.parametrize(
    ("fit", "words"),
    [
        (TOPK, "The rollout's distribution is the trainer's at 1.5 times its temperature "
               "(flatter)."),
        (TemperatureFit(0.8, 0.1, (1, 1), (1, 1), "x", topk=True),
         "The rollout's distribution is the trainer's at 0.8 times its temperature (sharper)."),
        (TemperatureFit(0.75, 0.0, (1, 1), (1, 1), "the manifest", topk=False),
         "The engine's temperature is 0.6, and the trainer's 0.8."),
    ],
)  # fmt: skip
def test_the_sentence_says_which_side_is_flatter(fit, words, monkeypatch):
    monkeypatch.setattr(temperature, "temperatures_of", lambda _: (0.6, 0.8))
    assert temperature._sentence(SimpleNamespace(about={}), fit) == words
    bound = temperature._sentence(SimpleNamespace(about={}), SAMPLED)
    assert bound.endswith(temperature._AT_MOST)


def test_noise_on_one_side_is_possible_where_1_is_between_the_bounds():
    for bounds, may_be_noise in (
        ((0.9, 1.1), True),
        ((1.1, 0.9), True),
        ((1.01, 1.1), False),
        ((0.9, 0.99), False),
    ):
        fit = TemperatureFit(1.2, 1e-4, bounds, (1.2, 1.2), "top-3", topk=True)
        assert fit.may_be_noise == may_be_noise
        sample = SampleColumns(group_N=np.arange(40))
        assert temperature.is_certain(sample, fit) != may_be_noise


def test_a_penalty_on_seen_tokens_is_no_certain_temperature(monkeypatch):
    """With the top ids a penalty has its own check; what the manifest states needs no proof."""
    sample = SampleColumns(group_N=np.arange(40))
    for differs in (True, False):
        monkeypatch.setattr(temperature, "differs_where_seen", lambda _, differs=differs: differs)
        for topk, source, is_certain in (
            (False, "log-odds", not differs),
            (True, "top-3", True),
            (False, "the manifest", True),
        ):
            fit = TemperatureFit(1.2, 1e-4, (1.1, 1.3), (1.2, 1.2), source, topk=topk)
            assert temperature.is_certain(sample, fit) == is_certain
    stated = TemperatureFit(1.0, 0.0, (1.0, 1.0), (1.0, 1.0), "the manifest", topk=True)
    assert temperature.is_certain(sample, stated)
    exact = TemperatureFit(1.2, 0.0, (1.2, 1.2), (1.2, 1.2), "top-3", topk=True)
    assert not temperature.is_certain(sample, exact)


def test_without_a_fit_or_its_error_a_temperature_is_untested(monkeypatch):
    few = SampleColumns(
        logq_T=np.full(5, -1.0),
        logp_T=np.full(5, -0.9),
        index_N=np.arange(5),
        d_N=np.full(5, 0.1),
        group_N=np.arange(5),
        half_G=np.arange(5) % 2,
        topk_logq_TK=None,
        topk_logp_TK=None,
    )
    evidence: Evidence = SimpleNamespace(sample=few, about={}, sampling={})
    finding = temperature.check(evidence)
    assert (finding.check, finding.status) == ("temperature", "untested")
    assert finding.reason == "no power: 0 % of the tokens are certain"
    fit = TemperatureFit(1.1, np.inf, (1.1, 1.1), (1.1, 1.1), "top-3", topk=True)
    monkeypatch.setattr(temperature, "_stated", lambda _: fit)
    assert temperature.check(evidence).reason == "too few prompts to know the error of a fit"
    few.d_N = np.zeros(5)
    monkeypatch.setattr(temperature, "_stated", lambda _: TOPK)
    undone = temperature.check(evidence)
    assert (undone.status, undone.effect, undone.measure) == ("clear", 1.5, "fitted β")
