"""slime: `train/train_rollout_logprob_abs_diff`, the TIS metrics, and the metrics of mis.py."""

from mismatch_cli.frameworks.dialects._line import (
    ABS_D,
    ABS_RATIO_LESS_1,
    ENGINE_GAP,
    RATIO,
    UPDATE,
    Line,
    ResponseMeans,
    ratio_above,
)
from mismatch_cli.frameworks.dialects._mis import mis_lines

WHEN = (
    "The first is always logged; the others need --use-tis or --get-mismatch-metrics, mis_* also "
    "need examples/train_infer_mismatch_helper/mis.py as the TIS function: here with the "
    "settings of its mis.yaml. Every number is a mean over responses of means over their tokens; "
    "with --calculate-per-token-loss slime averages over tokens instead."
)
_LOSS = "slime/backends/megatron_utils/loss.py"
_MIS = "examples/train_infer_mismatch_helper/mis.py"

LINES = (
    Line(
        "train/train_rollout_logprob_abs_diff",
        ENGINE_GAP,
        "E_y mean |d|",
        _LOSS,
        ResponseMeans(ABS_D),
        word="gap",
        note="a short response weighs as much as a long one",
    ),
    Line(
        "train/tis",
        ENGINE_GAP,
        "E_y mean r",
        _LOSS,
        ResponseMeans(RATIO),
        word="importance ratio",
        note="before truncation",
    ),
    Line("train/tis_abs", ENGINE_GAP, "E_y mean |r − 1|", _LOSS, ResponseMeans(ABS_RATIO_LESS_1)),
    Line(
        "train/tis_clipfrac",
        ENGINE_GAP,
        "E_y share with r > 2",
        _LOSS,
        ResponseMeans(ratio_above(2.0)),
        note="tis_clip_low 0, tis_clip 2",
    ),
    Line(
        "train/ois",
        UPDATE,
        "E_y mean r",
        _LOSS,
        ResponseMeans(RATIO),
        word="importance ratio",
        note="change by the update, not the engine gap",
    ),
    *mis_lines(_MIS),
)
