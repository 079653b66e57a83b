"""slime: `train/train_rollout_logprob_abs_diff`, PPO's clip, the TIS metrics, and the metrics of
mis.py.
"""

from mismatch_cli.frameworks.dialects._metric import (
    ABS_D,
    ABS_RATIO_LESS_1,
    BLOCKED,
    ENGINE_GAP,
    MINUS_D,
    RATIO,
    UPDATE,
    FrameworkMetric,
    ResponseMeans,
    blocked,
    ratio_above,
)
from mismatch_cli.frameworks.dialects._mis import mis_lines, opsm_line

WHEN = (
    "The first three are always logged; opsm_clipfrac needs --use-opsm, ois and tis* need "
    "--use-tis or --get-mismatch-metrics, mis_* also need "
    "examples/train_infer_mismatch_helper/mis.py as the TIS function: here with the settings of "
    "its mis.yaml. With --use-rollout-logprobs the first compares the rollout with the CURRENT "
    "trainer, and ppo_kl, pg_clipfrac, opsm_clipfrac and ois do so too. Every number is a mean "
    "over responses of means over their tokens; with --calculate-per-token-loss slime averages "
    "over tokens instead."
)
_LOSS = "slime/backends/megatron_utils/loss.py"
_PPO = "slime/utils/ppo_utils.py"
_MIS = "examples/train_infer_mismatch_helper/mis.py"
_OF_UPDATE = "change by the update, not the engine gap"

LINES = (
    FrameworkMetric(
        "train/train_rollout_logprob_abs_diff",
        ENGINE_GAP,
        "E_y mean |d|",
        _LOSS,
        ResponseMeans(ABS_D),
        word="gap",
        note="a short response weighs as much as a long one",
    ),
    FrameworkMetric(
        "train/ppo_kl",
        UPDATE,
        "E_y mean (−d)",
        _LOSS,
        ResponseMeans(MINUS_D),
        word="KL",
        note=_OF_UPDATE,
    ),
    FrameworkMetric(
        "train/pg_clipfrac",
        UPDATE,
        f"E_y share {BLOCKED}",
        _PPO,
        ResponseMeans(blocked("ppo")),
        note="eps_clip and eps_clip_high 0.2",
        needs=("advantage_T",),
    ),
    opsm_line(_PPO),
    FrameworkMetric(
        "train/tis",
        ENGINE_GAP,
        "E_y mean r",
        _LOSS,
        ResponseMeans(RATIO),
        word="importance ratio",
        note="before truncation",
    ),
    FrameworkMetric(
        "train/tis_abs", ENGINE_GAP, "E_y mean |r − 1|", _LOSS, ResponseMeans(ABS_RATIO_LESS_1)
    ),
    FrameworkMetric(
        "train/tis_clipfrac",
        ENGINE_GAP,
        "E_y share with r > 2",
        _LOSS,
        ResponseMeans(ratio_above(2.0)),
        note="tis_clip_low 0, tis_clip 2",
    ),
    FrameworkMetric(
        "train/ois",
        UPDATE,
        "E_y mean r",
        _LOSS,
        ResponseMeans(RATIO),
        word="importance ratio",
        note=_OF_UPDATE,
    ),
    *mis_lines(_MIS),
)
