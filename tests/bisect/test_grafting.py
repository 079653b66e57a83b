"""The engine's modules in the trainer's pass: grafting a kind of modules removes the gap of a
fault planted in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.bisect.dissect import graft
from mismatch_cli.bisect.fixed_tokens import FixedTokens
from mismatch_cli.bisect.module_stage import _choose_rows
from mismatch_cli.bisect.modules import ALL, ModuleFindings, choose_responses
from mismatch_cli.bisect.ranking import LegDifferences
from mismatch_cli.models.dissection.model_parts import ModelParts
from mismatch_cli.models.engines import EngineSettings, Request, create_engine
from mismatch_cli.models.engines._vllm_modules import pass_over
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from tests.changed_models import rounded
from tests.families import FAMILIES, save_family
from tests.tiny_models import saved_model

SAMPLING = SamplingSettings(temperature=0.9, top_p=0.95, max_tokens=8)
PLAIN = SamplingSettings(temperature=0.9, max_tokens=8)
RESPONSES = [
    ScoreRequest(
        [(7 * i + 3 * j) % 500 + 5 for j in range(9)],
        [(11 * i + 5 * j) % 500 + 3 for j in range(30)],
    )
    for i in range(2)
]
# Rotary embeddings and the norms of queries and keys are inside attention, routers inside experts.
AROUND = {"rotary": {"rotary", "attention"}, "norm": {"norm"}, "router": {"router", "experts"}}


def hf(model: str, dtype: str = "float32", sampling: SamplingSettings = PLAIN) -> Any:
    return create_engine("hf", EngineSettings(model, sampling, 0, dtype=dtype))


def trainer_of(
    model: str, dtype: str = "float32", sampling: SamplingSettings = PLAIN, **more: Any
) -> Trainer:
    return Trainer.load(model, sampling=sampling, dtype=dtype, **more)


def hold_to(findings: ModuleFindings, kind: str) -> None:
    """Check that grafting that kind, or one around it, removes the gap, others do not, and all
    leave nothing.
    """
    assert findings.gap > 1e-4, findings.gap
    taking = AROUND.get(kind, {kind})
    for other in findings.grafted:
        left = findings.left(other) / findings.gap
        assert left < 0.02 if other in (*taking, ALL) else left > 0.5, (kind, other, left)


def parts_of(model: Any, kind: str) -> list[Any]:
    return [part.module for part in ModelParts.of(model).parts if part.kind == kind]


@contextmanager
def changed(modules: list[Any], forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of each module; `forward` gets the original and the arguments."""
    own = [vars(module).get("forward") for module in modules]  # vLLM keeps its own there
    for module in modules:
        module.forward = partial(forward, module.forward)
    try:
        yield
    finally:
        for module, before in zip(modules, own, strict=True):
            del module.forward
            if before is not None:
                module.forward = before


def rounded_norms(model: Any) -> AbstractContextManager[None]:
    return changed(parts_of(model, "norm"), rounded)


def first_mlp(model: Any, by: float = 1.01) -> AbstractContextManager[None]:
    """An MLP off by a hundredth, or by another factor."""
    mlps = parts_of(model, "mlp")
    return changed(mlps[:1], lambda own, *args, **named: own(*args, **named) * by)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> str:
    """With norms of queries and keys."""
    sizes = {"hidden_size": 128, "head_dim": 32, "tie_word_embeddings": False, "eos_token_id": 1}
    return saved_model(tmp_path_factory.mktemp("qwen3"), "Qwen3", **sizes)


@pytest.fixture(scope="module")
def vllm(qwen3, tmp_path_factory) -> Iterator[Any]:
    log = tmp_path_factory.mktemp("log") / "log"
    engine = create_engine(
        "vllm", EngineSettings(qwen3, SAMPLING, 0, dtype="float32", log_file=log)
    )
    yield engine
    engine.close()


def model_of(engine: Any) -> Any:
    return (
        engine.llm.apply_model(lambda model: model)[0] if hasattr(engine, "llm") else engine.model
    )


