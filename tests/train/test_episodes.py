"""Episodes of several turns in the training loop, with real models: training learns the game of
the guide.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mismatch_cli
from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.places import bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import EngineSettings, Request, create_engine, sample_seed
from mismatch_cli.models.loading import load_tokenizer
from mismatch_cli.probe.tasks.prompts import Problem
from mismatch_cli.rules.batch import Episode
from mismatch_cli.trace.reader import Trace
from mismatch_cli.train.environment import Environments
from mismatch_cli.train.episodes import Episodes
from mismatch_cli.train.task import check_runs
from mismatch_cli.train.train_config import load_config
from tests.moe_models import with_tokenizer
from tests.train.small_runs import GAME, SMALL, assert_same_run, game_file, numbers, run, talk_file

MODEL = str(bundled("model"))
ECHO = """
import random


class Echo:
    '''Says what it has heard, for ever.'''

    def reset(self, seed):
        return "Say something."

    def step(self, action):
        return f"You said: {action}", 0.25, False


class Careless(Echo):
    def reset(self, seed):
        return str(random.random())


class Again:
    '''A problem of a data set, with a second try.'''

    def __init__(self, problem, answer):
        self.problem, self.answer, self.tries = problem, answer, 0

    def reset(self):
        return self.problem

    def step(self, action):
        self.tries += 1
        right = f"boxed{{{self.answer}}}" in action
        return "Try again.", right / self.tries, right or self.tries == 2
"""


@pytest.fixture(scope="module")
def game(tmp_path_factory) -> str:
    return game_file(tmp_path_factory.mktemp("game"))


@pytest.fixture(scope="module")
def echo(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("echo") / "echo.py"
    path.write_text(ECHO, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def learnt(game, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("learnt") / "run"
    run(
        folder,
        **GAME,
        environment=game,
        steps=9,
        minibatches=2,
        learning_rate=2e-3,
        max_grad_norm=1.0,
        eval_every=9,
        eval_episodes=32,
        eval_samples=1,
        trace_every=9,
        checkpoint_every=9,
    )
    return folder


@pytest.fixture(scope="module")
def one_step(game, tmp_path_factory) -> Path:
    """One step of the game, with its trace."""
    folder = tmp_path_factory.mktemp("one-step") / "run"
    run(folder, **GAME, environment=game, steps=1, trace_every=1)
    return folder


@pytest.mark.slow
def test_the_game_is_learnt_far_above_chance(learnt):
    """A model that ignores the environment's replies earns at most 1/3, and 1/90 by chance."""
    before, *lines = numbers(learnt)
    assert before["eval_accuracy"] < 0.15 and lines[0]["turns"] < 1.4
    # On episodes that training never played
    assert lines[-1]["eval_accuracy"] > 0.6 and lines[-1]["turns"] > 2.4
    assert max(line["reward"] for line in lines[-3:]) > 0.7
    assert {line["sync"] for line in lines} == {"proven"} and lines[0]["mismatch"][
        "abs_dp_mean"
    ] < 1e-6
    assert mismatch_cli.open(learnt / "traces" / "step-9").tokens["turn"].max() == 3


