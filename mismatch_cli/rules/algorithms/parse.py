"""Parses `name:parameter=value,…` into an algorithm: a row of the table, a mask by name, or a
user's mask file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf, isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mismatch_cli.base import registry
from mismatch_cli.base.arrays import Array
from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.rules import trust_regions, weights
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.first_pass import as_one_batch
from mismatch_cli.rules.algorithms.masks_and_factors import Factor, Mask, Rule
from mismatch_cli.rules.algorithms.table import ALIASES, MEANINGS, TABLE, USUAL_WORDS, VARIANTS
from mismatch_cli.rules.decisions import MOST_RANKS
from mismatch_cli.rules.policies import ENGINE_GAP, TRAINER_ROLLOUT, Policies, Ratio, TopKLogProbs
from mismatch_cli.rules.trust_regions import Threshold


def parse_algorithm(spec: str, *, training: bool = False) -> Algorithm:
    """An algorithm from `name` or `name:parameter=value,…`: of the table, of trust_regions/, or a
    user's mask file.

    Parameters are the thresholds of the masks by name or letter (`delta`, `δ`; `epsilon` sets both
    sides), those of the weight (`cap`, `C`, `floor`; `tau`), and `anchor` (rollout or recomputed),
    from which masks, weight and term then measure the trainer. A user's file is tried on numpy
    arrays, and for `training` also on torch tensors. A `UsageError` says what is wrong and what the
    choices are.
    """
    spec = usual_meaning(spec)
    name, colon, given = spec.partition(":")
    algorithm = _by_name(name)
    if colon:
        algorithm = replace(_with_parameters(algorithm, _parse(spec, given)), name=_short(spec))
    _try_out(algorithm, training)
    return algorithm


def usual_meaning(spec: str) -> str:
    """`dppo-binary-tv` for `dppo`, with its parameters: what a word that everybody uses means."""
    name, colon, parameters = spec.partition(":")
    word = name.lower()
    return MEANINGS[word][0] + colon + parameters if word in USUAL_WORDS else spec


def _by_name(name: str) -> Algorithm:
    canonical = ALIASES.get(name, name)
    rows = TABLE | VARIANTS
    if canonical in rows:
        return rows[canonical]
    regions = registry.names(trust_regions.PACKAGE)
    if name in regions or name.endswith(".py"):
        source = "a mask by its own name" if name in regions else "your own mask"
        mask = Mask(name)
        mask.module  # noqa: B018 - refuses an unusable file here, in one sentence
        return Algorithm(_short(name), (mask,), (Factor(TRAINER_ROLLOUT),), source)
    foreign = registry.installed(weights.PACKAGE)  # our own weights are used in rows of the table
    if name in foreign:
        return Algorithm(name, (), (Factor(TRAINER_ROLLOUT, name),), "a weight by its own name")
    meanings = MEANINGS.get(name.lower())
    if meanings:
        unknown = f"Several algorithms are called {name}: {registry.alternatives(meanings)}."
    else:
        unknown = registry.unknown_name("algorithm", name, [*rows, *ALIASES, *regions, *foreign])
    raise UsageError(f"{unknown} All of them, masks included: mismatch-cli algorithms")


def _short(spec: str) -> str:
    """The name in tables: a user's file without its folder."""
    name, colon, given = spec.partition(":")
    return (Path(name).stem if name.endswith(".py") else name) + colon + given


def _parse(spec: str, given: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in given.split(",")]
    if any(not name or not value for name, _, value in pairs):
        raise UsageError(
            f"'{spec}' is not an algorithm with parameters. Write "
            "NAME:PARAMETER=VALUE,PARAMETER=VALUE."
        )
    parameters = {name.strip(): value.strip() for name, _, value in pairs}
    if len(parameters) < len(pairs):
        raise UsageError(f"'{spec}' gives a parameter twice. Give each one once.")
    return parameters


def _with_parameters(algorithm: Algorithm, typed: Mapping[str, str]) -> Algorithm:
    given = _resolved(algorithm, typed)
    masks = tuple(_tuned(mask, given) for mask in algorithm.masks)
    factors = [*algorithm.weight, *([algorithm.term] if algorithm.term else [])]
    tuned_factors = _weighed(factors, given)
    weight = tuned_factors[: len(algorithm.weight)]
    tuned = replace(
        algorithm, masks=masks, weight=weight, term=next(iter(tuned_factors[len(weight) :]), None)
    )
    return _anchored(tuned, given["anchor"].text) if "anchor" in given else tuned