@pytest.mark.slow
def test_equal_sides_leave_no_gap_and_no_hooks(vllm, qwen3):
    """float32 against float32: log-probs as vLLM reports them, no hooks left, no grafted keys in
    its cache.
    """
    trainer = trainer_of(qwen3, sampling=SAMPLING)
    requests = [Request(r.prompt_ids, seed=i) for i, r in enumerate(RESPONSES)]
    before = vllm.sample(requests, lambda _: None)
    scored = trainer.score([ScoreRequest.of(rollout) for rollout in before], token_budget=1)
    done: list[int] = []
    findings = graft(vllm, trainer, [ScoreRequest.of(rollout) for rollout in before], done.append)
    assert done == [1, 1] and findings.missing == []
    for rollout, prefill_T in zip(before, findings.logp_prefill, strict=True):
        np.testing.assert_allclose(prefill_T, rollout.logp_rollout_T, atol=1e-5)
    for score, logp_T in zip(scored, findings.logp_trainer, strict=True):
        np.testing.assert_array_equal(score.logp_T, logp_T)
    assert {"embedding", "norm", "rotary", "attention", "mlp", "head", ALL} == set(findings.grafted)
    assert (
        all(findings.left(kind) <= 1e-5 for kind in findings.grafted) and findings.left(ALL) <= 1e-7
    )
    assert {isolated.relation for isolated in findings.isolated.values()} <= {"bits", "rounding"}
    assert (
        max(point["inherited"] for layer in findings.layers.to_json() for point in points(layer))
        < 1e-5
    )
    again = vllm.sample(requests, lambda _: None)
    for first, second in zip(before, again, strict=True):
        np.testing.assert_array_equal(first.logp_rollout_T, second.logp_rollout_T)
        assert first.response_ids == second.response_ids
    for model in (model_of(vllm), trainer.model):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def points(layer: dict[str, Any]) -> list[dict[str, float]]:
    assert {"before", "attention", "mlp"} < set(layer), layer
    return [layer[point] for point in ("before", "attention", "mlp")]


@contextmanager
def another_base(model: Any) -> Iterator[None]:
    """Change the base of the one rotary embedding that all layers of vLLM share."""
    (rotary,) = {id(m): m for m in model.modules() if hasattr(m, "cos_sin_cache")}.values()
    own = rotary.cos_sin_cache.clone()
    rotary.base *= 2
    rotary.cos_sin_cache.copy_(rotary._compute_cos_sin_cache())
    try:
        yield
    finally:
        rotary.base /= 2
        rotary.cos_sin_cache.copy_(own)


