"""verl's batches: the DataProto files of tests/frameworks/recording/real_verl.py, and the same columns in
other files.
"""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mismatch_cli.app.cli import run
from mismatch_cli.frameworks.importing.rows import WRONG_LENGTH
from mismatch_cli.frameworks.verl import pickles as _pickles
from mismatch_cli.frameworks.verl.importer import BYPASSED
from tests.frameworks.importing.layouts import assert_holds, imported, same_bits, write_records
from tests.frameworks.importing.test_torch_files import Harmful
from tests.frameworks.recording.real_verl import samples

SAVED = [Path(__file__).parent / name for name in ("verl_batch.dp", "verl_batch_numpy.dp")]
WHOLE = SAVED[0].read_bytes()
# A file that begins like verl's
HEAD = b"\x80\x04\x8c\x0dverl.protocol\x8c\x09DataProto\x93)\x81"
THEIRS = {
    "prompt_ids": "prompts",
    "response_ids": "responses",
    "loss_mask": "loss_mask",
    "logp_rollout": "rollout_log_probs",
    "logp_trainer": "old_log_probs",
}


def check(path: Path, into: Path) -> tuple[pa.Table, dict[str, Any]]:
    """The rows of a file are verl's samples, to the bit; returns what was imported."""
    table, about = imported(path, into=into)
    rows = [{its: sample[its].tolist() for its in THEIRS.values()} for sample in samples()]
    assert_holds(table, rows, **THEIRS)
    assert table.column("reward").to_pylist() == [row["rm_scores"].sum() for row in samples()]
    groups = table.column("prompt_id").to_pylist()
    assert [groups.index(group) for group in groups] == [0] * 4 + [4] * 4 + [8] * 4
    return table, about


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_a_saved_dataproto(path, tmp_path):
    table, about = check(path, tmp_path / "trace")
    assert set(table.column("step").to_pylist()) == {7}
    assert "old_log_probs" in about["holds"]


