"""What differs between two models before any number is compared: their classes, and tensors that
only one of them has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.models.loading import load_config
from mismatch_cli.models.saved_tensors import SavedTensors, computed_names, tied_names

_WRAPPERS = ("model.", "transformer.", "language_model.")


@dataclass(frozen=True)
class StructureDifference:
    """The class of each model, and the tensors that a side's model lacks though the other's
    computes with them; empty where both agree.
    """

    architectures: tuple[str, str] | None = None  # of the engine's model, and of the trainer's
    lacking_in_rollout: tuple[str, ...] = ()
    lacking_in_trainer: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        architectures = None
        if self.architectures is not None:
            rollout, trainer = self.architectures
            architectures = {"rollout": rollout, "trainer": trainer}
        return {
            "architectures": architectures,
            "lacking": {
                "rollout": list(self.lacking_in_rollout),
                "trainer": list(self.lacking_in_trainer),
            },
        }


def structure_difference(rollout: str, trainer: str) -> StructureDifference:
    """Compare two models' folders by names alone.

    A model that transformers cannot build says nothing of its tensors.
    """
    if rollout == trainer:
        return StructureDifference()
    difference = StructureDifference()
    classes = _class_of(rollout), _class_of(trainer)
    if classes[0] != classes[1]:
        difference = StructureDifference(classes)
    try:
        engine, scorer = _TensorNames(rollout), _TensorNames(trainer)
    except (MismatchError, ValueError, KeyError):
        return difference
    return replace(
        difference,
        lacking_in_rollout=engine.lacks(scorer),
        lacking_in_trainer=scorer.lacks(engine),
    )


def _class_of(model: str) -> str:
    names = getattr(load_config(model), "architectures", None) or ()
    return ", ".join(names)


def _tail(name: str) -> str:
    """The name without the wrappers that one side's names may lack."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


class _TensorNames:
    """The tensors of a folder, and those that its model computes with, without wrappers."""

    def __init__(self, model: str) -> None:
        self.saved = {_tail(name): name for name in SavedTensors(model).shapes}
        self.own = {_tail(name) for name in computed_names(model)}
        tied = {_tail(name) for name in tied_names(model)}
        # Experts that the folder holds one by one, and the model as one tensor
        self._renames = bool(self.own - self.saved.keys() - tied)

    def lacks(self, other: _TensorNames) -> tuple[str, ...]:
        """The other folder's names of tensors that its model computes with and this one does not.

        A tensor that a model ignores does not count; a tied head is not lacking.
        """
        absent = (other.saved.keys() & other.own) - self.own
        if self._renames:
            absent -= self.saved.keys()
        return tuple(sorted(other.saved[tail] for tail in absent))
