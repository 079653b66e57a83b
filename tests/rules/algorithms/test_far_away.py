"""What each row does with a token 25 nats away, beyond the ±20 to which many frameworks clamp log
ratios.

Nothing is clamped here. Where a framework's gradient passes through its clamped ratio (verl's PPO
and SAPO, SkyRL, all of UniRL: DRPO, CPPO), its coefficient is 0 there; where the ratio is a factor
without a gradient, it is e^20. The same either way: everything that a clip, cap or band decides,
and values below 1e-8 of a token at ratio 1.
"""

from __future__ import annotations

from math import exp

import pytest
import torch

from mismatch_cli.rules.algorithms.table import TABLE, VARIANTS
from tests.rules.trust_regions.cases import F64, INF, coefficient_T, policies

ROWS = TABLE | VARIANTS
R = exp(25)
# p = 0.0067, so that a limit on a difference of probabilities never applies
LOW, HIGH = -30.0, -5.0
TV = (exp(HIGH) - exp(LOW)) / 12.5  # with DRPO's ε

# Coefficients at d = 25 with A = 1 and −1, and at d = −25 with A = 1 and −1: the trainer differs
# from the other two.
TRAINER_LEFT: dict[tuple[float, float, float, float], list[str]] = {
    # An unbounded ratio: the framework's is r without a clamp (prime-rl), else e^20 or 0.
    (R, -R, 1 / R, -1 / R): [
        "pg-is", "dppo-binary-tv", "dppo-binary-tv-recompute", "mask-0.5", "mask-0.5-recompute",
        "mask-0.8",
        "relax-both", "ipo", "prime-rl-ipo", "nfpo", "cppo",
        "m2po",  # the only token in its batch: the smallest is always kept
    ],
    (R, -R, 1 / R, 0): ["dppo-binary-kl", "dppo-binary-kl-recompute", "relax-high"],
    (0, -R, 1 / R, -1 / R): ["relax-low"],
    # PPO's clip keeps negative tokens that rose; verl's are 0 beyond 20 nats, with its dual clip
    # beyond 3.
    (0, -R, 1 / R, 0): [
        "grpo-clip-higher", "minirl", "ppo", "ppo-tis", "ppo-icepop", "ppo-mis",
        "ppo-mis-geometric", "gspo",
        "ppo-opsm", "ppo-seq-tis", "ppo-rollout", "gspo-rollout", "gmpo", "vaco", "clip-cov",
        "top-entropy",
        "glm5-icepop", "ppo-kpop", "ppo-veto", "m2po-areal", "ppo-opsm-rollout",
    ],
    (0, 0, 1 / R, 0): [
        "ppo-dual-clip", "verl-token-is", "verl-seq-is", "verl-token-icepop", "verl-seq-is-rs",
        "verl-geo-rs",
        "verl-geo-rs-seq-tis", "verl-geo-rs-token-tis", "verl-k3-rs", "verl-k3-rs-seq-tis",
        "verl-k3-rs-token-tis",
        "verl-bypass-ppo-clip",
    ],
    # A band, or a rejected response.
    (0, 0, 0, 0): [
        "glm5-dis", "trm-max", "trm-avg", "kpop", "prime-rl-icepop", "verl-bypass-ppo-clip-geo-rs",
        "verl-bypass-ppo-clip-k3-rs", "verl-bypass-pg-token-icepop", "verl-bypass-pg-geo-rs",
        "verl-bypass-pg-geo-rs-seq-tis", "verl-bypass-pg-geo-rs-token-tis",
    ],
    # Caps.
    (2, -2, 1 / R, -1 / R): ["verl-bypass-pg-is"],
    (3, -3, 1 / R, -1 / R): ["pg-tis", "dppo-verl"],
    (4, -4, 1 / R, -1 / R): ["cispo-tinker"],
    (5, -5, 1 / R, -1 / R): [
        "dppo-topk-tv", "dppo-topk-tv-recompute", "cispo-skyrl", "cispo-prime-rl", "cispo-scaling",
        "dppo-binary-tv-scaling", "dppo-binary-tv-scaling-lora",
    ],
    (5, -5, 1 / R, 0): ["dppo-topk-kl", "dppo-topk-kl-recompute", "dppo-binary-kl-scaling"],
    (0, -3, 1 / R, 0): ["minirl-tis"],
    (0, -5, 1 / R, 0): ["clip-higher-scaling"],
    (0.2, -0.2, 1 / R, -1 / R): ["cispo-trl"],
    (1.1, -1.1, 0.9, -0.9): ["cispo-roll"],
    (1.2, -1.2, 0.8, -0.8): ["cispo-verl"],
    (1.272, -1.272, 1 / R, -1 / R): ["cispo-open-instruct"],
    (1.28, -1.28, 0.8, -0.8): ["minpro"],
    # Weights that fall off; SAPO's rest is below 1e-10.
    (0, 0, 0.786448 / R, -0.768110 / R): ["sapo"],
    (R * (1 - TV), -R * (1 + TV), (1 + TV) / R, -(1 - TV) / R): ["drpo"],  # in its framework: 0
    (-R, -R, 1 / R, 1 / R): ["gbpo"],  # alone in its group: back to 1, by r; in its framework: 0
    (1, -1, 1, -1): ["reinforce"],
    (1, -1, 1, -1 / R): ["topr", "topr-roll"],
    # Terms: A − β d. Next to a ratio, only the term is left on the way down.
    (1 - 0.05 * 25, -1 - 0.05 * 25, 1 + 0.05 * 25, -1 + 0.05 * 25): ["dro"],
    (1 - 0.1 * 25, -1 - 0.1 * 25, 1 + 0.1 * 25, -1 + 0.1 * 25): ["kimi-k1.5", "kimi-roll"],
    (R, -R, 2e-3 * 25, 2e-3 * 25): ["prime-rl"],
    (0, -100, 1 / R, 0): ["ppo-ewma"],
    (R, -R, 0.1, 0.1): ["kl-cov"],
}  # fmt: skip

