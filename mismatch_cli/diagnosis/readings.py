"""Which misreading of the responses reproduces one side, when the other side agrees with the model
on them as recorded.

The model reads the recorded tokens; one side agrees with it, the other does not. Then the model
reads a few responses under each hypothesis, and the one that fits the other side best is scored on
all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.diagnosis.model import AS_RECORDED, BudgetSpent, Hypothesis, ModelAtHand
from mismatch_cli.diagnosis.sample import Sample

if TYPE_CHECKING:
    import torch

    Frequencies = Callable[[torch.Tensor], torch.Tensor]


_AGREES = 0.5  # of the gap: how far the correct side may be from the model
_PROMISES, _FITS = 0.8, 0.5  # of the gap that may be left: on a few responses, on all
_STEPS = 7  # of the search between two factors
# Of the budget, for one kind of misreading; an eighth is for the responses as recorded
_OF_PROMPTS, _OF_PADDING, _OF_POSITIONS = 0.2, 0.3, 0.35
_MOST_PADDING = 64  # tokens, tried one by one
_ROUND = (8, 64, 128, 256, 512, 1024, 2048)  # common multiples for padded lengths


@dataclass(frozen=True)
class Reading:
    """A hypothesis that fits one side; `left_T` is what undoing it leaves of log π − log μ, NaN
    where not scored.
    """

    name: str
    side: str
    left_T: np.ndarray
    left: float  # of the scored tokens' Σ|d|

    def left_N(self, sample: Sample) -> np.ndarray:
        """The gap without the misreading; tokens that were not scored shrink by the same factor
        as those that were.
        """
        left_N = self.left_T[sample.kept]
        return np.where(np.isfinite(left_N), left_N, sample.d_N * min(1.0, self.left))


class Readings:
    """The search through kinds of hypotheses, on one sample with a model."""

    def __init__(self, sample: Sample, model: ModelAtHand) -> None:
        self._sample, self._model, self._d_T = sample, model, sample.logp_T - sample.logq_T
        self.is_cut_short = False  # whether the budget ended before all hypotheses were tried

    @cached_property
    def side(self) -> str | None:
        """The side that differs from the model, if the other one agrees with it."""
        sides = {"rollout": self._sample.logq_T, "trainer": self._sample.logp_T}
        costs = {side: self._cost(own_T - self._model.logp_T()) for side, own_T in sides.items()}
        far = max(costs, key=lambda side: costs[side])
        near = min(costs.values())
        return far if near < _AGREES * self._cost(self._d_T) and near < costs[far] else None

    @property
    def budget_spent(self) -> str:
        """Why not every hypothesis was tried."""
        return (
            f"the budget of {self._model.budget:,} tokens ended before every reading was tried: "
            f"--config FILE.toml with reading-tokens = {2 * self._model.budget}"
        )

    @property
    def as_recorded(self) -> Reading | None:
        """The model's own numbers instead of the trainer's, if those do not match the model."""
        if self.side != "trainer":
            return None
        left_T = self._model.logp_T() - self._sample.logq_T
        return Reading("as recorded", "trainer", left_T, self._cost(left_T) / self._cost(self._d_T))

    @cached_property
    def positions(self) -> Reading | None:
        """Another base or scaling of RoPE, with a search between the usual factors where one of
        them helps.
        """
        if self.side is None:
            return None
        listed = positions_of(self._model.config)
        searches = (
            self._between(scaled_positions, FACTORS),
            self._between(scaled_base, BASE_FACTORS),
        )
        return self._best(chain(listed, *searches), _OF_POSITIONS)

    @cached_property
    def padding(self) -> Reading | None:
        """Left padding that attention sees: the same number of tokens everywhere, or prompts
        padded to one length.
        """
        return self._best(paddings(self._model), _OF_PADDING)

    @cached_property
    def prompt(self) -> Reading | None:
        """A prompt token that is missing or duplicated."""
        return self._best(other_prompts(self._model.config), _OF_PROMPTS)

    def _cost(self, d_T: np.ndarray, few: bool = False) -> float:
        """The mean |d| over the tokens that count and were scored, nats."""
        known_T = (
            self._sample.counts_T
            & np.isfinite(self._model.logp_T(AS_RECORDED, few))
            & np.isfinite(d_T)
        )
        return float(np.abs(d_T[known_T]).mean()) if known_T.any() else np.inf

    def _left_T(self, hypothesis: Hypothesis, few: bool) -> np.ndarray:
        """log π − log μ with the differing side moved from the hypothesis back to the recorded
        tokens.
        """
        moved_T = self._model.logp_T(AS_RECORDED, few) - self._model.logp_T(hypothesis, few)
        return self._d_T + (moved_T if self.side == "trainer" else -moved_T)

    def _few_cost(self, hypothesis: Hypothesis) -> float:
        return self._cost(self._left_T(hypothesis, few=True), few=True)

    def _between(
        self, make: Callable[[float], Hypothesis], factors: Sequence[float]
    ) -> Iterator[Hypothesis]:
        """A ternary search on the logarithm between the neighbours of the best of these factors;
        none if it does not help.
        """
        costs = [self._few_cost(make(factor)) for factor in factors]
        at = int(np.argmin(costs))
        if costs[at] >= self._few_cost(AS_RECORDED):
            return
        low, high = (np.log(factors[i]) for i in (max(0, at - 1), min(len(factors) - 1, at + 1)))
        for _ in range(_STEPS):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            pair = [make(float(np.exp(third))) for third in (left, right)]
            yield from pair
            if self._few_cost(pair[0]) < self._few_cost(pair[1]):
                high = right
            else:
                low = left
        yield make(float(np.exp((low + high) / 2)))

    def _best(self, hypotheses: Iterable[Hypothesis], share: float) -> Reading | None:
        """The hypothesis that fits a few responses best, of those that a share of the budget
        allows, if it fits them well enough, and then all.
        """
        if self.side is None:
            return None
        best, least = AS_RECORDED, _PROMISES * self._cost(self._d_T, few=True)
        until = self._model.spent + share * self._model.budget
        try:
            for hypothesis in hypotheses:
                if self._model.spent > until:
                    raise BudgetSpent
                cost = self._few_cost(hypothesis)
                if cost <= least:
                    best, least = hypothesis, cost
        except BudgetSpent:
            self.is_cut_short = True
        if best is AS_RECORDED:
            return None
        left_T = self._left_T(best, few=False)
        left = self._cost(left_T) / self._cost(self._d_T)
        return Reading(best.name, self.side, left_T, left) if left < _FITS else None


def scaled_positions(factor: float) -> Hypothesis:
    """RoPE with every position divided by a factor: linear scaling."""
    return _rope(f"RoPE scaled linearly by {factor:.4g}", lambda frequency_F: frequency_F / factor)


def scaled_base(factor: float) -> Hypothesis:
    """RoPE with its base multiplied by a factor, the same as NTK scaling."""

    def changed(frequency_F: torch.Tensor) -> torch.Tensor:
        import torch

        count = len(frequency_F)
        exponent_F = torch.arange(count, device=frequency_F.device, dtype=torch.float32) / count
        return frequency_F * float(factor) ** -exponent_F

    return _rope(f"RoPE base times {factor:.4g}", changed)


def positions_of(config: Any) -> list[Hypothesis]:
    """What to try first: common factors, and YaRN from this model's context lengths."""
    found = [scaled_positions(factor) for factor in FACTORS] + [
        scaled_base(factor) for factor in BASE_FACTORS
    ]
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters:
        return found
    most = int(config.max_position_embeddings)
    trained = {most, int(parameters.get("original_max_position_embeddings", most))}
    for factor in YARN_FACTORS:
        for n in sorted(trained | {int(most / factor)}):
            yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": n}
            found.append(_with_parameters(f"YaRN with factor {factor:g} from {n} positions", yarn))
    if parameters.get("rope_type", "default") != "default":
        found.append(_with_parameters("RoPE without its scaling", {"rope_type": "default"}))
    return found


