"""What a rescoring says of samplers and adapters, and the versions and columns that it writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.probe import rescore
from mismatch_cli.probe.config import EQUAL, NEWER
from mismatch_cli.probe.rescore_plan import RescorePlan, versions_of
from mismatch_cli.probe.rollouts import plan_shards
from mismatch_cli.probe.score import ScoringPass
from mismatch_cli.probe.tasks.prompts import Problem

RECORDED = {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "max_tokens": 5}


class Talk:
    def __init__(self) -> None:
        self.words: list[str] = []

    def say(self, message: str) -> None:
        self.words.append(message)


@pytest.mark.parametrize(
    ("recorded", "stated", "temperature", "words"),
    [
        (RECORDED, {}, 0.7, []),
        (RECORDED, {"temperature": 0.7}, 0.7, []),
        (RECORDED, {"temperature": 1.0}, 1.0, ["Sampled with temperature 0.7, scored with 1:"]),
        (None, {"temperature": 2.0}, 2.0, []),
        (None, {}, 1.0, ["does not say how its responses were sampled"]),
        (None, {"top_p": 0.9}, 1.0, ["does not say how its responses were sampled"]),
        (RECORDED, {"top_p": 0.5, "temperature": 2.0}, 2.0, ["temperature 0.7", "top-p 0.9"]),
    ],
)
def test_logits_are_transformed_as_typed_or_else_as_recorded(recorded, stated, temperature, words):
    talk, config = Talk(), SimpleNamespace(sampler=SimpleNamespace(stated=stated))
    manifest = {} if recorded is None else {"config": {"sampling": recorded}}
    sampling = rescore._sampling(config, manifest, talk)
    assert sampling.temperature == temperature
    assert sampling.top_p == stated.get("top_p", 0.9 if recorded else 1.0)
    assert sampling.max_tokens == SamplingSettings().max_tokens
    assert len(talk.words) == len(words)
    assert all(part in said for part, said in zip(words, talk.words, strict=True))


def test_the_trainers_sampling_is_described_where_it_differs_from_the_engines():
    typed = SamplingSettings(temperature=0.7, top_p=0.9)
    facts = {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": 0.0}
    assert rescore._scored_with(typed, {"config": {"sampling": RECORDED}}) == {}
    assert rescore._scored_with(typed, {}) == facts
    other = {"config": {"sampling": RECORDED | {"temperature": 1.0}}}
    assert rescore._scored_with(typed, other) == facts


@pytest.mark.parametrize(
    ("rollout", "weights", "warns"),
    [
        ({"adapter": "lora", "adapter_digest": "d"}, EQUAL, True),
        ({"adapter": "lora", "adapter_digest": "d"}, NEWER, False),
        ({}, EQUAL, False),
    ],
)
def test_equal_weights_that_lack_the_adapter_that_sampled_are_named(rollout, weights, warns):
    talk, config = Talk(), SimpleNamespace(scorer_adapter=None, weights=weights)
    rescore._warn_of_adapters(config, {"rollout": rollout}, talk)
    assert [("sampled with the adapter lora" in said) for said in talk.words] == [True] * warns


def test_a_version_that_is_absent_or_null_is_unknown():
    table = pa.table({"version_rollout": pa.array([3, None, 5], pa.int32())})
    assert versions_of(table, "version_rollout", 7).tolist() == [3, 7, 5]
    assert versions_of(table, "version_trainer", -1).tolist() == [-1, -1, -1]
    assert versions_of(table, "version_trainer", -1).dtype == np.int32


@pytest.mark.parametrize("column", ["logp_recomputed", "logp_trainer"])
def test_a_trainer_that_is_kept_without_its_version_scored_at_later_weights(column):
    plan = RescorePlan(ScoringPass(column), 4, False, (), (), (), "digest", ())
    table = pa.table({"version_trainer": pa.array([9, None], pa.int32())})
    versions: dict[str, Any] = {name: v.tolist() for name, v in plan.versions(table).items()}
    assert versions == {"version_rollout": [0, 0]} | (
        {"version_trainer": [9, 5]} if column == "logp_recomputed" else {}
    )


def test_a_response_without_a_measured_token_is_null():
    nan = np.nan
    rows = [np.array([nan, -1.0]), np.array([nan, nan]), np.zeros(0), np.array([-2.0])]
    measured = rescore._measured(rows)
    assert [row is None for row in measured] == [False, True, True, False]


def test_shards_are_the_prompts_in_order_each_with_all_its_samples():
    problems = [Problem(number, "p", None) for number in (7, 8, 9)]
    plans = plan_shards(problems, [[1], [2], [3]], 2)
    assert [(plan.index, plan.problems, plan.prompt_ids) for plan in plans] == [
        (0, problems[:2], [[1], [2]]),
        (1, problems[2:], [[3]]),
    ]
    posed, requests = plans[0].requests(range(5, 7), seed=1)
    assert [problem.prompt_id for problem in posed] == [7, 7, 8, 8]
    assert [request.prompt_ids for request in requests] == [[1], [1], [2], [2]]
    assert len({request.seed for request in requests}) == 4
    assert plan_shards([], [], 2) == []
