"""From `name:parameter=value,…` to an algorithm: of the table, a mask by its own name, or a user's mask file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf, isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mismatch_cli import registry, trust_regions, weights
from mismatch_cli.algorithms.algorithm import Algorithm
from mismatch_cli.algorithms.owners import OWNERS
from mismatch_cli.algorithms.parts import Factor, Mask
from mismatch_cli.algorithms.table import ALIASES, TABLE
from mismatch_cli.arrays import Array
from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.policies import ENGINE_GAP, TRAINER_ROLLOUT, Policies, Ratio, TopKLogProbs
from mismatch_cli.trust_regions import Threshold
from mismatch_cli.trust_regions._rules import MOST_RANKS


def find(spec: str, *, training: bool = False) -> Algorithm:
    """An algorithm from `name` or `name:parameter=value,…`: of the table, of trust_regions/, or a user's mask file.

    Parameters are the thresholds of the masks by name or letter (`delta`, `δ`; `epsilon` sets both sides), those of the
    weight (`cap`, `C`, `floor`; `tau`), and `anchor` (rollout or recomputed), from which masks and weight then both
    measure the trainer. A user's file is tried on numpy arrays, and for `training` on torch tensors too. A `UsageError`
    says what is wrong and what there is.
    """
    name, colon, given = spec.partition(":")
    algorithm = _by_name(name)
    if colon:
        algorithm = replace(_with_parameters(algorithm, _parse(spec, given)), name=_short(spec))
    _try_out(algorithm, training)
    return algorithm


def _by_name(name: str) -> Algorithm:
    canonical = ALIASES.get(name, name)
    rows = TABLE | OWNERS
    if canonical in rows:
        return rows[canonical]
    regions = registry.names(trust_regions.PACKAGE)
    if name in regions or name.endswith(".py"):
        source = "a mask by its own name" if name in regions else "a mask of your own"
        mask = Mask(name)
        mask.module  # noqa: B018 - a file that cannot be used is refused here, in one sentence
        return Algorithm(_short(name), (mask,), (Factor(TRAINER_ROLLOUT),), source)
    foreign = registry.installed(weights.PACKAGE)  # ours stand in rows, in the place that each is made for
    if name in foreign:
        return Algorithm(name, (), (Factor(TRAINER_ROLLOUT, name),), "a weight by its own name")
    told = registry.unknown("algorithm", name, [*rows, *ALIASES, *regions, *foreign], [*TABLE, *ALIASES])
    raise UsageError(f"{told} Masks, and rows of single owners: mismatch-cli algorithms")


def _short(spec: str) -> str:
    """What tables show: a user's file without its folder."""
    name, colon, given = spec.partition(":")
    return (Path(name).stem if name.endswith(".py") else name) + colon + given


def _parse(spec: str, given: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in given.split(",")]
    if any(not name or not value for name, _, value in pairs):
        raise UsageError(f"'{spec}' is no algorithm with parameters. Write NAME:PARAMETER=VALUE,PARAMETER=VALUE.")
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
    tuned = replace(algorithm, masks=masks, weight=weight, term=next(iter(tuned_factors[len(weight) :]), None))
    return _anchored(tuned, given["anchor"].text) if "anchor" in given else tuned


class _Given(NamedTuple):
    """What was typed for a parameter, and under which of its names."""

    name: str
    text: str


def _resolved(algorithm: Algorithm, typed: Mapping[str, str]) -> dict[str, _Given]:
    """Parameters by the names that masks and weights have for them: `delta` and `δ` are `max_tv` of binary-tv."""
    accepted = _accepted(algorithm)
    by_typing = {trust_regions.spelled(name): meant for name, meant in accepted.items()}
    found: dict[str, _Given] = {}
    for name, text in typed.items():
        if not accepted:
            raise UsageError(f"{algorithm.name} takes no parameters. Write its name alone.")
        meant = by_typing.get(trust_regions.spelled(name))
        if not meant:
            raise UsageError(registry.unknown(f"parameter of {algorithm.name}", name, by_typing, _listed(accepted)))
        for parameter in meant:
            if parameter in found:
                raise UsageError(f"{found[parameter].name} and {name} both set {parameter}. Give each one once.")
            found[parameter] = _Given(name, text)
    return found


def _accepted(algorithm: Algorithm) -> dict[str, list[str]]:
    """The parameters that each name sets: its own, that of its letter, or both sides of what ε bounds."""
    letters = {name: symbol for rule in algorithm.rules for name, symbol in trust_regions.symbols(rule.module).items()}
    accepted: dict[str, list[str]] = {}
    for module in {rule.module for rule in algorithm.rules if hasattr(rule.module, "BOTH_SIDES")}:
        accepted[module.BOTH_SIDES] = list(trust_regions.symbols(module))
    for name, symbol in letters.items():
        for key in dict.fromkeys([symbol, symbol.partition("_")[0]]):
            accepted.setdefault(key, []).append(name)
    names = {name for rule in algorithm.rules for name in rule.parameters}
    names |= {"anchor"} if any(mask.ratio.current == "trainer" for mask in algorithm.masks) else set()
    return accepted | {name: [name] for name in names}


