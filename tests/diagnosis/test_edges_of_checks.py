"""Single decisions of the checks, on a few tokens made by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.diagnosis import far_responses
from mismatch_cli.diagnosis.checks import (
    another_quantity,
    attention,
    constant_offset,
    context_parallel,
    forced_tokens,
    growth_over_steps,
    heavy_tail,
    lm_head,
    log_base,
    masked_tokens,
    not_repeatable,
    placeholders,
    position_drift,
    repetition_penalty,
    sharp_onset,
    stale_weights,
    stored_values,
    temperature,
    truncated_support,
    uniform_mixture,
    values,
)
from mismatch_cli.diagnosis.checks.truncated_support import OneSided
from mismatch_cli.diagnosis.counts import SideCounts
from mismatch_cli.diagnosis.diagnose import Findings
from mismatch_cli.diagnosis.evidence import Finding
from mismatch_cli.diagnosis.group_estimates import Mean
from mismatch_cli.diagnosis.sample import Sample
from mismatch_cli.limits.expected import Expected
from tests.diagnosis.samples import SampleColumns


def test_a_token_without_the_constant_keeps_its_gap_unless_it_was_clipped_at_0():
    """The constant is −0.5: two usual tokens, one clipped on either side, and one beyond it."""
    logq_T = np.array([-1.0, -1.0, 0.0, -0.3, 0.0])
    logp_T = np.array([-1.5, -1.2, -0.4, 0.0, -0.9])
    left_T = constant_offset.without_constant(logq_T, logp_T, -0.5)
    assert left_T == pytest.approx([0.0, 0.3, 0.0, 0.0, -0.4])


def test_what_attention_leaves_out_is_read_of_the_trainer_that_the_pair_is_about():
    """The recomputing pass has its own attention; with staleness, the trainer's counts."""
    about = {
        "rollout": {"model": "m", "attention_backend": "FLASH_ATTN"},
        "trainer": {"model": "m", "attn_implementation": "eager"},
        "recomputed": {
            "model": "m", "attn_implementation": "sdpa", "attention_leaves_out": "the softcap"
        },
    }  # fmt: skip
    sample = SampleColumns(index_N=np.arange(3))
    for pair, status in (("mismatch", "found"), ("total", "clear")):
        evidence = SimpleNamespace(
            about=about, pair=SimpleNamespace(name=pair), sample=sample, model=None
        )
        assert attention.check(evidence).status == status, pair


def test_a_contrast_without_an_error_proves_no_penalty(monkeypatch):
    """All prompts agree to the bit: nothing is divided by 0, and nothing is called found."""
    fit = repetition_penalty.PenaltyFit(0.5, 0.0, np.zeros(4), "the top K")
    monkeypatch.setattr(repetition_penalty, "from_topk", lambda _: fit)
    evidence = SimpleNamespace(sample=SimpleNamespace(d_N=np.full(4, 0.5)))
    assert repetition_penalty.check(evidence).status == "clear"


def tokens_of(d_N: np.ndarray, group_N: np.ndarray, **columns: object) -> SimpleNamespace:
    """Tokens that all count, each a response of its own, with log μ = −1."""
    every_N = np.arange(len(d_N))
    plain = {"logq_T": np.full(len(d_N), -1.0), "logp_T": d_N - 1, "u_N": np.abs(d_N)}
    plain |= {"index_N": every_N, "response_T": every_N, "half_N": group_N % 2}
    return SampleColumns(d_N=d_N, group_N=group_N, **plain | columns)


def test_every_constant_that_code_writes_is_named():
    powers = {f"−1e{k}": -(10.0**k) for k in (4, 5, 6, 8, 9, 10)}
    logarithms = {
        f"log 1e−{k}": np.log(float(f"1e-{k}")) for k in (5, 6, 7, 8, 9, 10, 12, 15, 16, 20, 30)
    }
    smallest = {
        "the smallest float16": float(np.finfo(np.float16).min),
        "the smallest bfloat16": torch.finfo(torch.bfloat16).min,
        "the smallest float32": float(np.finfo(np.float32).min),
    }
    constants = powers | logarithms | smallest | {"−9999": -9999.0}
    logp_T = np.array([*constants.values()])
    every_N = np.arange(len(logp_T))
    more = {"counts_T": every_N >= 0, "num_responses": len(every_N)}
    sample = tokens_of(logp_T + 1.0, every_N, logp_T=logp_T, **more)
    finding = stored_values.check(SimpleNamespace(sample=sample))
    assert dict(finding.evidence) == {f"logp_trainer: {name}, a constant": 1 for name in constants}


def offset_beside(d_N: np.ndarray, second: float = -0.1) -> bool:
    """Whether two responses of −0.1 and another constant are put down to truncation, beside tokens
    of 40 others.
    """
    constant_S = np.array([-0.1, second, *[0.0] * 40])
    response_T = np.repeat(np.arange(42), 25)
    all_N = np.concatenate([np.repeat(constant_S[:2], 25), d_N])
    sample = tokens_of(all_N, response_T % GROUPS, response_T=response_T)
    return constant_offset.renormalised(sample, constant_S)


