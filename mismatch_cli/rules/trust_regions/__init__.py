"""Trust regions: one pure function per file, the same for analysis and training.

A file defines

    FORMULA: str          when a token is blocked, with {r}, {p}, {q} and the thresholds in braces
    SYMBOLS: dict         thresholds with a letter in the literature: {"max_tv": "δ"}; typed δ or delta, printed δ
    NOT_ONE_SIDED: str    "" if the mask never blocks a move of p towards q; else why it may
    def trust_region(compared: Compared, advantage_T: Array, *, threshold: float = …) -> Decision

and, if it calls `compared.topk(k)`, READS_TOP_K = True and an integer threshold `k`; if it reads
`compared.entropy_T`, READS_ENTROPY = True; if one more name sets both sides of a threshold,
BOTH_SIDES = "max_tv". Its name is the file's name; a user's own file needs only `trust_region`.

A mask that blocks tokens even where the policies agree sets MEASURES_NO_DISTANCE = True. One that
looks at more than one response sets SCOPE = "batch", all rows of an optimizer step, or "group", all
answers to a prompt in a step, and defines two more functions, with the same thresholds:

    def collect(compared, advantage_T, *, …) -> Array         the values that it needs from each token, [T, M]
    def settle(rows_UM, *, …) -> Sequence[float]              numbers from all rows, numpy float64, in any order
    def trust_region(compared, advantage_T, settled_TF, *, …) gets these numbers at each token
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mismatch_cli.base import registry
from mismatch_cli.base.arrays import Array, namespace
from mismatch_cli.base.entry_points import foreign_code
from mismatch_cli.base.errors import MismatchError, UsageError, first_line
from mismatch_cli.base.extras import not_installed

PACKAGE = "mismatch_cli.rules.trust_regions"
Threshold = float | int | str | bool


@dataclass(frozen=True)
class Decision:
    """A mask's decision for each token: whether to keep it, and the signed value that is compared
    with the threshold.

    The statistic is positive where p is above q, unless it has no sign, like an entropy. A
    sequence's value is repeated at each of its tokens.
    """

    keep_T: Array  # bool
    statistic_T: Array


@cache
def find(name: str) -> ModuleType:
    """The trust region with a public name or in a user's Python file; a `UsageError` says what
    is wrong with it.
    """
    if name.endswith(".py"):
        return _load_file(Path(name))
    return registry.load(PACKAGE, name, "trust region")


def is_foreign(name: str) -> bool:
    """Whether this is foreign code: a user's file, or a mask of another package."""
    return name.endswith(".py") or name in registry.installed(PACKAGE)


def register_texts(texts: Mapping[str, str]) -> None:
    """Register users' files, by path, that were read on another machine."""
    text_by_path.update(texts)


def source_text(path: Path) -> str:
    """The text of a user's file, from here or the machine where it was read."""
    text = text_by_path.get(str(path))
    return path.read_text(encoding="utf-8") if text is None else text


# The users' files that were read on another machine, and need not be on this one
text_by_path: dict[str, str] = {}


def thresholds(region: ModuleType) -> dict[str, Threshold]:
    """The keyword-only parameters of a trust region with their defaults."""
    return registry.parameters(region.trust_region)


def symbols(region: ModuleType) -> dict[str, str]:
    """The letters of a trust region's thresholds, if they have one."""
    return getattr(region, "SYMBOLS", {})


def in_latin_letters(name: str) -> str:
    """A name without Greek letters: `ε_low` is `epsilon_low`."""
    return name.translate(_LATIN)


_LATIN = str.maketrans(
    {
        "α": "alpha",
        "β": "beta",
        "δ": "delta",
        "ε": "epsilon",
        "ϵ": "epsilon",
        "λ": "lambda",
        "ρ": "rho",
        "τ": "tau",
        "φ": "phi",
    }
)


def describe_flaw(answer: object, advantage_T: Array) -> str:
    """What is wrong with a mask's result, as a sentence; empty if nothing is."""
    if not isinstance(answer, Decision):
        return f"It returned {type(answer).__name__}."
    for name in ("keep_T", "statistic_T"):
        column_T = getattr(answer, name)
        shape = tuple(getattr(column_T, "shape", ()))
        if not isinstance(column_T, type(advantage_T)):
            return (
                f"Its {name} is {type(column_T).__name__}, but the columns are "
                f"{type(advantage_T).__name__}."
            )
        if shape != tuple(advantage_T.shape):
            return f"Its {name} has the shape {shape} for {len(advantage_T):,} tokens."
        if column_T.device != advantage_T.device:
            return (
                f"Its {name} is on {column_T.device}, but the tokens are on {advantage_T.device}."
            )
    xp = namespace(advantage_T)
    if answer.keep_T.dtype != xp.bool:
        return f"Its keep_T holds {answer.keep_T.dtype}."
    # A token without an advantage has no update, so nothing reads its statistic
    missing = int(xp.sum(xp.isnan(answer.statistic_T) & (advantage_T != 0)))
    if missing:
        return f"Its statistic_T is NaN at {missing:,} of {len(advantage_T):,} tokens."
    return ""


