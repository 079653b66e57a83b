"""Clipping relaxed where μ < α: the runs of each α (DPPO, arXiv 2602.04879, figures 6 and 7)."""

from collections.abc import Container, Mapping
from typing import NamedTuple

from mismatch_cli.rules.algorithms.table import ALIASES
from mismatch_cli.train.studies.run_settings import SEPARATOR
from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.sensitivity import algorithm_of
from mismatch_cli.train.studies.training import TrainingAnalysis

_CLIP = "grpo-clip-higher"  # what is relaxed: α = 0
_RELAXED = "relax-"


class Relaxation(NamedTuple):
    """Clipping without the tokens below a probability."""

    alpha: float
    name: str  # relax-both, relax-high or relax-low; the clip's own name where α = 0


_ALPHAS = ("alpha", "α")  # as it is typed


def relaxation_of(algorithm: str) -> Relaxation | None:
    """What an algorithm relaxes; None for one that is neither the clip nor a relaxation of it."""
    if ALIASES.get(algorithm, algorithm) == _CLIP:
        return Relaxation(0.0, _CLIP)
    parsed = algorithm_of(algorithm) if algorithm.startswith(_RELAXED) else None
    if parsed is None:
        return None
    alphas = [rule.parameters["alpha"] for rule in parsed.rules if "alpha" in rule.parameters]
    return Relaxation(float(alphas[0]), _without_alpha(algorithm))


def _without_alpha(algorithm: str) -> str:
    """`relax-both:epsilon_high=0.3` for `relax-both:alpha=0.2,epsilon_high=0.3`: other parameters
    make another kind.
    """
    name, _, parameters = algorithm.partition(":")
    others = []
    for assignment in filter(None, parameters.split(",")):
        if assignment.partition("=")[0].strip() not in _ALPHAS:
            others.append(assignment)
    return ":".join(filter(None, (name, ",".join(others))))


def relaxations(study: TrainingAnalysis) -> dict[str, list[TrainingRun]]:
    """The runs of each relaxation by its α in words, smallest first, in each setting; empty
    where runs do not differ in it.
    """
    runs_by_words: dict[str, list[TrainingRun]] = {}
    for setting, part in study.settings.items():
        by_relaxation = _by_relaxation(part)
        if len(by_relaxation) > 1:
            for words, runs in _in_words(by_relaxation).items():
                runs_by_words[SEPARATOR.join(filter(None, (words, setting)))] = runs
    return runs_by_words


def _by_relaxation(study: TrainingAnalysis) -> dict[Relaxation, list[TrainingRun]]:
    runs_of: dict[Relaxation, list[TrainingRun]] = {}
    for run in study.runs:
        relaxation = relaxation_of(run.algorithm)
        if relaxation is not None:
            runs_of.setdefault(relaxation, []).append(run)
    return dict(sorted(runs_of.items()))


def _in_words(runs_of: Mapping[Relaxation, list[TrainingRun]]) -> dict[str, list[TrainingRun]]:
    """`α = 0.1`; with its name where several kinds are relaxed, and for the clip itself."""
    named = {relaxation.name for relaxation in runs_of} | {_CLIP}
    # With the clip and one kind of relaxation, α alone tells the rest apart.
    if len(named) == 2:
        named = {_CLIP}
    return {_words(relaxation, named): runs for relaxation, runs in runs_of.items()}


def _words(relaxation: Relaxation, named: Container[str]) -> str:
    alpha = f"α = {relaxation.alpha:g}"
    return f"{alpha} ({relaxation.name})" if relaxation.name in named else alpha
