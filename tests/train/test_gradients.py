"""Scale · coefficient is the gradient of the objective as published, by algorithm and
aggregation, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.masks_and_factors import capped
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.algorithms.table import TABLE, VARIANTS
from mismatch_cli.rules.policies import (
    ENGINE_GAP,
    TRAINER_ROLLOUT,
    Policies,
    Ratio,
)
from mismatch_cli.train.learner import response_scale
from mismatch_cli.train.train_config import AGGREGATIONS
from tests.looped import looped
from tests.rules.algorithms.published import (
    OBJECTIVES,
    Sample,
    aggregated,
    gspo,
    gspo_responses,
    gspo_token,
)
from tests.rules.algorithms.published_methods import clip_cov, drpo, gbpo, kl_cov, nfpo, top_entropy
from tests.rules.algorithms.published_owners import OF_OWNERS, OF_TABLE, PUBLISHED
from tests.rules.algorithms.samples import PROMPTS, RESPONSES, sample
from tests.rules.ratios import TRAINER_RECOMPUTED
from tests.rules.trust_regions.cases import (
    cast,
    coefficient_T,
    decide,
    equal_policies,
    gathered,
    keep_T,
    random_policies,
    signs,
    weight_T,
    with_keys,
)

LONGEST = 64
ROWS = TABLE | VARIANTS
# With an advantage for each token of a response
PER_TOKEN: dict[str, Callable[[Sample], Tensor] | None] = {
    "gspo": lambda s: gspo_token(s, s.logp_old),
    "gspo-rollout": lambda s: gspo_token(s, s.logq),
    "gmpo": None,  # a mean over the response, with one advantage
    "gbpo": None,  # one of the prompt's answers has the median advantage
}
# Settings with which a rule does more than by default
WITH_PARAMETERS: dict[str, Callable[[Sample], Tensor]] = {
    "clip-cov:share=0.1": lambda s: clip_cov(s, 0.1),
    "kl-cov:share=0.1,beta=1": lambda s: kl_cov(s, 0.1, 1.0),
    "nfpo:steps=5": lambda s: nfpo(s, 5),
    "drpo:epsilon=0.1": lambda s: drpo(s, 0.1),  # the weight changes sign
    "gbpo:temperature=1": lambda s: gbpo(s, 1.0),
    "top-entropy:share=0.7": lambda s: top_entropy(s, 0.7),
}


def drawn(
    seed: int, kind: str, algorithm: Algorithm, responses: int = RESPONSES
) -> tuple[Policies, Tensor]:
    """Policies and advantages, all rows of one batch, after a first pass over it."""
    batch = random_policies(seed, responses=responses)
    advantage_T = advantages(batch, kind, seed)
    keyed = with_keys(batch, np.zeros(responses, dtype=np.int64), PROMPTS[:responses])
    return gathered(keyed, algorithm.batch_rules, advantage_T), advantage_T


def advantages(batch: Policies, kind: str, seed: int) -> Tensor:
    """One advantage per response or per token; some are zero."""
    count = len(batch.responses.length_S) if kind == "per response" else len(batch.trainer)
    drawn = signs(count, seed + 100)
    drawn[::9] = 0
    return drawn[batch.responses.response_T] if kind == "per response" else drawn


def test_every_row_has_its_published_objective() -> None:
    assert set(OF_TABLE) == set(TABLE) and set(OF_OWNERS) == set(VARIANTS)
    assert len(OF_TABLE) > len(OBJECTIVES) and not set(OF_TABLE) & set(OF_OWNERS)


def scale_T(batch: Policies, aggregation: str) -> Tensor:
    scale_S = torch.from_numpy(
        response_scale(aggregation, batch.responses.length_S.numpy(), LONGEST)
    )
    return scale_S[batch.responses.response_T]


OF_KINDS = [
    (spec, kind)
    for kind in ("per response", "per token")
    for spec in (*ROWS, *WITH_PARAMETERS)
    if kind == "per response" or PER_TOKEN.get(spec.partition(":")[0], True)
]


@looped(("spec", "kind"), OF_KINDS)
def test_scale_times_coefficient_is_the_published_gradient(spec: str, kind: str) -> None:
    """Under every aggregation: division by a response's length happens exactly once."""
    algorithm, objective = parse_algorithm(spec), (PUBLISHED | WITH_PARAMETERS)[spec]
    if kind == "per token":
        objective = PER_TOKEN.get(spec) or objective
    for seed in (0, 1):
        batch, advantage_T = drawn(seed, kind, algorithm)
        tokens = sample(batch, advantage_T)
        found_T = coefficient_T(algorithm, batch, advantage_T)
        assert (found_T != 0).any()
        terms_T = objective(tokens)
        for aggregation in AGGREGATIONS:
            loss = aggregated(terms_T, tokens.lengths, aggregation, LONGEST)
            (gradient_T,) = torch.autograd.grad(loss, tokens.logp, retain_graph=True)
            unit = gradient_T.abs().max()
            torch.testing.assert_close(
                scale_T(batch, aggregation) * found_T / unit,
                gradient_T / unit,
                rtol=1e-10,
                atol=1e-10,
            )


