"""Finds a model's head: read from its configuration, and proven on the model's own logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.head import Head, score_hidden
from mismatch_cli.models.scoring.layout import hidden_states, input_device
from mismatch_cli.models.sharding import free_gathered_weights, pass_through, without_gradients

_LENGTH = 24  # long enough for the tiled path, short enough for its full logits
_SOFTCAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
# The same key divides in one family (Granite) and multiplies in another (HyperCLOVA X): the proof
# decides.
_SCALES = ("logits_scaling", "logit_scale", "output_multiplier", "lm_head_multiplier")


def proven_head(model: Any) -> tuple[Head, torch.dtype]:
    """The head for which `score_hidden` equals log_softmax of the model's own logits at every test
    position.

    Also returns the dtype that it computes in. Raises a `MismatchError` if no reading of the config
    gives such a head, or if the model is not causal.
    """
    _check_head(model)
    with without_gradients(model):
        ids_1L = _test_ids(model)
        hidden_LH = hidden_states(model, _inputs(ids_1L))
        half_LH = hidden_states(model, _inputs(ids_1L[:, : _LENGTH // 2]))
        _check_causal(model, half_LH, hidden_LH)
        full_LV = model(**_inputs(ids_1L), use_cache=False).logits[0]
        free_gathered_weights(model)

        def find_head(
            hidden_BLH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None
        ) -> Head | None:
            for candidate in candidates(model, weight_VH, bias_V):
                fits = candidate.vocabulary == full_LV.shape[1]
                if fits and _equals(candidate, hidden_BLH[0], full_LV):
                    return candidate
            return None

        head = pass_through(model, _inputs(ids_1L), find_head)
    if head is None:
        raise MismatchError(
            f"The LM head of {type(model).__name__} does more than a matrix product with a known "
            "scale or cap: its log-probs do not equal those of the model's own logits. Please "
            "report this architecture."
        )
    # The candidate may hold weights that are gathered for this pass only.
    output = model.get_output_embeddings()
    bias_V = getattr(output, "bias", None)
    if bias_V is not None:
        bias_V = bias_V.detach()
    own_head = replace(head, weight_VH=output.weight.detach(), bias_V=bias_V)
    return own_head, head.weight_VH.dtype


def _test_ids(model: Any) -> torch.Tensor:
    """Token ids `[1, L]` from the whole vocabulary."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids_L = torch.arange(_LENGTH) * vocabulary // _LENGTH
    return ids_L[None].to(input_device(model))


def _inputs(ids_BL: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}


def candidates(model: Any, weight_VH: torch.Tensor, bias_V: torch.Tensor | None) -> Iterator[Head]:
    """Every head that the configuration may describe."""
    config = model.config.get_text_config()
    scales = []
    for name in _SCALES:
        scale = getattr(config, name, None)
        if isinstance(scale, int | float) and scale not in (0, 1):
            scales.append(scale)
    softcaps = [getattr(config, name, None) for name in _SOFTCAPS]
    for softcap in (*filter(None, softcaps), None):
        for scale in scales:
            yield Head(weight_VH, bias_V, multiplier=scale, softcap=softcap)
            yield Head(weight_VH, bias_V, divisor=scale, softcap=softcap)
        yield Head(weight_VH, bias_V, softcap=softcap)


def _check_head(model: Any) -> None:
    weight = getattr(model.get_output_embeddings(), "weight", None)
    is_plain_matrix = (
        weight is not None
        and weight.dim() == 2
        and weight.device.type != "meta"
        and weight.is_floating_point()
    )
    if not is_plain_matrix:
        raise MismatchError(
            f"The LM head of {type(model).__name__} is not one plain weight matrix in memory "
            "(quantised, offloaded?). Load the model unquantised, with device_map = cuda or cpu."
        )


def _equals(head: Head, hidden_LH: torch.Tensor, full_LV: torch.Tensor) -> bool:
    expected_LV = full_LV.float().log_softmax(dim=-1).to(head.weight_VH.device)
    ids_LK = torch.arange(_LENGTH * 20).view(_LENGTH, 20) * 7919 % head.vocabulary
    ids_LK = ids_LK.to(expected_LV.device)
    scores = score_hidden(hidden_LH, head, ids_LK[:, 0], ids_LK, SamplingSettings())
    error = (scores.logp_at_ids_TK - expected_LV.gather(1, ids_LK)).abs().max().item()
    # A kernel for another shape may round a logit and the log-sum-exp to their neighbours.
    rounding = 2 * torch.finfo(head.weight_VH.dtype).eps * full_LV.float().abs().max().item()
    return error <= max(1e-4, rounding)  # False for NaN


def _check_causal(model: Any, half_LH: torch.Tensor, hidden_LH: torch.Tensor) -> None:
    """Refuse a model whose first half of hidden states changes with the tokens that follow."""
    difference = (half_LH - hidden_LH[: _LENGTH // 2]).float().norm() / hidden_LH.float().norm()
    if difference > 0.1:
        raise MismatchError(
            f"{type(model).__name__} is not causal: its hidden states depend on later tokens. "
            "Use a model that generates text from left to right."
        )