# The same with the trainer unchanged and the engine far away, for rows that correct the engine gap.
ENGINE_LEFT: dict[tuple[float, float, float, float], list[str]] = {
    (2, -2, 1 / R, -1 / R): ["ppo-tis", "ppo-seq-tis", "verl-token-is", "verl-seq-is",
                             "cispo-open-instruct"],
    (0, -2, 1 / R, 0): ["vaco"],  # which keeps a token where A moves it back
    (0, 0, 1 / R, -1 / R): ["ppo-mis", "m2po-areal"],
    (0, 0, 0.2 / R, -0.2 / R): ["cispo-trl"],
    (0, 0, 0, 0): [
        "ppo-icepop", "ppo-mis-geometric", "ppo-veto", "glm5-icepop", "verl-token-icepop",
        "verl-seq-is-rs",
        "verl-geo-rs", "verl-geo-rs-seq-tis", "verl-geo-rs-token-tis", "verl-k3-rs",
        "verl-k3-rs-seq-tis",
        "verl-k3-rs-token-tis",
    ],
    # AReaL bounds ρ only by φ, and both probabilities are small
    (R, -R, 1 / R, -1 / R): ["ppo-kpop"],
}  # fmt: skip


def coefficients(name: str, nats: float, recomputed_is: str) -> list[float]:
    """The coefficients of a token that is a whole response and batch, with A = 1 and −1."""
    trainer, rollout = (
        torch.tensor([x], dtype=F64) for x in ((HIGH, LOW) if nats > 0 else (LOW, HIGH))
    )
    batch = policies(rollout, trainer, trainer if recomputed_is == "trainer" else rollout)
    return [
        coefficient_T(ROWS[name], batch, torch.tensor([a], dtype=F64)).item() for a in (1.0, -1.0)
    ]


@pytest.mark.parametrize(
    ("expected", "recomputed_is"),
    [(TRAINER_LEFT, "rollout"), (ENGINE_LEFT, "trainer")],
    ids=["trainer", "engine"],
)
def test_a_token_25_nats_away(
    expected: dict[tuple[float, ...], list[str]], recomputed_is: str
) -> None:
    for values, names in expected.items():
        for name in names:
            pair = [x for nats in (25.0, -25.0) for x in coefficients(name, nats, recomputed_is)]
            assert pair == pytest.approx(values, rel=1e-4, abs=1e-19), name


def test_every_row_is_listed() -> None:
    listed = [name for names in TRAINER_LEFT.values() for name in names]
    assert sorted([*listed, "vespo", "vespo-trl"]) == sorted(ROWS)
    gap = {
        name
        for name, row in ROWS.items()
        if any(rule.ratio.current == "recomputed" for rule in row.rules)
    }
    assert sorted(name for names in ENGINE_LEFT.values() for name in names) == sorted(gap)


def test_vespo_where_tokens_offset_each_other() -> None:
    """As its docstring says: 0 except for rounding; only tokens that offset each other differ
    from the ±20 clamp.
    """
    for nats in (25.0, -25.0):
        assert coefficients("vespo", nats, "rollout") == pytest.approx([0, 0], abs=1e-14)
    logps = torch.tensor([LOW, HIGH], dtype=F64)
    offset = policies(logps, logps.flip(0))  # d = 25 and −25
    assert coefficient_T(ROWS["vespo"], offset, torch.ones(2, dtype=F64)).tolist() == [1, 1]


def test_everything_is_a_number_up_to_the_end_of_float32() -> None:
    """No NaN at any distance, or where one of the policies excludes the token."""
    for name, row in ROWS.items():
        for nats in (80.0, 100.0, INF):
            near, far = torch.tensor([-0.5]), torch.tensor([-0.5 - nats])
            for rollout, trainer, recomputed in (
                (far, near, far),
                (near, far, near),
                (near, near - 1, far),
            ):
                batch = policies(rollout, trainer, recomputed)
                for a in (1.0, -1.0):
                    value_T = coefficient_T(row, batch, torch.tensor([a]))
                    assert not value_T.isnan().any(), (name, rollout, trainer, recomputed, a)
