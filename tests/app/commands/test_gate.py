"""`gate` from the command line: exit codes, files for CI, and nothing written where it should
not be.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.limits.limit_sets import load_limits, presets
from tests.paths import DOCS
from tests.studies.compared import Row, changed_trace

FP8, FLOAT32 = str(bundled("traces") / "fp8-kv"), str(bundled("traces") / "float32")
HOSTILE = 'a | b <c> & "d" `e` \x1b[2J [x](y) *z*'


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.fixture
def gate(typed):
    return partial(typed, "gate")


@pytest.fixture
def limits(tmp_path) -> str:
    """One limit that the bundled training run meets, one that it exceeds, one that cannot be
    measured.
    """
    return write(
        tmp_path / "limits.toml",
        "[limits.k3]\n"
        "max = 0.01\n"
        "[limits.tv_binary_mean]\n"
        "max = 0.001\n"
        f"source = {json.dumps(HOSTILE)}\n"
        "[limits.pearson]\n"
        "max_below_baseline = 1\n"
        "pair = 'staleness'\n",
    )


def test_exit_codes_and_the_last_line(gate, tmp_path):
    limits_file = write(tmp_path / "kept.toml", "[limits.k3]\nmax = 0.01\n")
    broken = write(tmp_path / "broken.toml", "[limits.k3]\nmax = 1e-9\n")
    code, out, err = gate(FP8, "--limits", limits_file)
    assert code == 0 and out.splitlines()[-1] == "✔ PASSED  The limit holds."
    code, out, err = gate(FP8, "--limits", limits_file, "--limits", broken, "--quiet")
    assert code == 3 and err == ""
    assert "✘ FAILED  1 of 2 limits does not hold: k3 (mismatch) ≤ 1e−09." in " ".join(
        out.splitlines()
    )
    assert "0.000756307 is above 1e-09" in gate(FP8, "--limits", broken, "--full")[1]


def test_one_limit_needs_no_count(gate, tmp_path):
    broken = write(tmp_path / "broken.toml", "[limits.k3]\nmax = 1e-9\n")
    assert "The limit does not hold: k3 (mismatch) ≤ 1e−09." in " ".join(
        gate(FP8, "--limits", broken)[1].split()
    )


@pytest.mark.parametrize("width", [80, 160])
def test_a_metric_that_two_sets_limit_names_them(gate, tmp_path, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    mine = write(
        tmp_path / "mine.toml", "[limits.tv_binary_mean]\nmax = 0.1\n[limits.k3]\nmax = 0.1\n"
    )
    text = " ".join(gate(FP8, "--limits", mine, "--limits", "verl")[1].split())
    assert (
        "tv_binary_mean (mismatch), mine.toml" in text and "tv_binary_mean (mismatch), verl" in text
    )
    assert "k3 (mismatch) " in text
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other" / "mine.toml", "[limits.k3]\nmax = 0.2\n")
    view = gate(FP8, "--limits", mine, "--limits", other)[1]
    assert (
        len(set(re.findall(r"\(mismatch\), (\S+)", view))) == 2 if width == 160 else "other" in view
    )


def test_a_baseline_that_no_limit_uses_is_named(gate, tmp_path):
    limits_file = write(tmp_path / "kept.toml", "[limits.k3]\nmax = 0.01\n")
    words = "No limit refers to the baseline"
    assert words in gate(FP8, "--limits", limits_file, "--baseline", FLOAT32)[1]
    limits_file = write(tmp_path / "relative.toml", "[limits.k3]\nmax_above_baseline = 1\n")
    assert words not in gate(FP8, "--limits", limits_file, "--baseline", FLOAT32)[1]


def test_without_arguments_the_bundled_trace_by_the_default(gate):
    """Its k3 is just below prime-rl's limit, which the interval contains: the value decides."""
    code, out, err = gate()
    assert code == 0 and "k3 (total)" in out and "? undecided, passes" in out
    assert "The limit holds, but is undecided: the interval contains it." in " ".join(out.split())
    assert "judging fp8-kv" in err and "using those of prime-rl" in err
    assert gate(FLOAT32)[0] == 0


def test_every_preset_runs_and_the_control_keeps_them_all(gate):
    """But for a limit on models of another kind, which cannot be judged."""
    names = [name for name in presets() if name != "miles-moe"]
    code, out, _ = gate(FLOAT32, *[flag for name in names for flag in ("--limits", name)])
    total = sum(len(load_limits(name).limits) for name in names)
    assert code == 0 and f"{total} of {total} limits hold" in out
    code, out, _ = gate(FLOAT32, "--limits", "miles-moe", "--json")
    (check,) = json.loads(out)["checks"]
    assert (code, check["status"]) == (3, "unjudged")
    assert check["reason"].startswith("the limit is for mixtures of experts")


