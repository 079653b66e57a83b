"""New weights for a vLLM in this process, including those that it would silently ignore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# vLLM's gpt-oss copies all but attention matrices by itself, past vLLM's reloading.
# Its experts and sinks would keep old values, so `take_over` copies them expert by expert. On a
# server nobody can: there the sync fails its verification.
_COPIED = "GptOssForCausalLM"
_EXPERTS, _SINKS = ".mlp.experts.", ".self_attn.sinks"


def take_over(llm: Any, model: Any) -> None:
    """Load the weights of a Hugging Face model, or of one with its adapter merged, into the
    engine.
    """
    # A tied head is included, though folders leave it out: without it vLLM on CPU silently keeps
    # using its packed copy of the old head. Gemma has no such name in vLLM.
    from mismatch_cli.models.sharding import saved_state

    weights, headless = saved_state(model), not all(llm.apply_model(_has_head))
    named = (
        (name, weights[name])
        for name in weights
        if not (headless and name.endswith("lm_head.weight"))
    )
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
    """gpt-oss's fused experts under the names of single ones, which vLLM loads like all other
    weights.
    """
    for name, weight in named:
        layer, experts, which = name.rpartition(_EXPERTS)
        if not experts:
            yield name, weight
            continue
        for number, part in enumerate(weight):
            yield f"{layer}{experts}{number}.{which}", part


def _take_sinks(weights: Mapping[str, Tensor], model: Any) -> None:
    """Copy the sinks in place, where the kernel reads them; each rank has those of its own
    heads.
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    sinks = {name: sink for name, sink in model.named_parameters() if name.endswith(".sinks")}
    for name, sink in sinks.items():
        whole = weights[name.removesuffix(".attn.sinks") + _SINKS]
        sink.data.copy_(whole.narrow(0, get_tensor_model_parallel_rank() * len(sink), len(sink)))


def _repack_experts(model: Any) -> None:
    """vLLM on CPU packs fused experts when it loads, but not when it reloads, which silently
    gives garbage.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(layer, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(layer)
