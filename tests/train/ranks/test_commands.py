"""Commands as several ranks: real processes, real vLLM, real SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.models.engines import engine_failures
from tests.probe.tasks.test_hostile_rewards import is_alive
from tests.processes.ranks.launcher import launched, ranks_of
from tests.train.ranks.on_ranks import as_ranks
from tests.warm import Forked, cli

pytestmark = pytest.mark.slow

MODEL = str(bundled("model"))
CLI = [sys.executable, "-m", "mismatch_cli"]
TRAIN = ("train", "--max-tokens", "48", "--samples-per-prompt", "4", "--prompts-per-step", "4",
         "--eval-every", "0",
         "--eval-samples", "1", "--checkpoint-every", "1", "--no-plots", "--num-problems", "8",
         "--learning-rate", "5e-4")  # fmt: skip
PROBE = ("probe", "--engine", "hf", "--num-prompts", "48", "--samples-per-prompt", "6",
         "--max-tokens", "8",
         "--no-plots", "--quiet", "--noise-responses", "20")  # fmt: skip


def run(*arguments: str, environment: dict[str, str] | None = None) -> tuple[int | None, str]:
    ranks = launched(*arguments, ranks=2) if "--nproc" in arguments else None
    process = ranks or cli(*arguments, env=environment)
    said = process.ended(within=150)
    return process.returncode, said


def lines(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


class Training:
    """A run of several ranks that has finished a step."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.folder = folder
        self.launcher = launched(*TRAIN, *more, "--nproc", "2", "--output", str(folder), ranks=4)
        until = time.monotonic() + 100
        while len(lines(folder)) < 1:
            assert self.launcher.poll() is None and time.monotonic() < until, self.launcher.said()
            time.sleep(0.1)
        self.ranks = ranks_of(self.launcher.pid)
        assert sorted(self.ranks) == [0, 1]

    def ended(self, within: float = 60) -> tuple[int, str]:
        said = self.launcher.ended(within)
        for _ in range(50):
            if not any(map(is_alive, self.ranks.values())):
                return self.launcher.returncode, said
            time.sleep(0.1)
        raise AssertionError("a rank was left behind")


def test_two_ranks_train_with_vllm_until_ctrl_c(tmp_path):
    training = Training(
        tmp_path / "run", "--steps", "50", "--trace-every", "1", "--learning-rate", "2e-3"
    )
    while len(lines(tmp_path / "run")) < 2:
        time.sleep(0.1)
    training.launcher.send_signal(signal.SIGINT)
    code, said = training.ended()
    assert code == 130 and said.count("Interrupted.") == 1
    assert "Stopped and saved. Continue with the same command" in said
    records = lines(tmp_path / "run")
    assert [line["step"] for line in records] == list(range(1, len(records) + 1))
    assert {line["sync"] for line in records} <= {"proven", "unchecked"} and records[1][
        "sync"
    ] == "proven"
    trace = pq.read_table(tmp_path / "run" / "traces" / "step-2" / "shard-00000.parquet")
    assert len(trace) == 16 and len(set(trace["prompt_id"].to_pylist())) == 4
    assert {path.name for path in (tmp_path / "run" / "log").iterdir()} == {
        "vllm.log",
        "vllm-1.log",
    }
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert newest.name == f"step-{records[-1]['step']:06d}"
    checkpoint = json.loads((newest / "state.json").read_text())
    assert checkpoint["ranks"] == 2 and len(checkpoint["files"]) == 2


def test_a_killed_rank_restarts_as_often_as_requested(tmp_path):
    """After that it takes the others down with it."""
    hf = ("--engine", "hf", "--max-tokens", "16")
    training = Training(tmp_path / "run", *hf, "--steps", "50", "--max-restarts", "1")
    os.kill(training.ranks[1], signal.SIGKILL)
    before, first = len(lines(tmp_path / "run")), training.ranks
    while len(lines(tmp_path / "run")) <= before + 1:  # one step may just have been running
        assert training.launcher.poll() is None
        time.sleep(0.1)
    training.ranks = ranks_of(training.launcher.pid)
    assert not set(first.values()) & set(training.ranks.values())
    os.kill(training.ranks[1], signal.SIGKILL)
    code, said = training.ended(within=20)
    assert (
        code == 1
        and "mismatch-cli: Rank 1 was killed (SIGKILL). Every finished step is recorded" in said
    )
    assert said.count("Training sample_data/model") == 2
    steps = [line["step"] for line in lines(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))


def test_ctrl_c_ends_ranks_that_have_just_begun(tmp_path):
    """One that dies while Python starts is not restarted, whatever --max-restarts says."""
    arguments = [
        *CLI,
        *TRAIN,
        "--engine",
        "hf",
        "--steps",
        "50",
        "--max-restarts",
        "3",
        "--nproc",
        "2",
    ]
    launcher = subprocess.Popen(
        [*arguments, "--output", str(tmp_path / "run")], stderr=subprocess.PIPE, text=True
    )
    while not (begun := ranks_of(launcher.pid)):
        assert launcher.poll() is None
        time.sleep(0.01)
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 130 and said.count("mismatch-cli: Interrupted.") == 1, said
    assert lines(tmp_path / "run") == [] and not any(map(is_alive, begun.values()))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("probe") / "one"
    assert run(*PROBE, "--output", str(folder))[0] == 0
    return folder