def test_an_undecided_limit_says_what_decided(gate, tmp_path):
    """The whole interval decides nothing: the value does, unless the file asks for certainty."""
    for bound, decide, code, words in (
        (0.0148, "value", 3, "? undecided, FAILS"),
        (0.0148, "surely", 0, "? undecided, passes"),
        (0.0150, "value", 0, "? undecided, passes"),
    ):
        limits = write(
            tmp_path / "limits.toml",
            f"decide = '{decide}'\n[limits.k3]\nmax = {bound}\npair = 'total'\n",
        )
        got, out, _ = gate(FP8, "--limits", limits)
        assert (got, words in out) == (code, True), out
        (check,) = json.loads(gate(FP8, "--limits", limits, "--json")[1])["checks"]
        assert (check["status"], check["holds"]) == ("undecided", not code)
        assert "undecided: 0.00963 to 0.0318" in check["reason"]
        assert check["power"] == pytest.approx(check["high"] - check["value"])
        junit = tmp_path / "gate.xml"
        gate(FP8, "--limits", limits, "--junit", str(junit), "--force")
        assert ("<failure" in junit.read_text()) == bool(code)


def test_json_says_everything(gate, limits):
    code, out, _ = gate(FP8, "--limits", limits, "--baseline", FLOAT32, "--json")
    result = json.loads(out)
    assert code == 3
    assert (result["format"], result["version"], result["passed"]) == (
        "mismatch-cli gate",
        1,
        False,
    )
    k3, tv, pearson = result["checks"]
    assert k3["holds"] and k3["value"] < k3["allowed"] == 0.01
    assert tv["allowed"] < tv["low"] < tv["value"] < tv["high"]
    assert not tv["holds"] and tv["source"] == HOSTILE and "is above 0.001" in tv["reason"]
    assert not pearson["holds"] and "no staleness pair was measured" in pearson["reason"]
    documented = set(
        re.findall(r"`(\w+)`", (DOCS / "json" / "gate.md").read_text(encoding="utf-8"))
    )
    assert result.keys() | k3.keys() <= documented


def test_junit_is_what_ci_reads(gate, limits, tmp_path):
    path = tmp_path / "gate.xml"
    assert (
        gate(
            FP8,
            "--limits",
            limits,
            "--limits",
            "nemo-rl",
            "--baseline",
            FLOAT32,
            "--junit",
            str(path),
        )[0]
        == 3
    )
    root = ElementTree.parse(path).getroot()
    assert root.tag == "testsuites" and (root.get("tests"), root.get("failures")) == ("5", "1")
    mine, published = root.findall("testsuite")
    assert (mine.get("name"), mine.get("tests"), mine.get("failures")) == (limits, "3", "1")
    assert mine.get("errors") == "1"
    assert (published.get("name"), published.get("failures")) == ("nemo-rl", "0")
    names = [case.get("name") for case in root.iter("testcase")]
    assert names[:2] == ["k3 ≤ 0.01", "tv_binary_mean ≤ 0.001"] and len(set(names)) == 5
    holds, exceeded, unjudged = mine.findall("testcase")
    assert holds.find("failure") is holds.find("error") is None
    failure, error = exceeded.find("failure"), unjudged.find("error")
    assert (failure.get("type"), error.get("type")) == ("LimitExceeded", "NotMeasured")
    assert "0.001" in failure.get("message")
    assert 'a | b <c> & "d"' in failure.text and "\x1b" not in path.read_text()


def test_markdown_is_one_table_whatever_it_contains(gate, limits, tmp_path):
    path = tmp_path / "gate.md"
    gate(FP8, "--limits", limits, "--baseline", FLOAT32, "--markdown", str(path))
    text = path.read_text()
    limits_table, *_ = text.split("**Limits that do not hold")
    rows = [line for line in limits_table.splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]
    assert len(rows) == 5 and {len(row) for row in cells} == {6}
    assert [row[4].strip() for row in cells[2:]] == ["✘ EXCEEDED", "? not judged", "✔ holds"]
    assert r"a \| b \<c\> \& " in text and r"\`e\`" in text and r"\[x\](y) \*z\*" in text
    assert "\x1b" not in text and text.startswith(
        "### ❌ Does the gap stay within its limits? Failed\n\n1 of 3 limits does not hold: tv"
    )


