"""What a model requires of attention reaches the implementation in use, or a warning says that
it does not.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.attention import (
    HONOURED_BY,
    attention_facts,
    attention_warning,
    required_features,
    unsupported_features,
)
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.report.preamble import left_out_of
from mismatch_cli.trace.origin import About

IDS = torch.tensor([[5, 9, 300, 7, 41, 2, 77, 130]])
# As models pass them to an implementation
ARGUMENTS = {"attn_logit_softcapping": "softcap", "sinks": "s_aux"}


@pytest.fixture
def capped(save_model) -> str:
    return save_model("Gemma2", attn_logit_softcapping=2.0, query_pre_attn_scalar=16)


def logits(model: str, attention: str | None) -> torch.Tensor:
    with torch.inference_mode():
        return load_causal_lm(model, "float32", attention)(IDS).logits


def test_the_attention_that_is_chosen_caps_where_the_model_does(capped, save_model):
    assert load_causal_lm(capped, "float32").config._attn_implementation == "eager"
    torch.testing.assert_close(logits(capped, None), logits(capped, "eager"), atol=0, rtol=0)
    assert (logits(capped, "sdpa") - logits(capped, "eager")).abs().max() > 1e-3, (
        "sdpa caps by now: change the table"
    )
    uncapped = save_model("Gemma2", attn_logit_softcapping=None, query_pre_attn_scalar=16)
    assert load_causal_lm(uncapped, "float32").config._attn_implementation == "sdpa"
    assert load_causal_lm(save_model("Llama"), "float32").config._attn_implementation == "sdpa"


def test_a_wrong_implementation_on_request_is_reported_and_recorded(capped):
    described = Trainer.load(
        capped, sampling=SamplingSettings(), dtype="float32", attn_implementation="sdpa"
    ).describe()
    assert described["attention_leaves_out"] == "attn_logit_softcapping"
    assert "sdpa attention leaves out attn_logit_softcapping" in attention_warning(described)
    assert attention_warning(described).endswith("Use attn = eager.")
    assert attention_warning(described) in left_out_of(About(trainer=described))
    right = Trainer.load(capped, sampling=SamplingSettings(), dtype="float32").describe()
    assert "attention_leaves_out" not in right and attention_warning(right) == ""


def test_sinks_are_recognised_by_their_parameters(save_model):
    model = load_causal_lm(
        save_model("GptOss", num_local_experts=2, num_experts_per_tok=1), "float32"
    )
    assert required_features(model) == ("sinks",) and attention_facts(model) == {}
    assert (
        unsupported_features("sdpa", ("sinks",))
        == unsupported_features("flash_attention_2", ("sinks",))
        == ("sinks",)
    )
    assert unsupported_features("flash_attention_2", ("attn_logit_softcapping",)) == ()


def test_the_table_matches_what_implementations_take():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for implementation in ("sdpa", "flex_attention"):
        taken = inspect.signature(ALL_ATTENTION_FUNCTIONS[implementation]).parameters
        for name, argument in ARGUMENTS.items():
            assert (argument in taken) == (not unsupported_features(implementation, (name,))), (
                implementation,
                name,
            )
    assert HONOURED_BY.keys() == ARGUMENTS.keys()


def test_no_model_of_transformers_requires_more():
    """Every model that sdpa runs, but that passes attention more than it takes, is in the table."""
    import transformers

    asking = set()
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if "ForCausalLM(" in source and "_supports_sdpa = True" in source:
            asking |= {
                (path.parent.name, argument)
                for argument in re.findall(r"\b(softcap|s_aux)=self\.", source)
            }
    assert {argument for _, argument in asking} <= set(ARGUMENTS.values())
    for family, argument in asking:
        assert argument == "softcap", f"{family} has sinks, and transformers runs it with sdpa"
        configuration = next(
            Path(transformers.__file__).parent.glob(f"models/{family}/configuration_*.py")
        )
        assert "attn_logit_softcapping" in configuration.read_text(encoding="utf-8"), family
