"""How one side may have read the responses: with other positions, behind padding, behind another prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

from mismatch_cli.diagnosis.model import Hypothesis

if TYPE_CHECKING:
    import torch

    Frequencies = Callable[[torch.Tensor], torch.Tensor]

_SUFFIX = "inv_freq"


def scaled_positions(factor: float) -> Hypothesis:
    """RoPE with every position divided by a factor: linear scaling."""
    return _rope(f"RoPE scaled linearly by {factor:.4g}", lambda frequency_F: frequency_F / factor)


def scaled_base(factor: float) -> Hypothesis:
    """RoPE with its base times a factor; the same as NTK scaling."""

    def changed(frequency_F: torch.Tensor) -> torch.Tensor:
        import torch

        count = len(frequency_F)
        exponent_F = torch.arange(count, device=frequency_F.device, dtype=torch.float32) / count
        return frequency_F * float(factor) ** -exponent_F

    return _rope(f"RoPE base times {factor:.4g}", changed)


def yarn(factor: float, trained_with: int) -> Hypothesis:
    """RoPE scaled by YaRN from a number of positions."""
    parameters = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained_with}
    name = f"YaRN with factor {factor:g} from {trained_with} positions"
    return Hypothesis(name, changed=partial(_with_parameters, parameters=parameters))


def unscaled() -> Hypothesis:
    """RoPE with the model's base and without the scaling that its configuration names."""
    return Hypothesis(
        "RoPE without its scaling", changed=partial(_with_parameters, parameters={"rope_type": "default"})
    )


def positions_of(config: Any) -> list[Hypothesis]:
    """What is tried first: the factors that people use, and YaRN from the positions of this model."""
    found = [scaled_positions(factor) for factor in FACTORS] + [scaled_base(factor) for factor in BASE_FACTORS]
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters:
        return found
    most = int(config.max_position_embeddings)
    trained = {most, int(parameters.get("original_max_position_embeddings", most))}
    found += [yarn(factor, n) for factor in YARN_FACTORS for n in sorted(trained | {int(most / factor)})]
    return found + ([unscaled()] if parameters.get("rope_type", "default") != "default" else [])


FACTORS = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0)
BASE_FACTORS = (1e-3, 1e-2, 0.1, 0.25, 0.5, 2.0, 4.0, 10.0, 50.0, 100.0, 1000.0)
YARN_FACTORS = (2.0, 4.0, 8.0, 32.0)


def padded(count: int, token: int) -> Hypothesis:
    """Some padding tokens on the left, which attention sees."""
    return Hypothesis(f"{count} tokens {token} before the prompt", prompt=lambda ids: [token] * count + ids)


def padded_to(length: int, token: int) -> Hypothesis:
    """Prompts that are filled up on the left to one length, and attention sees it."""
    name = f"prompts filled up to {length} with token {token}"
    return Hypothesis(name, prompt=lambda ids: [token] * max(0, length - len(ids)) + ids)


def other_prompts(config: Any) -> list[Hypothesis]:
    """A token of the prompt that is missing or stands there once more."""
    special = {name: getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    ids = {name: value[0] if isinstance(value, list) else value for name, value in special.items()}
    found = [Hypothesis(f"the {name} token before the prompt", prompt=partial(_before, token))
             for name, token in ids.items() if token is not None]  # fmt: skip
    found.append(Hypothesis("the first token twice", prompt=lambda ids: [*ids[:1], *ids]))
    found.append(Hypothesis("the last token twice", prompt=lambda ids: [*ids, *ids[-1:]]))
    for at in (*range(MOST_MISSING), *range(-MOST_MISSING, 0)):
        found.append(Hypothesis(f"without token {at} of the prompt", prompt=partial(_without, at)))
    for count in (2, 3, 4):
        found.append(Hypothesis(f"without the first {count} tokens", prompt=partial(_part, slice(count, None))))
        found.append(Hypothesis(f"without the last {count} tokens", prompt=partial(_part, slice(None, -count))))
    return found


MOST_MISSING = 4  # tokens from either end of the prompt


def _before(token: int, ids: list[int]) -> list[int]:
    return [token, *ids]


def _without(at: int, ids: list[int]) -> list[int]:
    kept = [token for i, token in enumerate(ids) if i != at % len(ids)]
    return kept or ids


def _part(part: slice, ids: list[int]) -> list[int]:
    return ids[part] or ids


def _rope(name: str, frequencies: Frequencies) -> Hypothesis:
    return Hypothesis(name, changed=partial(_with_frequencies, frequencies=frequencies))


@contextmanager
def _with_frequencies(model: Any, frequencies: Frequencies) -> Iterator[None]:
    """Other inverse frequencies in every rotary embedding of the model, for a while."""
    before = [(module, name, buffer) for module in model.modules()
              for name, buffer in module.named_buffers(recurse=False) if name.endswith(_SUFFIX)]  # fmt: skip
    try:
        for module, name, buffer in before:
            setattr(module, name, frequencies(buffer))
        yield
    finally:
        for module, name, buffer in before:
            setattr(module, name, buffer)


@contextmanager
def _with_parameters(model: Any, parameters: dict[str, Any]) -> Iterator[None]:
    """Rotary embeddings as transformers makes them from other `rope_parameters`, for a while."""
    config = deepcopy(model.config.get_text_config())
    config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"]} | parameters
    before = [module for module in model.modules() if isinstance(getattr(module, _SUFFIX, None), _tensor())]
    kept = [(module, module.inv_freq, getattr(module, "attention_scaling", 1.0)) for module in before]
    try:
        for module, frequency_F, _ in kept:
            new_F, scaling = _computed(module, config, frequency_F)
            module.inv_freq, module.attention_scaling = new_F.to(frequency_F.dtype), scaling
        yield
    finally:
        for module, frequency_F, scaling in kept:
            module.inv_freq, module.attention_scaling = frequency_F, scaling


def _computed(module: Any, config: Any, frequency_F: torch.Tensor) -> tuple[torch.Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = config.rope_parameters["rope_type"]
    compute = module.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    found: tuple[torch.Tensor, float] = compute(config, frequency_F.device)
    return found


def _tensor() -> type:
    import torch

    return torch.Tensor
