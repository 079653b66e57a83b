"""One pass of the Hugging Face engine, taken apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.dissection.engine_pass import EnginePass
from mismatch_cli.models.dissection.listener import Listener
from mismatch_cli.models.sharding import decoder_of, pass_through


@contextmanager
def pass_over(
    model: Any, token_ids: Sequence[int], sampling: SamplingSettings
) -> Iterator[EnginePass]:
    """Read the tokens as `generate` reads a prompt, all at once."""
    listener = Listener(model)
    decoder = decoder_of(model)
    ids_1N = torch.tensor([list(token_ids)], device=_device(model))
    inputs = {"input_ids": ids_1N, "attention_mask": torch.ones_like(ids_1N)}
    with torch.inference_mode(), listener.on(decoder, lambda *_: True):
        hidden_NH = pass_through(model, inputs, lambda hidden_BLH, *_: hidden_BLH[0])
    head = partial(_compute_logits, model, decoder)
    positions_N = torch.arange(len(token_ids), device=ids_1N.device)
    yield EnginePass(listener, hidden_NH, sampling, head, positions_N, within=nullcontext)


def _compute_logits(model: Any, decoder: Any, hidden_TH: Tensor) -> Tensor:
    """Run the model's own head, with whatever it does to logits, on these rows instead of its
    decoder's output.
    """

    def replace_output(_module: Any, _inputs: Any, output: Any) -> Any:
        output.last_hidden_state = hidden_TH[None]
        return output

    hook = decoder.register_forward_hook(replace_output)
    try:
        # What the decoder reads does not matter, so it gets a single token.
        ids_11 = torch.zeros(1, 1, dtype=torch.long, device=_device(model))
        logits: Tensor = model(input_ids=ids_11, use_cache=False).logits[0]
        return logits
    finally:
        hook.remove()


def _device(model: Any) -> torch.device:
    """Where inputs must be; other layers may be on other devices."""
    device: torch.device = model.get_input_embeddings().weight.device
    return device
