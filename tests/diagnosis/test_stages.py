"""The stage of every check, which says what it may remove and what it competes with."""

from __future__ import annotations

from collections import defaultdict

from mismatch_cli.diagnosis.diagnose import module, names

STAGES = {
    1: [
        "another-quantity",
        "end-of-sequence",
        "forced-tokens",
        "masked-tokens",
        "placeholders",
        "repeated-responses",
        "stored-values",
        "values",
    ],
    2: [
        "constant-offset",
        "credit",
        "exchanged-responses",
        "index-shift",
        "log-base",
        "not-as-sampled",
        "retokenised",
    ],
    3: [
        "biased-token",
        "repetition-penalty",
        "temperature",
        "truncated-support",
        "uniform-mixture",
    ],
    4: [
        "adapter-scale",
        "another-prompt",
        "attended-padding",
        "attention",
        "context-parallel",
        "missing-tensor",
        "not-repeatable",
        "packed-responses",
        "position-encoding",
        "prefix-cache",
        "rounded-weights",
        "stale-weights",
    ],
    5: [
        "columns-at-odds",
        "growth-over-steps",
        "not-reproduced",
        "position-drift",
        "sharp-onset",
        "step-change",
    ],
    6: [
        "heavy-tail",
        "lm-head",
        "uneven-responses",
    ],
    7: [
        "logit-lattice",
    ],
    8: [
        "unexplained-gap",
    ],
}


def test_every_check_is_in_its_stage():
    """Bookkeeping first, then whole responses, causes, shapes, and what nothing explains."""
    by_stage = defaultdict(list)
    for name in sorted(names()):
        by_stage[module(name).STAGE].append(name)
    assert by_stage == STAGES
