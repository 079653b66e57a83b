"""Traces read in portions, by one process or several: the same bytes, the same errors, and an
end on Ctrl-C.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.processes.workers import Workers
from mismatch_cli.processes.workers import portions as portions_module
from mismatch_cli.processes.workers.portions import Portion, portions
from mismatch_cli.processes.workers.reading import executor, run_pass
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.studies.clipping import analyse_clipping
from mismatch_cli.studies.comparison import analyse_comparison
from mismatch_cli.studies.diagnosis import analyse_diagnosis
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.studies.study import Study
from mismatch_cli.studies.translation import Translation
from mismatch_cli.trace.reader import RowGroup, Trace
from tests.leaves import assert_close
from tests.metrics.clipping.world import world
from tests.studies.compared import FLOAT32, Row, write_rows
from tests.studies.written import write_trace

EACH_SHARD = 1  # bytes of a portion: every shard is a portion


@pytest.fixture
def two_traces(tmp_path) -> list[Trace]:
    """Three shards and two, and one between them without responses."""
    first = write_trace(
        tmp_path / "first", *(world(seed, n) for seed, n in ((0, 24), (1, 12), (2, 24), (3, 12)))
    )
    schema = pq.read_schema(first.shards[1])
    pq.ParquetWriter(first.shards[1], schema).close()
    first = Trace.open(first.folder)
    return [first, write_trace(tmp_path / "second", world(4, 24), world(5, 24), seed=1)]


@pytest.fixture
def in_shards(monkeypatch) -> None:
    monkeypatch.setattr(portions_module, "PORTION_BYTES", EACH_SHARD)


def test_a_portion_ends_with_the_shard_that_makes_it_large_enough(two_traces, monkeypatch):
    sizes = [path.stat().st_size for path in two_traces[0].shards]
    monkeypatch.setattr(portions_module, "PORTION_BYTES", sizes[0] + 1)
    first, second = two_traces
    cuts = portions(two_traces)
    assert [path for portion in cuts for path in portion.shards] == [*first.shards, *second.shards]
    assert {portion.folder: portion.trace for portion in cuts} == {
        first.folder: 0,
        second.folder: 1,
    }
    assert len(cuts[0].shards) >= 2
    for portion in cuts:
        size = sum(path.stat().st_size for path in portion.shards)
        last = portion.shards[-1]
        assert size - last.stat().st_size <= sizes[0]
        assert size > sizes[0] or last in (first.shards[-1], second.shards[-1])


def test_one_rank_s_shards_move_no_boundary_of_another(two_traces, tmp_path):
    """Shards as from recorders of two ranks; the first rank adds more."""
    folder, (content, *_) = tmp_path / "ranks", (path.read_bytes() for path in two_traces[1].shards)
    folder.mkdir()
    shutil.copy(two_traces[1].folder / "manifest.json", folder)
    boundaries = []
    for number in range(4):
        for rank in (0, 1) if number < 2 else (0,):
            (folder / f"shard-{rank:05d}-{number:06d}.parquet").write_bytes(content)
        boundaries.append(
            [[path.name for path in portion.shards] for portion in portions([Trace(folder)])]
        )
    assert [names[-1] for names in boundaries[1:]] == [
        ["shard-00001-000000.parquet", "shard-00001-000001.parquet"]
    ] * 3
    assert [len(names[0]) for names in boundaries] == [1, 2, 3, 4]


STUDIES: dict[str, Callable[[Sequence[Trace], int], Study]] = {
    "report": lambda traces, n: analyse_mismatch(traces, 5, Workers(n)),
    "clipstats": lambda traces, n: analyse_clipping(
        traces, list(TABLE.values()), theory=True, workers=Workers(n)
    ),
    "diagnose": lambda traces, n: analyse_diagnosis(traces, workers=Workers(n)),
    "compare": lambda traces, n: analyse_comparison([*traces, traces[0]], workers=Workers(n)),
    "dialects": lambda traces, n: Translation.of(traces, "all", Workers(n)),
}


@pytest.mark.usefixtures("in_shards")
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        pytest.param("report", (2, 3), marks=pytest.mark.slow),
        ("clipstats", (2,)),
        pytest.param("diagnose", (3,), marks=pytest.mark.slow),
    ],
)
def test_any_number_of_workers_gives_the_same_bytes(two_traces, name, numbers):
    alone, *others = (json.dumps(STUDIES[name](two_traces, n).to_json()) for n in (1, *numbers))
    assert set(others) == {alone}


@pytest.mark.slow
@pytest.mark.usefixtures("in_shards")
def test_tokens_are_compared_across_portions_in_any_order(tmp_path, float32_rows, perturbed):
    """The partners of a portion are in separate shards; half of the responses are not in both
    traces.
    """
    rows = write_rows(tmp_path / "first", float32_rows[:72], FLOAT32, shards=4)
    traces = [Trace.open(rows), Trace.open(perturbed)]
    alone, *others = (
        json.dumps(analyse_comparison(traces, workers=Workers(n)).to_json()) for n in (1, 2, 3)
    )
    assert others == [alone, alone]
    assert json.loads(alone)["comparisons"][0]["on_tokens"]["tokens"] > 1000


@pytest.mark.slow
def test_portions_change_no_count_and_no_printed_digit(two_traces, monkeypatch):
    """Compared with one accumulator that reads everything."""
    for study in STUDIES.values():
        whole = study(two_traces, 1).to_json()
        with monkeypatch.context() as patched:
            patched.setattr(portions_module, "PORTION_BYTES", EACH_SHARD)
            assert_close(study(two_traces, 1).to_json(), whole)


@pytest.mark.slow
@pytest.mark.usefixtures("in_shards")
@pytest.mark.parametrize("number", [1, 2])
def test_progress_counts_every_response_as_it_goes(two_traces, number):
    counts: list[int] = []
    analyse_mismatch(two_traces, 1, Workers(number), on_responses=counts.append)
    assert [count for count in counts if count] == [24, 24, 12, 24, 24]


@pytest.mark.usefixtures("in_shards")
@pytest.mark.parametrize("name", ["report", "compare"])
def test_a_damaged_shard_is_the_same_sentence(two_traces, name):
    path = two_traces[0].shards[2]
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes(4000) + content[4100:])
    said = []
    for number in (1, 2):
        with pytest.raises(MismatchError, match=r"shard-00002\.parquet is damaged") as caught:
            STUDIES[name](two_traces, number)
        said.append(str(caught.value))
    assert said[0] == said[1]


class Readers(Accumulator):
    """Number of responses that each process has read."""

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()


@dataclass(frozen=True)
class Numbering:
    """A pass that returns its process's id, after some time."""

    columns = ()
    seconds: float = 0.0
    slow: bool = False  # except for the first portion
    dies_in: Path | None = None  # a folder that gets a file from each death
    deaths: int = 2

    def begin(self, _portion: Portion) -> Readers:
        return Readers()

    def read(self, readers: Readers, portion: Portion, groups: Iterator[RowGroup]) -> None:
        time.sleep(
            60 if self.slow and "shard-00000" not in portion.shards[0].name else self.seconds
        )
        if self.dies_in is not None and len(list(self.dies_in.iterdir())) < self.deaths:
            (self.dies_in / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        readers.responses[os.getpid()] += sum(group.batch.num_responses for group in groups)


@pytest.mark.usefixtures("in_shards")
def test_one_worker_or_one_portion_is_this_process(two_traces, monkeypatch):
    assert set(run_pass(two_traces, Numbering(), Workers()).responses) == {os.getpid()}
    responses = run_pass(two_traces, Numbering(seconds=0.2), Workers(2)).responses
    assert len(responses) == 2 and os.getpid() not in responses and responses.total() == 108
    monkeypatch.setattr(portions_module, "PORTION_BYTES", 2**30)
    assert set(run_pass(two_traces[:1], Numbering(), Workers(8)).responses) == {os.getpid()}


@pytest.mark.slow
@pytest.mark.usefixtures("in_shards")
def test_killed_workers_are_replaced_until_one_sentence_gives_up(two_traces, tmp_path):
    (tmp_path / "deaths").mkdir()
    dying = Numbering(dies_in=tmp_path / "deaths")
    assert run_pass(two_traces, dying, Workers(2)).responses.total() == 108
    assert len(list((tmp_path / "deaths").iterdir())) >= 2
    with pytest.raises(
        MismatchError, match=r"^A worker process died 3 times, .* Use fewer --workers\.$"
    ):
        run_pass(two_traces, replace(dying, deaths=99), Workers(2))


@pytest.mark.usefixtures("in_shards")
def test_an_error_in_the_parent_ends_the_workers(two_traces):
    """It does not wait for portions that take a minute."""

    def stop(_responses: int) -> None:
        raise InterruptedError

    began = time.monotonic()
    with pytest.raises(InterruptedError), executor(Workers(2), two_traces) as reader:
        reader.reduced(reader.portions, lambda _: Numbering(slow=True), stop)
    assert time.monotonic() - began < 30


INTERRUPTED = """
import sys
from mismatch_cli.processes.workers import portions
portions.PORTION_BYTES = 1
from mismatch_cli.app.cli import main
if __name__ == "__main__":
    sys.argv = ["mismatch-cli", *sys.argv[1:]]
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report", "compare"])
def test_ctrl_c_ends_all_of_it_at_once(tmp_path, float32_rows, command):
    """Sent to the whole group, as by a terminal, while workers are reading or still starting."""
    many: list[Row] = [row | {"step": step} for step in range(160) for row in float32_rows]
    trace = write_rows(tmp_path / "trace", many, FLOAT32, shards=160)
    (tmp_path / "run.py").write_text(INTERRUPTED)
    traces = [str(trace)] * (2 if command == "compare" else 1)
    process = subprocess.Popen(
        [
            sys.executable,
            "run.py",
            command,
            *traces,
            "--workers",
            "2",
            "--quiet",
            "--output",
            "out",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    while len(_children(process.pid)) < 2:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.01)
    time.sleep(0.3)
    workers_there = _children(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and not out
    assert errors == "mismatch-cli: Interrupted.\n"
    assert time.monotonic() - began < 20
    for pid in workers_there:
        assert (
            not Path(f"/proc/{pid}").exists()
            or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
        )


def _children(pid: int) -> list[int]:
    """Its running child processes, except the resource tracker."""
    pids = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):  # it has just ended
            pids += [child.pid] * ("spawn_main" in " ".join(child.cmdline()))
    return pids


def test_python_exits_after_workers_that_ended_in_the_middle_of_a_result(two_traces):
    """A result of 300 MB takes longer to send than its worker has."""
    script = """
import sys
from pathlib import Path
from mismatch_cli.processes.workers import Workers
from mismatch_cli.processes.workers.processes import processes
from mismatch_cli.trace.reader import Trace
if __name__ == "__main__":
    traces = [Trace.open(Path(path)) for path in sys.argv[1:]]
    with processes(Workers(2), traces) as reader:
        results = [reader.pool.submit(bytes, 300_000_000) for _ in range(6)]
        results[0].result()
        raise SystemExit(7)
"""
    program = two_traces[0].folder.parent / "ends.py"
    program.write_text(script)
    folders = [trace.folder for trace in two_traces]
    done = subprocess.run([sys.executable, program, *folders], timeout=60)
    assert done.returncode == 7
