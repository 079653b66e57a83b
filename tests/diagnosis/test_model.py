"""Which responses a model reads, after which ids, and what of its budget that takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
import torch

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.diagnosis.model import (
    AS_RECORDED,
    Hypothesis,
    ModelAtHand,
    SkippedReading,
    model_at_hand,
    rounded_to,
)
from mismatch_cli.models.rank_shares import Ranks
from tests.diagnosis.samples import few_responses

# Tokens of the prompts and of the responses; the last one has no prompt on record
PROMPTS, LENGTHS = [3, 1, 4, 2, 5, 2, 7], [4, 2, 1, 6, 3, 5, 9]
COSTS = [prompt + length for prompt, length in zip(PROMPTS, LENGTHS, strict=True)][:-1]


class SummingTrainer:
    """Scores each token minus the sum of the ids before it."""

    def __init__(self, model: Any = None) -> None:
        self.model = model
        self.requests: list[tuple[list[int], list[int]]] = []

    def score(self, requests: list[Any], token_budget: int, on_scored: Callable) -> list[Any]:
        scores = []
        for i, request in enumerate(requests):
            self.requests.append((request.prompt_ids, request.response_ids))
            ids = [*request.prompt_ids, *request.response_ids]
            before = np.cumsum([0, *ids])[len(request.prompt_ids) : -1]
            scores.append(SimpleNamespace(logp_T=-before.astype(float)))
            on_scored([i])
        return scores


def prompt_of(s: int) -> list[int]:
    return list(range(10 * s + 1, 10 * s + 1 + PROMPTS[s]))


def at_hand(
    budget: int | None = None, ranks: Ranks = Ranks(), model: Any = None
) -> tuple[ModelAtHand, SummingTrainer]:
    """In the trace, the prompts are in the opposite order, around one that is not in the sample."""
    sample = few_responses(
        LENGTHS,
        prompt_id_S=np.arange(7) + 20,
        sample_index_S=np.arange(7) + 5,
        step_S=np.arange(7) + 9,
        response_ids_T=np.arange(sum(LENGTHS)) + 100,
    )
    prompts = {(9 + s, 20 + s, 5 + s): prompt_of(s) for s in reversed(range(6))}
    before, last = dict(list(prompts.items())[:3]), dict(list(prompts.items())[3:])
    prompts = {**before, (0, 0, 0): [1] * 8, **last}
    trainer = SummingTrainer(model)
    return ModelAtHand(sample, prompts, lambda: trainer, ranks, budget), trainer


def response_of(s: int) -> list[int]:
    start = sum(LENGTHS[:s])
    return list(range(100 + start, 100 + start + LENGTHS[s]))


def test_responses_with_a_prompt_are_read_after_it():
    model, trainer = at_hand()
    assert model.responses == [0, 1, 2, 3, 4, 5] and model.of_all == sum(COSTS)
    assert model.budget == 8 * sum(COSTS) and model.longest_prompt == 8
    assert model.place_of == {5: 0, 4: 1, 3: 2, 2: 4, 1: 5, 0: 6}
    reported: list[int] = []
    model.on_tokens = reported.append
    logp_T = model.logp_T()
    assert trainer.requests == [(prompt_of(s), response_of(s)) for s in range(6)]
    assert reported == COSTS and model.spent == sum(COSTS)
    first = np.cumsum([sum(prompt_of(0)), 100, 101, 102])
    assert logp_T[:4].tolist() == (-first).tolist()
    assert np.isfinite(logp_T[:-9]).all() and np.isnan(logp_T[-9:]).all()
    assert model.logp_T() is logp_T and model.once_T() is logp_T and len(trainer.requests) == 6


@pytest.mark.parametrize(("budget", "responses"), [
    (sum(COSTS), [0, 1, 2, 3, 4, 5]), (sum(COSTS) - 1, [0, 2, 4]),
    (COSTS[0] + COSTS[2] + COSTS[4], [0, 2, 4]), (COSTS[0] + COSTS[2] + COSTS[4] - 1, [0, 4]),
    (1, [0]),
])  # fmt: skip
def test_half_of_the_responses_are_left_out_until_one_reading_is_in_the_budget(budget, responses):
    model, _ = at_hand(budget)
    assert model.responses == responses and model.budget == budget
    model.logp_T()
    assert model.spent == sum(COSTS[s] for s in responses), "the first reading is always made"


def test_a_few_are_one_in_sixteen_evenly_from_the_shorter_half(rng):
    for responses, few in ((128, 8), (127, 8), (100, 6), (40, 2), (24, 2), (10, 1)):
        lengths = (rng.permutation(responses) + 1).tolist()
        sample = few_responses(lengths, response_ids_T=np.zeros(sum(lengths), dtype=int))
        prompts = {(0, s, 0): [1] for s in range(responses)}
        model = ModelAtHand(sample, prompts, SummingTrainer)
        by_length = np.argsort(lengths)[: responses // 2]
        expected = sorted(by_length[:: responses // 2 // few][:few].tolist())
        assert model.few == expected and len(expected) == few
        chosen = Hypothesis("of five", responses=tuple(range(5)))
        of_five = np.argsort(lengths[:5])[: max(few, 2)]
        assert model.tried_on(chosen) == sorted(
            of_five[:: max(1, len(of_five) // few)][:few].tolist()
        )


def test_a_hypothesis_is_tried_on_responses_that_it_changes():
    model, _ = at_hand()
    (shortest,) = model.few
    assert COSTS[shortest] == min(COSTS)
    assert model.tried_on(AS_RECORDED) == model.tried_on(Hypothesis("a", changed=open)) == [1]
    assert model.tried_on(Hypothesis("b", prompt=lambda ids: [0, *ids])) == [1]
    assert model.tried_on(Hypothesis("c", prompt=lambda ids: ids[:2])) == [2]
    both = Hypothesis("c", prompt=lambda ids: ids[:-1])
    assert model.tried_on(both) == [1], "it changes every response"
    vars(model)["few"] = list(range(6))
    assert model.tried_on(both) == list(range(6))
    del vars(model)["few"]
    assert model.tried_on(Hypothesis("d", prompt=lambda ids: ids[:])) == []
    assert model.tried_on(Hypothesis("e", responses=(0, 3, 5))) == [0]


def test_neighbours_come_before_a_response_in_the_order_of_the_trace():
    """The second one before the third last is not in the sample."""
    model, trainer = at_hand()
    after_two = Hypothesis("after two", before=lambda place: min(place, 2), responses=(5, 4, 2, 1))
    assert model.tried_on(after_two) == [1]
    contexts = {
        5: prompt_of(5),
        4: [*prompt_of(5), *response_of(5), *prompt_of(4)],
        2: [*prompt_of(3), *response_of(3), *prompt_of(2)],
        1: [*prompt_of(2), *response_of(2), *prompt_of(1)],
    }
    model.logp_T(after_two)
    assert trainer.requests == [(contexts[s], response_of(s)) for s in (5, 4, 2, 1)]
    cost = sum(len(contexts[s]) + LENGTHS[s] for s in contexts)
    assert model.spent == cost
    assert model.cost_of_few(Hypothesis("2", before=after_two.before, responses=(4,))) == 15
    assert model.cost_of_few(after_two) == 0


def test_a_few_that_were_read_with_all_are_not_read_again():
    model, trainer = at_hand()
    padded = Hypothesis("padded", prompt=lambda ids: [0, *ids])
    assert model.cost_of_few(padded) == COSTS[1] + 1
    all_T = model.logp_T(padded)
    few_T = model.logp_T(padded, few=True)
    own_T = np.isin(np.arange(len(few_T)), [4, 5])
    assert few_T[own_T].tolist() == all_T[own_T].tolist() and np.isnan(few_T[~own_T]).all()
    assert len(trainer.requests) == 6 and model.cost_of_few(padded) == 0
    only_few = Hypothesis("only a few", prompt=lambda ids: [0, 0, *ids])
    model.logp_T(only_few, few=True)
    assert trainer.requests[6:] == [([0, 0, *prompt_of(1)], response_of(1))]
    assert model.cost_of_few(only_few) == 0


@pytest.mark.parametrize(("more", "is_read"), [(0, True), (-1, False)])
def test_a_try_leaves_tokens_for_two_readings_of_all_and_a_reading_of_all_for_none(more, is_read):
    tried = Hypothesis("padded", prompt=lambda ids: [0, *ids])
    for few, cost in ((True, COSTS[1] + 1 + 2 * sum(COSTS)), (False, sum(COSTS) + 6)):
        model, _ = at_hand(sum(COSTS) + cost + more)
        model.logp_T()
        if is_read:
            model.logp_T(tried, few=few)
            continue
        with pytest.raises(SkippedReading, match=f"of {model.budget:,} tokens ended"):
            model.logp_T(tried, few=few)


def test_ranks_read_their_own_responses_and_share_what_they_have():
    """Of two ranks, the second reads every other one; what the first read comes from it."""
    other = {0: np.full(4, -0.5)}
    world = SimpleNamespace(rank=1, size=2, gather=lambda own: [other, own])
    model, trainer = at_hand(ranks=Ranks(world))
    logp_T = model.logp_T()
    assert [prompt for prompt, _ in trainer.requests] == [prompt_of(s) for s in (1, 3, 5)]
    assert logp_T[:4].tolist() == [-0.5] * 4 and np.isfinite(logp_T[4:6]).all()
    assert np.isnan(logp_T[6]) and model.spent == sum(COSTS)
    spread, trainer = at_hand(ranks=Ranks(world, sharded=True))
    spread.logp_T()
    assert len(trainer.requests) == 6


def test_ctrl_c_of_ranks_or_of_the_only_reading_ends_the_command():
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    alone, trainer = at_hand()
    trainer.score = interrupted
    with pytest.raises(KeyboardInterrupt):
        alone.once_T()
    assert alone.is_interrupted and alone.logit_step is None and alone.spent == 0
    world = SimpleNamespace(rank=0, size=2)
    ranked, trainer = at_hand(ranks=Ranks(world))
    trainer.score = interrupted
    with pytest.raises(KeyboardInterrupt):
        ranked.logp_T()
    assert not ranked.is_interrupted


def test_the_step_of_logits_is_that_of_bfloat16_where_a_token_is_uncertain():
    """The logit of a token is that of the position before it: here its place times 3, in a
    vocabulary of two, of which the other has 1 less.
    """

    def logits(input_ids: torch.Tensor) -> SimpleNamespace:
        place_T = torch.arange(input_ids.shape[1], dtype=torch.float32)
        own_1TV = 3.0 * place_T[None, :, None] - torch.tensor([0.0, 1.0])
        return SimpleNamespace(logits=own_1TV)

    lengths, ids = [3, 4], [0, 1, 0, 1, 1, 0, 1]
    sample = few_responses(lengths, response_ids_T=np.array(ids))
    prompts = {(0, 0, 0): [1, 1], (0, 1, 0): [0]}
    logits.device = "cpu"
    model = ModelAtHand(sample, prompts, lambda: SimpleNamespace(model=logits))
    vars(model)["few"] = [0, 1]
    tokens: list[int] = []
    model.on_tokens = tokens.append
    steps, weights = [], []
    for place, token in zip([1, 2, 3, 0, 1, 2, 3], ids, strict=True):
        logit = max(abs(3.0 * place - token), 1e-3)
        steps.append(2.0 ** (np.floor(np.log2(logit)) - 7))
        weights.append(1 - np.exp(-token) / (1 + np.exp(-1)))
    assert model.logit_step == pytest.approx(np.average(steps, weights=weights))
    assert tokens == [5, 5] and model.spent == 10


class OneTrace:
    """Two tables of a trace with the prompts of three responses, one of them not in the sample."""

    manifest: ClassVar = {}

    def require_ids(self, words: str) -> None:
        assert words == "A model reads"

    def tables(self, columns: tuple[str, ...]) -> list[pa.Table]:
        assert columns == ("step", "prompt_id", "sample_index", "prompt_ids")
        rows = [(0, 1, 0, [5, 6]), (0, 9, 0, [7]), (0, 0, 0, [8])]
        tables = []
        for own in (rows[:2], rows[2:]):
            values = dict(zip(columns, map(list, zip(*own, strict=True)), strict=True))
            tables.append(pa.table(values))
        return tables


@pytest.mark.parametrize(("recorded", "base", "loaded"), [
    ({}, None, ("m", "auto", None, None)),
    ({"dtype": "float16", "attn_implementation": "eager"}, None, ("m", "float16", None, None)),
    ({"attention_leaves_out": "sinks", "attn_implementation": "sdpa"}, "b",
     ("b", "auto", "sdpa", "m")),
])  # fmt: skip
def test_the_model_is_loaded_as_the_trainer_had_it(recorded, base, loaded, monkeypatch):
    """With the sampler's settings, of the first trace."""
    from mismatch_cli.models import adapters
    from mismatch_cli.models.scoring.trainer import Trainer

    calls: list[tuple[Any, ...]] = []

    def load(path: str, **settings: Any) -> SummingTrainer:
        own = (settings["dtype"], settings["attn_implementation"], settings["adapter"])
        calls.append((path, *own))
        assert settings["sampling"] == SamplingSettings(temperature=0.5, top_k=7)
        assert settings["sharding"] is None
        return SummingTrainer("the model")

    monkeypatch.setattr(Trainer, "load", load)
    monkeypatch.setattr(adapters, "base_model_of_adapter", lambda path: base)
    first, second = OneTrace(), OneTrace()
    first.manifest, second.manifest = {"trainer": recorded}, {"trainer": {"dtype": "other"}}
    sampling = {"temperature": 0.5, "top_k": 7, "max_tokens": 3}
    sample = few_responses([1, 2, 1], response_ids_T=np.arange(4))
    model = model_at_hand("m", sample, sampling, [first, second], budget=50)
    assert calls == [], "until a hypothesis is tried"
    assert model.loaded == "the model" and calls == [loaded]
    assert model.responses == [0, 1] and model.budget == 50
    assert (model.prompt(0), model.prompt(1), model.place_of) == ([8], [5, 6], {1: 0, 0: 1})


def test_weights_are_rounded_while_a_hypothesis_is_read():
    model = torch.nn.Linear(1, 2)
    model.weight.data = torch.tensor([[1.001], [2.0]])
    hypothesis = rounded_to("bfloat16")
    assert hypothesis.name == "weights in bfloat16"
    with torch.no_grad(), hypothesis.changed(model):
        assert model.weight.flatten().tolist() == [1.0, 2.0]
    assert model.weight.flatten().tolist() == pytest.approx([1.001, 2.0])


def test_without_a_prompt_the_longest_has_no_tokens():
    assert ModelAtHand(few_responses([1]), {}, SummingTrainer).longest_prompt == 0


def test_a_hypothesis_changes_nothing_by_default():
    assert AS_RECORDED.prompt([1, 2]) == [1, 2] and AS_RECORDED.changed is nullcontext
    assert AS_RECORDED.before is None and AS_RECORDED.responses == ()