def test_the_environments_tokens_are_masked_in_the_trace(one_step):
    trace = Trace.open(one_step / "traces" / "step-1")
    (batch,) = trace.batches()
    assert (
        not batch.loss_mask_T.all() and batch.loss_mask_T[batch.offset_S1[1:] - 1].all()
    )  # the last token is the model's
    for column_T in (
        batch.logp_rollout_T,
        batch.logp_trainer_T,
        batch.entropy_trainer_T,
        batch.logp_recomputed_T,
    ):
        assert np.isnan(column_T[~batch.loss_mask_T]).all()
    assert np.isfinite(batch.logp_rollout_T[batch.loss_mask_T]).all()
    assert (batch.advantage_T[~batch.loss_mask_T] == 0).all()
    between = trace.vocabulary.decode(batch.response_ids_T[~batch.loss_mask_T])
    assert "<|im_start|>user\nSimon says " in between and between.endswith(
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (trace.manifest["environment"].split(":")[1], batch.num_responses) == ("Simon", 64)


def test_every_command_reads_that_trace(one_step):
    """`clipstats` finds the share that the run's own algorithm blocked."""
    opened = mismatch_cli.open(one_step / "traces" / "step-1")
    (row,) = (
        r
        for r in opened.clip("dppo-binary-tv").to_json()["algorithms"]
        if r["name"] == "dppo-binary-tv"
    )
    (line,) = (line for line in numbers(one_step) if line["step"] == 1)
    assert row["blocked"]["all"]["value"] == pytest.approx(line["blocked"], abs=1e-12)
    (batch,) = Trace.open(one_step / "traces" / "step-1").batches()
    assert f'"masked": {int((~batch.loss_mask_T).sum())}' in json.dumps(opened.report().to_json())
    assert opened.diagnose().to_json()["faults"] == []
    assert opened.tokens["turn"].max() > 1


@pytest.mark.slow
def test_a_resumed_run_plays_what_the_unbroken_one_would(game, tmp_path):
    changes = GAME | {
        "environment": game,
        "steps": 2,
        "prompts_per_step": 2,
        "episodes": 4,
        "checkpoint_every": 1,
    }
    changes |= {
        "samples_per_prompt": 2,
        "eval_every": 1,
        "eval_samples": 1,
        "eval_episodes": 2,
        "environment_processes": 2,
    }
    run(tmp_path / "unbroken", **changes)
    run(tmp_path / "run", stop_after=1, **changes)
    run(tmp_path / "run", resume=True, **changes)
    assert_same_run(tmp_path / "run", tmp_path / "unbroken")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dppo-topk-tv", "ppo-mis-geometric", "m2po"])
def test_rules_beyond_single_tokens_train_on_episodes_too(game, algorithm, tmp_path):
    changes = GAME | {
        "environment": game,
        "steps": 1,
        "prompts_per_step": 2,
        "episodes": 2,
        "trace_every": 1,
    }
    records = run(
        tmp_path / "run", **changes, algorithm=algorithm, recompute=True, learning_rate=2e-3
    )
    assert records[0]["grad_norm"] > 0 and records[0]["blocked"] is not None
    (batch,) = Trace.open(tmp_path / "run" / "traces" / "step-1").batches()
    masked_T = ~batch.loss_mask_T
    assert masked_T.any() and np.isnan(batch.logp_recomputed_T[masked_T]).all()
    if batch.topk_ids_TK is not None:
        assert np.isnan(batch.topk_logp_trainer_TK[masked_T]).all()
        assert np.isfinite(batch.topk_logp_rollout_TK[~masked_T]).all()


def test_problems_of_a_data_set_reach_the_environment(echo, tmp_path):
    """Including those of two evaluation sets with the same row numbers, and those that replace
    useless groups.
    """
    rows = bundled("problems.jsonl").read_text(encoding="utf-8").splitlines()
    for name, own in (("one", rows[100:102]), ("two", rows[102:105])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(own), encoding="utf-8")
    evaluated = {
        "eval_dataset": f"{tmp_path}/one.jsonl,{tmp_path}/two.jsonl",
        "eval_temperature": 0.2,
    }
    settings = {
        "steps": 1,
        "max_tokens": 256,
        "turn_tokens": 96,
        "dynamic_sampling": 1,
        "prompts_per_step": 2,
    }
    records = run(tmp_path / "run", environment=f"{echo}:Again", **settings, **evaluated)
    assert (
        1 < records[0]["turns"] < 2
        and 0 < records[0]["reward"] < 1
        and records[0]["sampled"]["groups"] >= 2
    )
    # Cold, and with a second try
    assert records[0]["eval"].keys() == {"one", "two"} and records[0]["eval_accuracy"] > 0.3
    assert records[0]["length"] < 110  # of the model's own tokens


class Played:
    """Episodes of a real engine without a training run."""

    def __init__(self, where: str, context: int | None = None, **changes: Any) -> None:
        config = load_config(
            "miniature", SMALL | {"environment": where, "turn_tokens": 6} | changes
        )
        sampling = SamplingSettings(max_tokens=config.sampler.max_tokens)
        extra = {} if context is None else {"max_model_len": context}
        settings = EngineSettings(MODEL, sampling, top_logprobs=2, dtype="float32", extra=extra)
        self.environments, self.tokenizer = Environments(where), load_tokenizer(MODEL)
        self.engine = create_engine("hf", settings)
        self.play = Episodes(self.engine, self.environments, self.tokenizer, config).play


PROBLEMS = [Problem(number, "", None) for number in (0, 0, 1, 1)]


def played(where: str, **changes: Any) -> list[Episode]:
    game = Played(where, **changes)
    try:
        return game.play(PROBLEMS, 1, 2)
    finally:
        game.environments.stop()


def test_an_episode_ends_at_every_limit_with_a_turn_of_the_model(echo):
    where = f"{echo}:Echo"
    limited = played(where, max_turns=3, max_tokens=200)
    assert [e.turns for e in limited] == [3] * 4 and [e.reward for e in limited] == [0.75] * 4
    response = played(where, max_turns=50, max_tokens=60)
    context = played(where, max_turns=50, max_tokens=400, context=70)
    for episode in (*limited, *response, *context):
        assert (
            episode.finish_reason == "length" and episode.loss_mask_T[-1] and episode.loss_mask_T[0]
        )
        np.testing.assert_array_equal(np.isnan(episode.logp_rollout_T), ~episode.loss_mask_T)
        np.testing.assert_array_equal(episode.rank_rollout_T == -1, ~episode.loss_mask_T)
        assert episode.topk_ids_TK.shape == (len(episode.response_ids), 2)
    assert all(len(e.response_ids) <= 60 and e.turns > 1 for e in response)
    assert all(len(e.prompt_ids + e.response_ids) <= 70 and e.turns > 1 for e in context)


def test_the_environment_gets_the_models_text(echo):
    """Append-only: each turn stays as sampled, and the environment's reply repeats its text."""
    tokenizer = load_tokenizer(MODEL)
    for episode in played(f"{echo}:Echo", max_turns=3, max_tokens=200):
        begin = np.flatnonzero(np.diff(episode.loss_mask_T.astype(int)) == -1) + 1
        for start, place in zip(
            [0, *np.flatnonzero(np.diff(episode.loss_mask_T.astype(int)) == 1) + 1],
            begin,
            strict=False,
        ):
            said = tokenizer.decode(episode.response_ids[start:place]).removesuffix("<|im_end|>")
            assert f"You said: {said}<|im_end|>" in tokenizer.decode(episode.response_ids[place:])


def test_a_repeated_step_has_the_same_tokens_and_other_steps_differ(echo):
    game = Played(f"{echo}:Echo", max_turns=2)
    first, again, later = (game.play(PROBLEMS, step, 2) for step in (1, 1, 2))
    game.environments.stop()
    assert (
        [e.response_ids for e in first]
        == [e.response_ids for e in again]
        != [e.response_ids for e in later]
    )
    assert first[0].response_ids != first[1].response_ids


def test_an_environment_that_ignores_its_seed_is_refused(echo):
    with pytest.raises(
        MismatchError, match=r"reset with the same seed and problem.*Draw everything in reset"
    ):
        played(f"{echo}:Careless")


def test_an_observation_without_room_is_refused(echo):
    with pytest.raises(MismatchError, match="No prompts left: all 2 were skipped"):
        played(f"{echo}:Echo", context=8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": "my.py:f"}, "assigns the rewards itself"),
        ({"prompt_template": "r1-distill"}, "asks for one answer"),
        ({"environment": "", "episodes": 4}, "Add --environment FILE.py:NAME"),
        ({"eval_episodes": 4}, "Give both"),
        ({"episodes": 4, "eval_episodes": 4, "eval_dataset": "x.jsonl"}, "Leave one out"),
        ({"episodes": 3}, "more than the 3 problems"),
        ({"environment": "nowhere.py:f"}, "no such class"),
    ],
)
def test_contradicting_settings_are_refused(echo, changes, said):
    config = load_config("miniature", SMALL | {"environment": f"{echo}:Echo"} | changes)
    with pytest.raises(UsageError, match=said):
        check_runs([config])