def test_constants_are_those_of_truncation_only_if_all_responses_lean_the_same_way(rng):
    leaning_N = -0.1 * rng.random(1000)
    assert offset_beside(leaning_N)
    assert not offset_beside(leaning_N, second=0.01)
    assert not offset_beside(0.1 * rng.normal(size=1000))
    assert not offset_beside(-1e-6 * rng.random(1000))


def growth(mean_by_step: list[float], rng: np.random.Generator):
    """The finding for 32 prompts in every step, whose gaps differ by a few per cent."""
    steps = np.arange(len(mean_by_step))
    step_S = np.repeat(steps, GROUPS)
    u_N = np.repeat(mean_by_step, GROUPS) * rng.uniform(0.95, 1.05, len(step_S))
    sample = tokens_of(u_N, np.tile(np.arange(GROUPS), len(steps)), step_S=step_S)
    return growth_over_steps.check(SimpleNamespace(sample=sample, step_change=None))


def test_steps_that_scatter_widely_show_no_growth(rng):
    """Both rise by about the same factor; only the first does so from step to step."""
    steady = growth([1.0, 1.3, 1.5, 1.8, 2.0, 2.3, 2.5, 2.8], rng)
    scattered = growth([1.0, 2.6, 0.8, 2.9, 1.2, 3.2, 1.4, 3.6], rng)
    assert steady.status == "found"
    assert scattered.status == "untested"
    assert steady.effect > 2


def test_growth_needs_four_steps(rng):
    assert growth([1.0, 1.5, 2.0, 2.5], rng).status == "found"
    too_few = growth([1.0, 1.5, 2.0], rng)
    assert (too_few.check, too_few.status) == ("growth-over-steps", "untested")
    assert too_few.reason == "needs at least 4 steps, the trace has 3"


def test_a_clear_answer_names_the_growth_that_would_have_shown(rng):
    """Steps that scatter more would have shown less; of noise alone nothing can be said."""
    quiet = growth([1.0, 1.02, 0.98, 1.01, 1.0, 0.99], rng)
    scattered = growth([1.0, 1.4, 0.9, 1.3, 0.8, 1.2], rng)
    named = [
        float(finding.reason.split("growth of ")[1].split()[0]) for finding in (quiet, scattered)
    ]
    assert named[0] == pytest.approx(1.6, abs=0.1)
    assert named[1] > 2 * named[0]
    assert growth(list(np.linspace(1.0, 1.2 * named[0], 6)), rng).status == "found"
    assert growth(list(np.linspace(1.0, 0.8 * named[0], 6)), rng).status == "clear"


def penalised(nats: float | np.ndarray, rng: np.random.Generator):
    """A fit to tokens, half of them seen before, on which π has higher log-odds by `nats`."""
    tokens = 64 * GROUPS
    seen_T = rng.random(tokens) < 0.5
    odds_T = rng.uniform(-6.0, -3.0, tokens)
    logq_T, logp_T = (-np.logaddexp(0, -x_T) for x_T in (odds_T, odds_T + nats * seen_T))
    group_N, columns = np.arange(tokens) % GROUPS, {"logq_T": logq_T, "logp_T": logp_T}
    sample = tokens_of(logp_T - logq_T, group_N, seen_T=seen_T, **columns)
    return repetition_penalty.from_log_odds(sample)


@pytest.mark.parametrize("nats", [2.5, -2.5])
def test_a_penalty_fitted_to_log_odds_leaves_nothing_of_its_own_gap(rng, nats):
    fit = penalised(nats, rng)
    assert fit.nats == pytest.approx(nats, rel=1e-6)
    assert np.abs(fit.left_N).max() < 1e-9


def test_a_penalty_is_taken_off_a_half_of_the_prompts_as_the_other_half_shows_it(rng):
    """Of 2.5 nats, the 0.5 of the other half leave 2; 2.5 nats explain all of 0.5."""
    left_N = penalised(np.tile([2.5, 0.5], 32 * GROUPS), rng).left_N
    assert np.abs(left_N[0::2]).max() == pytest.approx(2.0, abs=0.1)
    assert np.abs(left_N[1::2]).max() < 1e-9


@pytest.mark.parametrize(
    ("sharpness", "size", "sharp", "perhaps"),
    [
        (0.7, 0.7, True, True),
        (0.7, 0.5, False, True),
        (0.9, 0.57, True, True),
        (0.7, 0.3, False, False),
        (0.5, 0.9, False, False),
    ],
)
def test_a_smaller_rise_may_be_a_jump_if_it_is_as_sharp(sharpness, size, sharp, perhaps):
    jump = sharp_onset.Jump(
        9, "response", Mean(1.0, 0.1, 90), Mean(2.0, 0.1, 90), sharpness, size, z=6.0
    )
    assert (jump.is_sharp, jump.may_be_sharp) == (sharp, perhaps)


def test_the_steep_part_of_a_gap_is_that_of_tokens_below_half():
    """log 0.5 is −0.69: of a gap of 2.0 in all, one token has 1.0."""
    d_N = np.array([-1.0, -0.5, 0.5, 0.0])
    one_sided = OneSided.of(d_N, np.arange(4))
    assert (one_sided.gap, one_sided.steep) == (0.5, 0.5)
    assert OneSided.of(np.zeros(4), np.arange(4)).steep == 0.0


