"""`report` from traces alone: export, worst tokens, pooling, damage, and hostile text."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.backends.cpu import get_cpu_capability

from mismatch_cli.app.cli import run
from tests.paths import ROOT

PROBE = [
    "probe",
    "--engine",
    "hf",
    "--num-prompts",
    "12",
    "--samples-per-prompt",
    "4",
    "--noise-responses",
    "20",
    "--quiet",
]
HOSTILE = "\x1b[2J[red]x[/red]<script>alert(1)</script>$\\frac{1}{0}\u202e"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    assert run([*PROBE, "--output", str(folder)]) == 0
    return folder


@pytest.fixture
def run_folder(recorded, tmp_path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def test_numbers_are_there_before_pictures_are_drawn(run_folder, report, monkeypatch):
    def cannot_draw(*_, **_options):
        raise OSError("no fonts")

    monkeypatch.setattr("mismatch_cli.report.figures.figure_views", cannot_draw)
    code, out, err = report(str(run_folder))
    assert code == 1 and "no fonts" in err
    assert "mean |π − μ|" in out


@pytest.fixture
def report(typed):
    return partial(typed, "report", "--quiet")


def test_everything_is_made_again_from_the_trace(run_folder, report):
    before = json.loads((run_folder / "summary.json").read_text())
    for name in ("summary.json", "report.html"):
        (run_folder / name).unlink()
    code, out, _ = report(str(run_folder), "--plots", "png")
    assert code == 0
    after = json.loads((run_folder / "summary.json").read_text())
    assert after["pairs"] == before["pairs"]
    assert (run_folder / "plots" / "ratio-and-tv.png").stat().st_size > 0
    assert "tokens in 48 responses" in out and "mean |Δlog p|" in out


def test_the_worst_tokens_are_the_worst_and_in_their_response(run_folder, report):
    assert report(str(run_folder), "--worst", "60")[0] == 0
    worst = json.loads((run_folder / "summary.json").read_text())["worst"]["abs_d"]
    assert len(worst) == 60
    report(str(run_folder), "--export", "parquet")
    tokens = pd.read_parquet(run_folder / "tokens.parquet")
    gap = (tokens["logp_trainer"] - tokens["logp_rollout"]).abs()
    np.testing.assert_allclose(
        [abs(w["logp_current"] - w["logp_reference"]) for w in worst], gap.nlargest(60), rtol=1e-6
    )
    keyed = tokens.set_index(["prompt_id", "sample_index", "position"])
    for row in worst[:10]:
        assert (
            keyed.loc[(row["prompt_id"], row["sample_index"], row["position"]), "token_id"]
            == row["token_id"]
        )


def test_as_many_worst_tokens_are_printed_as_are_asked_for(run_folder, report, monkeypatch):
    for count in (0, 1, 30):
        _, out, _ = report(str(run_folder), "--worst", str(count))
        assert out.count("Worst token ") == count and "tokens in context" not in out
    monkeypatch.setenv("MISMATCH_WORST", "12")
    assert report(str(run_folder))[1].count("Worst token ") == 12


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_export_holds_every_token(run_folder, report, kind):
    assert report(str(run_folder), "--export", kind)[0] == 0
    path = run_folder / f"tokens.{kind}"
    tokens = pd.read_csv(path) if kind == "csv" else pd.read_parquet(path)
    summary = json.loads((run_folder / "summary.json").read_text())["pairs"]["mismatch"]
    assert len(tokens) == summary["counts"]["tokens"]
    d = tokens["logp_trainer"].astype("float64") - tokens["logp_rollout"].astype("float64")
    assert d.abs().mean() == pytest.approx(summary["metrics"]["abs_d_mean"]["value"], rel=1e-5)
    assert tokens["logp_trainer_repeat"].notna().sum() < len(tokens)


def test_numbers_equal_plain_numpy(run_folder):
    """An independent implementation, from the recorded columns in float64."""
    rows = pd.concat(
        pq.read_table(p).to_pandas() for p in sorted((run_folder / "trace").glob("shard-*.parquet"))
    )
    mu, pi = (
        np.concatenate(rows[f"logp_{side}"].to_list()).astype(np.float64)
        for side in ("rollout", "trainer")
    )
    d, ratio = pi - mu, np.exp(pi - mu)
    sums = np.array(
        [
            np.sum(b.astype(np.float64) - a)
            for a, b in zip(rows["logp_rollout"], rows["logp_trainer"], strict=True)
        ]
    )
    weights = np.exp(sums)
    expected = {
        "abs_d_mean": np.abs(d).mean(),
        "d_sd": d.std(),
        "tv_binary_mean": np.abs(np.exp(pi) - np.exp(mu)).mean(),
        "k1": -d.mean(),
        "k3": (ratio - 1 - d).mean(),
        "pearson": np.corrcoef(np.exp(mu), np.exp(pi))[0, 1],
        "spearman": np.corrcoef(pd.Series(mu).rank(), pd.Series(pi).rank())[0, 1],
        "ess_token": ratio.mean() ** 2 / (ratio**2).mean(),
        "ess_sequence": weights.mean() ** 2 / (weights**2).mean(),
        "mult_prob_error": np.exp(np.abs(d)).mean(),
        "ratio_outside_0.8_1.28": ((ratio < 0.8) | (ratio > 1.28)).mean(),
        "abs_d_p99": np.quantile(np.abs(d), 0.99),
    }
    metrics = json.loads((run_folder / "summary.json").read_text())["pairs"]["mismatch"]["metrics"]
    for key, value in expected.items():
        tolerance = 0.05 if "p99" in key else 2e-4  # a quantile comes from bins that are 3 % wide
        assert metrics[key]["value"] == pytest.approx(value, rel=tolerance, abs=1e-9), key


def test_hostile_token_text_is_escaped_everywhere(run_folder, report):
    vocabulary = pq.read_table(run_folder / "trace" / "vocab.parquet")
    hostile = pa.array([HOSTILE.encode()] * len(vocabulary), pa.binary())
    pq.write_table(
        vocabulary.set_column(1, "bytes", hostile), run_folder / "trace" / "vocab.parquet"
    )
    code, out, _ = report(str(run_folder), "--worst", "2", "--export", "csv")
    assert code == 0
    assert "[red]x[/red]" in out  # shown, not interpreted
    page = (run_folder / "report.html").read_text()
    for text in (out, page, (run_folder / "tokens.csv").read_text()):
        assert "\x1b" not in text and "\u202e" not in text
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.slow
def test_runs_with_other_seeds_are_pooled_and_others_refused(run_folder, tmp_path, report):
    for name, flags in {
        "seed": ["--seed", "1"],
        "hot": ["--seed", "2", "--temperature", "0.5"],
    }.items():
        assert run([*PROBE, *flags, "--output", str(tmp_path / name)]) == 0
    pooled = str(tmp_path / "pooled")
    code, _, err = report(
        str(run_folder), str(tmp_path / "seed"), "--output", pooled, "--worst", "20"
    )
    assert code == 0, err
    counts = [
        json.loads((folder / "summary.json").read_text())["pairs"]["mismatch"]["counts"]["tokens"]
        for folder in (run_folder, tmp_path / "seed", tmp_path / "pooled")
    ]
    assert counts[2] == counts[0] + counts[1]
    assert {
        row["trace"]
        for row in json.loads((tmp_path / "pooled" / "summary.json").read_text())["worst"]["abs_d"]
    } == {0, 1}
    # Its own report
    assert report(str(run_folder), str(tmp_path / "seed"), "--output", pooled)[0] == 0
    code, _, err = report(str(run_folder), str(tmp_path / "hot"), "--output", pooled)
    assert code == 1 and "differ in sampling settings" in err
    code, _, err = report(str(run_folder), str(run_folder), "--output", pooled, "--force")
    assert code == 1 and "would count twice" in err


@pytest.mark.slow
def test_a_damaged_shard_is_recorded_again_by_following_the_advice(run_folder, report):
    before = json.loads((run_folder / "summary.json").read_text())
    shard = run_folder / "trace" / "shard-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:5000])
    code, _, err = report(str(run_folder))
    assert code == 1 and "is damaged" in err and "--resume" in err
    shard.unlink()
    assert run(["probe", "--resume", "--quiet", "--output", str(run_folder)]) == 0
    assert json.loads((run_folder / "summary.json").read_text())["pairs"] == before["pairs"]


@pytest.mark.parametrize("logp", [0.5, np.nan])
def test_impossible_log_probs_in_a_trace_are_left_out_and_counted(run_folder, report, logp):
    path = run_folder / "trace" / "shard-00000.parquet"
    table = pq.read_table(path)
    rows = table.column("logp_rollout").to_pylist()
    rows[0][0] = logp
    index = table.column_names.index("logp_rollout")
    pq.write_table(
        table.set_column(index, "logp_rollout", pa.array(rows, pa.list_(pa.float32()))), path
    )
    before = json.loads((run_folder / "summary.json").read_text())["pairs"]["mismatch"]
    code, out, _ = report(str(run_folder))
    after = json.loads((run_folder / "summary.json").read_text())["pairs"]["mismatch"]
    assert code == 0 and "1 token has no valid log-probability on one side" in " ".join(out.split())
    assert after["counts"]["tokens"] == before["counts"]["tokens"] - 1
    assert after["metrics"]["abs_d_max"]["value"] <= before["metrics"]["abs_d_max"]["value"]


@pytest.mark.parametrize("width", [50, 80, 160])
def test_no_line_is_wider_than_the_terminal(run_folder, report, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = report(str(run_folder), "--worst", "3")
    # Commands are not wrapped
    read = [line for line in out.splitlines() if not line.startswith("mismatch-cli ")]
    assert max(map(len, read)) <= width
    assert "\x1b" not in out  # no colours in a file


def test_a_trace_or_a_missing_folder_beside_a_training_run_is_not_ignored(tmp_path, typed):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.5}\n')
    for other in (ROOT / "sample_data" / "traces" / "float32", tmp_path / "absent"):
        for named in ((run, other), (other, run)):
            code, _, error = typed("report", *map(str, named), "--no-plots")
            assert code == 2 and f"{other.name} is not a training run" in error


@pytest.mark.slow
def test_without_an_argument_the_latest_run_here_else_the_bundled_trace(
    run_folder, capfd, report, monkeypatch, tmp_path
):
    monkeypatch.chdir(run_folder.parent)
    code, own, _ = report()
    assert code == 0 and "fp8" not in own
    assert run(["report", "--as", "trl"]) == 0
    # It was not named
    assert f"reporting on {run_folder.name}, the latest run" in capfd.readouterr().err
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert run(["report"]) == 0
    bundled, talk = capfd.readouterr()
    assert "mismatch-cli report smollm2-training" in bundled  # no run here: the bundled trace
    assert re.search(r"Measuring: (\d+)/\1 responses", talk)


def test_the_version_is_printed(capfd):
    assert run(["--version"]) == 0
    assert re.fullmatch(r"mismatch-cli \d+\.\d+\.\d+\n", capfd.readouterr().out)


@pytest.mark.skipif(
    not (ROOT.parent / "shared" / "data" / "math_sanity_1460.jsonl").is_file(),
    reason="the 1,460 MATH problems are not part of the project",
)
def test_math_problems_run_as_they_are_and_zero_advantages_are_explained(tmp_path, capfd):
    math = ROOT.parent / "shared" / "data" / "math_sanity_1460.jsonl"
    flags = [
        "--prompts",
        str(math),
        "--num-prompts",
        "8",
        "--max-tokens",
        "16",
        "--output",
        str(tmp_path / "run"),
    ]
    assert run([*PROBE, *flags, "--full"]) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "Every group has equal rewards (none was solved)" in out


@pytest.mark.slow
def test_engine_flags_reach_vllm_and_the_manifest(tmp_path):
    if not get_cpu_capability().startswith("AVX512"):
        pytest.skip("vLLM's fp8 KV cache on a CPU needs AVX-512")
    flags = [
        "--kv-cache-dtype",
        "fp8",
        "--no-prefix-caching",
        "--max-model-len",
        "256",
        "--engine-arg",
        "max_num_seqs=32",
    ]
    command = [
        "probe",
        "--num-prompts",
        "24",
        "--quiet",
        *flags,
        "--seed",
        "7",
        "--output",
        str(tmp_path / "run"),
    ]
    assert run(command) == 0
    engine = json.loads((tmp_path / "run" / "trace" / "manifest.json").read_text())["rollout"]
    assert engine["kv_cache_dtype"].startswith("fp8")
    assert (engine["prefix_caching"], engine["max_model_len"], engine["max_num_seqs"]) == (
        False,
        256,
        32,
    )
    assert (engine["seed"], engine["enforce_eager"]) == (7, True)
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["pairs"]["mismatch"][
        "metrics"
    ]
    assert metrics["tv_binary_mean"]["value"] > 1e-3  # as strong a source of mismatch as expected
