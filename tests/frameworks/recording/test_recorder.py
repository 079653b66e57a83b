"""A recorder inside a run: its input becomes a trace, and no fault reaches the run."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_cli import Recorder
from mismatch_cli.app.cli import run
from mismatch_cli.base.places import bundled
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.recorder_notes import manifest_with_notes
from tests.studies.compared import rows_of


def response(
    rng: np.random.Generator, step: int = 0, prompt: int = 0, sample: int = 0
) -> dict[str, Any]:
    logq_T = -rng.exponential(1.0, 5).astype(np.float32)
    return {
        "step": step,
        "prompt_id": prompt,
        "sample_index": sample,
        "prompt_ids": [1, 2, prompt],
        "response_ids": rng.integers(0, 500, 5),
        "logp_rollout": logq_T,
        "logp_trainer": logq_T - 0.01,
        "advantage": 0.5,
        "reward": 1.0,
        "finish_reason": "stop",
    }


def counts(**counted: int) -> dict[str, int]:
    return dict.fromkeys(("given", "not sampled", "written", "refused", "lost"), 0) | counted


def test_what_is_added_is_a_trace(tmp_path):
    rng = np.random.default_rng(0)
    responses = [
        response(rng, step, prompt, sample)
        for step in range(2)
        for prompt in range(3)
        for sample in range(2)
    ]
    recorder = Recorder(tmp_path / "run", manifest={"config": {"sampling": {"temperature": 1.0}}})
    for row in responses:
        recorder.add(**row)
    recorder.close()
    rows = rows_of(tmp_path / "run")
    assert len(rows) == len(responses) and recorder.counts == counts(given=12, written=12)
    for row, expected in zip(rows, responses, strict=True):
        assert (
            row["response_ids"] == expected["response_ids"].tolist()
            and row["advantage"] == [0.5] * 5
        )
        np.testing.assert_array_equal(np.float32(row["logp_rollout"]), expected["logp_rollout"])
        assert (row["step"], row["prompt_id"], row["sample_index"]) == tuple(
            expected[name] for name in ("step", "prompt_id", "sample_index")
        )


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_padded_matrices_on_either_side_lose_their_padding(tmp_path, kind):
    prompt_ids, prompt_mask = [[0, 0, 7, 8], [0, 4, 5, 6]], [[0, 0, 1, 1], [0, 1, 1, 1]]
    response_ids, response_mask = [[1, 2, 3], [9, 0, 0]], [[1, 1, 1], [1, 0, 0]]
    logp = [[-0.1, -0.2, -0.3], [-0.4, 0.0, 0.0]]
    recorder = Recorder(tmp_path / "run")
    recorder.add_padded(
        step=3,
        prompt_ids=kind(prompt_ids),
        response_ids=kind(response_ids),
        prompt_mask=kind(prompt_mask),
        response_mask=kind(response_mask),
        logp_rollout=kind(logp),
        logp_trainer=kind(logp),
        advantage=kind([1.0, -1.0]),
    )
    recorder.close()
    first, second = rows_of(tmp_path / "run")
    assert (first["prompt_ids"], second["prompt_ids"]) == ([7, 8], [4, 5, 6])
    assert (first["response_ids"], second["response_ids"]) == ([1, 2, 3], [9])
    np.testing.assert_allclose(second["logp_rollout"], [-0.4])
    assert first["advantage"] == [1.0] * 3 and second["advantage"] == [-1.0] and first["step"] == 3


def test_a_batch_may_be_lists_of_anything_and_is_copied(tmp_path):
    ids, logp = (
        [torch.tensor([1, 2, 3]), torch.tensor([9, 0, 0])],
        [[-0.1, -0.2, -0.3], [-0.4, 0.0, 0.0]],
    )
    recorder = Recorder(tmp_path / "run")
    recorder.add_padded(
        step=[3, 4],
        prompt_ids=((7, 8), (5, 6)),
        response_ids=ids,
        prompt_mask=[[1, 1], [0, 1]],
        response_mask=np.array([[1, 1, 1], [1, 0, 0]]),
        logp_rollout=logp,
        logp_trainer=np.array(logp),
        advantage=torch.tensor([[0.5], [-0.5]], dtype=torch.bfloat16),
        finish_reason=["stop", None],
        reward=[None, 1],
        topk_ids=np.arange(12).reshape(2, 3, 2),
        topk_logp_rollout=np.full((2, 3, 2), -1.0),
        loss_mask=None,
    )
    ids[0][:], logp[0][0] = 0, -9.0  # the run changes its own arrays
    recorder.add_padded(
        step=5, prompt_ids=np.zeros((0, 2)), response_ids=[], prompt_mask=[], response_mask=[]
    )
    recorder.close()
    first, second = rows_of(tmp_path / "run")
    assert recorder.counts == counts(given=2, written=2)
    assert (first["prompt_ids"], second["prompt_ids"], first["response_ids"]) == (
        [7, 8],
        [6],
        [1, 2, 3],
    )
    np.testing.assert_allclose(first["logp_rollout"], [-0.1, -0.2, -0.3])
    assert (first["advantage"], second["advantage"]) == ([0.5] * 3, [-0.5])
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "unknown")
    assert (first["reward"], second["reward"], second["topk_ids"]) == (None, 1, [6, 7])


def test_unrecordable_responses_are_counted_and_the_run_continues(tmp_path, caplog):
    rng = np.random.default_rng(0)
    recorder = Recorder(tmp_path / "run", vocabulary=500)
    good = response(rng)
    refused = (
        {"logp_rollout": [-0.1]}, {"response_ids": [1.5] * 5}, {"response_ids": [900] * 5}, {"nonsense": 1},
        {"prompt_ids": None}, {"logp_rollout": "text"}, {"step": "one"}, {"step": 2**40}, {"prompt_id": [1, 2]},
        {"response_ids": []}, {"advantage": [1.0, 2.0]}, {"loss_mask": [2] * 5}, {"reward": "good"},
        {"logp_trainer": object()}, {"sample_index": np.nan}, {"topk_ids": [1, 2, 3]}, {"prompt_ids": [[1], "a"]},
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        for change in refused:
            recorder.add(**good | change)
        recorder.add(**{name: value for name, value in good.items() if name != "step"})
        recorder.add_padded(
            prompt_ids=3, response_ids=[[1, 2]], prompt_mask=[[1]], response_mask=[[1, 1]], step=0
        )
        recorder.add_padded(
            prompt_ids=[[1]], response_ids=torch.tensor([[1, 2], [3, 4]]), prompt_mask=[[1]], step=0
        )
        recorder.add_padded(response_ids=torch.tensor(1))
        recorder.add(**good)
        recorder.add(**good | {"reward": np.inf, "sample_index": 1})
        recorder.close()
        recorder.add(**good)
    first, second = rows_of(tmp_path / "run")
    # Not a number: left empty, as in an import
    assert first["reward"] == 1.0 and second["reward"] is None
    assert recorder.counts == counts(
        given=len(refused) + 8, written=2, refused=len(refused) + 2, lost=4
    )
    # One at the first fault, one at the end
    first, last = (record.getMessage() for record in caplog.records)
    assert (
        "step is missing" in first
        and f"2 of {len(refused) + 7} responses recorded in {tmp_path}/run, 1 step" in last
    )
    note = json.loads((tmp_path / "run" / "recorder-00000.json").read_text())
    assert sum(note["left_out"].values()) == len(refused) + 2 and note["closed"]
    assert note["left_out"]["responses without a step"] == 1


def test_the_end_names_the_reasons_for_what_is_missing(tmp_path, caplog):
    good = response(np.random.default_rng(0), step=1)
    recorder = Recorder(tmp_path / "run")
    recorder.add(**good)
    for change in ({"step": None}, {"step": None}, {"logp_trainr": 1}):
        recorder.add(**good | change)
    recorder.add_padded(**batch(advantage=np.ones(8)))
    recorder.add_padded(**batch(step=None))
    recorder.close()
    assert recorder.counts == counts(given=12, written=1, refused=7, lost=4)
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith(
        "step is missing (which training step is it?): not recorded. Training continues"
    )
    assert "7 refused (6 responses without a step, 1 response with an unknown column" in last
    assert "4 lost (first: ValueError: advantage has 8 rows, but response_mask has 4" in last
    left_out = manifest_with_notes(tmp_path / "run")["imported"]["left_out"]
    assert left_out["responses without a step"] == 6


def test_a_response_without_a_step_is_refused_however_few_prompts_are_recorded(tmp_path):
    recorder = Recorder(tmp_path / "run", every=2**40)
    recorder.add(**response(np.random.default_rng(0)))
    recorder.add_padded(**batch(step=None))
    recorder.close()
    assert recorder.counts == counts(given=5, refused=4) | {"not sampled": 1}


def test_the_end_names_few_of_many_reasons(tmp_path, caplog):
    recorder = Recorder(tmp_path / "run")
    for number in range(9):
        recorder.add(**response(np.random.default_rng(0)) | {f"strange_{number}": 1})
    recorder.close()
    last = caplog.records[-1].getMessage()
    assert last.count("unknown column") == 5 and ", others for 4 more reasons)" in last


def test_a_misspelt_key_of_the_manifest_is_named_once_and_kept(tmp_path, caplog):
    facts = {
        "rollout": {"engin": "vllm", "model": "m", "engine_build": "abc"},
        "trainer": {"dtpe": "float32", "dtype": "float32"},
        "sampling": {"temprature": 0.7, "top_p": 1.0},
    }
    recorders = [Recorder(tmp_path / "run", rank=rank, manifest=facts) for rank in (0, 1)]
    for recorder in recorders:
        recorder.close()
    (warning,) = caplog.records
    assert warning.getMessage() == (
        "Unknown keys of the manifest: rollout.engin (engine?), sampling.temprature "
        "(temperature?). They are kept."
    )
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["rollout"]["engin"] == "vllm" and manifest["rollout"]["engine"] is None


def test_values_that_were_not_measured_are_nan(tmp_path):
    logp_T = [np.nan, -0.5, None, 0.0, -np.inf]
    recorder = Recorder(tmp_path / "run")
    recorder.add(
        **response(np.random.default_rng(0)) | {"logp_trainer": logp_T, "advantage": np.nan}
    )
    recorder.close()
    (row,) = rows_of(tmp_path / "run")
    np.testing.assert_array_equal(
        np.float32(row["logp_trainer"]), np.float32([np.nan, -0.5, np.nan, 0.0, -np.inf])
    )
    imported = Trace.open(tmp_path / "run").manifest["imported"]
    assert "that is NaN: not measured" in " ".join(imported["noted"])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report", "clipstats", "compare", "diagnose", "gate"])
def test_every_command_reads_it_whatever_the_run_states(tmp_path, command, capsys):
    statements = (
        {},
        {"rollout": {"engine": "sglang"}, "trainer": {"name": "megatron", "dtype": torch.bfloat16}},
        {"rollout": {"model": "m", "dtype": None}, "trainer": {}, "sampling": {"temperature": 0.7}},
        {"rollout": {"dtype": 16}},  # not the name of a type: the trace is recorded without it
    )
    rng = np.random.default_rng(0)
    for number, manifest in enumerate(statements):
        folder = tmp_path / str(number)
        recorder = Recorder(folder, manifest=manifest)
        for prompt, sample in np.ndindex(4, 4):
            recorder.add(
                **response(rng, 0, prompt, sample)
                | {"advantage": sample - 1.5, "finish_reason": None}
            )
        recorder.close()
        named = [folder, folder] if command == "compare" else [folder]
        code = run(
            [command, *map(str, named), "--full", *["--limits", "slime"] * (command == "gate")]
        )
        said = " ".join(capsys.readouterr().out.split()).replace("None is a finding", "")
        assert code in (0, 3) and "None" not in said, said
        assert (
            number != 1
            or command == "gate"
            or ("sglang" in said and "megatron" in said and "bfloat16" in said)
        )


def test_a_folder_of_another_run_is_left_alone(tmp_path, caplog):
    of_probe, of_run = (
        shutil.copytree(bundled("traces/fp8-kv"), tmp_path / "probe"),
        tmp_path / "run",
    )
    other = Recorder(of_run, manifest={"rollout": {"engine": "vllm", "model": "a"}})
    other.add(**response(np.random.default_rng(0)))
    other.close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    cases = itertools.product((of_probe, of_run), (0, 1), (False, True))
    for step, (folder, rank, resume) in enumerate(cases):
        caplog.clear()
        facts = {"rollout": {"engine": "vllm", "model": "b"}}
        recorder = Recorder(folder, rank=rank, manifest=facts, resume=resume)
        recorder.add(**response(np.random.default_rng(0), step))
        recorder.close()
        assert recorder.counts == counts(given=1, written=1), "nothing is lost"
        assert recorder.folder != folder and caplog.text.count(f"{recorder.folder}") >= 2, (
            "said at start and end"
        )
    assert {path: path.read_bytes() for path in before} == before


def test_an_empty_recording_is_replaced(tmp_path, caplog):
    """A run crashed before its first batch; the next one has another setting."""
    folder = tmp_path / "run"
    for dtype in ("bfloat16", "float32"):
        recorder = Recorder(folder, manifest={"trainer": {"name": "mine", "dtype": dtype}})
        if dtype == "float32":
            for sample in range(8):
                recorder.add(**response(np.random.default_rng(0)) | {"sample_index": sample})
        recorder.close()
    assert recorder.counts == counts(given=8, written=8) and not caplog.text
    assert Trace.open(folder).manifest["trainer"]["dtype"] == "float32"


def test_a_start_that_is_no_resume_gets_its_own_folder(tmp_path, caplog):
    """Yesterday's script with yesterday's settings: neither day is mixed into the other."""
    for day, steps in enumerate((range(2), range(4), range(3))):
        recorder = Recorder(tmp_path / "run")
        for step in steps:
            recorder.add(**response(np.random.default_rng(day), step))
        recorder.close()
    assert recorder.folder == tmp_path / "run-3"
    assert (
        f"Recording into {tmp_path}/run-3." in caplog.text
        and "3 of 3 responses recorded in" in caplog.text
    )
    steps_of_runs = [
        [row["step"] for row in rows_of(tmp_path / name)] for name in ("run", "run-2", "run-3")
    ]
    assert steps_of_runs == [[0, 1], [0, 1, 2, 3], [0, 1, 2]]
    resumed = Recorder(tmp_path / "run", resume=lambda: True)  # the newest
    resumed.add(**response(np.random.default_rng(9), 3))
    resumed.close()
    assert resumed.folder == tmp_path / "run-3" and len(rows_of(tmp_path / "run-3")) == 4


def test_ranks_of_a_new_run_agree_on_its_folder(tmp_path):
    """Rank 1 is slow: rank 0 has written by then. Then rank 1 is first."""
    for order in ((0, 1), (1, 0), (0, 1)):
        ranks = []
        for rank in order:
            ranks.append(Recorder(tmp_path / "run", rank=rank))
            ranks[-1].add(**response(np.random.default_rng(rank), prompt=rank))
            ranks[-1].flush()
        assert len({recorder.folder for recorder in ranks}) == 1
        for recorder in ranks:
            recorder.close()
    for name in ("run", "run-2", "run-3"):
        assert sorted(row["prompt_id"] for row in rows_of(tmp_path / name)) == [0, 1]


def batch(**changes: Any) -> dict[str, Any]:
    ids = np.arange(1, 13).reshape(4, 3)
    columns = {
        "step": 0,
        "prompt_ids": ids,
        "response_ids": ids,
        "logp_rollout": -ids / 10,
        "prompt_id": range(4),
    }
    columns["prompt_id"] = list(columns["prompt_id"])
    return columns | {"prompt_mask": ids > 0, "response_mask": ids > 0} | changes


def test_a_batch_whose_columns_do_not_belong_together_is_not_recorded(tmp_path, caplog):
    recorder = Recorder(tmp_path / "run")
    for change in (
        {"response_mask": np.ones((3, 3))},
        {"advantage": np.ones(8)},
        {"prompt_mask": np.ones((3, 3))},
        {"reward": [1.0] * 3},
        {"finish_reason": ["stop"] * 5},
    ):
        recorder.add_padded(**batch(**change))
    assert recorder.counts["lost"] == 4 * 5 and "rows, but response_mask" in caplog.text
    # Two tokens each, so that a matrix of width 2 looks already cut
    short = np.tile([0, 1, 1], (4, 1))
    recorder.add_padded(**batch(response_mask=short, logp_rollout=np.full((4, 2), -1.0)))
    recorder.add_padded(**batch(response_mask=short, step=1))
    recorder.close()
    assert recorder.counts == counts(given=28, written=4, refused=4, lost=20)


@pytest.mark.parametrize(
    ("change", "written"),
    [
        ({"prompt_mask": [[1], [1], [1], [1]]}, 0),
        ({"prompt_ids": [1, 2, 3, 4]}, 0),
        ({"prompt_ids": [[1, 2, 3], [4, 5], [6, 7, 8], [9, 9, 9]]}, 3),
        ({"response_mask": [[0, 1]] * 4}, 0),
        ({"response_mask": [[1, 1, 1]] * 3 + [[0, 0, 1]]}, 4),
    ],
)
def test_ids_in_lists_are_as_many_as_the_tokens_of_their_mask(tmp_path, change, written):
    """Lists that are not as wide as the mask are taken as cut, with any padding in them."""
    recorder = Recorder(tmp_path / "run")
    lists = {name: batch()[name].tolist() for name in ("prompt_ids", "response_ids")}
    lists["logp_rollout"] = (-batch()["response_ids"] / 10).tolist()
    recorder.add_padded(**batch(**lists | change))
    recorder.close()
    assert recorder.counts == counts(given=4, written=written, refused=4 - written)


def test_folders_with_other_content_are_left_alone(tmp_path, caplog):
    shutil.copytree(bundled("traces/fp8-kv"), tmp_path / "inner/trace")
    shutil.copytree(bundled("traces/fp8-kv"), tmp_path / "shards")
    (tmp_path / "shards/manifest.json").unlink()
    for folder, rank, written in (("inner", 0, 1), ("shards", 0, 1), ("new", -1, 0)):
        caplog.clear()
        recorder = Recorder(tmp_path / folder, rank=rank)
        recorder.add(**response(np.random.default_rng(0)))
        recorder.close()
        assert recorder.counts == counts(given=1, written=written, lost=1 - written)
        assert (f"Recording into {tmp_path / folder}-2" if written else "rank is -1") in caplog.text


def test_a_removed_folder_is_created_again(tmp_path):
    recorder, rng = Recorder(tmp_path / "run"), np.random.default_rng(0)
    recorder.add(**response(rng))
    recorder.flush()
    shutil.rmtree(tmp_path / "run")
    recorder.add(**response(rng, 1))
    recorder.close()
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1]
    assert "1 of 2 shards exist" in " ".join(Trace.open(tmp_path / "run").completeness.reasons)


def test_a_forked_child_neither_records_nor_keeps_the_folder(tmp_path):
    script = (
        "import os, sys, time; from mismatch_cli import Recorder\n"
        "recorder = Recorder(sys.argv[1])\n"
        "if not os.fork():\n"
        "    recorder.add(step=1, prompt_ids=[1], response_ids=[2], logp_rollout=[-0.1])\n"
        "    print(recorder.counts['lost'], flush=True); recorder.close(); time.sleep(20); "
        "os._exit(0)\n"
        "time.sleep(0.5); os.kill(os.getpid(), 9)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, tmp_path / "run"], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "1\n"
        parent.wait()
        restarted = Recorder(tmp_path / "run")  # while the child is alive
        restarted.add(**response(np.random.default_rng(0)))
        restarted.close()
        assert restarted.counts == counts(given=1, written=1)


@pytest.mark.parametrize(
    "note", ["{}", "[]", '{"shards": {"a": 1}}', "no JSON", '{"shards": {}, "rank": "0"}']
)
def test_a_damaged_note_is_reported(tmp_path, note, capsys, caplog):
    recorder = Recorder(tmp_path / "run")
    recorder.add(**response(np.random.default_rng(0)))
    recorder.close()
    (tmp_path / "run/recorder-00000.json").write_text(note)
    assert run(["report", str(tmp_path / "run")]) == 1
    assert "recorder-00000.json is damaged" in capsys.readouterr().err
    retry = Recorder(tmp_path / "run", resume=True)
    assert "is damaged" in caplog.text and retry.folder == tmp_path / "run-2", "nothing is lost"
    retry.close()


def test_reasons_do_not_grow_with_refused_values(tmp_path):
    recorder = Recorder(tmp_path / "run")
    for number in range(50):
        recorder.add(**response(np.random.default_rng(0)) | {"reward": f"text {number}"})
    recorder.close()
    note = json.loads((tmp_path / "run/recorder-00000.json").read_text())
    assert note["left_out"] == {"responses whose reward has an invalid value": 50}
    assert "text 0" in str(note["left_out_first"])


def test_the_first_value_of_each_reason_is_in_the_manifest(tmp_path):
    recorder = Recorder(tmp_path / "run")
    for reward in ("a text", "another"):
        recorder.add(**response(np.random.default_rng(0)) | {"reward": reward})
    recorder.close()
    ((reason, first),) = manifest_with_notes(tmp_path / "run")["imported"]["left_out_first"].items()
    assert reason == "responses whose reward has an invalid value" and "a text" in first
    path = tmp_path / "run/recorder-00000.json"
    note = json.loads(path.read_text())
    later = note | {"rank": 1, "shards": {}, "left_out_first": {reason: "a later row"}}
    (tmp_path / "run/recorder-00001.json").write_text(json.dumps(later))
    assert manifest_with_notes(tmp_path / "run")["imported"]["left_out_first"] == {reason: first}
    (tmp_path / "run/recorder-00001.json").unlink()
    path.write_text(json.dumps(note | {"left_out_first": [reason]}))
    assert manifest_with_notes(tmp_path / "run")["imported"]["left_out_first"] == {}


@pytest.mark.slow
def test_a_full_disk_costs_responses_but_not_the_run(tmp_path):
    """The system really refuses files beyond 64 KiB, until the limit is lifted."""
    script = (
        "import json, resource, signal, sys, numpy as np; from mismatch_cli.frameworks.recording import "
        "Recorder\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "recorder, rng = Recorder(sys.argv[1]), np.random.default_rng(0)\n"
        "for step, limit in ((0, -1), (1, 2**16), (2, 2**16), (3, -1)):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))\n"
        "    logp_T = -rng.exponential(size=50_000).astype('f')\n"
        "    recorder.add(step=step, prompt_ids=[1], response_ids=rng.integers(0, 9, 50_000), "
        "logp_rollout=logp_T)\n"
        "    recorder.flush()\n"
        "recorder.close(); print(json.dumps(recorder.counts))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "run"], capture_output=True, text=True, check=True
    )
    assert json.loads(ran.stdout) == counts(given=4, written=2, lost=2)
    # When it happens, and again among the reasons at the end
    warnings = [line for line in ran.stderr.splitlines() if "responses are lost" in line]
    assert len(warnings) == 2 and all("File too large" in line for line in warnings)
    trace = Trace.open(tmp_path / "run")
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [
        0,
        3,
    ] and not trace.completeness.partial
    assert trace.manifest["imported"]["left_out"] == {"responses that could not be written": 2}
    assert not [*(tmp_path / "run").glob("*.part")]


def test_a_hanging_disk_costs_responses_but_not_the_run(tmp_path, monkeypatch, caplog):
    """A mock: no disk here is slower than the run's patience."""
    slow = threading.Event()
    monkeypatch.setattr(
        "mismatch_cli.frameworks.recording._rank.write_shard", lambda *_: slow.wait(20)
    )
    monkeypatch.setattr("mismatch_cli.frameworks.recording._thread._PATIENCE", 0.2)
    monkeypatch.setattr("mismatch_cli.frameworks.recording._thread._SHARD_TOKENS", 1)
    recorder = Recorder(tmp_path / "run")
    began = time.monotonic()
    for step in range(8):  # one is being written, four wait, and the rest find no place
        recorder.add(**response(np.random.default_rng(0), step))
    recorder.flush()
    assert time.monotonic() - began < 10 and recorder.counts["lost"] == 3
    assert "the disk accepted nothing for 0.2 seconds" in caplog.text
    slow.set()
    recorder.close()


