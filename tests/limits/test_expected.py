"""The expected gap is that of the trace's own scale, and says what it was read from."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.limits.expected import expected_gap, expected_sentence, position_in_range
from mismatch_cli.limits.manifest_sides import temperatures_of
from mismatch_cli.metrics.lattice import LatticeLine
from mismatch_cli.metrics.logit_steps import MEAN_OF_ROUNDING
from mismatch_cli.studies.diagnosis import gather_evidence
from mismatch_cli.trace.reader import Trace


def about(rollout: str = "bfloat16", trainer: str = "bfloat16", **more: object) -> dict:
    return {"rollout": {"dtype": rollout, **more}, "trainer": {"dtype": trainer}}


def scale(
    reference: float = 0.0, current: float = 0.0, noise: float | None = None
) -> SimpleNamespace:
    """A trace whose logits, rounded, make these gaps; half of whose probability is elsewhere."""
    sides = [
        SimpleNamespace(gap_of_rounding=gap, step=8 * gap, are_rounded=gap > 0)
        for gap in (reference, current)
    ]
    return SimpleNamespace(
        reference=sides[0],
        current=sides[1],
        shows_steps=reference > 0 or current > 0,
        trainer_noise=noise,
        gap_of_rounding=lambda step, temperature: 0.1 * step / temperature,
    )


def test_rounding_and_layers_add_up_by_side():
    both = expected_gap(about(), scale(0.01, 0.01))
    assert both.of_this_trace and both.rounding == pytest.approx(np.hypot(0.01, 0.01))
    assert both.high == pytest.approx(np.sqrt(6) * both.rounding)
    assert both.low == pytest.approx(both.rounding / 4)
    # A float32 trainer has neither; a float32 head has 16-bit layers
    one = expected_gap(about(trainer="float32"), scale(0.01))
    assert one.high == pytest.approx(np.sqrt(6) * 0.01) and one.who == "bf16 against float32"
    head = expected_gap(about(), scale(0.01))
    assert head.rounding == 0.01 and one.high < head.high == pytest.approx(np.sqrt(11) * 0.01)


def test_eight_bits_and_experts_make_more_and_four_bits_are_not_known():
    plain = expected_gap(about(), scale(0.01, 0.01)).high
    cache = expected_gap(about(kv_cache_dtype="fp8"), scale(0.01, 0.01))
    experts = expected_gap(about(num_experts=8), scale(0.01, 0.01))
    assert cache.high == pytest.approx(3.8 * plain) and cache.who == "an fp8 side"
    assert experts.high == pytest.approx(2 * plain)
    for quantization, who in (
        ("nvfp4", "a 4-bit side"),
        ("awq", "a 4-bit side"),
        ("gptq_marlin", "a 4-bit side"),
        ("bitsandbytes", "a 4-bit side"),
        ("compressed-tensors", "a precision not on record"),
    ):
        expectation = expected_gap(about(quantization=quantization), scale(0.01, 0.01))
        assert (expectation.of_this_trace, expectation.who) == (False, who)


def test_the_bases_come_in_their_order():
    line = LatticeLine(0.25, 0.1, 2.0, 9.0)
    everything = {"scale": scale(0.01, 0.01, 0.03), "lines": [line], "logit_step": 0.5}
    basis = expected_gap(about(), **everything).basis
    assert basis == "logits in steps of 0.08"
    everything["scale"] = scale(noise=0.03)
    assert expected_gap(about(), **everything).rounding == pytest.approx(np.hypot(0.05, 0.05))
    del everything["logit_step"]
    expectation = expected_gap(about(), **everything)
    assert "line" in expectation.basis and expectation.rounding == pytest.approx(
        0.0125 * np.sqrt(2)
    )
    expectation = expected_gap(about(), scale(noise=0.02))
    assert (expectation.low, expectation.high) == (
        0,
        pytest.approx(0.05),
    ) and "itself, 0.02" in expectation.basis
    assert not expected_gap(about(), scale()).of_this_trace
    # A float16 logit of that size has steps an eighth as large
    half = expected_gap(about("float16", "float16"), scale(), logit_step=0.5)
    assert half.rounding == pytest.approx(np.hypot(0.05, 0.05) / 8)
    assert not expected_gap(about("float32", "float32"), scale(), logit_step=0.5).of_this_trace


def test_lines_between_two_float32_sides_are_not_of_their_precision():
    """One of them is not what the manifest says, and the range is not 0 to 0 nats."""
    line = LatticeLine(0.25, 0.1, 2.0, 9.0)
    expectation = expected_gap(about("float32", "float32"), scale(), lines=[line])
    assert (expectation.of_this_trace, expectation.high) == (False, 8e-4)
    assert expected_gap(about("float32"), scale(), lines=[line]).of_this_trace


def test_noise_beyond_any_precision_is_not_a_scale():
    """A trainer with dropout would otherwise explain its own gap."""
    assert not expected_gap(about(), scale(noise=0.5)).of_this_trace
    assert not expected_gap(about("float32", "float32"), scale(noise=0.05)).of_this_trace


@pytest.mark.parametrize(
    ("settings", "who", "high"),
    [
        (about(), "bf16 against bf16", 0.07),
        (about(trainer="float32"), "bf16 against float32", 0.04),
        (about("float32", "float32"), "float32 against float32", 8e-4),
        (about(num_experts=64), "experts in bf16", 0.07),
        ({"rollout": {"architecture": "moe"}}, "experts in a precision not on record", 0.07),
        ({}, "a precision not on record", 0.07),
    ],
)
def test_a_number_alone_has_the_range_of_other_models(settings, who, high):
    expectation = expected_gap(settings)
    assert (expectation.who, expectation.high, expectation.of_this_trace) == (who, high, False)
    assert "the models measured so far" in expected_sentence(0.01, expectation)


def test_the_sentence_says_where_the_gap_is_and_what_the_grid_makes():
    expectation = expected_gap(about(), scale(0.01, 0.01), gap=0.02)
    assert expectation.share_by_grid == pytest.approx(expectation.rounding / 0.02)
    assert "is within what bf16 against bf16 makes of this model" in expected_sentence(
        0.02, expectation
    )
    assert "rounding them alone makes 71 % of it" in expected_sentence(0.02, expectation)
    places = [position_in_range(gap, expectation) for gap in (1e-3, 0.02, 1.0)]
    assert places == ["below", "within", "above"]


def test_temperatures_are_those_of_each_side():
    settings = about(logprobs_mode="processed_logprobs") | {
        "config": {"sampling": {"temperature": 0.7}}
    }
    assert temperatures_of(settings) == (0.7, 0.7)
    settings["trainer"]["temperature"] = 1.0
    assert temperatures_of(settings) == (0.7, 1.0)
    settings["rollout"]["logprobs_mode"] = "raw_logprobs"
    assert temperatures_of(settings) == (1.0, 1.0)


@pytest.mark.parametrize(("name", "times"), [("bfloat16", 0.91), ("fp8-kv", 3.1), ("moe", 1.7)])
def test_bundled_traces_are_within_what_their_logits_make(name, times):
    evidence = gather_evidence([Trace.open(bundled("traces") / name)])
    expected = evidence.expected
    assert evidence.gap.value / expected.rounding == pytest.approx(times, rel=0.03)
    assert position_in_range(evidence.gap.value, expected) == "within"
    # Without top-K columns, what a known step makes is right to a tenth
    steps = evidence.scale.reference
    alone = evidence.scale.gap_of_rounding(steps.step, 1.0)
    assert alone == pytest.approx(steps.gap_of_rounding, rel=0.1)
    assert pytest.approx(0.2303, rel=1e-3) == MEAN_OF_ROUNDING