@pytest.mark.slow
def test_experts_are_replayed_in_every_turn(tmp_path):
    """An engine in bfloat16: an episode's routes belong to the right tokens, or replaying them
    would not help.
    """
    settings = {
        "model": with_tokenizer(tmp_path, num_hidden_layers=3),
        "environment": talk_file(tmp_path),
    }
    settings |= {
        "episodes": 4,
        "max_tokens": 60,
        "turn_tokens": 6,
        "steps": 1,
        "rollout_dtype": "bfloat16",
    }
    gaps = []
    for replay in (False, True):
        (record,) = run(tmp_path / str(replay), replay_routes=replay, **settings)
        assert record["turns"] > 1.3 and record["grad_norm"] > 0
        gaps.append(record["mismatch"]["abs_dp_mean"])
    assert 0 < gaps[1] < 0.8 * gaps[0] and 0 < record["routing"]["flipped_tokens"] < 1


def test_each_turn_draws_from_a_seed_of_its_own(echo, monkeypatch):
    """A later version that resumes a run must sample the same."""
    game, seeds = Played(f"{echo}:Echo", max_turns=2, max_tokens=200, seed=7), list[list[int]]()
    sample = game.engine.sample

    def noted(requests: list[Request], *rest: Any) -> Any:
        seeds.append([request.seed for request in requests])
        return sample(requests, *rest)

    monkeypatch.setattr(game.engine, "sample", noted)
    game.play(PROBLEMS, 3, 2)
    game.environments.stop()
    episodes = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert seeds == [[sample_seed(7, *names, 3, turn) for names in episodes] for turn in (0, 1)]


def test_a_single_observation_without_room_names_its_problem(echo):
    """The other problem has room."""
    game = Played(f"{echo}:Again", context=40)
    problems = [Problem(5, "1 + 1?", "2"), Problem(9, "1 + 1? " * 40, "2")]
    with pytest.raises(MismatchError, match="first observation of problem 9 cannot be a prompt"):
        game.play(problems, 1, 1)
    game.environments.stop()
