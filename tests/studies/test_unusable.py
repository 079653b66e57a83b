"""Columns that hold something else than log-probabilities in every row, and what each reader says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.rules.algorithms.parse import find
from mismatch_cli.studies.clipping import analyse_clipping
from mismatch_cli.studies.diagnosis import gather
from mismatch_cli.studies.mismatch import analyse
from mismatch_cli.studies.unusable import unusable
from mismatch_cli.trace.reader import Trace

SPOILED = {
    "probabilities": (np.exp, "these are probabilities. Record their logarithm."),
    "lost minus signs": (np.negative, "the minus sign is lost. Record log p, not −log p."),
    "entropies": (lambda x: 0.3 + 0.5 * np.abs(np.sin(7 * x)), "perhaps entropies."),
    "an overflow": (lambda x: np.full_like(x, -np.inf), "is −inf or inf for all"),
    # What is certain has a log-probability of 0 either way
    "lost minus signs of a confident policy": (
        lambda x: np.where(x > -0.3, 0.0, -x),
        "the minus sign is lost",
    ),
}


def spoiled(folder: Path, side: str, kind: str) -> Trace:
    """The bundled float32 trace with another column of one side."""
    source = bundled("traces") / "float32"
    target = folder / side / kind.replace(" ", "-")
    target.mkdir(parents=True)
    (target / "manifest.json").write_bytes((source / "manifest.json").read_bytes())
    for shard in sorted(source.glob("shard-*.parquet")):
        table = pq.read_table(shard)
        column = table.column(side).combine_chunks()
        changed = SPOILED[kind][0](column.values.to_numpy().astype(np.float64))
        values = pa.ListArray.from_arrays(column.offsets, pa.array(changed, pa.float32()))
        place = table.column_names.index(side)
        changed_table = table.set_column(place, table.schema.field(side), values)
        pq.write_table(changed_table, target / shard.name)
    return Trace.open(target)


@pytest.mark.parametrize("kind", SPOILED)
def test_every_reader_says_what_a_column_holds(tmp_path, kind):
    said = SPOILED[kind][1]
    for side in ("logp_rollout", "logp_trainer"):
        trace = spoiled(tmp_path, side, kind)
        assert unusable(trace).startswith(f"{side} is ") and said in unusable(trace)
        readers = [lambda t: analyse([t]), lambda t: gather([t])]
        if kind != "an overflow":  # to a mask, −inf is a token that the trainer excludes
            readers.append(lambda t: analyse_clipping([t], [find("grpo-clip-higher")]))
        for read in readers:
            with pytest.raises(MismatchError, match="cannot be measured") as error:
                read(trace)
            assert said in str(error.value)


def test_a_healthy_trace_has_nothing_unusable():
    assert unusable(Trace.open(bundled("traces") / "float32")) == ""


def test_without_a_trainer_the_next_command_scores_the_tokens(tmp_path):
    source = bundled("traces") / "float32"
    (tmp_path / "manifest.json").write_bytes((source / "manifest.json").read_bytes())
    for shard in sorted(source.glob("shard-*.parquet")):
        table = pq.read_table(shard)
        known = [name for name in table.column_names if "trainer" not in name]
        kept = [*known, "version_trainer"] if "version_trainer" in table.column_names else known
        pq.write_table(table.select(kept), tmp_path / shard.name)
    with pytest.raises(MismatchError):
        analyse([Trace.open(tmp_path)])
