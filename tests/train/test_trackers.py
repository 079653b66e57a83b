"""Each tracker's own files, read with its own library, or how that would be called; and how a
tracker may fail without ending the run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.processes import child
from mismatch_cli.studies.translation import Translation
from mismatch_cli.trace.reader import Trace
from mismatch_cli.train import tracking
from mismatch_cli.train.loop import train
from mismatch_cli.train.metrics_table import flat
from mismatch_cli.train.tracking import TRACKERS, open_trackers, tracker_names
from mismatch_cli.train.train_config import load_config
from tests.paths import ROOT
from tests.processes.kept import kept
from tests.train.commands.test_train_live import wait_for
from tests.train.small_runs import SMALL

pytestmark = pytest.mark.slow

CONFIG = {"algorithm": "dppo-binary-tv", "seed": 7}
STEPS = {step: {"train/reward": 0.25 * step, "mismatch/k3": 1e-5 * step} for step in range(6)}
STEPS[5]["eval/AIME@2024"] = 0.5  # a name that MLflow refuses
NAMES = ["mlflow", "tensorboard", "trackio", "wandb"]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory) -> Iterator[tuple[Path, list[str]]]:
    """All four at once; two sessions, the second of which repeats two steps, as a resumed run
    does.
    """
    folder, said = tmp_path_factory.mktemp("tracked") / "run", list[str]()
    with pytest.MonkeyPatch.context() as environment:
        for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
            environment.delenv(name, raising=False)
        environment.setenv("TRACKIO_DIR", str(folder.parent / "trackio"))
        environment.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for the readers below
        for steps in (range(4), range(2, 6)):
            with open_trackers(NAMES, folder, "proj", config=CONFIG, say=said.append) as trackers:
                for step in steps:
                    trackers.log(step, STEPS[step])
        yield folder, said


def test_all_exist_and_none_complains(tracked):
    folder, said = tracked
    assert len(said) == 8 and all(sentence.startswith("Tracking with") for sentence in said)
    memories = [json.loads((folder / f"trackers/{name}.json").read_text()) for name in NAMES]
    assert [record["step"] for record in memories] == [5] * 4


def test_tensorboard_reads_each_step_once(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tracked[0] / "trackers/tensorboard/run")).Reload()
    events = {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }
    assert events.keys() == STEPS[5].keys()
    for tag, values in events.items():
        expected = [(step, metrics[tag]) for step, metrics in STEPS.items() if tag in metrics]
        assert [step for step, _ in values] == [step for step, _ in expected]
        assert [value for _, value in values] == pytest.approx([value for _, value in expected])
    (settings,) = (tracked[0] / "trackers/tensorboard/run").glob("*/hparams.yml")
    assert "algorithm: dppo-binary-tv" in settings.read_text()


def test_mlflow_reads_each_step_once(tracked):
    from mlflow import MlflowClient

    client = MlflowClient((tracked[0] / "trackers/mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("proj").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.params == {"algorithm": "dppo-binary-tv", "seed": "7"}
    history = client.get_metric_history(run.info.run_id, "mismatch/k3")
    assert [(m.step, m.value) for m in history] == [
        (step, m["mismatch/k3"]) for step, m in STEPS.items()
    ]
    assert run.data.metrics["eval/AIME_2024"] == 0.5


def test_trackio_reads_each_step_once(tracked):
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("proj")
    assert run.name.startswith("run-") and run.config.items() >= CONFIG.items()
    rows = SQLiteStorage.get_logs("proj", run.name)
    assert {row["step"]: {k: row[k] for k in STEPS[row["step"]]} for row in rows} == STEPS
    assert len(rows) == len(STEPS)


def _framed(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file, framed like LevelDB logs; wandb has code for this only in
    Go.
    """
    assert content[:4] == b":W&B"
    at, whole = 7, b""
    while at < len(content):
        if 2**15 - at % 2**15 < 7:  # the rest of a block
            at += 2**15 - at % 2**15
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # complete, or the last part
            yield whole
            whole = b""


def test_wandb_reads_each_step_once(tracked):
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((tracked[0] / "trackers/wandb").glob("offline-run-*/*.wandb"))
    rows: dict[int, dict[str, Any]] = {}
    begun = []
    for path in files:
        for record in map(Record.FromString, _framed(path.read_bytes())):
            if record.HasField("run"):
                begun.append((record.run.project, record.run.display_name, record.run.run_id))
            if record.HasField("history"):
                items = {
                    i.key or "/".join(i.nested_key): json.loads(i.value_json)
                    for i in record.history.item
                }
                assert items["_step"] not in rows
                rows[items["_step"]] = {
                    key: value for key, value in items.items() if not key.startswith("_")
                }
    assert rows == STEPS
    assert len(files) == 2 and len(set(begun)) == 1 and begun[0][:2] == ("proj", "run")


