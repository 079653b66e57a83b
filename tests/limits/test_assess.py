"""Verdicts on summaries made by hand around every published limit."""

from __future__ import annotations

import json
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.base.json_form import to_json
from mismatch_cli.limits.assess import Assessment, LimitRow, assess, status
from mismatch_cli.limits.judge import BROKEN, EXCEEDED, HEALTHY, HOLDS, UNDECIDED, UNJUDGED
from mismatch_cli.limits.manifest_sides import family, precision
from mismatch_cli.limits.published import Published, published
from mismatch_cli.metrics.estimate import (
    BELOW_RESOLUTION,
    FEW_PROMPTS,
    NOT_MEASURED,
    ONE_HAS_ALL,
    Estimate,
)
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.metrics.pairs import PAIRS

ROWS = published()


def estimate(
    value: float | None, half_width: float | None = None, note: str | None = None
) -> Estimate:
    low, high = (None, None) if half_width is None else (value - half_width, value + half_width)
    return Estimate(value, low, high, note)


def assessed(
    metrics: dict[str, Estimate],
    floor: dict[str, Estimate] | None = None,
    pair: str = "mismatch",
    architecture: str = "",
    tokens: int = 1000,
    side: dict[str, str] | None = None,
    **pairs: dict[str, Estimate],
) -> Assessment:
    trainer = {"architecture": architecture, "dtype": "bfloat16"} if architecture else {}
    manifest = {"trainer": trainer | (side or {})} if trainer or side else {}
    return assess({pair: metrics} | pairs, manifest, tokens=tokens, floor=floor)


def row_of(verdict: Assessment, limit: Published) -> LimitRow:
    (row,) = [row for row in verdict.bars if row.who == limit.who]
    return row


def test_a_number_that_a_few_prompts_decide_is_not_certain():
    limit = next(row for row in ROWS if row.metric == "k3" and not row.family)
    for note, (times, expected) in product(
        (ONE_HAS_ALL, FEW_PROMPTS), ((0.2, HOLDS), (0.5, UNDECIDED))
    ):
        measured = estimate(times * limit.bound(BROKEN), note=note)
        row = row_of(assessed({"k3": measured}), limit)
        assert (row.standing, row.low, row.power) == (expected, None, None)
        assert ("undecided with so few prompts: " in row.reason) == (expected == UNDECIDED)


def test_the_status_is_above_only_if_every_limit_is_exceeded():
    above, between = (EXCEEDED, BROKEN), (EXCEEDED, HEALTHY)
    holds, undecided, unjudged = (HOLDS, ""), (UNDECIDED, ""), (UNJUDGED, "")
    expected = {
        "above": (above, unjudged), "mixed": (above, undecided),
        "between": (between, holds, undecided),
        "undecided": (undecided, holds), "healthy": (holds, unjudged), "": (unjudged,),
    }  # fmt: skip
    for word, rows in expected.items():
        bars = [
            SimpleNamespace(standing=standing, level=level, is_judged=standing != UNJUDGED)
            for standing, level in rows
        ]
        assert status(bars) == word


def test_float32_rounding_does_not_exceed_a_limit():
    rounded = float(np.float32(0.1))
    assert rounded > 0.1
    limit = next(row for row in ROWS if row.metric == "abs_d_response_mean")
    verdict = assessed({limit.metric: estimate(rounded)})
    assert row_of(verdict, limit).standing == HOLDS