def test_zeros_of_a_side_count_if_one_of_them_is_far_from_the_other_side():
    """The only zero of log π is half a nat from log μ: a likely token, rounded up."""
    sample = SampleColumns(
        logq_T=np.array([0.0, 0.0, -0.5, -3.0]), logp_T=np.array([-2.0, -0.1, 0.0, -3.0])
    )
    sample.abs_d_T = np.abs(sample.logp_T - sample.logq_T)
    assert placeholders.zeros_T(sample).tolist() == [True, True, False, False]


@pytest.mark.parametrize(("off", "pair"), [(0.055, ("2", "e")), (0.065, None)])
def test_another_base_fits_to_six_per_cent_and_three_hundredths_of_a_nat(off, pair):
    """At −0.5 nats that is 0.06."""
    logp_N = np.full(10, -0.5)
    logq_N = (logp_N + off * np.tile([1.0, -1.0], 5)) / np.log(2.0)
    assert log_base.pair_of_bases(logq_N, logp_N) == pair


@pytest.mark.parametrize(("base", "factor"), [("2", np.log(2.0)), ("10", np.log(10.0))])
def test_the_model_shows_the_base_of_both_sides(rng, base, factor):
    """Neither has top-K columns, and a quotient of both would be 1."""
    natural_T = -rng.uniform(0.2, 8.0, 100)
    sample = tokens_of(
        np.zeros(100), np.arange(100), logq_T=natural_T / factor, logp_T=natural_T / factor,
        topk_logq_TK=None, topk_logp_TK=None, counts_T=np.ones(100, dtype=bool),
        response_T=np.arange(100) // 10, num_responses=10,
        spans=lambda: [slice(s, s + 10) for s in range(0, 100, 10)],
    )  # fmt: skip
    for model_T, bases in ((natural_T, (base, base)), (2.5 * natural_T, ("not known",) * 2)):
        model = SimpleNamespace(logp_T=lambda logp_T=model_T: logp_T)
        finding = log_base.check(SimpleNamespace(sample=sample, model=model))
        assert tuple(value for _, value in finding.evidence[:2]) == bases
        assert (finding.status == "found") == (model_T is natural_T)


def test_a_run_reaches_the_end_of_its_own_response():
    """Three responses: a run within it and one at its end, no run at its end, and all of it."""
    flags = ["xx.xx", ".xx.", "xx"]
    flag_T = np.array([flag == "x" for flag in "".join(flags)])
    reaches_T = masked_tokens.reaches_the_end(flag_T, np.cumsum([0, *map(len, flags)]))
    assert "".join("x" if reaches else "." for reaches in reaches_T) == "...xx" + "...." + "xx"


def test_a_jump_is_judged_by_the_standard_errors_of_eight_positions_on_either_side(rng):
    """128 responses of 40 tokens, whose gaps double at position 24."""
    position_N = np.tile(np.arange(40), GROUPS)
    u_N = np.where(position_N < 24, 1.0, 2.0) + 0.3 * rng.normal(size=len(position_N))
    sample = SampleColumns(
        axis_N=lambda _: position_N, u_N=u_N, group_N=np.repeat(np.arange(GROUPS), 40)
    )
    jump = sharp_onset.jump_on(sample, "response")
    before_N = u_N[(position_N >= 16) & (position_N < 24)]
    after_N = u_N[(position_N >= 24) & (position_N < 32)]
    rise = after_N.mean() - before_N.mean()
    error = np.sqrt(before_N.var() / len(before_N) + after_N.var() / len(after_N))
    assert jump.index == 24
    assert jump.z == pytest.approx(rise / error, rel=1e-9)
    assert jump.size == pytest.approx(
        rise / np.sqrt((before_N.var() + after_N.var()) / 2), rel=1e-9
    )


@pytest.mark.parametrize(("above_zero", "status"), [(0, "clear"), (5, "found")])
def test_the_share_of_impossible_values_is_that_of_both_sides_values(above_zero, status):
    """−inf is possible only in a trainer that truncates, whose other tokens are more probable."""
    odd = above_zero // 5
    sides = {
        "logp_rollout": SideCounts(tokens=40, impossible=odd, not_a_number=odd),
        "logp_trainer": SideCounts(tokens=60, impossible=7, above_zero=3 * odd),
    }
    counts = SimpleNamespace(sides=sides, out_of_support=7)
    zero_T = np.zeros(1)
    sample = SampleColumns(
        logq_T=zero_T, logp_T=zero_T, d_N=np.array([0.2]), left_without=lambda _: None
    )
    evidence = SimpleNamespace(counts=counts, sample=sample, sampling={"top_p": 1.0})
    finding = values.check(evidence)
    assert (finding.status, finding.effect) == (status, above_zero / 100)
    sample.d_N = np.array([0.2, -0.2])
    finding = values.check(evidence)
    assert (finding.status, finding.effect) == ("found", (above_zero + 7) / 100)
    evidence.sampling = {"top_p": 0.9, "top_k": -1}
    assert values.check(evidence).effect == above_zero / 100