def test_a_folder_that_cannot_be_written_warns_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        recorder = Recorder(tmp_path / "file" / "run")
        for _ in range(3):
            recorder.add(**response(np.random.default_rng(0)))
        recorder.flush()
        recorder.close()
    first, last = (record.getMessage() for record in caplog.records)
    assert "Training continues" in first and recorder.counts["lost"] >= 3
    assert "0 of 3 responses recorded" in last and "3 lost" in last


def test_all_ranks_choose_the_same_prompts(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        response(rng, step, prompt, sample)
        for step in range(20)
        for prompt in range(20)
        for sample in range(2)
    ]
    chosen = []
    for rank in range(2):
        recorder = Recorder(tmp_path / str(rank), every=4)
        for row in rows:
            recorder.add(**row)
        recorder.close()
        chosen.append({(row["step"], row["prompt_id"]) for row in rows_of(tmp_path / str(rank))})
        assert len(rows_of(tmp_path / str(rank))) == 2 * len(chosen[-1])  # complete groups
    padded = Recorder(tmp_path / "padded", every=4)
    for step in range(20):
        at_step = [row for row in rows if row["step"] == step]
        mask = np.ones((len(at_step), 5))
        matrices = {name: [row[name] for row in at_step] for name in at_step[0] if name != "step"}
        padded.add_padded(step=step, prompt_mask=mask[:, :3], response_mask=mask, **matrices)
    padded.close()
    assert rows_of(tmp_path / "padded") == rows_of(tmp_path / "0")
    assert (
        padded.counts["written"] + padded.counts["not sampled"]
        == padded.counts["given"]
        == len(rows)
    )
    assert chosen[0] == chosen[1] and chosen[0]