@pytest.mark.parametrize(
    "limit", [row for row in ROWS if ":" not in row.metric], ids=lambda r: r.who
)
def test_intervals_around_every_limit(limit):
    """The values themselves are those of test_one_judge.py."""
    architecture = {"moe": "Qwen3MoeForCausalLM", "dense": "Qwen3ForCausalLM"}.get(limit.family, "")
    healthy, broken = limit.range(HEALTHY).high, limit.range(BROKEN).high
    scale = healthy - METRICS[limit.metric].agreement
    cases = [
        (estimate(healthy - scale / 2, scale / 4), (HOLDS, "")),
        (estimate(healthy, scale / 4), (UNDECIDED, "")),
        (
            estimate(broken, scale / 4),
            (EXCEEDED, HEALTHY) if limit.has_two_levels else (UNDECIDED, ""),
        ),
        (estimate(broken + scale / 2, scale / 4), (EXCEEDED, BROKEN)),
    ]
    if broken > healthy:
        middle = estimate((healthy + broken) / 2, (broken - healthy) / 4)
        cases.append((middle, (EXCEEDED, HEALTHY)))
    for interval, expected in cases:
        side = _STORED.get(limit.precision)
        verdict = assessed({limit.metric: interval}, architecture=architecture, side=side)
        row = row_of(verdict, limit)
        assert (row.standing, row.level) == expected, interval
        assert (row.value, row.source) == (interval.value, limit.source)
        assert row.power == pytest.approx(interval.high - interval.value)


_STORED = {"bf16": {"dtype": "bfloat16"}, "fp8": {"dtype": "bfloat16", "quantization": "fp8"}}


def test_a_signed_metric_is_compared_by_its_size():
    limit = next(row for row in ROWS if row.direction == "size")
    verdict = assessed({limit.metric: estimate(-0.3, 0.1)})
    assert row_of(verdict, limit).standing == EXCEEDED
    half = limit.bound(BROKEN) / 2
    row = row_of(assessed({limit.metric: estimate(-half / 5, half)}), limit)
    assert (row.value, row.standing) == (-half / 5, HOLDS)
    across = assessed({limit.metric: estimate(0.0, 3 * half)})
    assert row_of(across, limit).standing == UNDECIDED


def test_limits_are_never_merged():
    """The same KL is healthy for one source and above the limit of another, and both are named."""
    verdict = assessed({"k3": estimate(5e-3, 1e-4)}, architecture="Qwen3ForCausalLM")
    standings = {row.who: row.standing for row in verdict.bars}
    assert standings == {
        "Miles blog, dense": EXCEEDED,
        "NeMo-RL, GRPO guide": EXCEEDED,
        "NeMo-RL CI, KL": EXCEEDED,
        "prime-rl, new models": HOLDS,
        "prime-rl nightly": EXCEEDED,
        "prime-rl CI, reverse-text": HOLDS,
    }
    text = " ".join(verdict.sentences)
    assert "2 of 6 published limits hold, exceeded: Miles, NeMo-RL (2), prime-rl." in text


def test_each_limit_reads_the_pair_it_is_about():
    at_equal, current = {"k3": estimate(1e-4, 1e-5)}, {"k3": estimate(0.1, 0.01)}
    verdict = assessed(at_equal, total=current, staleness={"k3": estimate(0.05, 0.01)})
    pairs = {row.who: (row.pair, row.value) for row in verdict.bars}
    assert pairs["NeMo-RL, GRPO guide"] == ("mismatch", 1e-4)
    assert pairs["prime-rl, new models"] == ("total", 0.1)
    assert any(
        sentence.startswith("With staleness, 0 of 3 published limits hold, exceeded: prime-rl")
        for sentence in verdict.sentences
    )
    assert {row.pair for row in ROWS} <= set(PAIRS)


def test_with_only_the_current_trainer_limits_on_equal_weights_are_not_judged():
    verdict = assessed({"k3": estimate(0.1, 0.01)}, pair="total")
    words = {row.who: (row.pair, row.standing) for row in verdict.bars}
    assert words["prime-rl, new models"] == ("total", EXCEEDED)
    assert words["NeMo-RL, GRPO guide"] == ("mismatch", UNJUDGED)
    assert verdict.status == "above"
    (sentence,) = [text for text in verdict.sentences if "could not be judged" in text]
    assert "1 could not be judged: the number includes staleness" in sentence


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
    noise = None if floor is None else {"abs_d_mean": floor}
    verdict = assessed({"abs_d_mean": value}, noise)
    assert words in verdict.sentences[0]


def test_the_factor_equals_the_reports():
    verdict = assessed({"abs_d_mean": estimate(0.03)}, {"abs_d_mean": estimate(0.01)})
    assert verdict.floor.times == METRICS["abs_d_mean"].times_floor(0.03, 0.01)
    below = assessed({"abs_d_mean": estimate(0.03)}, {"abs_d_mean": estimate(0.0)})
    assert below.floor.times == BELOW_RESOLUTION