def tail_in(
    family: str | None,
    rng: np.random.Generator,
    responses: int = 40,
    far: float = 0.25,
    length: int = 30,
):
    """The finding where one token of each response has `far` nats, by default half of the gap, and
    the gap is too large without them too.
    """
    response_T = np.repeat(np.arange(responses), length)
    tokens = len(response_T)
    d_N = rng.choice([-1.0, 1.0], tokens) * rng.uniform(0.006, 0.01, tokens)
    d_N[::length] = far
    columns = {"typical_N": np.full(tokens, 0.008), "u_N": np.abs(d_N) / 0.008}
    columns |= {"response_T": response_T, "num_responses": responses}
    sample = tokens_of(d_N, response_T % GROUPS, **columns)
    gap, expected = SimpleNamespace(value=np.abs(d_N).mean()), SimpleNamespace(high=0.005)
    evidence = SimpleNamespace(sample=sample, gap=gap, expected=expected, family=family)
    return heavy_tail.check(evidence)


@pytest.mark.parametrize("family", ["dense", None])
def test_a_few_tokens_with_a_part_of_the_gap_are_a_cause_only_with_experts(family, rng):
    """Routing alone moves a few tokens so far that a gap is too large without them too."""
    routed, other = tail_in("moe", rng), tail_in(family, rng)
    assert routed.status == "found" and "different experts" in routed.cause
    assert other.status == "clear" and other.reason.endswith("where it sits, not why")
    assert 0.4 < other.effect < 0.6


@pytest.mark.parametrize("far", [0.25, 1.0])
@pytest.mark.parametrize(
    ("responses", "length", "status"), [(37, 27, "untested"), (40, 25, "found")]
)
def test_a_tail_takes_a_thousand_tokens(responses, length, status, far, rng):
    """With half of the gap, and with nearly all of it, which is a fault."""
    tail = tail_in("moe", rng, responses, far, length)
    assert tail.status == status
    assert tail.beyond_expected == (status == "found" and far == 1.0)


@pytest.mark.parametrize(
    ("of_seen", "of_others", "differs"),
    [(1.25, 1.0, True), (1.0, 1.25, True), (1.25, 1.25, False)],
)
def test_either_part_of_the_tokens_may_be_the_one_at_another_temperature(
    of_seen, of_others, differs, rng
):
    tokens = 64 * GROUPS
    seen_T = rng.random(tokens) < 0.5
    odds_T = rng.uniform(-4.0, 4.0, tokens)
    moved_T = np.where(seen_T, of_seen, of_others) * odds_T + 0.01 * rng.normal(size=tokens)
    group_N = np.arange(tokens) % GROUPS
    sample = SampleColumns(
        logq_T=-np.logaddexp(0, -odds_T),
        logp_T=-np.logaddexp(0, -moved_T),
        index_N=np.arange(tokens),
        seen_T=seen_T,
        group_N=group_N,
        half_N=group_N % 2,
    )
    assert temperature.differs_where_seen(sample) == differs


def fit_of(beta: float, error: float) -> temperature.TemperatureFit:
    """Among the top-K ids, which noise on one side would not give."""
    return temperature.TemperatureFit(beta, error, (beta, beta), (beta, beta), "top-20", topk=True)


@pytest.mark.parametrize(
    ("beta", "error", "is_certain"),
    [
        (1.1, 0.02, False),
        (1.1, 0.005, True),
        (0.9, 0.02, False),
        (0.9, 0.005, True),
        (1.003, 1e-5, False),
        (1.005, 1e-5, True),
        (0.997, 1e-5, False),
        (0.995, 1e-5, True),
    ],
)
def test_a_temperature_is_certain_by_its_distance_from_1_and_its_standard_errors(
    beta, error, is_certain
):
    """Five errors are not enough; twenty are six even with 32 groups of prompts."""
    sample = SampleColumns(group_N=np.arange(GROUPS))
    assert temperature.is_certain(sample, fit_of(beta, error)) == is_certain


def test_the_temperature_that_would_have_been_found_is_the_one_with_that_share_of_the_gap():
    """All of a gap that a temperature of 1.02 makes of two ids, or half of it."""
    odds_T = np.linspace(-4.0, 4.0, 50)
    logq_T, logp_T = (-np.logaddexp(0, -times * odds_T) for times in (1.0, 1.02))
    sample = SampleColumns(
        logq_T=logq_T,
        logp_T=logp_T,
        d_N=logp_T - logq_T,
        index_N=np.arange(50),
        group_N=np.arange(50) % GROUPS,
    )
    for least, times in ((1.0, "1.02"), (0.5, "1.01")):
        power = temperature.power(sample, fit_of(1.0, 0.0), least)
        assert power == f"a temperature of ≥ {times} times"


@pytest.mark.parametrize(("side", "sign"), [("logp_trainer", 1), ("logp_rollout", -1)])
def test_the_side_that_is_mixed_is_named_and_what_else_it_has_is_left(side, sign):
    """A tenth of its probability is spread over 10,000 tokens, and it has 0.3 nats more on one."""
    plain_N = np.log(np.tile([0.5, 0.3, 0.2, 1e-5, 2e-6], 40))
    mixed_N = np.log(0.9 * np.exp(plain_N) + 1e-5)
    mixed_N[7] += 0.3
    logq_T, logp_T = (plain_N, mixed_N) if side == "logp_trainer" else (mixed_N, plain_N)
    sample = SampleColumns(
        logq_T=logq_T,
        logp_T=logp_T,
        d_N=logp_T - logq_T,
        index_N=np.arange(200),
        half_N=np.repeat([0, 1], 100),
    )
    mixture = uniform_mixture.mixture_in(sample)
    assert mixture.side == side
    assert (mixture.epsilon, mixture.floor) == pytest.approx((0.1, 1e-5), rel=1e-6)
    assert mixture.left_N == pytest.approx(np.where(np.arange(200) == 7, sign * 0.3, 0), abs=1e-6)