def test_a_network_that_hangs_does_not_stop_the_run(tmp_path, monkeypatch):
    """wandb in online mode, with a server that accepts connections and never answers."""
    monkeypatch.setattr(tracking, "STEP_SECONDS", 0.3)
    monkeypatch.setattr(tracking, "END_SECONDS", 0.5)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with open_trackers(["wandb"], tmp_path, say=said.append) as trackers:
            trackers.log(1, {"train/reward": 1.0})
            silent.settimeout(60)
            _connection, _ = silent.accept()
            time.sleep(0.5)
            for step in range(2, 5):
                trackers.log(step, {"train/reward": 1.0})
                time.sleep(0.4)
    assert len(said) == 2
    assert said[1].startswith(
        "--track wandb ended: it has not responded for 0.3 s. The run continues, and metrics"
    )


def test_a_tracker_that_hangs_never_blocks_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "END_SECONDS", 0.5)
    said: list[str] = []
    with open_trackers(["tensorboard"], tmp_path, say=said.append) as trackers:
        trackers.children["tensorboard"].receive(60)
        (worker,) = kept(trackers.children["tensorboard"])
        os.kill(worker, signal.SIGSTOP)
        began = time.monotonic()
        for step in range(200):
            trackers.log(step, {f"train/{i}": 0.1 for i in range(1000)})  # 3 MB: a pipe holds 64 KB
        assert time.monotonic() - began < 5
    assert said[1].startswith(
        "--track tensorboard ended: it did not finish within 0.5 s. The run continues, and"
    )
    assert said[1].endswith(f" See {tmp_path}/trackers/tensorboard.log.") and len(said) == 2


def test_a_tracker_that_dies_or_cannot_start_is_reported_once(tmp_path):
    said: list[str] = []
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers/tensorboard").write_text("in the way")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/trackers").write_text("no folder")
    with (
        open_trackers(["tensorboard", "mlflow"], tmp_path, say=said.append) as trackers,
        open_trackers(["tensorboard"], tmp_path / "other", say=said.append) as none,
    ):
        os.kill(killed := trackers.children["mlflow"].pid, signal.SIGKILL)
        os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
        for step in range(3):
            trackers.log(step, STEPS[step])
            none.log(step, STEPS[step])
    ends = sorted(sentence for sentence in said if not sentence.startswith("Tracking"))
    assert [end.partition(". The run")[0] for end in ends] == [
        "--track mlflow ended: its process died",
        "--track tensorboard ended: FileExistsError: [Errno 17] File exists: "
        f"'{tmp_path}/trackers/tensorboard'",
        f"--track tensorboard ended: [Errno 17] File exists: '{tmp_path}/other/trackers'",
    ]


def test_a_run_that_is_killed_leaves_the_tracker_time_to_log_the_rest(tmp_path):
    code = (
        "import os, signal; from pathlib import Path; from mismatch_cli.train.tracking import *\n"
        f"with open_trackers(['mlflow'], Path({str(tmp_path)!r}), 'proj') as trackers:\n"
        "    for step in range(6): trackers.log(step, {'train/reward': 0.5})\n"
        "    trackers.children['mlflow'].receive(60)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    store = tmp_path / "trackers/mlflow"
    wait_for(lambda: "status: 3" in _text(store, "meta.yaml"))
    assert len(_text(store, "metrics/train/reward").splitlines()) == 6


def _text(store: Path, file: str) -> str:
    """A file of the only run."""
    return "".join(path.read_text() for path in store.glob(f"[0-9]*/*[0-9a-f]/{file}"))


def test_messages_that_nobody_reads_are_dropped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "_LONGEST_QUEUE", 10_000)
    said: list[str] = []
    with open_trackers(["tensorboard"], tmp_path, say=said.append) as trackers:
        (worker,) = wait_for(lambda: kept(trackers.children["tensorboard"]))
        os.kill(worker, signal.SIGSTOP)
        for step in range(20):
            trackers.log(step, {f"train/{i}": 0.1 for i in range(1000)})
        dropped = trackers.children["tensorboard"].dropped
        os.kill(worker, signal.SIGCONT)
    assert 10 < dropped < 20
    assert said[1].startswith(f"--track tensorboard ended: it was too slow for {dropped} steps. ")


