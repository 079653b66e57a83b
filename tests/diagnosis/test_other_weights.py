"""Weights that a side may lack, on modules of a few numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mismatch_cli.diagnosis.other_weights import adapter_scales, missing_tensors, with_dropout


class RMSNorm(nn.Module):
    """Adds a number to its weights."""

    def __init__(self, added: float = 0.0) -> None:
        super().__init__()
        self.weight, self.added = nn.Parameter(torch.tensor([3.0, 5.0, 7.0])), added

    def forward(self, x_H: torch.Tensor) -> torch.Tensor:
        return x_H / x_H.norm(dim=-1, keepdim=True) * (self.weight + self.added)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.ln = RMSNorm(), nn.LayerNorm(3)
        self.post_norm = RMSNorm(1.0)
        self.proj, self.plain = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.grouped_norm = nn.GroupNorm(1, 3, affine=False)


class Model(nn.Module):
    def __init__(self, tied: bool = False, sizes: tuple[int, int] = (4, 4)) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.embed, self.head = nn.Embedding(sizes[0], 3), nn.Linear(3, sizes[1], bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


def test_each_kind_of_norm_and_bias_may_be_missing():
    model = Model()
    kinds = {hypothesis.name: hypothesis.changed for hypothesis in missing_tensors(model)}
    assert list(kinds) == [
        "q_norm weights never loaded",
        "no q_norm",
        "ln weights never loaded",
        "post_norm weights never loaded",
        "no norms of queries and keys",
        "no proj biases",
        "the embeddings as its head",
    ]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}

    def changed_names() -> list[str]:
        state = model.state_dict()
        return [name for name in before if not torch.equal(state[name], before[name])]

    x_H = torch.tensor([3.0, 4.0, 0.0])
    for name, weight, value in (
        ("q_norm weights never loaded", "q_norm.weight", 1.0),
        ("post_norm weights never loaded", "post_norm.weight", 0.0),
        ("no proj biases", "proj.bias", 0.0),
    ):
        with kinds[name](model):
            assert changed_names() == [f"layers.{layer}.{weight}" for layer in range(2)]
            for layer in range(2):
                assert model.state_dict()[f"layers.{layer}.{weight}"].eq(value).all()
        assert changed_names() == []
    for name in ("no q_norm", "no norms of queries and keys"):
        with kinds[name](model):
            for layer in model.layers:
                assert torch.equal(layer.q_norm(x_H), x_H)
                assert not torch.equal(layer.post_norm(x_H), x_H)
        assert not torch.equal(model.layers[0].q_norm(x_H), x_H)
    with kinds["the embeddings as its head"](model):
        assert changed_names() == ["head.weight"]
        assert torch.equal(model.head.weight, model.embed.weight)
    assert changed_names() == []


@pytest.mark.parametrize("model", [Model(tied=True), Model(sizes=(4, 5))], ids=["tied", "larger"])
def test_a_head_that_is_tied_or_of_another_size_is_not_tied(model):
    assert "the embeddings as its head" not in {h.name for h in missing_tensors(model)}


def test_without_norms_of_queries_none_is_left_out():
    model = Model()
    for layer in model.layers:
        layer.q_norm = None
    left_out = [h.name for h in missing_tensors(model) if h.name.startswith("no ")]
    assert left_out == ["no proj biases"]


def test_an_adapter_is_tried_at_other_scales_and_put_back():
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)])
    assert adapter_scales(model) == []
    model[0].lora_A, model[0].scaling = nn.ModuleDict(), {"default": 2.0, "other": 8.0}
    model[1].lora_A, model[1].scaling = nn.ModuleDict(), 3.0
    model[2].scaling = {"default": 5.0}
    scales = {hypothesis.name: hypothesis.changed for hypothesis in adapter_scales(model)}
    factors = {
        "without its adapter": 0.0,
        "the adapter at half its scale": 0.5,
        "the adapter at twice its scale": 2.0,
    }
    assert list(scales) == list(factors)
    for name, factor in factors.items():
        with scales[name](model):
            assert model[0].scaling == {"default": 2.0 * factor, "other": 8.0 * factor}
            assert (model[1].scaling, model[2].scaling) == (3.0, {"default": 5.0})
        assert model[0].scaling == {"default": 2.0, "other": 8.0}


def with_config(model: nn.Module, **settings: float | None) -> nn.Module:
    text = SimpleNamespace(to_dict=lambda: settings)
    model.config = SimpleNamespace(get_text_config=lambda: text)
    return model.eval()


def test_dropout_is_tried_where_a_rate_is_above_0():
    for settings in ({}, {"attention_dropout": 0.0}, {"attn_pdrop": None}, {"other": 0.5}):
        assert with_dropout(with_config(nn.Linear(1, 1), **settings)) is None, settings
    assert with_dropout(with_config(nn.Dropout(0.0))) is None
    for model in (
        with_config(nn.Dropout(0.25)),
        with_config(nn.Linear(1, 1), attention_dropout=0.1),
        with_config(nn.Linear(1, 1), attn_pdrop=0.1),
    ):
        assert with_dropout(model).name == "dropout on"


def test_dropout_is_the_same_in_each_reading_and_ends_with_it():
    model = with_config(nn.Sequential(nn.Dropout(0.5)))
    ones = torch.ones(200)
    state = torch.random.get_rng_state()
    results = []
    for _ in range(2):
        with with_dropout(model).changed(model):
            results.append(model(ones))
        assert not model.training and torch.equal(model(ones), ones)
    assert torch.equal(*results) and set(results[0].tolist()) == {0.0, 2.0}
    assert torch.equal(torch.random.get_rng_state(), state)
