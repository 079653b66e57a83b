"""Columns that hold something else than log-probabilities in every row, and what each reader says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.studies.clipping import analyse_clipping
from mismatch_cli.studies.diagnosis import gather_evidence
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.studies.unusable import _Column, unusable_columns
from mismatch_cli.trace.reader import Trace
from tests.studies.compared import FLOAT32, Row, changed_trace, without_columns

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
    change = SPOILED[kind][0]

    def changed(row: Row) -> Row:
        return row | {side: change(np.array(row[side])).tolist()}

    return Trace.open(changed_trace(folder / side / kind, FLOAT32, changed))


@pytest.mark.parametrize("kind", SPOILED)
def test_every_reader_says_what_a_column_holds(tmp_path, kind):
    said = SPOILED[kind][1]
    for side in ("logp_rollout", "logp_trainer"):
        trace = spoiled(tmp_path, side, kind)
        assert unusable_columns(trace).startswith(f"{side} is ") and said in unusable_columns(trace)
        readers = [lambda t: analyse_mismatch([t]), lambda t: gather_evidence([t])]
        if kind != "an overflow":  # to a mask, −inf is a token that the trainer excludes
            readers.append(lambda t: analyse_clipping([t], [parse_algorithm("grpo-clip-higher")]))
        for read in readers:
            with pytest.raises(MismatchError, match="cannot be measured") as error:
                read(trace)
            assert said in str(error.value)


@pytest.mark.parametrize(
    ("values", "beginning"),
    [
        ([*[-np.inf] * 24, -1.5], "−inf or inf for 24 of 25 trained tokens"),
        ([-np.inf, np.nan, np.inf], "−inf or inf for all 2 trained tokens"),
        ([-np.inf, 0.25, 3, np.nan], "above 0 for 2 of 3 trained tokens, 0.25 to 3: "),
        ([2, 0, np.inf, 7], "above 0 for 3 of 4 trained tokens, 0 to 7: "),
        ([0.5, 2, 1], "above 0 for all 3 trained tokens, 0.5 to 2: "),
    ],
)
def test_of_how_many_tokens_a_column_holds_something_else(values, beginning):
    column = _Column("logp_trainer", np.array(values, dtype=float))
    assert not column.is_usable
    assert column.sentence(None).startswith(f"logp_trainer is {beginning}")


def test_a_trace_without_a_mask_is_read_as_wholly_trained(tmp_path):
    def probabilities(row: Row) -> Row:
        return row | {"logp_trainer": np.exp(row["logp_trainer"]).tolist()}

    def unmasked(row: Row) -> Row:
        return without_columns(probabilities(row), "loss_mask")

    def masked_in_part(row: Row) -> Row:
        return probabilities(row) | ({"loss_mask": None} if row["sample_index"] % 2 else {})

    for change in (unmasked, masked_in_part):
        folder = changed_trace(tmp_path / change.__name__, FLOAT32, change)
        assert "these are probabilities" in unusable_columns(Trace.open(folder))


def test_a_healthy_trace_has_nothing_unusable():
    assert unusable_columns(Trace.open(FLOAT32)) == ""


def test_without_a_trainer_the_next_command_scores_the_tokens(tmp_path):
    path = changed_trace(
        tmp_path / "run", FLOAT32, lambda row: without_columns(row, "logp_trainer")
    )
    with pytest.raises(MismatchError):
        analyse_mismatch([Trace.open(path)])


def test_a_trace_of_masked_tokens_is_not_called_unscored(tmp_path):
    """Both sides have every log-probability, and a later trainer would change nothing."""

    def masked(row: Row) -> Row:
        return row | {"loss_mask": [False] * len(row["response_ids"])}

    trace = Trace.open(changed_trace(tmp_path / "run", FLOAT32, masked))
    for read in (analyse_mismatch, gather_evidence):
        with pytest.raises(MismatchError, match="its loss mask leaves out all") as error:
            read([trace])
        assert "rescore" not in str(error.value)
