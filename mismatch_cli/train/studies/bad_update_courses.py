"""Reward and bad updates of each algorithm over its steps (DPPO, arXiv 2602.04879, figure 5)."""

from collections.abc import Sequence
from typing import NamedTuple

from mismatch_cli.train.studies.paper_runs import PaperValue, reward_of_paper
from mismatch_cli.train.studies.training import Curve, TrainingAnalysis, curve_of


class BadUpdateCourse(NamedTuple):
    """The mean reward, and the share of bad updates (A < 0 and μ − π ≥ 0.5) by both denominators:
    the paper does not state its own.
    """

    reward: Curve
    of_negative: Curve  # of the tokens with A < 0
    of_all: Curve  # of all tokens with A ≠ 0
    of_paper: Sequence[PaperValue]  # rewards, if all runs repeat the paper's


def bad_update_courses(study: TrainingAnalysis) -> dict[str, BadUpdateCourse]:
    """The algorithms that recorded rewards and bad updates; empty if no update was bad."""
    if not study.occurs("bad_over_negative"):
        return {}
    courses = {}
    for name, runs in study.algorithms.items():
        course = BadUpdateCourse(
            curve_of(runs, "reward"),
            curve_of(runs, "bad_over_negative"),
            curve_of(runs, "bad_over_tokens"),
            reward_of_paper(runs),
        )
        if course.reward.has_values and course.of_negative.has_values:
            courses[name] = course
    return courses
