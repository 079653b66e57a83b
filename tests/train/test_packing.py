"""Responses packed into one row, as for flash attention: here eager attention has to keep them
apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from mismatch_cli.models.scoring import trainer as trainer_module
from mismatch_cli.models.scoring.layout import keeps_apart, micro_batches, pack
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.train.learner import Learner
from tests.train.learners import gradients
from tests.train.ranks.on_ranks import CONFIG, PLAIN, TOPK, VOCABULARY, samples

FAMILIES = {
    "Qwen3": {},
    "Gemma2": {"sliding_window": 8, "final_logit_softcapping": 3.0},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "can_pack", keeps_apart)


def load(save_model: Callable[..., str], family: str) -> Trainer:
    path = save_model(family, vocab_size=VOCABULARY, **FAMILIES[family])
    return Trainer.load(path, sampling=PLAIN, dtype="float32", attn_implementation="eager")


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_padded_rows(save_model, packing, family):
    trainer = load(save_model, family)
    assert trainer.packed and trainer.describe()["packed"]
    requests = [
        ScoreRequest(s.rollout.prompt_ids, s.rollout.response_ids, s.rollout.topk_ids_TK)
        for s in samples()
    ]
    packed = trainer.score(requests, token_budget=100)
    trainer.packed = False
    for score, expected in zip(packed, trainer.score(requests, token_budget=1), strict=True):
        np.testing.assert_allclose(score.logp_T, expected.logp_T, atol=1e-5)
        np.testing.assert_allclose(score.logp_at_topk_TK, expected.logp_at_topk_TK, atol=1e-5)
        assert score.logp_at_topk_TK.shape[1] == TOPK


@pytest.mark.parametrize("replay", [False, True])
def test_routes_belong_to_the_same_tokens_as_in_padded_rows(save_model, monkeypatch, rng, replay):
    """Compared and replayed, with routes that no router would choose."""
    path, results = save_model("Qwen3Moe", vocab_size=VOCABULARY, **FAMILIES["Qwen3Moe"]), []
    plain = [ScoreRequest(s.rollout.prompt_ids, s.rollout.response_ids) for s in samples()]
    routes = [
        rng.permuted(np.tile(np.arange(8, dtype=np.uint16), (r.num_fed, 2, 1)), axis=-1)[..., :2]
        for r in plain
    ]
    requests = [
        replace(r, routes_FMK=routes_FMK) for r, routes_FMK in zip(plain, routes, strict=True)
    ]
    for packs in (keeps_apart, lambda _: False):
        monkeypatch.setattr(trainer_module, "can_pack", packs)
        settings = {"dtype": "float32", "attn_implementation": "eager", "replay_routes": replay}
        results.append(
            Trainer.load(path, sampling=PLAIN, **settings).score(requests, token_budget=100)
        )
    for packed, padded in zip(*results, strict=True):
        np.testing.assert_allclose(packed.logp_T, padded.logp_T, atol=1e-5)
        assert packed.routes.flips_T.any() and np.array_equal(
            packed.routes.flips_T, padded.routes.flips_T
        )


@pytest.mark.parametrize("algorithm", ["dppo-binary-tv", "gspo"])
def test_gradients_are_those_of_padded_rows(save_model, packing, algorithm):
    results = []
    for packs in (True, False):
        trainer = load(save_model, "Qwen3")
        trainer.packed = packs
        learner = Learner(trainer, parse_algorithm(algorithm, training=True), PLAIN, CONFIG)
        learner.update(samples(recomputed=parse_algorithm(algorithm).needs_recomputed))
        results.append(gradients(learner))
    packed, padded = results
    assert packed.keys() == padded.keys()
    for name, expected in padded.items():
        limits = {"rtol": 0, "atol": 5e-6 * float(expected.abs().max())}
        torch.testing.assert_close(packed[name], expected, **limits)


def test_a_row_holds_as_many_tokens_as_the_budget_without_padding():
    requests = [ScoreRequest([1], [2] * n) for n in (3, 9, 2, 8, 0, 3)]
    assert micro_batches(requests, 12, packed=True) == [[1], [3, 0], [5, 2]]
    ids, positions = pack([requests[0], requests[2]], torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 2, 1, 2]] and positions.tolist() == [[0, 1, 2, 0, 1]]


@pytest.mark.parametrize(("family", "settings"), [
    ("Bloom", {"n_layer": 2, "n_head": 4}),  # its attention counts from the first token of a row
    # Other layers run across sequences
    ("FalconH1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}),
])  # fmt: skip
def test_a_model_that_would_mix_responses_is_not_packed(save_model, packing, family, settings):
    path = save_model(family, vocab_size=VOCABULARY, **settings)
    assert not Trainer.load(
        path, sampling=PLAIN, dtype="float32", attn_implementation="eager"
    ).packed


def test_only_flash_attention_gets_packed_rows(save_model):
    trainer = load(save_model, "Qwen3")
    assert keeps_apart(trainer.model) and not trainer.packed and "packed" not in trainer.describe()