def _listed(accepted: Mapping[str, Sequence[str]]) -> list[str]:
    """The names to choose from, each with its other ones: `delta (δ, max_drop)`, `cap (C)`, `delta (δ, both sides)`."""
    letters = {key: names for key, names in accepted.items() if names != [key]}
    named = {names[0] for names in letters.values() if len(names) == 1}
    listed = [name for name in accepted if name not in letters and name not in named]
    for meant in dict.fromkeys(map(tuple, letters.values())):
        symbols = sorted((key for key in letters if tuple(letters[key]) == meant), key=str.isascii)  # Greek ones first
        spelled = [trust_regions.spelled(symbol) for symbol in symbols]
        if len(meant) > 1:
            names = [spelled[0], *symbols, "both sides"]
        else:
            names = [meant[0], *symbols] if spelled == symbols else [spelled[0], *symbols, meant[0]]
        first, *others = dict.fromkeys(names)
        listed.append(f"{first} ({', '.join(others)})")
    return listed


def _tuned(mask: Mask, given: Mapping[str, _Given]) -> Mask:
    chosen = {name: _like(default, given[name]) for name, default in mask.parameters.items() if name in given}
    return replace(mask, chosen=tuple((dict(mask.chosen) | chosen).items()))


def _anchored(algorithm: Algorithm, anchor: str) -> Algorithm:
    """Masks and weight measure the trainer from `anchor`: one without the other would be an algorithm of nobody."""
    if anchor not in ("rollout", "recomputed"):
        raise UsageError(f"anchor={anchor} is not known. Choose one of: rollout, recomputed.")
    ratios = [rule.ratio for rule in algorithm.rules]
    anchors = {ratio.anchor for ratio in ratios if ratio.current == "trainer"}
    if anchors == {anchor}:
        return algorithm
    if len(anchors) > 1:
        others = " and ".join(sorted(anchors - {"rollout"}))
        raise UsageError(
            f"{algorithm.name} is decoupled: it measures the trainer from the {others} policy and from the rollout, so "
            "there is no one anchor to move. Leave anchor= out, or name a row whose parts share one."
        )
    if ENGINE_GAP in (replace(ratio, level="token") for ratio in ratios):
        raise UsageError(
            f"{algorithm.name} corrects the engine gap by ρ, and a ratio to the rollout holds that gap already: with "
            f"anchor={anchor} it would count twice. Leave anchor= out, or take ppo:anchor={anchor}, which has no ρ."
        )
    return replace(
        algorithm,
        masks=tuple(replace(mask, ratio=_from(anchor, mask.ratio)) for mask in algorithm.masks),
        weight=tuple(replace(factor, ratio=_from(anchor, factor.ratio)) for factor in algorithm.weight),
        term=None if algorithm.term is None else replace(algorithm.term, ratio=_from(anchor, algorithm.term.ratio)),
    )


def _from(anchor: str, ratio: Ratio) -> Ratio:
    return replace(ratio, anchor=anchor) if ratio.current == "trainer" else ratio  # type: ignore[arg-type]


def _like(default: Threshold, given: _Given) -> Threshold:
    """The text as a value of the default's type."""
    name, text = given
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise UsageError(f"{name}={text} is neither true nor false. Example: {name}={str(default).lower()}")
    try:
        value = int(text) if isinstance(default, int) else float(text)
    except ValueError:
        whole = "whole " * isinstance(default, int)
        raise UsageError(f"{name}={text} is no {whole}number. Example: {name}={default}") from None
    if not isfinite(value):
        raise UsageError(f"{name}={text} is no finite number. Example: {name}={default}")
    return value


def _weighed(factors: Sequence[Factor], given: Mapping[str, _Given]) -> tuple[Factor, ...]:
    """Factors with the parameters that were typed, each for the last factor that has it."""
    left, tuned = dict(given), list[Factor]()
    for factor in reversed(factors):
        own = {name: default for name, default in factor.parameters.items() if name in left}
        typed = {name: _like(0.0 if default == inf else default, left.pop(name)) for name, default in own.items()}
        tuned.insert(0, factor.with_parameters(**typed))
    return tuple(tuned)


def _try_out(algorithm: Algorithm, training: bool) -> None:
    """Thresholds that make no sense, and masks that do not work, are refused before any work."""
    worlds: list[Callable[[np.ndarray], Array]] = [np.asarray]
    if training and any(trust_regions.is_foreign(mask.region) for mask in algorithm.masks):
        from torch import from_numpy

        worlds.append(from_numpy)
    for factor in (rule for rule in algorithm.rules if isinstance(rule, Factor)):
        factor.weight_T(*_two_tokens(0, np.asarray))
    for mask, as_array in product(algorithm.masks, worlds):
        try:
            mask.decide(*_two_tokens(algorithm.needs_top_k, as_array))
        except MismatchError as error:
            raise UsageError(str(error)) from error
        with trust_regions.own_file(mask.region):
            mask.formula  # noqa: B018 - a name in braces that is no threshold is found here


def _two_tokens(top_k: int, as_array: Callable[[np.ndarray], Array]) -> tuple[Policies, Array]:
    """A response, and the advantage of its tokens."""
    k = min(max(top_k, 1), MOST_RANKS)
    logp_T, advantage_T = (as_array(np.array(pair, dtype=np.float32)) for pair in ((-0.1, -2.0), (1.0, -1.0)))
    logp_2K, ids_2K = as_array(np.full((2, k), -k, dtype=np.float32)), as_array(np.zeros((2, k), dtype=np.int32))
    topk = TopKLogProbs(ids_2K[:, 0], ids_2K, logp_2K, logp_2K, logp_2K)
    return Policies(logp_T, logp_T, logp_T, as_array(np.array([0, 2])), topk, -logp_T, average=logp_T), advantage_T
