"""The result of `clipstats`: what every algorithm blocks on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, starmap

from mismatch_cli.metrics.clipping.blocked_rows import (
    AlgorithmRow,
    ClippingNumbers,
    SameStrictness,
)
from mismatch_cli.metrics.clipping.overlap import DisputedToken, PairOverlap
from mismatch_cli.studies.algorithm_support import AvailableColumns
from mismatch_cli.trace.origin import About

SIGNS = {"positive": "A > 0", "negative": "A < 0"}  # of an advantage
_ALIKE = 0.65  # algorithms with a higher Jaccard index look nearly the same


@dataclass(frozen=True)
class OneMask:
    """An algorithm, and others that decide the same on every judged token."""

    row: AlgorithmRow
    others: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """`ppo (+4 alike)`."""
        name = self.row.name
        return f"{name} (+{len(self.others)} alike)" if self.others else name


@dataclass(frozen=True)
class SkippedAlgorithm:
    """An algorithm that the traces do not support, and why."""

    algorithm: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class ClippingQuestion:
    """What was asked of which traces."""

    traces: Sequence[str]
    arguments: Sequence[str]  # as typed, without the traces
    compared: Sequence[str]  # at most two algorithms
    about: About
    has: AvailableColumns
    skipped: Sequence[SkippedAlgorithm]


@dataclass(frozen=True, kw_only=True)
class ClippingResult(ClippingNumbers, ClippingQuestion):
    """What docs/json/clipstats.md describes: the question, the numbers, and equal strictness."""

    same_strictness: Sequence[SameStrictness]

    @cached_property
    def in_order(self) -> list[AlgorithmRow]:
        """The algorithms, a mask on the rollout before the same mask on the recomputed policy."""
        first_place: dict[str, int] = {}
        for place, row in enumerate(self.algorithms):
            first_place.setdefault(_on_rollout(row), place)

        def order(row: AlgorithmRow) -> tuple[int, bool]:
            return first_place[_on_rollout(row)], row.anchor == "recomputed"

        return sorted(self.algorithms, key=order)

    def is_twin(self, row: AlgorithmRow) -> bool:
        """Whether the row is another row's mask with π′ instead of μ."""
        if row.anchor != "recomputed":
            return False
        rules = {_on_rollout(other) for other in self.algorithms if other.anchor == "rollout"}
        return _on_rollout(row) in rules

    @property
    def blocking(self) -> list[AlgorithmRow]:
        """The algorithms that block at least one token."""
        return [row for row in self.algorithms if row.blocked.is_above_0]

    @cached_property
    def blocking_masks(self) -> list[OneMask]:
        """The distinct masks that block at least one token, in order."""
        return self.masks(row for row in self.in_order if row.blocked.is_above_0)

    @cached_property
    def detailed_masks(self) -> list[OneMask]:
        """The masks worth details: those of named algorithms, or of the compared pair."""
        if self.names_algorithms:
            return self.blocking_masks
        return [mask for mask in self.blocking_masks if mask.row in self.leading]

    @cached_property
    def leading(self) -> list[AlgorithmRow]:
        """The compared algorithms."""
        by_name = {row.name: row for row in self.algorithms}
        return [by_name[name] for name in self.compared]

    @property
    def has_advantages(self) -> bool:
        return self.has.advantages

    @property
    def names_algorithms(self) -> bool:
        """Whether the algorithms were named, rather than all that the trace supports."""
        return "--algorithm" in self.arguments

    @property
    def nothing_to_block(self) -> bool:
        """Whether no token is judged: every advantage is 0, or no token counts at all."""
        return not self.counts.tokens

    @property
    def pairs(self) -> list[PairOverlap]:
        """Pairs of masks that block something: the compared one first, then those with one of the
        two, each by disagreement.
        """

        def interest(pair: PairOverlap) -> tuple[int, int]:
            compared = {pair.first, pair.second}.intersection(self.compared)
            return len(compared), pair.only_first + pair.only_second

        names = [mask.row.name for mask in self.blocking_masks]
        pairs = starmap(self.overlap.pair, combinations(names, 2))
        return sorted(pairs, key=interest, reverse=True)

    @property
    def disputed(self) -> list[DisputedToken]:
        """Tokens that one of the compared algorithms blocks and the other keeps."""
        disputed = []
        for token in self.overlap.examples:
            if token.only in self.compared and token.not_ in self.compared:
                disputed.append(token)
        return disputed

    @property
    def equally_strict(self) -> list[tuple[SameStrictness, str, float]]:
        """For each compared algorithm a threshold of another family, by its name: TV for a ratio
        clip and for one without a family, otherwise the ratio clip.
        """
        thresholds = []
        for row in self.same_strictness:
            family = "binary_tv" if row.family in ("ratio_clip", None) else "ratio_clip"
            threshold = row.thresholds.get(family)
            if threshold is not None and threshold.value is not None:
                thresholds.append((row, family, threshold.value))
        return thresholds

    @property
    def unsupported(self) -> dict[str, list[str]]:
        """The algorithms that the traces cannot support, by the reason."""
        by_reason: dict[str, list[str]] = {}
        for row in self.skipped:
            by_reason.setdefault(row.reason, []).append(row.algorithm)
        return by_reason

    def when(self, sign: str) -> str:
        """A sign of A in words: hypothetical without advantages."""
        return SIGNS[sign] if self.has_advantages else f"if {SIGNS[sign]}"

    def masks(
        self, rows: Iterable[AlgorithmRow], key: Callable[[AlgorithmRow], object] = bool
    ) -> list[OneMask]:
        """One for each distinct mask: of algorithms that decide alike, the compared ones, else the
        first row.

        `key`: what must be equal, too, for one row to represent another.
        """
        mask_of: dict[str, int | str] = {}
        for number, names in enumerate(self.same_mask):
            mask_of.update(dict.fromkeys(names, number))
        by_mask: dict[object, list[AlgorithmRow]] = {}
        for row in rows:
            # An algorithm that decides like no other is in no group: its name is its mask.
            mask = mask_of.get(row.name, row.name)
            by_mask.setdefault((mask, key(row)), []).append(row)
        masks: list[OneMask] = []
        for alike in by_mask.values():
            masks += self._represent(alike)
        return masks

    def distinct_masks(self, rows: Sequence[AlgorithmRow], most: int) -> list[OneMask]:
        """The compared algorithms among these rows, then those that block different tokens from
        the ones before.
        """
        chosen: list[OneMask] = []
        for mask in sorted(self.masks(rows), key=lambda mask: mask.row not in self.leading):
            similarities = [self._similarity(mask, before) for before in chosen]
            if mask.row in self.leading or max(similarities, default=0.0) <= _ALIKE:
                chosen.append(mask)
        return chosen[:most]

    def _represent(self, alike: list[AlgorithmRow]) -> list[OneMask]:
        """The rows that represent all that decide alike: the compared ones, else the first."""
        leaders = [row for row in alike if row.name in self.compared] or alike[:1]
        others = tuple(row.name for row in alike if row not in leaders)
        return [OneMask(leader, others) for leader in leaders]

    def _similarity(self, first: OneMask, second: OneMask) -> float:
        """The Jaccard index of what two masks block; 0 if neither blocks anything."""
        return self.overlap.pair(first.row.name, second.row.name).jaccard.value or 0.0


def _on_rollout(row: AlgorithmRow) -> str:
    """The row's blocking rule with the rollout as its anchor: p′ → q and r′ → r."""
    return row.blocked_when.replace("p′", "q").replace("r′", "r")
