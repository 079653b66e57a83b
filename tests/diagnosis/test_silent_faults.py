"""Faults that leave no gap, one within what is expected, or one in part of a trace."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from lab.pool import Pool
from mismatch_cli.diagnosis.alignment import real_gap
from mismatch_cli.diagnosis.checks import credit as credit_check
from mismatch_cli.diagnosis.checks import not_as_sampled, stored_values
from mismatch_cli.diagnosis.checks.placeholders import OF_A_CLAMP, OF_DRAFTS
from mismatch_cli.diagnosis.counts import ZeroCounts
from mismatch_cli.diagnosis.credit import Credit
from mismatch_cli.diagnosis.evidence import Finding
from mismatch_cli.diagnosis.far_responses import find_far_responses
from tests.diagnosis.conftest import finding_of, judged, sampled_alone, whole
from tests.metrics.batches import make_batch


def tempered(pool: Pool, beta: float) -> None:
    """Both sides record the distribution to the power of β, not the one that was sampled; what is
    not in the top-K counts as one id.
    """
    for side in ("rollout", "trainer"):
        ranks_TK = pool.ranks[f"topk_logp_{side}"].astype(np.float64)
        rest_T = np.log(np.maximum(1 - np.exp(ranks_TK).sum(axis=1), 1e-12))
        all_TK = beta * np.concatenate([ranks_TK, rest_T[:, None]], axis=1)
        total_T = np.logaddexp.reduce(all_TK, axis=1)
        pool.ranks[f"topk_logp_{side}"] = (beta * ranks_TK - total_T[:, None]).astype(np.float32)
        own_T = pool.tokens[f"logp_{side}"]
        pool.tokens[f"logp_{side}"] = (beta * own_T - total_T).astype(np.float32)


@pytest.mark.parametrize("by_ranks", [True, False])
@pytest.mark.parametrize(("beta", "how"), [(0.7, "more"), (1.4, "less")])
def test_tokens_that_were_not_drawn_from_the_recorded_distribution(bf16_pool, beta, how, by_ranks):
    broken = whole(bf16_pool)
    if by_ranks:
        tempered(broken, beta)
    else:
        broken.ranks.clear()
        broken.tokens["entropy_trainer"] /= np.float32(beta)
    finding = finding_of(judged(broken), not_as_sampled.NAME)
    assert finding.status == "found" and f"are {how} probable than" in finding.sentence
    measured, recorded = (value for _, value in finding.evidence[:2])
    assert (measured < recorded) == (how == "more")


def test_an_honest_record_says_what_would_have_been_found(bf16_pool):
    for ranks in (True, False):
        healthy = whole(bf16_pool)
        if not ranks:
            healthy.ranks.clear()
        finding = finding_of(judged(healthy), not_as_sampled.NAME)
        assert finding.status == "clear" and abs(finding.effect) < 0.1
        assert 0.1 <= dict(finding.evidence)["a share that would have been found"] < 0.5
    alone = judged(sampled_alone(whole(bf16_pool)))
    assert finding_of(alone, not_as_sampled.NAME).status == "untested"


def credit_of(advantages_PS: np.ndarray, rewards_PS: np.ndarray, first_prompt: int = 0) -> Credit:
    """Of responses of two tokens."""
    prompts, samples = rewards_PS.shape
    batch = make_batch(
        [[-1.0, -1.0]] * rewards_PS.size,
        reward=rewards_PS.ravel(),
        advantage=np.repeat(advantages_PS, 2),
        prompt_id=first_prompt + np.repeat(np.arange(prompts), samples),
    )
    credit = Credit()
    credit.update(batch)
    return credit


def rewards_and_advantages(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    rewards_PS = rng.integers(0, 2, (24, 8)).astype(float)
    spread_P1 = rewards_PS.std(axis=1, keepdims=True) + 1e-6
    return rewards_PS, (rewards_PS - rewards_PS.mean(axis=1, keepdims=True)) / spread_P1


def judged_credit(advantages_PS: np.ndarray, rewards_PS: np.ndarray) -> Finding:
    return credit_check.check(SimpleNamespace(credit=credit_of(advantages_PS, rewards_PS)))


def test_advantages_that_do_not_follow_the_rewards(rng):
    rewards_PS, advantages_PS = rewards_and_advantages(rng)
    assert judged_credit(advantages_PS, rewards_PS).status == "clear"
    turned = judged_credit(-advantages_PS, rewards_PS)
    assert turned.status == "found" and turned.effect == 1 and "sign is turned" in turned.sentence
    within = judged_credit(rng.permuted(advantages_PS, axis=1), rewards_PS)
    assert "other responses of the same prompt" in within.sentence
    anywhere = judged_credit(rng.permutation(advantages_PS.ravel()), rewards_PS)
    assert anywhere.status == "found" and anywhere.sentence.endswith("belong to other responses.")
    assert anywhere.effect == pytest.approx(0.45, abs=0.15)


def test_a_penalty_that_turns_a_few_pairs_is_no_fault(rng):
    rewards_PS, advantages_PS = rewards_and_advantages(rng)
    penalised_PS = advantages_PS - np.where(rng.random(advantages_PS.shape) < 0.1, 3.0, 0.0)
    finding = judged_credit(penalised_PS, rewards_PS)
    assert finding.status == "clear" and 0 < finding.effect < 0.2


def test_equal_rewards_and_varying_advantages_are_not_compared(rng):
    _, advantages_PS = rewards_and_advantages(rng)
    assert judged_credit(advantages_PS, np.ones((24, 8))).status == "untested"
    credit = credit_of(advantages_PS, np.ones((24, 8)))
    assert (credit.varying, int(credit.pairs().count_G.sum())) == (0, 0)
    without_spread = credit_of(np.zeros((24, 8)), advantages_PS).pairs()
    assert not without_spread.count_G.any() and not without_spread.permuted_G.any()
    credit.update(make_batch([[-1.0, -1.0]], reward=[0.0], advantage=[1.0, -1.0]))
    assert credit.varying == 1


@pytest.mark.parametrize(
    ("rewards", "advantages", "count", "against", "permuted"),
    [
        ([1, 0, 2], [0, 1, 1e5], 3, 0.5, True),
        ([0, 1, 1e5], [1e5, 1, 0], 2, 1.5, True),
        ([0, 1, 1e5], [1e5, 5e4, 0], 2, 2, False),
    ],
    ids=["equal advantages", "equal rewards, too", "equal rewards alone"],
)
def test_a_hundred_thousandth_of_the_spread_is_no_difference(
    rewards, advantages, count, against, permuted
):
    """1 of 100,000, to the bit."""
    pairs = credit_of(np.array([advantages]), np.array([rewards], dtype=float)).pairs()
    assert (pairs.count_G, pairs.against_G, pairs.permuted_G) == ([count], [against], [permuted])


def test_credit_of_pieces_is_that_of_the_whole(rng):
    rewards_PS, advantages_PS = rewards_and_advantages(rng)
    turned_PS = rng.permuted(advantages_PS, axis=1)
    whole_found = credit_of(turned_PS, rewards_PS)
    half = credit_of(turned_PS[:12], rewards_PS[:12])
    half.merge(credit_of(turned_PS[12:], rewards_PS[12:], first_prompt=12))
    pairs, whole_pairs = half.pairs(), whole_found.pairs()
    assert pairs.against_G.sum() == whole_pairs.against_G.sum() > 0
    assert pairs.count_G.sum() == whole_pairs.count_G.sum()


def test_a_long_trace_keeps_whole_groups(rng):
    rewards_PS, advantages_PS = rewards_and_advantages(rng)
    few = Credit(most_responses=40)
    credit = credit_of(advantages_PS, rewards_PS)
    few.merge(credit)
    pairs_G = few.pairs().count_G
    assert 0 < len(pairs_G) <= 40 / 8
    assert pairs_G.tolist() == credit.pairs().count_G[: len(pairs_G)].tolist()


def test_a_temperature_on_some_prompts_is_named_with_them(bf16_pool):
    broken = sampled_alone(whole(bf16_pool))
    prompts, of_S = np.unique(broken.rows["prompt_id"], return_inverse=True)
    chosen_T = (of_S % 4 == 0)[broken.response_T]
    logp_T = broken.tokens["logp_rollout"].astype(np.float64)
    logit_T = logp_T - np.log(-np.expm1(np.minimum(logp_T, -1e-9)))
    sharper_T = -np.logaddexp(0, -1.6 * logit_T)
    broken.tokens["logp_rollout"][chosen_T] = sharper_T[chosen_T].astype(np.float32)
    first = judged(broken).first_cause
    count = len(np.unique(of_S[of_S % 4 == 0]))
    assert first.check == "temperature"
    assert first.where.endswith(f"all of {count} of {len(prompts)} prompts")
    assert first.sentence.lower().startswith(f"{first.where}: ".lower()) and first.explains > 0.7


def test_healthy_responses_are_of_one_kind(pools, bf16_pool):
    for pool in (*pools.values(), bf16_pool):
        assert judged(whole(pool)).evidence.far_responses is None


def test_a_part_needs_five_responses_and_three_times_the_gap(pools):
    for share, times, is_one in ((0.3, 10, True), (0.3, 2, False), (0.01, 10, False)):
        broken = whole(pools["float32"])
        count = round(share * broken.num_responses)
        chosen_T = broken.response_T < count
        d_T = broken.tokens["logp_trainer"] - broken.tokens["logp_rollout"]
        d_T[chosen_T] *= times
        broken.tokens["logp_trainer"] = broken.tokens["logp_rollout"] + d_T
        part = find_far_responses(judged(broken).evidence.sample)
        assert (part is not None) == is_one, (share, times)


def test_accepted_drafts_are_not_to_be_masked_and_tool_output_is(bf16_pool, rng):
    drafts = sampled_alone(whole(bf16_pool))
    drafts.tokens["logp_rollout"][rng.random(len(drafts.tokens["logp_rollout"])) < 0.8] = 0.0
    first = judged(drafts).first_cause
    assert (first.check, first.change) == ("placeholders", OF_DRAFTS)


def test_certain_tokens_of_a_confident_policy_are_no_placeholders():
    """Other weights doubt some exact zeros, as they doubt nearly certain tokens."""
    zeros = ZeroCounts(tokens=12, zeros=6000, nearly=2000, nearly_uncertain=4)
    assert zeros.are_legitimate
    assert not ZeroCounts(tokens=60, zeros=6000, nearly=2000, nearly_uncertain=4).are_legitimate
    assert not ZeroCounts(tokens=1, zeros=6000, nearly=2000).are_legitimate


def test_values_that_repeat_on_a_grid_are_no_placeholders(bf16_pool, rng):
    """A choice of two tokens on a grid of logits, scored by other weights in float32."""
    pool = sampled_alone(whole(bf16_pool))
    logit_T = 0.25 * rng.integers(-12, 13, len(pool.response_T))
    other_T = logit_T + rng.normal(0, 1.5, len(logit_T))
    for side, side_T in (("rollout", logit_T), ("trainer", other_T)):
        pool.tokens[f"logp_{side}"] = -np.logaddexp(0, -side_T).astype(np.float32)
    assert finding_of(judged(pool), "placeholders").status == "clear"
    pool.tokens["logp_rollout"][:80] = -7.0
    finding = finding_of(judged(pool), "placeholders")
    assert finding.status == "found" and finding.effect == pytest.approx(80 / len(logit_T))
    assert finding.evidence == (
        ("logp_rollout: the value, nats", -7.0), ("tokens of the sample with it", 80),
    )  # fmt: skip


def test_a_clamp_is_called_one(bf16_pool):
    clamped = sampled_alone(whole(bf16_pool))
    column = clamped.tokens["logp_rollout"]
    clamped.tokens["logp_rollout"] = np.maximum(column, -2.0).astype(np.float32)
    first = judged(clamped).first_cause
    assert first.check == "placeholders" and "the column is clamped" in first.sentence
    assert first.change == OF_A_CLAMP


@pytest.mark.parametrize(("value", "name"), [
    (-65504.0, "the smallest float16"), (-1e9, "−1e9"), (np.log(1e-10), "log 1e−10"),
    (float(np.finfo(np.float32).min), "the smallest float32"),
])  # fmt: skip
def test_one_constant_is_named(bf16_pool, value, name):
    broken = whole(bf16_pool)
    broken.tokens["logp_trainer"][7] = value
    finding = finding_of(judged(broken), stored_values.NAME)
    assert finding.status == "found"
    assert finding.sentence == f"1 token of the sample: logp_trainer is {name}, a constant."
    assert finding.effect == 1 / len(broken.tokens["logp_trainer"]), "a share of the tokens"


@pytest.mark.parametrize("decimals", [1, 2, 3, 4])
def test_rounded_columns_are_named_with_their_decimals(bf16_pool, decimals):
    broken = sampled_alone(whole(bf16_pool))
    rounded = np.round(broken.tokens["logp_rollout"], decimals)
    broken.tokens["logp_rollout"] = rounded.astype(np.float32)
    finding = finding_of(judged(broken), stored_values.NAME)
    assert finding.status == "found"
    assert f"logp_rollout is rounded to {decimals} decimal" in finding.sentence


def test_tokens_that_all_responses_share_are_not_forced_if_both_sides_expect_them(bf16_pool):
    healthy = whole(bf16_pool)
    first_T = healthy.position_T == 0
    healthy.tokens["response_ids"][first_T] = 5
    for side in ("rollout", "trainer"):
        healthy.tokens[f"logp_{side}"][first_T] = -1e-4
    assert finding_of(judged(healthy), "forced-tokens").status == "clear"
    # Equal log-probabilities leave no gap, however improbable the token
    for side in ("rollout", "trainer"):
        healthy.tokens[f"logp_{side}"][first_T] = -5.0
    assert finding_of(judged(healthy), "forced-tokens").status == "clear"


def confident(pool: Pool) -> Pool:
    """The same tokens as if both policies were far more certain of each."""
    for side in ("rollout", "trainer"):
        surprise_T = -pool.tokens[f"logp_{side}"].astype(np.float64)
        pool.tokens[f"logp_{side}"] = (-(surprise_T**4) / 2000).astype(np.float32)
    return sampled_alone(pool)


def test_a_shift_of_a_confident_policy_is_found_and_none_where_there_is_none(bf16_pool):
    healthy = confident(whole(bf16_pool))
    assert real_gap(judged(healthy).evidence.sample) < 0.06
    assert finding_of(judged(healthy), "index-shift").status == "clear"
    for s in range(0, healthy.num_responses, 5):
        own = slice(healthy.offset_S1[s], healthy.offset_S1[s + 1])
        healthy.tokens["logp_rollout"][own] = np.roll(healthy.tokens["logp_rollout"][own], 1)
    finding = finding_of(judged(healthy), "index-shift")
    assert finding.status == "found" and finding.effect == pytest.approx(0.2, abs=0.08)
