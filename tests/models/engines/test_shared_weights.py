"""The folder of weights that servers read belongs to the user: only our own files there are
removed.
"""

from __future__ import annotations

from mismatch_cli.models.engines._server_weights import SharedWeights
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.processes.ranks import ALONE
from tests.leftovers import leave_draft
from tests.tiny_models import saved_model


def test_only_our_weights_are_removed_from_a_users_folder(tmp_path):
    folder = tmp_path / "shared"
    (folder / "000001").mkdir(parents=True)  # such as the user's checkpoints
    (folder / "000001" / "model.safetensors").write_bytes(b"theirs")
    (folder / "notes.txt").write_text("theirs")
    leave_draft(folder, "mismatch-cli-weights-000007")
    (folder / "mismatch-cli-weights-000003").mkdir()
    (folder / "mismatch-cli-weights-000003" / "notes.txt").write_text("theirs")
    model = load_causal_lm(str(saved_model(tmp_path, "Qwen3")), device_map="cpu")
    weights = SharedWeights(folder, ALONE)
    for _ in range(2):
        weights.publish(model)
    assert (weights.path / "model.safetensors").is_file()
    weights.remove_older()
    theirs = {"000001", "notes.txt", "mismatch-cli-weights-000003"}
    ours = {path.name for path in folder.iterdir()} - theirs
    assert ours == {weights.path.name}
    weights.remove()
    assert {path.name for path in folder.iterdir()} == theirs
    assert (folder / "000001" / "model.safetensors").read_bytes() == b"theirs"


def test_a_folder_with_nothing_else_in_it_is_removed(tmp_path):
    weights = SharedWeights(tmp_path / "weights", ALONE)
    weights.publish(load_causal_lm(str(saved_model(tmp_path, "Qwen3")), device_map="cpu"))
    weights.remove()
    assert not (tmp_path / "weights").exists()
