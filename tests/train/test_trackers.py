"""Each tracker's own files, read with its own library; and how a tracker may fail without ending
the run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mismatch_cli.app.trackers import _outlet, asked, flat, names, open_trackers
from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.studies.translation import Translation
from mismatch_cli.trace.reader import Trace
from mismatch_cli.train.loop import train
from mismatch_cli.train.train_config import load_config
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
            with open_trackers(names(), folder, "proj", config=CONFIG, say=said.append) as trackers:
                for step in steps:
                    trackers.log(step, STEPS[step])
        yield folder, said


def test_all_exist_and_none_complains(tracked):
    folder, said = tracked
    assert names() == NAMES
    assert len(said) == 8 and all(sentence.startswith("Tracking with") for sentence in said)
    memories = [json.loads((folder / f"trackers/{name}.json").read_text()) for name in NAMES]
    assert [known["step"] for known in memories] == [5] * 4


def test_tensorboard_reads_each_step_once(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tracked[0] / "trackers/tensorboard/run")).Reload()
    found = {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }
    assert found.keys() == STEPS[5].keys()
    for tag, values in found.items():
        expected = [(step, metrics[tag]) for step, metrics in STEPS.items() if tag in metrics]
        assert [step for step, _ in values] == [step for step, _ in expected]
        assert [value for _, value in values] == pytest.approx([value for _, value in expected])
    (text,) = read.Tensors("config")
    assert 'algorithm = "dppo-binary-tv"' in text.tensor_proto.string_val[0].decode()


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
    found: dict[int, dict[str, Any]] = {}
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
                assert items["_step"] not in found
                found[items["_step"]] = {
                    key: value for key, value in items.items() if not key.startswith("_")
                }
    assert found == STEPS
    assert len(files) == 2 and len(set(begun)) == 1 and begun[0][:2] == ("proj", "run")


def test_a_network_that_hangs_does_not_stop_the_run(tmp_path, monkeypatch):
    """wandb in online mode, with a server that accepts connections and never answers."""
    monkeypatch.setattr(_outlet, "STEP_SECONDS", 0.3)
    monkeypatch.setattr(_outlet, "END_SECONDS", 0.5)
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
    assert len(said) == 2
    assert said[1].startswith(
        "--track wandb ended: it has not responded for 0.3 s. The run continues, and metrics"
    )


def test_a_tracker_that_hangs_never_blocks_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(_outlet, "END_SECONDS", 0.5)
    said: list[str] = []
    with open_trackers(["tensorboard"], tmp_path, say=said.append) as trackers:
        os.kill(trackers._open["tensorboard"]._child.pid, signal.SIGSTOP)
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
        killed = trackers._open["mlflow"]._child
        killed.kill()
        killed.wait()
        for step in range(3):
            trackers.log(step, STEPS[step])
            none.log(step, STEPS[step])
    ends = sorted(sentence for sentence in said if not sentence.startswith("Tracking"))
    assert [end.partition(". The run")[0] for end in ends] == [
        "--track mlflow ended: its process ended with code -9",
        "--track tensorboard ended: FileExistsError: [Errno 17] File exists: "
        f"'{tmp_path}/trackers/tensorboard'",
        f"--track tensorboard ended: [Errno 17] File exists: '{tmp_path}/other/trackers'",
    ]


def test_trackers_are_checked_first(monkeypatch):
    assert asked(["trackio,mlflow", "mlflow"]) == ["trackio", "mlflow"] and asked(None) == []
    with pytest.raises(UsageError, match="Did you mean trackio"):
        asked(["trackoi"])
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, find=__import__("importlib").util.find_spec: (
            None if name == "wandb" else find(name)
        ),
    )
    with pytest.raises(
        MismatchError, match=r"--track wandb needs wandb, which is not .*'mismatch-cli\[wandb\]'"
    ):
        asked(["wandb"])


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
