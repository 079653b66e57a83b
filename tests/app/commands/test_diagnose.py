"""`diagnose` as users type it: the bundled trace, broken ones, an earlier checkpoint, mistakes."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.places import bundled
from mismatch_cli.diagnosis.diagnose import module, names
from tests.paths import DOCS
from tests.studies.compared import FLOAT32, Row, changed_trace, without_columns


@pytest.fixture
def diagnose(typed):
    return partial(typed, "diagnose", "--quiet")


@pytest.fixture
def trace(tmp_path) -> Path:
    return Path(shutil.copytree(FLOAT32, tmp_path / "run" / "trace"))


def change(trace: Path, column: str, to) -> None:
    """Without the second pass, which a faulty trainer would make faulty too."""

    def changed(row: Row) -> Row:
        values_T = to(np.array(row[column], dtype=np.float32))
        return without_columns(row, f"{column}_repeat") | {column: values_T.tolist()}

    shutil.rmtree(trace)
    changed_trace(trace, FLOAT32, changed)


def test_without_an_argument_the_bundled_trace(tmp_path, monkeypatch, diagnose):
    monkeypatch.chdir(tmp_path)
    code, out, err = diagnose()
    assert code == 0 and not err
    text = " ".join(out.split())
    assert "NO FAULT FOUND The gap of 0.0083 nats is within what an fp8 side makes" in text
    # Reported once, beside a part of the gap
    assert text.lower().count("fault") == 2 and "Rounded logits" in text
    assert "expected 0.00830 100 %" in text
    summary = json.loads((tmp_path / "diagnosis" / "summary.json").read_text())
    assert summary["first_cause"] is None and summary["faults"] == []
    assert sorted(f["check"] for f in summary["findings"]) == sorted(names())
    assert "figure-gap-by-step" in (tmp_path / "diagnosis" / "report.html").read_text("utf-8")


def test_a_shifted_trace(trace, diagnose):
    change(trace, "logp_rollout", lambda row: np.roll(row, 1))
    code, out, _ = diagnose(trace.parent, "--json")
    summary = json.loads(out)
    assert (
        code == 0
        and summary["first_cause"] == "index-shift"
        and summary["faults"] == ["index-shift"]
    )
    for _ in range(2):
        assert diagnose(trace.parent)[0] == 0  # its own folder is overwritten
    assert json.loads((trace.parent / "diagnosis" / "summary.json").read_text()) == summary
    page = (trace.parent / "diagnosis" / "report.html").read_text()
    assert "Shift that side by the reported lag" in page and "<script>alert" not in page


def test_a_shifted_dump_is_imported_again(tmp_path, monkeypatch, diagnose):
    """The parts of the gap agree with what the shift explains, and the screen says how to
    replace the trace.
    """
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, shift in (("good", 0), ("shifted", 1)):
        rows = []
        for prompt in range(40):
            logq_T = -0.1 - rng.exponential(0.5, 40)
            logp_T = np.roll(np.minimum(logq_T + rng.normal(0, 0.02, 40), -1e-3), -shift)
            ids = {
                "prompt_ids": [1, prompt],
                "response_ids": rng.integers(5, 999, 40).tolist(),
                "prompt_id": prompt,
            }
            rows.append(
                json.dumps(ids | {"logp_rollout": logq_T.tolist(), "logp_trainer": logp_T.tolist()})
            )
        Path(f"{name}.jsonl").write_text("\n".join(rows))
        assert run(["import", f"{name}.jsonl", "--output", name, "--quiet"]) == 0
        _, out, _ = diagnose(name)
        assert ("mismatch-cli import DUMP --output shifted --force" in out) == bool(shift)
        assert ("once DUMP is corrected" in out) == bool(shift)
    summary = json.loads(Path("shifted/diagnosis/summary.json").read_text())
    (shifted,) = (finding for finding in summary["findings"] if finding["status"] == "found")
    assert shifted["check"] == "index-shift" and summary["shares"]["explained"] == pytest.approx(
        shifted["explains"]
    )
    assert summary["unexplained"]["nats"] == pytest.approx(0.02 * np.sqrt(2 / np.pi), rel=0.1)


def test_impossible_values_are_counted_as_they_are_recorded(trace, diagnose):
    change(
        trace,
        "logp_trainer",
        lambda row: np.where(np.arange(len(row)) == 3, np.float32(0.125), row),
    )
    _, out, _ = diagnose(trace.parent, "--json")
    finding = next(f for f in json.loads(out)["findings"] if f["check"] == "values")
    assert {"label": "logp_trainer: above 0", "value": 96} in finding["evidence"]
    assert {"label": "logp_trainer: largest, nats", "value": 0.125} in finding["evidence"]


def test_an_earlier_checkpoint(trace, diagnose):
    change(
        trace, "logp_trainer", lambda row: np.minimum(row - 0.2 * np.sin(np.arange(len(row))), 0)
    )
    code, out, _ = diagnose(trace.parent, "--earlier-model", bundled("model"), "--json")
    finding = next(f for f in json.loads(out)["findings"] if f["check"] == "stale-weights")
    assert code == 0 and finding["status"] == "found" and finding["effect"] < 0.01


def test_an_unexplained_gap_is_reported_with_suspects_and_what_to_type(trace, diagnose):
    # The same wherever the value is the same: a trainer that repeats itself
    noise_H = np.random.default_rng(0).normal(0, 0.1, 997)

    def noisy(row):
        return np.minimum(row + noise_H[row.view(np.uint32) % len(noise_H)], 0)

    change(trace, "logp_trainer", noisy)
    shard = trace / "shard-00000.parquet"
    pq.write_table(
        pq.read_table(shard).drop_columns(["topk_ids", "topk_logp_rollout", "topk_logp_trainer"]),
        shard,
    )
    code, out, _ = diagnose(trace.parent)
    text = " ".join(out.split())
    assert code == 0 and "--earlier-model MODEL" in text
    assert re.search(r"NOT EXPLAINED 0\.\d+ nats per token are left on average", text)
    assert "where 1e-07 to 0.0008 are expected of float32 against float32" in text
    assert "NO FAULT FOUND" not in text
    summary = json.loads((trace.parent / "diagnosis" / "summary.json").read_text())
    assert summary["first_cause"] is None and summary["faults"] == ["unexplained-gap"]
    assert summary["unexplained"]["nats"] > 0.03 and summary["unexplained"][
        "share"
    ] == pytest.approx(1.0)
    assert "stale-weights" in [suspect["check"] for suspect in summary["suspects"]]


def test_what_was_not_tested_is_not_asserted(tmp_path, diagnose):
    _, out, _ = diagnose(bundled("traces") / "fp8-kv", "--output", tmp_path / "out")
    text = " ".join(out.split())
    assert "NO FAULT FOUND" in text and "same weights" not in text
    assert "--earlier-model MODEL allows 1 more" in text
    everything = diagnose(bundled("traces") / "fp8-kv", "--output", tmp_path / "out", "--full")[1]
    assert "NO FAULT FOUND" in everything and "not tested" in everything
    assert "--earlier-model MODEL allows 1 more" in " ".join(everything.split())
    assert (
        everything.splitlines()[-1].startswith("mismatch-cli compare")
        and "--full" not in everything
    )


def test_the_fp8_cache_is_suspected_first_with_the_line_that_tests_it(
    tmp_path, monkeypatch, diagnose
):
    monkeypatch.chdir(tmp_path)
    _, out, _ = diagnose()
    text = " ".join(out.split())
    assert "First suspect: rollout.kv_cache_dtype = fp8" in text
    assert out.splitlines()[-2:] == [
        "mismatch-cli probe --like fp8-kv --kv-cache-dtype auto --output kv-auto",
        "mismatch-cli compare fp8-kv kv-auto",
    ]
    assert len(out.splitlines()) <= 40
    summary = json.loads((tmp_path / "diagnosis" / "summary.json").read_text())
    first = summary["suspects"][0]
    assert (first["setting"], first["value"], first["check"]) == (
        "rollout.kv_cache_dtype",
        "fp8",
        None,
    )
    assert first["test"] == out.splitlines()[-2:] and "NeMo-RL" in first["source"]
    assert summary["faults"] == []
    assert summary["shares"] == {"explained": 0.0, "expected": 1.0, "unexplained": 0.0}
    assert "rollout.kv_cache_dtype" in (tmp_path / "diagnosis" / "report.html").read_text()


def test_a_cause_that_explains_little_is_not_the_first_advice(tmp_path, diagnose):
    """The trainer's log-probabilities are stored in bfloat16: true, but not the cause of an fp8
    cache's gap.
    """
    trace = Path(shutil.copytree(bundled("traces") / "fp8-kv", tmp_path / "run" / "trace"))
    for shard in sorted(trace.glob("shard-*.parquet")):
        table = pq.read_table(shard)
        for name in ("logp_trainer", "logp_recomputed"):
            rows = [np.array(row, dtype=np.float32) for row in table.column(name).to_pylist()]
            rounded = [
                (row.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for row in rows
            ]
            table = table.set_column(
                table.column_names.index(name), name, pa.array(rounded, pa.list_(pa.float32()))
            )
        pq.write_table(table, shard)
    _, out, _ = diagnose(trace.parent)
    text = " ".join(out.split())
    summary = json.loads((trace.parent / "diagnosis" / "summary.json").read_text())
    (head,) = [finding for finding in summary["findings"] if finding["check"] == "lm-head"]
    assert head["status"] == "found" and (head["explains"] or 0) < 0.5
    assert text.index("First suspect: rollout.kv_cache_dtype") < text.index(
        "Precision of the LM head explains"
    )


def test_a_fault_is_reported_before_suspects(tmp_path, diagnose):
    trace = Path(shutil.copytree(bundled("traces") / "fp8-kv", tmp_path / "run" / "trace"))
    for shard in sorted(trace.glob("shard-*.parquet")):
        table = pq.read_table(shard)
        rows = [row[-1:] + row[:-1] for row in table.column("logp_rollout").to_pylist()]
        index = table.column_names.index("logp_rollout")
        pq.write_table(
            table.set_column(index, "logp_rollout", pa.array(rows, pa.list_(pa.float32()))), shard
        )
    _, out, _ = diagnose(trace.parent)
    summary = json.loads((trace.parent / "diagnosis" / "summary.json").read_text())
    assert "1 FAULT FOUND" in out and "First suspect" not in out
    assert "Change that, record or import again, and diagnose again" in " ".join(out.split())
    assert "suspects" not in out and "mismatch-cli probe" not in out
    assert "Suspects" in (trace.parent / "diagnosis" / "report.html").read_text()
    assert (
        summary["shares"]["explained"] > 0.9
        and summary["suspects"][0]["setting"] == "rollout.kv_cache_dtype"
    )


def test_a_trace_without_a_trainer_says_what_to_type(trace, diagnose):
    path = trace / "shard-00000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns([n for n in table.column_names if "trainer" in n]), path)
    code, _, err = diagnose(trace.parent)
    assert code == 1 and "mismatch-cli rescore" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["gone"], 1, "gone does not exist"),
        (["--earlier-model", "/no/such/model"], 1, "There is no model folder /no/such/model"),
        (["--no-such"], 2, "No such option"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, diagnose, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    got, _, err = diagnose(*arguments)
    assert got == code and message in " ".join(err.split())


def test_a_foreign_folder_is_not_overwritten(trace, tmp_path, diagnose):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("…")
    code, _, err = diagnose(trace.parent, "--output", tmp_path / "mine")
    assert (
        code == 1
        and "--force" in err
        and list((tmp_path / "mine").iterdir()) == [tmp_path / "mine" / "thesis.tex"]
    )


@pytest.mark.parametrize("width", [50, 80])
def test_no_line_is_wider_than_the_terminal(trace, diagnose, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    change(trace, "logp_rollout", lambda row: np.roll(row, 1))
    _, out, _ = diagnose(trace.parent)
    wide = [line for line in out.splitlines() if len(line) > width]
    assert all(line.startswith("mismatch-cli ") for line in wide), (
        "what is to be pasted alone stays whole"
    )


def test_the_page_lists_all_checks_with_their_stages():
    page = (DOCS / "findings.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\|.* \| `([a-z-]+)` \| (\d) \|", page, re.M)
    assert sorted(listed) == sorted((name, str(module(name).STAGE)) for name in names())


def test_the_page_of_the_json_lists_all_keys(trace, diagnose):
    _, out, _ = diagnose(trace.parent, "--json")
    summary = json.loads(out)
    _, out, _ = diagnose("fp8-kv", "--json", "--output", trace.parent / "fp8-kv")
    page = (DOCS / "json" / "diagnose.md").read_text(encoding="utf-8")
    for key in [*summary, *summary["findings"][0], *json.loads(out)["suspects"][0]]:
        assert f"`{key}`" in page, key


def test_ctrl_c_while_the_model_reads_prints_what_is_known(trace, monkeypatch, tmp_path, capfd):
    from mismatch_cli.models.scoring.trainer import Trainer

    score, calls = Trainer.score, []

    def interrupted(self, requests, **how):
        calls.append(len(requests))
        if len(calls) > 3:
            raise KeyboardInterrupt
        return score(self, requests, **how)

    monkeypatch.setattr(Trainer, "score", interrupted)
    model = ("--trainer-model", bundled("model"))
    capfd.readouterr()
    code = run(["diagnose", str(trace.parent), *map(str, model), "--output", str(tmp_path / "d")])
    out, err = capfd.readouterr()
    assert code == 130 and len(calls) == 4
    assert "Interrupted: this is what the readings so far show." in err
    assert "NO FAULT FOUND" in out and not (tmp_path / "d" / "report.html").exists()


def test_the_model_may_be_the_folder_of_an_adapter(trace, tmp_path, diagnose):
    from tests.lora import save_adapter

    adapter = save_adapter(str(bundled("model")), tmp_path / "adapter", size=0.01)
    code, out, _ = diagnose(trace.parent, "--trainer-model", adapter, "--json")
    (finding,) = (f for f in json.loads(out)["findings"] if f["check"] == "adapter-scale")
    # Neither side had it
    assert code == 0 and finding["status"] == "untested"
    assert "from either side: name the trainer's" in finding["reason"]