class _ParameterText(NamedTuple):
    """The text that was given for a parameter, and the name that was used for it."""

    name: str
    text: str


def _resolved(algorithm: Algorithm, typed: Mapping[str, str]) -> dict[str, _ParameterText]:
    """Parameters by their names in masks and weights: `delta` and `δ` are `max_tv` of binary-tv."""
    accepted = _accepted(algorithm)
    targets = {trust_regions.in_latin_letters(name): meant for name, meant in accepted.items()}
    found: dict[str, _ParameterText] = {}
    for name, text in typed.items():
        if not accepted:
            raise UsageError(f"{algorithm.name} takes no parameters. Write only its name.")
        parameters = targets.get(trust_regions.in_latin_letters(name))
        if not parameters:
            raise UsageError(
                registry.lacks_name(algorithm.name, "parameter", name, targets, _listed(accepted))
            )
        for parameter in parameters:
            if parameter in found:
                raise UsageError(
                    f"{found[parameter].name} and {name} both set {parameter}. Give each one once."
                )
            found[parameter] = _ParameterText(name, text)
    return found


def _accepted(algorithm: Algorithm) -> dict[str, list[str]]:
    """The parameters that each name sets: its own, the one with its letter, or both sides of ε."""
    letters = {
        name: symbol
        for rule in algorithm.rules
        for name, symbol in trust_regions.symbols(rule.module).items()
    }
    accepted: dict[str, list[str]] = {}
    for module in {rule.module for rule in algorithm.rules if hasattr(rule.module, "BOTH_SIDES")}:
        accepted[module.BOTH_SIDES] = list(trust_regions.symbols(module))
    for name, symbol in letters.items():
        for key in dict.fromkeys([symbol, symbol.partition("_")[0]]):
            accepted.setdefault(key, []).append(name)
    names = {name for rule in algorithm.rules for name in rule.parameters}
    anchor = {"anchor": ["anchor"]} if _anchors(algorithm) else {}
    return accepted | {name: [name] for name in names} | anchor


def _anchors(algorithm: Algorithm) -> set[str]:
    """The policies from which its masks, weight and term measure the trainer."""
    return {rule.ratio.anchor for rule in algorithm.rules if rule.ratio.current == "trainer"}


def _listed(accepted: Mapping[str, Sequence[str]]) -> list[str]:
    """The names to choose from, each with its aliases: `delta (δ, max_drop)`, `cap (C)`, `delta
    (δ, both sides)`.
    """
    letters = {key: names for key, names in accepted.items() if names != [key]}
    named = {names[0] for names in letters.values() if len(names) == 1}
    listed = [name for name in accepted if name not in letters and name not in named]
    for meant in dict.fromkeys(map(tuple, letters.values())):
        # Greek ones first
        symbols = sorted((key for key in letters if tuple(letters[key]) == meant), key=str.isascii)
        spelled = [trust_regions.in_latin_letters(symbol) for symbol in symbols]
        if len(meant) > 1:
            names = [spelled[0], *symbols, "both sides"]
        else:
            names = [meant[0], *symbols] if spelled == symbols else [spelled[0], *symbols, meant[0]]
        first, *others = dict.fromkeys(names)
        listed.append(f"{first} ({', '.join(others)})")
    return listed


def _tuned(mask: Mask, given: Mapping[str, _ParameterText]) -> Mask:
    chosen = {
        name: _like(default, given[name])
        for name, default in mask.parameters.items()
        if name in given
    }
    return replace(mask, chosen=tuple((dict(mask.chosen) | chosen).items()))


def _anchored(algorithm: Algorithm, anchor: str) -> Algorithm:
    """Measure the trainer from `anchor` in masks, weight and term: one without the others is not a
    known algorithm.
    """
    if anchor not in ("rollout", "recomputed"):
        raise UsageError(f"anchor={anchor} is unknown. Choose one of: rollout, recomputed.")
    if _anchors(algorithm) == {anchor}:
        return algorithm
    _check_anchor(algorithm, anchor)
    return replace(
        algorithm,
        masks=tuple(replace(mask, ratio=_from(anchor, mask.ratio)) for mask in algorithm.masks),
        weight=tuple(
            replace(factor, ratio=_from(anchor, factor.ratio)) for factor in algorithm.weight
        ),
        term=None
        if algorithm.term is None
        else replace(algorithm.term, ratio=_from(anchor, algorithm.term.ratio)),
    )