OF_A_MEAN = [
    spec
    for spec in (*TABLE, "gspo:anchor=rollout", "gspo:cap=1.5", "gspo:ratio_high=10,ratio_low=1")
    if any(
        (f.ratio.current, f.ratio.level) == ("trainer", "mean")
        for f in parse_algorithm(spec).weight
    )
]


@looped("spec", OF_A_MEAN)
def test_a_weight_that_is_a_mean_over_the_response_is_divided_by_its_length_once(spec: str) -> None:
    """∇ of a mean contains 1/|y|: as published, over responses, or as in frameworks, repeated at
    each token.
    """
    algorithm, batch = parse_algorithm(spec), random_policies(0, responses=RESPONSES)
    advantage_T = advantages(batch, "per response", 0)
    kept_T = keep_T(algorithm, batch, advantage_T).double()
    (factor,) = algorithm.weight
    logp = batch.trainer.clone().requires_grad_()
    anchor_T = batch.rollout if factor.ratio.anchor == "rollout" else batch.recomputed
    lengths, first = batch.responses.length_S.tolist(), batch.offset_S1[:-1]
    parts = (logp - anchor_T).split(lengths)
    ratio_S = torch.stack([part.mean().exp() for part in parts])
    # No gradient through the cap
    ratio_S = ratio_S * (ratio_S.detach().clamp(max=factor.bounds[1]) / ratio_S.detach())
    published = (ratio_S * (kept_T * advantage_T)[first]).mean()
    terms_T = torch.cat(
        [(ratio_S * (kept_T * advantage_T)[first])[s].expand(n) for s, n in enumerate(lengths)]
    )
    found_T = coefficient_T(algorithm, batch, advantage_T)
    for aggregation in AGGREGATIONS:
        losses = [aggregated(terms_T, lengths, aggregation, LONGEST)]
        losses += [published] * (aggregation == "sequence-mean")
        for loss in losses:
            (gradient_T,) = torch.autograd.grad(loss, logp, retain_graph=True)
            torch.testing.assert_close(
                scale_T(batch, aggregation) * found_T, gradient_T, rtol=1e-10, atol=1e-14
            )


def test_there_are_weights_that_are_means() -> None:
    assert {"gspo", "gspo:anchor=rollout", "gspo:cap=1.5"} <= set(OF_A_MEAN)


