"""How a user names an algorithm: rows, aliases, masks by name, parameters, and the errors for
mistakes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.masks_and_factors import capped
from mismatch_cli.rules.algorithms.parse import parse_algorithm, usual_meaning
from mismatch_cli.rules.algorithms.table import ALIASES, MEANINGS, TABLE, USUAL_WORDS, VARIANTS
from mismatch_cli.rules.policies import ENGINE_GAP, TRAINER_ROLLOUT
from tests.looped import looped
from tests.rules.algorithms.published_methods import vespo
from tests.rules.algorithms.published_owners import PUBLISHED
from tests.rules.algorithms.samples import PROMPTS, sample
from tests.rules.ratios import TRAINER_RECOMPUTED
from tests.rules.trust_regions.cases import (
    INF,
    REGIONS,
    ask,
    coefficient_T,
    gathered,
    keep_T,
    random_policies,
    signs,
    weight_T,
    with_keys,
)

ROWS = TABLE | VARIANTS
KL_OF_2 = {"kl_low": 0.2, "kl_high": 0.2}


def test_rows_by_name() -> None:
    for name, row in ROWS.items():
        assert parse_algorithm(name) is row


@looped("alias", ALIASES)
def test_aliases(alias: str) -> None:
    assert parse_algorithm(alias) == TABLE[ALIASES[alias]]


@looped("name", [name for name in REGIONS if name not in ROWS])
def test_a_mask_by_its_own_name(name: str) -> None:
    """It is relative to the rollout, with its own thresholds and the weight r."""
    algorithm, batch = parse_algorithm(name), random_policies(0)
    advantage_T = signs(len(batch.trainer))
    assert algorithm.name == name and algorithm.weight == (capped(TRAINER_ROLLOUT),)
    assert torch.equal(keep_T(algorithm, batch, advantage_T), ask(name, batch, advantage_T).keep_T)


def test_parameters_reach_the_masks() -> None:
    batch = random_policies(1)
    advantage_T = signs(len(batch.trainer))
    for spec, region, chosen in (
        ("dppo-binary-tv:max_tv=0.05", "binary-tv", {"tv_low": 0.05, "tv_high": 0.05}),
        ("dppo-binary-tv:tv_low=0.05", "binary-tv", {"tv_low": 0.05}),
        ("dppo-verl:delta_high=0.05,delta_low=0.3", "binary-tv", {"tv_low": 0.3, "tv_high": 0.05}),
        (
            "trm-avg:delta=0.1,estimator=k2,over=sum",
            "kl-estimate",
            {"max_kl": 0.1, "estimator": "k2", "over": "sum"},
        ),
        ("m2po:τ=0.5", "second-moment", {"max_moment": 0.5}),
        ("kpop:phi=1", "binary-kl-band", {"max_kl": 1.0}),
        ("cppo:delta=0.2,budget=0.1", "cumulative-tv", {"max_tv": 0.2, "budget": 0.1}),
        ("glm5-dis:band_low=0.7", "icepop", {"band_low": 0.7, "band_high": 1.2}),
        ("cispo:cap=5", "none", {}),
        (
            "top-k-kl:k=3,replace_last=true,max_kl=.2",
            "top-k-kl",
            {"k": 3, "replace_last": True} | KL_OF_2,
        ),
        (
            "relaxed-ratio-clip:relax=low, alpha = 0.4",
            "relaxed-ratio-clip",
            {"relax": "low", "alpha": 0.4},
        ),
        ("icepop:band_high=2", "icepop", {"band_high": 2.0}),
        ("prime-rl:max_tv=0.1", "binary-tv", {"tv_low": 0.1, "tv_high": 0.1}),
    ):
        algorithm = parse_algorithm(spec)
        assert algorithm.name == spec
        found_T = keep_T(algorithm, batch, advantage_T)
        assert torch.equal(found_T, ask(region, batch, advantage_T, **chosen).keep_T)
        if chosen:
            assert not torch.equal(found_T, ask(region, batch, advantage_T).keep_T)
    # The table is unchanged
    assert TABLE["dppo-binary-tv"].masks[0].parameters == {"tv_low": 0.15, "tv_high": 0.15}


@looped(
    ("by_letter", "by_name"),
    [
        ("dppo-binary-tv:delta=0.1", "dppo-binary-tv:max_tv=0.1"),
        ("dppo-binary-tv:delta=0.1", "dppo-binary-tv:tv_low=0.1,tv_high=0.1"),
        ("dppo-binary-tv:delta_low=0.1,δ_high=0.2", "dppo-binary-tv:tv_low=0.1,tv_high=0.2"),
        ("dppo-binary-kl:δ=0.1", "dppo-binary-kl:max_kl=0.1"),
        ("dppo-topk-kl:delta_high=0.1", "dppo-topk-kl:kl_high=0.1"),
        ("gmpo:epsilon=0.2", "gmpo:log_low=0.2,log_high=0.2"),
        ("ppo-kpop:epsilon=0.2,phi=0.75", "ppo-kpop:ratio_low=0.2,ratio_high=0.2,max_kl=0.75"),
        ("vaco:delta=2,C=5", "vaco:max_tv=2,cap=5"),
        ("gspo-rollout:epsilon=0.2", "gspo:ratio_low=0.2,ratio_high=0.2,anchor=rollout"),
        ("dppo-topk-tv-recompute:delta=0.1,C=3", "dppo-topk-tv-recompute:max_tv=0.1,cap=3"),
        ("mask-0.5:delta=0.4", "mask-0.5:max_drop=0.4"),
        ("ipo:delta=0.2", "ipo:max_tv=0.2"),
        ("grpo-clip-higher:epsilon=0.1", "grpo-clip-higher:ratio_low=0.1,ratio_high=0.1"),
        ("ppo:epsilon_high=0.28", "ppo:ratio_high=0.28"),
        ("gspo:ε_low=0.1,ε_high=0.2", "gspo:ratio_low=0.1,ratio_high=0.2"),
        ("relax-both:ϵ=0.1,α=0.3", "relax-both:ratio_low=0.1,ratio_high=0.1,alpha=0.3"),
        ("ppo-dual-clip:c=5,C=2", "ppo-dual-clip:max_ratio=5,cap=2"),
        ("ppo-opsm:delta=0.1,epsilon=0.3", "ppo-opsm:max_kl=0.1,ratio_low=0.3,ratio_high=0.3"),
    ],
)
def test_a_threshold_by_its_letter(by_letter: str, by_name: str) -> None:
    """ε without a side sets both; a letter, spelled out or not, sets the threshold that it
    stands for.
    """
    read, expected = parse_algorithm(by_letter), parse_algorithm(by_name)
    assert read.name == by_letter
    assert [mask.parameters for mask in read.masks] == [mask.parameters for mask in expected.masks]
    assert read.weight == expected.weight != () and read.formulas == expected.formulas


def test_a_row_keeps_its_other_thresholds() -> None:
    assert parse_algorithm("ppo:ratio_low=0.1").masks[0].parameters == {
        "ratio_low": 0.1,
        "ratio_high": 0.2,
    }
    relaxed = parse_algorithm("relax-low:alpha=0.3").masks[0].parameters
    assert relaxed["relax"] == "low" and relaxed["alpha"] == 0.3


def test_cap_and_floor_bound_the_last_factor() -> None:
    algorithm, batch = parse_algorithm("ppo-tis:cap=1.5,floor=0.5"), random_policies(2)
    assert batch.recomputed is not None
    own_T = (batch.trainer - batch.recomputed).exp()
    gap_T = (batch.recomputed - batch.rollout).exp()
    torch.testing.assert_close(
        weight_T(algorithm, batch, torch.ones_like(own_T)), own_T * gap_T.clamp(0.5, 1.5)
    )
    assert parse_algorithm("pg-tis:cap=7").weight == (capped(TRAINER_ROLLOUT, cap=7),)
    assert parse_algorithm("sapo:tau=2").weight[0].parameters == {"tau_pos": 2.0, "tau_neg": 2.0}
    assert parse_algorithm("vespo:lambda=1,k_neg=2").weight[0].parameters == {
        "k_pos": 2.0,
        "lambda_pos": 1.0,
        "k_neg": 2.0,
        "lambda_neg": 1.0,
    }
    assert parse_algorithm("drpo:ε=2.5").weight[0].parameters == {"epsilon": 2.5}
    assert parse_algorithm("minpro:epsilon=0.1").weight[0].parameters == {
        "ratio_low": 0.1,
        "ratio_high": 0.1,
    }
    assert parse_algorithm("nfpo:N=7").weight[0].parameters == {"steps": 7}
    assert parse_algorithm("gbpo:lambda=1,epsilon_low=0.2").weight[0].parameters == {
        "ratio_low": 0.2,
        "ratio_high": 0.3,
        "temperature": 1.0,
    }
    assert parse_algorithm("cispo-verl:cap=1.28").weight == (
        capped(TRAINER_RECOMPUTED, floor=0.8, cap=1.28),
    )
    ratio, gap = parse_algorithm("cispo-trl:cap=0.28,floor=0.1").weight
    assert ratio == capped(TRAINER_RECOMPUTED, floor=0.1, cap=0.28) and not gap.bounded
    assert parse_algorithm("pg-tis:floor=1").weight == (capped(TRAINER_ROLLOUT, floor=1, cap=3),)


def test_parameters_of_a_term() -> None:
    for name in ("prime-rl", "dro", "kimi-k1.5", "kl-cov"):
        tuned, row = parse_algorithm(f"{name}:beta=0.3"), TABLE[name]
        assert tuned.term is not None and row.term is not None
        assert tuned.term.parameters == row.term.parameters | {"beta": 0.3}
        assert (tuned.masks, tuned.weight) == (row.masks, row.weight)
    moved = parse_algorithm("prime-rl:anchor=recomputed").term
    assert moved is not None and moved.ratio == TRAINER_RECOMPUTED


def test_a_threshold_of_mask_and_weight_is_one() -> None:
    """GMPO clips the ratios in the mean like the mask does."""
    tuned = parse_algorithm("gmpo:log_high=0.2")
    assert (
        dict(tuned.masks[0].parameters)
        == dict(tuned.weight[0].parameters)
        == {"log_low": 0.4, "log_high": 0.2}
    )


def measured_from(algorithm: Algorithm) -> set[str]:
    """The policies from which masks and weight measure the trainer."""
    ratios = [part.ratio for part in algorithm.rules]
    return {ratio.anchor for ratio in ratios if ratio.current == "trainer"}


ANCHORED = [
    (name, anchor)
    for name in dict.fromkeys([*ROWS, *REGIONS])
    for anchor in ("rollout", "recomputed")
]


@looped(("name", "anchor"), ANCHORED)
def test_an_anchor_moves_masks_and_weight_or_is_refused(name: str, anchor: str) -> None:
    """A moved row is its published objective with one policy replaced by the other; nothing else
    changes.
    """
    row, spec = parse_algorithm(name), f"{name}:anchor={anchor}"
    decoupled = len(measured_from(row)) == 2
    gap = any(replace(rule.ratio, level="token") == ENGINE_GAP for rule in row.rules)
    truncated = any(rule.ratio.gap_cap < INF for rule in row.rules)
    why = {
        "takes no parameters": not measured_from(row),
        "is decoupled": decoupled,
        "count it twice": gap and anchor == "rollout",
        "needs both policies": truncated and anchor == "recomputed",
    }
    if any(why.values()):
        why = next(words for words, holds in why.items() if holds)
        with pytest.raises(UsageError, match=f"{name}.*{why}|{why}.*{name}") as refusal:
            parse_algorithm(spec)
        assert "\n" not in str(refusal.value)
        return
    moved = parse_algorithm(spec)
    assert measured_from(moved) == {anchor}
    assert replace(moved, name=row.name, masks=row.masks, weight=row.weight, term=row.term) == row
    assert [mask.parameters for mask in moved.masks] == [mask.parameters for mask in row.masks]
    batch = random_policies(3)
    batch = with_keys(batch, np.zeros(60, dtype=np.int64), PROMPTS[:60])
    assert (
        batch.recomputed is not None
        and batch.topk is not None
        and batch.topk.recomputed is not None
    )
    advantage_T = signs(len(batch.responses.length_S))[batch.responses.response_T]
    if measured_from(row) != {anchor}:  # the policies swap places, and the row stays the same
        topk = replace(batch.topk, rollout=batch.topk.recomputed, recomputed=batch.topk.rollout)
        turned = replace(batch, rollout=batch.recomputed, recomputed=batch.rollout, topk=topk)
        turned = gathered(turned, row.batch_rules, advantage_T)
        batch = gathered(batch, moved.batch_rules, advantage_T)
        assert torch.equal(
            coefficient_T(moved, batch, advantage_T), coefficient_T(row, turned, advantage_T)
        )
        if name in PUBLISHED:
            tokens = sample(turned, advantage_T)
            (gradient_T,) = torch.autograd.grad(PUBLISHED[name](tokens).sum(), tokens.logp)
            unit = gradient_T.abs().max()
            found_T = coefficient_T(moved, batch, advantage_T)
            torch.testing.assert_close(found_T / unit, gradient_T / unit, rtol=1e-10, atol=1e-10)


def test_what_owners_run_from_the_recomputed_policy() -> None:
    """verl's dro, VESPO's main recipe and UniRL's replayed DRPO, as their losses are written."""
    batch = random_policies(3)
    advantage_T = signs(len(batch.responses.length_S))[batch.responses.response_T]
    tokens = sample(batch, advantage_T)
    whole_S = tokens.per_response(tokens.r_old, torch.prod).detach()
    far_T = tokens.p_old * (tokens.r_old - 1) ** 2 / (2 * 12.5)
    losses = {
        "dro": advantage_T * tokens.logp - 0.05 / 2 * tokens.d_old**2,
        "vespo": vespo(tokens, whole_S),
        "drpo": advantage_T * tokens.r_old - advantage_T.abs() * far_T,
    }
    for name, terms_T in losses.items():
        found_T = coefficient_T(parse_algorithm(f"{name}:anchor=recomputed"), batch, advantage_T)
        (gradient_T,) = torch.autograd.grad(terms_T.sum(), tokens.logp)
        torch.testing.assert_close(found_T, gradient_T, rtol=1e-10, atol=1e-10)
        assert not torch.equal(found_T, coefficient_T(parse_algorithm(name), batch, advantage_T))


