"""The rows of the table: names, needs, formulas, and tokens at the limits of float32."""

from __future__ import annotations

from dataclasses import replace

import torch

from mismatch_cli.rules.algorithms import table
from mismatch_cli.rules.algorithms.masks_and_factors import Mask, capped, factor, mask
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.algorithms.table import ALIASES, TABLE, VARIANTS
from mismatch_cli.rules.policies import ENGINE_GAP, TRAINER_ROLLOUT, Policies
from tests.looped import looped
from tests.rules.ratios import TRAINER_RECOMPUTED
from tests.rules.trust_regions.cases import (
    F64,
    INF,
    REGIONS,
    coefficient_T,
    decide,
    keep_T,
    policies,
    random_policies,
    signs,
    weight_T,
)

ROWS = TABLE | VARIANTS
OVER_BATCHES = {"gbpo", "m2po", "m2po-areal", "clip-cov", "kl-cov", "top-entropy"}
NO_POLICIES = {"mismatch_cli.rules.trust_regions.entropy_quantile"}  # it looks only at the entropy

WITH_PARAMETERS = [
    "dppo-binary-tv:max_tv=0.2",
    "dppo-binary-tv:tv_low=0.1,tv_high=0.3",
    "kl-cov:share=0.01",
    "cppo:delta=0.2",
    "prime-rl:beta=0",
    "gbpo:lambda=1",
    "dppo-binary-tv:anchor=recomputed",
    "dppo-topk-kl:k=5,cap=3,replace_last=true",
    "ppo-icepop:band_low=0.25,band_high=4,floor=0.5,cap=2",
    "relax-both:alpha=0.3,relax=low,ratio_low=0.1",
    "gspo:anchor=rollout",
    "ppo-dual-clip:max_ratio=5",
    "binary-kl:max_kl=1e-3,cap=5",
]


def test_names_are_unique() -> None:
    assert len(table.ROWS) == len(TABLE) + len(VARIANTS)
    rows = set(TABLE) | set(VARIANTS)
    assert not set(TABLE) & set(VARIANTS) and not rows & set(ALIASES)
    assert (rows | set(ALIASES)) & set(REGIONS) == set()
    assert set(ALIASES.values()) <= set(TABLE)


@looped("spec", [*ROWS, *REGIONS, *WITH_PARAMETERS])
def test_formulas_are_filled_in(spec: str) -> None:
    algorithm = parse_algorithm(spec)
    for formula in algorithm.formulas:
        assert formula and not set("{}") & set(formula)
    assert algorithm.source
    blocked, weight = algorithm.formulas
    assert (blocked == "never") == (not algorithm.masks or spec == "none")
    assert weight.startswith("1, and ") == (not algorithm.weight and algorithm.term is not None)
    assert (weight == "1") == (not algorithm.weight and algorithm.term is None)
    assert weight.endswith(" is added to weight · A") == (algorithm.term is not None)


@looped(
    ("spec", "blocked", "weight"),
    [
        ("reinforce", "never", "1"),
        ("pg-tis", "never", "min(r, 3)"),
        (
            "minirl-tis",
            "A > 0 and r′ > 1 + ε_high, or A < 0 and r′ < 1 − ε_low (ε = 0.2 / 0.28)",
            "min(r, 3)",
        ),
        ("dppo-binary-tv", "A > 0 and p − q > δ_high, or A < 0 and q − p > δ_low (δ = 0.15)", "r"),
        (
            "dppo-binary-tv:tv_low=0.1",
            "A > 0 and p − q > δ_high, or A < 0 and q − p > δ_low (δ = 0.1 / 0.15)",
            "r",
        ),
        (
            "dppo-binary-tv-recompute",
            "A > 0 and p − p′ > δ_high, or A < 0 and p′ − p > δ_low (δ = 0.15)",
            "r",
        ),
        ("mask-0.8", "A < 0 and q − p ≥ δ (δ = 0.8)", "r"),
        (
            "prime-rl",
            "A > 0 and p − q > δ_high, or A < 0 and q − p > δ_low (δ = 0.2)",
            "r, and −0.002 log r is added to weight · A",
        ),
        ("kimi-k1.5", "never", "1, and −0.1 log Πr is added to weight · A"),
        ("cispo-verl", "never", "max(min(r′, 1.2), 0.8)"),
        ("veto", "any r of the response outside [0.0001, 100]", "r"),
        ("ipo", "|p − q| > δ (δ = 0.1)", "r"),
    ],
)
def test_formulas_in_words(spec: str, blocked: str, weight: str) -> None:
    assert parse_algorithm(spec).formulas == (blocked, weight)


