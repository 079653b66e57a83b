"""A gap that grows along the response: the two sides turn positions into angles differently."""

from __future__ import annotations

from mismatch_cli.diagnosis._evidence import Evidence
from mismatch_cli.diagnosis._finding import Finding, untested
from mismatch_cli.diagnosis._profile import drift, sharpest_jump

NAME, STAGE = "position-drift", 5
TITLE = "A gap that grows with position"
CAUSE = (
    "The position encodings differ (RoPE base, scaling, YaRN truncation), so that distant tokens are read differently."
)
CHANGE = "Compare rope_theta and rope_scaling as both sides resolved them; pass the same --hf-overrides to the engine."
SOURCE = "vLLM 27722 (gpt-oss YaRN), vLLM PR 43419 (OLMo3: 0.003227 to 0.000054)"
_TIMES, _Z, _STEADY = 1.65, 3.0, 0.78


def check(evidence: Evidence) -> Finding:
    """The normalised gap in the last twelfth of the positions against the first; steady, not in one jump."""
    found = drift(evidence.sample)
    if found is None:
        return untested(NAME, "too few tokens")
    first, last, correlation = found
    factor, z = last.times(first), last.z_of_log_ratio(first)
    jump = sharpest_jump(evidence.sample)
    rows = (
        ("typical gaps, first twelfth of the positions", first.value), ("last twelfth", last.value), ("z", z),
        ("correlation of log gap and position", correlation),
    )  # fmt: skip
    if not (factor > _TIMES and z > _Z and correlation > _STEADY and not (jump and jump.sharp)):
        return Finding(NAME, "clear", factor, "times, last positions against first", evidence=rows)
    sentence = f"Along the response the gap grows {factor:.3g} times, at the same probabilities."
    return Finding(NAME, "found", factor, "times, last positions against first", 1 - 1 / factor, sentence, rows)
