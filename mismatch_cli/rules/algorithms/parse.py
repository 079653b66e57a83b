"""Parses `name:parameter=value,…` into an algorithm: a row of the table, a mask by name, or a
user's mask file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf, isfinite
from os.path import isfile
from pathlib import Path
from typing import NamedTuple, TypeVar

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
from mismatch_cli.rules.policies import ENGINE_GAP, TRAINER_ROLLOUT, Policies, TopKLogProbs
from mismatch_cli.rules.trust_regions import Threshold

_MaskOrFactor = TypeVar("_MaskOrFactor", Mask, Factor)


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
    name, colon, assignments = spec.partition(":")
    algorithm = _find(name)
    if colon:
        algorithm = _with_parameters(algorithm, _split_parameters(spec, assignments))
        algorithm = replace(algorithm, name=_short(spec))
    _try_out(algorithm, training)
    return algorithm


def usual_meaning(spec: str) -> str:
    """`dppo-binary-tv` for `dppo`, with its parameters: what a word that everybody uses means."""
    name, colon, assignments = spec.partition(":")
    word = name.lower()
    if word not in USUAL_WORDS:
        return spec
    return MEANINGS[word][0] + colon + assignments


def _find(name: str) -> Algorithm:
    _check_is_one(name)
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
    # Our own weights are used in rows of the table, and have no name of their own there.
    # An installed one has no row, so its name is an algorithm without masks.
    foreign = registry.installed(weights.PACKAGE)
    if name in foreign:
        return Algorithm(name, (), (Factor(TRAINER_ROLLOUT, name),), "a weight by its own name")
    meanings = MEANINGS.get(name.lower())
    if meanings:
        unknown = f"Several algorithms are called {name}: {registry.alternatives(meanings)}."
    else:
        unknown = registry.unknown_name("algorithm", name, [*rows, *ALIASES, *regions, *foreign])
        if isfile(f"{name}.py"):
            unknown += f" Your own file is typed with its ending: {name}.py."
    raise UsageError(f"{unknown} All of them, masks included: mismatch-cli algorithms")


def _check_is_one(name: str) -> None:
    """A `UsageError` for several names with commas between them; a file may be called so."""
    if "," in name and not isfile(name):
        flags = [f"-a {each}" for each in map(str.strip, name.split(",")) if each]
        raise UsageError(f"'{name}' is not one name. Name each by itself: {' '.join(flags)}")


def _short(spec: str) -> str:
    """The name in tables: a user's file without its folder."""
    name, colon, assignments = spec.partition(":")
    if name.endswith(".py"):
        name = Path(name).stem
    return name + colon + assignments


def _split_parameters(spec: str, assignments: str) -> dict[str, str]:
    """`delta=0.1,k=5` by name; a `UsageError` unless each is a name and a value, given once."""
    pairs = [assignment.partition("=") for assignment in assignments.split(",")]
    for name, _, value in pairs:
        if not name or not value:
            raise UsageError(
                f"'{spec}' is not an algorithm with parameters. Write "
                "NAME:PARAMETER=VALUE,PARAMETER=VALUE, and each of several algorithms by itself."
            )
    typed = {name.strip(): value.strip() for name, _, value in pairs}
    if len(typed) < len(pairs):
        raise UsageError(f"'{spec}' gives a parameter twice. Give each one once.")
    return typed


def _with_parameters(algorithm: Algorithm, typed: Mapping[str, str]) -> Algorithm:
    texts = _resolve(algorithm, typed)
    masks = tuple(_set_thresholds(mask, texts) for mask in algorithm.masks)
    algorithm = algorithm.with_rules(masks, _set_parameters(algorithm.factors, texts))
    if "anchor" in texts:
        return _measure_from(texts["anchor"].text, algorithm)
    return algorithm


class _ParameterText(NamedTuple):
    """The text that was typed for a parameter, and the name that was used for it."""

    name: str
    text: str


