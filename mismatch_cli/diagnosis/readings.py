"""Which reading of the responses makes one side's numbers, while the other side has what the model gives as recorded.

The model at hand reads the recorded tokens; one side agrees with it, the other does not. Then the model reads them
under each hypothesis, a few responses first, and the one that fits the other side is scored on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.diagnosis import readings
from mismatch_cli.diagnosis.model import AS_RECORDED, Hypothesis, ModelAtHand
from mismatch_cli.diagnosis.sample import Sample

if TYPE_CHECKING:
    import torch

    Frequencies = Callable[[torch.Tensor], torch.Tensor]


_AGREES = 0.5  # of the gap: how far the side that read what is recorded may be from the model
_PROMISES, _FITS = 0.8, 0.5  # of a few responses' gap, of all responses' gap, that may be left
_STEPS = 7  # of a search between two factors
_MOST_PADDING = 64  # tokens, that are tried one by one
_ROUND = (8, 64, 128, 256, 512, 1024, 2048)  # lengths to which people fill up


@dataclass(frozen=True)
class Reading:
    """A hypothesis that fits one side: what undoing it leaves of log π − log μ, NaN where it was not scored."""

    name: str
    side: str
    left_T: np.ndarray
    left: float  # of the scored tokens' Σ|d|


class Readings:
    """The search, by kinds of hypotheses, on one sample with a model."""

    def __init__(self, sample: Sample, model: ModelAtHand) -> None:
        self._sample, self._model = sample, model

    @cached_property
    def side(self) -> str | None:
        """Which side differs from the model, where the other one agrees with it."""
        costs = {side: self._cost(own_T - self._model.logp_T()) for side, own_T in self._sides.items()}
        far = max(costs, key=lambda side: costs[side])
        near = min(costs.values())
        return far if near < _AGREES * self._cost(self._d_T) and near < costs[far] else None

    @property
    def as_recorded(self) -> Reading | None:
        """The model's own numbers in the place of the trainer's, where these are not what the model gives."""
        if self.side != "trainer":
            return None
        left_T = self._model.logp_T() - self._sample.logq_T
        return Reading("as recorded", "trainer", left_T, self._cost(left_T) / self._cost(self._d_T))

    @cached_property
    def positions(self) -> Reading | None:
        """Another base or scaling of RoPE; factors in between are searched for."""
        if self.side is None:
            return None
        costs = {h: self._few_cost(h) for h in readings.positions_of(self._model.config)}
        best = min(costs, key=lambda h: costs[h])
        for make, factors in (
            (readings.scaled_positions, readings.FACTORS),
            (readings.scaled_base, readings.BASE_FACTORS),
        ):
            between = self._between(make, factors)
            best = min((best, between), key=self._few_cost)
        return self._confirmed(best)

    @cached_property
    def padding(self) -> Reading | None:
        """Padding on the left that attention sees: as many tokens everywhere, or prompts filled up to one length."""
        if self.side is None:
            return None
        longest = self._model.longest_prompt
        lengths = sorted({longest, *(-(-longest // n) * n for n in _ROUND)})
        found = []
        for token in self._padding_ids():
            found += [readings.padded_to(length, token) for length in lengths]
        found += [readings.padded(count, self._padding_ids()[0]) for count in range(1, _MOST_PADDING + 1)]
        return self._confirmed(min(found, key=self._few_cost))

    @cached_property
    def prompt(self) -> Reading | None:
        """A token of the prompt that is missing, or stands there once more."""
        if self.side is None:
            return None
        return self._confirmed(min(readings.other_prompts(self._model.config), key=self._few_cost))

    @property
    def _sides(self) -> dict[str, np.ndarray]:
        return {"rollout": self._sample.logq_T, "trainer": self._sample.logp_T}

    @property
    def _d_T(self) -> np.ndarray:
        return self._sample.logp_T - self._sample.logq_T

    def _padding_ids(self) -> list[int]:
        """What people fill up with: the padding token, else the end of sequence, else 0."""
        named = [getattr(self._model.config, f"{name}_token_id", None) for name in ("pad", "eos")]
        flat = [value[0] if isinstance(value, list) else value for value in named]
        return list(dict.fromkeys(int(value) for value in (*flat, 0) if value is not None))

    def _cost(self, d_T: np.ndarray, few: bool = False) -> float:
        """The mean of |d| over the tokens that count and are scored, nats."""
        known_T = self._sample.counts_T & np.isfinite(self._model.logp_T(AS_RECORDED, few)) & np.isfinite(d_T)
        return float(np.abs(d_T[known_T]).mean()) if known_T.any() else np.inf

    def _left_T(self, hypothesis: Hypothesis, few: bool) -> np.ndarray:
        """log π − log μ where the side that differs is moved back from the hypothesis to what is recorded."""
        moved_T = self._model.logp_T(AS_RECORDED, few) - self._model.logp_T(hypothesis, few)
        return self._d_T + (moved_T if self.side == "trainer" else -moved_T)

    def _few_cost(self, hypothesis: Hypothesis) -> float:
        return self._cost(self._left_T(hypothesis, few=True), few=True)

    def _between(self, make: Callable[[float], Hypothesis], factors: Sequence[float]) -> Hypothesis:
        """The best factor near the best of some: thirds of the logarithm between its neighbours are given up."""
        costs = [self._few_cost(make(factor)) for factor in factors]
        at = int(np.argmin(costs))
        low, high = (np.log(factors[i]) for i in (max(0, at - 1), min(len(factors) - 1, at + 1)))
        for _ in range(_STEPS):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            if self._few_cost(make(float(np.exp(left)))) < self._few_cost(make(float(np.exp(right)))):
                high = right
            else:
                low = left
        return min((make(factors[at]), make(float(np.exp((low + high) / 2)))), key=self._few_cost)

    def _confirmed(self, best: Hypothesis) -> Reading | None:
        """The hypothesis on all responses, if it holds on the few."""
        if self._few_cost(best) > _PROMISES * self._cost(self._d_T, few=True):
            return None
        left_T = self._left_T(best, few=False)
        left = self._cost(left_T) / self._cost(self._d_T)
        return Reading(best.name, str(self.side), left_T, left) if left < _FITS else None


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
