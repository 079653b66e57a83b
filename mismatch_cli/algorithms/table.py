"""The named algorithms, each as its masks × its weight, with its own defaults and where they come from."""

from mismatch_cli import DPPO
from mismatch_cli.algorithms.algorithm import Algorithm, Factor, Mask, capped
from mismatch_cli.policies import ENGINE_GAP, TRAINER_RECOMPUTED, TRAINER_ROLLOUT, Ratio
from mismatch_cli.trust_regions import Threshold


def _mask(region: str, ratio: Ratio = TRAINER_ROLLOUT, **chosen: Threshold) -> Mask:
    return Mask(region, ratio, tuple(chosen.items()))


_R = (capped(TRAINER_ROLLOUT),)
_R_RECOMPUTED = (capped(TRAINER_RECOMPUTED),)
_CLIP_HIGHER = _mask("ratio-clip", ratio_low=0.2, ratio_high=0.28)
_MINIRL = _mask("ratio-clip", TRAINER_RECOMPUTED, ratio_low=0.2, ratio_high=0.28)
_PPO = _mask("ratio-clip", TRAINER_RECOMPUTED, ratio_low=0.2, ratio_high=0.2)

_ROWS = (
    # What the DPPO paper compares: the weight is r for all of them, and only mask and cap differ (App. C.1 eq. 23).
    Algorithm("pg-is", (), _R, f"{DPPO} App. C.1"),
    Algorithm("pg-tis", (), (capped(TRAINER_ROLLOUT, cap=3),), f"{DPPO} App. C.1: its CISPO, C = 3"),
    Algorithm("grpo-clip-higher", (_CLIP_HIGHER,), _R, f"{DPPO} App. C.1; bounds of DAPO, arXiv 2503.14476"),
    Algorithm("minirl", (_MINIRL,), _R, f"{DPPO} App. C.1; MiniRL, arXiv 2512.01374 eq. 7"),
    Algorithm("minirl-tis", (_MINIRL,), (capped(TRAINER_ROLLOUT, cap=3),), f"{DPPO} App. C.1, C = 3"),
    Algorithm("dppo-binary-tv", (_mask("binary-tv", max_tv=0.15),), _R, f"{DPPO} eq. 13, δ = 0.15"),
    Algorithm(
        "dppo-binary-tv-recompute",
        (_mask("binary-tv", TRAINER_RECOMPUTED, max_tv=0.15),), _R,
        f"{DPPO} figure 4, decoupled as its DPPO-KL: the weight stays r",
    ),
    Algorithm("dppo-binary-kl", (_mask("binary-kl", max_kl=0.05),), _R, f"{DPPO} eq. 14, δ = 0.05"),
    Algorithm(
        "dppo-binary-kl-recompute",
        (_mask("binary-kl", TRAINER_RECOMPUTED, max_kl=0.05),), _R, f"{DPPO} figure 4: DPPO-KL-Recompute",
    ),
    Algorithm(
        "dppo-topk-tv",
        (_mask("top-k-tv", max_tv=0.2, k=20),), (capped(TRAINER_ROLLOUT, cap=5),), f"{DPPO} App. F.3; C = 5, App. E",
    ),
    Algorithm(
        "dppo-topk-tv-recompute",
        (_mask("top-k-tv", TRAINER_RECOMPUTED, max_tv=0.2, k=20),), (capped(TRAINER_ROLLOUT, cap=5),),
        "as dppo-topk-tv, decoupled",
    ),
    Algorithm(
        "dppo-topk-kl",
        (_mask("top-k-kl", max_kl=0.05, k=20),), (capped(TRAINER_ROLLOUT, cap=5),), f"{DPPO} App. F.3; C = 5, App. E",
    ),
    Algorithm(
        "dppo-topk-kl-recompute",
        (_mask("top-k-kl", TRAINER_RECOMPUTED, max_kl=0.05, k=20),), (capped(TRAINER_ROLLOUT, cap=5),),
        "as dppo-topk-kl, decoupled",
    ),
    Algorithm("mask-0.5", (_mask("minimal-negative", max_drop=0.5),), _R, f"{DPPO} figure 5: Mask-0.5-Rollout"),
    Algorithm(
        "mask-0.5-recompute",
        (_mask("minimal-negative", TRAINER_RECOMPUTED, max_drop=0.5),), _R, f"{DPPO} figure 5",
    ),
    Algorithm("mask-0.8", (_mask("minimal-negative", max_drop=0.8),), _R, f"{DPPO} figure 5: Mask-0.8-Rollout"),
    Algorithm("relax-high", (_mask("relaxed-ratio-clip", alpha=0.1, relax="high"),), _R, f"{DPPO} figure 7"),
    Algorithm("relax-low", (_mask("relaxed-ratio-clip", alpha=0.1, relax="low"),), _R, f"{DPPO} figure 7"),
    Algorithm("relax-both", (_mask("relaxed-ratio-clip", alpha=0.1, relax="both"),), _R, f"{DPPO} figures 6 and 7"),
    # What people run elsewhere, with each framework's own defaults.
    Algorithm("reinforce", (), (), "no importance weight at all"),
    Algorithm("ppo", (_PPO,), _R_RECOMPUTED, "PPO, arXiv 1707.06347 eq. 7, as verl anchors it: no μ"),
    Algorithm("ppo-tis", (_PPO,), (*_R_RECOMPUTED, capped(ENGINE_GAP, cap=2)), "verl rollout_is=token, cap 2; slime"),
    Algorithm(
        "ppo-icepop",
        (_PPO, _mask("icepop", ENGINE_GAP, band_low=0.5, band_high=5.0)), (*_R_RECOMPUTED, capped(ENGINE_GAP)),
        "NeMo-RL, OpenRLHF: band 0.5 to 5, ρ stays as a weight inside",
    ),
    Algorithm(
        "ppo-mis",
        (_PPO, _mask("sequence-product", ENGINE_GAP, band_low=0.0, band_high=3.0)),
        (*_R_RECOMPUTED, capped(Ratio("recomputed", "rollout", "product"))), "TRL default: sequence_mask, cap 3",
    ),
    Algorithm(
        "ppo-mis-geometric",
        (_PPO, _mask("sequence-mean", ENGINE_GAP, band_low=0.999, band_high=1.002)),
        (*_R_RECOMPUTED, capped(ENGINE_GAP)), "seq-mask-tis of NeMo-RL and OpenRLHF; NeMo-RL's band, token weight ρ",
    ),
    Algorithm(
        "ppo-dual-clip",
        (_PPO, _mask("dual-clip", TRAINER_RECOMPUTED, max_ratio=3.0)), _R_RECOMPUTED,
        "arXiv 1912.09729; verl's default loss, clip_ratio_c = 3",
    ),
    Algorithm(
        "gspo",
        (_mask("sequence-ratio", TRAINER_RECOMPUTED, ratio_low=3e-4, ratio_high=4e-4),),
        (capped(Ratio("trainer", "recomputed", "mean")),), "GSPO, arXiv 2507.18071 eq. 5 to 7; bounds of its section 5",
    ),
    Algorithm(
        "prime-rl", (_mask("binary-tv", max_tv=0.2),), _R, "prime-rl's loss `default`; without its 1e-3·d² term"
    ),
    Algorithm("ipo", (_mask("probability-band", max_tv=0.1),), _R, "prime-rl ipo, threshold 0.1"),
    Algorithm(
        "ppo-opsm",
        (_PPO, _mask("opsm", TRAINER_RECOMPUTED, max_kl=1e-4)), _R_RECOMPUTED, "slime, δ = 1e-4; after DeepSeek-V3.2",
    ),
    Algorithm(
        "ppo-seq-tis",
        (_PPO,), (*_R_RECOMPUTED, capped(Ratio("recomputed", "rollout", "product"), cap=2)),
        "verl rollout_is=sequence, its default level, cap 2; SkyRL with cap 5",
    ),
    Algorithm(
        "glm5-dis",
        (_mask("icepop", band_low=0.8, band_high=1.2),), _R,
        "GLM-5, arXiv 2602.15763; SkyRL rollout_is, ε = 0.2: r inside of the band, whatever the advantage",
    ),
    # A weight that does a mask's work: it falls off smoothly.
    Algorithm("sapo", (), (Factor(TRAINER_RECOMPUTED, "sapo"),), "SAPO, arXiv 2511.20347; τ of verl: 1 and 1.05"),
    Algorithm(
        "vespo",
        (), (Factor(Ratio(level="product"), "vespo"),), "VESPO, arXiv 2602.10693; k and λ of TRL",
    ),
    Algorithm("drpo", (), (Factor(TRAINER_ROLLOUT, "drpo"),), "DRPO, arXiv 2606.09821; ε of its §4 and of UniRL"),
)  # fmt: skip

TABLE = {row.name: row for row in _ROWS}
ALIASES = {"cispo": "pg-tis", "clip-higher": "grpo-clip-higher"}
