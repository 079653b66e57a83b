"""Verdicts on summaries made by hand around every published limit."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest

from mismatch_cli.limits.assess import assess, position, status
from mismatch_cli.limits.reference import Bar, family, precision, reference
from mismatch_cli.metrics.estimate import BELOW_RESOLUTION, FEW_PROMPTS, ONE_HAS_ALL
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.metrics.pairs import PAIRS

BARS = reference().bars


def estimate(value: float | None, half_width: float | None = None) -> dict:
    low, high = (None, None) if half_width is None else (value - half_width, value + half_width)
    return {"value": value, "low": low, "high": high, "note": None}


def summary(
    metrics: dict,
    floor: dict | None = None,
    pair: str = "mismatch",
    architecture: str = "",
    **pairs,
) -> dict:
    made = {
        name: {"pair": name, "metrics": values, "counts": {"tokens": 1000}}
        for name, values in ({pair: metrics} | pairs).items()
    }
    about = {"trainer": {"architecture": architecture, "dtype": "bfloat16"}} if architecture else {}
    return {"about": about, "pairs": made, "floor": None if floor is None else {"metrics": floor}}


def row_of(verdict: dict, bar: Bar) -> dict:
    (row,) = [row for row in verdict["bars"] if row["who"] == bar.who]
    return row


def test_a_number_that_a_few_prompts_decide_is_not_certain():
    (bar,) = [bar for bar in BARS if bar.metric == "k3"][:1]
    for note, (times, expected) in product(
        (ONE_HAS_ALL, FEW_PROMPTS), ((0.2, "healthy"), (0.5, "undecided"))
    ):
        found = estimate(times * bar.bounds[0]) | {"note": note}
        row = row_of(
            assess(
                summary(
                    {"k3": found}, architecture={"moe": "Qwen3MoeForCausalLM"}.get(bar.family, "")
                )
            ),
            bar,
        )
        assert (row["standing"], row["low"]) == (expected, None)


def test_the_status_is_above_only_if_every_limit_is_exceeded():
    expected = {
        "above": ("above",), "mixed": ("above", "undecided"),
        "between": ("between", "healthy", "undecided"),
        "undecided": ("undecided", "healthy"), "healthy": ("healthy",), "": (),
    }  # fmt: skip
    for word, rows in expected.items():
        assert status([{"standing": row} for row in rows]) == word


def test_float32_rounding_does_not_exceed_a_limit():
    rounded = float(np.float32(0.1))
    assert rounded > 0.1 and position(rounded, rounded, 0.1, 0.2) == "healthy"
    assert position(0.10001, 0.10001, 0.1, 0.2) == "between"


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.who)
def test_values_around_every_limit(bar):
    architecture = {"moe": "Qwen3MoeForCausalLM", "dense": "Qwen3ForCausalLM", "": ""}[bar.family]
    healthy, broken = bar.bounds
    agreement = METRICS[bar.metric].agreement
    scale = healthy - agreement
    cases = [
        (estimate(healthy - scale / 2), "healthy"),
        (estimate(healthy), "healthy"),
        (estimate(broken + scale / 2), "above"),
        (estimate(healthy - scale / 2, scale / 4), "healthy"),
        (estimate(healthy, scale / 4), "undecided"),
        (estimate(broken, scale / 4), "undecided"),
        (estimate(broken + scale / 2, scale / 4), "above"),
    ]
    if broken > healthy:
        middle = (healthy + broken) / 2
        cases += [
            (estimate(middle), "between"),
            (estimate(middle, (broken - healthy) / 4), "between"),
        ]
    for found, expected in cases:
        row = row_of(assess(summary({bar.metric: found}, architecture=architecture)), bar)
        assert row["standing"] == expected, found
        assert (row["value"], row["source"]) == (found["value"], bar.source)


def test_a_signed_metric_is_compared_by_its_size():
    bar = next(bar for bar in BARS if bar.absolute)
    assert row_of(assess(summary({bar.metric: estimate(-0.3, 0.1)})), bar)["standing"] == "above"
    row = row_of(assess(summary({bar.metric: estimate(-0.01, 0.05)})), bar)
    assert (row["value"], row["low"], row["high"], row["standing"]) == (
        0.01,
        0.0,
        pytest.approx(0.06),
        "healthy",
    )


def test_positions_include_their_bounds():
    assert position(0.5, 1.0, 1.0, 2.0) == "healthy"
    assert position(1.5, 2.0, 1.0, 2.0) == "between"
    assert position(0.9, 1.1, 1.0, 2.0) == "undecided"
    assert position(2.1, 9.0, 1.0, 2.0) == "above"


def test_limits_are_never_merged():
    """The same KL is healthy for one source and above the limit of another, and both are named."""
    verdict = assess(summary({"k3": estimate(5e-3, 1e-4)}, architecture="Qwen3ForCausalLM"))
    found = {row["who"]: row["standing"] for row in verdict["bars"]}
    assert found == {
        "NeMo-RL, GRPO guide": "above",
        "prime-rl, new models": "healthy",
        "prime-rl nightly": "above",
        "Miles blog, dense": "above",
    }
    text = " ".join(verdict["sentences"])
    assert "1 of 4 published limits hold." in text
    assert "Exceeded: NeMo-RL, GRPO guide; prime-rl nightly; Miles blog, dense." in text


def test_each_limit_reads_the_pair_it_is_about():
    at_equal, current = {"k3": estimate(1e-4, 1e-5)}, {"k3": estimate(0.1, 0.01)}
    verdict = assess(summary(at_equal, total=current, staleness={"k3": estimate(0.05, 0.01)}))
    found = {row["who"]: (row["pair"], row["value"]) for row in verdict["bars"]}
    assert found["NeMo-RL, GRPO guide"] == ("mismatch", 1e-4)
    assert found["prime-rl, new models"] == ("total", 0.1)
    assert any(
        "staleness included: prime-rl, new models; prime-rl nightly." in sentence
        for sentence in verdict["sentences"]
    )
    assert {bar.pair for bar in BARS} <= set(PAIRS)


def test_with_only_the_current_trainer_every_number_includes_staleness():
    verdict = assess(summary({"k3": estimate(0.1, 0.01)}, pair="total"))
    assert {row["pair"] for row in verdict["bars"]} == {"total"}
    assert any(
        "every number here includes staleness" in sentence for sentence in verdict["sentences"]
    )


@pytest.mark.parametrize(
    ("value", "floor", "words"),
    [
        (
            estimate(0.028, 0.002),
            estimate(0.001, 0.0001),
            "The mean |Δlog p| is 28 × the trainer's own noise (24 to 33).",
        ),
        (
            estimate(0.028),
            estimate(0.001),
            "The mean |Δlog p| is 28 × the trainer's own noise (no interval).",
        ),
        (
            estimate(0.0011, 0.0002),
            estimate(0.001, 0.0001),
            "indistinguishable from the trainer's own noise: 1.1 × (0.8 to 1.4).",
        ),
        (
            estimate(5.0, 0.1),
            estimate(0.001, 0.0001),
            "The mean |Δlog p| is more than 1000 × the trainer's own noise",
        ),
        (
            estimate(0.0005, 1e-5),
            estimate(0.001, 0.0001),
            "The mean |Δlog p| is 0.5 × the trainer's own noise",
        ),
        (estimate(0.01, 0.001), estimate(1e-9, 1e-10), "below 1e-7 nats, too small for a ratio"),
        (estimate(0.01, 0.001), None, "The trainer's own noise was not measured"),
        (estimate(0.01, 0.001), estimate(None), "The trainer's own noise was not measured"),
    ],
)
def test_the_trainers_own_noise_comes_first(value, floor, words):
    verdict = assess(
        summary({"abs_d_mean": value}, None if floor is None else {"abs_d_mean": floor})
    )
    assert words in verdict["sentences"][0]


def test_the_factor_equals_the_reports():
    verdict = assess(summary({"abs_d_mean": estimate(0.03)}, {"abs_d_mean": estimate(0.01)}))
    assert verdict["floor"]["times"] == METRICS["abs_d_mean"].times_floor(0.03, 0.01)
    below = assess(summary({"abs_d_mean": estimate(0.03)}, {"abs_d_mean": estimate(0.0)}))
    assert below["floor"]["times"] == BELOW_RESOLUTION


def test_the_tail():
    """For normal d with standard deviation s, p95 is 1.96 s and k3 about s²/2."""
    s = 0.05
    bulk = {"k3": estimate(s * s / 2), "abs_d_p95": estimate(1.959964 * s)}
    assert assess(summary(bulk))["tail"] is None
    verdict = assess(summary(bulk | {"k3": estimate(4 * s * s / 2)}))
    assert verdict["tail"]["times"] == pytest.approx(4, rel=1e-4)
    assert verdict["tail"]["robust_spread"] == pytest.approx(s, rel=1e-4)
    assert "Rare tokens dominate the KL: k3 is 4 × what" in verdict["sentences"][-1]
    few = summary(bulk | {"k3": estimate(4 * s * s / 2)})
    few["pairs"]["mismatch"]["counts"]["tokens"] = 10
    assert assess(few)["tail"] is None
    exact = assess(summary(bulk | {"abs_d_p95": estimate(0.0)}))
    assert exact["tail"]["times"] is None
    assert "95 % of the tokens agree exactly" in exact["sentences"][-1]


def test_without_measurements_nothing_is_judged():
    verdict = assess(summary({"k3": estimate(None)}, {}))
    assert (verdict["bars"], verdict["measured"], verdict["tail"], verdict["floor"]) == (
        [],
        [],
        None,
        None,
    )
    assert len(verdict["sentences"]) == 1
    json.dumps(verdict, allow_nan=False)


def test_missing_intervals_are_mentioned():
    assert any(
        "compared by their value alone" in text
        for text in assess(summary({"k3": estimate(1e-4)}))["sentences"]
    )
    with_intervals = assess(summary({"k3": estimate(1e-4, 1e-5)}))["sentences"]
    assert not any("compared by their value alone" in text for text in with_intervals)


def test_a_limit_for_the_other_family_does_not_apply():
    for architecture, whose in (
        ("Qwen3MoeForCausalLM", "Miles blog, MoE"),
        ("LlamaForCausalLM", "Miles blog, dense"),
    ):
        verdict = assess(summary({"k3": estimate(5e-3, 1e-4)}, architecture=architecture))
        assert [row["who"] for row in verdict["bars"] if "Miles" in row["who"]] == [whose]
    unknown = assess(summary({"k3": estimate(5e-3, 1e-4)}))
    assert not [row for row in unknown["bars"] if "Miles" in row["who"]]


def test_the_nearest_measurements_of_the_same_kind_come_first():
    metrics = {
        "k3": estimate(9e-4),
        "abs_d_mean": estimate(0.015),
        "k2": estimate(4.5e-4),
        "pearson": estimate(0.9993),
    }
    dense = assess(summary(metrics, architecture="Qwen3ForCausalLM"))["measured"]
    assert all(row["family"] in ("dense", "") for row in dense)
    assert [row["precision"] for row in dense[:3]] == ["bf16"] * 3
    assert (dense[0]["model"], dense[0]["metric"], dense[0]["value"]) == (
        "Qwen2.5-0.5B",
        "k2",
        4.5e-4,
    )
    moe = assess(summary(metrics, architecture="DeepseekV3ForCausalLM"))["measured"]
    assert all(row["family"] in ("moe", "") for row in moe)
    assert moe[0]["model"] == "DeepSeek-V4-Flash"


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"trainer": {"architecture": "Qwen3ForCausalLM"}}, "dense"),
        ({"rollout": {"architecture": "OlmoeForCausalLM"}}, "moe"),
        ({"rollout": {"architecture": "GptOssForCausalLM"}}, "moe"),
        ({"trainer": {"architecture": "MixtralForCausalLM"}}, "moe"),
        ({"trainer": {"architecture": "NemotronHForCausalLM"}}, ""),
        ({"trainer": {"architecture": "NemotronHForCausalLM", "num_experts": 128}}, "moe"),
        ({"trainer": {"architecture": "Qwen3MoeForCausalLM", "num_experts": 1}}, "dense"),
        ({"trainer": {"architecture": None}}, ""),
        ({}, ""),
    ],
)
def test_dense_or_moe(about, expected):
    assert family(about) == expected


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        (
            {
                "rollout": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
                "trainer": {"dtype": "float32"},
            },
            "fp8",
        ),
        (
            {
                "rollout": {"dtype": "bfloat16", "kv_cache_dtype": "auto"},
                "trainer": {"dtype": "float32"},
            },
            "bf16",
        ),
        ({"rollout": {"dtype": "float16"}, "trainer": {"dtype": "float32"}}, "fp16"),
        ({"rollout": {"dtype": "bfloat16", "quantization": "mxfp4"}}, "fp4"),
        ({"trainer": {"dtype": "float32"}}, "fp32"),
        ({"rollout": {"dtype": None}}, ""),
        ({}, ""),
    ],
)
def test_precision(about, expected):
    assert precision(about) == expected
