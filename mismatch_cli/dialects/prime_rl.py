"""prime-rl: `mismatch_kl/all/*`, against the current trainer, and its DPPO mask."""

from dataclasses import replace

import numpy as np

from mismatch_cli.dialects._line import (
    CURRENT,
    ENTROPY,
    K3,
    Line,
    Quantity,
    ResponseMeans,
    Tokens,
    blocked,
    largest,
    mean,
    ratio_of_means,
    sample_sd,
)
from mismatch_cli.metrics.gaps import TokenGaps

WHEN = (
    "Always logged, at the trainer's current weights. By default (filter_zero_advantages) a "
    "response whose advantages are all 0 never reaches the trainer: it is left out here as well, "
    "if the trace has advantages."
)
_LOSS = "src/prime_rl/trainer/rl/loss.py"
_TRAIN = "src/prime_rl/trainer/rl/train.py"
_K3, _ENTROPY = replace(K3, trained=True), replace(ENTROPY, trained=True)
_MASK = "dppo_mask_low and dppo_mask_high 0.2"
_LOW_0 = (
    f"{_MASK}; a token with A = 0 is masked like one with A < 0, but in neither of the next two"
)


def _is_masked(gaps: TokenGaps) -> np.ndarray:
    """What the mask blocks, with A = 0 treated as A < 0: such a token changes no update, but is
    counted.
    """
    advantage_N = gaps.column("advantage_T")
    return blocked("prime-rl").column(gaps) | ((advantage_N == 0) & (gaps.dp_N < np.float32(-0.2)))


def _masked(name: str, formula: str, tokens: Tokens, note: str) -> Line:
    share: Quantity = ResponseMeans(replace(tokens, trained=True))
    formula = f"mean over responses of the share with {formula}"
    return Line(f"{name}/mean", CURRENT, formula, _LOSS, share, note=note, needs=("advantage_T",))


LINES = (
    Line("mismatch_kl/all/mean", CURRENT, "E (r − 1 − d)", _LOSS, _K3, mean, word="KL"),
    Line(
        "mismatch_kl/all/std",
        CURRENT,
        "standard deviation of r − 1 − d, ÷ (n − 1)",
        _TRAIN,
        _K3,
        sample_sd,
    ),
    Line("mismatch_kl/all/max", CURRENT, "max (r − 1 − d)", _TRAIN, _K3, largest),
    Line(
        "kl_ent_ratio/mean",
        CURRENT,
        "E (r − 1 − d) / E entropy of π",
        _TRAIN,
        (_K3, _ENTROPY),
        ratio_of_means,
        needs=("entropy_trainer_T",),
    ),
    _masked(
        "is_masked",
        "A > 0 and π − μ > 0.2, or A ≤ 0 and π − μ < −0.2",
        Tokens(_is_masked, logs=False),
        _LOW_0,
    ),
    _masked("is_masked_high", "A > 0 and π − μ > 0.2", blocked("prime-rl", 1), _MASK),
    _masked("is_masked_low", "A < 0 and π − μ < −0.2", blocked("prime-rl", -1), _MASK),
)

# What a finding means here: names of its configuration
_PROCESSED = 'In prime-rl: logprobs_mode = "processed_logprobs" in inference.vllm_extra'
SETTINGS = {
    "temperature": f"{_PROCESSED}; the trainer divides by the orchestrator's temperature",
    "truncated-support": "In prime-rl: no top-p or top-k in the orchestrator's sampling section",
    "not-as-sampled": _PROCESSED,
    "columns-at-odds": _PROCESSED,
    "heavy-tail": "In prime-rl, with experts: trainer.enable_router_replay = true",
}
