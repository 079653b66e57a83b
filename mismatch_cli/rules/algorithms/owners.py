"""Variants of single frameworks or experiments: rows like those of the table, used only where
they are named.
"""

from dataclasses import replace

from mismatch_cli import DPPO
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.parts import Factor, Mask, capped, factor, mask
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.rules.policies import (
    ENGINE_GAP,
    TRAINER_AVERAGE,
    TRAINER_RECOMPUTED,
    TRAINER_ROLLOUT,
    Ratio,
)

_R = (capped(TRAINER_ROLLOUT),)
_R_RECOMPUTED = (capped(TRAINER_RECOMPUTED),)
_PRODUCT, _OF_PRODUCT = Ratio(level="product"), Ratio("recomputed", "rollout", "product")


def _dual_clip(ratio: Ratio) -> tuple[Mask, ...]:
    """verl's default loss: PPO, without updates at A < 0 beyond a ratio of 3."""
    return mask("ratio-clip", ratio, ratio_low=0.2, ratio_high=0.2), mask(
        "dual-clip", ratio, max_ratio=3.0
    )


def _verl(
    preset: str,
    *,
    by: tuple[Factor, ...] = (),
    rejects: tuple[Mask, ...] = (),
    learns: tuple[Mask, ...] | None = None,
) -> Algorithm:
    """A preset of verl's `RolloutCorrectionConfig`, decoupled: rejection and weight on the
    engine gap, PPO on r′.
    """
    source = f"verl decoupled_{preset.replace('-', '_')}, with its default loss"
    masks = _dual_clip(TRAINER_RECOMPUTED) if learns is None else learns
    return Algorithm(f"verl-{preset}", (*masks, *rejects), (*_R_RECOMPUTED, *by), source)


def _verl_bypass(
    preset: str, *, by: tuple[Factor, ...] = _R, rejects: tuple[Mask, ...] = (), clips: bool = False
) -> Algorithm:
    """A preset in bypass mode: everything is measured from μ, with PPO's clip or REINFORCE's
    weight.
    """
    source = f"verl bypass_{preset.replace('-', '_')}: nothing is recomputed"
    return Algorithm(
        f"verl-bypass-{preset}",
        (*(_dual_clip(TRAINER_ROLLOUT) if clips else ()), *rejects),
        by,
        source,
    )


def _geometric(ratio: Ratio) -> tuple[Mask, ...]:
    """`seq_mean_k1` of 0.999_1.001, which bounds the inverse ratio."""
    return (mask("sequence-mean", ratio, band_low=1 / 1.001, band_high=1 / 0.999),)


def _k3(ratio: Ratio) -> tuple[Mask, ...]:
    return (mask("kl-estimate", ratio, max_kl=0.01, estimator="k3", over="mean"),)


_TOKEN_TIS, _SEQUENCE_TIS = (capped(ENGINE_GAP, cap=2),), (capped(_OF_PRODUCT, cap=2),)