@pytest.mark.parametrize("every", [2, 4, 10])
def test_one_of_every_so_many_prompts_is_recorded(tmp_path, every):
    """Within 4 standard deviations of 6,000 draws."""
    steps, prompts = 60, 100
    row = {"prompt_ids": [1], "response_ids": [2], "logp_rollout": [-0.5]}
    recorder = Recorder(tmp_path / "run", every=every)
    for step in range(steps):
        for prompt in range(prompts):
            recorder.add(step=step, prompt_id=prompt, **row)
    recorder.close()
    draws, share = steps * prompts, 1 / every
    error = 4 * (draws * share * (1 - share)) ** 0.5
    assert abs(recorder.counts["written"] - draws * share) < error


def test_two_recorders_of_one_rank_do_not_mix(tmp_path, caplog):
    first, second = Recorder(tmp_path / "run"), Recorder(tmp_path / "run")
    for recorder in (first, second):
        recorder.add(**response(np.random.default_rng(0)))
        recorder.close()
    assert f"Recording into {tmp_path}/run-2" in caplog.text
    assert len(rows_of(tmp_path / "run")) == len(rows_of(tmp_path / "run-2")) == 1


def test_ranks_share_a_folder(tmp_path):
    recorders = [Recorder(tmp_path / "run", rank=rank) for rank in range(3)]
    for rank, recorder in enumerate(recorders):
        recorder.add(**response(np.random.default_rng(rank), prompt=rank))
    for recorder in recorders:
        recorder.close()
    assert sorted(row["prompt_id"] for row in rows_of(tmp_path / "run")) == [0, 1, 2]