def test_probe_and_rescore_write_the_traces_of_one_rank(one_rank, tmp_path):
    """One with a model per rank, the other with one model spread over the ranks."""
    code, said = run(*PROBE, "--nproc", "2", "--output", str(tmp_path / "two"))
    assert code == 0, said
    assert_same_shards(one_rank / "trace", tmp_path / "two" / "trace")
    rescore = ("rescore", str(one_rank), "--trainer-dtype", "float32", "--no-plots", "--quiet")
    for ranks in ((), ("--nproc", "2", "--sharded")):
        code, said = run(*rescore, *ranks, "--output", str(tmp_path / str(len(ranks))))
        assert code == 0, said
    assert_same_shards(tmp_path / "0" / "trace", tmp_path / "3" / "trace")


def test_diagnose_finds_what_one_rank_finds(tmp_path):
    """Responses dealt to ranks with a model each, and scored by one model spread over ranks."""
    diagnose = ("diagnose", "--earlier-model", MODEL, "--quiet", "--no-plots", "--output")
    started = [  # the last two as a cluster would: one by one
        cli(*diagnose, str(tmp_path / "one")),
        launched(*diagnose, str(tmp_path / "dealt"), "--nproc", "2", ranks=2),
        *(
            cli(*diagnose, str(tmp_path / "spread"), "--sharded", env=place)
            for place in as_ranks(2)
        ),
    ]
    for process in started:
        said = process.ended(within=200)
        assert process.returncode == 0, said
    results = []
    for name in ("one", "dealt", "spread"):
        findings = json.loads((tmp_path / name / "summary.json").read_text())["findings"]
        results.append({finding["check"]: finding for finding in findings})
    one, *others = results
    assert one["stale-weights"]["status"] == "clear" and one["stale-weights"]["effect"]
    for other in others:
        assert {name: finding["status"] for name, finding in other.items()} == {
            name: finding["status"] for name, finding in one.items()
        }
        # The trace is from a bfloat16 trainer: other micro-batches choose other kernels, on each
        # processor in its way. The factor is told with two digits; it may move by less than one of
        # the third.
        assert other["stale-weights"]["effect"] == pytest.approx(
            one["stale-weights"]["effect"], rel=1e-3
        )


def assert_same_shards(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.glob("shard-*"))
    assert len(names) > 1 and names == sorted(path.name for path in other.glob("shard-*"))
    for name in names:
        assert pq.read_table(one / name).equals(pq.read_table(other / name)), name


WRONG: list[tuple[Sequence[str], str]] = [
    (("train", "--nproc", "2", "--engine", "hf", "--prompts-per-step", "1", "--minibatches", "1"),
     "2 ranks cannot share 1 problem per step: the responses to a problem stay together. Use "
     "--nproc 1, or"),
    (("train", "--nproc", "2", "--engine", "hf", "--tensor-parallel", "3"),
     "2 ranks cannot form engines of 3 (--tensor-parallel): add --nproc 3, or"),
    (("diagnose", "--nproc", "2"), "--nproc spreads the scoring of a model"),
    (("probe", "--sharded"), "Set how many with --nproc"),
    (("train", "--cpu-offload"), "cpu_offload needs a model"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "sentence"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_what_ranks_cannot_share_gives_one_sentence(tmp_path, arguments, sentence):
    code, said = run(*arguments, "--quiet", "--output", str(tmp_path / "run"))
    messages = [line for line in said.splitlines() if line.startswith("mismatch-cli: ")]
    assert code in (1, 2) and len(messages) == 1 and sentence in messages[0], said
    assert lines(tmp_path / "run") == []


def test_an_existing_folder_is_reported_once_and_not_resumed(tmp_path):
    """Only restarted ranks resume what they find."""
    (tmp_path / "notes.txt").write_text("mine")
    code, said = run(
        *TRAIN, "--engine", "hf", "--nproc", "2", "--max-restarts", "2", "--output", str(tmp_path)
    )
    assert (
        code == 1
        and said.count("mismatch-cli: ")
        == said.count("already exists, but contains no training run")
        == 1
    )
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_rank_whose_peer_ended_says_so(tmp_path):
    ranks = [
        Forked("tests.train.ranks.on_ranks", "deserted", str(tmp_path), env=place)
        for place in as_ranks(2)
    ]
    said, _ = [rank.ended(within=60) for rank in ranks]
    assert (
        "MismatchError: Another rank has ended, and rank 0 cannot continue without it. What was "
        "made" in said
    )
    assert ranks[1].returncode == 0


def test_a_lost_rank_is_not_reported_as_an_engine_failure():
    gone = RuntimeError(
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2946."
    )
    with (
        pytest.raises(RuntimeError, match="Connection closed by peer"),
        engine_failures("sampling", "Nothing is lost"),
    ):
        raise gone


def test_ranks_with_other_settings_say_so(tmp_path):
    """Started one by one, as a cluster would."""
    ranks = [
        cli(
            *TRAIN,
            "--engine",
            "hf",
            "--quiet",
            "--seed",
            seed,
            "--output",
            str(tmp_path / "run"),
            env=environment,
        )
        for seed, environment in zip("12", as_ranks(2), strict=True)
    ]
    said = [rank.ended(within=100) for rank in ranks]
    assert (
        "Rank 1 has seed = 2, and rank 0 has 1. Start every rank with the same command" in said[0]
    )
    assert "Rank 0 has seed = 1, and rank 1 has 2." in said[1]
    assert all(rank.returncode == 1 for rank in ranks)


def test_a_taken_port_gives_one_sentence(tmp_path):
    with socket.create_server(("localhost", 0)) as server:
        environment = as_ranks(2)[0] | {"MASTER_PORT": str(server.getsockname()[1])}
        code, said = run(
            *TRAIN, "--engine", "hf", "--output", str(tmp_path / "run"), environment=environment
        )
    assert code == 1 and "Rank 0 did not find the other ranks at localhost:" in said
