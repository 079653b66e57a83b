"""Which probes make the engine give its full distributions, and what their grader is told."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from mismatch_cli.models.rank_shares import ALL_HERE
from mismatch_cli.probe import record, rollouts
from mismatch_cli.probe.full_divergence import Distributions
from mismatch_cli.probe.score import ScoringPass


@pytest.mark.parametrize(("responses", "full"), [(0, False), (1, True), (2, True)])
def test_one_response_is_enough_for_full_distributions(tmp_path, monkeypatch, responses, full):
    """The engine is told, and the room on the disk is checked, before anything is sampled. Only a
    run that continues none removes the results of another.
    """
    events = []

    @contextmanager
    def loaded_sampler(*_, fresh, full, **__):
        events.append((full, fresh))
        yield SimpleNamespace(sample=lambda *_, **__: {"shards": 1})

    monkeypatch.setattr(record, "load_tokenizer", lambda _: [])
    monkeypatch.setattr(record, "load_problems", lambda _: [])
    monkeypatch.setattr(record, "vocabulary_of", lambda *_: 512)
    monkeypatch.setattr(record, "check_room", lambda *_: events.append("checked"))
    monkeypatch.setattr(record, "loaded_sampler", loaded_sampler)
    config = SimpleNamespace(
        engine=SimpleNamespace(model="m"), scoring_model="m", prompt_source=None
    )
    distributions = Distributions(tmp_path / "distributions", responses)
    for manifest in ({}, {"shards": 1}):
        events.clear()
        answer = record._sample(config, tmp_path, manifest, distributions, None, None)
        assert answer == {"shards": 1}
        assert events == ["checked"] * full + [(full, manifest == {})]


@pytest.mark.parametrize("chat_template", [None, "{{ messages }}"])
def test_a_chat_template_makes_conversations_of_problems(tmp_path, monkeypatch, chat_template):
    """The grader, which comes before the engine, hands them to a reward function."""
    options = {}

    def grader(_, **words):
        options.update(words)
        raise InterruptedError

    monkeypatch.setattr(rollouts, "Grader", grader)
    task = SimpleNamespace(reward=None, seconds=9, template="chat", answer_format="", grader="")
    tokenizer = SimpleNamespace(decode=str, chat_template=chat_template)
    sampler = rollouts.loaded_sampler(
        SimpleNamespace(task=task), tmp_path, [], tokenizer, None, fresh=True
    )
    with pytest.raises(InterruptedError), sampler:
        pass
    assert options["chat"] == (chat_template is not None)


def test_a_shard_begins_with_the_number_of_its_first_response(tmp_path, monkeypatch):
    """Of five prompts with three samples, two prompts a shard; nothing is done yet."""
    events = []

    @contextmanager
    def sampling(_, total, done, __):
        events.append((total, done))
        yield None

    def sample_shard(plan, *_, first_response, **__):
        events.append((len(plan.problems), first_response))

    monkeypatch.setattr(rollouts, "sample_shard", sample_shard)
    settings = SimpleNamespace(samples_per_prompt=3, max_tokens=8, seed=0)
    config = SimpleNamespace(sampler=settings, prompts_per_shard=2)
    sampler = SimpleNamespace(
        encoded=SimpleNamespace(problems=list("abcde"), prompt_ids=[[1]] * 5),
        ranks=SimpleNamespace(own=list, world=SimpleNamespace(barrier=lambda: None)),
        progress=SimpleNamespace(sampling=sampling),
        _promise=lambda *_: {},
        engine=None,
        grader=None,
    )
    assert rollouts.Sampler.sample(sampler, config, tmp_path, {}) == {}
    assert events == [(15, 0), (2, 0), (2, 6), (1, 12)]


def test_only_the_pass_of_the_trainer_scores_responses_twice(monkeypatch):
    """Not the one at the weights that sampled: its tokens are counted once."""
    passes = []
    monkeypatch.setattr(record, "equal_weights", lambda _: False)
    monkeypatch.setattr(record, "shards_of", lambda *_: [None])
    monkeypatch.setattr(ScoringPass, "is_done", lambda *_: False)
    monkeypatch.setattr(record, "write_manifest", lambda *_: None)
    monkeypatch.setattr(record, "_load_trainer", lambda *_: SimpleNamespace(describe=dict))
    monkeypatch.setattr(
        record, "score_shards", lambda score, *rest: passes.append((score.keywords, rest[2]))
    )
    for requested in (None, 7):
        scorer = SimpleNamespace(noise_responses=requested, token_budget=9)
        extras = SimpleNamespace(keep_routes=0)
        config = SimpleNamespace(scorer=scorer, extras=extras, engine_adapter=None)
        record._score(config, None, {}, None, None, ALL_HERE)
    scorings = [(keywords["scoring"].column, noise) for keywords, noise in passes]
    assert scorings == [
        ("logp_recomputed", 0),
        ("logp_trainer", None),
        ("logp_recomputed", 0),
        ("logp_trainer", 7),
    ]