_STEPS, _RANKS = 60, 2
_KILLED = f"""
import sys, numpy as np; from mismatch_cli import Recorder
folder, rank = sys.argv[1], int(sys.argv[2])
recorder = Recorder(folder, rank=rank, resume=True)
for step in range({_STEPS}):
    for sample in range(3):
        logp_T = np.full(2000, -0.001 * (1 + step), dtype="f")
        recorder.add(step=step, prompt_id=rank, prompt_ids=[1], response_ids=[step] * 2000, logp_rollout=logp_T)
    if step % 2: recorder.flush()
    if step % 2: print(step, flush=True)
recorder.close()
"""


@pytest.mark.slow
def test_kills_at_any_moment_lose_nothing_that_was_flushed_and_nothing_counts_twice(tmp_path):
    """Two ranks are killed and restarted from the beginning until each has finished."""
    folder, delays = tmp_path / "run", np.random.default_rng(7).uniform(0.35, 0.8, (4, _RANKS))
    flushed = [-1] * _RANKS
    for seconds in (*delays, (None,) * _RANKS):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _KILLED, folder, str(rank)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(_RANKS)
        ]
        for rank, process in enumerate(ranks):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds[rank])
            process.kill()
            flushed[rank] = max([flushed[rank], *map(int, process.communicate()[0].split())])
        if (folder / "manifest.json").exists() and [*folder.glob("shard-*")]:
            steps = [
                {row["step"] for row in rows_of(folder) if row["prompt_id"] == rank}
                for rank in range(_RANKS)
            ]
            assert all({*range(flushed[rank] + 1)} <= steps[rank] for rank in range(_RANKS))
    rows = rows_of(folder)
    assert all({*row["response_ids"]} == {row["step"]} for row in rows)
    occurrences = Counter((row["prompt_id"], row["step"]) for row in rows)
    assert (
        occurrences == dict.fromkeys(np.ndindex(_RANKS, _STEPS), 3)
        and not Trace.open(folder).completeness.partial
    )
    assert not [*folder.glob("*.part")]


