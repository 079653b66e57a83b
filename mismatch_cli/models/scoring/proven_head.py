"""Finds a model's head: read from its configuration, and proven on the model's own logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.head import Head, score_hidden
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
        ids_1L = _spread_ids(model)
        hidden_LH = _hidden(model, ids_1L)
        half_LH = _hidden(model, ids_1L[:, : _LENGTH // 2])
        _check_causal(model, half_LH, hidden_LH)
        full_LV = model(**_inputs(ids_1L), use_cache=False).logits[0]
        free_gathered_weights(model)

        def proven(
            hidden_BLH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None
        ) -> Head | None:
            for head in candidates(model, weight_VH, bias_V):
                if head.vocabulary == full_LV.shape[1] and _equals(head, hidden_BLH[0], full_LV):
                    return head
            return None

        found = pass_through(model, _inputs(ids_1L), proven)
    if found is None:
        raise MismatchError(
            f"The LM head of {type(model).__name__} does more than a matrix product with a known "
            "scale or cap: its log-probs do not equal those of the model's own logits. Please "
            "report this architecture."
        )
    output = model.get_output_embeddings()
    bias_V = getattr(output, "bias", None)
    bias_V = None if bias_V is None else bias_V.detach()
    return replace(found, weight_VH=output.weight.detach(), bias_V=bias_V), found.weight_VH.dtype


def _spread_ids(model: Any) -> torch.Tensor:
    embeddings = model.get_input_embeddings().weight
    ids_L = torch.arange(_LENGTH) * embeddings.shape[0] // _LENGTH
    return ids_L[None].to(embeddings.device if embeddings.device.type != "meta" else model.device)


def _hidden(model: Any, ids_1L: torch.Tensor) -> torch.Tensor:
    return pass_through(model, _inputs(ids_1L), lambda hidden_BLH, *_: hidden_BLH[0])


def _inputs(ids_BL: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}


def candidates(model: Any, weight_VH: torch.Tensor, bias_V: torch.Tensor | None) -> Iterator[Head]:
    config = model.config.get_text_config()
    scales = [
        s
        for name in _SCALES
        if isinstance(s := getattr(config, name, None), int | float) and s not in (0, 1)
    ]
    for softcap in (*[c for name in _SOFTCAPS if (c := getattr(config, name, None))], None):
        for scale in scales:
            yield Head(weight_VH, bias_V, multiplier=scale, softcap=softcap)
            yield Head(weight_VH, bias_V, divisor=scale, softcap=softcap)
        yield Head(weight_VH, bias_V, softcap=softcap)


def _check_head(model: Any) -> None:
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if (
        weight is None
        or weight.dim() != 2
        or weight.device.type == "meta"
        or not weight.is_floating_point()
    ):
        raise MismatchError(
            f"The LM head of {type(model).__name__} is not one plain weight matrix in memory "
            "(quantised, offloaded?). Load the model unquantised, with device_map = cuda or cpu."
        )


def _equals(head: Head, hidden_LH: torch.Tensor, full_LV: torch.Tensor) -> bool:
    expected_LV = full_LV.float().log_softmax(dim=-1).to(head.weight_VH.device)
    ids_LK = (torch.arange(_LENGTH * 20).view(_LENGTH, 20) * 7919 % head.vocabulary).to(
        expected_LV.device
    )
    got = score_hidden(hidden_LH, head, ids_LK[:, 0], ids_LK, SamplingSettings())
    error = (got.logp_at_ids_TK - expected_LV.gather(1, ids_LK)).abs().max().item()
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