@looped(
    ("spec", "parts"),
    [
        ("ppo-icepop", ("r′", "ρ", "0.5", "5")),
        ("ppo-icepop:band_high=7", ("ρ", "0.5", "7")),
        ("ppo-mis", ("ρ", "3")),
        ("ppo-mis-geometric", ("ρ", "0.999", "1.002")),
        ("relax-both", ("r", "q", "0.1", "0.2", "0.28")),
        ("relax-low:alpha=0.35,anchor=recomputed", ("r′", "p′", "0.35")),
    ],
)
def test_formulas_name_their_letters_and_thresholds(spec: str, parts: tuple[str, ...]) -> None:
    blocked, _ = parse_algorithm(spec).formulas
    assert [part for part in parts if part not in blocked] == []


def test_formulas_tell_the_relaxed_sides_apart() -> None:
    assert (
        len({parse_algorithm(f"relax-{side}").formulas[0] for side in ("both", "high", "low")}) == 3
    )


@looped(
    ("spec", "weight"),
    [
        ("gspo", "(Πr′)^(1/|y|)"),
        ("ppo-tis", "r′ · min(ρ, 2)"),
        ("ppo-mis", "r′ · Πρ"),
        ("ppo-icepop:floor=0.5,cap=2", "r′ · max(min(ρ, 2), 0.5)"),
    ],
)
def test_weights_in_words(spec: str, weight: str) -> None:
    assert parse_algorithm(spec).formulas[1] == weight


@looped("name", ROWS)
def test_what_a_row_needs_is_enough(name: str) -> None:
    """Without the recomputed policy, the top-K or the entropy, unless the row says that it needs
    them.
    """
    algorithm, batch = ROWS[name], random_policies(0)
    assert algorithm.needs_entropy == (name == "top-entropy")
    assert bool(algorithm.batch_rules) == (name in OVER_BATCHES)
    assert batch.recomputed is not None
    assert algorithm.needs_top_k == (20 if "topk" in name else 0)
    lean = Policies(
        batch.rollout,
        batch.trainer,
        batch.recomputed if algorithm.needs_recomputed else None,
        batch.offset_S1,
        batch.topk if algorithm.needs_top_k else None,
        batch.entropy_T if algorithm.needs_entropy else None,
        average=batch.average if algorithm.needs_average else None,
    )
    advantage_T = signs(len(batch.trainer))
    assert torch.equal(
        coefficient_T(algorithm, lean, advantage_T), coefficient_T(algorithm, batch, advantage_T)
    )
    rules = [rule for rule in algorithm.rules if rule.module.__name__ not in NO_POLICIES]
    # And it is actually used
    if any("recomputed" in (rule.ratio.current, rule.ratio.anchor) for rule in rules):
        changed = replace(batch, recomputed=batch.recomputed.roll(1))
        assert not torch.equal(
            coefficient_T(algorithm, changed, advantage_T),
            coefficient_T(algorithm, lean, advantage_T),
        )


def test_parameters_have_the_types_of_their_defaults() -> None:
    """Otherwise a row's cap of 3 would accept only whole numbers from users."""
    for name, row in ROWS.items():
        for rule in row.rules:
            region = rule.module.__name__.rpartition(".")[2].replace("_", "-")
            default = (mask(region) if isinstance(rule, Mask) else factor(region)).parameters
            assert {n: type(x) for n, x in rule.parameters.items()} == {
                n: type(x) for n, x in default.items()
            }, name
    assert parse_algorithm("pg-tis:cap=1.5").weight == (capped(TRAINER_ROLLOUT, cap=1.5),)


def test_anchors() -> None:
    expected = {
        "pg-is": "none",
        "dppo-binary-tv": "rollout",
        "dppo-binary-tv-recompute": "recomputed",
        "prime-rl": "rollout",
        "ppo-tis": "recomputed",
        "ppo-icepop": "both",
        "gspo": "recomputed",
        "reinforce": "none",
        "icepop": "rollout",
        "sapo": "recomputed",
        "vespo": "rollout",
        "dro": "rollout",
        "kl-cov": "recomputed",
        "verl-bypass-pg-is": "none",
        "verl-geo-rs": "both",
        "dppo-binary-kl:anchor=recomputed": "recomputed",
    }
    assert {spec: parse_algorithm(spec).anchor for spec in expected} == expected


