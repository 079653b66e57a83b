"""The engine has the trainer's weights, rounded to its dtype: what rounding swallows is a gap of
its own.
"""

from mismatch_cli.diagnosis.checks.stale_weights import finding_of, fit_other_weights, narrower
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.model import rounded_to

NAME, STAGE = "rounded-weights", 4
ANY_SHARE = True  # as stale-weights
TITLE = "Weights rounded to the engine's dtype"
CAUSE = (
    "The trainer keeps more digits than its engine: rounding swallows most of a small step, so "
    "the engine lags behind the trainer, although every sync was right."
)
CHANGE = (
    "Give the engine the trainer's dtype, or take larger steps; or keep the gap, and let the "
    "algorithm correct it with the engine's own log μ."
)
SOURCE = (
    "measured: SmolLM2-135M, float32 trainer, bfloat16 engine, a step of 2e-5: 4 % of the "
    "weights change, mean |π − μ| 0.022 instead of 0.006"
)


def check(evidence: Evidence) -> Finding:
    """Compare the gap to the trainer's model rounded to the engine's dtype with the gap to it as
    it is.
    """
    dtype = narrower(evidence)
    if dtype is None:
        return untested(NAME, "the trainer is not known to be more precise than its engine")
    if evidence.model is None:
        reason = "needs the trainer's model, to round its weights"
        return untested(NAME, reason, needs="--trainer-model MODEL")
    fit = fit_other_weights(evidence, evidence.model.logp_T(rounded_to(dtype)))
    rows = (
        ("mean |Δlog p| to the trainer's weights, nats", fit.now.value),
        (f"to the same in {dtype}, nats", fit.other.value),
        ("tokens", fit.now.count),
    )
    sentence = (
        f"The engine has the trainer's weights in {dtype}: that gap is {fit.factor:.2g} times "
        "the gap to them as they are."
    )
    measure = "gap to the rounded / to the weights as they are"
    return finding_of(NAME, evidence, fit, measure, rows, sentence)
