"""A real file system that fills up: one sentence that names the file, no partial files, and the
same bits later.
"""

from __future__ import annotations

import shutil

import pytest

from lab.full_disk import CASES, Case, call, disk, try_share, used

_TRAIN = Case(
    "train --engine hf --rollout-dtype float32 --steps 1 --prompts-per-step 2 "
    "--samples-per-prompt 2 --max-tokens 16 --num-problems 2 --eval-samples 1 --eval-every 0 "
    "--checkpoint-every 1 --minibatches 1 --threads 1",
    resumes=True,
    over="",
)


@pytest.fixture
def mounted():
    try:
        with disk() as folder:
            yield folder
    except OSError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "share", "over", "file"),
    [
        (_TRAIN, 0.2, False, "checkpoints/step-000001"),
        (CASES["import"], 0.9, True, ".part/new/trace/vocab.parquet"),
    ],
    ids=["checkpoint", "import"],
)
def test_a_disk_without_room(mounted, tmp_path, case, share, over, file):
    whole = tmp_path / "run"
    code, said = call(case, mounted / "run")
    assert code == 0, said
    needed = used(mounted)
    shutil.move(mounted / "run", whole)
    said, wrong = try_share(case, mounted, whole, int(share * needed), over=over)
    assert not wrong
    assert file in said