def head_finding(monkeypatch, reference, current, status="clear", effect=None, undone=()):
    """Of the head, where these shares of each side's logits are on a grid."""
    fit = SimpleNamespace(status=status, effect=effect)
    monkeypatch.setattr(temperature, "check", lambda _: fit)
    logq_T, logp_T = -1.0 - np.random.default_rng(0).random((2, 400))
    sample = SampleColumns(logq_T=logq_T, logp_T=logp_T, index_N=np.arange(400))
    scale = SimpleNamespace(
        reference=SimpleNamespace(share_on_grid=reference),
        current=SimpleNamespace(share_on_grid=current),
    )
    return lm_head.check(SimpleNamespace(sample=sample, scale=scale, undone=undone))


def test_logits_on_a_grid_on_one_side_are_the_finding_of_the_head(monkeypatch):
    for reference, current, side in ((0.9, 0.1, "rollout"), (0.1, 0.9, "trainer")):
        finding = head_finding(monkeypatch, reference, current)
        assert (finding.check, finding.status, finding.effect) == ("lm-head", "found", 0.9)
        assert finding.sentence.startswith(f"The {side}'s logits are rounded to bfloat16 steps")


def test_a_stretched_grid_hides_one_side_only_where_one_side_is_off_it(monkeypatch):
    reasons = {
        "the temperatures differ": {"status": "found", "effect": 0.95},
        "a slope of 1.003": {"effect": 1.003},
        "the bases differ": {"undone": ("log-base",)},
    }
    for reason, why in reasons.items():
        finding = head_finding(monkeypatch, 0.9, 0.1, **why)
        assert finding.status == "untested" and finding.reason.startswith(reason)
        assert head_finding(monkeypatch, 0.9, 0.9, **why).status == "clear"
    assert head_finding(monkeypatch, 0.9, 0.1, effect=1.0015).status == "found"


@pytest.mark.parametrize(
    ("off_N", "left_N", "side"),
    [
        ([0.0, 3.0, 0.0, -3.0], [0.1, 0.0, 0.1, 0.0], ": the trainer's numbers there are not its"),
        ([0.0, 0.0, 0.0, 0.0], [0.1, np.nan, 0.1, np.nan], ""),
        ([0.0, np.nan, 0.0, np.nan], [0.1, np.nan, 0.1, np.nan], ""),
        (None, [0.1, np.nan, 0.1, np.nan], ""),
    ],
    ids=["the trainer is off its model", "it is not", "not scored there", "no model"],
)
def test_tokens_at_cuts_get_their_models_numbers_or_are_left_out(off_N, left_N, side):
    """Of six tokens four count, and of these the second and fourth are wrong by 3 nats."""
    places = np.array([0, 2, 3, 5])
    sample = SampleColumns(index_N=places, logq_T=np.zeros(6), d_N=np.array([0.1, 3.0, 0.1, -3.0]))
    sample.left_without = partial(Sample.left_without, sample)
    readings = None
    if off_N is not None:
        readings = SimpleNamespace(off_T=np.zeros(6))
        readings.off_T[places] = off_N
    evidence = SimpleNamespace(sample=sample, readings=readings)
    found_N, named = context_parallel.left_of_cuts(evidence, np.array([False, True, False, True]))
    np.testing.assert_allclose(found_N, left_N, atol=1e-12)
    assert named.startswith(side) and bool(named) == bool(side)


@pytest.mark.parametrize(
    ("at_cuts", "elsewhere", "last_length", "status"),
    [
        (12, 3, 10, "found"),
        (12, 0, 10, "found"),
        (11, 0, 10, "clear"),
        (12, 4, 10, "clear"),
        (12, 3, 9, "clear"),
    ],
    ids=["four fifths", "just enough", "too few", "too many elsewhere", "too many cuts"],
)
def test_twelve_outlying_tokens_show_cuts_at_a_fifth_of_all(
    at_cuts, elsewhere, last_length, status
):
    """Twenty sequences, of which half is the response, are cut in four: at 0 and 5 of its ten."""
    length_S = np.array([10] * 19 + [last_length])
    response_T = np.repeat(np.arange(20), length_S)
    position_T = np.arange(len(response_T)) - 10 * response_T
    d_N = np.full(len(response_T), 0.1)
    d_N[np.flatnonzero(position_T == 5)[:at_cuts]] = 10
    d_N[np.flatnonzero(position_T == 3)[:elsewhere]] = 10
    sample = tokens_of(
        d_N, response_T, response_T=response_T, length_S=length_S, prompt_length_S=length_S,
        axis_N=lambda _: position_T + length_S[response_T],
    )  # fmt: skip
    finding = context_parallel.check(SimpleNamespace(sample=sample, readings=None))
    assert (finding.check, finding.status) == ("context-parallel", status)
    if status == "found":
        wrong = np.flatnonzero((position_T == 5) & (d_N > 1)).tolist()
        assert np.flatnonzero(np.isnan(finding.left_N)).tolist() == wrong


