"""Trust regions: one pure function a file, the same for analysis and for training.

A file holds

    FORMULA: str          when a token is blocked, with {r}, {p}, {q} and the thresholds in braces
    NOT_ONE_SIDED: str    "" where the mask never blocks a move of p towards q; else why it may
    def trust_region(compared: Compared, advantage_T: Tensor, *, threshold: float = …) -> Decision

and, where it calls `compared.topk(k)`, READS_TOP_K = True beside an integer threshold `k`. It is usable by the file's
name; a user's own file needs `trust_region` alone.
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mismatch_cli import registry
from mismatch_cli.errors import UsageError, first_line

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "mismatch_cli.trust_regions"
Threshold = float | int | str | bool


@dataclass(frozen=True)
class Decision:
    """What a mask answers for each token: whether it stays, and the signed value that was held against the threshold.

    The statistic is positive where p is above q. A sequence's value stands at each of its tokens.
    """

    keep_T: Tensor  # bool
    statistic_T: Tensor


@cache
def find(name: str) -> ModuleType:
    """The trust region of a public name, or of a path to a Python file; a `UsageError` says what is wrong with it."""
    if name.endswith(".py"):
        return _load_file(Path(name))
    return registry.load(PACKAGE, name, "trust region")


def thresholds(region: ModuleType) -> dict[str, Threshold]:
    """The keyword-only parameters of a trust region with their defaults."""
    parameters = inspect.signature(region.trust_region).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{path} does not exist. Name a Python file that defines trust_region().")
    spec = importlib.util.spec_from_file_location(f"trust_region_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(
            f"{path} cannot be imported ({type(error).__name__}: {first_line(error)}). Repair it."
        ) from error
    if not callable(getattr(module, "trust_region", None)):
        raise UsageError(
            f"{path} defines no trust_region(compared, advantage_T, *, threshold=…) -> Decision. See docs/clipstats.md."
        )
    _check_signature(path, module)
    return module


def _check_signature(path: Path, module: Any) -> None:
    parameters = list(inspect.signature(module.trust_region).parameters.values())
    keyword_only = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    without_default = [p.name for p in keyword_only if p.default is inspect.Parameter.empty]
    if len(parameters) - len(keyword_only) != 2 or without_default:
        raise UsageError(
            f"{path}: trust_region must take (compared, advantage_T) and keyword-only thresholds with defaults. "
            "See docs/clipstats.md."
        )
    if taken := {"r", "p", "q"} & {p.name for p in keyword_only}:
        raise UsageError(f"{path}: {taken.pop()} is a letter of the formulas. Give that threshold another name.")