class EndsProgramError(MismatchError):
    """Foreign code that ends the program: not a mistake in a command line, however early it does
    so.
    """


@contextmanager
def report_errors_of(
    name: str | Path, does: str = "fails", error_class: type[MismatchError] = UsageError
) -> Iterator[None]:
    """Turn whatever foreign code raises, SystemExit included, into one sentence that names the
    file or mask.
    """
    try:
        with foreign_code():
            yield
    except (MismatchError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise EndsProgramError(
            f"{name} tries to end the program (SystemExit), which a mask must not do. Remove the "
            "call."
        ) from error
    except BaseException as error:
        missing_package = not_installed(error, str(name))
        if missing_package:
            raise error_class(missing_package) from error
        if _OTHER_ARRAYS.search(first_line(error)):
            raise error_class(_MIXED.format(name=name, error=first_line(error))) from error
        raise error_class(
            f"{name} {does} ({type(error).__name__}: {first_line(error)}). Fix the mask."
        ) from error


_OTHER_ARRAYS = re.compile(r"must be Tensor|numpy\.ndarray|'Tensor' object")
_MIXED = (
    "{name} fails ({error}): the columns are numpy arrays when a trace is read, and torch "
    "tensors in `train`. Use operators, and the functions of namespace(advantage_T) from "
    "mismatch_cli.base.arrays, which work with both."
)


def _load_file(path: Path) -> ModuleType:
    text = text_by_path.get(str(path))
    if text is None and not path.is_file():
        raise UsageError(f"{path} does not exist. Name a Python file that defines trust_region().")
    spec = importlib.util.spec_from_file_location(f"trust_region_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    with report_errors_of(path, "cannot be imported"):
        if text is None:
            spec.loader.exec_module(module)
        else:
            exec(compile(text, path, "exec"), vars(module))
    if not callable(getattr(module, "trust_region", None)):
        raise UsageError(
            f"{path} does not define trust_region(compared, advantage_T, *, threshold=…) -> "
            "Decision. See mismatch-cli guide clipstats."
        )
    with report_errors_of(path):
        _check_signature(path, module)
    return module


def _check_signature(path: Path, module: Any) -> None:
    columns = ["compared", "advantage_T"]
    if hasattr(module, "SCOPE"):
        columns.append("settled_TF")
    parameters = inspect.signature(module.trust_region).parameters
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    takes_columns = len(parameters) - len(defaults) == len(columns)
    lacks_default = any(default is inspect.Parameter.empty for default in defaults.values())
    if not takes_columns or lacks_default:
        raise UsageError(
            f"{path}: trust_region must take ({', '.join(columns)}) and keyword-only thresholds "
            "with defaults. See mismatch-cli guide clipstats."
        )
    if hasattr(module, "SCOPE"):
        _check_scope(path, module)
    _check_thresholds(path, module, defaults)


def _check_thresholds(path: Path, module: Any, defaults: Mapping[str, Any]) -> None:
    for name, default in defaults.items():
        if not isinstance(default, float | int | str):
            raise UsageError(
                f"{path}: the default of {name} must be a number or a text. Give it one."
            )
    if getattr(module, "READS_TOP_K", False) and type(defaults.get("k")) is not int:
        raise UsageError(
            f"{path} sets READS_TOP_K = True. Add a whole-number threshold k, the number of ranks."
        )
    for name in sorted(symbols(module)):
        if name not in defaults:
            raise UsageError(
                f"{path}: SYMBOLS names {name}, which is not a threshold of trust_region. Add that "
                "threshold, or remove the name."
            )
    _check_letters(path, module, defaults)
    for letter in ("r", "p", "q"):
        if letter in defaults:
            raise UsageError(
                f"{path}: formulas already use the letter {letter}. Rename that threshold."
            )


def _check_letters(path: Path, module: Any, defaults: Mapping[str, Any]) -> None:
    """Refuse names that would set another threshold, or what masks are measured from."""
    if "anchor" in defaults:
        raise UsageError(
            f"{path}: anchor= already names the policy that a mask measures from. Rename that "
            "threshold."
        )
    for name, letter in symbols(module).items():
        other = in_latin_letters(letter)
        if other in defaults and other != name:
            raise UsageError(
                f"{path}: {other} is a threshold, and also the letter of {name}. Rename one of "
                "them."
            )


def _check_scope(path: Path, module: Any) -> None:
    if module.SCOPE not in ("batch", "group"):
        raise UsageError(f"{path} sets SCOPE = {module.SCOPE!r}. Choose one of: batch, group.")
    for name in ("collect", "settle"):
        if not callable(getattr(module, name, None)):
            raise UsageError(
                f"{path} looks at a whole {module.SCOPE} but defines no {name}(). See "
                "mismatch-cli guide extending."
            )
