"""TRL: `sampling/sampling_logp_difference/*` and `sampling/importance_sampling_ratio/*` of
GRPOTrainer.
"""

from mismatch_cli.frameworks.dialects._line import (
    ABS_D,
    ENGINE_GAP,
    Line,
    largest,
    least,
    masked_product,
    mean,
)

WHEN = (
    "Logged if vllm_importance_sampling_correction is on, the default. The ratio is the factor "
    "that multiplies the loss: in the default mode, sequence_mask with cap 3.0, the ratio of a "
    "complete response, and 0 above the cap."
)
_FILE = "trl/trainer/grpo_trainer.py"
_RATIO = masked_product(3.0)
_MASKED = "w; w = exp(Σd), 0 above 3"

LINES = (
    Line(
        "sampling/sampling_logp_difference/mean",
        ENGINE_GAP,
        "E |d|",
        _FILE,
        metric="abs_d_mean",
        word="gap",
    ),
    Line("sampling/sampling_logp_difference/max", ENGINE_GAP, "max |d|", _FILE, ABS_D, largest),
    Line(
        "sampling/importance_sampling_ratio/min",
        ENGINE_GAP,
        f"min_y {_MASKED}",
        _FILE,
        _RATIO,
        least,
    ),
    Line(
        "sampling/importance_sampling_ratio/mean",
        ENGINE_GAP,
        f"E_y {_MASKED}",
        _FILE,
        _RATIO,
        mean,
        word="importance ratio",
        note="a product over the response: far from 1 for long ones, even for small gaps",
    ),
    Line(
        "sampling/importance_sampling_ratio/max",
        ENGINE_GAP,
        f"max_y {_MASKED}",
        _FILE,
        _RATIO,
        largest,
    ),
)
