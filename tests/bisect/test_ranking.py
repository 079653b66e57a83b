"""From legs to causes: shares as paired differences, what counts as a cause, and which of
several is named.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch_cli.bisect.effects import Effects, GapSums
from mismatch_cli.bisect.experiments import AS_RECORDED, Experiment, Search
from mismatch_cli.bisect.fixed_tokens import FixedTokens
from mismatch_cli.bisect.ranking import RECORDED, LegDifferences, is_explained, measured_in, rank
from mismatch_cli.metrics.estimate import FEW_DECIDE, NO_SPREAD

PROMPTS, EACH, LENGTH = 40, 2, 20


@pytest.fixture
def tokens() -> FixedTokens:
    responses = PROMPTS * EACH
    prompt_id_S = np.repeat(np.arange(PROMPTS), EACH)
    counts_T = np.ones(responses * LENGTH, dtype=bool)
    counts_T[:LENGTH] = False  # one response has no loss
    keys = {(0, int(p), s % EACH): s for s, p in enumerate(prompt_id_S)}
    return FixedTokens(
        [], [responses], keys, prompt_id_S, np.arange(0, responses * LENGTH + 1, LENGTH), counts_T
    )


@pytest.fixture
def gap_T(tokens, rng) -> np.ndarray:
    """The recorded gap: of both signs, larger for some prompts."""
    scale_S = rng.gamma(2.0, 0.01, tokens.num_responses)
    return rng.choice([-1.0, 1.0], len(tokens.counts_T)) * np.repeat(scale_S, LENGTH)


def measured(tokens: FixedTokens, **trainer_T: np.ndarray) -> LegDifferences:
    """The rollout's log-probs are −1 in every leg; the trainer's are a gap above them."""
    return LegDifferences(
        tokens,
        lambda leg, side: (
            -np.ones(len(tokens.counts_T)) + (trainer_T[leg] if side == "trainer" else 0.0)
        ),
    )


def experiment(setting: str, leg: str, side: str = "trainer", **more) -> Experiment:
    return Experiment(setting, side, 2, RECORDED, (AS_RECORDED, leg), "change it", **more)


def legs(gap_T: np.ndarray, **left: float) -> dict[str, np.ndarray]:
    """Legs that leave these parts of the gap."""
    return {AS_RECORDED: gap_T} | {name: gap_T * share for name, share in left.items()}


def search(tmp_path, *experiments: Experiment) -> Search:
    return Search(tmp_path, experiments=list(experiments))


def test_sums_equal_those_in_float64_by_hand(tokens, gap_T):
    sums = GapSums.between(tokens, np.zeros_like(gap_T), gap_T)
    d = gap_T.reshape(-1, LENGTH)[3]
    assert sums.sums_S3[3] == pytest.approx(
        [np.abs(d).sum(), (np.exp(d) - 1 - d).sum(), 0.0], rel=1e-9
    )
    assert sums.tokens_S[0] == 0
    assert sums.mean() == pytest.approx(np.abs(gap_T[LENGTH:]).mean())


def test_a_token_is_far_on_either_side(tokens):
    far_T = np.where(np.arange(len(tokens.counts_T)) % 4 == 1, 1.0, 0.0)
    above, below = (
        GapSums.between(tokens, np.zeros_like(far_T), sign * far_T) for sign in (1.0, -1.0)
    )
    assert above.mean("beyond_ln2") == below.mean("beyond_ln2") == pytest.approx(0.25)


def test_a_token_that_a_leg_has_not_read_is_left_out_of_both_sides(tokens, gap_T):
    """The share is over the same responses: the half that the other leg read loses three
    quarters.
    """
    half_T = np.where(np.arange(len(gap_T)) < len(gap_T) // 2, 0.25 * gap_T, np.nan)
    measurement = measured(tokens, **legs(gap_T), half=half_T)
    sums = [measurement.sums(pair) for pair in (RECORDED, RECORDED, (AS_RECORDED, "half"))]
    assert Effects(tokens).share(*sums).value == pytest.approx(0.75)
    assert Effects(tokens).left(sums[0], sums[2]).value == pytest.approx(0.25)


def test_what_is_left_of_a_few_responses_is_scaled_to_all(tokens, gap_T, tmp_path):
    """A leg that stopped early read only small gaps: three quarters of them are gone, and so of
    the whole.
    """
    first_T = np.arange(len(gap_T)) < len(gap_T) // 2
    recorded_T = np.where(first_T, gap_T, 50 * gap_T)
    measurement = measured(
        tokens, **{AS_RECORDED: recorded_T, "half": np.where(first_T, 0.25 * gap_T, np.nan)}
    )
    (row,) = rank(measurement, search(tmp_path, experiment("half", "half"))).causes
    assert row.left == pytest.approx(0.25 * measurement.sums(RECORDED).mean())


def test_a_share_that_is_alike_for_all_prompts_is_precise(tokens, gap_T):
    """All but the last digits goes, and only one prompt decides those."""
    decides_T = np.repeat(tokens.prompt_id_S == 1, LENGTH)
    legs_of = legs(gap_T, nothing=1.0)
    measurement = measured(
        tokens,
        **legs_of,
        last=np.where(decides_T, 1e-3, 0.0) * gap_T,
        one=np.where(decides_T, 0.0, gap_T),
    )
    last, nothing, one = (
        Effects(tokens).share(*map(measurement.sums, (RECORDED, RECORDED, (AS_RECORDED, leg))))
        for leg in ("last", "nothing", "one")
    )
    assert last.value - 2e-4 < last.low < last.value <= last.high < last.value + 1e-4
    assert (nothing.value, nothing.note) == (0.0, NO_SPREAD)
    assert one.low < 0 < one.high and one.note == FEW_DECIDE, "one prompt makes all of it"


def test_the_interval_of_a_share_covers_the_truth(tokens):
    """In 200 draws of prompts, each with its own share around 60 %, the 95 % interval holds the
    mean share.
    """
    held = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        scale_S = rng.gamma(4.0, 0.01, tokens.num_responses)
        kept_S = np.repeat(rng.uniform(0.2, 0.6, PROMPTS), EACH)
        gap_T = np.repeat(scale_S, LENGTH)
        measurement = measured(
            tokens, **{AS_RECORDED: gap_T, "less": gap_T * np.repeat(kept_S, LENGTH)}
        )
        share = Effects(tokens).share(
            *(measurement.sums(p) for p in (RECORDED, RECORDED, (AS_RECORDED, "less")))
        )
        held += share.low <= 0.6 <= share.high
    assert held >= 180


def test_the_largest_share_comes_first_and_shared_precision_last(tokens, gap_T, tmp_path, rng):
    measurement = measured(tokens, **legs(gap_T, much=0.3, some=0.8, all_of_it=0.0, none=1.0))
    plan = search(
        tmp_path,
        experiment("dtype", "all_of_it", side="both", floor=True),
        experiment("some", "some"),
        experiment("much", "much"),
        experiment("none", "none"),
    )
    ranking = rank(measurement, plan)
    assert [row.experiment.setting for row in ranking.causes] == ["much", "some", "dtype"]
    assert [row.experiment.setting for row in ranking.tested] == ["none"]
    assert ranking.causes[0].share.value == pytest.approx(0.7)
    assert ranking.causes[0].change["abs_d"].value == pytest.approx(
        -0.7 * np.abs(gap_T[LENGTH:]).mean()
    )


def test_what_only_chance_removes_is_not_a_cause(tokens, gap_T, tmp_path, rng):
    """A change that improves half of the responses and worsens the other half."""
    noise_S = rng.choice([0.4, 1.6], tokens.num_responses)
    measurement = measured(tokens, **legs(gap_T), noisy=gap_T * np.repeat(noise_S, LENGTH))
    assert rank(measurement, search(tmp_path, experiment("noisy", "noisy"))).causes == ()


def test_without_an_interval_a_cause_removes_much_more_than_noise_may(tokens, gap_T, tmp_path):
    """Of four prompts there is no interval: a third of the gap is a cause beside no noise, and
    none where the trainer is two thirds of the gap from itself in other micro-batches.
    """
    few = replace(tokens, prompt_id_S=tokens.prompt_id_S % 4)
    plan = search(tmp_path, experiment("router", "router"), experiment("rope", "rope"))
    for noise, named in ((0.0, ["rope", "router"]), (0.66, ["rope"])):
        columns = legs(gap_T, router=0.67, rope=0.02) | {
            "trainer-again": gap_T,
            "trainer-other-shape": (1 + noise) * gap_T,
        }
        measurement = measured_in(few, columns, measured(few, **columns).logp_T)
        ranking = rank(measurement, plan)
        assert all(row.share.low is None for row in ranking.causes)
        assert [row.experiment.setting for row in ranking.causes] == named


@pytest.mark.parametrize(("both", "named"), [(0.28, "trainer"), (0.1, "both")])
def test_both_sides_are_named_only_if_they_remove_more_than_one(
    tokens, gap_T, tmp_path, both, named
):
    measurement = measured(tokens, **legs(gap_T, one=0.3, two=both, worse=1.4))
    plan = search(
        tmp_path,
        experiment("head_dtype", "one"),
        experiment("head_dtype", "worse", side="rollout"),
        experiment("head_dtype", "two", side="both"),
    )
    ranking = rank(measurement, plan)
    assert [(row.experiment.setting, row.experiment.side) for row in ranking.causes] == [
        ("head_dtype", named)
    ]
    assert len(ranking.tested) == 2


def test_float32_rounding_has_no_cause(tokens, gap_T, tmp_path):
    measurement = measured(tokens, **{AS_RECORDED: gap_T * 1e-5, "less": gap_T * 1e-6})
    assert rank(measurement, search(tmp_path, experiment("kv_cache_dtype", "less"))).causes == ()


def test_a_resample_reweights_prompts(tokens, gap_T, tmp_path):
    """A cause in only the first half of the prompts is not one if only the others count."""
    first_T = np.arange(len(gap_T)) < len(gap_T) // 2
    measurement = measured(tokens, **legs(gap_T), first=np.where(first_T, 0.1, 1.0) * gap_T)
    plan = search(tmp_path, experiment("first", "first"))
    others_S = (np.arange(tokens.num_responses) >= tokens.num_responses // 2).astype(float)
    assert rank(measurement, plan).causes
    assert rank(measurement, plan, weight_S=others_S, details=False).causes == ()


def test_a_gap_is_explained_if_less_than_a_tenth_is_left(tokens, gap_T):
    measurement = measured(tokens, **legs(gap_T, less=0.05, more=0.2))
    assert is_explained(measurement, (AS_RECORDED, "less"))
    assert not is_explained(measurement, (AS_RECORDED, "more"))
    without_numbers = measured(tokens, **legs(gap_T, broken=np.nan))
    assert not is_explained(without_numbers, (AS_RECORDED, "broken"))


def test_a_saved_search_is_read_back(tmp_path):
    plan = search(tmp_path, experiment("much", "much", flags=("--eager",), parts=("a", "b")))
    plan.stages["0"] = {"status": "done", "why": "", "seconds": 1.5}
    plan.save()
    again = Search.of(tmp_path)
    assert (again.experiments, again.stages) == (plan.experiments, plan.stages)
    again.add([experiment("much", "much", flags=("--compiled",))])
    assert [each.flags for each in Search.of(tmp_path).experiments] == [("--compiled",)]
