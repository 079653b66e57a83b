"""`watch` beside live runs: nothing lost, repeated or misread, and limits that raise their
alarms once.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from mismatch_cli import Recorder
from mismatch_cli.app.cli import run
from mismatch_cli.base.places import bundled
from mismatch_cli.limits.limit_sets import load_limits, parse_limits
from mismatch_cli.trace.manifest import read_manifest, write_manifest
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.writer import write_shard
from mismatch_cli.watch import alarm_command
from mismatch_cli.watch.folders import awaited, kind_of
from mismatch_cli.watch.growing_trace import StepsOfShards
from mismatch_cli.watch.live_view import WatchView
from mismatch_cli.watch.training_run import Lines
from mismatch_cli.watch.watcher import MeasureRequest, StepReport, Watcher
from tests import warm
from tests.frameworks.importing.layouts import (
    nemo_rl,
    open_instruct_record,
    prime_rl,
    real_rows,
    write_lines,
)
from tests.frameworks.importing.prime_rl_run import Run as PrimeRun
from tests.frameworks.importing.prime_rl_run import episode_of, trained
from tests.terminal import Terminal
from tests.train.commands.test_train import TRAIN

Watch = Callable[..., tuple[int, list[dict[str, Any]], str]]
NOW = ("--every", "0.05", "--report-every", "0")
COLUMNS = (
    "prompt_id", "sample_index", "prompt_ids", "response_ids", "logp_rollout", "logp_trainer",
    "advantage",
)  # fmt: skip


@pytest.fixture
def watch(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Watch:
    """Exit code, JSON lines and stderr of `watch` into `seen`."""

    def call(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        capfd.readouterr()
        code = run(["watch", *arguments, "--json", "-o", str(tmp_path / "seen")])
        out, err = capfd.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], err

    return call


@pytest.fixture
def limit(tmp_path: Path) -> str:
    """A limit that only step 5 of the bundled trace exceeds."""
    (tmp_path / "limits.toml").write_text("[limits.k3]\nmax = 0.001\n", encoding="utf-8")
    return str(tmp_path / "limits.toml")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last steps of the bundled trace, 3 to 5."""
    folder = tmp_path_factory.mktemp("watched") / "run"
    shutil.copytree(
        bundled("traces/fp8-kv"), folder, ignore=shutil.ignore_patterns("shard-0000[012]*")
    )
    unpromised(folder)
    return str(folder)


def unpromised(folder: Path) -> None:
    """The manifest of a trace that does not list its shards."""
    manifest = read_manifest(folder)
    for name in manifest.keys() & {"shards", "shard_rows"}:
        del manifest[name]
    write_manifest(folder, manifest)


