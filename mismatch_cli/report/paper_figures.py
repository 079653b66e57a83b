"""The figures of the DPPO paper (arXiv 2602.04879), and the plots that draw the same of your own
runs: `paper-5` names what its figure 5 shows.
"""

from typing import NamedTuple


class PaperFigure(NamedTuple):
    """What a figure of the paper shows, and our plots of it: the first whose data is there."""

    shows: str
    plots: tuple[str, ...]


_CURVES = ("training-curves",)
_BY_SETTING = ("by-setting", "training-curves")
_LENGTH_AND_ENTROPY = PaperFigure("length and entropy of the responses over training", _CURVES)

PAPER_FIGURES = {
    "paper-1": PaperFigure(
        "where ratio clipping and DPPO block; training by setting", ("mask-regions", "by-setting")
    ),
    "paper-2": PaperFigure("ratio and TV by rollout probability", ("ratio-and-tv",)),
    "paper-3": PaperFigure("the sanity test: reward, accuracy, mean and extreme π − μ", _CURVES),
    "paper-4": PaperFigure("the anchor: masks on μ and on recomputed π′", _CURVES),
    "paper-5": PaperFigure(
        "reward and bad updates over training", ("reward-and-bad-updates", "bad-updates")
    ),
    "paper-6": PaperFigure(
        "clipping relaxed by α: reward, μ and entropy of clipped tokens",
        ("relaxations", "blocked-tokens", "blocked-over-steps"),
    ),
    "paper-7": PaperFigure("clipping relaxed on one or both sides: reward, entropy", _CURVES),
    "paper-8": PaperFigure("a mixture of experts, with and without router replay", _BY_SETTING),
    "paper-9": PaperFigure("other models: a dense one, one that thinks", _BY_SETTING),
    "paper-10": PaperFigure("binary and top-K divergences", _BY_SETTING),
    "paper-12": PaperFigure("probability mass of the top K", ("training-curves", "top-k-mass")),
    # Figures 13 to 18 show the same curves of other runs.
    **dict.fromkeys(map("paper-{}".format, range(13, 19)), _LENGTH_AND_ENTROPY),
    "paper-19": PaperFigure("sensitivity to the threshold", ("sensitivity",)),
    "paper-20": PaperFigure("another family of models", _BY_SETTING),
}


def plots_named(name: str) -> tuple[str, ...]:
    """The plots that a name stands for, the preferred one first: its own, or those of a figure of
    the paper.
    """
    if name in PAPER_FIGURES:
        return PAPER_FIGURES[name].plots
    return (name,)
