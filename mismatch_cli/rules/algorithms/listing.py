"""Every algorithm and mask by name, with its formulas: what `mismatch-cli algorithms` lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mismatch_cli.base import registry
from mismatch_cli.rules import trust_regions, weights
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.masks_and_factors import Mask
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.algorithms.table import ALIASES, MEANINGS, TABLE, USUAL_WORDS, VARIANTS


@dataclass(frozen=True)
class ListedAlgorithm:
    """A row of the table, in words."""

    name: str
    aliases: Sequence[str]
    anchor: str
    blocked_when: str
    weight: str
    source: str


@dataclass(frozen=True)
class ListedMask:
    """A mask with its usual thresholds by parameter."""

    name: str
    thresholds: Mapping[str, float | int | str | bool]
    blocked_when: str

    @property
    def typed(self) -> str:
        """`binary-tv:delta=0.15`, as a flag has it."""
        if not self.thresholds:
            return self.name
        letters = trust_regions.symbols(trust_regions.find(self.name))
        assignments = []
        for name, value in self.thresholds.items():
            letter = trust_regions.in_latin_letters(letters.get(name, name))
            assignments.append(f"{letter}={value}")
        return f"{self.name}:{','.join(assignments)}"


@dataclass(frozen=True)
class Listing:
    """All algorithms; `owners` has the variants of single frameworks, `weights` installed ones."""

    algorithms: Sequence[ListedAlgorithm]
    owners: Sequence[ListedAlgorithm]
    masks: Sequence[ListedMask]
    weights: Sequence[ListedAlgorithm]


def listing() -> Listing:
    masks = map(Mask, registry.names(trust_regions.PACKAGE))
    installed = map(parse_algorithm, registry.installed(weights.PACKAGE))
    return Listing(
        algorithms=list(map(_listed, TABLE.values())),
        owners=list(map(_listed, VARIANTS.values())),
        masks=[ListedMask(mask.region, mask.parameters, mask.formula) for mask in masks],
        weights=list(map(_listed, installed)),
    )


def _listed(row: Algorithm) -> ListedAlgorithm:
    blocked_when, weight = row.formulas
    names = ALIASES | {word: MEANINGS[word][0] for word in USUAL_WORDS}
    aliases = [alias for alias, name in names.items() if name == row.name]
    return ListedAlgorithm(row.name, aliases, row.anchor, blocked_when, weight, row.source)
