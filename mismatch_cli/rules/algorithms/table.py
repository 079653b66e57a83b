"""The named algorithms, each as masks × weight, with its defaults and their source."""

from mismatch_cli import DPPO
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.parts import capped, factor, mask
from mismatch_cli.rules.policies import ENGINE_GAP, TRAINER_RECOMPUTED, TRAINER_ROLLOUT, Ratio

_R = (capped(TRAINER_ROLLOUT),)
_R_RECOMPUTED = (capped(TRAINER_RECOMPUTED),)
_CLIP_HIGHER = mask("ratio-clip", ratio_low=0.2, ratio_high=0.28)
_MINIRL = mask("ratio-clip", TRAINER_RECOMPUTED, ratio_low=0.2, ratio_high=0.28)
_PPO = mask("ratio-clip", TRAINER_RECOMPUTED, ratio_low=0.2, ratio_high=0.2)

_ROWS = (
    # The DPPO paper's comparison: the weight is always r, and only mask and cap differ (App. C.1
    # eq. 23).
    Algorithm("pg-is", (), _R, f"{DPPO} App. C.1"),
    Algorithm(
        "pg-tis", (), (capped(TRAINER_ROLLOUT, cap=3),), f"{DPPO} App. C.1: its CISPO, C = 3"
    ),
    Algorithm(
        "grpo-clip-higher",
        (_CLIP_HIGHER,),
        _R,
        f"{DPPO} App. C.1; bounds of DAPO, arXiv 2503.14476",
    ),
    Algorithm("minirl", (_MINIRL,), _R, f"{DPPO} App. C.1; MiniRL, arXiv 2512.01374 eq. 7"),
    Algorithm(
        "minirl-tis", (_MINIRL,), (capped(TRAINER_ROLLOUT, cap=3),), f"{DPPO} App. C.1, C = 3"
    ),
    Algorithm(
        "dppo-binary-tv",
        (mask("binary-tv", tv_low=0.15, tv_high=0.15),),
        _R,
        f"{DPPO} eq. 13, δ = 0.15",
    ),
    Algorithm(
        "dppo-binary-tv-recompute",
        (mask("binary-tv", TRAINER_RECOMPUTED, tv_low=0.15, tv_high=0.15),),
        _R,
        f"{DPPO} figure 4, decoupled like its DPPO-KL: the weight stays r",
    ),
    Algorithm(
        "dppo-binary-kl",
        (mask("binary-kl", kl_low=0.05, kl_high=0.05),),
        _R,
        f"{DPPO} eq. 14, δ = 0.05",
    ),
    Algorithm(
        "dppo-binary-kl-recompute",
        (mask("binary-kl", TRAINER_RECOMPUTED, kl_low=0.05, kl_high=0.05),),
        _R,
        f"{DPPO} figure 4: DPPO-KL-Recompute",
    ),
    Algorithm(
        "dppo-topk-tv",
        (mask("top-k-tv", tv_low=0.2, tv_high=0.2, k=20),),
        (capped(TRAINER_ROLLOUT, cap=5),),
        f"{DPPO} App. F.3; C = 5, App. E",
    ),
    Algorithm(
        "dppo-topk-tv-recompute",
        (mask("top-k-tv", TRAINER_RECOMPUTED, tv_low=0.2, tv_high=0.2, k=20),),
        (capped(TRAINER_ROLLOUT, cap=5),),
        "like dppo-topk-tv, decoupled",
    ),
    Algorithm(
        "dppo-topk-kl",
        (mask("top-k-kl", kl_low=0.05, kl_high=0.05, k=20),),
        (capped(TRAINER_ROLLOUT, cap=5),),
        f"{DPPO} App. F.3; C = 5, App. E",
    ),
    Algorithm(
        "dppo-topk-kl-recompute",
        (mask("top-k-kl", TRAINER_RECOMPUTED, kl_low=0.05, kl_high=0.05, k=20),),
        (capped(TRAINER_ROLLOUT, cap=5),),
        "like dppo-topk-kl, decoupled",
    ),
    Algorithm(
        "mask-0.5",
        (mask("minimal-negative", max_drop=0.5),),
        _R,
        f"{DPPO} figure 5: Mask-0.5-Rollout",
    ),
    Algorithm(
        "mask-0.5-recompute",
        (mask("minimal-negative", TRAINER_RECOMPUTED, max_drop=0.5),),
        _R,
        f"{DPPO} figure 5",
    ),
    Algorithm(
        "mask-0.8",
        (mask("minimal-negative", max_drop=0.8),),
        _R,
        f"{DPPO} figure 5: Mask-0.8-Rollout",
    ),
    Algorithm(
        "relax-high", (mask("relaxed-ratio-clip", alpha=0.1, relax="high"),), _R, f"{DPPO} figure 7"
    ),
    Algorithm(
        "relax-low", (mask("relaxed-ratio-clip", alpha=0.1, relax="low"),), _R, f"{DPPO} figure 7"
    ),
    Algorithm(
        "relax-both",
        (mask("relaxed-ratio-clip", alpha=0.1, relax="both"),),
        _R,
        f"{DPPO} figures 6 and 7",
    ),
    # Algorithms in use elsewhere, with each framework's defaults.
    Algorithm("reinforce", (), (), "no importance weight"),
    Algorithm(
        "ppo", (_PPO,), _R_RECOMPUTED, "PPO, arXiv 1707.06347 eq. 7, anchored as in verl: no μ"
    ),
    Algorithm(
        "ppo-tis",
        (_PPO,),
        (*_R_RECOMPUTED, capped(ENGINE_GAP, cap=2)),
        "verl rollout_is=token, cap 2; slime",
    ),
    Algorithm(
        "ppo-icepop",
        (_PPO, mask("icepop", ENGINE_GAP, band_low=0.5, band_high=5.0)),
        (*_R_RECOMPUTED, capped(ENGINE_GAP)),
        "NeMo-RL, OpenRLHF: band 0.5 to 5; inside it ρ remains as a weight",
    ),
    Algorithm(
        "ppo-mis",
        (_PPO, mask("sequence-product", ENGINE_GAP, band_low=0.0, band_high=3.0)),
        (*_R_RECOMPUTED, capped(Ratio("recomputed", "rollout", "product"))),
        "TRL default: sequence_mask, cap 3",
    ),
    Algorithm(
        "ppo-mis-geometric",
        (_PPO, mask("sequence-mean", ENGINE_GAP, band_low=0.999, band_high=1.002)),
        (*_R_RECOMPUTED, capped(ENGINE_GAP)),
        "seq-mask-tis of NeMo-RL and OpenRLHF; NeMo-RL's band, token weight ρ",
    ),
    Algorithm(
        "ppo-dual-clip",
        (_PPO, mask("dual-clip", TRAINER_RECOMPUTED, max_ratio=3.0)),
        _R_RECOMPUTED,
        "arXiv 1912.09729; verl's default loss, clip_ratio_c = 3",
    ),
    Algorithm(
        "gspo",
        (mask("sequence-ratio", TRAINER_RECOMPUTED, ratio_low=3e-4, ratio_high=4e-4),),
        (capped(Ratio("trainer", "recomputed", "mean")),),
        "GSPO, arXiv 2507.18071 eq. 5 to 7; bounds of its section 5",
    ),
    Algorithm(
        "prime-rl",
        (mask("binary-tv", tv_low=0.2, tv_high=0.2),),
        _R,
        "prime-rl's default until PR 3418 of 27 August 2026, with its 1e-3·d²; since then ipo "
        "(prime-rl-ipo)",
        term=factor("pull", beta=2e-3),
    ),
    Algorithm(
        "ipo",
        (mask("probability-band", max_tv=0.1),),
        _R,
        "prime-rl ipo, δ = 0.1, without its 1e-3·d²; its default since 18 September 2026: "
        "prime-rl-ipo",
    ),
    Algorithm(
        "ppo-opsm",
        (_PPO, mask("opsm", TRAINER_RECOMPUTED, max_kl=1e-4)),
        _R_RECOMPUTED,
        "slime, δ = 1e-4; after DeepSeek-V3.2",
    ),
    Algorithm(
        "ppo-seq-tis",
        (_PPO,),
        (*_R_RECOMPUTED, capped(Ratio("recomputed", "rollout", "product"), cap=2)),
        "verl rollout_is=sequence, its default level, cap 2; SkyRL with cap 5",
    ),
    Algorithm(
        "glm5-dis",
        (mask("icepop", band_low=0.8, band_high=1.2),),
        _R,
        "GLM-5, arXiv 2602.15763; SkyRL rollout_is, ε = 0.2: r inside the band, whatever the "
        "advantage",
    ),
    Algorithm(
        "ppo-rollout",
        (mask("ratio-clip", ratio_low=0.2, ratio_high=0.2),),
        _R,
        "slime --use-rollout-logprobs",
    ),
    Algorithm(
        "gspo-rollout",
        (mask("sequence-ratio", ratio_low=3e-4, ratio_high=4e-4),),
        (capped(Ratio(level="mean")),),
        "GSPO measured from μ: OpenRLHF with is_correction_enable, slime --use-rollout-logprobs",
    ),
    # A weight that does the work of a mask: it falls off smoothly, or changes sign.
    Algorithm(
        "sapo",
        (),
        (factor("sapo", TRAINER_RECOMPUTED),),
        "SAPO, arXiv 2511.20347; τ of verl: 1 and 1.05",
    ),
    Algorithm(
        "vespo",
        (),
        (factor("vespo", Ratio(level="product")),),
        "VESPO, arXiv 2602.10693; k and λ of its code and of TRL. Its main recipe recomputes: "
        "anchor=recomputed; TRL with vLLM: vespo-trl",
    ),
    Algorithm(
        "drpo",
        (),
        (factor("drpo"),),
        "DRPO, arXiv 2606.09821; ε of its §4, with which the sign never changes; UniRL's replay: "
        "anchor=recomputed",
    ),
    Algorithm(
        "gbpo",
        (),
        (factor("gbpo", TRAINER_RECOMPUTED),),
        "GBPO, arXiv 2604.18578; ε and λ of its README",
    ),
    Algorithm(
        "topr",
        (),
        (factor("topr", Ratio(level="product")),),
        "TOPR, arXiv 2503.14286 eq. 8: the response's ratio; ROLL's: topr-roll",
    ),
    Algorithm(
        "minpro",
        (),
        (factor("prefix-minimum"),),
        "MinPRO, arXiv 2601.22718, from a survey; DAPO's ε",
    ),
    Algorithm(
        "nfpo",
        (),
        (factor("n-step-ratio"),),
        "NFPO, arXiv 2605.20865, from its abstract; no mask, N = 2",
    ),
    Algorithm(
        "gmpo",
        (mask("log-ratio-clip", TRAINER_RECOMPUTED),),
        (factor("gmpo", TRAINER_RECOMPUTED),),
        "GMPO, arXiv 2507.20673, ε = 0.4 of its code and of TRL; verl geo_mean has 0.2. A mean "
        "over responses: only aggregation = sequence-mean is the published gradient",
    ),
    # A budget per response, or per batch.
    Algorithm(
        "cppo",
        (mask("cumulative-tv"),),
        _R,
        "CPPO, arXiv 2606.10968 eq. 8 to 10 and 22; δ = 0.2 for its 30B",
    ),
    Algorithm(
        "trm-max",
        (mask("kl-estimate", max_kl=0.05, estimator="k2", over="max"),),
        _R,
        "TRM, arXiv 2512.23075, with k2 of the sampled token; with logits it is the exact KL",
    ),
    Algorithm(
        "trm-avg",
        (mask("kl-estimate", max_kl=0.001, estimator="k3", over="mean"),),
        _R,
        "TRM, arXiv 2512.23075, with k3 of the sampled token; verl seq_mean_k3 has 0.01: "
        "verl-k3-rs",
    ),
    Algorithm(
        "kpop", (mask("binary-kl-band", max_kl=0.1),), _R, "KPop of Ling 2.6; φ of prime-rl PR 3283"
    ),
    Algorithm(
        "m2po",
        (mask("second-moment"),),
        _R,
        "M2PO, arXiv 2510.01161, τ = 0.04; its own code has other bounds",
    ),
    Algorithm(
        "vaco",
        (
            mask("ratio-clip", TRAINER_RECOMPUTED, ratio_low=0.2, ratio_high=0.272),
            mask("sequence-tv", ENGINE_GAP),
        ),
        (*_R_RECOMPUTED, capped(ENGINE_GAP, cap=2)),
        "open-instruct rho_mask_tv_divergence; δ of VACO, arXiv 2603.01365",
    ),
    Algorithm(
        "clip-cov",
        (mask("covariance-clip", TRAINER_RECOMPUTED),),
        _R_RECOMPUTED,
        "arXiv 2505.22617; verl clip_cov, over the batch",
    ),
    Algorithm(
        "kl-cov",
        (),
        _R_RECOMPUTED,
        "arXiv 2505.22617; verl kl_cov, over the batch",
        term=factor("covariance-pull", TRAINER_RECOMPUTED),
    ),
    Algorithm(
        "top-entropy",
        (_MINIRL, mask("entropy-quantile", TRAINER_RECOMPUTED)),
        _R_RECOMPUTED,
        "arXiv 2506.01939 on DAPO: the fifth of the batch with the highest entropy",
    ),
    # No ratio in the weight: a pull back to μ instead.
    Algorithm(
        "dro",
        (),
        (),
        "tinker dro, β = 0.05 as on its page; verl's, without a default, is measured from π′: "
        "anchor=recomputed",
        term=factor("pull", beta=0.05),
    ),
    Algorithm(
        "kimi-k1.5",
        (),
        (),
        "Kimi k1.5, arXiv 2501.12599 eq. 3; τ of ROLL, whose own is kimi-roll",
        term=factor("pull", Ratio(level="product"), beta=0.1),
    ),
)

TABLE = {row.name: row for row in _ROWS}
ALIASES = {"cispo": "pg-tis", "clip-higher": "grpo-clip-higher"}
# Words of the field that everybody uses for one of their meanings: the first
TAKEN = ("dppo", "grpo")
# What the field's words can mean, the usual meaning first
MEANINGS = {
    "dapo": ("grpo-clip-higher", "minirl", "top-entropy"),
    "dppo": ("dppo-binary-tv", "dppo-binary-kl", "dppo-topk-tv"),
    "dr-grpo": ("ppo", "ppo-rollout", "grpo-clip-higher"),
    "grpo": ("grpo-clip-higher", "ppo", "ppo-dual-clip"),
    "is": ("pg-is", "verl-bypass-pg-is", "ppo-seq-tis"),
    "mis": ("ppo-mis", "ppo-mis-geometric", "ppo-icepop"),
    "reinforce++": ("reinforce", "pg-is", "ppo"),
    "rloo": ("reinforce", "pg-is", "ppo"),
    "tis": ("ppo-tis", "pg-tis", "ppo-seq-tis"),
    "trm": ("trm-max", "trm-avg", "verl-k3-rs"),
}
