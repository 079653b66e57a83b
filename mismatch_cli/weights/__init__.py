"""Weights: what an update that is kept counts; one pure function a file, the same for analysis and for training.

A file holds

    FORMULA: str          the weight, with {r}, {p}, {q} and parameters in braces; or `formula(parameters)`
    SYMBOLS: dict         parameters that have a letter in the literature: {"cap": "C"}
    def weight(compared: Compared, level: Level, advantage_T: Array, *, parameter: float = …) -> Array

It may fall to zero smoothly and change its sign; a token without advantage never asks for it. `level` is that of the
ratio in the table: a response's value stands at each of its tokens. Entropy and whole batches as in `trust_regions`.

The same function can be an algorithm's additive term, which is neither masked nor multiplied with A.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

from mismatch_cli import registry

PACKAGE = "mismatch_cli.weights"


@cache
def find(name: str) -> ModuleType:
    """The weight of a public name."""
    return registry.load(PACKAGE, name, "weight")


def parameters(module: ModuleType) -> dict[str, float]:
    """The keyword-only parameters of a weight with their defaults."""
    return registry.parameters(module.weight)
