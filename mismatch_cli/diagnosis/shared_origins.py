"""What some of the responses share: all of a file, a rank, a step, a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatch_cli.base.numbers import things
from mismatch_cli.diagnosis.origins import NO_RANK, Traces
from mismatch_cli.diagnosis.sample import Sample

_PURE = 0.95  # of the responses that agree with the most of their prompt, step, file, …
_NAMED = 3  # members: more are counted
# Of equal numbers of members, the first is named. Numbers are told apart, prompts only counted.
_KEYS = {
    "trace": "trace",
    "rank": "rank",
    "step": "step",
    "file": "file",
    "weight version": "version_rollout",
    "epoch": "epoch",
    "mini-batch number": "minibatch",
    "sample number": "",
    "prompt": "",
}
_SELF_NAMED, _ORDERED = ("trace", "file"), ("step", "weight version", "epoch")


@dataclass(frozen=True)
class _Members:
    """What is in a group as a whole, of one kind."""

    kind: str
    inside: list[Any]  # ids or names
    present: list[Any]

    @property
    def words(self) -> str:
        """Such as `all of steps 5 to 7 (3 of 12)`, `all of 12 of 48 prompts`."""
        of_all = f"{len(self.inside):,} of {things(len(self.present), self.kind)}"
        if self.kind == "prompt" or not (names := self._names):
            return f"all of {of_all}"
        if self.kind in _SELF_NAMED:
            return f"all of {names} ({of_all})"
        kind = things(len(self.inside), self.kind).partition(" ")[2]
        return f"all of {kind} {names} ({len(self.inside):,} of {len(self.present):,})"

    @property
    def _names(self) -> str:
        """Numbers that follow each other, or a few; empty for many."""
        start = self.present.index(self.inside[0])
        follow = self.present[start : start + len(self.inside)] == self.inside
        if follow and self.kind in _ORDERED and len(self.inside) > 2:
            return f"{self.inside[0]} to {self.inside[-1]}"
        return _listed(self.inside) if len(self.inside) <= _NAMED else ""


def _listed(names: Sequence[Any]) -> str:
    *others, last = map(str, names)
    return f"{', '.join(others)} and {last}" if others else last


def shared_by(sample: Sample, in_it_S: np.ndarray, among_S: np.ndarray, traces: Traces) -> str:
    """What the responses `in_it_S`, of those `among_S`, are as a whole, such as all of one file;
    empty if nothing.
    """
    kinds = {kind: _of_kind(kind, sample, traces) for kind in _KEYS}
    groups = {
        kind: members
        for kind, values_S in kinds.items()
        if values_S is not None
        and (members := _whole(kind, values_S[in_it_S & among_S], values_S[among_S])) is not None
    }
    if not groups:
        return ""
    fewest = min(groups.values(), key=lambda members: len(members.present))
    parts = [_with_file(fewest, groups)]
    # Two that are one and the same, or that say more of when it was
    parts += [
        members.words
        for kind, members in groups.items()
        if kind != fewest.kind
        and (
            kind == "step"
            or (kind == "sample number" and len(members.present) == len(fewest.present))
        )
    ]
    return ", ".join(parts)


def _with_file(members: _Members, groups: dict[str, _Members]) -> str:
    """The words, for a rank with its file if there is one of each."""
    files = groups.get("file")
    if members.kind != "rank" or files is None or len(files.present) != len(members.present):
        return members.words
    if len(members.inside) > _NAMED:
        return members.words
    return f"{members.words.removesuffix(')')}; {_listed(files.inside)})"


def _of_kind(kind: str, sample: Sample, traces: Traces) -> np.ndarray | None:
    """By response; None if it is not on record."""
    if kind in ("prompt", "sample number", "step"):
        column = {"prompt": "prompt_id_S", "sample number": "sample_index_S", "step": "step_S"}
        return np.asarray(getattr(sample, column[kind]))
    values_S = sample.origin_S.get(_KEYS[kind])
    if values_S is None or kind not in _SELF_NAMED:
        return None if values_S is None or (values_S == NO_RANK).any() else values_S
    names = np.array(traces.names or ("",))
    trace_S = names[np.minimum(sample.origin_S["trace"], len(names) - 1)]
    if kind == "trace":
        return trace_S
    if len(names) == 1:
        return values_S
    return np.char.add(np.char.add(trace_S, "/"), values_S)


def _whole(kind: str, inside_R: np.ndarray, all_R: np.ndarray) -> _Members | None:
    """The values that are inside as a whole; None if it is cut through them."""
    present, key_R = np.unique(all_R, return_inverse=True)
    all_K = np.bincount(key_R)
    in_it_K = np.bincount(np.searchsorted(present, inside_R), minlength=len(all_K))
    mostly_K = 2 * in_it_K > all_K
    agree = np.where(mostly_K, in_it_K, all_K - in_it_K).sum() / all_K.sum()
    if agree < _PURE or not 0 < mostly_K.sum() < len(present) < all_K.sum():
        return None
    return _Members(kind, present[mostly_K].tolist(), present.tolist())