def test_rows_whose_weight_is_r() -> None:
    weighs = {name for name, row in ROWS.items() if row.weighs_by_ratio}
    assert {
        "pg-is",
        "pg-tis",
        "minirl",
        "dppo-binary-tv",
        "mask-0.5",
        "prime-rl",
        "ipo",
        "cispo-tinker",
    } <= weighs
    assert not weighs & {
        "reinforce",
        "ppo",
        "ppo-tis",
        "ppo-mis",
        "gspo",
        "sapo",
        "drpo",
        "dro",
        "nfpo",
        "cispo-verl",
    }


def test_a_token_counts_if_every_mask_keeps_it() -> None:
    batch = random_policies(1)
    advantage_T = signs(len(batch.trainer))
    advantage_T[::5] = 0
    row = TABLE["ppo-icepop"]
    decisions = [decide(mask, batch, advantage_T).keep_T for mask in row.masks]
    assert torch.equal(keep_T(row, batch, advantage_T), decisions[0] & decisions[1])
    assert (decisions[0] != decisions[1]).any()
    assert (
        coefficient_T(row, batch, advantage_T)[~(decisions[0] & decisions[1]) | (advantage_T == 0)]
        == 0
    ).all()


@looped("name", ROWS)
def test_blocked_tokens_are_zero_also_where_the_weight_is_infinite(name: str) -> None:
    """Ratios of e^200 in float32: inf · A, and inf · 0 without an advantage; a term adds a
    finite value.
    """
    row = replace(ROWS[name], term=None)
    rollout, trainer = (
        torch.tensor([-200.0, -200, -1, -0.1]),
        torch.tensor([-0.1, -0.1, -1.1, -INF]),
    )
    advantage_T = torch.tensor([1.0, 0, 1, -1])
    for recomputed in (rollout, trainer.clamp(min=-300), torch.full_like(rollout, -2)):
        batch = policies(rollout, trainer, recomputed, lengths=[1, 1, 1, 1])
        kept_T = keep_T(row, batch, advantage_T)
        found_T = coefficient_T(row, batch, advantage_T)
        assert (found_T[~kept_T | (advantage_T == 0)] == 0).all()
        assert not found_T.isnan().any()
        whole_T = coefficient_T(ROWS[name], batch, advantage_T)
        assert (
            not whole_T.isnan().any() and (whole_T - found_T)[found_T.isfinite()].isfinite().all()
        )


def test_an_infinite_weight_is_really_reached() -> None:
    batch = policies(torch.tensor([-200.0]), torch.tensor([-0.1]))
    assert weight_T(TABLE["dppo-binary-tv"], batch, torch.ones(1)).item() == INF
    assert coefficient_T(TABLE["dppo-binary-tv"], batch, torch.ones(1)).item() == 0
    assert coefficient_T(TABLE["pg-is"], batch, torch.ones(1)).item() == INF  # nothing blocks it
    assert coefficient_T(TABLE["pg-is"], batch, torch.zeros(1)).item() == 0


@looped("name", ROWS)
def test_a_token_outside_the_trainers_support_both_times(name: str) -> None:
    """At equal weights the recomputed policy is the trainer, and a truncated support excludes the
    token in both.

    The log ratio of a whole response is infinite then, so a pull by it is 0.
    """
    rollout, trainer = (
        torch.tensor([-0.5, -3, -1], dtype=F64),
        torch.tensor([-0.4, -INF, -1.2], dtype=F64),
    )
    batch = policies(rollout, trainer)
    for sign in (1.0, -1.0):
        found_T = coefficient_T(ROWS[name], batch, torch.full_like(rollout, sign))
        assert found_T.isfinite().all()


def test_masks_of_any_ratio() -> None:
    """The same region between three pairs of policies decides on three different numbers."""
    batch = random_policies(5)
    assert batch.recomputed is not None
    advantage_T = signs(len(batch.trainer))
    pairs = {
        TRAINER_ROLLOUT: batch.trainer - batch.rollout,
        TRAINER_RECOMPUTED: batch.trainer - batch.recomputed,
        ENGINE_GAP: batch.recomputed - batch.rollout,
    }
    for ratio, d_T in pairs.items():
        decision = Mask("icepop", ratio, (("band_high", 2.0),)).decide(batch, advantage_T)
        torch.testing.assert_close(decision.statistic_T, d_T.exp() - 1)
        assert torch.equal(decision.keep_T, (d_T.exp() >= 0.5) & (d_T.exp() <= 2))


def test_factor_bounds_in_words() -> None:
    assert [str(capped(TRAINER_ROLLOUT, *bounds)) for bounds in ((), (0.0, 5), (0.5, 2))] == [
        "r",
        "min(r, 5)",
        "max(min(r, 2), 0.5)",
    ]
