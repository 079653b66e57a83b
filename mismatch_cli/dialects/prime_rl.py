"""prime-rl: `mismatch_kl/all/*`, against the trainer as it is now, and its DPPO mask."""

from dataclasses import replace

from mismatch_cli.dialects._line import (
    CURRENT,
    ENTROPY,
    K3,
    Line,
    ResponseMeans,
    blocked,
    largest,
    mean,
    ratio_of_means,
    sample_sd,
)

WHEN = (
    "Always logged, on the trainer's present weights. By default (filter_zero_advantages) a response whose advantages "
    "are all 0 never reaches the trainer: it is left out here too, where the trace has advantages."
)
_LOSS = "src/prime_rl/trainer/rl/loss.py"
_TRAIN = "src/prime_rl/trainer/rl/train.py"
_K3, _ENTROPY = replace(K3, trained=True), replace(ENTROPY, trained=True)
_MASK = "dppo_mask_low and dppo_mask_high 0.2; a token with A = 0 counts as kept"


def _masked(name: str, formula: str, sign: int) -> Line:
    share = ResponseMeans(replace(blocked("prime-rl", sign), trained=True))
    formula = f"mean over responses of the share with {formula}"
    return Line(f"{name}/mean", CURRENT, formula, _LOSS, share, note=_MASK, needs=("advantage_T",))


LINES = (
    Line("mismatch_kl/all/mean", CURRENT, "E (r − 1 − d)", _LOSS, _K3, mean, word="KL"),
    Line("mismatch_kl/all/std", CURRENT, "standard deviation of r − 1 − d, ÷ (n − 1)", _TRAIN, _K3, sample_sd),
    Line("mismatch_kl/all/max", CURRENT, "max (r − 1 − d)", _TRAIN, _K3, largest),
    Line("kl_ent_ratio/mean", CURRENT, "E (r − 1 − d) / E entropy of π", _TRAIN, (_K3, _ENTROPY), ratio_of_means,
         needs=("entropy_trainer_T",)),
    _masked("is_masked", "A > 0 and π − μ > 0.2, or A < 0 and π − μ < −0.2", 0),
    _masked("is_masked_high", "A > 0 and π − μ > 0.2", 1),
    _masked("is_masked_low", "A < 0 and π − μ < −0.2", -1),
)  # fmt: skip
