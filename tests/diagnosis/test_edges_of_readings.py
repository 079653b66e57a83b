"""The hypotheses that are tried: padded lengths, prompts, and tensors of a small model."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from mismatch_cli.diagnosis import hypotheses, other_weights, readings
from mismatch_cli.diagnosis.checks import attended_padding
from mismatch_cli.diagnosis.model import Hypothesis, ModelAtHand
from mismatch_cli.diagnosis.readings import Reading, Readings, Survey
from tests.diagnosis.samples import SampleColumns
from tests.tiny_models import saved_model


@pytest.mark.parametrize(("responses", "changed", "lengths"), [
    (64, (), [25, 17, 9, 1]), (64, tuple(range(57, 64)), [4, 3, 2, 1]), (64, (62, 63), [2, 1]),
    (8, (), [1]),
])  # fmt: skip
def test_hypotheses_are_tried_on_a_few_of_the_shorter_half(responses, changed, lengths):
    """One in sixteen, evenly. The first response is the longest, and the last has one token."""
    zero_S = np.zeros(responses, dtype=int)
    sample = SimpleNamespace(
        num_responses=responses, step_S=zero_S, prompt_id_S=np.arange(responses),
        sample_index_S=zero_S, length_S=np.arange(responses, 0, -1),
    )  # fmt: skip
    prompts = {(0, number, 0): [1] for number in range(responses)}
    model = ModelAtHand(sample, prompts, load=lambda: None)
    few = model.tried_on(Hypothesis("another", changed=lambda _: nullcontext(), responses=changed))
    assert sample.length_S[few].tolist() == lengths


def test_prompts_are_padded_to_their_longest_and_to_the_usual_multiples():
    config = SimpleNamespace(pad_token_id=7)
    assert hypotheses.padding_tokens(config) == [7, 0]
    assert hypotheses.padded_lengths(100) == [100, 104, 128, 256, 512, 1024, 2048]


def test_runs_of_placeholders_are_collapsed_and_placeholders_expanded():
    config = SimpleNamespace(image_token_id=9)
    prompts = {h.name: h.prompt for h in hypotheses.other_prompts(config)}
    run = [1, *[9] * 16, 2, 2]
    assert prompts["each run of one token as one"](run) == [1, 9, 2, 2]
    assert prompts["without its runs of one token"](run) == [1, 2, 2]
    assert prompts["each placeholder 9 16 times"]([1, 9, 2, 2]) == run
    assert prompts["without its runs of one token"]([9] * 5) == [9] * 5


def test_a_factor_is_searched_beside_the_one_that_leaves_least():
    """The gap left is smallest at 3, between the neighbours of 2.5."""

    def factors_tried(least: float) -> list[float]:
        readings = SimpleNamespace(_left_on_few=lambda f: abs(np.log(f / 3.0)) + least)
        return list(Readings.factor_between(readings, float, [0.5, 1.0, 2.5, 6.0, 20.0]))

    tried = factors_tried(0.1)
    assert all(1.0 <= factor <= 6.0 for factor in tried)
    assert tried[-1] == pytest.approx(3.0, rel=0.05)
    assert factors_tried(1.1) == [], "none helps"


@pytest.mark.parametrize(
    ("lefts", "counts"),
    [
        ([1.0, 0.5, 0.05], []),
        ([1.0, 0.8, 0.9], range(1, 5)),
        ([1.0, 0.5, 0.4], range(2, 5)),
        ([1.0, 1.0, 1.0], []),
    ],
    ids=["it is exact", "beside the second", "beside the last", "none helps"],
)
def test_counts_of_padding_are_tried_beside_the_one_that_leaves_least(lefts, counts, monkeypatch):
    """First 1, 2 and 4 tokens of padding."""
    monkeypatch.setattr(readings, "PADDINGS", (1, 2, 4))
    first = [hypotheses.padded(count, 0).name for count in (1, 2, 4)]
    stub = SimpleNamespace(
        _model=SimpleNamespace(
            config=SimpleNamespace(),
            longest_prompt=9,
            scored={(name, True): None for name in first},
        ),
        _left_on_few=lambda hypothesis: lefts[first.index(hypothesis.name)],
        _while_helping=lambda paddings: [next(paddings)],
    )
    names = [hypothesis.name for hypothesis in Readings._padding(stub)]
    to_length = [] if min(lefts) < 0.1 else [hypotheses.padded_to(9, 0).name]
    assert names == first + to_length + [hypotheses.padded(count, 0).name for count in counts]


def test_tensors_that_a_side_may_lack_are_put_back(tmp_path):
    """Gemma adds 1 to its norms' weights: those never loaded are 0."""
    for family, initial in (("Qwen3", 1.0), ("Gemma3Text", 0.0)):
        path = saved_model(tmp_path, family) if family == "Qwen3" else gemma(tmp_path)
        model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        kinds = list(other_weights.missing_tensors(model))
        assert {"input_layernorm weights never loaded", "no q_norm"} <= {h.name for h in kinds}
        for hypothesis in kinds:
            with hypothesis.changed(model):
                if hypothesis.name.startswith("input_layernorm"):
                    assert model.model.layers[0].input_layernorm.weight.eq(initial).all()
        for name, weight in model.named_parameters():
            assert torch.equal(weight, before[name])


def gemma(folder):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 64}
    Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).save_pretrained(folder / "gemma")
    return str(folder / "gemma")


@pytest.mark.parametrize(
    ("rollout", "trainer", "side"),
    [(0.01, 1.0, "trainer"), (1.0, 0.01, "rollout"), (0.9, 1.0, None), (0.01, 0.01, None)],
)
def test_a_side_differs_only_if_the_other_one_agrees_with_the_model(rollout, trainer, side):
    """Of a gap of 1 nat: both far from the model, or both at it, name no side."""
    readings = SimpleNamespace(
        distances={"rollout": rollout, "trainer": trainer}, _mean=lambda _: 1.0, _d_T=None
    )
    assert Readings.side.func(readings) == side


@pytest.mark.parametrize(("side", "left", "ending"), [
    ("trainer", 0.04, "reproduces the trainer's numbers; as recorded, the rollout's."),
    ("rollout", 0.04, "reproduces the rollout's numbers; as recorded, the trainer's."),
    ("rollout", 0.5, "is clearly nearer to the rollout's numbers: that explains 50 % of the gap."),
])  # fmt: skip
def test_a_reading_names_the_side_that_it_reproduces_and_the_other_as_recorded(side, left, ending):
    survey = Survey(reading=Reading("3 paddings", side, np.array([left, np.nan]), left))
    evidence = SimpleNamespace(
        readings=SimpleNamespace(distances={side: 0.0}, search=lambda _: survey),
        gap=SimpleNamespace(value=1.0),
        expected=SimpleNamespace(high=0.1),
        sample=SampleColumns(index_N=np.arange(2), d_N=np.array([1.0, 2.0])),
    )
    finding = attended_padding.check(evidence)
    assert finding.sentence == f"With 3 paddings the model {ending}"
    assert (finding.status, finding.effect) == ("found", left)
    assert finding.left_N.tolist() == [left, 2 * left], "the second token was not read"
    assert dict(finding.evidence)["the side that differs"] == side