def test_anchored_forms_with_their_own_names() -> None:
    """PPO on the rollout with Clip-Higher's bounds is a row; the decoupled forms keep their own."""
    batch = random_policies(3)
    advantage_T = signs(len(batch.trainer))
    for spec, name in (
        ("ppo:anchor=rollout,ratio_high=0.28", "grpo-clip-higher"),
        ("grpo-clip-higher:anchor=recomputed,ratio_high=0.2", "ppo"),
    ):
        found_T = coefficient_T(parse_algorithm(spec), batch, advantage_T)
        assert torch.equal(found_T, coefficient_T(TABLE[name], batch, advantage_T))
    assert parse_algorithm("gspo:anchor=rollout").formulas[1] == "(Πr)^(1/|y|)"
    moved, decoupled = (
        parse_algorithm("dppo-binary-tv:anchor=recomputed"),
        TABLE["dppo-binary-tv-recompute"],
    )
    assert (moved.masks, moved.formulas[1], decoupled.formulas[1]) == (decoupled.masks, "r′", "r")


MISTAKES = [
    (
        "dppo-binary-tb",
        r"Unknown algorithm 'dppo-binary-tb'\. Did you mean dppo-binary-tv.*mismatch-cli algorithms",
    ),
    ("", r"Unknown algorithm ''\. Try "),
    ("zzz", r"Unknown algorithm 'zzz'\. Try .*, .* or .*mismatch-cli algorithms"),
    ("TIS", "called TIS: ppo-tis, pg-tis or ppo-seq-tis. All of them"),
    ("ppo:", "'ppo:' is not an algorithm with parameters.*NAME:PARAMETER=VALUE"),
    ("ppo:ratio_low", "'ppo:ratio_low' is not an algorithm with parameters"),
    ("ppo:ratio_low=", "is not an algorithm with parameters"),
    ("ppo:=0.2", "is not an algorithm with parameters"),
    ("ppo:ratio_low=0.1,", "is not an algorithm with parameters"),
    (
        "ppo:delta=0.1",
        r"ppo has no parameter 'delta'\. .*Available: anchor, cap \(C\), epsilon \(ε, both sides\), "
        r"epsilon_high \(ε_high, ratio_high\), epsilon_low \(ε_low, ratio_low\), floor\.",
    ),
    (
        "dppo-binary-tv:epsilon=0.1",
        r"Available: anchor, cap \(C\), delta \(δ, max_tv, both sides\), delta_high \(δ_high, tv_high\), "
        r"delta_low \(δ_low, tv_low\), floor\.",
    ),
    ("mask-0.5:drop=0.1", r"Available: anchor, cap \(C\), delta \(δ, max_drop\), floor\."),
    (
        "vespo:k_po=1",
        r"Did you mean k_pos.* Available: anchor, k \(both sides\), k_neg, k_pos, lambda \(λ, both sides\), ",
    ),
    (
        "dppo-binary-tv:delta=0.1,max_tv=0.2",
        r"delta and max_tv both set tv_low\. Give each one once",
    ),
    (
        "dppo-binary-tv:delta=0.1,tv_high=0.2",
        r"delta and tv_high both set tv_high\. Give each one once",
    ),
    ("ppo:epsilon=0.1,ε_low=0.2", r"epsilon and ε_low both set ratio_low\. Give each one once"),
    ("dppo-binary-tv:delta=wide", r"delta=wide is not a number\. Example: delta=0\.15"),
    ("dppo-binary-tv:delta=15", "δ=15 is out of range: choose a number from 0 to 1"),
    ("dppo-binary-tv:tv_high=15", "δ_high=15 is out of range: choose a number from 0 to 1"),
    ("ppo:ratio_lo=0.1", "Did you mean ratio_low"),
    ("sapo:cap=2", r"sapo has no parameter 'cap'\. .*Available: anchor, tau"),
    ("ppo:ratio_low=wide", r"ratio_low=wide is not a number\."),
    ("ppo:ratio_low=inf", r"ratio_low=inf is not a finite number\."),
    ("ppo:ratio_low=nan", r"ratio_low=nan is not a finite number\."),
    ("ppo:ratio_low=-0.1", "ε_low=-0.1 is out of range: choose"),
    ("icepop:band_low=2", "band_low=2, band_high=5 is out of range"),
    ("mask-0.5:max_drop=0", "δ=0 is out of range: choose"),
    ("mask-0.5:max_drop=50", "δ=50 is out of range: choose a number from 0 to 1"),
    ("dppo-binary-tv:max_tv=15", "δ=15 is out of range: choose a number from 0 to 1"),
    ("dppo-topk-tv:max_tv=1.5", "δ=1.5 is out of range: choose a number from 0 to 1"),
    ("ppo:ratio_low=1.2", "ε_low=1.2 is out of range: choose a number from 0 to 1"),
    ("relax-both:alpha=10", "α=10 is out of range: choose a number from 0 to 1"),
    ("dppo-topk-tv:k=2.5", r"k=2\.5 is not a whole number\."),
    ("dppo-topk-tv:k=0", "k=0 is out of range: choose"),
    ("dppo-topk-tv:k=-3", "k=-3 is out of range: choose"),
    ("dppo-topk-tv:k=1000000000000000", "k=1000000000000000"),
    ("dppo-topk-tv:replace_last=1", r"replace_last=1 is neither true nor false\."),
    ("relax-both:relax=up", r"relax=up is unknown\. Choose one of: both, high, low\."),
    ("ppo:anchor=trainer", r"anchor=trainer is unknown\. Choose one of: rollout, recomputed\."),
    ("pg-tis:cap=0", "cap=0 is out of range: choose 0 ≤ floor ≤ cap"),
    ("pg-tis:cap=-1", "cap=-1 is out of range"),
    ("pg-tis:floor=4", "floor=4, cap=3 is out of range"),
    ("pg-tis:cap=many", r"cap=many is not a number\."),
    ("ppo-dual-clip:max_ratio=0.5", "c=0.5 is out of range"),
    ("top-entropy:share=15", "share=15 is out of range: choose a number from 0 to 1"),
    ("clip-cov:share=-1", "share=-1 is out of range: choose a number from 0 to 1"),
    ("kl-cov:share=2", "share=2 is out of range"),
    ("kl-cov:beta=-1", "β=-1"),
    ("dro:beta=-1", "β=-1 is out of range"),
    ("nfpo:steps=0", "steps=0 is out of range"),
    ("nfpo:steps=1.5", r"steps=1\.5 is not a whole number\."),
    ("sapo:tau=0", "tau_pos=0 is out of range"),
    ("vespo:k_pos=0", "k_pos=0 is out of range"),
    ("drpo:epsilon=0", "epsilon=0 is out of range"),
    ("minpro:ratio_low=2", "ε=2 / 0.28 is out of range"),
    ("gbpo:temperature=0", "λ > 0"),
    ("topr:cap=2", r"topr has no parameter 'cap'\. .*Available: anchor\."),
    ("gmpo:log_low=-1", "ε_low=-1 is out of range"),
    ("m2po:counted=none", r"counted=none is unknown\. Choose one of: outward, all\."),
    ("trm-max:over=min", r"over=min is unknown\. Choose one of: token, mean, max, sum\."),
    ("trm-max:estimator=k1", r"estimator=k1 is unknown\. Choose one of: k2, k3\."),
    (
        "verl-token",
        r"Unknown algorithm 'verl-token'\. Did you mean verl-token-is or verl-token-icepop\?",
    ),
    ("nowhere.py", r"nowhere\.py does not exist\. Name a Python file that defines trust_region"),
]