def test_the_tail():
    """For normal d with standard deviation s, p95 is 1.96 s and k3 about s²/2."""
    s = 0.05
    bulk = {"k3": estimate(s * s / 2), "abs_d_p95": estimate(1.959964 * s)}
    assert assessed(bulk).tail is None
    verdict = assessed(bulk | {"k3": estimate(4 * s * s / 2)})
    assert verdict.tail.times == pytest.approx(4, rel=1e-4)
    assert verdict.tail.robust_spread == pytest.approx(s, rel=1e-4)
    assert "Rare tokens dominate the KL: k3 is 4 × what" in verdict.sentences[-1]
    assert assessed(bulk | {"k3": estimate(4 * s * s / 2)}, tokens=10).tail is None
    exact = assessed(bulk | {"abs_d_p95": estimate(0.0)})
    assert exact.tail.times is None
    assert "95 % of the tokens agree exactly" in exact.sentences[-1]


def test_without_measurements_nothing_is_judged():
    verdict = assessed({"k3": estimate(None)}, {})
    assert {row.standing for row in verdict.bars} == {UNJUDGED}
    assert {row.reason for row in verdict.bars} == {NOT_MEASURED}
    assert (verdict.status, verdict.measured, verdict.tail, verdict.floor) == (
        "", [], None, None,
    )  # fmt: skip
    json.dumps(to_json(verdict), allow_nan=False)
    assert assessed({}).bars == []


def test_missing_intervals_are_mentioned():
    few = estimate(1e-4, note=FEW_PROMPTS)
    for number, is_said in ((estimate(1e-4), True), (few, False)):
        sentences = assessed({"k3": number}).sentences
        assert any("compared by their value alone" in text for text in sentences) == is_said
    with_intervals = assessed({"k3": estimate(1e-4, 1e-5)}).sentences
    assert not any("compared by their value alone" in text for text in with_intervals)


def test_a_limit_for_the_other_family_does_not_apply():
    for architecture, whose in (
        ("Qwen3MoeForCausalLM", "Miles blog, MoE"),
        ("LlamaForCausalLM", "Miles blog, dense"),
    ):
        verdict = assessed({"k3": estimate(5e-3, 1e-4)}, architecture=architecture)
        assert [row.who for row in verdict.bars if "Miles" in row.who] == [whose]
    unknown = assessed({"k3": estimate(5e-3, 1e-4)})
    assert not [row for row in unknown.bars if "Miles" in row.who]


def test_the_nearest_measurements_of_the_same_kind_come_first():
    metrics = {
        "k3": estimate(9e-4),
        "abs_d_mean": estimate(0.015),
        "k2": estimate(4.5e-4),
        "pearson": estimate(0.9993),
    }
    dense = assessed(metrics, architecture="Qwen3ForCausalLM").measured
    assert all(row.family in ("dense", "") for row in dense)
    assert [row.precision for row in dense[:3]] == ["bf16"] * 3
    assert (dense[0].model, dense[0].metric, dense[0].value) == (
        "Qwen2.5-0.5B",
        "k2",
        4.5e-4,
    )
    moe = assessed(metrics, architecture="DeepseekV3ForCausalLM").measured
    assert all(row.family in ("moe", "") for row in moe)
    assert moe[0].model == "DeepSeek-V4-Flash"


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
        ({"rollout": {"dtype": "bfloat16", "quantization": "awq_marlin"}}, "fp4"),
        ({"rollout": {"dtype": "bfloat16", "quantization": "compressed-tensors"}}, ""),
        (
            {
                "rollout": {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "quantization": "quark"},
                "trainer": {"dtype": "bfloat16"},
            },
            "fp8",
        ),
        ({"rollout": {"dtype": "bfloat16", "quantization": None}}, "bf16"),
        ({"trainer": {"dtype": "float32"}}, "fp32"),
        ({"rollout": {"dtype": None}}, ""),
        ({}, ""),
    ],
)
def test_precision(about, expected):
    assert precision(about) == expected
