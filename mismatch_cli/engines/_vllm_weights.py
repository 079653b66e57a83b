"""New weights in a vLLM that runs: every one, under the names that a model folder has."""

from __future__ import annotations

from typing import Any

from mismatch_cli.models import saved_state


def take_over(llm: Any, model: Any) -> None:
    """Give the engine the weights of a Hugging Face model, or of one with an adapter added."""
    # A tied head is named too, though folders leave it out: without it vLLM on CPU goes on with its packed copy of the
    # old head, without a word. Gemma has no such name in vLLM.
    weights = saved_state(model)
    if not all(llm.apply_model(_has_head)):
        weights = {name: weight for name, weight in weights.items() if not name.endswith("lm_head.weight")}
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
    if llm.llm_engine.vllm_config.device_config.device_type == "cpu":
        llm.apply_model(_repack_experts)


def _has_head(model: Any) -> bool:
    return any(name.endswith("lm_head") for name, _ in model.named_modules())


def _repack_experts(model: Any) -> None:
    """vLLM on CPU packs fused experts when it loads, and forgets to when it reloads: garbage, without a word."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(layer, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(layer)
