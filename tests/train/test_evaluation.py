"""Evaluations: several sets, each counted once, with their own sampling; and what does not fit a
run's context.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.json_form import to_json
from mismatch_cli.base.places import bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines.hf import HfEngine
from mismatch_cli.train.evaluation import evaluate, evaluate_before, evaluation_sampling
from mismatch_cli.train.run import RunInProgress
from mismatch_cli.train.studies.runs import SetAccuracy, read_runs
from mismatch_cli.train.studies.training import TrainingAnalysis
from mismatch_cli.train.task import evaluation_sets
from mismatch_cli.train.train_config import load_config, parsed
from tests.train.small_runs import SMALL, numbers, run


def config_of(**changes: Any) -> Any:
    return load_config("miniature", SMALL | changes)


@pytest.mark.parametrize(
    ("listed", "splits", "sets"),
    [
        ("", "test", {}),
        ("HuggingFaceH4/aime_2024", "train", {"aime_2024": ("HuggingFaceH4/aime_2024", "train")}),
        ("a/x, b/y", "test", {"x": ("a/x", "test"), "y": ("b/y", "test")}),
        ("a/x,b/x,c/x", "1,2,3", {"x": ("a/x", "1"), "x-2": ("b/x", "2"), "x-3": ("c/x", "3")}),
        (
            "sets/x.jsonl,x-2.csv,x.json",
            "t",
            {"x": ("sets/x.jsonl", "t"), "x-2": ("x-2.csv", "t"), "x-3": ("x.json", "t")},
        ),
    ],
)
def test_each_set_has_its_own_name(listed, splits, sets):
    assert evaluation_sets(config_of(eval_dataset=listed, eval_split=splits)) == sets


def test_a_file_may_have_commas_in_its_name(tmp_path):
    (tmp_path / "a,b.jsonl").write_text("", encoding="utf-8")
    where = str(tmp_path / "a,b.jsonl")
    assert evaluation_sets(config_of(eval_dataset=where)) == {"a,b": (where, "test")}


def test_as_many_splits_as_sets():
    with pytest.raises(UsageError, match="eval_split names 2 splits for 3 evaluation sets"):
        evaluation_sets(config_of(eval_dataset="a/x,b/y,c/z", eval_split="1,2"))


def sets_in(folder: Path) -> str:
    """Four of the bundled problems in one file, one of them in another."""
    rows = bundled("problems.jsonl").read_text(encoding="utf-8").splitlines()
    for name, part in (("four", rows[100:104]), ("one", rows[101:102])):
        (folder / f"{name}.jsonl").write_text("\n".join(part), encoding="utf-8")
    return f"{folder}/four.jsonl,{folder}/one.jsonl"


@pytest.fixture(scope="module")
def evaluated(
    tmp_path_factory,
) -> tuple[Path, list[str], dict[str, Any], list[tuple[int, SamplingSettings | None]]]:
    """A run of two steps with two sets that evaluates before and at both steps, and the requests
    to its engine.
    """
    folder = tmp_path_factory.mktemp("sets")
    calls, said = list[tuple[int, SamplingSettings | None]](), list[str]()
    settings = {
        "eval_dataset": sets_in(folder),
        "eval_samples": 2,
        "eval_temperature": 0.5,
        "eval_top_p": 0.8,
        "temperature": 0.9,
        "eval_every": 1,
        "steps": 2,
        "num_problems": 4,
        "max_tokens": 48,
    }
    plain = HfEngine.sample

    def noting(self: HfEngine, requests: Any, on_finished: Any) -> Any:
        calls.extend((len(r.prompt_ids), r.sampling) for r in requests)
        return plain(self, requests, on_finished)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HfEngine, "sample", noting)
        run(folder / "run", **settings)
        made = RunInProgress(config_of(**settings), folder / "again", said.append)
        evaluate_before(made)
        made.close()
    return folder / "run", said, settings, calls


def test_each_set_counts_once(evaluated):
    lines = numbers(evaluated[0])
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert list(line["eval"]) == ["four", "one"]
        assert line["eval_accuracy"] == pytest.approx(sum(line["eval"].values()) / 2)
        # 4 problems, 2 samples each
        assert line["eval"]["four"] * 8 == round(line["eval"]["four"] * 8)
        assert line["eval"]["one"] * 2 == round(line["eval"]["one"] * 2)
    four, one = lines[0]["eval"].values()
    assert evaluated[1] == [
        f"Accuracy before the first step: {(four + one) / 2:.3f} (four {four:.3f}, one {one:.3f})"
    ]


def test_an_evaluation_has_its_own_sampling_settings(evaluated):
    settings = [sampling for _, sampling in evaluated[3]]
    assert len(settings) == 10 + 2 * (16 + 10) + 10
    own = SamplingSettings(temperature=0.5, top_p=0.8, max_tokens=48)
    assert (
        settings[:10] == [own] * 10
        and settings[10:26] == [None] * 16
        and settings[26:36] == [own] * 10
    )
    as_trained = evaluation_sampling(config_of(temperature=0.7))
    assert as_trained == SamplingSettings(temperature=0.7, max_tokens=SMALL["max_tokens"])


def test_a_report_shows_each_set(evaluated):
    (run,) = read_runs([evaluated[0]])
    lines = numbers(evaluated[0])
    assert run.accuracy_by_set == {
        name: SetAccuracy(
            before=lines[0]["eval"][name],
            final=lines[2]["eval"][name],
            best=max(line["eval"][name] for line in lines),
        )
        for name in ("four", "one")
    }
    (run_json,) = TrainingAnalysis.of([run]).to_json()["runs"]
    assert run_json["accuracy_by_set"] == to_json(run.accuracy_by_set)
    assert run_json["final_accuracy"] == lines[2]["eval_accuracy"]


def test_a_context_holds_prompt_and_response_together(tmp_path):
    """The longest prompt leaves room for a few tokens; a prompt that is too long is left out."""
    said: list[str] = []
    rows = [{"problem": "and " * words + "1 + 1?", "answer": "2"} for words in (1, 10, 30, 60)]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    settings = {"dataset": str(tmp_path / "rows.jsonl"), "num_problems": 0, "prompts_per_step": 2}
    whole = RunInProgress(config_of(**settings), tmp_path / "whole", said.append)
    lengths = [len(posed.prompt_ids) for posed in whole.task.posed]
    whole.close()
    settings |= {
        "max_context_tokens": lengths[2] + 3,
        "max_prompt_tokens": lengths[2] - 1,
        "max_tokens": 40,
    }
    made = RunInProgress(config_of(**settings), tmp_path / "run", said.append)
    assert made.engine.max_model_len == lengths[2] + 3
    assert [len(posed.prompt_ids) for posed in made.task.posed] == lengths[:2]
    rollouts = made.sample(made.task.posed, 1, 2)
    made.close()
    room = [min(40, lengths[2] + 3 - length) for length in lengths[:2]]
    assert all(len(r.response_ids) <= most for r, most in zip(rollouts, room, strict=True))
    assert any(r.finish_reason == "length" for r in rollouts)
    assert said[-1].endswith(
        f"skipping 2 of 4 problems, the first (row 2) because the prompt has {lengths[2]} "
        f"tokens, more than the limit of {lengths[2] - 1}."
    )


NEW = (
    "unique_problems", "max_prompt_tokens", "reward_seconds", "answer_format", "grader",
    "dynamic_sampling",
    "max_context_tokens", "eval_temperature", "eval_top_p",
)  # fmt: skip


def test_a_run_older_than_these_settings_resumes(tmp_path):
    config = config_of()
    saved = "".join(line for line in config.to_toml().splitlines(True) if not line.startswith(NEW))
    assert len(tomllib.loads(saved)) == len(tomllib.loads(config.to_toml())) - len(NEW)
    assert parsed(saved) == config != config_of(eval_top_p=0.9)


def test_one_set_is_evaluated_as_before(tmp_path):
    """Alone or as one of a list, its accuracy is the same to the bit."""
    made = RunInProgress(
        config_of(eval_dataset=sets_in(tmp_path).split(",")[0], eval_samples=2),
        tmp_path / "run",
        lambda _: None,
    )
    evaluation = evaluate(made, 3)
    made.close()
    assert (
        list(evaluation["eval"]) == ["four"]
        and evaluation["eval"]["four"] == evaluation["eval_accuracy"]
    )


def test_before_the_first_step_each_set_is_named_where_there_are_several(monkeypatch):
    said: list[str] = []
    steps: list[int] = []
    a_run: Any = SimpleNamespace(say=said.append, write=lambda _: None, save=steps.append)
    for sets in ({"math": 0.25}, {"math": 0.25, "words": 0.75}):
        evaluation = {"eval_accuracy": 0.5, "eval": sets}
        monkeypatch.setattr(
            "mismatch_cli.train.evaluation.evaluate", lambda *_, evaluation=evaluation: evaluation
        )
        evaluate_before(a_run)
    first = "Accuracy before the first step: 0.500"
    assert said == [first, f"{first} (math 0.250, words 0.750)"]
    assert steps == [0, 0]  # after which a resumed run continues