PLANTED = {
    "norm": rounded_norms,
    "rotary": another_base,
    "mlp": first_mlp,
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_fault_in_vllm_is_removed_by_the_graft_of_its_kind(vllm, qwen3, kind):
    with PLANTED[kind](model_of(vllm)):
        findings = graft(vllm, trainer_of(qwen3, sampling=SAMPLING), RESPONSES)
    hold_to(findings, kind)
    wrong = {i.kind for i in findings.isolated.values() if i.relation == "different"}
    assert kind in wrong and wrong <= AROUND.get(kind, {kind}) | {"attention"}, wrong


def test_only_the_pass_that_reads_the_response_is_recorded(vllm):
    """vLLM also runs dummy passes to measure memory and to warm up, even with as many tokens as
    the response.
    """
    runner = vllm.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    ids = (RESPONSES[0].prompt_ids + RESPONSES[0].response_ids)[:-1]
    alone = partial(Request, seed=0, max_tokens=1)

    def read(token_ids: list[int]) -> None:
        for tokens in (len(token_ids), 8):
            runner._dummy_run(tokens)
        vllm._generate([alone(token_ids)], 0, lambda _: None)
        runner._dummy_run(len(token_ids))

    with vllm.pass_over(ids) as plain, pass_over(vllm.llm, read, ids, SAMPLING) as disturbed:
        assert torch.equal(plain.hidden_NH, disturbed.hidden_NH)
        assert [len(calls) for calls in disturbed.heard.calls.values()] == [1] * len(
            plain.heard.calls
        )
        for one, other in zip(plain.streams, disturbed.streams, strict=True):
            assert torch.equal(one["mlp"][0], other["mlp"][0])
    with (
        pytest.raises(MismatchError, match="in one pass"),
        pass_over(vllm.llm, lambda _: runner._dummy_run(8), ids, SAMPLING),
    ):
        pass


def test_residual_pairs_are_one_stream_and_enter_norms_unrounded(vllm, qwen3):
    """vLLM's layers pass on a branch and the residual, whose sum is what the trainer's layers
    pass on.
    """
    ids = (RESPONSES[0].prompt_ids + RESPONSES[0].response_ids)[:-1]
    with vllm.pass_over(ids) as engine_pass, hf(qwen3).pass_over(ids) as other:
        assert [len(stream["before"]) for stream in engine_pass.streams] == [1, 2]
        assert [len(stream["before"]) for stream in other.streams] == [1, 1]
        norms = [
            part for part in engine_pass.heard.called if part.kind == "norm" and not part.inside
        ]
        assert [engine_pass.call_of(part).fuses for part in norms] == [
            False,
            True,
            True,
            True,
            True,
        ]
        for ours, theirs in zip(engine_pass.streams, other.streams, strict=True):
            for point in ("before", "attention", "mlp"):
                sums = [sum(part.flatten(0, -2) for part in side[point]) for side in (ours, theirs)]
                torch.testing.assert_close(*sums, atol=1e-4, rtol=1e-4)


VARIED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rope base": ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "rotary"),
    "cap of attention": ({}, {"attn_logit_softcapping": None}, "attention"),
    "cap of logits": ({}, {"final_logit_softcapping": None}, "head"),
    "experts of a token": ({}, {"num_experts_per_tok": 3}, "router"),
}
OF = {
    "rope base": "llama",
    "cap of attention": "gemma2",
    "cap of logits": "gemma2",
    "experts of a token": "qwen3_moe",
}


@pytest.mark.parametrize("what", VARIED)
def test_another_configuration_on_one_side_is_removed_by_the_graft_of_its_kind(tmp_path, what):
    plain, varied, kind = VARIED[what]
    models = [
        save_family(tmp_path / str(i), OF[what], **settings)
        for i, settings in enumerate((plain, varied))
    ]
    hold_to(graft(hf(models[1]), trainer_of(models[0]), RESPONSES), kind)


def test_a_fault_in_the_hf_engine_is_removed_by_the_graft_of_its_kind(qwen3):
    engine, trainer = hf(qwen3), trainer_of(qwen3)
    with rounded_norms(engine.model):
        findings = graft(engine, trainer, RESPONSES)
        hold_to(findings, "norm")
    with first_mlp(engine.model):
        hold_to(graft(engine, trainer, RESPONSES), "mlp")
    assert graft(engine, trainer, RESPONSES).gap < 1e-6


def test_a_head_in_float32_on_one_side(qwen3):
    trainer = trainer_of(qwen3, "bfloat16", float32_head=True)
    hold_to(graft(hf(qwen3, "bfloat16"), trainer, RESPONSES), "head")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_taken_apart(tmp_path, family):
    """The same code in the same precision leaves no gap, module by module, and no kind is
    missing.
    """
    model = save_family(tmp_path, family)
    engine = hf(model, "bfloat16")
    findings = graft(engine, trainer_of(model, "bfloat16"), RESPONSES[:1])
    assert findings.missing == [] and findings.left(ALL) < 1e-5
    assert {isolated.relation for isolated in findings.isolated.values()} == {"bits"}
    assert all(points(layer) for layer in findings.layers.to_json())
    findings = graft(engine, trainer_of(model, "float32"), RESPONSES[:1])
    assert findings.missing == [] and findings.gap > 1e-3 and findings.left(ALL) < 1e-5
    assert "residual" in findings.grafted


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "phi", "gpt_oss"])
def test_every_bit_of_vllms_rounding_is_explained(tmp_path, family):
    """In bfloat16 all grafts together give vLLM's own numbers, with caps, parallel blocks and
    experts.
    """
    model = save_family(tmp_path, family, torch.bfloat16)
    engine = create_engine(
        "vllm", EngineSettings(model, PLAIN, 0, dtype="bfloat16", log_file=tmp_path / "log")
    )
    findings, other = (
        graft(engine, trainer_of(model, dtype), RESPONSES) for dtype in ("bfloat16", "float32")
    )
    engine.close()
    assert findings.missing == [] and findings.gap > 1e-3 and findings.left(ALL) < 1e-6
    assert {isolated.relation for isolated in findings.isolated.values()} <= {"bits", "rounding"}
    assert findings.made_alone("attention") > 1e-3
    assert other.missing == [] and other.gap > 1e-3 and other.left(ALL) < 1e-5