@pytest.mark.parametrize(
    ("logq", "logp", "elsewhere", "status"),
    [
        (-5.0, -0.1, 0.01, "found"),
        (0.0, -5.0, 0.01, "found"),
        (-0.1, -5.0, 0.01, "clear"),
        (np.linspace(-0.1, 0.0, 20), -5.0, 0.01, "clear"),
        (-0.9, -0.1, 0.01, "clear"),
        (-5.0, -0.1, 0.5, "clear"),
    ],
    ids=["impossible", "certain", "likely", "once certain", "expected by both", "gaps everywhere"],
)
def test_a_token_in_all_responses_is_forced_if_the_engine_could_not_choose(
    logq, logp, elsewhere, status
):
    """The second of four tokens in twenty responses; all other ids differ."""
    ids_T, position_T = np.arange(80), np.arange(80) % 4
    d_N = np.full(80, elsewhere)
    logq_T = np.full(80, -1.0)
    ids_T[1::4], logq_T[1::4], d_N[1::4] = 99, logq, logp - logq
    sample = tokens_of(
        d_N, position_T, position_T=position_T, response_ids_T=ids_T, logq_T=logq_T,
        logp_T=logq_T + d_N, left_without=lambda forced_T: np.where(forced_T, np.nan, d_N),
    )  # fmt: skip
    finding = forced_tokens.check(SimpleNamespace(sample=sample))
    assert finding.status == status
    if status == "found":
        assert np.flatnonzero(np.isnan(finding.left_N)).tolist() == list(range(1, 80, 4))
        assert dict(finding.evidence)["mean −log μ there, nats"] == pytest.approx(-logq)


@pytest.mark.parametrize(("tokens", "shows"), [(7, False), (8, True)])
def test_a_response_of_eight_tokens_shows_which_checkpoint_sampled_it(tokens, shows, rng):
    """Its gap is all of the step from the earlier checkpoint, with a little noise."""
    step_N = rng.normal(size=tokens)
    sample = SampleColumns(
        response_T=np.zeros(tokens, dtype=int),
        index_N=np.arange(tokens),
        num_responses=1,
        d_N=step_N,
        typical_N=np.ones(tokens),
        group_N=np.zeros(tokens, dtype=int),
    )
    earlier_d_N = 0.01 * rng.normal(size=tokens)
    kinds = stale_weights.ways_of_responses(SimpleNamespace(sample=sample), earlier_d_N)
    assert kinds.way_S == pytest.approx(1, abs=0.05)
    assert kinds.decided_S.tolist() == kinds.stale_S.tolist() == [shows]


@pytest.mark.parametrize(("tokens", "shows"), [(5, False), (6, True)])
def test_six_tokens_show_which_constant_would_have_been_found(tokens, shows):
    sample = SampleColumns(
        counts_T=np.ones(tokens, dtype=bool),
        abs_d_T=np.full(tokens, 0.2),
        spans=lambda: [slice(0, tokens)],
    )
    power = constant_offset.power(sample)
    assert power.startswith("≥ 1 nats") == shows and ("no response has 6 tokens" in power) != shows


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_certain_tokens_have_no_odds_and_print_no_warning():
    """A log-probability of exactly 0, or above it by rounding, on either side."""
    logq_T, logp_T = np.array([0.0, -1.0, -1.0, -1.0]), np.array([-1.0, 0.0, 1e-7, -1.0])
    sample = SampleColumns(logq_T=logq_T, logp_T=logp_T, index_N=np.arange(4))
    x_N, y_N, usable_N = temperature.log_odds(sample)
    assert usable_N.tolist() == [False, False, False, True]
    assert x_N[3] == y_N[3] == pytest.approx(-np.log(np.e - 1))


@pytest.mark.parametrize(
    ("times", "z", "status"),
    [(1.69, 9, "clear"), (1.71, 9, "found"), (2, 4.9, "clear"), (2, 5.1, "found")],
)
def test_a_jump_is_named_from_its_factor_and_its_standard_errors_on(times, z, status, monkeypatch):
    groups = 10**6  # so many that Student's t is normal
    before, after = Mean(1.0, 0.0, 800, groups), Mean(times, times * np.log(times) / z, 800, groups)
    jump = sharp_onset.Jump(20, "response", before, after, 0.9, 0.9, z)
    monkeypatch.setattr(sharp_onset, "sharpest_jump", lambda _: jump)
    sample = SampleColumns(axis_N=lambda _: np.arange(40), d_N=np.ones(40))
    finding = sharp_onset.check(SimpleNamespace(sample=sample))
    assert (finding.status, finding.effect) == (status, times)


@pytest.mark.parametrize(
    ("gap", "low", "at_own_scale"),
    [(1.99e-5, 0.0, True), (2.01e-5, 0.0, False), (0.99e-3, 1e-3, True), (1.01e-3, 1e-3, False)],
)
def test_a_gap_below_those_of_all_models_needs_no_scale_of_its_own(gap, low, at_own_scale):
    expected = Expected(low, 0.1, "fp32", "the models measured so far", of_this_trace=False)
    for own in (False, True):
        evidence = SimpleNamespace(
            gap=SimpleNamespace(value=gap), expected=replace(expected, of_this_trace=own)
        )
        diagnosis = SimpleNamespace(evidence=evidence)
        assert Findings.is_at_own_scale.fget(diagnosis) == (own or at_own_scale)