def _resolve(algorithm: Algorithm, typed: Mapping[str, str]) -> dict[str, _ParameterText]:
    """Parameters by their names in masks and weights: `delta` and `δ` are `max_tv` of binary-tv."""
    accepted = _accepted(algorithm)
    if not accepted:
        raise UsageError(f"{algorithm.name} takes no parameters. Write only its name.")
    targets = {trust_regions.in_latin_letters(name): names for name, names in accepted.items()}
    texts: dict[str, _ParameterText] = {}
    for name, text in typed.items():
        parameters = targets.get(trust_regions.in_latin_letters(name))
        if not parameters:
            raise UsageError(
                registry.lacks_name(algorithm.name, "parameter", name, targets, _choices(accepted))
            )
        for parameter in parameters:
            if parameter in texts:
                raise UsageError(
                    f"{texts[parameter].name} and {name} both set {parameter}. Give each one once."
                )
            texts[parameter] = _ParameterText(name, text)
    return texts


def _accepted(algorithm: Algorithm) -> dict[str, list[str]]:
    """The parameters that each name sets: its own, the one with its letter, or both sides of ε."""
    accepted: dict[str, list[str]] = {}
    letters: dict[str, str] = {}
    for rule in algorithm.rules:
        symbols = trust_regions.symbols(rule.module)
        letters |= symbols
        if hasattr(rule.module, "BOTH_SIDES"):
            accepted[rule.module.BOTH_SIDES] = list(symbols)
    for name, symbol in letters.items():
        # ε_low is typed as ε_low, or with ε_high as ε
        for key in dict.fromkeys([symbol, symbol.partition("_")[0]]):
            accepted.setdefault(key, []).append(name)
    for rule in algorithm.rules:
        for name in rule.parameters:
            accepted[name] = [name]
    if _anchors(algorithm):
        accepted["anchor"] = ["anchor"]
    return accepted


def _anchors(algorithm: Algorithm) -> set[str]:
    """The policies from which its masks, weight and term measure the trainer."""
    return {rule.ratio.anchor for rule in algorithm.rules if rule.ratio.current == "trainer"}


def _choices(accepted: Mapping[str, Sequence[str]]) -> list[str]:
    """The names to choose from, each with its aliases: `delta (δ, max_drop)`, `cap (C)`, `delta
    (δ, both sides)`.
    """
    aliases: dict[tuple[str, ...], list[str]] = {}  # by the parameters that they set
    for name, parameters in accepted.items():
        if parameters != [name]:
            aliases.setdefault(tuple(parameters), []).append(name)
    choices = [name for name in accepted if accepted[name] == [name] and (name,) not in aliases]
    for parameters, symbols in aliases.items():
        # Greek letters come first, by their Latin names
        symbols.sort(key=str.isascii)
        latin = [trust_regions.in_latin_letters(symbol) for symbol in symbols]
        if len(parameters) > 1:
            names = [latin[0], *symbols, "both sides"]
        elif latin == symbols:
            names = [parameters[0], *symbols]
        else:
            names = [latin[0], *symbols, parameters[0]]
        first, *others = dict.fromkeys(names)
        choices.append(f"{first} ({', '.join(others)})")
    return choices


def _set_thresholds(mask: Mask, texts: Mapping[str, _ParameterText]) -> Mask:
    chosen = dict(mask.chosen)
    for name, default in mask.parameters.items():
        if name in texts:
            chosen[name] = _convert(texts[name], default)
    return replace(mask, chosen=tuple(chosen.items()))


def _measure_from(anchor: str, algorithm: Algorithm) -> Algorithm:
    """Measure the trainer from `anchor` in masks, weight and term: one without the others is not a
    known algorithm.
    """
    if anchor not in ("rollout", "recomputed"):
        raise UsageError(f"anchor={anchor} is unknown. Choose one of: rollout, recomputed.")
    if _anchors(algorithm) == {anchor}:
        return algorithm
    _check_anchor(algorithm, anchor)
    return algorithm.with_rules(
        tuple(_with_anchor(anchor, mask) for mask in algorithm.masks),
        tuple(_with_anchor(anchor, factor) for factor in algorithm.factors),
    )


