"""Every plot of a diagnosis: the contract, and all variants on healthy and broken traces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.report.drawing.style import NARROW, WIDE
from mismatch_cli.report.figures import plots_of
from mismatch_cli.studies.diagnosis import DiagnosisAnalysis, analyse_diagnosis
from mismatch_cli.trace.reader import Trace
from tests.report.plots.drawing import PAPER, check_texts, drawn

PLOTS = list(plots_of(DiagnosisAnalysis.STUDY))
STYLES = [WIDE, NARROW]


@pytest.fixture(scope="module")
def healthy() -> DiagnosisAnalysis:
    return analyse_diagnosis([Trace.open(bundled("traces") / "fp8-kv")])


def shifted(analysis: DiagnosisAnalysis) -> DiagnosisAnalysis:
    evidence = analysis.diagnosis.evidence
    sample = replace(evidence.sample, logq_T=np.roll(evidence.sample.logq_T, 1))
    return replace(
        analysis, diagnosis=replace(analysis.diagnosis, evidence=replace(evidence, sample=sample))
    )


@pytest.mark.parametrize("name", PLOTS)
def test_contract(name, healthy):
    plot = plots_of(DiagnosisAnalysis.STUDY)[name]
    assert plot.TITLE.strip() and plot.CAPTION.strip().endswith(".")
    assert plot.needs(healthy)


@pytest.mark.slow
@pytest.mark.parametrize("style", [*STYLES, PAPER], ids=lambda style: style.name)
@pytest.mark.parametrize("name", PLOTS)
@pytest.mark.parametrize("broken", [False, True])
def test_text_is_legible_inside_the_figure_and_apart(name, style, healthy, broken):
    plot = plots_of(DiagnosisAnalysis.STUDY)[name]
    check_texts(drawn(plot, shifted(healthy) if broken else healthy, style), style)


def test_the_lag_scan_is_lowest_where_the_columns_align(healthy):
    assert min(healthy.lags, key=healthy.lags.get) == 0
    assert min(shifted(healthy).lags, key=shifted(healthy).lags.get) == -1


def test_one_position_has_no_course(healthy):
    """Responses of one token each: all are at position 0."""
    evidence = healthy.diagnosis.evidence
    sample = replace(evidence.sample)
    vars(sample)["position_T"] = np.zeros_like(sample.position_T)
    diagnosis = replace(healthy.diagnosis, evidence=replace(evidence, sample=sample))
    single = replace(healthy, diagnosis=diagnosis)
    assert [position for position, _ in single.by_position] == [0]
    assert single.by_position[0][1].value == pytest.approx(1)
    assert not plots_of(DiagnosisAnalysis.STUDY)["gap-by-position"].needs(single)
