"""Problems of which no response was graded are neither kept nor counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.probe import curate

CONFIG = SimpleNamespace(
    choice=SimpleNamespace(keep=(0.2, 0.8), held_out_samples=4),
    sampler=SimpleNamespace(samples_per_prompt=8),
)


@pytest.fixture
def choose(monkeypatch):
    def curation(accuracy: dict[int, float], unstated: int = 0) -> curate.Curation:
        trace = SimpleNamespace(count=lambda _: unstated, num_responses=10)
        monkeypatch.setattr(curate.Trace, "open", lambda _: trace)
        monkeypatch.setattr(curate, "accuracy_by_prompt", lambda _: accuracy)
        return curate._choose(CONFIG, Path("run"))

    return curation


def test_a_problem_whose_responses_a_reward_declined_has_no_accuracy(choose):
    curation = choose({3: 0.5, 5: 1.0, 7: float("nan")}, unstated=2)
    assert curation.accuracy == {3: 0.5, 5: 1.0} and curation.kept == [3]
    assert (curation.samples, curation.held_out_samples, curation.unstated) == (8, 4, 2)


@pytest.mark.parametrize(
    ("unstated", "words"),
    [
        (5, r"None of the 2 problems has an accuracy between 0\.2 and 0\.8; the mean is 0\.550"),
        (6, "6 of 10 responses ended without an answer in the asked form"),
    ],
)
def test_if_no_problem_is_kept_the_mean_or_the_lack_of_answers_says_why(choose, unstated, words):
    with pytest.raises(MismatchError, match=words):
        choose({3: 0.1, 5: 1.0, 7: float("nan")}, unstated)


def test_no_engine_is_needed_once_both_traces_have_all_their_shards(choose, tmp_path, monkeypatch):
    choose({3: 0.5})
    complete = set()
    monkeypatch.setattr(curate, "read_manifest", lambda folder: {"of": folder.name})
    monkeypatch.setattr(curate, "is_sampled", lambda folder, _: folder.name in complete)
    answers = []
    for name in (curate._CHOOSING, curate._HELD_OUT):
        (tmp_path / name).mkdir()
        answers.append(curate._is_sampled(CONFIG, tmp_path, {"shards": 1}))
        (tmp_path / name / curate.FILE_NAME).touch()
        answers.append(curate._is_sampled(CONFIG, tmp_path, {"shards": 1}))
        complete.add(name)
    assert not any(answers)
    assert curate._is_sampled(CONFIG, tmp_path, {"shards": 1})
    assert not curate._is_sampled(CONFIG, tmp_path, {})