FACTORS = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0)
BASE_FACTORS = (1e-3, 1e-2, 0.1, 0.25, 0.5, 2.0, 4.0, 10.0, 50.0, 100.0, 1000.0)
YARN_FACTORS = (2.0, 4.0, 8.0, 32.0)


def padded(count: int, token: int) -> Hypothesis:
    """A number of padding tokens on the left, which attention sees."""
    return Hypothesis(
        f"{count} tokens {token} before the prompt", prompt=lambda ids: [token] * count + ids
    )


def padded_to(length: int, token: int) -> Hypothesis:
    """Prompts left-padded to one length, with padding that attention sees."""
    name = f"prompts padded to {length} with token {token}"
    return Hypothesis(name, prompt=lambda ids: [token] * max(0, length - len(ids)) + ids)


def paddings(model: ModelAtHand) -> Iterator[Hypothesis]:
    """Prompts padded with the usual tokens: the padding token, the end of sequence, or 0."""
    tokens = list(dict.fromkeys([*_token_ids(model.config, "pad", "eos").values(), 0]))
    longest = model.longest_prompt
    lengths = sorted({longest, *(-(-longest // n) * n for n in _ROUND)})
    yield from (padded_to(length, token) for token in tokens for length in lengths)
    yield from (padded(count, tokens[0]) for count in range(1, _MOST_PADDING + 1))


def other_prompts(config: Any) -> list[Hypothesis]:
    """Prompts with a token that is missing or duplicated."""
    found = [
        Hypothesis(f"the {name} token before the prompt", prompt=padded(1, token).prompt)
        for name, token in _token_ids(config, "bos", "eos", "pad").items()
    ]
    found.append(Hypothesis("the first token twice", prompt=lambda ids: [*ids[:1], *ids]))
    found.append(Hypothesis("the last token twice", prompt=lambda ids: [*ids, *ids[-1:]]))
    ends = (*range(MOST_MISSING), *range(-MOST_MISSING, 0))
    missing: dict[str, Sequence[int]] = {f"without token {at} of the prompt": [at] for at in ends}
    for count in (2, 3, 4):
        missing[f"without the first {count} tokens"] = range(count)
        missing[f"without the last {count} tokens"] = range(-count, 0)
    return found + [
        Hypothesis(name, prompt=partial(_without, places)) for name, places in missing.items()
    ]


MOST_MISSING = 4  # tokens from either end of the prompt


def _token_ids(config: Any, *names: str) -> dict[str, int]:
    """The special tokens in the configuration; the first of several."""
    found = {name: getattr(config, f"{name}_token_id", None) for name in names}
    return {
        name: ids[0] if isinstance(ids, list) else int(ids)
        for name, ids in found.items()
        if ids is not None
    }


def _without(places: Sequence[int], ids: list[int]) -> list[int]:
    """The ids without those at some places, counted from either end; all of them if none would
    be left.
    """
    missing = {place % len(ids) for place in places}
    return [token for i, token in enumerate(ids) if i not in missing] or ids


def _rope(name: str, frequencies: Frequencies) -> Hypothesis:
    """Change the inverse frequencies in every rotary embedding of the model."""

    def changed(model: Any) -> AbstractContextManager[None]:
        buffers = [
            (module, *buffer)
            for module in model.modules()
            for buffer in module.named_buffers(recurse=False)
        ]
        return _set(
            [
                (module, name, frequencies(buffer_F))
                for module, name, buffer_F in buffers
                if name.endswith("inv_freq")
            ]
        )

    return Hypothesis(name, changed=changed)


def _with_parameters(name: str, parameters: dict[str, Any]) -> Hypothesis:
    """Rotary embeddings built by transformers from the model's base and other `rope_parameters`."""

    def changed(model: Any) -> AbstractContextManager[None]:
        import torch
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = deepcopy(model.config.get_text_config())
        config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"]} | parameters
        kind, changes = parameters["rope_type"], []
        for module in model.modules():
            if isinstance(frequency_F := getattr(module, "inv_freq", None), torch.Tensor):
                compute = (
                    module.compute_default_rope_parameters
                    if kind == "default"
                    else ROPE_INIT_FUNCTIONS[kind]
                )
                new_F, scaling = compute(config, device=frequency_F.device)  # some models ignore it
                changes += [
                    (module, "inv_freq", new_F.to(frequency_F)),
                    (module, "attention_scaling", scaling),
                ]
        return _set(changes)

    return Hypothesis(name, changed=changed)


@contextmanager
def _set(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of modules temporarily; a module without a scaling scales by 1."""
    before = [(module, name, getattr(module, name, 1.0)) for module, name, _ in changes]
    try:
        for change in changes:
            setattr(*change)
        yield
    finally:
        for attribute in before:
            setattr(*attribute)
