"""docs/evidence.md has what the kept runs say, and a kept run is not run again.

To renew it: python -m lab.evidence page
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from lab import evidence, evidence_page
from lab.evidence_page import DPPO, GRPO, Cell, Evidence, Range
from lab.rare_words import rare_word
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.train.studies.seeds import NO_SPREAD
from mismatch_cli.train.train_config import load_config
from tests.docs.pages import is_renewed

NUMBER_OF_RUNS = {
    "tokens": 27, "variants": 6, "solutions": 9, "stability": 15, "real": 4, "full": 375,
}  # fmt: skip


def keep(folder: Path, run: evidence.Run, rewards: list[float]) -> None:
    copy = folder / run.name
    copy.mkdir(parents=True)
    lines = [
        json.dumps({"step": step, "reward": reward, "blocked_rare": 0.4, "seconds": {"update": 2}})
        for step, reward in enumerate(rewards, start=1)
    ]
    (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings = f'algorithm = "{run.algorithm}"\nseed = {run.seed}\n'
    (copy / "config.toml").write_text(settings, encoding="utf-8")


def test_the_page_has_what_the_kept_runs_say():
    evidence_again = Evidence(evidence.design, evidence.KEPT)
    tables = "\n\n".join(evidence_page.tables(evidence_again))
    assert is_renewed(evidence_page.PAGE, evidence_page.MARK, tables)


def test_the_design_is_whole_and_names_are_unique():
    runs = [run for part in NUMBER_OF_RUNS for run in evidence.design(part)]
    assert Counter(run.part for run in runs) == NUMBER_OF_RUNS
    assert len({run.name for run in runs}) == len(runs)
    assert all(minibatches * epochs == n for n, (minibatches, epochs) in evidence.UPDATES.items())
    # The presets hold what the page says of 16 updates
    preset = load_config("rare-tokens", {})
    assert (preset.minibatches, preset.epochs) == evidence.UPDATES[16]


def test_a_run_that_is_kept_is_not_run_again(tmp_path, monkeypatch):
    trained = []

    def train(run: evidence.Run, folder: Path) -> float:
        trained.append(run.name)
        folder.mkdir(parents=True)
        record = {"step": 1, "reward": 0.123456789, "mismatch": {"k1": 1e-9 / 3}}
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
        (folder / "config.toml").write_text(f'model = "{evidence.ROOT}/m"\n', encoding="utf-8")
        return 1.0

    monkeypatch.setattr(evidence, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(evidence, "_train", train)
    runs = evidence.design("real")
    assert len(list(evidence._all(runs[:2], tmp_path))) == 2
    lines = list(evidence._all(runs[:3], tmp_path))
    assert trained == [run.name for run in runs[:3]]
    assert [line.endswith("kept") for line in lines] == [True, True, False]
    record = json.loads((tmp_path / "kept" / runs[0].name / "metrics.jsonl").read_text())
    assert record == {"step": 1, "reward": 0.123457, "mismatch": {"k1": 3.33333e-10}}
    assert (tmp_path / "kept" / runs[0].name / "config.toml").read_text() == 'model = "m"\n'


def test_differences_are_paired_by_seed_over_shared_steps(tmp_path):
    for run in evidence.design("tokens"):
        if run.updates == 16 and run.algorithm in (GRPO, DPPO):
            ahead = 0.2 + run.seed / 1000 if run.algorithm == DPPO else 0.0
            rewards = [run.seed + ahead, run.seed + ahead, 99.0][: 2 + (run.algorithm == DPPO)]
            keep(tmp_path, run, rewards)
    of_runs = Evidence(evidence.design, tmp_path)
    (grpo, dppo), area = (Cell("tokens", 16, name) for name in (GRPO, DPPO)), evidence_page.area
    gap = of_runs.gap(dppo, grpo, area)
    assert gap.value == pytest.approx(0.222) and 0.21 < gap.low < gap.high < 0.23
    assert [cell for cell, _ in of_runs.doses()] == [grpo]
    assert of_runs.gap(dppo, Cell("tokens", 2, GRPO), area).value is None
    page = "\n".join(evidence_page.tables(of_runs))
    assert "| 1 | 16 updates: DPPO − GRPO | > 0 | 0.222 [0.220, 0.224] | **shown** |" in page
    assert "images/evidence-tokens.png" in page and "images/evidence-real.png" not in page
    evidence_page.draw(of_runs, tmp_path)
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn == ["evidence-dose.png", "evidence-tokens.png"]


@pytest.mark.parametrize(
    ("range_", "estimate", "verdict"),
    [
        (Range(0), Estimate(0.1, 0.05, 0.15), "**shown**"),
        (Range(0), Estimate(0.1, -0.05, 0.25), "not shown"),
        (Range(0), Estimate(-0.1, -0.15, -0.05), "**contradicted**"),
        (Range(-0.03, 0.03), Estimate(0.0, -0.02, 0.02), "**shown**"),
        (Range(-0.03, 0.03), Estimate(0.0, -0.2, 0.2), "not shown"),
        (Range(most=0.05), Estimate(0.0, note=NO_SPREAD), "**shown**"),
        (Range(0), Estimate(0.0, note=NO_SPREAD), "not shown"),
        (Range(is_undecided=True), Estimate(0.1, -0.1, 0.3), "as predicted"),
        (Range(is_undecided=True), Estimate(0.2, 0.1, 0.3), "**contradicted**"),
        (Range(0), Estimate(0.1), "one seed"),
        (Range(0), Estimate(None), "not run"),
    ],
)
def test_a_prediction_is_judged_by_its_whole_interval(range_, estimate, verdict):
    assert range_.verdict(estimate) == verdict


def test_the_first_word_of_a_response_must_be_a_rare_one():
    responses = [" Pear\nName", " pearl", " a pear", "", " pear."]
    assert rare_word(responses, ["fig pear"] * 5) == [1, 0, 0, 0, 1]
