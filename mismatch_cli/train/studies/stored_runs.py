"""Training runs in their folders as a study, perhaps with the claim that one algorithm learns
faster than another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os.path import isabs
from pathlib import Path

from mismatch_cli.base import registry
from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.places import shorten_paths, shorten_to_folder
from mismatch_cli.studies.watch_state import WatchState
from mismatch_cli.train.studies.runs import algorithms_of, read_runs
from mismatch_cli.train.studies.training import TrainingAnalysis


def study_of(
    folders: Sequence[Path],
    claimed: tuple[str, str] | None = None,
    watched: WatchState | None = None,
) -> TrainingAnalysis:
    """The runs in these folders; `claimed`: with whether the first algorithm learns faster than
    the second; `watched`: what a watch of them answered.
    """
    study = TrainingAnalysis.of(read_runs(folders), watched)
    return study if claimed is None else _with_claim(study, claimed)


def _with_claim(study: TrainingAnalysis, named: tuple[str, str]) -> TrainingAnalysis:
    """The study with the claim that the first algorithm learns faster than the second.

    Raises a `UsageError` for an algorithm that no run used, a `MismatchError` where their runs
    learned different tasks.
    """
    used = algorithms_of(study.runs)
    own, rival = named
    own, rival = _name_of_runs(own, used), _name_of_runs(rival, used)
    if own == rival:
        raise UsageError(
            f"{' and '.join(named)} are both {own} in these runs. Name two different algorithms."
        )
    claimed = replace(study, claimed=(own, rival))
    if not claimed.claims:
        raise MismatchError(
            f"{own} and {rival} learned different tasks (model, problems, reward or environment), "
            "so their rewards are not comparable. Name runs of one task."
        )
    return claimed


def _name_of_runs(name: str, used: Sequence[str]) -> str:
    """The algorithm as the runs call it, by this name or an alias of it."""
    from mismatch_cli.rules.algorithms.parse import parse_algorithm, usual_meaning
    from mismatch_cli.rules.algorithms.table import ALIASES

    usual_name = ALIASES.get(name, name)
    alike = [name, usual_name]
    if isabs(name):
        alike += [shorten_paths(name), shorten_to_folder(name)]
    for same in alike:
        if same in used:
            return same
    for alias in reversed(used):
        if usual_name in (ALIASES.get(alias), usual_meaning(alias)):
            return alias
    hold = f"The runs hold: {', '.join(used)}."
    near = registry.did_you_mean(name, used)
    if not near and not registry.names_file(name):
        try:
            parse_algorithm(name)
        except UsageError as error:
            raise UsageError(f"{error}. {hold}") from None
    raise UsageError(f"No run used {name}. {near}{hold}")