def test_no_wall_of_names() -> None:
    """Three suggestions, all of which are algorithms."""
    for name in ("zzz", "", "binary", *(word for word in MEANINGS if word not in USUAL_WORDS)):
        with pytest.raises(UsageError) as caught:
            parse_algorithm(name)
        named = [word.strip(".,?:") for word in str(caught.value).split()]
        assert (
            1 <= len({word for word in named if word in {*ROWS, *REGIONS, *ALIASES}} - {name}) <= 3
        )
    assert all(meaning in ROWS for meanings in MEANINGS.values() for meaning in meanings)
    assert not set(MEANINGS) & {*ROWS, *REGIONS, *ALIASES}


def test_words_that_everybody_uses_are_taken_for_their_usual_meaning() -> None:
    assert parse_algorithm("dppo") == parse_algorithm("dppo-binary-tv") and parse_algorithm(
        "GRPO"
    ) == parse_algorithm("grpo-clip-higher")
    tuned = parse_algorithm("dppo:delta=0.1")
    assert (
        tuned == parse_algorithm("dppo-binary-tv:delta=0.1")
        and tuned.name == "dppo-binary-tv:delta=0.1"
    )
    assert set(USUAL_WORDS) <= set(MEANINGS) and usual_meaning("pg-is") == "pg-is"


@looped(("spec", "message"), MISTAKES)
def test_mistakes_get_one_sentence(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_algorithm(spec)
    assert "\n" not in str(caught.value)


def test_a_row_without_parameters_refuses_them() -> None:
    with pytest.raises(UsageError) as caught:
        parse_algorithm("reinforce:cap=2")
    assert "reinforce" in str(caught.value) and "Available: ." not in str(caught.value)


def test_a_parameter_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="max_tv"):
        parse_algorithm("dppo-binary-tv:max_tv=0.1,max_tv=0.2")