def test_a_clear_check_is_a_suspect_if_it_explains_a_tenth_of_the_gap():
    """The one that explains most first, then those that more input would allow; no found fault."""
    by_explains = {
        status: [Finding(f"{status} {share}", status, explains=share) for share in shares]
        for status, shares in {"clear": (None, 0.05, 0.2, 0.4), "found": (0.3,)}.items()
    }
    more = Finding("more", "untested", needs=("--trainer-model",))
    diagnosis = SimpleNamespace(
        is_unexplained=True,
        findings=(*by_explains["found"], *by_explains["clear"]),
        allowed_by_more=(more,),
    )
    suspects = Findings.suspects.fget(diagnosis)
    assert [suspect.check for suspect in suspects] == ["clear 0.4", "clear 0.2", "more"]


def test_a_jump_needs_two_windows_of_positions(rng):
    """17 positions reach beyond two windows of eight, 16 do not."""
    for length, is_judged in ((17, False), (18, True)):
        position_N = np.tile(np.arange(length), GROUPS)
        sample = SampleColumns(
            axis_N=lambda _, position_N=position_N: position_N,
            u_N=np.where(position_N < 9, 1.0, 2.0) + 0.1 * rng.normal(size=len(position_N)),
            group_N=np.repeat(np.arange(GROUPS), length),
        )
        assert (sharp_onset.jump_on(sample, "response") is not None) == is_judged, length


def test_only_counted_tokens_show_which_constant_would_have_been_found():
    """Eight counted tokens with a gap of 0.2, and eight others, measured too, with 3."""
    counts_T = np.arange(16) < 8
    sample = SampleColumns(
        counts_T=counts_T, abs_d_T=np.where(counts_T, 0.2, 3.0), spans=lambda: [slice(0, 16)]
    )
    assert constant_offset.power(sample).startswith("≥ 1 nats")


@pytest.mark.parametrize("topk_logq_TK", [None, np.zeros((1, 2))])
def test_a_stated_temperature_is_exact_with_or_without_top_k(topk_logq_TK, monkeypatch):
    monkeypatch.setattr(temperature, "temperatures_of", lambda about: about["both"])
    evidence = SimpleNamespace(
        about={"both": (0.8, 1.0)}, sample=SampleColumns(topk_logq_TK=topk_logq_TK)
    )
    stated = temperature._stated(evidence)
    assert stated.beta == 0.8 and not stated.is_bound
    assert stated.topk == (topk_logq_TK is not None)


@pytest.mark.parametrize(("takes", "mirrored", "status"), [
    (0.25, 0.0, "found"), (0.6, 0.5, "clear"), (0.8, 0.5, "found"), (0.15, -0.5, "clear"),
])  # fmt: skip
def test_a_temperature_explains_more_than_its_mirror_image(monkeypatch, takes, mirrored, status):
    """By a quarter of what rounding has not made, which is a fifth of the gap."""

    def left_by(_: object, __: object, betas: np.ndarray) -> tuple[np.ndarray, float]:
        return np.zeros(4), {0.75: takes, 1.25: mirrored}[betas[0]]

    monkeypatch.setattr(temperature, "temperatures_of", lambda _: (0.75, 1.0))
    monkeypatch.setattr(temperature, "_left_by", left_by)
    evidence = SimpleNamespace(
        about={"trainer": {}},
        sampling={},
        gap=SimpleNamespace(value=0.1),
        expected=SimpleNamespace(share_by_grid=0.2),
        sample=tokens_of(np.full(4, 0.1), np.arange(4), topk_logq_TK=None),
    )
    assert temperature.check(evidence).status == status


def test_what_is_left_without_context_lies_on_a_line_through_the_gaps():
    """Gaps of 1 + 0.1 · position leave 1 / (1 + 0.1 · position)."""
    position_N = np.arange(100)
    sample = SampleColumns(axis_N=lambda _: position_N, u_N=1 + 0.1 * position_N)
    share_N = position_drift._share_without_context_N(sample)
    assert share_N == pytest.approx(1 / (1 + 0.1 * position_N), rel=1e-6)


@pytest.mark.parametrize(("inside", "shows"), [(0, True), (20, False)])
@pytest.mark.parametrize("side", ["logq_T", "logp_T"])
def test_impossible_tokens_are_at_the_end_if_few_are_elsewhere(side, inside, shows):
    """The last tokens of twenty responses, and none or twenty others."""
    columns = {name: np.full(100, -1.0) for name in ("logq_T", "logp_T")}
    last_T = np.arange(100) % 5 == 4
    columns[side][last_T] = -np.inf
    columns[side][np.flatnonzero(~last_T)[:inside]] = -np.inf
    evidence = SimpleNamespace(sample=SampleColumns(last_T=last_T, **columns))
    assert ("at the end of responses" in values._at_the_end(evidence)) == shows


