"""What some of the responses share: all of a file, a rank, a step, a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatch_cli.base.numbers import things
from mismatch_cli.diagnosis.origins import NO_RANK, Traces
from mismatch_cli.diagnosis.sample import Sample

# Responses that do not agree with the most of their prompt, step, file, …: of those inside, and of
# those outside
_IMPURE = 0.1
_CHANCE = 1000  # ways to choose as many responses, for each that would share as much
_NAMED = 3  # members: more are counted
# What responses may share, and its column of `origin_S`; of two kinds with equally many members,
# the first is named.
_COLUMNS = {
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
_SELF_NAMED = ("trace", "file")
_ORDERED = ("step", "weight version", "epoch")


@dataclass(frozen=True)
class _Members:
    """The files, steps, … whose responses are all in a subset."""

    kind: str
    inside: list[Any]  # ids or names
    present: list[Any]

    @property
    def phrase(self) -> str:
        """Such as `all of steps 5 to 7 (3 of 12)`, `all of 12 of 48 prompts`."""
        names = self._names
        inside, present = f"{len(self.inside):,}", things(len(self.present), self.kind)
        if not names:
            return f"all of {inside} of {present}"
        if self.kind in _SELF_NAMED:
            return f"all of {names} ({inside} of {present})"
        kind = things(len(self.inside), self.kind).partition(" ")[2]
        return f"all of {kind} {names} ({inside} of {len(self.present):,})"

    @property
    def _names(self) -> str:
        """Numbers that follow each other, or a few; empty for many, and for prompts, whose ids say
        nothing.
        """
        if self.kind == "prompt":
            return ""
        start = self.present.index(self.inside[0])
        follow = self.present[start : start + len(self.inside)] == self.inside
        if follow and self.kind in _ORDERED and len(self.inside) > 2:
            return f"{self.inside[0]} to {self.inside[-1]}"
        return _listed(self.inside) if len(self.inside) <= _NAMED else ""


def _listed(names: Sequence[Any]) -> str:
    *others, last = map(str, names)
    return f"{', '.join(others)} and {last}" if others else last


def shared_by(sample: Sample, inside_S: np.ndarray, among_S: np.ndarray, traces: Traces) -> str:
    """What the responses `inside_S`, of those `among_S`, are as a whole, such as all of one file;
    empty if nothing.
    """
    shared: dict[str, _Members] = {}
    for kind in _COLUMNS:
        value_S = _origin_S(kind, sample, traces)
        if value_S is not None:
            members = _whole_members(kind, value_S[inside_S & among_S], value_S[among_S])
            if members is not None:
                shared[kind] = members
    if not shared:
        return ""
    fewest = min(shared.values(), key=lambda members: len(members.present))
    phrases = [_with_file(fewest, shared)]
    for kind, members in shared.items():
        if kind == fewest.kind:
            continue
        # A step says when it was; equally many sample numbers are the same by another name
        is_same = kind == "sample number" and len(members.present) == len(fewest.present)
        if kind == "step" or is_same:
            phrases.append(members.phrase)
    return ", ".join(phrases)


def _with_file(members: _Members, shared: dict[str, _Members]) -> str:
    """The phrase of some members, for a few ranks with their files if each rank has one."""
    files = shared.get("file")
    if members.kind != "rank" or files is None or len(files.present) != len(members.present):
        return members.phrase
    if len(members.inside) > _NAMED:
        return members.phrase
    return f"{members.phrase.removesuffix(')')}; {_listed(files.inside)})"


def _origin_S(kind: str, sample: Sample, traces: Traces) -> np.ndarray | None:
    """The file, step, … of each response; None if that is not on record."""
    own_columns = {"prompt": "prompt_id_S", "sample number": "sample_index_S", "step": "step_S"}
    if kind in own_columns:
        return np.asarray(getattr(sample, own_columns[kind]))
    value_S = sample.origin_S.get(_COLUMNS[kind])
    if value_S is None:
        return None
    if kind not in _SELF_NAMED:
        return None if (value_S == NO_RANK).any() else value_S
    names = np.array(traces.names or ("",))
    trace_S = names[np.minimum(sample.origin_S["trace"], len(names) - 1)]
    if kind == "trace":
        return trace_S
    if len(names) == 1:
        return value_S
    # Files of different traces may have the same name
    return np.char.add(np.char.add(trace_S, "/"), value_S)


def _whole_members(kind: str, inside_R: np.ndarray, all_R: np.ndarray) -> _Members | None:
    """The values whose responses are inside as a whole; None if the bound of the subset cuts
    through them, or so few responses share them by chance.
    """
    present, key_R = np.unique(all_R, return_inverse=True)
    all_K = np.bincount(key_R)
    inside_K = np.bincount(np.searchsorted(present, inside_R), minlength=len(all_K))
    mostly_K = 2 * inside_K > all_K
    odd = int(np.where(mostly_K, all_K - inside_K, inside_K).sum())
    if odd > _IMPURE * min(len(inside_R), len(all_R) - len(inside_R)):
        return None
    ways = math.comb(len(present), int(mostly_K.sum())) * math.comb(len(all_R), odd)
    if _CHANCE * ways > math.comb(len(all_R), len(inside_R)):
        return None
    return _Members(kind, present[mostly_K].tolist(), present.tolist())