# In the place of a package: it writes down how it is called
RECORDS = """
import os

__version__ = "4.0.0"

class Anything:
    def __init__(self, name):
        self.__dict__["_name"] = name

    def __getattr__(self, name):
        return Anything(f"{self._name}.{name}")

    def __setattr__(self, name, value):
        note(f"{self._name}.{name} = {value!r}")

    def __setitem__(self, name, value):
        note(f"{self._name}[{name!r}] = {value!r}")

    def __call__(self, *args, **kwargs):
        words = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        note(f"{self._name}({', '.join(words)})")
        return None if self._name == "Task.current_task" else self

    def __repr__(self):
        return self._name

def note(line):
    with open(os.environ["CALLS"], "a") as file:
        file.write(line + "\\n")

def __getattr__(name):
    return Anything(name)
"""
CALLS = {
    "aim": (
        "Run(repo='{folder}', experiment='proj')", "Run.name = 'mine'",
        "Run['hparams'] = {settings}", "Run.track(0.25, name='train/reward', step=1)",
        "Run.close()",
    ),
    "clearml": (
        "Task.init(project_name='proj', task_name='mine')",
        "Task.init.connect_configuration({settings})", "Task.init.close()",
    ),
    "comet_ml": (
        "ExperimentConfig(name='mine')",
        "start(project_name='proj', experiment_config=ExperimentConfig)",
        "start.log_parameters({settings})", "start.log_metric('train/reward', 0.25, step=1)",
        "start.end()",
    ),
    "dvclive": (
        "Live(dir='{folder}/mine', resume=False, save_dvc_exp=False)",
        "Live.log_params({settings})", "Live.step = 1", "Live.log_metric('train/reward', 0.25)",
        "Live.end()",
    ),
    "swanlab": (
        "init(project='proj', experiment_name='mine', logdir='{folder}', mode='offline')",
        "config.update({settings}, allow_val_change=True)",
        "init.log({{'train/reward': 0.25, 'mismatch/k3': 1e-05}}, step=1)", "init.finish()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_a_package_that_is_not_installed_here_would_be_called_with(
    name, tmp_path, monkeypatch
):
    packages, calls = tmp_path / "packages", tmp_path / "calls"
    (packages / name).mkdir(parents=True)
    for module in ("__init__", "plots"):
        (packages / name / f"{module}.py").write_text(RECORDS)
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{ROOT}")
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("LOCAL_RANK", "0")  # as in the first of several ranks
    said: list[str] = []
    with open_trackers([name], tmp_path, "proj", "mine", CONFIG, said.append) as trackers:
        trackers.log(1, STEPS[1])
    assert len(said) == 1, said
    words = {"folder": f"{tmp_path}/trackers/{name}", "settings": CONFIG}
    expected = [line.format(**words) for line in CALLS[name]]
    called = calls.read_text().splitlines()
    assert [line for line in called if line in expected] == expected, called


def test_these_are_the_trackers_of_accelerate():
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert set(TRACKERS) == set(LOGGER_TYPE_TO_CLASS) == {*NAMES, *CALLS}


def test_trackers_are_checked_first(monkeypatch):
    assert (
        tracker_names(["trackio,mlflow", "mlflow"]) == ["trackio", "mlflow"]
        and tracker_names(None) == []
    )
    with pytest.raises(UsageError, match="Did you mean trackio"):
        tracker_names(["trackoi"])
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, find=__import__("importlib").util.find_spec: (
            None if name == "wandb" else find(name)
        ),
    )
    with pytest.raises(
        MismatchError, match=r"--track wandb needs wandb, which is not .*'mismatch-cli\[wandb\]'"
    ):
        tracker_names(["wandb"])
    with pytest.raises(MismatchError, match=r"--track aim needs aim, .* with: pip install aim"):
        tracker_names(["aim"])


def test_a_training_run_that_is_killed_and_resumed_repeats_nothing(tmp_path):
    """Step 3 is repeated from the checkpoint of step 2, and tracked once; step 0 is an
    evaluation.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = load_config(
        "miniature",
        SMALL
        | {"max_tokens": 16, "trace_every": 3, "eval_every": 3, "checkpoint_every": 2, "steps": 3},
    )
    folder = tmp_path / "run"

    def run(resume: bool, killed_at: int) -> None:
        with open_trackers(["tensorboard"], folder, run="mine", say=lambda _: None) as trackers:

            def on_step(record: dict[str, Any]) -> None:
                trackers.follow(folder / "metrics.jsonl")
                if record["step"] == killed_at:
                    raise KeyboardInterrupt

            train(config, folder, on_step, resume=resume, framework="trl")

    with pytest.raises(KeyboardInterrupt):
        run(resume=False, killed_at=3)
    run(resume=True, killed_at=0)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    read = EventAccumulator(str(folder / "trackers/tensorboard/mine")).Reload()
    name = "sampling/sampling_logp_difference/mean"
    for tag in ("train/reward", "mismatch/abs_dp_mean", name):
        events = read.Scalars(tag)
        assert [event.step for event in events] == [1, 2, 3]
        assert [e.value for e in events] == pytest.approx(
            [flat(record)[tag] for record in records[1:]]
        )
    assert [event.step for event in read.Scalars("train/eval_accuracy")] == [0, 3]
    for record in records[3:]:  # as TRL: equal to `report --as trl` of that step's trace
        of_trace = Translation.of(
            [Trace.open(folder / f"traces/step-{record['step']}")], "trl"
        ).to_json()
        rows = {row["name"]: row["value"] for row in of_trace["frameworks"]["trl"]["metrics"]}
        assert record["as"]["trl"] == {
            name: value for name, value in rows.items() if value is not None
        }
    import pyarrow.parquet as pq

    assert pq.read_table(folder / "metrics.parquet", columns=["step", name]).to_pylist() == [
        {"step": record["step"], name: flat(record).get(name)} for record in records
    ]