def _check_anchor(algorithm: Algorithm, anchor: str) -> None:
    """Refuse another anchor where the algorithm compares with more than one policy."""
    anchors = _anchors(algorithm)
    ratios = [rule.ratio for rule in algorithm.rules]
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


def _with_anchor(anchor: str, rule: _MaskOrFactor) -> _MaskOrFactor:
    if rule.ratio.current != "trainer":
        return rule
    return replace(rule, ratio=replace(rule.ratio, anchor=anchor))  # type: ignore[arg-type]


def _convert(typed: _ParameterText, default: Threshold) -> Threshold:
    """The text as a value of the default's type, which is also the example in a `UsageError`."""
    name, text = typed
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise UsageError(
            f"{name}={text} is neither true nor false. Example: {name}={str(default).lower()}"
        )
    # A default of ∞, such as that of a cap, cannot be typed.
    example = default if isfinite(default) else 1.0
    try:
        value = int(text) if isinstance(default, int) else float(text)
    except ValueError:
        kind = "whole number" if isinstance(default, int) else "number"
        raise UsageError(f"{name}={text} is not a {kind}. Example: {name}={example}") from None
    if not isfinite(value):
        raise UsageError(f"{name}={text} is not a finite number. Example: {name}={example}")
    return value


def _set_parameters(
    factors: Sequence[Factor], texts: Mapping[str, _ParameterText]
) -> tuple[Factor, ...]:
    """Factors with the typed parameters; each one applies to the last factor that has it, among
    those that the algorithm sets itself: a cap of CISPO's ratio, not of one without bounds.
    """
    tuned = list(factors)
    for name, text in texts.items():
        places = [place for place, factor in enumerate(factors) if name in factor.parameters]
        own = [place for place in places if factors[place].chosen]
        for place in (own or places)[-1:]:
            value = _convert(text, factors[place].parameters[name])
            tuned[place] = tuned[place].with_parameters(**{name: value})
    return tuple(tuned)


def _try_out(algorithm: Algorithm, training: bool) -> None:
    """Refuse thresholds that are out of range, and masks that do not work, before any work."""
    libraries: list[Callable[[np.ndarray], Array]] = [np.asarray]
    if training and any(trust_regions.is_foreign(mask.region) for mask in algorithm.masks):
        from torch import from_numpy

        libraries.append(from_numpy)
    for factor in algorithm.factors:
        factor.weight_T(*_two_tokens(factor, 0, np.asarray))
    for mask, as_array in product(algorithm.masks, libraries):
        try:
            mask.decide(*_two_tokens(mask, algorithm.needs_top_k, as_array))
        except trust_regions.EndsProgramError:
            raise
        except MismatchError as error:
            raise UsageError(str(error)) from error
        with trust_regions.report_errors_of(mask.region):
            mask.formula  # noqa: B018 - finds names in braces that are not thresholds


def _two_tokens(
    rule: Rule, top_k: int, as_array: Callable[[np.ndarray], Array]
) -> tuple[Policies, Array]:
    """A response of two tokens, as a batch that the rule has seen, and their advantages."""
    logp_T = as_array(np.array([-0.1, -2.0], dtype=np.float32))
    advantage_T = as_array(np.array([1.0, -1.0], dtype=np.float32))
    # Equal log-probs of −k: the K probabilities add up to less than 1 for every k
    k = min(max(top_k, 1), MOST_RANKS)
    logp_2K = as_array(np.full((2, k), -k, dtype=np.float32))
    ids_2K = as_array(np.zeros((2, k), dtype=np.int32))
    topk = TopKLogProbs(ids_2K[:, 0], ids_2K, logp_2K, logp_2K, logp_2K)
    offset_S1 = as_array(np.array([0, 2]))
    policies = Policies(logp_T, logp_T, logp_T, offset_S1, topk, -logp_T, average=logp_T)
    return as_one_batch(policies, advantage_T, [rule]), advantage_T
