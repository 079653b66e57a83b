"""What no sampler can have drawn is refused, and answers decide which rows have rewards.

The engine here is a stand-in: a real one does not report a NaN on demand.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.models.engines import sample_seed
from mismatch_cli.probe.rollouts import plan_shards, sample_shard
from mismatch_cli.probe.score import evenly_spaced
from mismatch_cli.probe.tasks.grading import Grader
from mismatch_cli.probe.tasks.prompts import Problem
from mismatch_cli.report.preamble import left_out_of
from mismatch_cli.rules.batch import Rollout
from mismatch_cli.trace.manifest import write_manifest
from mismatch_cli.trace.origin import About
from mismatch_cli.trace.reader import Trace

GOOD = Rollout(
    prompt_ids=[1],
    response_ids=[5, 6],
    logp_rollout_T=np.array([-0.5, 0.0], np.float32),  # certain, and rank 1: a true zero
    rank_rollout_T=np.array([2, 1], np.int32),
    topk_ids_TK=None,
    topk_logp_rollout_TK=None,
    finish_reason="stop",
)


class Replay:
    """Answers every request with the same rollout."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout

    def sample(self, requests, on_finished):
        return [self.rollout for _ in requests]


def sample(folder, rollout=GOOD, answers=("5", None), text="\\boxed{5}", reward=""):
    problems = [Problem(i, "p", answer) for i, answer in enumerate(answers)]
    (plan,) = plan_shards(problems, [[1]] * len(problems), prompts_per_shard=8)
    with Grader(lambda ids: text, reward=reward) as grader:
        sample_shard(
            plan,
            Replay(rollout),
            grader,
            folder=folder,
            samples_per_prompt=2,
            seed=0,
            on_finished=lambda n: None,
        )
    write_manifest(folder, {})
    (batch,) = Trace.open(folder).batches()
    return batch


def test_a_trace_counts_responses_without_an_answer(tmp_path):
    """Those of the problem that has no answer to grade with are not among them."""
    sample(tmp_path / "trace", text="It is 5.")
    trace = Trace.open(tmp_path / "trace")
    assert trace.count("unstated") == 2
    (note,) = [note for note in left_out_of(About.of([trace])) if "asked form" in note]
    assert note.startswith("2 of 4 responses ended without an answer")


def test_a_shard_is_graded_as_one_batch(tmp_path):
    """As in `probe` and `curate`: all responses of the shard in one call, even those without a
    known answer.
    """
    code = (
        "def judge(responses, answers):\n"
        "    return [len(responses) + (a is None) for a in answers]\n"
    )
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    batch = sample(tmp_path / "trace", reward=f"{tmp_path}/mine.py:judge")
    assert batch.reward_S.tolist() == [4, 4, 5, 5]


@pytest.mark.parametrize(
    ("logp", "ranks", "message"),
    [
        ([-0.5, np.nan], [1, 1], "log μ = nan for token 1"),
        ([0.25, -0.5], [1, 1], "log μ = 0.25 for token 0"),
        ([-np.inf, -0.5], [1, 1], "log μ = -inf for token 0"),
        ([-0.5, 0.0], [1, 7], "placeholder"),
    ],
)
def test_impossible_log_probs_are_refused_by_name(tmp_path, logp, ranks, message):
    bad = dataclasses.replace(
        GOOD, logp_rollout_T=np.array(logp, np.float32), rank_rollout_T=np.array(ranks, np.int32)
    )
    with pytest.raises(MismatchError, match=message):
        sample(tmp_path, bad)
    assert list(tmp_path.glob("*.parquet")) == []


def test_rows_without_an_answer_have_no_reward(tmp_path):
    batch = sample(tmp_path)
    assert batch.reward_S[:2].tolist() == [1, 1]
    assert np.isnan(batch.reward_S[2:]).all()
    assert batch.advantage_T[:4].tolist() == [0, 0, 0, 0]
    assert np.isnan(batch.advantage_T[4:]).all()


def test_without_any_answer_there_are_no_rewards(tmp_path):
    batch = sample(tmp_path, answers=(None, None))
    assert batch.reward_S is None
    assert batch.advantage_T is None


def test_seeds_follow_from_what_is_sampled():
    seeds = {
        sample_seed(s, p, i, step)
        for s in (0, 1)
        for p in range(20)
        for i in range(20)
        for step in (0, 1)
    }
    assert len(seeds) == 2 * 20 * 20 * 2
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize(("count", "total"), [(0, 10), (3, 10), (10, 10), (20, 10), (1, 1000)])
def test_evenly_spaced_picks_the_number_it_says(count, total):
    chosen = [i for i in range(total) if evenly_spaced(count, total)(i)]
    assert len(chosen) == min(count, total)
    if len(chosen) > 1:
        assert max(np.diff(chosen)) - min(np.diff(chosen)) <= 1
    if 0 < count < total:
        assert total - len(chosen) <= chosen[-1], "not the first ones"
    assert [i for i in range(8) if evenly_spaced(4, 8)(i)] == [1, 3, 5, 7]


def test_seeds_do_not_depend_on_the_shards(tmp_path):
    """A prompt's own number counts, not its place in a shard."""
    problems = [Problem(10 + i, "p", "5") for i in range(6)]
    seeds = []
    for size in (6, 2):
        drawn_seeds: list[int] = []

        class Noting(Replay):
            def sample(self, requests, on_finished, seeds=drawn_seeds):
                seeds += [request.seed for request in requests]
                return super().sample(requests, on_finished)

        for plan in plan_shards(problems, [[1]] * len(problems), prompts_per_shard=size):
            with Grader(lambda _: "", reward="") as grader:
                sample_shard(
                    plan,
                    Noting(GOOD),
                    grader,
                    folder=tmp_path / str(size),
                    samples_per_prompt=2,
                    seed=0,
                    on_finished=lambda _: None,
                )
        seeds.append(drawn_seeds)
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 12