def test_published_forms_of_gspo_are_one_under_the_mean_over_responses() -> None:
    """The paper's eq. 5, TRL's broadcast and verl's token form, which verl always aggregates
    this way.
    """
    batch = random_policies(0)
    advantage_T = advantages(batch, "per response", 0)
    gradients: list[Tensor] = []
    for objective in (gspo_responses, gspo, gspo_token):
        tokens = sample(batch, advantage_T)
        terms = objective(tokens, tokens.logp_old)
        lengths = tokens.lengths if len(terms) == len(advantage_T) else [1] * len(terms)
        gradients += torch.autograd.grad(
            aggregated(terms, lengths, "sequence-mean", LONGEST), tokens.logp
        )
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@looped("name", [name for name, row in ROWS.items() if row.masks])
def test_the_random_tokens_reach_both_sides_of_every_mask(name: str) -> None:
    """Otherwise the equality above would hold for a row without its masks."""
    for seed, kind in ((0, "per response"), (1, "per token")):
        batch, advantage_T = drawn(seed, kind, ROWS[name])
        for mask in ROWS[name].masks:
            kept_T = decide(mask, batch, advantage_T).keep_T[advantage_T != 0]
            assert min(kept_T.sum(), (~kept_T).sum()) >= 5, mask.region


@looped("name", [name for name, row in ROWS.items() if any(f.bounded for f in row.weight)])
def test_the_random_tokens_reach_every_cap(name: str) -> None:
    batch = random_policies(0)
    for factor in (factor for factor in ROWS[name].weight if factor.bounded):
        ratio_T, (floor, cap) = (
            batch.compare(factor.ratio).level_ratio_T(factor.ratio.level),
            factor.bounds,
        )
        assert min((ratio_T > cap).sum(), (ratio_T < cap).sum()) >= (5 if cap < 100 else 1)
        assert floor == 0 or (ratio_T < floor).sum() >= 5


def test_rho_times_the_trainers_own_ratio_is_the_ratio_to_the_rollout() -> None:
    """So PPO with the untruncated engine gap has the weight of DPPO."""
    batch = random_policies(2)
    r_T, own_T, gap_T = (
        batch.compare(x).ratio_T for x in (TRAINER_ROLLOUT, TRAINER_RECOMPUTED, ENGINE_GAP)
    )
    torch.testing.assert_close(gap_T * own_T, r_T, rtol=1e-12, atol=0)
    masks = TABLE["ppo"].masks
    split = Algorithm("split", masks, (capped(TRAINER_RECOMPUTED), capped(ENGINE_GAP)), "")
    whole = Algorithm("whole", masks, (capped(TRAINER_ROLLOUT),), "")
    advantage_T = signs(len(r_T))
    weights = [weight_T(algorithm, batch, advantage_T) for algorithm in (split, whole)]
    torch.testing.assert_close(*weights, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        coefficient_T(split, batch, advantage_T), coefficient_T(whole, batch, advantage_T)
    )
    torch.testing.assert_close(weight_T(TABLE["pg-is"], batch, advantage_T), r_T, rtol=0, atol=0)


def test_weights_between_bounds_by_hand() -> None:
    rollout = torch.zeros(3, dtype=torch.float64)
    batch = Policies(
        rollout,
        torch.tensor([0.25, 1.0, 8.0], dtype=torch.float64).log(),
        None,
        torch.tensor([0, 3]),
    )
    bounded = Algorithm("bounded", (), (capped(TRAINER_ROLLOUT, floor=0.5, cap=3),), "")
    advantage_T = torch.tensor([1.0, -2, 3], dtype=torch.float64)
    assert weight_T(bounded, batch, advantage_T).tolist() == pytest.approx([0.5, 1, 3])
    product = Ratio(level="product")
    mean = Ratio(level="mean")
    of_product, of_mean = (Algorithm("", (), (capped(ratio),), "") for ratio in (product, mean))
    assert weight_T(of_product, batch, advantage_T).tolist() == pytest.approx([2] * 3)
    assert weight_T(of_mean, batch, advantage_T).tolist() == pytest.approx([2 ** (1 / 3)] * 3)
    assert coefficient_T(of_product, batch, advantage_T).tolist() == pytest.approx([2, -4, 6])
    mean_weight = 2 ** (1 / 3)  # 1/|y| is the aggregation's
    assert coefficient_T(of_mean, batch, advantage_T).tolist() == pytest.approx(
        [mean_weight, -2 * mean_weight, 3 * mean_weight]
    )


