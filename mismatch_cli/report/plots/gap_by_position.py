"""The gap by position, relative to the typical gap at each token's probability."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch_cli.report.drawing.marks import draw_profile
from mismatch_cli.report.drawing.panels import Sheet

if TYPE_CHECKING:
    from mismatch_cli.studies.diagnosis import DiagnosisAnalysis

STUDY = "diagnosis"
SECTION = ("A gap that grows with position", "A gap that begins at a fixed position", "All checks")
TITLE = "Gap by position"
DATA = "enough tokens at several positions"
CAPTION = (
    "|log π − log μ| relative to the typical gap at the same probability: the mean over each "
    "sixteenth of the tokens, in order of position, with 95 % intervals over prompts. A level "
    "line is healthy; a steady rise points to position encodings, a step at one position to a "
    "block, chunk or window of that size."
)

_FEWEST = 320  # tokens: twenty in each part


def needs(data: DiagnosisAnalysis) -> bool:
    return data.sample.num_counted >= _FEWEST and len(data.by_position) > 1


def draw(figure: Sheet, data: DiagnosisAnalysis) -> None:
    draw_profile(figure, data.by_position, "position in the response")