def test_annotations_are_lines_of_which_ten_are_shown(gate, tmp_path):
    path, many = (
        tmp_path / "lines",
        "".join(f"[[limits.k3]]\nmax = {n + 1}e-9\n" for n in range(12)),
    )
    limits = write(tmp_path / "limits.toml", many + "[limits.tv_binary_mean]\nmax = 1\n")
    assert gate(FP8, "--limits", limits, "--annotations", str(path))[0] == 3
    lines = path.read_text().splitlines()
    assert len(lines) == 10 and all(
        line.startswith("::error title=mismatch-cli gate::") for line in lines
    )
    assert lines[0].endswith("k3 (mismatch) ≤ 1e−09: 0.000756307 is above 1e-09")
    assert lines[-1].endswith("::3 more limits failed: see the summary.")
    assert (
        gate(FLOAT32, "--limits", "slime", "--annotations", str(path), "--force")[0] == 0
        and path.read_text() == ""
    )
    partial = Path(shutil.copytree(FP8, tmp_path / "100%0A\n::error::b"))
    sorted(partial.glob("shard-*.parquet"))[-1].unlink()
    assert gate(str(partial), "--limits", "slime", "--annotations", str(path), "--force")[0] == 3
    (line,) = path.read_text().splitlines()
    assert line.startswith("::error title=mismatch-cli gate::…/100%250A⏎::error::b: ")


def test_limits_of_a_good_run_are_read_by_the_next_gate(gate, tmp_path):
    path, bfloat16 = tmp_path / "limits.toml", str(bundled("traces") / "bfloat16")
    code, out, err = gate(bfloat16, "--init", str(path))
    assert (
        code == 0
        and "Wrote " in err
        and out.splitlines()[-1] == f"Use: mismatch-cli gate RUN --limits {path}"
    )
    text = path.read_text()
    assert "13,211 tokens in 256 responses to 128 prompts" in text and "v + 3 · (e − v)" in text
    assert "#   ratio_outside_0.8_1.28: the same for all prompts: no interval" in text
    assert (
        gate(bfloat16, "--limits", str(path))[0] == 0 and gate(FP8, "--limits", str(path))[0] == 3
    )
    before, (code, _, err) = text, gate(FLOAT32, "--init", str(path))
    assert (
        code == 1
        and "already exists. Replace it with --force" in err
        and path.read_text() == before
    )
    code, out, _ = gate(FLOAT32, bfloat16, "--init", str(path), "--force", "--json")
    (result,) = json.loads(out)
    assert code == 0 and {limit["source"].partition(" in ")[2] for limit in result["limits"]} == {
        shown_as(bfloat16)
    }


def shown_as(trace: str) -> str:
    return (
        f"…/{Path(trace).name}"
        if not Path(trace).is_relative_to(Path.cwd())
        else str(Path(trace).relative_to(Path.cwd()))
    )


def test_a_run_that_is_named_twice_is_one_good_run(gate, tmp_path):
    path = tmp_path / "limits.toml"
    assert gate(FLOAT32, FLOAT32, FP8, "--init", str(path))[0] == 0
    assert "from 2 good runs:" in path.read_text()
    sources = {limit.source.partition(" in ")[2] for limit in load_limits(str(path)).limits}
    assert sources == {shown_as(FP8)}


def test_init_judges_nothing_and_needs_complete_runs(gate, tmp_path):
    path = tmp_path / "limits.toml"
    code, _, err = gate(FP8, "--init", str(path), "--limits", "verl")
    assert code == 2 and "--init writes limits and judges nothing: leave out --limits." in err
    partial = Path(shutil.copytree(FP8, tmp_path / "partial"))
    sorted(partial.glob("shard-*.parquet"))[-1].unlink()
    code, _, err = gate(str(partial), "--init", str(path))
    assert code == 1 and "limits need complete runs" in err and not path.exists()
    assert (
        gate(str(partial), "--init", str(path), "--allow-partial")[0] == 0
        and load_limits(str(path)).limits
    )


