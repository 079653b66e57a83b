"""A probe killed at any moment leaves a readable trace, and resuming ends in the bits of an
unbroken run.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.trace.reader import Trace
from tests.warm import Forked, cli

# Two shards, so that a kill lands between them; one thread, which fixes the order of float
# additions.
SIZE = "--num-prompts 8 --samples-per-prompt 64 --max-tokens 16"
PROBE = f"probe {SIZE} --noise-responses 100 --threads 1 --quiet".split()


def start(engine: str, output: Path, *more: str) -> Forked:
    return cli(*PROBE, "--engine", engine, "--output", str(output), *more)


def finish(process: Forked) -> None:
    said = process.ended()
    assert process.returncode == 0, said


def columns(run: Path) -> dict[str, dict]:
    """Every column of every shard, as Python values with exact floats."""
    return {path.name: pq.read_table(path).to_pydict() for path in Trace.open(run).shards}


def assert_readable(run: Path) -> None:
    try:
        for batch in Trace.open(run).batches():
            assert batch.num_responses > 0
    except MismatchError as error:
        assert "holds no trace" in str(error) or "no finished shard" in str(error)  # noqa: PT017 - either is an answer


def is_sampled(run: Path) -> bool:
    return any((run / "trace").glob("shard-*.parquet"))


def is_scored(run: Path) -> bool:
    return any(scored_shards(run))


def scored_shards(run: Path) -> list[bool]:
    return [
        "logp_trainer" in pq.read_schema(path).names
        for path in (run / "trace").glob("shard-*.parquet")
    ]


@pytest.mark.parametrize(
    ("engine", "moments"),
    [("hf", [is_scored]), pytest.param("vllm", [is_sampled], marks=pytest.mark.slow)],
)
def test_killed_and_resumed_equals_unbroken(engine, moments, tmp_path):
    """Killed after the first shard is sampled, and after it is scored; lab/kills.py kills
    at random moments.
    """
    finish(start(engine, tmp_path / "unbroken"))
    resume: list[str] = []
    for reached in moments:
        process = start(engine, tmp_path / "killed", *resume)
        while not reached(tmp_path / "killed"):
            assert process.poll() is None, process.said()
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.ended()
        assert_readable(tmp_path / "killed")
        resume = ["--resume"]
    assert not all(scored_shards(tmp_path / "killed")), "the kill came too late to say anything"
    finish(start(engine, tmp_path / "killed", *resume))
    assert columns(tmp_path / "killed") == columns(tmp_path / "unbroken")


def test_ctrl_c_says_how_to_resume_and_keeps_finished_work(tmp_path):
    process = start("hf", tmp_path / "run")
    shard = tmp_path / "run" / "trace" / "shard-00000.parquet"
    while not shard.is_file():
        assert process.poll() is None, process.said()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    errors = process.ended()
    assert process.returncode == 130
    how = "the same command with --resume, and without --force, continues it"
    assert errors == f"mismatch-cli: Interrupted. What was recorded is kept: {how}.\n"
    assert_readable(tmp_path / "run")


@pytest.mark.slow
def test_an_engine_that_dies_midway_keeps_the_finished_shards(tmp_path, monkeypatch, capfd):
    from mismatch_cli.app.cli import run
    from mismatch_cli.models.engines import hf

    sample = hf.HfEngine.sample
    calls = []

    def fails_the_second_time(self, requests, on_finished):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the device is gone\nand more")
        return sample(self, requests, on_finished)

    monkeypatch.setattr(hf.HfEngine, "sample", fails_the_second_time)
    assert run([*PROBE, "--engine", "hf", "--output", str(tmp_path / "run")]) == 1
    errors = capfd.readouterr().err
    assert "RuntimeError: the device is gone" in errors and "--resume" in errors
    assert errors.count("\n") == 1
    monkeypatch.undo()
    assert run(["probe", "--resume", "--quiet", "--output", str(tmp_path / "run")]) == 0
