"""Which runs repeat the paper's sanity test, and what it starts and ends with."""

from __future__ import annotations

import pytest

from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.train.studies.paper_runs import (
    accuracy_of_paper,
    mismatch_of_paper,
    repeats_paper,
    reward_of_paper,
)
from mismatch_cli.train.studies.paper_values import ENDINGS
from tests.train.training_runs import make_run, of_paper


def test_every_ending_is_of_an_algorithm():
    assert set(ENDINGS) <= set(TABLE)


def test_the_settings_decide_and_not_the_place_of_the_model():
    assert repeats_paper(of_paper("pg-is"))
    assert repeats_paper(of_paper("pg-is", model="/models/DeepSeek-R1-Distill-Qwen-1.5B"))
    # How the work is done, watched and kept, and where the seed is
    assert repeats_paper(of_paper("pg-is", seed=3, steps=20, token_budget=1, eval_every=5))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dataset", "other/problems"),
        ("model", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
        ("learning_rate", 1e-5),
        ("samples_per_prompt", 16),
        ("prompt_template", "boxed"),
        ("grader", "verl"),
        ("rollout_dtype", "float16"),
        ("temperature", 0.7),
        ("epochs", 2),
        ("lora", True),
        ("reward", "mine.py:score"),
        ("environment", "mine.py:World"),
    ],
)
def test_another_task_is_not_the_papers(key, value):
    run = of_paper("dppo-binary-tv", **{key: value})
    assert not repeats_paper(run)
    assert reward_of_paper([of_paper("pg-is"), run]) == mismatch_of_paper([run]) == []


def test_a_run_of_unknown_settings_is_not_the_papers():
    assert not repeats_paper(make_run()) and reward_of_paper([]) == []


def test_values_are_as_exact_as_the_figure_can_be_read():
    start, end = reward_of_paper([of_paper("dppo-binary-tv")])
    assert (start.low, start.high) == pytest.approx((0.548, 0.582), abs=5e-4)
    assert (start.words, start.is_start) == ("paper, start: 0.565", True)
    assert (end.low, end.high) == pytest.approx((0.955, 1.0), abs=5e-4)  # never above 1
    _, gap = mismatch_of_paper([of_paper("pg-tis")])
    assert mismatch_of_paper([of_paper("cispo")])[1] == gap  # its alias
    assert gap.words == "paper, end: 0.0110" and gap.high > gap.low > 0.01


def test_several_algorithms_share_the_words_of_their_ends():
    runs = [of_paper(name) for name in ("minirl", "pg-is", "dppo-binary-tv", "mask-0.5")]
    words = [value.words for value in reward_of_paper(runs)]
    assert words == ["paper, start: 0.565", "paper, ends", "", ""]
    # Its figure does not show where the reward of PG-TIS ends
    assert [value.words for value in reward_of_paper([of_paper("pg-tis")])] == words[:1]


def test_accuracy_needs_its_evaluation():
    run = of_paper("pg-is")
    (start,) = accuracy_of_paper([run], "HuggingFaceH4/aime_2024")
    assert start.words == "paper, AIME24 start: 0.195"
    assert accuracy_of_paper([run], "math-ai/aime25") == []
    greedy = of_paper("pg-is", eval_top_p=1.0)
    assert accuracy_of_paper([greedy], "HuggingFaceH4/aime_2024") == []
    assert reward_of_paper([greedy])


def test_the_endings_are_steps_rewards_and_gaps_in_this_order():
    for name, ending in ENDINGS.items():
        assert ending.step > 100 and 0 < ending.mismatch < 0.02, name
        assert ending.reward is None or 0.5 < ending.reward <= 1, name