def test_modules_out_of_reach_are_refused(vllm, qwen3, monkeypatch):
    with pytest.raises(MismatchError, match="server are out of reach"):
        graft(object(), trainer_of(qwen3), RESPONSES)
    config = vllm.llm.llm_engine.vllm_config
    with monkeypatch.context() as patched:
        patched.setattr(config.model_config, "enforce_eager", False)
        with pytest.raises(MismatchError, match="Use --enforce-eager"):
            graft(vllm, trainer_of(qwen3), RESPONSES)
    with monkeypatch.context() as patched:
        patched.setattr(config.parallel_config, "world_size", 2)
        with pytest.raises(MismatchError, match="spread over 2 processes"):
            graft(vllm, trainer_of(qwen3), RESPONSES)


def test_a_module_without_counterpart_is_named(tmp_path):
    """A trainer with norms of queries and keys, and an engine without: norms that both have are
    grafted.
    """
    sizes: dict[str, Any] = {"eos_token_id": 1}
    models = [saved_model(tmp_path / family, family, **sizes) for family in ("Qwen3", "Llama")]
    (said,) = graft(hf(models[1]), trainer_of(models[0]), RESPONSES[:1]).missing
    assert (
        said == "norm: model.layers.0.self_attn.q_norm and 3 more (the engine has no counterpart)"
    )


def test_chosen_responses_are_the_worst_and_typical_ones_of_different_prompts():
    abs_d = [np.full(3, size) for size in (9, 8, 1, 1.1, 0.9, 7)] + [np.zeros(0)]
    assert choose_responses(abs_d, [0, 0, 1, 2, 3, 4, 5], 4) == [0, 5, 3, 2]
    assert choose_responses(abs_d[:2], [0, 0], 4) == [0, 1] and choose_responses([], [], 4) == []


def test_a_response_outside_the_loss_is_not_a_typical_one():
    """Mean gaps of 4, none (its tokens do not count), 1, 2 and 0.25; the median is 1.5."""
    counts_T = np.array([True, True, False, False, True, True, True])
    tokens = FixedTokens([], [5], {}, np.arange(5), np.array([0, 2, 4, 5, 6, 7]), counts_T)
    gap_T = np.array([4.0, 4.0, 1.5, 1.5, 1.0, 2.0, 0.25])
    measured = LegDifferences(tokens, lambda _leg, side: gap_T * (side == "trainer") - 5)
    run: Any = SimpleNamespace(
        measured=lambda: measured, config=SimpleNamespace(module_responses=2)
    )
    assert _choose_rows(run) == [0, 2]
    run.config.module_responses = 9
    assert sorted(_choose_rows(run)) == [0, 2, 3, 4]


@pytest.mark.slow
def test_a_graft_without_numbers_is_named(qwen3):
    engine = hf(qwen3)
    with first_mlp(engine.model, by=torch.inf):
        findings = graft(engine, trainer_of(qwen3), RESPONSES[:1])
    assert "mlp" not in findings.grafted and "norm" in findings.grafted
    assert (
        "mlp: the engine's returns no numbers for the trainer's hidden states" in findings.missing
    )
