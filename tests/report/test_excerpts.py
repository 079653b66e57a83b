"""Worst responses in their context."""

from __future__ import annotations

from pathlib import Path

from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.retained_rows import RetainedResponse, WorstRows
from mismatch_cli.report.excerpts import worst_excerpts
from tests.frameworks.dialects.conftest import rows, written


def test_highlights_are_tokens_of_the_loss(tmp_path: Path) -> None:
    """|d| of 0.25, 3 (outside the loss), 0, −0.6 and −2: the second is plain text."""
    trace = written(
        tmp_path / "trace",
        rows(
            [[-1.0, -4.0, -1.0, -1.0, -1.0]],
            loss_mask=[[True, False, True, True, True]],
            logp_trainer=[[-0.75, -1.0, -1.0, -1.6, -3.0]],
        ),
    )
    response = RetainedResponse(step=0, prompt_id=0, sample_index=0, length=4, d_sum=-2.35, trace=0)
    tokens, (excerpt,) = worst_excerpts(
        [trace], PAIRS["total"], WorstRows(abs_d=(), abs_dp=(), responses=(response,))
    )
    assert tokens == []
    assert [(piece.text, piece.weight) for piece in excerpt.pieces] == [
        ("⟨0⟩", 2),
        ("⟨1⟩⟨2⟩", 0),
        ("⟨3⟩", 3),
        ("⟨4⟩", 4),
    ]
    assert excerpt.pieces[2].hint == "log π − log μ = −0.600"
    assert excerpt.facts == (("Σ (log π − log μ)", "−2.35"), ("tokens", "4"))
