"""One side's model with a fault: a copied folder, its own code, or a replaced layer of vLLM."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"


def copied(
    model: str,
    into: Path,
    settings: Mapping[str, Any] | None = None,
    tensors: Callable[[Tensors], Tensors] | None = None,
) -> str:
    """A copy of the folder, with other settings in its config.json or other tensors, kept in
    float32.
    """
    shutil.copytree(model, into, dirs_exist_ok=True)
    if settings is not None:
        path = into / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(settings)))
    if tensors is not None:
        loaded = load_file(into / WEIGHTS)
        save_file(loaded | tensors(loaded), into / WEIGHTS, metadata={"format": "pt"})
    return str(into)


def scaled(name: str, factor: float) -> Callable[[Tensors], Tensors]:
    """One tensor multiplied by a number."""
    return lambda loaded: {name: loaded[name].float() * factor}


def stale(name: str, noise: float = 0.1) -> Callable[[Tensors], Tensors]:
    """One tensor as in an earlier checkpoint: moved by noise of a tenth of its spread."""

    def changed(loaded: Tensors) -> Tensors:
        weight = loaded[name].float()
        step = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        return {name: weight + noise * weight.std() * step}

    return changed


def rounded_to_int8(loaded: Tensors) -> Tensors:
    """Every linear layer with 255 values per row, as in a quantised checkpoint."""
    layers = {name: weight.float() for name, weight in loaded.items() if _is_linear(name, weight)}
    steps = {name: weight.abs().amax(dim=1, keepdim=True) / 127 for name, weight in layers.items()}
    return {name: (weight / steps[name]).round() * steps[name] for name, weight in layers.items()}


def _is_linear(name: str, weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and not any(
        part in name for part in ("embed", "lm_head", ".gate.weight")
    )


_ROUNDED_NORMS = '''
"""The transformers model, with RMSNorm layers that return bfloat16 numbers, whatever they compute in."""
import torch
from transformers import {architecture}


class RoundedNorms({architecture}):
    def __init__(self, config):
        super().__init__(config)
        for module in self.modules():
            kind = type(module)
            if kind.__name__.endswith("RMSNorm"):
                module.__class__ = type("Rounded" + kind.__name__, (kind,), {{"forward": rounded(kind.forward)}})


def rounded(forward):
    def forward_rounded(self, *arguments, **named):
        given = forward(self, *arguments, **named)
        return given.to(torch.bfloat16).to(given.dtype)

    return forward_rounded
'''


def with_rounded_norms(model: str, into: Path) -> str:
    """A folder with code that transformers may run; vLLM has its own model for these weights.

    With `--trust-remote-code` only the trainer rounds its norms.
    """
    (architecture,) = json.loads((Path(model) / "config.json").read_text())["architectures"]
    folder = copied(
        model, into, {"auto_map": {"AutoModelForCausalLM": "rounded_norms.RoundedNorms"}}
    )
    (into / "rounded_norms.py").write_text(_ROUNDED_NORMS.format(architecture=architecture))
    return folder


@contextmanager
def rounded_norms_in_vllm() -> Iterator[None]:
    """The same in the engine, for every vLLM started in this process meanwhile."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    with ExitStack() as patched:
        for kind in (RMSNorm, GemmaRMSNorm):
            forward = _rounding(kind.forward_native)
            patched.enter_context(patch.object(kind, "forward_native", forward))
        yield


def _rounding(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: rounded(forward, *arguments, **named)


def rounded(norm: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """A norm's output in the numbers of bfloat16, but not the residual stream that it passes on."""
    outputs = norm(*arguments, **named)
    normed, *residual = outputs if isinstance(outputs, tuple) else (outputs,)
    normed = normed.to(torch.bfloat16).to(normed.dtype)
    return (normed, *residual) if residual else normed
