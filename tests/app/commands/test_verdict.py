"""`verdict` as users type it: framework or own names, several at once, other quantities, what to
check.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.json_form import from_json, to_json
from mismatch_cli.base.places import bundled
from mismatch_cli.frameworks import dialects
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.studies.dashboard import DashboardResult, listed_metrics, metric_range
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.reader import Trace
from tests.paths import DOCS

PAGE = DOCS / "json" / "verdict.md"
TRL = "sampling/sampling_logp_difference/mean"


@pytest.fixture
def typed(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str) -> tuple[str, str]:
        capfd.readouterr()
        assert run(["verdict", *words]) == 0
        out, err = capfd.readouterr()
        return out, err

    return call


@pytest.fixture
def judged(typed):
    return lambda *words: json.loads(typed(*words, "--json")[0])


def test_the_question_that_people_ask(typed):
    out, err = typed(
        "trl",
        "sampling/sampling_logp_difference/mean=0.02",
        "--model",
        "dense-7b",
        "--dtype",
        "bf16",
    )
    text = " ".join(out.split())
    assert (
        not err
        and "trl sampling/sampling_logp_difference/mean = 0.02" in text
        and "(ours: abs_d_mean)" in text
    )
    assert "SkyRL CI ≤ 0.05 ✔ holds" in text
    assert "✔ WITHIN LIMITS" in text and "0.001–0.07 nats for bf16 against bf16" in text
    assert "mismatch-cli diagnose run" in text and "mismatch-cli report run --as trl" in text


def test_the_exit_code_is_0_whether_limits_hold_or_not(typed):
    assert "ABOVE EVERY LIMIT" in typed("prime-rl", "mismatch_kl/all/mean=0.5")[0]
    assert "HEALTHY" in typed("k3=1e-5", "--model", "dense")[0]


def test_a_metric_is_known_by_the_label_that_reports_print(judged):
    for metric in METRICS.values():
        if metric.agreement is not None:
            value = 1.0 if metric.agreement == 1 else 0.0
            (row,) = judged(f"{metric.label}={value}")["numbers"]
            assert row["name"] == metric.key


def test_between_healthy_and_broken_is_not_above(typed):
    text = " ".join(typed("verl", "training/rollout_probs_diff_mean=0.007")[0].split())
    assert "BETWEEN HEALTHY AND BROKEN 1 of 2 published limits hold, not healthy: verl." in text
    assert "exceeded" not in text


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ("k3 0.02", [("mismatch", "k3", 0.02)]),
        ("mismatch k3 2e-3", [("mismatch", "k3", 0.002)]),
        ("trl sampling_logp_difference/mean .02", [("trl", TRL, 0.02)]),
        (f"{TRL} 0.02", [("trl", TRL, 0.02)]),
        (f"{TRL}=0.02", [("trl", TRL, 0.02)]),
        ("k3 0.002 k1 -0.001", [("mismatch", "k3", 0.002), ("mismatch", "k1", -0.001)]),
        ("k1 -.001 k3=0.002", [("mismatch", "k1", -0.001), ("mismatch", "k3", 0.002)]),
        ("k1 −0.001 k3=2e−3", [("mismatch", "k1", -0.001), ("mismatch", "k3", 0.002)]),
        ("k1 -1e-3 --top-p 1", [("mismatch", "k1", -0.001)]),
        ("--quiet k1=-0.001", [("mismatch", "k1", -0.001)]),
        (f"k3=0.002 {TRL} 0.02", [("mismatch", "k3", 0.002), ("trl", TRL, 0.02)]),
    ],
)
def test_a_number_follows_its_name_as_its_own_word_too(judged, words, numbers):
    rows = judged(*words.split())["numbers"]
    assert [(row["framework"], row["name"], row["value"]) for row in rows] == numbers


@pytest.mark.parametrize(
    "words",
    [["k1 = -0.02"], [" k1= -2e-2 "], ["k1", "=", "-0.02"], ["k1=", "−0.02"], ["k1", "=-0.02"]],
)
def test_blanks_around_a_name_its_number_and_the_sign_between_do_not_matter(judged, words):
    rows = judged("mismatch", "k3 =0.02", *words)["numbers"]
    assert [(row["name"], row["value"]) for row in rows] == [("k3", 0.02), ("k1", -0.02)]


def test_two_dashes_before_a_negative_number_are_allowed(typed):
    assert "k1 = -0.001" in typed("k1", "--", "-0.001")[0]


def test_a_label_may_be_followed_by_its_number(judged):
    assert judged("mean |π − μ|", "0.02")["numbers"][0]["name"] == "tv_binary_mean"


def test_a_name_of_several_frameworks_is_answered_if_it_is_one_number(judged, typed):
    (number,) = judged("train_rollout_logprob_abs_diff=0.02")["numbers"]
    assert number["framework"] == "miles" and "the same number as in slime;" in number["note"]
    assert "the same number as in slime" in typed("train_rollout_logprob_abs_diff=0.02")[0]
    (of_slime,) = judged("slime", "train_rollout_logprob_abs_diff=0.02")["numbers"]
    assert "same number" not in of_slime["note"]
    assert (number["bars"], number["status"]) == (of_slime["bars"], of_slime["status"])
    (number,) = judged("k3_kl=0.02")["numbers"]
    assert number["note"].startswith("the same number as in verl (rollout_corr/k3_kl)")


def test_a_name_of_several_frameworks_is_ambiguous_if_the_numbers_differ(capfd):
    """verl counts clipped tokens over a batch, Miles over responses first."""
    formulas = {}
    for framework in ("miles", "verl"):
        for line in dialects.lines(framework):
            if "pg_clipfrac" in line.name:
                formulas.setdefault(framework, line.formula)
    assert formulas["miles"] != formulas["verl"]
    assert run(["verdict", "pg_clipfrac=0.02"]) == 2
    err = capfd.readouterr().err
    who = "miles (train/pg_clipfrac), slime (train/pg_clipfrac), verl (actor/pg_clipfrac)"
    assert f"{who}. Name the framework first" in err


@pytest.mark.parametrize(
    ("name", "family", "kind"),
    [
        ("Qwen/Qwen3-4B", "dense", "dense"),
        ("Qwen/Qwen3-30B-A3B", "moe", "moe"),
        ("moe-30b", "moe", "moe-30b"),
        ("MoE", "moe", "MoE"),
    ],
)
def test_a_model_is_called_by_its_name_on_a_hub(judged, typed, name, family, kind):
    words = "abs_d_mean=0.09", "--model", name
    verdict = judged(*words)
    assert verdict["family"] == family
    assert verdict["numbers"] == judged("abs_d_mean=0.09", "--model", kind)["numbers"]
    assert f"verdict abs_d_mean=0.09 --model {name} --dtype bf16" in typed(*words)[0]


def test_commands_that_test_a_suspect_name_the_model(judged):
    suspects = judged("k3=0.1", "--model", "Qwen/Qwen3-4B", "--kv-cache-dtype", "fp8")["suspects"]
    assert suspects[0]["test"][0].startswith("mismatch-cli probe Qwen/Qwen3-4B ")


def test_a_model_folder_is_known_by_its_configuration(judged, tmp_path, capfd):
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    assert run(["verdict", "k3=0.1", "--model", str(folder)]) == 2
    assert "does not say whether it has experts" in capfd.readouterr().err
    config = folder / "config.json"
    config.write_text('{"architectures": ["Qwen3MoeForCausalLM"]}', encoding="utf-8")
    assert judged("k3=0.1", "--model", str(folder))["family"] == "moe"
    for text in ('{"architectures": ["NemotronHForCausalLM"]}', "[]", "{", '{"architectures": 1}'):
        config.write_text(text, encoding="utf-8")
        assert run(["verdict", "k3=0.1", "--model", str(folder)]) == 2, text


@pytest.mark.parametrize(
    "words",
    [
        ["k3=0.0015", "--model", "moe", "--dtype", "bf16", "--kv-cache-dtype", "fp8"],
        [
            "verl",
            "training/rollout_probs_diff_mean=0.007",
            "rollout_corr/kl=0.002",
            "actor/ppo_kl=0.1",
        ],
        [
            "trl",
            "sampling/sampling_logp_difference/mean=0.2",
            "--dtype",
            "fp8",
            "--kv-cache-dtype",
            "fp8",
        ],
        ["k3=0.02", "abs_d_mean=0.02", "tv_binary_mean=0.02", "k1=0.2", "--model", "moe"],
        [],
    ],
)
def test_a_screen_has_at_most_40_lines(typed, words):
    lines = typed(*words)[0].splitlines()
    assert len(lines) <= 40
    assert all(len(line) <= 80 for line in lines if not line.startswith("mismatch-cli "))


def test_the_same_bars_as_a_report_has(judged):
    """A number gets the same verdict whether it is read from a trace or typed."""
    summary = analyse_mismatch([Trace.open(bundled("traces/fp8-kv"))], 0).to_json()
    main = next(iter(summary["pairs"].values()))
    of_report = {
        bar["who"]: bar["standing"]
        for bar in summary["verdict"]["bars"]
        if bar["pair"] == main["pair"]
    }
    for key in ("tv_binary_mean", "abs_d_mean", "k1", "chi2_token"):
        (number,) = judged(f"{key}={main['metrics'][key]['value']:.9g}", "--model", "dense")[
            "numbers"
        ]
        for bar in number["bars"]:
            if bar["who"] in of_report and of_report[bar["who"]] != "undecided":
                assert bar["standing"] == of_report[bar["who"]], bar["who"]


def test_without_a_number_that_of_the_bundled_trace(typed):
    out, err = typed()
    value = next(
        iter(
            analyse_mismatch([Trace.open(bundled("traces/fp8-kv"))], 0).to_json()["pairs"].values()
        )
    )["metrics"]["abs_d_mean"]
    assert f"abs_d_mean = {value['value']:.2g}" in out and "bundled trace" in err


def test_a_name_may_leave_out_what_comes_before_a_slash(judged):
    for words in (
        ["trl", "sampling_logp_difference/mean=0.02"],
        ["sampling_logp_difference/mean=0.02"],
    ):
        assert judged(*words)["numbers"][0]["name"] == "sampling/sampling_logp_difference/mean"
    assert judged("oat", "optim/kl_sample_train_v2=0.001")["numbers"][0]["metric"] == "k2"


def test_a_metric_of_ours_is_one_of_the_same_definition():
    for framework in dialects.names():
        for line in dialects.lines(framework):
            if key := dialects.metric_of(line):
                assert line.formula == METRICS[key].formula or line.metric == key
                assert line.pair != dialects.UPDATE


def test_a_different_quantity_is_not_compared_with_limits(judged, typed):
    for words in (
        ["verl", "actor/ppo_kl=0.5"],
        ["trl", "sampling/importance_sampling_ratio/mean=0.5"],
    ):
        verdict = judged(*words)
        assert (
            verdict["numbers"][0]["bars"],
            verdict["numbers"][0]["metric"],
            verdict["status"],
        ) == (
            [],
            None,
            "",
        )
    out = " ".join(typed("verl", "actor/ppo_kl=0.5")[0].split())
    assert (
        "DIFFERENT QUANTITY" in out
        and "compares the trainer with itself" in out
        and "check first" not in out
    )


def test_an_average_over_responses_first_has_its_own_limit_and_its_own_values(judged):
    """slime averages over responses first, as our metric of that name does."""
    (number,) = judged("slime", "train/train_rollout_logprob_abs_diff=0.2")["numbers"]
    assert number["metric"] == "abs_d_response_mean"
    assert [bar["who"] for bar in number["bars"]] == ["slime CI"]
    assert number["status"] == "above" and number["usual"] is None
    assert {row["metric"] for row in number["measured"]} == {"abs_d_response_mean"}
    (number,) = judged("slime", "train/mis_kl=0.2")["numbers"]
    assert number["bars"] == [] and number["measured"] == []


def test_a_limit_by_the_same_name_on_another_number_is_not_denied(judged, typed):
    """verl warns of its mean weight before it is capped, and logs it capped."""
    (number,) = judged("verl", "rollout_corr/rollout_is_mean=0.4")["numbers"]
    assert (number["bars"], number["limit_on"]) == ([], "ratio_mean")
    text = " ".join(typed("verl", "rollout_corr/rollout_is_mean=0.4")[0].split())
    assert "the limit that is published by its name is about mean ratio (ratio_mean)." in text


def test_a_limit_on_a_quantity_that_none_of_ours_equals_is_judged_by_its_own_name(judged):
    name = "rollout_corr/rollout_is_eff_sample_size"
    for value, standing, level in ((0.2, "exceeded", "broken"), (0.6, "holds", "")):
        (number,) = judged("verl", f"{name}={value}")["numbers"]
        (bar,) = number["bars"]
        assert (number["metric"], bar["who"]) == (None, "verl rollout_corr, sample size")
        assert (bar["standing"], bar["level"]) == (standing, level)


def test_given_facts_are_suspected_before_unknown_ones(judged):
    verdict = judged(
        "abs_d_mean=0.05", "--dtype", "bf16", "--kv-cache-dtype", "fp8", "--model", "moe"
    )
    first, second, third, *others = verdict["suspects"]
    assert (first["setting"], first["value"]) == ("rollout.kv_cache_dtype", "fp8") and first["test"]
    assert second["setting"] == "rollout.num_experts" and third["setting"] == "rollout.dtype"
    assert all(row["value"] is None and row["test"] == [] for row in others)
    assert (verdict["family"], verdict["precision"]) == ("moe", "fp8")
    settings = [
        row["setting"] for row in judged("k3=0.1", "--temperature", "1", "--top-p", "1")["suspects"]
    ]
    assert not {
        "rollout.logprobs_mode",
        "config.sampling.temperature",
        "config.sampling.top_p",
    } & set(settings)


def test_a_value_known_from_faults_is_reported_as_one(judged, typed):
    (number,) = judged("abs_d_mean=0.2", "--model", "dense")["numbers"]
    faults = [case for case in number["made_by"] if case["fault"]]
    assert any("stale weights" in case["what"] and case["source"] == "trl #5312" for case in faults)
    assert "look for one first" in " ".join(typed("abs_d_mean=0.2")[0].split())
    assert not any(case["fault"] for case in judged("abs_d_mean=0.00001")["numbers"][0]["made_by"])


def test_every_metric_has_bounds_around_agreement():
    for key, metric in METRICS.items():
        if metric.agreement is not None:
            low, high = metric_range(metric)
            assert low <= metric.agreement <= high, key


@pytest.mark.parametrize("words", ["abs_d_mean=0.3", "k3 0.0015 k1 -0.001", "pg_clipfrac=0.1"])
def test_a_stored_result_is_read_back_as_it_was(judged, words):
    framework = ["verl"] if "pg_clipfrac" in words else []
    content = judged(*framework, *words.split())
    assert (content.pop("format"), content.pop("version")) == ("mismatch-cli verdict", 1)
    assert to_json(from_json(DashboardResult, content)) == content


@pytest.mark.slow
def test_every_name_that_is_listed_can_be_judged(typed, judged):
    rows = listed_metrics()
    assert {row.framework for row in rows} == {"mismatch", *dialects.names()}
    out, _ = typed("--list", "trl")
    assert (
        "sampling/sampling_logp_difference/mean" in out
        and "= abs_d_mean" in out
        and "verl" not in out
    )
    assert judged("--list") == to_json(rows)
    for row in rows:
        value = 1 if row.formula.startswith(("E exp", "max_y mean exp", "E_y mean exp")) else 0.5
        words = [f"{row.name}={value}"]
        assert run(["verdict", row.framework, *words, "--json"]) == 0, row


def test_it_loads_neither_torch_nor_what_reads_traces():
    script = (
        "import sys; from mismatch_cli.app.cli import run; "
        "run(['verdict', 'k3', '0.01', '--model', 'Qwen/Qwen3-4B']); print([m for "
        "m in ('torch', 'pandas', 'matplotlib', 'pyarrow', 'transformers') if m in sys.modules], "
        "file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stderr.strip() == "[]"


def test_the_page_lists_everything(judged):
    page = PAGE.read_text(encoding="utf-8")
    verdict = judged("abs_d_mean=0.2", "--kv-cache-dtype", "fp8")
    number = verdict["numbers"][0]
    rows = (verdict, number, number["usual"], number["made_by"][0], verdict["suspects"][0])
    for key in (key for row in rows for key in row):
        assert re.search(f"`{key}`", page), key


def test_without_a_dtype_the_answer_is_given_for_each_precision(typed, judged):
    """Nothing takes the widest range: it is usual for bfloat16 only, and the flag is named."""
    name = "trl", "sampling/sampling_logp_difference/mean=0.02"
    text = " ".join(typed(*name)[0].split())
    assert "! WITHIN LIMITS, USUAL FOR SOME PRECISIONS" in text and "unknown precision" not in text
    assert "within bf16 (0.001–0.07), fp8 (0.002–0.25); above fp32 (1e-07–0.0008), fp16" in text
    assert f"mismatch-cli verdict {' '.join(name)} --dtype bf16" in text
    printed = " ".join(typed(*name, "--dtype", "bf16")[0].split())
    assert "✔ WITHIN LIMITS" in printed and "not given" not in printed.partition("✔")[2]
    (number,) = judged(*name, "--model", "moe")["numbers"]
    of_experts = {row["precision"]: row for row in number["by_precision"]}
    assert of_experts["bf16"]["low"] == 0.002 and len(of_experts) == len(number["by_precision"])
    assert judged(*name, "--dtype", "fp16")["numbers"][0]["by_precision"] == []
    assert judged("k3=0.001")["numbers"][0]["by_precision"] == []
    line = typed("abs_d_mean=0.09", "--model", "moe", "--temperature", "0.7")[0]
    assert "verdict abs_d_mean=0.09 --model moe --temperature 0.7 --dtype bf16" in line


@pytest.mark.parametrize(
    ("framework", "name", "lines"),
    [
        ("trl", "sampling/sampling_logp_difference/mean", ["guide trl"]),
        ("skyrl", "", ["guide record"]),
        ("verl", "", ["import DUMP --format verl --output run", "guide verl"]),
        ("slime", "", ["import DUMP --format slime --output run", "guide record"]),
        ("prime-rl", "", ["import DUMP --format prime-rl --output run"]),
        ("areal", "", ["import DUMP --output run"]),
    ],
)
def test_the_next_step_fits_the_framework(typed, framework, name, lines):
    name = name or next(each.name for each in dialects.lines(framework))
    out = typed(framework, f"{name}=0.5", "--dtype", "bf16")[0]
    shown = [each for each in out.splitlines() if each.startswith("mismatch-cli ")]
    commands = [each.partition("  #")[0].rstrip() for each in shown[: len(lines)]]
    assert commands == [f"mismatch-cli {line}" for line in lines]
    assert shown[len(lines)].startswith("mismatch-cli diagnose run")
    for command in commands:
        if command.startswith("mismatch-cli guide"):
            assert run(command.split()[1:]) == 0


def test_a_family_that_nobody_measured_is_said(typed):
    words = "verl", "training/rollout_probs_diff_mean=0.007"
    said = "Measured by others  only on MoE models (leave out --model)"
    assert said in typed(*words, "--model", "dense-7b")[0]
    for model in ([], ["--model", "moe"]):
        assert "measured by others" in typed(*words, *model)[0]
        assert said not in typed(*words, *model)[0]
    # Nobody has measured this one on any model, which no flag changes.
    assert "Measured by others" not in typed("ratio_p99=1.5", "--model", "dense")[0]
