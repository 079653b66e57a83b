"""Routers of every known family: their choices are read, and others prescribed."""

from __future__ import annotations

import pytest
import torch

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.models.routers import LIVE, Routers
from mismatch_cli.models.scoring.trainer import Trainer
from tests.moe_models import EXPERTS, FAMILIES, TOP_K

IDS_BL = 1 + torch.arange(18).reshape(2, 9) * 31 % 500


def weighed_by_hand(module, logits_NE: torch.Tensor, chosen_NK: torch.Tensor) -> torch.Tensor:
    """The weights in float64, as each family's paper or code defines them."""
    logits_NE = logits_NE.double()
    name = type(module).__name__
    if name.startswith("GptOss"):
        return logits_NE.gather(1, chosen_NK).softmax(-1)
    weight_NK = logits_NE.softmax(-1).gather(1, chosen_NK)
    return weight_NK if name.startswith("Olmoe") else weight_NK / weight_NK.sum(-1, keepdim=True)


@pytest.fixture(params=FAMILIES)
def model(request, save_model):
    return load_causal_lm(save_model(request.param, **FAMILIES[request.param]), dtype="float32")


def test_choices_are_the_model_s_and_others_can_be_prescribed(model):
    routers = Routers.proven(model)
    assert routers is not None and routers.layers == [0, 1]
    assert routers.describe() == {
        "num_experts": EXPERTS,
        "experts_per_token": TOP_K,
        "router_layers": [0, 1],
    }
    inputs: list[list[torch.Tensor]] = []  # the inputs of each layer's experts
    modules = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    for module in modules:
        # After the routers' own
        module.register_forward_hook(lambda m, _, out: inputs.append(list(out)))
    with torch.inference_mode():
        plain = model(input_ids=IDS_BL).logits
        chosen_NMK, margin_NM = routers.choices()
        for place, (logits_NE, _, told_NK) in enumerate(inputs):
            assert torch.equal(chosen_NMK[:, place], told_NK)
            ranked_NE = logits_NE.sort(descending=True).values
            torch.testing.assert_close(
                margin_NM[:, place], ranked_NE[:, TOP_K - 1] - ranked_NE[:, TOP_K]
            )
        routers.prescribe(chosen_NMK)
        assert torch.equal(model(input_ids=IDS_BL).logits, plain), (
            "prescribing its own routes changes no bit"
        )
        routers.prescribe(chosen_NMK.flip(-1))
        assert torch.equal(model(input_ids=IDS_BL).logits, plain), "their order changes no bit"
        other_NMK = chosen_NMK.clone()
        other_NMK[::3, 1] = (chosen_NMK[::3, 1] + 1) % EXPERTS
        other_NMK[1] = LIVE
        routers.prescribe(other_NMK)
        inputs.clear()
        moved = model(input_ids=IDS_BL).logits
        assert torch.equal(routers.choices()[0][:, 0], chosen_NMK[:, 0]), (
            "they still report their own choice"
        )
    _, (logits_NE, weight_NK, told_NK) = inputs
    rows = torch.arange(len(told_NK)) % 3 == 0
    assert torch.equal(told_NK[rows].long(), other_NMK[rows, 1])
    torch.testing.assert_close(
        weight_NK.double(),
        weighed_by_hand(modules[1], logits_NE, told_NK.long()),
        atol=1e-6,
        rtol=1e-5,
    )
    changed_BL = (moved - plain).abs().amax(-1) > 1e-3
    assert changed_BL.flatten()[rows].all() and not changed_BL[0, 1]
    routers.prescribe(None)
    with torch.inference_mode():
        assert torch.equal(model(input_ids=IDS_BL).logits, plain)


def test_the_gradient_flows_through_the_weights_of_prescribed_experts(save_model):
    """Also with recomputed layers: the same experts, and the same gradient."""
    from mismatch_cli.models.loading import checkpoint_layers

    gradients = []
    for checkpointed in (False, True):
        model = load_causal_lm(save_model("Qwen3Moe", **FAMILIES["Qwen3Moe"]), dtype="float32")
        if checkpointed:
            checkpoint_layers(model)
        routers = Routers.of(model)
        assert routers is not None
        other_NMK = (torch.arange(2 * 9 * 2 * 2) % EXPERTS).reshape(18, 2, 2)
        routers.prescribe(other_NMK)
        model(input_ids=IDS_BL).logits.logsumexp(-1).sum().backward()
        gradients.append(
            [m.weight.grad for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        )
        experts = next(m for m in model.modules() if type(m).__name__.endswith("Experts"))
        idle = set(range(EXPERTS)) - set(other_NMK[:, 0].flatten().tolist())
        used = experts.down_proj.grad.abs().sum((1, 2)) > 0
        assert used.tolist() == [i not in idle for i in range(EXPERTS)]
    for plain, checkpointed in zip(*gradients, strict=True):
        assert plain.abs().sum() > 0
        torch.testing.assert_close(plain, checkpointed)


def test_models_without_replay_are_refused(save_model):
    dense = load_causal_lm(save_model("Qwen3"), dtype="float32")
    assert Routers.of(dense) is None
    with pytest.raises(UsageError, match=r"has no known routers.*Leave out --replay-routes"):
        Trainer(dense, SamplingSettings(), replay_routes=True)
    others = {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 32,
    }
    model = load_causal_lm(
        save_model("Glm4Moe", first_k_dense_replace=0, **others), dtype="float32"
    )
    routers = Routers.proven(model)  # a sigmoid with a bias only for the choice
    assert routers is not None, "its choices can still be measured"
    routers.prescribe(torch.zeros(18, 2, TOP_K, dtype=torch.long))
    with pytest.raises(MismatchError, match=r"Glm4MoeForCausalLM weighs experts in an unknown way"):
        model(input_ids=IDS_BL)
    with pytest.raises(
        MismatchError, match=r"sent each token to 3 experts, but Glm4MoeForCausalLM sends it to 2"
    ):
        routers.prescribe(torch.zeros(18, 2, 3, dtype=torch.long))


def test_experts_that_compute_nothing_count_as_experts():
    """LongCat-Flash chooses among 4 and 3 more, which return their input; its routes name all."""
    from transformers import LongcatFlashConfig, MixtralConfig
    from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashTopkRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    longcat = LongcatFlashConfig(hidden_size=8, n_routed_experts=4, zero_expert_num=3)
    mixtral = MixtralConfig(hidden_size=8, num_local_experts=5)
    assert Routers(torch.nn.ModuleList([LongcatFlashTopkRouter(longcat)])).experts == 7
    assert Routers(torch.nn.ModuleList([MixtralTopKRouter(mixtral)])).experts == 5