_VERL = (
    _verl("token-is", by=_TOKEN_TIS),
    _verl("seq-is", by=_SEQUENCE_TIS),
    _verl(
        "token-icepop",
        by=(capped(ENGINE_GAP),),
        rejects=(mask("icepop", ENGINE_GAP, band_low=0.5, band_high=5.0),),
    ),
    _verl(
        "seq-is-rs",
        by=_SEQUENCE_TIS,
        rejects=(mask("sequence-product", ENGINE_GAP, band_low=0.5, band_high=2.0),),
    ),
    _verl("geo-rs", rejects=_geometric(ENGINE_GAP)),
    _verl("geo-rs-seq-tis", by=_SEQUENCE_TIS, rejects=_geometric(ENGINE_GAP)),
    _verl("geo-rs-token-tis", by=_TOKEN_TIS, rejects=_geometric(ENGINE_GAP)),
    _verl("k3-rs", rejects=_k3(ENGINE_GAP)),
    _verl("k3-rs-seq-tis", by=_SEQUENCE_TIS, rejects=_k3(ENGINE_GAP)),
    _verl("k3-rs-token-tis", by=_TOKEN_TIS, rejects=_k3(ENGINE_GAP)),
    _verl_bypass("ppo-clip", clips=True),
    _verl_bypass("ppo-clip-geo-rs", clips=True, rejects=_geometric(TRAINER_ROLLOUT)),
    _verl_bypass("ppo-clip-k3-rs", clips=True, rejects=_k3(TRAINER_ROLLOUT)),
    _verl_bypass("pg-is", by=(capped(_PRODUCT, cap=2),)),
    _verl_bypass("pg-token-icepop", rejects=(mask("icepop", band_low=0.5, band_high=5.0),)),
    _verl_bypass("pg-geo-rs", by=(), rejects=_geometric(TRAINER_ROLLOUT)),
    _verl_bypass(
        "pg-geo-rs-seq-tis", by=(capped(_PRODUCT, cap=2),), rejects=_geometric(TRAINER_ROLLOUT)
    ),
    _verl_bypass(
        "pg-geo-rs-token-tis",
        by=(capped(TRAINER_ROLLOUT, cap=2),),
        rejects=_geometric(TRAINER_ROLLOUT),
    ),
)

_CISPO = (
    Algorithm(
        "cispo-verl", (), (capped(TRAINER_RECOMPUTED, 0.8, 1.2),), "verl, NeMo-RL, slime: 1 ± 0.2"
    ),
    Algorithm(
        "cispo-skyrl",
        (),
        (capped(TRAINER_RECOMPUTED, cap=5),),
        "SkyRL, 0 to 5; ScaleRL's cap, which TRL's page recommends",
    ),
    Algorithm(
        "cispo-trl",
        (mask("sequence-product", ENGINE_GAP, band_low=0.0, band_high=3.0),),
        (capped(TRAINER_RECOMPUTED, cap=0.2), capped(_OF_PRODUCT)),
        "TRL, whose cap is epsilon_high itself, 0.2 by default; its sequence_mask of 3",
    ),
    Algorithm("cispo-roll", (), (capped(TRAINER_RECOMPUTED, 0.9, 1.1),), "ROLL: 1 ± 0.1"),
    Algorithm(
        "cispo-open-instruct",
        (),
        (capped(TRAINER_RECOMPUTED, cap=1.272), capped(ENGINE_GAP, cap=2)),
        "open-instruct: 1.272, ρ up to 2",
    ),
    Algorithm("cispo-tinker", (), (capped(TRAINER_ROLLOUT, cap=4),), "tinker: 0 to 4, from μ"),
    Algorithm(
        "cispo-prime-rl",
        (),
        (capped(TRAINER_ROLLOUT, cap=5),),
        "prime-rl since September 2026: 0 to 5, from μ",
    ),
)