def test_files_are_not_replaced_unless_empty_or_forced(gate, tmp_path):
    path = tmp_path / "summary.md"
    path.touch()  # as CI systems create it
    arguments = (FLOAT32, "--limits", "slime", "--markdown", str(path))
    assert gate(*arguments)[0] == 0 and path.stat().st_size
    code, _, err = gate(*arguments)
    assert code == 1 and "already exists. Replace it with --force" in err
    assert gate(*arguments, "--force")[0] == 0
    assert gate(FLOAT32, "--junit", str(tmp_path))[0] == 1


def test_the_traces_are_only_read(gate, tmp_path):
    def hashes() -> dict[str, str]:
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(FLOAT32).iterdir()}

    before = hashes()
    gate(FLOAT32, "--baseline", FLOAT32, "--limits", "miles", "--junit", str(tmp_path / "x.xml"))
    assert hashes() == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--limits", "prime"), 2, "Unknown set of limits 'prime'. Did you mean prime-rl?"),
        (("--limits", "gone.toml"), 1, "There is no file gone.toml"),
        (("/no/such/trace",), 1, "/no/such/trace does not exist"),
        ((FP8, "--baseline", "/no/such/trace"), 1, "/no/such/trace does not exist"),
        ((FP8, FP8), 1, "would count twice"),
    ],
)
def test_mistakes(gate, arguments, code, message):
    got, _, err = gate(*arguments)
    assert got == code and message in err and "Traceback" not in err


def test_a_relative_limit_needs_its_baseline(gate, limits):
    code, _, err = gate(FP8, "--limits", limits)
    assert (
        code == 2
        and "pearson ≥ baseline − 1 is relative to a baseline. Add --baseline TRACE" in err
    )


def test_a_baseline_that_was_sampled_differently_is_named(gate, tmp_path):
    hot = Path(shutil.copytree(FLOAT32, tmp_path / "hot"))
    manifest = json.loads((hot / "manifest.json").read_text())
    manifest["config"]["sampling"]["temperature"] = 0.7
    (hot / "manifest.json").write_text(json.dumps(manifest))
    limits = write(tmp_path / "limits.toml", "[limits.k3]\nmax_above_baseline = 1\n")
    words = "The baseline was sampled with different settings"
    assert words in " ".join(gate(FLOAT32, "--limits", limits, "--baseline", str(hot))[1].split())
    assert words not in " ".join(
        gate(FLOAT32, "--limits", limits, "--baseline", FLOAT32)[1].split()
    )


