"""A run as an object: the numbers of the commands bit for bit, consistent frames, mistakes in
one sentence.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mismatch_cli
from mismatch_cli.app.cli import run as type_line
from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.places import bundled
from mismatch_cli.library import results
from tests.metrics.clipping.world import world
from tests.pictures import leave_blank
from tests.studies.written import write_trace

FP8, FLOAT32 = bundled("traces") / "fp8-kv", bundled("traces") / "float32"
MASK = "dppo-binary-tv:delta=0.1"
HOSTILE = "<script>alert(1)</script>\x1b[31m"


@pytest.fixture(scope="module")
def run():
    return mismatch_cli.open(FP8)


@pytest.fixture(scope="module")
def clipping(run):
    return run.clip("grpo-clip-higher", MASK)


def public(thing) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_what_is_public():
    assert mismatch_cli.__all__ == [
        "Decision",
        "MismatchError",
        "Recorder",
        "Run",
        "UsageError",
        "__version__",
        "open",
    ]
    assert all(getattr(mismatch_cli, name) for name in mismatch_cli.__all__)
    assert public(mismatch_cli.Run) == {
        "clip",
        "compare",
        "diagnose",
        "gate",
        "manifest",
        "metrics",
        "paths",
        "plot",
        "report",
        "token_frames",
        "tokens",
    }
    shared = {"plot", "plots", "save", "to_json"}
    own = {
        "Report": {"metrics"}, "Clipping": {"blocked", "shares", "skipped"},
        "Diagnosis": {"faults"},
        "Comparison": {"metrics"}, "Gate": {"checks", "passed"},
    }  # fmt: skip
    assert {kind.__name__: public(kind) - shared for kind in results.Result.__subclasses__()} == own
    assert public(results.Result) == shared


def test_importing_the_package_loads_nothing():
    script = (
        "import sys; before = set(sys.modules); import mismatch_cli; "
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert (
        done.stdout.strip()
        == "['__future__', 'mismatch_cli', 'mismatch_cli.base', 'mismatch_cli.base.lazy']"
    )


def test_an_unknown_name_is_not_an_attribute():
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        _ = mismatch_cli.opne


def test_numbers_are_those_of_the_commands(run, clipping, capfd):
    results = {
        f"report {FP8}": run.report(),
        f"clipstats {FP8} -a grpo-clip-higher -a {MASK}": clipping,
        f"clipstats {FP8} -a {MASK} --compare ppo {MASK} --theory": run.clip(
            MASK, compare=("ppo", MASK), theory=True
        ),
        f"diagnose {FP8}": run.diagnose(),
        f"compare {FP8} {FLOAT32}": run.compare(FLOAT32),
        f"gate {FP8} --limits verl --baseline {FLOAT32}": run.gate("verl", baseline=FLOAT32),
    }
    for line, result in results.items():
        capfd.readouterr()
        assert type_line([*line.split(), "--json", "-q"]) in (0, 3), line
        assert result.to_json() == json.loads(capfd.readouterr().out), line


def test_no_frame_mixes_numbers_with_words(run, clipping):
    frames = {
        "metrics": run.metrics,
        "shares": clipping.shares,
        "compared": run.compare(FLOAT32).metrics,
        "checks": run.gate("verl", baseline=FLOAT32).checks,
    }
    for name, frame in frames.items():
        for column in frame:
            kinds = {type(value) for value in frame[column].dropna()}
            assert len(kinds) <= 1, (name, column, kinds)


def test_times_noise_is_a_number_as_far_as_the_page_gives_one(run):
    times = run.metrics.loc["mismatch", "times_noise"]
    assert times["abs_d_mean"] == pytest.approx(104, rel=0.01)
    # The page says "noise ≈ 0", "> 1,000 ×", and nothing for a signed metric
    assert times["abs_d_p50"] == times["abs_d_p95"] == math.inf and math.isnan(times["d_mean"])


def test_tokens_agree_with_the_metrics_of_the_run(run):
    tokens, metrics = run.tokens, run.metrics.loc["mismatch"]
    counted = tokens["loss_mask"] & tokens["d_mismatch"].notna()
    assert tokens["d_mismatch"].abs()[counted].mean() == pytest.approx(
        metrics.loc["abs_d_mean", "value"], rel=1e-5
    )
    assert tokens["tv_binary_mismatch"].mean() == pytest.approx(
        metrics.loc["tv_binary_mean", "value"], rel=1e-5
    )
    assert (
        metrics.loc["abs_d_mean", "low"]
        < metrics.loc["abs_d_mean", "value"]
        < metrics.loc["abs_d_mean", "high"]
    )
    assert metrics.loc["abs_d_mean", "unit"] == "nats" and set(run.metrics.index.levels[0]) == {
        "mismatch",
        "staleness",
        "total",
    }
    assert tokens["token"].iloc[0] == "Beginning" and isinstance(
        tokens["token"].dtype, pd.CategoricalDtype
    )


def test_blocked_rows_are_rows_of_the_tokens(run, clipping):
    assert clipping.blocked.index.equals(run.tokens.index)
    pd.testing.assert_series_equal(
        clipping.blocked["grpo-clip-higher"],
        run.tokens["blocked_grpo-clip-higher"],
        check_names=False,
    )
    blocked, share = clipping.blocked[MASK], clipping.shares.loc[MASK, "blocked_all"]
    assert blocked.mean() == share == clipping.to_json()["algorithms"][1]["blocked"]["all"]["value"]
    judged = run.tokens["tv_binary"][blocked.fillna(False)]
    assert len(judged) and (judged > 0.1).all()


def test_blocked_rows_are_the_shares_of_every_algorithm():
    """Also of masks that look at whole batches, which several row groups share."""
    clipping = mismatch_cli.open().clip()
    shares = clipping.shares["blocked_all"]
    assert {"m2po", "clip-cov", "top-entropy"} <= set(shares.index)
    for name, blocked in clipping.blocked.items():
        assert blocked.mean() == shares[name], name


def test_frames_one_after_the_other_are_all_tokens(run):
    frames = list(run.token_frames())
    assert len(frames) == 6
    together = pd.concat(frames, ignore_index=True)
    # Each has its own categories
    together["token"] = together["token"].astype(run.tokens["token"].dtype)
    pd.testing.assert_frame_equal(together, run.tokens)


def test_tokens_are_those_that_report_exports(run, tmp_path):
    assert (
        type_line(
            ["report", str(FP8), "--export", "parquet", "--json", "-q", "-o", str(tmp_path / "out")]
        )
        == 0
    )
    exported = results.frame_of([pq.read_table(tmp_path / "out" / "tokens.parquet")])
    exported["token"] = exported["token"].astype(run.tokens["token"].dtype)
    pd.testing.assert_frame_equal(exported, run.tokens)


def test_parameters_and_mask_files_are_those_of_the_command_line(run, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from mismatch_cli import Decision\n\n\n"
        "def trust_region(compared, advantage_T, *, limit: float = 1.5):\n"
        "    return Decision(compared.ratio_T <= limit, compared.ratio_less_1_T)\n"
    )
    same = run.clip(
        "dppo-binary-tv", delta=0.1, compare=("dppo-binary-tv:delta=0.1", "grpo-clip-higher")
    )
    assert list(same.shares.index) == [MASK, "grpo-clip-higher"]
    own = run.clip(str(tmp_path / "mine.py"), limit=2)
    assert own.blocked.columns.tolist() == ["mine:limit=2"]
    assert (run.tokens["ratio"][own.blocked["mine:limit=2"].fillna(False)] > 2).all()


def test_limits_as_a_mapping_and_as_a_file(run, tmp_path):
    (tmp_path / "limits.toml").write_text("[limits.k3]\nmax = 1e-9\n")
    assert run.gate({"k3": {"max": 0.01}}).passed
    failed = run.gate(tmp_path / "limits.toml", {"k3": {"max": 0.01}})
    assert not failed.passed and failed.checks["holds"].tolist() == [False, True]
    assert "FAILED" in repr(failed)


def test_diagnosis_and_comparison_as_frames_and_words(run):
    assert run.diagnose().faults == []
    metrics = run.compare(mismatch_cli.open(FLOAT32)).metrics.loc["float32"]
    row = metrics.loc["abs_d_mean"]
    assert (
        row["other"] - row["first"] == row["difference"]
        and row["difference_low"] < row["difference_high"] < 0
    )


def test_mistakes_are_one_sentence(run, tmp_path):
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained/metrics.jsonl").write_text('{"step": 1}\n')
    pooled = mismatch_cli.open(
        [
            write_trace(tmp_path / name / "trace", world(seed, 6), seed=seed).folder
            for seed, name in enumerate("ab")
        ]
    )
    assert len(pooled.paths) == 2 and pooled.tokens["trace"].unique().tolist() == [0, 1]
    wrong = {
        "nowhere does not exist": lambda: mismatch_cli.open("nowhere"),
        "is a training run": lambda: mismatch_cli.open(tmp_path / "trained"),
        "Did you mean dppo-binary-tv": lambda: run.clip("dpo-binary-tv"),
        "has no parameter 'delt'. Did you mean delta, delta_low or delta_high?": lambda: run.clip(
            "dppo-binary-tv", delt=1
        ),
        "Parameters belong to one algorithm": lambda: run.clip("ppo", "minirl", delta=1),
        "Did you mean mask-regions": lambda: run.plot("mask-region"),
        "run.compare.'OTHER'..plot.'metric-factors'": lambda: run.plot("metric-factors"),
        "diagnosis has no plot 'mask-regions'": lambda: run.diagnose().plot("mask-regions"),
        "nothing to draw for gap-by-step": lambda: mismatch_cli.open(FLOAT32).plot("gap-by-step"),
        "Did you mean prime-rl": lambda: run.gate("prime"),
        "Add --baseline": lambda: run.gate({"k3": {"max_times_baseline": 2}}),
        "compare needs two runs": lambda: run.compare(),
        "7 traces are too many": lambda: run.compare(*[FLOAT32] * 6),
        "pools traces": lambda: run.compare(pooled),
        "repeats the seed": lambda: mismatch_cli.open([FP8, FP8]),
    }
    for said, call in wrong.items():
        with pytest.raises(MismatchError, match=said):
            call()


def test_a_large_run_is_warned_about_before_it_is_read(run, monkeypatch):
    from mismatch_cli.library import opened_run

    monkeypatch.setattr(opened_run, "_LARGE", 1000)
    with pytest.warns(
        UserWarning, match=r"9,720 tokens take about .* GB as one frame.*token_frames"
    ):
        _ = mismatch_cli.open(FP8).tokens


def test_a_run_that_lacks_a_shard_is_warned_about(tmp_path):
    shutil.copytree(FP8, tmp_path / "lost")
    (tmp_path / "lost/shard-00002.parquet").unlink()
    with pytest.warns(UserWarning, match="lost is partial: 5 of 6 shards exist"):
        lost = mismatch_cli.open(tmp_path / "lost")
    assert not lost.gate("verl").passed and lost.gate("verl", allow_partial=True).passed


def test_everything_shows_itself_as_html_and_as_text(run, clipping):
    shown = (run, clipping, run.diagnose(), run.compare(FLOAT32), run.gate("verl"))
    for result in shown:
        page = result._repr_html_()
        assert page.lstrip().startswith('<div class="mismatch-cli">') and len(page) < 10_000
        assert page.index('class="verdict') < page.index("<table")
        assert "prefers-color-scheme" not in page and "<script" not in page
        assert len(repr(result)) < 400 and "\n" not in repr(result)
    assert not [result for result in shown if "Hidden at" in str(result)]  # without a terminal
    assert "mismatch-cli clipstats" in str(clipping) and "\x1b" not in str(clipping)
    assert repr(run).startswith("<Run fp8-kv: 192 responses")


def test_token_text_is_escaped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # with a long path in its commands, a screen has no room for tokens
    shutil.copytree(FP8, tmp_path / "hostile")
    vocabulary = pq.read_table(tmp_path / "hostile/vocab.parquet")
    texts = pa.array([HOSTILE.encode()] * len(vocabulary), pa.binary())
    pq.write_table(vocabulary.set_column(1, "bytes", texts), tmp_path / "hostile/vocab.parquet")
    run = mismatch_cli.open("hostile")
    page = run._repr_html_()
    assert "<script" not in page and "&lt;script&gt;" in page and "\x1b" not in page
    assert "\x1b" not in run.tokens["token"].iloc[0]
    assert next(run.token_frames())["token"].nunique() == 1  # one text for many ids, like \ufffd


def test_a_run_without_scores_is_shown_with_what_to_do(tmp_path):
    absent = (
        "logp_trainer",
        "logp_recomputed",
        "topk_logp_trainer",
        "topk_logp_recomputed",
        "advantage",
    )
    run = mismatch_cli.open(
        write_trace(tmp_path / "<b>" / "trace", world(0, 6), without=absent).folder
    )
    shown = run._repr_html_()
    assert "&lt;b&gt;" in shown and "no tokens with log-probabilities of both sides" in shown
    assert np.isfinite(run.tokens["logp_rollout"]).any()


def test_a_figure_is_matplotlibs_and_shows_itself(run):
    figure = run.plot("ratio-and-tv")
    begin, _, content = figure._repr_html_().partition(";base64,")
    assert figure.axes and begin == '<img src="data:image/svg+xml'
    assert b"rollout probability" in b64decode(content.partition('"')[0])  # text as text
    assert {"ratio-and-tv", "volatility"} <= set(run.report().plots)


def test_a_result_is_saved_as_the_command_does(clipping, tmp_path, monkeypatch):
    leave_blank(monkeypatch)
    assert clipping.save(tmp_path / "saved") == tmp_path / "saved/report.html"
    assert json.loads((tmp_path / "saved/summary.json").read_text()) == clipping.to_json()
    names = {path.name for path in (tmp_path / "saved").iterdir() if path.is_file()}
    assert {"report.html", "summary.json"} <= names
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.txt").write_text("")
    with pytest.raises(MismatchError, match="holds other files"):
        clipping.save(tmp_path / "other")


def test_a_usage_error_is_a_mismatch_error():
    assert (
        issubclass(mismatch_cli.UsageError, mismatch_cli.MismatchError)
        and mismatch_cli.UsageError is UsageError
    )
    assert isinstance(Path(mismatch_cli.open().paths[0]), Path)