_OTHERS = (
    Algorithm(
        "prime-rl-ipo",
        (mask("probability-band", max_tv=0.3),),
        _R,
        "prime-rl's default since PR 3586 of 18 September 2026: ipo, δ = 0.3, no term",
    ),
    Algorithm(
        "prime-rl-icepop",
        (mask("icepop", band_low=0.2, band_high=5.0),),
        _R,
        "prime-rl PR 3526 of 10 September 2026",
    ),
    Algorithm(
        "glm5-icepop",
        (
            mask("ratio-clip", TRAINER_RECOMPUTED, ratio_low=0.2, ratio_high=0.28),
            mask("icepop", ENGINE_GAP, band_low=0.5, band_high=2.0),
        ),
        (*_R_RECOMPUTED, capped(ENGINE_GAP)),
        "GLM-5's reasoning, arXiv 2602.15763 eq. 1: β = 2",
    ),
    Algorithm(
        "ppo-kpop",
        (
            mask("ratio-clip", TRAINER_RECOMPUTED, ratio_low=0.4, ratio_high=0.4),
            mask("binary-kl-band", ENGINE_GAP, max_kl=2.0),
        ),
        (*_R_RECOMPUTED, capped(ENGINE_GAP)),
        "AReaL gsm8k_kpop.yaml: φ = 2 on the engine gap, ε = 0.4; its float32 code also drops "
        "tokens whose probability rounds to 1",
    ),
    Algorithm(
        "ppo-veto",
        (
            mask("ratio-clip", TRAINER_RECOMPUTED, ratio_low=0.2, ratio_high=0.2),
            mask("veto", ENGINE_GAP),
        ),
        _R_RECOMPUTED,
        "SkyRL's suggestion, 1e-4 and 100; slime and miles have only the lower bound",
    ),
    Algorithm(
        "m2po-areal",
        (
            mask("ratio-clip", TRAINER_RECOMPUTED, ratio_low=0.0, ratio_high=0.0),
            mask("icepop", ENGINE_GAP, band_low=0.0, band_high=5.0),
            mask("second-moment", ENGINE_GAP, counted="all"),
        ),
        (*_R_RECOMPUTED, capped(ENGINE_GAP)),
        "AReaL gsm8k_m2po.yaml: eps_clip 0, rejection of ρ > 5, and m2_threshold 0.04 over all "
        "tokens of the batch, on the engine gap",
    ),
    Algorithm(
        "vespo-trl",
        (),
        (factor("vespo", Ratio(level="product", gap_cap=3.0)),),
        "TRL loss_type vespo with vLLM's correction, its default: token_truncate, cap 3",
    ),
    Algorithm(
        "topr-roll",
        (),
        (factor("topr", TRAINER_RECOMPUTED),),
        "ROLL topr: the token's ratio, from π′; there by the sign of the episode's score",
    ),
    Algorithm(
        "kimi-roll",
        (),
        (),
        "ROLL kimi15: the token's ratio, from π′, τ = 0.1",
        term=factor("pull", TRAINER_RECOMPUTED, beta=0.1),
    ),
    Algorithm(
        "ppo-opsm-rollout",
        (
            mask("ratio-clip", TRAINER_RECOMPUTED, ratio_low=0.2, ratio_high=0.2),
            mask("opsm", max_kl=0.5),
        ),
        _R_RECOMPUTED,
        "TRL off_policy_mask_threshold, 0.5 as on its page, measured from μ as in DeepSeek-V3.2",
    ),
    Algorithm(
        "ppo-ewma",
        (mask("ratio-clip", TRAINER_AVERAGE, ratio_low=0.2, ratio_high=0.2),),
        (capped(TRAINER_ROLLOUT, cap=100),),
        "PPO-EWMA, arXiv 2110.00641: its clip measures from an average",
    ),
    Algorithm(
        "dppo-verl",
        (mask("binary-tv", tv_low=0.2, tv_high=0.2),),
        (capped(TRAINER_ROLLOUT, cap=3),),
        "verl dppo_tv in bypass, and Stable-RL, with the values of their YAML: δ = 0.2, C = 3",
    ),
)


def _scaled(row: str, name: str, *masks: Mask) -> Algorithm:
    """A setting of the paper's larger runs: C = 5 for all."""
    weight, source = (capped(TRAINER_ROLLOUT, cap=5),), f"{DPPO} App. E: its scaling runs, C = 5"
    return replace(TABLE[row], name=name, masks=masks, weight=weight, source=source)


_SCALING = (
    _scaled("pg-tis", "cispo-scaling"),
    _scaled(
        "grpo-clip-higher",
        "clip-higher-scaling",
        mask("ratio-clip", ratio_low=0.2, ratio_high=0.27),
    ),
    _scaled("dppo-binary-tv", "dppo-binary-tv-scaling", mask("binary-tv", tv_low=0.2, tv_high=0.2)),
    _scaled(
        "dppo-binary-tv",
        "dppo-binary-tv-scaling-lora",
        mask("binary-tv", tv_low=0.15, tv_high=0.15),
    ),
    _scaled(
        "dppo-binary-kl", "dppo-binary-kl-scaling", mask("binary-kl", kl_low=0.05, kl_high=0.05)
    ),
)

OWNERS = {row.name: row for row in (*_VERL, *_CISPO, *_OTHERS, *_SCALING)}
