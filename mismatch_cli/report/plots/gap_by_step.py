"""The gap by training step, relative to the typical gap at each token's probability."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch_cli.report.drawing.marks import draw_profile
from mismatch_cli.report.drawing.panels import Sheet

if TYPE_CHECKING:
    from mismatch_cli.studies.diagnosis import DiagnosisAnalysis

STUDY = "diagnosis"
SECTION = ("A gap that grows over the steps", "A stale prefix cache", "All checks")
TITLE = "Gap by step"
DATA = "several steps"
CAPTION = (
    "|log π − log μ| relative to the typical gap at the same probability: the mean over the "
    "tokens of each step, with 95 % intervals over prompts. At equal weights it should be level: "
    "a rise points to weights or caches that the engine does not refresh."
)


def needs(data: DiagnosisAnalysis) -> bool:
    return len(data.by_step) > 1


def draw(figure: Sheet, data: DiagnosisAnalysis) -> None:
    draw_profile(figure, data.by_step, "step")