@pytest.mark.parametrize(("outside", "status"), [(2, "clear"), (3, "found")])
def test_a_trainer_truncates_if_more_than_two_in_a_thousand_tokens_are_impossible(outside, status):
    """It gives all the others more than the engine does."""
    d_N = np.full(1000 - outside, 0.1)
    sample = tokens_of(d_N, np.arange(len(d_N)) % GROUPS, topk_logq_TK=None)
    counts = SimpleNamespace(out_of_support=outside)
    finding = truncated_support.check(SimpleNamespace(sample=sample, counts=counts))
    assert finding.status == status
    if status == "found":
        assert finding.effect == pytest.approx(np.exp(-0.1))


def test_the_gap_of_seven_tokens_is_noise():
    """Of two responses only the one of eight tokens has a relative gap, capped at 3 per token."""
    response_T = np.repeat([0, 1], [7, 8])
    u_N = np.where(np.arange(15) == 14, 10.0, 1.0)
    sample = tokens_of(u_N, response_T, response_T=response_T, num_responses=2)
    assert far_responses._relative_gap_S(sample) == pytest.approx([np.nan, 10 / 8], nan_ok=True)


@pytest.mark.parametrize(("error", "words"), [(0.3, "no power"), (0.01, "a kept mass of ≤ 0.9")])
def test_a_truncation_is_found_only_where_the_mean_ratio_is_known(error, words):
    assert words in OneSided(Mean(1.0, error, 100, 32), gap=0.01, steep=0.0).power


def test_the_column_and_the_quantity_that_it_holds_are_named(rng):
    """log π is minus the entropy in every response."""
    tokens, responses = 20, 40
    logq_T = -rng.exponential(1.0, tokens * responses)
    entropy_T = rng.uniform(1.0, 3.0, tokens * responses)
    sample = quantity_sample(logq_T, -entropy_T, entropy_T, responses)
    (match, *_) = another_quantity._matches(sample, "logp_trainer")
    assert (match.side, match.quantity) == ("logp_trainer", "minus the entropy")
    assert match.inside_S.all() and match.left_T == pytest.approx(0)


@pytest.mark.parametrize(("tokens", "shows"), [(5, False), (6, True)])
def test_a_response_of_six_tokens_shows_what_its_column_holds(tokens, shows, rng):
    logq_T = rng.uniform(-0.8, -0.2, tokens * 40)
    entropy_T = rng.uniform(1.0, 3.0, tokens * 40)
    sample = quantity_sample(logq_T, -entropy_T, entropy_T, 40)
    matches = another_quantity._matches(sample, "logp_trainer")
    assert ("minus the entropy" in [match.quantity for match in matches]) == shows


def quantity_sample(logq_T, logp_T, entropy_T, responses):
    tokens = len(logq_T) // responses
    response_T = np.repeat(np.arange(responses), tokens)
    return SampleColumns(
        logq_T=logq_T,
        logp_T=logp_T,
        entropy_T=entropy_T,
        topk_logq_TK=None,
        topk_logp_TK=None,
        counts_T=np.ones(len(logq_T), dtype=bool),
        response_T=response_T,
        index_N=np.arange(len(logq_T)),
        num_responses=responses,
        d_N=logp_T - logq_T,
        abs_d_T=np.abs(logp_T - logq_T),
        offset_S1=np.arange(0, len(logq_T) + 1, tokens),
        group_N=response_T % GROUPS,
    )


def test_the_top_ids_count_where_both_sides_have_two_of_them():
    q_NK = np.array([[-1.0, -2.0, -np.inf], [-1.0, -2.0, -3.0]])
    p_NK = np.array([[-1.1, -2.1, -3.1], [-1.1, -np.inf, -np.inf]])
    sample = SampleColumns(topk_logq_TK=q_NK, topk_logp_TK=p_NK, index_N=np.arange(2))
    _, _, usable_NK = temperature.ranks_of(sample)
    assert usable_NK.tolist() == [[True, True, False], [False] * 3]


def test_each_side_scatters_around_its_own_first_number(monkeypatch):
    """The same token read again: 0.1 nats on the trainer's side, 0.02 on the engine's."""
    sample = SampleColumns(
        logp_T=np.array([-1.0, -1.1]), logq_T=np.array([-1.0, -1.02]), abs_d_T=np.array([0, 0.08])
    )
    monkeypatch.setattr(not_repeatable, "_pairs", lambda _: [(1, 0)])
    scatter = not_repeatable.scatter_of(sample)
    assert (scatter.trainer, scatter.engine) == (pytest.approx(0.1), pytest.approx(0.02))


@pytest.mark.parametrize("name", ["", "version_trainer", "version_rollout"])
def test_scores_of_the_same_tokens_are_compared_at_the_same_weights(name):
    """Three equal responses to a prompt, of which one may be of other weights."""
    sample = SampleColumns(
        response_ids_T=np.array([7, 8] * 3),
        counts_T=np.ones(6, dtype=bool),
        step_S=np.zeros(3, dtype=int),
        prompt_id_S=np.ones(3, dtype=int),
        origin_S={name: np.array([0, 1, 0])} if name else {},
        spans=lambda: iter([slice(0, 2), slice(2, 4), slice(4, 6)]),
    )
    of_the_third = [(4, 0), (5, 1)]
    of_the_second = [] if name else [(2, 0), (3, 1)]
    assert list(not_repeatable._pairs(sample)) == [*of_the_second, *of_the_third]
