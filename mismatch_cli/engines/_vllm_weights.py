"""New weights for a vLLM in this process, where it takes them over by itself and where it would not, without a word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from mismatch_cli.models import saved_state

if TYPE_CHECKING:
    from torch import Tensor

_COPIED = "GptOssForCausalLM"  # what it has beside matrices of attention it copies, past vLLM's reloading
_EXPERTS, _SINKS = ".mlp.experts.", ".self_attn.sinks"


def take_over(llm: Any, model: Any) -> None:
    """Give the engine the weights of a Hugging Face model, or of one with an adapter added."""
    # A tied head is named too, though folders leave it out: without it vLLM on CPU keeps using its packed copy of the
    # old head, without a word. Gemma has no such name in vLLM.
    weights, headless = saved_state(model), not all(llm.apply_model(_has_head))
    named = ((name, weights[name]) for name in weights if not (headless and name.endswith("lm_head.weight")))
    copied = llm.llm_engine.vllm_config.model_config.architecture == _COPIED
    loaded = _expert_by_expert(named) if copied else named
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": loaded})
    if copied:
        llm.apply_model(partial(_take_sinks, weights))
    if llm.llm_engine.vllm_config.device_config.device_type == "cpu":
        llm.apply_model(_repack_experts)


def _has_head(model: Any) -> bool:
    return any(name.endswith("lm_head") for name, _ in model.named_modules())


def _expert_by_expert(named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """gpt-oss's fused experts under the names of single ones: those vLLM loads as it does all other weights."""
    for name, weight in named:
        layer, experts, which = name.rpartition(_EXPERTS)
        if not experts:
            yield name, weight
            continue
        for number, part in enumerate(weight):
            yield f"{layer}{experts}{number}.{which}", part


def _take_sinks(weights: Mapping[str, Tensor], model: Any) -> None:
    """Each rank has the sinks of its own heads; the kernel reads them where they lie."""
    from vllm.distributed import get_tensor_model_parallel_rank

    sinks = {name: own for name, own in model.named_parameters() if name.endswith(".sinks")}
    for name, own in sinks.items():
        whole = weights[name.removesuffix(".attn.sinks") + _SINKS]
        own.data.copy_(whole.narrow(0, get_tensor_model_parallel_rank() * len(own), len(own)))


def _repack_experts(model: Any) -> None:
    """vLLM on CPU packs fused experts when it loads, and forgets to when it reloads: garbage, without a word."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(layer, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(layer)