def started(*arguments: str) -> subprocess.Popen[str]:
    """A process of its own, as a shell starts one."""
    command = [sys.executable, "-m", "mismatch_cli", "watch", *arguments, "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def watcher_of(folder: Path, into: Path, **request: Any) -> Watcher:
    into.mkdir(exist_ok=True)
    return Watcher(folder, into, MeasureRequest(**request), lambda _: None)


def steps(messages: Iterator[StepReport]) -> list[int]:
    return [one.step for one in messages]


def response(step: int, row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in COLUMNS} | {"step": step}


@pytest.mark.slow
def test_beside_a_training_run_that_it_was_started_before(tmp_path: Path) -> None:
    """Killed after its first line and restarted: each step is reported once, each alarm is
    raised once.
    """
    folder, watch_folder, calls = tmp_path / "run", tmp_path / "seen", tmp_path / "calls"
    (tmp_path / "any.toml").write_text(
        "[limits.k3]\nmax = 1e-15\n[limits.pearson]\nmin = 0.5\n", encoding="utf-8"
    )
    line = [
        str(folder),
        "-o",
        str(watch_folder),
        "--limits",
        str(tmp_path / "any.toml"),
        "--every",
        "0.05",
    ]
    line += [
        "--report-every",
        "0",
        "--on-alarm",
        f"echo $ALARM_STEP $ALARM_METRIC $ALARM_BOUND >> {calls}",
    ]
    first = started(*line)
    trained = warm.cli(
        *TRAIN, "--steps", "3", "--trace-every", "2", "-o", str(folder), "--quiet", "--no-plots"
    )
    assert first.stdout is not None
    messages = [json.loads(first.stdout.readline())]
    first.kill()
    libraries = Path(f"/proc/{first.pid}/maps").read_text() if first.poll() is None else ""
    assert "libtorch" not in libraries
    first.wait()
    second = started(*line)
    out, err = second.communicate(timeout=120)
    messages += map(json.loads, out.splitlines())
    assert trained.ended() == "" and second.returncode == 3, err
    recorded = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [
        {key: line[key] for key in line if key not in ("alarms", "again")} for line in messages
    ] == recorded
    # An alarm is a state: it begins once, and still is
    begun = [(event["step"], event["state"]) for line in messages for event in line["alarms"]]
    assert begun == [(1, "begins")] and "3 steps of" in err
    assert "1 alarm: k3 since step 1." in err
    # Pearson at step 2, measured
    assert calls.read_text().splitlines() == ["1 k3 max"]
    assert (
        json.loads((watch_folder / "watch.json").read_text())["known"]
        and "Never measured" not in err
    )


def test_a_recorded_step_is_reported_once_every_rank_has_passed_it(tmp_path: Path) -> None:
    ranks = [Recorder(tmp_path / "run", rank=rank) for rank in (0, 1)]
    rows = real_rows(8)

    def record(rank: int, step: int) -> None:
        for row in rows[4 * rank : 4 * rank + 4]:
            ranks[rank].add(**response(step, row))
        ranks[rank].flush()

    record(0, 0)
    watcher = watcher_of(tmp_path / "run", tmp_path / "seen")
    assert steps(watcher.look()) == [] and watcher.source.newest == 0
    record(0, 1)
    record(1, 0)
    assert steps(watcher.look()) == []  # rank 1 may still add to step 0
    record(1, 1)
    assert steps(watcher.look()) == [0] and dict(watcher.state.lines())[0]["responses"] == 8
    ranks[0].close()
    assert steps(watcher.look()) == [] and not watcher.is_done(None, None)
    watcher = watcher_of(tmp_path / "run", tmp_path / "seen")  # killed and restarted
    record(1, 2)
    ranks[1].close()
    assert steps(watcher.look()) == [1, 2] and watcher.is_done(None, None)
    assert dict(watcher.state.lines())[2]["responses"] == 4 and sorted(
        dict(watcher.state.lines())
    ) == [0, 1, 2]


def test_a_reported_step_that_grows_is_reported_again(tmp_path: Path) -> None:
    rows, recorder = real_rows(8), Recorder(tmp_path / "run")
    for step, row in zip((0, 1, 1, 0), rows, strict=False):
        recorder.add(**response(step, row))
        recorder.flush()
        if step == 1 and row is rows[1]:
            assert steps(watcher_of(tmp_path / "run", tmp_path / "seen").look()) == [0]
    recorder.close()
    messages = list(watcher_of(tmp_path / "run", tmp_path / "seen").look())
    assert [(one.step, one.again, one.record["responses"]) for one in messages] == [
        (0, True, 2),
        (1, False, 2),
    ]
    lines = (tmp_path / "seen" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["responses"] for line in lines] == [2, 2]


def test_an_unfinished_step_is_reported_once_nothing_more_comes(
    watch: Watch, tmp_path: Path
) -> None:
    """Its rank may have been killed; once it records again, the step is reported again."""
    recorder = Recorder(tmp_path / "run")
    recorder.add(**response(0, real_rows(1)[0]))
    recorder.flush()
    code, lines, err = watch(str(tmp_path / "run"), "--idle", "0", *NOW)
    assert (code, [line["step"] for line in lines]) == (0, [0]) and "1 step of" in err
    recorder.add(**response(0, real_rows(2)[1]))
    recorder.close()
    code, lines, _ = watch(str(tmp_path / "run"), *NOW)
    assert [(line["step"], line["responses"], line["again"]) for line in lines] == [(0, 2, True)]


@pytest.mark.slow
def test_killed_and_restarted(tmp_path: Path, trace: str, limit: str) -> None:
    watch_folder, calls = tmp_path / "seen", tmp_path / "calls"
    line = [trace, "-o", str(watch_folder), "--limits", limit, *NOW]
    line += ["--on-alarm", f"echo $ALARM_STEP $ALARM_VALUE $ALARM_LIMIT >> {calls}"]
    messages: list[dict[str, Any]] = []
    for _ in range(2):
        process = started(*line)
        assert process.stdout is not None
        messages.append(json.loads(process.stdout.readline()))
        process.kill()
        messages += map(json.loads, process.communicate()[0].splitlines())
    process = started(*line)
    out, _ = process.communicate()
    messages += map(json.loads, out.splitlines())
    numbers = [one["step"] for one in messages]
    assert process.returncode == 3 and numbers == sorted(set(numbers)) and numbers[-1] == 5
    on_record = [
        json.loads(one)["step"] for one in (watch_folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert on_record == [3, 4, 5]
    (call,) = calls.read_text().splitlines()
    assert [float(word) for word in call.split()] == pytest.approx([5, 0.00254157, 0.001], rel=1e-5)


def test_a_bundled_trace_has_its_name(watch: Watch) -> None:
    code, lines, err = watch("moe", "--limits", "miles", "--limits", "nemo-rl", *NOW)
    # That of miles is for dense models: as in `gate`, it is not judged, although nemo-rl's is
    assert code == 3 and "Never measured, which counts as exceeded: k3 (mismatch) ≤ 0.001." in err
    assert [line["step"] for line in lines] == [0]


def test_alarms_are_those_of_gate_and_end_it_with_3(
    watch: Watch, trace: str, limit: str, tmp_path: Path
) -> None:
    code, lines, err = watch(trace, "--limits", limit, *NOW)
    (alarm,) = [alarm for line in lines for alarm in line["alarms"]]
    assert code == 3 and "✘ k3 (mismatch) at step 5: 0.00254157 is above 0.001" in err
    assert (
        alarm["step"] == 5
        and alarm["allowed"] == 0.001
        and [line["step"] for line in lines] == [3, 4, 5]
    )
    # Still recorded, and not raised again
    assert watch(trace, "--limits", limit, *NOW)[:2] == (3, [])
    code, lines, _ = watch(trace, *NOW)
    # Other limits: measured again
    assert code == 0 and [line["step"] for line in lines] == [3, 4, 5]
    code, lines, err = watch(trace, "--limits", limit, "--once", "--stop-on-alarm", *NOW)
    assert (
        (code, len(lines)) == (3, 3)
        and all(not line["alarms"] for line in lines)
        and "1 alarm: k3" in err
    )
    shutil.rmtree(tmp_path / "seen")
    (tmp_path / "limits.toml").write_text("[limits.k3]\nmax = 0.0003\n", encoding="utf-8")
    code, lines, _ = watch(trace, "--limits", limit, "--until-step", "3", *NOW)
    assert (code, [line["step"] for line in lines]) == (0, [3])
    code, lines, _ = watch(trace, "--limits", limit, "--stop-on-alarm", *NOW)
    assert (code, [line["step"] for line in lines]) == (3, [4])


def test_a_limit_that_no_step_can_be_compared_with_does_not_pass(
    watch: Watch, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    line = {"step": 1, "mismatch": {"k3": 0.5}, "current": {}, "reward": 0.1}
    write_lines(tmp_path / "run" / "metrics.jsonl", [line])
    (tmp_path / "limits.toml").write_text(
        "[limits.k3]\nmax = 1\n[limits.spearman]\nmin = 0\n", encoding="utf-8"
    )
    code, _, err = watch(
        str(tmp_path / "run"), "--once", "--limits", str(tmp_path / "limits.toml"), *NOW
    )
    assert code == 3, err
    assert "Never measured, which counts as exceeded: spearman ≥ 0." in err


@pytest.mark.slow
def test_a_watch_that_has_seen_its_last_step_ends_at_once(watch: Watch, trace: str) -> None:
    """Without `--idle`: it would wait for the next step for ever."""
    for expected in ([3, 4], []):
        code, lines, _ = watch(trace, "--until-step", "4")
        assert (code, [line["step"] for line in lines]) == (0, expected)


def test_the_command_is_for_alarms_of_the_limits_that_are_set_now(tmp_path: Path) -> None:
    """An earlier session had others, whose alarms this one neither shows nor counts."""
    (tmp_path / "run").mkdir()
    lines = [{"step": step, "mismatch": {"k3": k3}} for step, k3 in enumerate((0.02, 0.3), 1)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "run" / "metrics.jsonl").write_text(text, encoding="utf-8")
    strict, lax = (
        [parse_limits({"limits": {"k3": {"max": most}}}, "mine")] for most in (0.01, 0.1)
    )
    watcher = watcher_of(tmp_path / "run", tmp_path / "seen", sets=strict)
    assert steps(watcher.look()) == [1, 2]
    assert [event.step for event in watcher.uncalled] == [1]
    watcher = watcher_of(tmp_path / "run", tmp_path / "seen", sets=lax)
    assert watcher.uncalled == [] and steps(watcher.look()) == [1, 2]
    assert [event.step for event in watcher.uncalled] == [2]
    watcher.state.record_call(watcher.uncalled[0])
    assert watcher.uncalled == [] and [event.step for event in watcher.state.uncalled] == [1]


@pytest.mark.slow
def test_a_command_that_fails_or_hangs_stops_nothing(
    watch: Watch, trace: str, limit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(alarm_command, "SECONDS", 0.3)
    for says, how in (
        ("exit 7", "ended with exit code 7"),
        ("sleep 60", "took over 0.3 seconds and was stopped"),
    ):
        code, lines, err = watch(trace, "--limits", limit, "--on-alarm", says, *NOW)
        assert (code, len(lines)) == (3, 3)
        assert f"--on-alarm {how} at step 5. Watching continues." in err
        shutil.rmtree(tmp_path / "seen")


@pytest.mark.slow
def test_only_the_step_is_read_whatever_its_shards_contain(trace: str, tmp_path: Path) -> None:
    """All steps mixed in one shard: the same numbers as from one shard each."""
    table = pa.concat_tables(Trace.open(Path(trace)).tables())
    shutil.copytree(trace, tmp_path / "run", ignore=shutil.ignore_patterns("shard-*"))
    mixed_rows = table.sort_by([("sample_index", "ascending"), ("step", "ascending")])
    write_shard(tmp_path / "run" / "shard-00000.parquet", mixed_rows)
    mixed, apart = (
        watcher_of(tmp_path / "run", tmp_path / "one"),
        watcher_of(Path(trace), tmp_path / "two"),
    )
    assert steps(mixed.look()) == steps(apart.look()) == [3, 4, 5]
    of_mixed = dict(mixed.state.lines())
    for step, record in apart.state.lines():
        for name, value in record["mismatch"].items():
            assert of_mixed[step]["mismatch"][name] == pytest.approx(value, rel=1e-6), name
        assert of_mixed[step]["responses"] == record["responses"] == 32


def test_a_step_between_those_of_a_shard_is_not_reported(trace: str, tmp_path: Path) -> None:
    """A run may record every tenth step, and several of them in one shard."""
    (tmp_path / "trace").mkdir()
    shutil.copy(Path(trace) / "manifest.json", tmp_path / "trace")
    whole = pq.read_table(next(Path(trace).glob("shard-*")))
    at, (first, last) = whole.schema.get_field_index("step"), (10, 30)
    step_S = [first] * 3 + [last] * (len(whole) - 3)
    table = whole.set_column(at, whole.field(at), pa.array(step_S, whole.field(at).type))
    write_shard(tmp_path / "trace" / "shard-00000.parquet", table)
    watcher = watcher_of(tmp_path / "trace", tmp_path / "seen")
    reports = [(each.step, each.record["responses"]) for each in watcher.look(final=True)]
    assert reports == [(10, 3), (30, len(whole) - 3)]


def test_a_half_written_dump_is_waited_for(tmp_path: Path) -> None:
    """NeMo-RL writes a step line by line: an incomplete line, or a file that still changes, is
    not read.
    """
    run_folder, rows = tmp_path / "run", real_rows(6)
    whole = nemo_rl(
        tmp_path / "elsewhere" / "train_data_step3.jsonl", [row | {"step": 3} for row in rows]
    )
    content = whole.read_bytes()
    half = content[: len(content) // 2]
    run_folder.mkdir()
    path = run_folder / whole.name
    path.write_bytes(half)
    watcher = watcher_of(run_folder, tmp_path / "seen")
    for _ in range(3):
        assert steps(watcher.look()) == [] and "is being written" in watcher.source.waiting
    path.write_bytes(content)
    assert steps(watcher.look()) == []  # it has changed since the last look
    (messages,) = watcher.look()
    assert messages.step == 3 and messages.record["responses"] == 6 and not watcher.source.waiting
    with path.open("ab") as file:  # a writer that had stopped between two lines
        file.write(content.splitlines(keepends=True)[0])
    assert steps(watcher.look()) == []
    watcher = watcher_of(run_folder, tmp_path / "seen")  # killed and restarted
    (messages,) = [one for _ in range(2) for one in watcher.look()]
    assert messages.again and messages.record["responses"] == 7
    parts = json.loads((tmp_path / "seen" / "watch.json").read_text())["parts"]
    assert [part["files"][path.name][0] for part in parts] == [0, len(content)]


def test_a_file_that_was_written_anew_is_reported_again(tmp_path: Path) -> None:
    """As after a restart of its run: the part that takes the place of the old one has another name,
    since steps already reported are recognised by the names of their shards.
    """
    run_folder, rows = tmp_path / "run", [row | {"step": 3} for row in real_rows(6)]
    nemo_rl(run_folder / "train_data_step3.jsonl", rows)
    watcher = watcher_of(run_folder, tmp_path / "seen")
    assert steps(watcher.look()) + steps(watcher.look()) == [3]
    nemo_rl(run_folder / "train_data_step3.jsonl", rows[:4])
    assert steps(watcher.look()) == []
    watcher = watcher_of(run_folder, tmp_path / "seen")  # killed and restarted
    (again,) = [one for _ in range(2) for one in watcher.look()]
    assert again.step == 3 and again.again and again.record["responses"] == 4
    assert [record["responses"] for _, record in watcher.state.lines()] == [4]
    assert [folder.name for folder in (tmp_path / "seen" / "traces").iterdir()] == ["part-00001"]


def test_a_step_of_prime_rl_waits_for_its_mark(tmp_path: Path) -> None:
    rows = real_rows(6)
    for step in (0, 1):
        prime_rl(tmp_path / "run", [row | {"step": step} for row in rows[:3]])
        prime_rl(tmp_path / "run", [row | {"step": step} for row in rows[3:]], rank=1)
    exports = tmp_path / "run" / "token_exports"
    (exports / "step_0" / "STABLE").touch()
    watcher = watcher_of(exports, tmp_path / "seen")
    assert steps(watcher.look()) + steps(watcher.look()) == [] or sorted(
        dict(watcher.state.lines())
    ) == [0]
    assert sorted(dict(watcher.state.lines())) in ([], [0]) and "step_1" in watcher.source.waiting
    (exports / "step_1" / "STABLE").touch()
    steps(watcher.look())
    assert (
        sorted(dict(watcher.state.lines())) == [0, 1]
        and dict(watcher.state.lines())[1]["responses"] == 6
    )
    assert dict(watcher.state.lines())[1]["current"]["k3"] > 0 and watcher.state.parts[-1]["files"]


def test_traces_of_prime_rl_are_read_once_also_after_they_were_sealed(tmp_path: Path) -> None:
    """Episodes alone are not a step; the trainer's lines are, with the episodes before them."""
    run, rows = PrimeRun(tmp_path / "run"), real_rows(6)
    run.append("stream", [episode_of(row, f"t{number}") for number, row in enumerate(rows[:3])])
    watcher = watcher_of(tmp_path / "run", tmp_path / "seen")
    assert steps(watcher.look()) + steps(watcher.look()) == []
    run.append("annotations/trainer", [trained(row, f"t{n}") for n, row in enumerate(rows[:3])])
    messages = steps(watcher.look()) + steps(watcher.look())
    run.seal()
    assert steps(watcher.look()) + steps(watcher.look()) == []
    run.write([row | {"step": 5} for row in rows], first=10)
    assert messages == [1] and steps(watcher.look()) + steps(watcher.look()) == [5]
    run.seal()  # before anybody had read the rest of it
    run.write([row | {"step": 6} for row in rows], first=20)
    run.seal()
    watcher = watcher_of(tmp_path / "run", tmp_path / "seen")  # killed and restarted
    assert steps(watcher.look()) + steps(watcher.look()) == [6]
    lines = dict(watcher.state.lines())
    assert [lines[step]["responses"] for step in (1, 5, 6)] == [3, 6, 6]
    assert lines[5]["current"]["k3"] > 0


def test_steps_appended_to_one_file_are_imported_once(tmp_path: Path) -> None:
    """open-instruct appends steps to one file, without log π."""
    lines = [
        json.dumps(open_instruct_record(row, i)) + "\n"
        for i, row in enumerate([*real_rows(3, step=1), *real_rows(4, step=2)])
    ]
    path = tmp_path / "run" / "x_rollouts_000000.jsonl"
    path.parent.mkdir()
    path.write_text("".join(lines[:3]), encoding="utf-8")
    watcher = watcher_of(path.parent, tmp_path / "seen")
    assert steps(watcher.look()) + steps(watcher.look()) == [1]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(lines[3:]))
    assert steps(watcher.look()) + steps(watcher.look()) == [2]
    assert [dict(watcher.state.lines())[step]["responses"] for step in (1, 2)] == [3, 4]
    assert (
        dict(watcher.state.lines())[2]["current"]
        == dict(watcher.state.lines())[2]["mismatch"]
        == {}
    )
    rows = [
        pq.read_table(shard).num_rows
        for shard in sorted((tmp_path / "seen" / "traces").rglob("shard-*"))
    ]
    assert rows == [3, 4]


def test_what_has_just_started_is_not_a_dump(tmp_path: Path) -> None:
    """A recorder writes its vocabulary before its manifest, and frameworks have their own
    config.toml.
    """
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    assert kind_of(run_folder) == ""
    (run_folder / ".recorder-00000.lock").touch()
    shutil.copy(bundled("traces/fp8-kv") / "vocab.parquet", run_folder)
    assert kind_of(run_folder) == ""
    shutil.copy(bundled("traces/fp8-kv") / "manifest.json", run_folder)
    assert kind_of(run_folder) == "trace"
    prime_rl(tmp_path / "other", real_rows(1))
    (tmp_path / "other" / "config.toml").write_text("[trainer]\n", encoding="utf-8")
    assert kind_of(tmp_path / "other") == "dump"


def test_complete_lines_are_read_and_again_after_the_file_was_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path)
    assert lines.new() == []
    path.write_bytes(b"one\ntw")
    assert lines.new() == [b"one\n"]
    path.write_bytes(b"one\ntwo\n")
    assert lines.new() == [b"two\n"] and lines.new() == []
    path.write_bytes(b"one\nother\n")  # `train --resume` went back to a checkpoint
    assert lines.new() == [b"one\n", b"other\n"] and lines.new() == []


FEW, MANY = 100, 1100  # steps


def per_step(act: Callable[[int, int], object]) -> float:
    """The bytes that stay in use for each step, from `FEW` to `MANY`."""
    act(0, FEW)
    gc.collect()
    tracemalloc.start()
    act(FEW, MANY)
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / (MANY - FEW)


def test_a_long_training_run_takes_half_a_kilobyte_a_step(tmp_path: Path, trace: str) -> None:
    messages = next(watcher_of(Path(trace), tmp_path / "other").look())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(
        json.dumps(messages.record | {"step": 0}) + "\n"
    )
    watcher = watcher_of(tmp_path / "run", tmp_path / "seen")

    def go_on(first: int, last: int) -> None:
        with (tmp_path / "run" / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(
                json.dumps(messages.record | {"step": step + 1}) + "\n"
                for step in range(first, last)
            )
        assert len(steps(watcher.look())) == last - first

    assert per_step(go_on) < 200


@pytest.mark.slow
def test_a_long_recording_takes_half_a_kilobyte_a_step(tmp_path: Path, trace: str) -> None:
    """The footers of its shards, one a step; what else stays of a step is that of a training
    run.
    """
    row = next(Trace.open(Path(trace)).tables()).slice(0, 1)
    at, shard_steps = row.schema.get_field_index("step"), StepsOfShards()

    def go_on(first: int, last: int) -> None:
        for step in range(first, last):
            of_step = row.set_column(at, "step", pa.array([step], row.schema.field(at).type))
            write_shard(tmp_path / f"shard-00000-{step:06d}.parquet", of_step)
        assert shard_steps.add(tmp_path) == set(range(first, last))

    assert per_step(go_on) < 300


@pytest.mark.slow
def test_on_a_narrow_terminal(tmp_path: Path, trace: str, limit: str) -> None:
    watcher = watcher_of(Path(trace), tmp_path / "seen", sets=[load_limits(limit)])
    view = WatchView("[red]" + "x" * 40)
    assert view.lines(30, 5)[-1].plain == "waiting for it to start"
    view.show(watcher)
    steps(watcher.look())
    text = "\n".join(line.plain for line in view.lines(77, 24))
    assert re.search(r"\|π − μ\| +0\.0039 +0\.0022 [▁-█]+ +0\.0039 +equal weights", text)
    assert re.search(r"blocked +0\.019 .*by grpo-clip-higher", text) and "1 alarm" in text
    heads, first = next(pairwise(text.splitlines()[3:]))
    assert heads.split() == ["now", "lowest", "steps", "highest"]
    assert heads.index("steps") == re.search(r"[▁-█]+", first).start()
    # An alarm under way is on the screen
    assert "step 5 · grew" in text and "✘ k3 (mismatch), since step 5: 0.00254157 is" in text
    for width in (20, 34, 50):
        curves = [
            line.plain
            for line in view.lines(width, 40)
            if line.plain.startswith(("|π", "k3", "ratio"))
        ]
        assert len(curves) == 4 and all(cell_len(line) <= width for line in curves)
    assert len(view.lines(77, 4)) == 4
    terminal = Terminal(
        [sys.executable, "-m", "mismatch_cli", "watch", trace, "--limits", limit, *NOW],
        34,
        tmp_path,
    )
    assert terminal.finish() == 3, terminal.text
    assert "\a" in terminal.text and "k3 (mismatch) at step 5" in terminal.text


def test_a_folder_that_does_not_exist_is_waited_for_and_the_nearest_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "recorded").mkdir()
    (tmp_path / "other").mkdir()
    process = started(str(tmp_path / "recorded2"), "-o", str(tmp_path / "seen"), *NOW)
    assert process.stderr is not None
    first, second = (process.stderr.readline() for _ in range(2))
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert first.startswith("Watching ")
    assert second == (
        f"{tmp_path}/recorded2 does not exist yet: waiting for it. Did you mean recorded?\n"
    )
    empty = tmp_path / "recorded"
    assert (
        awaited(empty) == f"{empty} has no step, no trace and no dump yet: waiting for the first."
    )


def test_ctrl_c_says_that_the_state_is_kept(tmp_path: Path) -> None:
    process = started(str(tmp_path / "run"), "-o", str(tmp_path / "seen"), *NOW)
    while not (tmp_path / "seen").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (
        process.returncode == 130
        and "Stopped watching" in err
        and "the same command continues" in err
    )


def test_the_page_is_that_of_a_training(
    trace: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    watch_folder = tmp_path / "seen"
    assert (
        run(["watch", trace, "-o", str(watch_folder), "--no-plots", "--quiet", "--every", "0.05"])
        == 0
    )
    page = (watch_folder / "report.html").read_text(encoding="utf-8")
    # It is final
    assert "Does training stay stable?" in page and 'http-equiv="refresh"' not in page
    assert sorted(os.listdir(watch_folder)) == [
        "metrics.jsonl",
        "report.html",
        "summary.json",
        "watch.json",
    ]
    assert run(["report", str(watch_folder), "--json", "--quiet"]) == 0
    assert json.loads(capfd.readouterr().out)["runs"][0]["steps"] == 3


def test_mistakes_are_reported_in_a_sentence(
    capfd: pytest.CaptureFixture[str], trace: str, tmp_path: Path
) -> None:
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "metrics.jsonl").write_text(
        '{"step": 1, "reward": 0.5}\n', encoding="utf-8"
    )
    trained, own = str(tmp_path / "trained"), tmp_path / "own"
    own.mkdir()
    (own / "thesis.tex").touch()
    assert (
        run(["watch", trace, "-o", str(tmp_path / "seen"), "--until-step", "3", "--quiet", *NOW])
        == 0
    )
    for code, said, line in (
        (2, "Without limits there are no alarms", [trace, "--on-alarm", "true"]),
        (2, "--algorithm is for traces", [trained, "--algorithm", "ppo"]),
        (2, "Unknown algorithm 'nope'", [trace, "--algorithm", "nope"]),
        (1, "has nothing to watch yet", [str(tmp_path / "later"), "--once"]),
        (1, "nor does the folder around it", [str(tmp_path / "no" / "where")]),
        (
            1,
            f"belongs to a watch of {trace}. Choose another --output",
            [trained, "-o", str(tmp_path / "seen")],
        ),
        (1, "already exists, but not from `watch`", [trace, "-o", str(own)]),
        (1, "overlaps the input", [trained, "-o", str(tmp_path / "trained" / "watched")]),
        (2, "follows local files", ["s3://bucket/run"]),
    ):
        output = [] if "-o" in line else ["-o", str(tmp_path / "new")]
        assert run(["watch", *line, *output, *NOW]) == code
        assert said in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_page_answers_with_the_alarms(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The gap of a recording doubles from step to step: screen, page and summary.json say the
    same.
    """
    from mismatch_cli.train.pages.training import page
    from mismatch_cli.train.studies.runs import read_runs
    from mismatch_cli.train.studies.training import TrainingAnalysis

    recorder = Recorder(tmp_path / "run")
    for step in range(5):
        for row in real_rows(8):
            further = [logp - 0.004 * 2**step for logp in row["logp_rollout"]]
            recorder.add(**response(step, row) | {"logp_trainer": further})
    recorder.close()
    for threshold, words in ((0.01, "1 ALARM"), (0.5, "LIMITS HOLD")):
        (tmp_path / "limits.toml").write_text(
            f"[limits.abs_d_mean]\nmax = {threshold}\n", encoding="utf-8"
        )
        watch_folder = tmp_path / words.replace(" ", "-")
        line = [
            "watch",
            str(tmp_path / "run"),
            "--limits",
            str(tmp_path / "limits.toml"),
            "--once",
            "-o",
            str(watch_folder),
        ]
        assert run([*line, "--no-plots"]) == (3 if "ALARM" in words else 0)
        said, html = (
            capfd.readouterr().err,
            (watch_folder / "report.html").read_text(encoding="utf-8"),
        )
        summary = json.loads((watch_folder / "summary.json").read_text())
        (measured,) = summary["runs"]
        assert words in html and "final reward of" not in html
        assert measured["steps"] == 5 and measured["partial"] is None
        # Steps 2 to 4, and 0 and 1
        assert 3 < measured["abs_dp_mean_last"] / measured["abs_dp_mean_first"] < 12
        alarms = summary["watch"]["alarms"]
        spans = [(alarm["step"], alarm["last"], alarm["over"]) for alarm in alarms]
        assert spans == ([(2, 4, None)] if "ALARM" in words else [])
        for alarm in alarms:
            assert f"since step {alarm['step']}" in html and f"since step {alarm['step']}" in said
        study = TrainingAnalysis.of(read_runs([watch_folder]))
        assert page(study).verdict.words == words, "`report` of the folder answers the same"
