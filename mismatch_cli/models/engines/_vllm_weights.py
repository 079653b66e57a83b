"""New weights for a vLLM in this process, including those that it would silently ignore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# vLLM's gpt-oss copies all but attention matrices by itself, past vLLM's reloading.
# Its experts and sinks would keep old values, so we send them expert by expert. On a server nobody
# can: there the sync fails its verification.
_PAST_RELOADING = "GptOssForCausalLM"
_EXPERTS, _SINKS = ".mlp.experts.", ".self_attn.sinks"


def replace_weights(llm: Any, model: Any) -> None:
    """Load the weights of a Hugging Face model, or of one with its adapter merged, into the
    engine.
    """
    from mismatch_cli.models.sharding import saved_state

    weights = saved_state(model)
    config = llm.llm_engine.vllm_config
    past_reloading = config.model_config.architecture == _PAST_RELOADING
    named = _weights_in_vllm(weights, has_head=all(llm.apply_model(_has_head)))
    if past_reloading:
        named = _expert_by_expert(named)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
    if past_reloading:
        llm.apply_model(partial(_copy_sinks, weights))
    if config.device_config.device_type == "cpu":
        llm.apply_model(_repack_experts)


def _weights_in_vllm(
    weights: Mapping[str, Tensor], *, has_head: bool
) -> Iterator[tuple[str, Tensor]]:
    """The weights that vLLM's model has names for, one at a time: each may have to be gathered."""
    for name in weights:
        # A tied head is sent, though folders leave it out: without it vLLM on CPU silently keeps
        # using its packed copy of the old head. Gemma has no such name in vLLM.
        if has_head or not name.endswith("lm_head.weight"):
            yield name, weights[name]


def _has_head(model: Any) -> bool:
    return any(name.endswith("lm_head") for name, _ in model.named_modules())


def _expert_by_expert(named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """gpt-oss's fused experts under the names of single ones, which vLLM loads like all other
    weights.
    """
    for name, weight in named:
        layer, experts, matrix = name.rpartition(_EXPERTS)
        if not experts:
            yield name, weight
            continue
        for number, weight_of_one in enumerate(weight):
            yield f"{layer}{experts}{number}.{matrix}", weight_of_one


def _copy_sinks(weights: Mapping[str, Tensor], model: Any) -> None:
    """Copy the sinks in place, where the kernel reads them; each rank has those of its own
    heads.
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    for name, sink in model.named_parameters():
        if name.endswith(".sinks"):
            sink_of_all_ranks = weights[name.removesuffix(".attn.sinks") + _SINKS]
            start = get_tensor_model_parallel_rank() * len(sink)
            sink.data.copy_(sink_of_all_ranks.narrow(0, start, len(sink)))


def _repack_experts(model: Any) -> None:
    """vLLM on CPU packs fused experts when it loads, but not when it reloads, which silently
    gives garbage.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(layer, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(layer)
