"""slime's debug dumps: one `.pt` per rollout, with only μ (rollout data) or also π and advantages
(train data).

Written by `slime/observability/rollout_data_utils.py` and `train_data_utils.py`. `log_probs` are
recomputed before the update or, where that pass is skipped, come from the training pass of the
first update.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from mismatch_cli.frameworks.importing import samples as shared
from mismatch_cli.frameworks.importing import torch_file
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.sources import DumpFile, FileHead
from mismatch_cli.trace import foreign_values

TITLE = "slime debug data"
FILES = "train_data/N.pt or rollout_data/N.pt"
ENABLE = "--save-debug-train-data PATH/{rollout_id}.pt (or --save-debug-rollout-data)"
PI = "recomputed"
HOLDS = "log_probs, recomputed before the update (train data); no π in rollout data"
SHIFT = "none: R values for the last R of tokens"
PADDING = "none"
AVERAGING = "mean of the means over each response; masked tokens have log-probability 0"


def recognises(peek: FileHead) -> bool:
    return (
        peek.source.kind == "pt"
        and peek.has("rollout_id", "samples", "samples.tokens")
        and "metadata" not in peek.keys
    )


def choose(sources: Sequence[DumpFile], tally: Tally) -> list[DumpFile]:
    """Of a folder, leave out evaluations, and rollout data where train data exists."""
    trained = [source for source in sources if not source.path.name.startswith("eval_")]
    tally.leave_out(shared.EVALUATION, len(sources) - len(trained))
    better = [source for source in trained if source.path.parent.name == "train_data"]
    if better:
        shared.leave_out_beside(better, trained, tally)
    return better or trained


def blocks(
    sources: Sequence[DumpFile], tally: Tally, advance: Callable[[int], None]
) -> Iterator[tuple[pa.Table, str]]:
    for source in sources:
        with torch_file.laid_out(source.path, TITLE):
            content = torch_file.load(source.path)
            samples = shared.samples_of(content, source)
            samples = shared.with_raw_rewards(samples, content.get("raw_reward"))
            step = foreign_values.whole_number(content.get("rollout_id") or 0, np.int32)
            for table in shared.tables(samples, step, tally, source.name):
                yield table, source.name
        advance(source.size)