def test_samples_without_an_index_are_numbered(tmp_path):
    recorders = [Recorder(tmp_path / "run", rank=rank) for rank in range(2)]
    for recorder in recorders:
        for step, prompt in ((0, 5), (0, 5), (1, 5), (0, 6), (0, 5)):
            recorder.add(
                **response(np.random.default_rng(0), step, prompt) | {"sample_index": None}
            )
        recorder.close()
    rows = rows_of(tmp_path / "run")
    keys = [(row["step"], row["prompt_id"], row["sample_index"]) for row in rows]
    assert len(set(keys)) == len(keys) == 10
    assert keys[:5] == [(0, 5, 0), (0, 5, 1), (1, 5, 0), (0, 6, 0), (0, 5, 2)]


def test_samples_without_an_index_are_numbered_within_their_prompt_if_it_has_no_id(tmp_path):
    recorder = Recorder(tmp_path / "run")
    for prompt in (5, 5, 6, 5, 6):
        row = response(np.random.default_rng(0), prompt=prompt)
        recorder.add(**row | {"prompt_id": None, "sample_index": None})
    recorder.close()
    rows = rows_of(tmp_path / "run")
    assert [row["sample_index"] for row in rows] == [0, 1, 0, 2, 1]


def test_a_restarted_run_counts_nothing_twice(tmp_path):
    rng = np.random.default_rng(0)
    for steps in (range(4), range(2, 6)):  # from the checkpoint of step 2
        recorder = Recorder(tmp_path / "run", resume=True)
        for step in steps:
            recorder.add(**response(rng, step))
            recorder.flush()
        recorder.close()
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [0, 1, 2, 3, 4, 5]
    note = json.loads((tmp_path / "run" / "recorder-00000.json").read_text())
    assert [facts["rows"] for facts in note["shards"].values()] == [
        1
    ] * 6 and "repeated responses" in " ".join(note["left_out"])


def test_a_growing_trace_is_read_and_reported_as_unfinished(tmp_path):
    recorder = Recorder(tmp_path / "run")
    recorder.add(**response(np.random.default_rng(0)))
    recorder.flush()
    assert len(rows_of(tmp_path / "run")) == 1
    assert "still being recorded" in " ".join(Trace.open(tmp_path / "run").completeness.reasons)
    recorder.add(**response(np.random.default_rng(0), step=1))
    recorder.close()
    assert not Trace.open(tmp_path / "run").completeness.partial
    next((tmp_path / "run").glob("shard-*")).unlink()
    assert "1 of 2 shards exist" in " ".join(Trace.open(tmp_path / "run").completeness.reasons)


def test_it_needs_only_numpy_and_pyarrow():
    script = (
        "import sys, mismatch_cli.frameworks.recording\n"
        "print(sorted(m for m in ('torch', 'typer', 'rich', 'pandas', 'orjson', 'matplotlib') if "
        "m in sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True
        ).stdout.strip()
        == "[]"
    )
