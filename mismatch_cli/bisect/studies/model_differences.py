"""How two models differ, in words: tensors that one lacks, classes, numbers, settings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mismatch_cli.base.numbers import things
from mismatch_cli.bisect.experiments import ROLLOUT, TRAINER
from mismatch_cli.bisect.model_config import ConfigDifference
from mismatch_cli.bisect.studies.bisection_result import ComparedModels, LackingTensors, TensorRow

_MOST_NAMED = 3  # kinds of tensors in a clause
_OWNERS = {ROLLOUT: "engine", TRAINER: "trainer"}


class LackingTensor(NamedTuple):
    """A tensor that one model computes with, and the side whose model lacks it."""

    tensor: str
    side: str


@dataclass(frozen=True)
class ModelDifferences:
    """What a search found when it compared the two models, before any experiment."""

    weights: ComparedModels
    were_compared: bool = True

    @cached_property
    def lacking(self) -> list[LackingTensor]:
        """The trainer's first: an engine that has more is what nobody looks for."""
        names = self.weights.lacking or LackingTensors()
        rows = [LackingTensor(name, TRAINER) for name in names.trainer]
        rows += [LackingTensor(name, ROLLOUT) for name in names.rollout]
        return rows

    @property
    def unread(self) -> list[str]:
        """Tensors that were not compared, with the reason; without those that a side lacks."""
        lacking = {row.tensor for row in self.lacking}
        return [row for row in self.weights.unread if row.partition(": ")[0] not in lacking]

    @property
    def settings(self) -> list[ConfigDifference]:
        """The classes if they differ, and settings of the configuration."""
        classes = self.weights.architectures
        if classes is None:
            return list(self.weights.config)
        of_two = ConfigDifference("architectures", classes.rollout, classes.trainer)
        return [of_two, *self.weights.config]

    def clauses(self, without_effect: Collection[str] = ()) -> Iterator[str]:
        """A clause for each kind of difference; `without_effect` names settings whose change
        moved nothing, on which the models need not agree.
        """
        classes = self.weights.architectures
        lacking = [*self._lacking(TRAINER), *self._lacking(ROLLOUT)]
        if classes is not None:
            both = f"{classes.rollout} against {classes.trainer}"
            # Two classes are why tensors are lacking: the first clause says both.
            if lacking:
                lacking[0] = f"{lacking[0]} ({both})"
            else:
                lacking = [f"The models are of two classes: {both}"]
        yield from lacking
        yield from _numbers(self.weights.differing)
        yield from _settings(self.weights.config, without_effect)

    def _lacking(self, side: str) -> Iterator[str]:
        """A clause with the tensors that a side's model lacks; none if it lacks none."""
        names = [row.tensor for row in self.lacking if row.side == side]
        if not names:
            return
        (other,) = _OWNERS.keys() - {side}
        have = "has" if len(names) == 1 else "have"
        yield (
            f"{things(len(names), 'tensor')} of the {_OWNERS[other]}’s model {have} no counterpart "
            f"in the {_OWNERS[side]}’s: {_by_layer(names)}"
        )


def _numbers(differing: Sequence[TensorRow]) -> Iterator[str]:
    """The tensors whose numbers differ: how many, and how the first does."""
    if not differing:
        return
    first, more = differing[0], len(differing) - 1
    how = f"{first.relation}: {first.detail}" if first.detail else first.relation
    named = f"{first.tensor} ({how})"
    if more:
        yield f"{more + 1} tensors differ: {named}, and {more} more"
    else:
        yield f"1 tensor differs: {named}"


def _settings(config: Sequence[ConfigDifference], without_effect: Collection[str]) -> Iterator[str]:
    """Settings that both models have: what one class alone has is its own."""
    for row in config:
        name, engine, trainer = row.key, row.rollout, row.trainer
        if None in (engine, trainer):
            continue
        if len(row.inner) == 1:
            part = row.inner[0]
            name, engine, trainer = f"{name}.{part}", engine.get(part), trainer.get(part)
        if name not in without_effect:
            yield f"{name} is {engine} in the engine and {trainer} in the trainer"


def _by_layer(names: Sequence[str]) -> str:
    """`layers.*.self_attn.q_norm.weight (4 ×)`: the same tensor of many layers once."""
    kinds = defaultdict[str, list[str]](list)
    for name in names:
        kinds[re.sub(r"\.\d+\.", ".*.", name)].append(name)
    clauses = []
    for kind, alike in kinds.items():
        clauses.append(alike[0] if len(alike) == 1 else f"{kind} ({len(alike)} ×)")
    more = len(clauses) - _MOST_NAMED
    if more > 0:
        clauses[_MOST_NAMED:] = [f"and {more} more"]
    return ", ".join(clauses)