CHOOSES = {"clip-cov", "top-entropy"}  # choose tokens not by p
DIRECTS = {"gbpo"}  # sets the direction by the median advantage
CAPS_BELOW_1 = {"cispo-trl": 0.2}  # the default of epsilon_high


@looped("name", ROWS)
def test_on_policy_every_algorithm_is_reinforce(name: str) -> None:
    """So a limit on the gradient norm means the same for all of them, except those named above."""
    drawn = equal_policies(random_policies(3, responses=20))
    for dtype in (torch.float32, torch.float64):
        batch = cast(drawn, dtype)
        advantage_T = advantages(batch, "per token", 3).to(dtype)
        kept_T, weights_T = (
            keep_T(ROWS[name], batch, advantage_T),
            weight_T(ROWS[name], batch, advantage_T),
        )
        assert kept_T.all() == (name not in CHOOSES)
        sizes_T = weights_T[advantage_T != 0].abs() if name in DIRECTS else weights_T
        assert (sizes_T == torch.tensor(CAPS_BELOW_1.get(name, 1), dtype=dtype)).all()
        expected_T = (kept_T * weights_T * advantage_T).to(dtype)
        torch.testing.assert_close(coefficient_T(ROWS[name], batch, advantage_T), expected_T)


def test_a_term_does_not_need_an_advantage() -> None:
    """Without one it is everything; with one it is added after masks and weight, also for
    blocked tokens.
    """
    rows = {name: row for name, row in ROWS.items() if row.term}
    assert set(rows) == {"prime-rl", "dro", "kimi-k1.5", "kl-cov", "kimi-roll"}
    batch = random_policies(2)
    assert batch.recomputed is not None
    d_T, sum_T = (
        batch.trainer - batch.rollout,
        batch.compare(TRAINER_ROLLOUT).level_log_ratio_T("product"),
    )
    zero_T, advantage_T = torch.zeros_like(d_T), advantages(batch, "per token", 2)
    for name, pull_T in (
        ("prime-rl", -2e-3 * d_T),
        ("dro", -0.05 * d_T),
        ("kimi-k1.5", -0.1 * sum_T),
        ("kimi-roll", -0.1 * (batch.trainer - batch.recomputed)),
    ):
        torch.testing.assert_close(
            coefficient_T(rows[name], batch, zero_T), pull_T, rtol=1e-14, atol=0
        )
        apart = replace(rows[name], term=None)
        whole_T = coefficient_T(apart, batch, advantage_T) + pull_T
        torch.testing.assert_close(
            coefficient_T(rows[name], batch, advantage_T), whole_T, rtol=1e-14, atol=0
        )
    blocked_T = ~keep_T(rows["prime-rl"], batch, advantage_T)
    assert (
        blocked_T.any()
        and (coefficient_T(rows["prime-rl"], batch, advantage_T)[blocked_T] != 0).all()
    )
    # The covariance of a token without an advantage uses the batch's mean, which other tokens
    # determine.
    advantage_T[::2] = 0
    found_T = coefficient_T(parse_algorithm("kl-cov:share=0.3"), batch, advantage_T)[::2]
    signs_T = (batch.recomputed - batch.trainer).sign()[::2]
    assert torch.equal(found_T[found_T != 0], 0.1 * signs_T[found_T != 0])
    assert 5 < (found_T != 0).sum() < len(found_T) - 5


@looped("name", ROWS)
def test_coefficients_have_the_dtype_of_the_log_probs_and_no_gradient(name: str) -> None:
    exact = random_policies(4, responses=10)
    rounded = cast(exact, torch.float32)
    advantage_T = advantages(exact, "per token", 4)
    rounded.trainer.requires_grad_()
    found_T = coefficient_T(ROWS[name], rounded, advantage_T.float())
    assert found_T.dtype == torch.float32 and not found_T.requires_grad
    expected_T = coefficient_T(ROWS[name], exact, advantage_T)
    close_T = (found_T - expected_T).abs() <= 1e-4 * expected_T.abs() + 1e-6
    assert (~close_T).sum() <= 1  # a token within rounding of a threshold