def test_the_content_of_a_pickle_decides(tmp_path):
    for name in ("batch.pkl", "run/step_7.pickle"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(WHOLE)
    check(tmp_path / "batch.pkl", tmp_path / "1")
    check(tmp_path / "run", tmp_path / "2")


@pytest.mark.parametrize("kind", ["pt", "jsonl", "parquet"])
def test_its_columns_in_other_files(kind, tmp_path):
    content = _pickles.load(SAVED[0])
    path = tmp_path / f"batch.{kind}"
    tensors = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
    lists = {name: value.tolist() for name, value in tensors.items()} | {
        "uid": list(content["uid"])
    }
    if kind == "pt":
        torch.save(tensors | {"uid": list(content["uid"])}, path)
    elif kind == "jsonl":
        rows = (dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.table(lists), path)
    check(path, tmp_path / "trace")


def test_copied_log_probs_are_not_those_of_the_trainer(tmp_path):
    content = _pickles.load(SAVED[0])
    names = ("prompts", "responses", "response_mask", "attention_mask", "rollout_log_probs")
    torch.save(
        {name: content[name] for name in names} | {"old_log_probs": content["rollout_log_probs"]},
        tmp_path / "b.pt",
    )
    table, about = imported(tmp_path / "b.pt", into=tmp_path / "trace")
    assert "logp_trainer" not in table.column_names
    assert "bypass mode" in " ".join(about["noted"])


def without_ends(value: Any, protocol: int | None = None) -> bytes:
    """A pickle of a value, to be put into another."""
    return pickle.dumps(value, protocol)[2:-1]


HOSTILE = {
    "half": WHOLE[: len(WHOLE) // 2],
    "flipped": WHOLE[:40] + bytes(b ^ 255 for b in WHOLE[40:80]) + WHOLE[80:],
    "empty": HEAD[:30],
    "callable": HEAD + without_ends(Harmful("touched")) + b"b.",
    "nothing": HEAD + b"Nb.",
    "numbers": HEAD + without_ends((1, 2, 3)) + b"b.",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_what_is_not_a_dataproto_is_refused_and_runs_nothing(
    content, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batch.dp").write_bytes(content)
    assert run(["import", "batch.dp"]) == 1
    said = capsys.readouterr().err
    assert "batch.dp" in said and "Traceback" not in said
    assert not (tmp_path / "touched").exists() and not (tmp_path / "import-batch").exists()


def name_of(text: str) -> bytes:
    return b"c" + text.replace(" ", "\n").encode() + b"\n"


def plain(value: Any) -> bytes:
    return without_ends(value, 2)


def pointers(data: bytes, letter: bytes) -> bytes:
    """An array of one object whose type claims to hold none, so that numpy would take bytes for
    an address.
    """
    kind = name_of("numpy dtype") + b"(" + plain("O8") + plain(False) + plain(True) + b"tR"
    kind += b"(" + b"".join(map(plain, (3, "|", None, None, None, -1, -1, 0))) + b"tb"
    empty = name_of("numpy.core.multiarray _reconstruct") + b"("
    empty += name_of("numpy ndarray") + plain((0,)) + letter + b"tR"
    return empty + b"(" + plain(1) + plain((1,)) + kind + plain(False) + data + b"tb"


def test_no_array_is_made_of_pointers(tmp_path):
    """Neither here nor in `.pt` files; runs in a separate process, which would crash."""
    arrays = b"}" + plain("uid") + pointers(b"C\x08" + b"A" * 8, b"C\x01b") + b"s"
    state = b"((" + plain(None) + plain(None) + b"}t" + arrays + plain({}) + b"tb"
    (tmp_path / "batch.dp").write_bytes(
        b"\x80\x02" + name_of("verl.protocol DataProto") + b"(tR" + state + b"."
    )
    address = name_of("_codecs encode") + b"(" + plain("A" * 8) + plain("latin1") + b"tR"
    tokens = plain("tokens") + pointers(address, plain("b"))
    samples = (
        b"}"
        + plain("rollout_id")
        + plain(1)
        + b"s"
        + plain("samples")
        + b"]"
        + b"}"
        + tokens
        + b"s"
        + b"as"
    )
    buffer = io.BytesIO()
    torch.save({}, buffer)
    with zipfile.ZipFile(buffer) as whole, zipfile.ZipFile(tmp_path / "3.pt", "w") as archive:
        for name in whole.namelist():
            archive.writestr(
                name,
                b"\x80\x02" + samples + b"." if name.endswith("data.pkl") else whole.read(name),
            )
    for name in ("batch.dp", "3.pt"):
        typed = [sys.executable, "-m", "mismatch_cli", "import", tmp_path / name]
        ran = subprocess.run(typed, capture_output=True, text=True)
        assert ran.returncode == 1 and name in ran.stderr, ran.stderr


def test_objects_of_other_classes_are_refused_with_the_lines_to_run(tmp_path, capsys):
    """As verl saves images: the error names what would have to be imported."""
    images = {"multi_modal_data": np.array([Harmful("touched")], dtype=object)}
    (tmp_path / "batch.dp").write_bytes(HEAD + without_ends((b"", images, {})) + b"b.")
    assert run(["import", str(tmp_path / "batch.dp")]) == 1
    said = capsys.readouterr()
    assert "could run code" in said.err and "from verl import DataProto" in said.out + said.err


def test_invalid_values(tmp_path, capsys):
    content = _pickles.load(SAVED[0])
    names = (
        "prompts",
        "responses",
        "response_mask",
        "attention_mask",
        "rollout_log_probs",
        "old_log_probs",
    )
    good = {name: content[name] for name in names}
    for change, said in (
        ({"responses": good["responses"][:, :3]}, "does not have one value per"),
        ({"responses": good["responses"].float() + 0.5}, "does not have the layout of"),
        ({"attention_mask": good["attention_mask"] * 2}, "does not have the layout of"),
        (
            {
                "response_mask": good["response_mask"] * 0,
                "attention_mask": good["attention_mask"] * 0,
            },
            "mask is all 0",
        ),
        ({"responses": -good["responses"] - 1}, "not token ids"),
        (
            {"old_log_probs": good["old_log_probs"][..., None]},
            "3 dimensions where a matrix belongs",
        ),
        ({"meta_info": {"global_steps": 10**30}}, "is beyond int32"),
    ):
        torch.save(good | change, tmp_path / "b.pt")
        assert run(["import", str(tmp_path / "b.pt"), "--output", str(tmp_path / "out")]) == 1
        assert said in capsys.readouterr().err, said
    nan = good["old_log_probs"].clone()
    nan[0, 0] = torch.nan
    torch.save(good | {"old_log_probs": nan}, tmp_path / "b.pt")
    _, about = imported(tmp_path / "b.pt", into=tmp_path / "trace")
    assert any("NaN: not measured" in reason for reason in about["noted"])


def row(**changes: Any) -> dict[str, Any]:
    """A response of three tokens, the second from a tool, after a prompt of two, both padded."""
    columns = {
        "prompts": [0, 0, 5, 6],
        "responses": [7, 8, 9, 0],
        "attention_mask": [0, 0, 1, 1, 1, 1, 1, 0],
        "response_mask": [1, 0, 1, 0],
        "rollout_log_probs": [-0.1, -0.2, -0.3, 0.0],
        "old_log_probs": [-0.15, -0.2, -0.35, -5.0],
        "advantages": [0.5, 0.5, 0.5, 0.5],
        "token_level_scores": [0.25, 0.0, 0.5, 0.0],
        "uid": "a",
    }
    return columns | changes


@pytest.mark.parametrize("name", ["batch.jsonl", "batch.parquet"])
def test_columns_that_cannot_be_read_are_refused_in_one_sentence(name, tmp_path, capsys):
    """Without prompts, and with a number where verl has one per token; as verl's, by request."""
    for change in ({"prompts": None}, {"token_level_scores": 1.0}):
        record = {its: value for its, value in row(**change).items() if value is not None}
        path = write_records(tmp_path / name, [record])
        assert run(["import", str(path), "--format", "verl", "--output", str(tmp_path / "o")]) == 1
        shown = capsys.readouterr().err
        assert name in shown and "Traceback" not in shown and "bug" not in shown, shown


def test_a_copy_with_a_missing_value_is_one_too(tmp_path):
    """In bypass mode a NaN of the rollout is copied with the rest; a single difference is a gap."""
    nan = [-0.1, float("nan"), -0.3, 0.0]
    changes = {"rollout_log_probs": nan, "old_log_probs": nan}
    records = [row(**changes), row()]
    records[1]["old_log_probs"] = records[1]["rollout_log_probs"]
    table, about = imported(write_records(tmp_path / "b.jsonl", records), into=tmp_path / "copies")
    assert "logp_trainer" not in table.column_names
    assert about["noted"][BYPASSED] == 2
    records[1]["old_log_probs"] = [-0.1, -0.2, -0.25, 0.0]
    table, about = imported(write_records(tmp_path / "b.jsonl", records), into=tmp_path / "gap")
    assert table.column("logp_trainer").null_count == 0 and BYPASSED not in about["noted"]


@pytest.mark.parametrize("name", ["batch.jsonl", "batch.parquet"])
def test_every_column_of_a_row(name, tmp_path):
    """The rewards of tokens add up, and a row may say its step, under either of verl's names."""
    records = [row(step=4, global_steps=None), row(step=None, global_steps=9, uid="b")]
    table, _ = imported(write_records(tmp_path / name, records), into=tmp_path / "trace")
    assert table.column("prompt_ids").to_pylist() == [[5, 6]] * 2
    assert table.column("response_ids").to_pylist() == [[7, 8, 9]] * 2
    assert table.column("loss_mask").to_pylist() == [[True, False, True]] * 2
    assert same_bits(table, "logp_rollout", [[-0.1, -0.2, -0.3]] * 2)
    assert same_bits(table, "logp_trainer", [[-0.15, -0.2, -0.35]] * 2)
    assert table.column("reward").to_pylist() == [0.75] * 2
    assert table.column("step").to_pylist() == [4, 9]
    assert len(set(table.column("prompt_id").to_pylist())) == 2


def test_a_nested_tensor_with_values_between_its_rows():
    """As after slicing one: rows begin at their offsets and end after their lengths, if any."""
    leaves = {"<NJT_VALUES>x": [9, 1, 2, 9, 3, 9], "<NJT_OFFSETS>x": [1, 4, 5], "y": [7]}
    for lengths, rows in (([2, 1], [[1, 2], [3]]), (None, [[1, 2, 9], [3]])):
        if lengths:
            leaves = {"<NJT_LENGTHS>x": lengths, **leaves}
        else:
            del leaves["<NJT_LENGTHS>x"]
        storage, metadata = b"", {}
        for name, values in leaves.items():
            begin = len(storage)
            storage += np.array(values, np.int64).tobytes()
            metadata[name] = ("torch.int64", (len(values),), begin, len(storage), 0)
        data = torch.frombuffer(bytearray(storage), dtype=torch.uint8)
        tensors = _pickles._consolidated({"leaves": metadata}, data)
        assert [row.tolist() for row in tensors["x"]] == rows
        assert tensors.keys() == {"x", "y"} and tensors["y"].tolist() == [7]


def test_masks_decide_what_is_padding_and_what_is_trained(tmp_path):
    """A tool token at the end is one; without masks nothing is padding; a mask of prompt and
    response that ends within the prompt belongs to another row.
    """
    plain_row = {"attention_mask": None, "response_mask": None, "prompts": [5, 6]}
    records = [
        row(response_mask=[1, 1, 0, 0]),
        row(**plain_row, uid="b"),
        row(attention_mask=[1, 1, 1]),
    ]
    path = write_records(tmp_path / "b.jsonl", records)
    table, about = imported(path, into=tmp_path / "some")
    assert table.column("response_ids").to_pylist() == [[7, 8, 9], [7, 8, 9, 0]]
    assert table.column("prompt_ids").to_pylist() == [[5, 6]] * 2
    assert table.column("loss_mask").to_pylist() == [[True, True, False], [True] * 4]
    assert about["left_out"] == {WRONG_LENGTH.format(name="response_mask"): 1}


@pytest.mark.parametrize("has_trainer", [True, False])
def test_what_a_batch_may_lack(tmp_path, has_trainer):
    """No masks, no log π, one response; prompts are numbered beyond 32 bits."""
    one = {"attention_mask": None, "response_mask": None, "uid": 2**40, "prompts": [5, 6]}
    records = [row(**one, token_level_scores=[0.1, 0.0, 0.0, 1000.5])]
    if not has_trainer:
        del records[0]["old_log_probs"]
    table, _ = imported(write_records(tmp_path / "b.jsonl", records), into=tmp_path / "trace")
    assert table.column("response_ids").to_pylist() == [[7, 8, 9, 0]]
    assert table.column("loss_mask").to_pylist() == [[True] * 4]
    assert ("logp_trainer" in table.column_names) is has_trainer
    assert table.column("prompt_id").to_pylist() == [2**40]
    assert table.column("reward").to_pylist() == [float(np.float32(1000.6))]


def test_a_saved_batch_of_one_response(tmp_path):
    """As a list with one tensor per column, and prompts numbered by a tensor."""
    columns = {name: values for name, values in row().items() if name != "uid"}
    content: dict[str, Any] = {name: [torch.tensor(values)] for name, values in columns.items()}
    torch.save(content | {"uid": torch.tensor([77])}, tmp_path / "b.pt")
    table, _ = imported(tmp_path / "b.pt", into=tmp_path / "trace")
    assert table.column("response_ids").to_pylist() == [[7, 8, 9]]
    assert table.column("prompt_id").to_pylist() == [77]
    assert same_bits(table, "logp_trainer", [[-0.15, -0.2, -0.35]])


def test_a_pickle_of_verl_names_both_its_module_and_its_class(tmp_path):
    for content, expected in ((HEAD, True), (b"verl.other", False), (b"a DataProto", False)):
        (tmp_path / "b.dp").write_bytes(content)
        assert _pickles.is_saved(tmp_path / "b.dp") is expected
