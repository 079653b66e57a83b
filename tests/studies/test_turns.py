"""Conversations of several turns whose gap grows by turn, in every report of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.processes.workers import Workers, portions
from mismatch_cli.report.figures import plots_for
from mismatch_cli.report.pages import page_of
from mismatch_cli.studies.comparison import analyse_comparison
from mismatch_cli.studies.mismatch import MismatchAnalysis, analyse_mismatch
from mismatch_cli.trace.reader import Trace
from tests.studies.compared import FLOAT32, Row, rows_of, write_rows

PLANTED = 0.01  # nats per turn so far
LENGTH, TOOL = 6, 4  # tokens of a turn, and of a tool's answer before the next one


def conversation(row: Row, turns: int) -> Row:
    """Turns cut from the beginning of a response; log π alternates by ±0.01 nats in the first
    turn, ±0.02 …
    """
    columns = {
        name: value
        for name, value in row.items()
        if name == "prompt_ids" or not isinstance(value, list)
    }
    mask = ([True] * LENGTH + [False] * TOOL) * turns
    turn_T = np.arange(len(mask)) // (LENGTH + TOOL)
    gap_T = np.where(mask, PLANTED * (turn_T + 1), 5.0) * (-1.0) ** np.arange(len(mask))
    return columns | {
        "response_ids": [row["response_ids"][0]] * len(mask),
        "loss_mask": mask,
        "logp_rollout": [-6.0] * len(mask),
        "logp_trainer": (-6.0 + gap_T).tolist(),
    }


def written(folder: Path, most: int) -> Trace:
    """Conversations of 1 … `most` turns in three shards."""
    rows = [conversation(row, 1 + i % most) for i, row in enumerate(rows_of(FLOAT32))]
    return Trace.open(
        write_rows(
            folder, rows, FLOAT32, shards=3, manifest=lambda content: content.pop("shard_rows", 0)
        )
    )


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return written(tmp_path_factory.mktemp("growing") / "trace", 4)


@pytest.fixture(scope="module")
def study(growing: Trace) -> MismatchAnalysis:
    return analyse_mismatch([growing], worst=1)


def test_the_planted_gap_is_found_in_each_turn(study: MismatchAnalysis) -> None:
    rows = study.result.main.turns
    assert [(row.first, row.last, row.turns, row.tokens) for row in rows] == [
        (turn, turn, 24 * (5 - turn), 24 * (5 - turn) * LENGTH) for turn in (1, 2, 3, 4)
    ]
    for turn, row in enumerate(rows, start=1):
        assert row.abs_d_mean.value == pytest.approx(PLANTED * turn, rel=1e-4)
        assert row.d_mean.value == pytest.approx(0, abs=1e-6)
        assert row.length_mean.value == LENGTH


def test_workers_give_the_same_bits(
    growing: Trace, study: MismatchAnalysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portions, "PORTION_BYTES", 1)  # each shard is a portion
    alone, together = (
        analyse_mismatch([growing], worst=1, workers=Workers(number)).result for number in (1, 3)
    )
    assert alone == together
    turns = [analysis.main.turns for analysis in (alone, study.result)]
    for row, whole in zip(*turns, strict=True):
        assert row.abs_d_mean.value == pytest.approx(whole.abs_d_mean.value, rel=1e-12)


def test_screen_page_and_figure_show_turns_if_there_are_several(study: MismatchAnalysis) -> None:
    view = page_of(study)
    (along,) = (
        section for section in view.sections if section.title == "By position in the response"
    )
    assert [row[0] for row in along.tables[-1].rows] == [
        "1",
        "2",
        "3",
        "4",
    ] and "turn" in along.text
    (profile,) = (profile for profile in view.profiles if profile.title == "by turn")
    assert (profile.first, profile.last) == ("1", "4") and profile.note.endswith("0.010 to 0.040")
    assert "turn-profile" in dict(plots_for(study.plot_data))

    usual = analyse_mismatch([Trace.open(bundled("traces/fp8-kv"))], worst=1)
    view = page_of(usual)
    (along,) = (
        section for section in view.sections if section.title == "By position in the response"
    )
    assert len(along.tables) == 2 and "turn" not in along.text
    assert not any("turn" in profile.title for profile in view.profiles)
    assert "turn-profile" not in dict(plots_for(usual.plot_data))


def test_the_last_row_gathers_later_turns_and_compare_draws_them(
    tmp_path: Path, growing: Trace
) -> None:
    long = written(tmp_path / "long", 32)
    analysis = analyse_mismatch([long], worst=1)
    last = analysis.result.main.turns[-1]
    # 96 responses of 1 … 32 turns: three each of 24 … 32 turns, which have 1 … 9 turns from the
    # 24th on
    turns = np.concatenate([np.arange(24, most + 1) for most in range(24, 33)])
    assert (last.first, last.last, last.turns, last.tokens) == (
        24,
        None,
        3 * 45,
        3 * 45 * LENGTH,
    )
    assert last.abs_d_mean.value == pytest.approx(PLANTED * turns.mean(), rel=1e-4)
    (along,) = (
        section
        for section in page_of(analysis).sections
        if section.title == "By position in the response"
    )
    assert along.tables[-1].rows[-1][0] == "24 and later"
    assert "turn-profile" in dict(plots_for(analyse_comparison([growing, long]).plot_data))
