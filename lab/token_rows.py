"""The cost of a row per token: as one frame, frame by frame, with one more mask, and as exported
files.

    python -m lab.token_rows                   # 4 million tokens with top-20 columns: 2 GB of disk
    python -m lab.token_rows --tokens 16000000 # which takes more memory?

Every job runs in its own process with one thread; CPU seconds exclude imports, except for pandas
(0.3 s).
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import mismatch_cli
from lab.child import Job, Plan, main
from mismatch_cli.trace.reader import Trace

COLUMNS = (
    "version_rollout", "version_trainer", "reward", "loss_mask", "rank_rollout", "logp_trainer",
    "logp_recomputed",
    "logp_trainer_repeat", "entropy_trainer", "rank_trainer", "advantage",
)  # fmt: skip
TOPK = ("topk_ids", "topk_logp_rollout", "topk_logp_trainer", "topk_logp_recomputed")


def tokens(trace: Trace, _columns: tuple[str, ...]) -> None:
    """All rows as one frame."""
    assert len(mismatch_cli.open(trace.folder).tokens)


def frames(trace: Trace, _columns: tuple[str, ...]) -> None:
    """A frame at a time."""
    assert sum(map(len, mismatch_cli.open(trace.folder).token_frames()))


def export(kind: str, trace: Trace, _columns: tuple[str, ...]) -> None:
    """What `report --export` writes."""
    from mismatch_cli.studies.tokens import token_tables
    from mismatch_cli.trace.export import export_tokens

    with tempfile.TemporaryDirectory() as folder:
        export_tokens(token_tables([trace]), Path(folder), kind)


JOBS: dict[str, Job] = {
    "tokens": tokens,
    "frames": frames,
    "parquet": partial(export, "parquet"),
    "csv": partial(export, "csv"),
}
PLAN: Plan = (
    ("tokens", "tokens, one frame", (*COLUMNS, *TOPK), None),
    ("frames", "token_frames()", (*COLUMNS, *TOPK), None),
    ("parquet", "--export parquet", (*COLUMNS, *TOPK), None),
    ("csv", "--export csv", (*COLUMNS, *TOPK), None),
)

if __name__ == "__main__":
    main(__file__, __doc__, JOBS, PLAN, top_k=20, updates=0.15)
