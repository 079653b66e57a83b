"""One pass of a vLLM in this process, taken apart: hooks on its modules, which can run again in the
same context.

Attention finds its metadata, its slots of the KV cache and its keys in vLLM's forward context. We
keep a copy, because the next pass overwrites the buffers. Modules that run again write other keys
into the cache, so it is emptied at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.dissection.calls import deep_copy, first_tensor
from mismatch_cli.models.dissection.engine_pass import EnginePass
from mismatch_cli.models.dissection.listener import Listener


@contextmanager
def pass_over(
    llm: Any, read: Callable[[list[int]], Any], token_ids: Sequence[int], sampling: SamplingSettings
) -> Iterator[EnginePass]:
    """`read` sends a prompt through the engine; a `MismatchError` if its modules cannot be
    hooked.
    """
    import torch
    from vllm.forward_context import get_forward_context, override_forward_context

    check_in_reach(llm)
    (model,) = llm.apply_model(_itself)
    listener = Listener(model, copied=True)
    contexts: list[Any] = []

    def copy_context() -> None:
        # The next pass overwrites the buffers of this context: modules called again get a copy.
        contexts.append(deep_copy(get_forward_context()))

    llm.reset_prefix_cache()
    try:
        with listener.on(model, partial(_reads, list(token_ids)), copy_context):
            read(list(token_ids))
        if not contexts:
            raise MismatchError(
                f"vLLM did not read the {len(token_ids)} tokens of a response in one pass, so "
                "its modules cannot be compared. Set the engine's "
                f"max_num_batched_tokens={len(token_ids)} or more."
            )
        # Then a mixture of experts called alone is found by its name, not by its turn.
        context = dataclasses.replace(contexts[-1], all_moe_layers=None)
        hidden_NH = first_tensor(listener.output).clone()
        positions_N = torch.arange(len(token_ids), device=hidden_NH.device)
        within = partial(override_forward_context, context)
        yield EnginePass(listener, hidden_NH, sampling, model.compute_logits, positions_N, within)
    finally:
        # Modules called again have written keys of other hidden states into the cache.
        # The next prompt with the same beginning would read them.
        llm.reset_prefix_cache()


def _itself(model: Any) -> Any:
    return model


def _reads(token_ids: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a pass reads these tokens, and is not one with which vLLM measures memory or warms
    up.
    """
    from vllm.forward_context import get_forward_context

    ids_N = kwargs.get("input_ids", args[0] if args else None)
    # Dummy passes find the last prompt in the buffers, as if they read it.
    # Only their lack of attention metadata shows that what they compute is not to be recorded.
    if ids_N is None or not get_forward_context().attn_metadata:
        return False
    # The cheap comparison first: ids have to come from the device.
    return ids_N.numel() == len(token_ids) and ids_N.flatten().tolist() == token_ids


def check_in_reach(llm: Any) -> None:
    """A `MismatchError` unless the engine's modules run in this process, one by one and
    unsharded.
    """
    config = llm.llm_engine.vllm_config
    parallel = config.parallel_config
    if parallel.world_size > 1:
        raise MismatchError(
            f"vLLM is spread over {parallel.world_size} processes, each with part of every "
            "module, so they cannot be compared with the trainer's. Set the engine's "
            "tensor_parallel_size=1, without other parallelism."
        )
    if type(llm.llm_engine.engine_core).__name__ != "InprocClient":
        raise MismatchError(
            "vLLM runs in a separate process, where its modules are out of reach. Unset "
            "VLLM_ENABLE_V1_MULTIPROCESSING."
        )
    if not config.model_config.enforce_eager:
        raise MismatchError(
            "vLLM runs compiled or from CUDA graphs, which do not call modules one by one: hooks "
            "would show the state of the last capture. Use --enforce-eager."
        )