@pytest.mark.parametrize("width", [50, 80, 160])
def test_no_line_is_wider_than_the_terminal(gate, limits, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = gate(FP8, "--limits", limits, "--limits", "verl", "--baseline", FLOAT32)
    assert max(len(line) for line in out.splitlines()) <= width
    assert "\x1b" not in out


def test_a_reader_that_leaves_does_not_open_the_gate():
    command = (
        f"{sys.executable} -m mismatch_cli gate --quiet --limits tinker | true; exit "
        "${PIPESTATUS[0]}"
    )
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.returncode == 3 and result.stderr == ""


def test_the_list_shows_every_bound(gate):
    code, out, _ = gate("--list")
    shown = " ".join(out.split())
    assert code == 0
    for name in presets():
        for limit in load_limits(name).limits:
            assert f"{limit.metric} {limit.text}" in shown
    listed = json.loads(gate("--list", "--json")[1])
    assert [one["name"] for one in listed] == presets()


def test_the_limits_of_the_document_are_limits(tmp_path):
    (example,) = re.findall(
        r"```toml\n(.*?)```", (DOCS / "gate.md").read_text(encoding="utf-8"), re.S
    )
    assert len(load_limits(write(tmp_path / "limits.toml", example)).limits) > 4


def broken_trace(folder: Path) -> str:
    """The bundled control with μ shifted by one token."""

    def shifted(row: Row) -> Row:
        return row | {"logp_rollout": np.roll(row["logp_rollout"], 1).tolist()}

    changed_trace(folder / "broken" / "trace", Path(FLOAT32), shifted)
    return str(folder / "broken")


def test_a_fault_that_diagnose_finds_fails_the_gate(gate, tmp_path):
    limits = write(
        tmp_path / "d.toml",
        '[limits."diagnosis:faults"]\nmax = 0\n[limits."diagnosis:values"]\nmax = 0\n',
    )
    code, out, _ = gate(broken_trace(tmp_path), "--limits", limits, "--json")
    faults, values = json.loads(out)["checks"]
    assert code == 3 and faults["value"] == 1 and values["holds"]
    assert faults["reason"] == "1 is above 0: index-shift"
    assert gate(FLOAT32, "--limits", limits)[0] == 0
    out = gate(broken_trace(tmp_path / "again"), "--limits", limits)[1]
    assert "✘ EXCEEDED" in out and "No interval" not in out  # a count of faults needs none


def test_a_gap_that_nothing_explains_fails_the_gate(gate, tmp_path):
    """The trainer's log-probs differ by half a nat, up and down: no check knows such a fault."""
    run_folder = Path(broken_trace(tmp_path))
    shard = run_folder / "trace" / "shard-00000.parquet"
    table = pq.read_table(bundled("traces") / "float32" / shard.name)
    noise_T = np.random.default_rng(0).normal(0, 0.5, 500)
    rows = [
        np.minimum(np.array(row) + noise_T[: len(row)], 0)
        for row in table.column("logp_trainer").to_pylist()
    ]
    index = table.column_names.index("logp_trainer")
    table = table.set_column(index, "logp_trainer", pa.array(rows, pa.list_(pa.float32())))
    pq.write_table(table.drop_columns("logp_trainer_repeat"), shard)
    limits = write(tmp_path / "d.toml", '[limits."diagnosis:faults"]\nmax = 0\n')
    code, out, _ = gate(str(run_folder), "--limits", limits, "--json")
    assert code == 3 and "unexplained-gap" in json.loads(out)["checks"][0]["reason"]


def test_an_impossible_check_does_not_pass(gate, tmp_path):
    limits = write(tmp_path / "d.toml", '[limits."diagnosis:stale-weights"]\nmax = 0\n')
    code, out, _ = gate(FP8, "--limits", limits)
    assert code == 3 and "needs an earlier checkpoint" in " ".join(out.split())
    limits = write(tmp_path / "typo.toml", '[limits."diagnosis:index-shfit"]\nmax = 0\n')
    code, _, err = gate("--limits", limits)
    assert code == 2 and "index-shift" in err


def test_the_screen_says_why_one_set_holds_and_another_does_not(gate, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = gate(FP8, "--limits", "verl", "--limits", "nemo-rl", "--limits", "tinker")
    text = " ".join(out.split())
    assert code == 3 and len(out.splitlines()) <= 40
    assert (
        "The limits of verl and nemo-rl hold although others fail" in text
        and "including staleness" in text
    )
    assert out.index("✘ EXCEEDED") < out.index("✔ holds"), "what does not hold comes first"
    every = [flag for name in presets() for flag in ("--limits", name)]
    assert len(gate(FP8, *every)[1].splitlines()) <= 40
    full = gate(FP8, "--full")[1]
    assert "Sources" in full and full.count("PASSED") == 1


def test_a_limit_can_be_a_multiple_of_what_is_expected(gate, tmp_path):
    for factor, code, words in ((1, 0, "PASSED"), (0.01, 3, "FAILED")):
        limits = write(tmp_path / "e.toml", f"[limits.abs_d_mean]\nmax_times_expected = {factor}\n")
        exit_code, out, _ = gate(FP8, "--limits", limits)
        assert exit_code == code and words in out and "× expected; expected" in out
    limits = write(tmp_path / "k3.toml", "[limits.k3]\nmax_times_expected = 1\n")
    code, _, err = gate(FP8, "--limits", limits)
    assert code == 2 and "what is expected is known of abs_d_mean only" in err


def test_groups_with_equal_rewards_are_not_a_gap_that_is_too_large(gate, tmp_path):
    """prime-rl drops them, so that its own metric has no value: that is said, and exits with 3."""
    run_folder = Path(broken_trace(tmp_path))
    shard = run_folder / "trace" / "shard-00000.parquet"
    table = pq.read_table(bundled("traces") / "float32" / shard.name)
    zeros = [[0.0] * len(ids) for ids in table.column("response_ids").to_pylist()]
    place = table.column_names.index("advantage")
    equal = table.set_column(place, "advantage", pa.array(zeros, table.schema.field(place).type))
    pq.write_table(equal, shard)
    own = write(tmp_path / "o.toml", '[limits."prime-rl:mismatch_kl/all/mean"]\nmax = 0.015\n')
    code, out, _ = gate(str(run_folder), "--limits", own)
    text = " ".join(out.split())
    assert code == 3 and "COULD NOT BE JUDGED" in text and "does not hold" not in text
    assert "every group of a prompt has equal rewards" in text
    code, out, _ = gate(str(run_folder), "--limits", own, "--json")
    assert json.loads(out)["status"] == "unjudged" and not json.loads(out)["passed"]
