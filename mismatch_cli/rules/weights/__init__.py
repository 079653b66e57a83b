"""Weights of kept updates: one pure function per file, the same for analysis and training.

A file defines

    FORMULA: str          the weight, with {r}, {p}, {q} and parameters in braces; or `formula(parameters)`
    SYMBOLS: dict         parameters with a letter in the literature: {"cap": "C"}
    def weight(compared: Compared, level: Level, advantage_T: Array, *, parameter: float = …) -> Array

and, if it is a mean over the response by itself, OF_MEANS = True. A weight may fall to zero
smoothly and change its sign; tokens without an advantage do not use it. `level` is that of the
ratio in the table: a response's value is repeated at each token. For entropy and whole batches see
`trust_regions`.

The same function can be an algorithm's additive term, which is neither masked nor multiplied by A.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

from mismatch_cli.base import registry

PACKAGE = "mismatch_cli.rules.weights"


@cache
def find(name: str) -> ModuleType:
    """The weight with a public name."""
    return registry.load(PACKAGE, name, "weight")


def parameters(module: ModuleType) -> dict[str, float]:
    """The keyword-only parameters of a weight with their defaults."""
    return registry.parameters(module.weight)