def _check_anchor(algorithm: Algorithm, anchor: str) -> None:
    """Refuse another anchor where the algorithm compares with more than one policy."""
    anchors, ratios = _anchors(algorithm), [rule.ratio for rule in algorithm.rules]
    if len(anchors) > 1:
        others = " and ".join(sorted(anchors - {"rollout"}))
        raise UsageError(
            f"{algorithm.name} is decoupled: it measures the trainer from both the {others} "
            "policy and the rollout, so it has no single anchor. Leave out anchor=, or choose an "
            "algorithm with one anchor."
        )
    if any(ratio.gap_cap < inf for ratio in ratios):
        raise UsageError(
            f"{algorithm.name} bounds the engine gap inside its ratio, which needs both policies. "
            f"Leave out anchor=, or use vespo:anchor={anchor}, which does not."
        )
    if ENGINE_GAP in (replace(ratio, level="token") for ratio in ratios):
        raise UsageError(
            f"{algorithm.name} corrects the engine gap by ρ, and a ratio to the rollout already "
            f"contains that gap: anchor={anchor} would count it twice. Leave out anchor=, or use "
            f"ppo:anchor={anchor}, which has no ρ."
        )


def _from(anchor: str, ratio: Ratio) -> Ratio:
    return replace(ratio, anchor=anchor) if ratio.current == "trainer" else ratio  # type: ignore[arg-type]


def _like(default: Threshold, given: _ParameterText) -> Threshold:
    """The text as a value of the default's type."""
    name, text = given
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise UsageError(
            f"{name}={text} is neither true nor false. Example: {name}={str(default).lower()}"
        )
    try:
        value = int(text) if isinstance(default, int) else float(text)
    except ValueError:
        whole = "whole " * isinstance(default, int)
        raise UsageError(
            f"{name}={text} is not a {whole}number. Example: {name}={default}"
        ) from None
    if not isfinite(value):
        raise UsageError(f"{name}={text} is not a finite number. Example: {name}={default}")
    return value


def _weighed(factors: Sequence[Factor], given: Mapping[str, _ParameterText]) -> tuple[Factor, ...]:
    """Factors with the given parameters; each one applies to the last factor that has it."""
    left, tuned = dict(given), list[Factor]()
    for factor in reversed(factors):
        defaults = {name: default for name, default in factor.parameters.items() if name in left}
        typed = {
            name: _like(0.0 if default == inf else default, left.pop(name))
            for name, default in defaults.items()
        }
        tuned.insert(0, factor.with_parameters(**typed))
    return tuple(tuned)


def _try_out(algorithm: Algorithm, training: bool) -> None:
    """Refuse thresholds that are out of range, and masks that do not work, before any work."""
    libraries: list[Callable[[np.ndarray], Array]] = [np.asarray]
    if training and any(trust_regions.is_foreign(mask.region) for mask in algorithm.masks):
        from torch import from_numpy

        libraries.append(from_numpy)
    for factor in (rule for rule in algorithm.rules if isinstance(rule, Factor)):
        factor.weight_T(*_seen((factor,), 0, np.asarray))
    for mask, as_array in product(algorithm.masks, libraries):
        try:
            mask.decide(*_seen((mask,), algorithm.needs_top_k, as_array))
        except trust_regions.EndsProgramError:
            raise
        except MismatchError as error:
            raise UsageError(str(error)) from error
        with trust_regions.report_errors_of(mask.region):
            mask.formula  # noqa: B018 - finds names in braces that are not thresholds


def _seen(
    rules: Sequence[Rule], top_k: int, as_array: Callable[[np.ndarray], Array]
) -> tuple[Policies, Array]:
    """Two tokens, as a batch that these rules have seen, and their advantages."""
    policies, advantage_T = _two_tokens(top_k, as_array)
    return as_one_batch(policies, advantage_T, rules), advantage_T


def _two_tokens(top_k: int, as_array: Callable[[np.ndarray], Array]) -> tuple[Policies, Array]:
    """A response of two tokens, and their advantages."""
    k = min(max(top_k, 1), MOST_RANKS)
    logp_T, advantage_T = (
        as_array(np.array(pair, dtype=np.float32)) for pair in ((-0.1, -2.0), (1.0, -1.0))
    )
    logp_2K, ids_2K = (
        as_array(np.full((2, k), -k, dtype=np.float32)),
        as_array(np.zeros((2, k), dtype=np.int32)),
    )
    topk = TopKLogProbs(ids_2K[:, 0], ids_2K, logp_2K, logp_2K, logp_2K)
    return Policies(
        logp_T, logp_T, logp_T, as_array(np.array([0, 2])), topk, -logp_T, average=logp_T
    ), advantage_T
