"""How figures look: two styles, two themes, and colours that colour-blind readers can tell
apart.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
CSS_PX = 1 / 96  # inches
PT = 0.75  # points per CSS pixel


@dataclass(frozen=True)
class Theme:
    """Colours; text has a contrast of at least 4.5, and marks of at least 3, against the page."""

    name: str
    page: str
    ink: str
    muted: str
    grid: str
    blue: str
    orange: str
    green: str
    purple: str
    gold: str
    sky: str

    @property
    def accents(self) -> tuple[str, ...]:
        """Colours of lines, in order."""
        return self.blue, self.orange, self.green, self.purple, self.gold, self.sky


# Hues after Okabe and Ito (2008), lightened or darkened for contrast.
LIGHT = Theme(
    "light",
    "#ffffff",
    "#1b1f24",
    "#57606a",
    "#e4e7eb",
    "#176fbe",
    "#c04a00",
    "#00795a",
    "#a1378b",
    "#8a6a00",
    "#2f8fb8",
)
DARK = Theme(
    "dark",
    "#12151a",
    "#e8eaed",
    "#9aa4b0",
    "#2a3038",
    "#63b3ee",
    "#ff9950",
    "#3fc79a",
    "#e48fce",
    "#e3c64a",
    "#9ad8f5",
)


@dataclass(frozen=True)
class Style:
    """A width in CSS pixels; a figure is shown at this width, so text sizes are what the reader
    sees.
    """

    name: str
    width: float
    text: float
    labelled: bool = False  # vertical axes have rotated labels, as in papers

    @property
    def theme(self) -> Theme:
        """Everything is drawn in light colours; the page replaces them with the reader's."""
        return LIGHT

    def pick(self, wide: T, narrow: T) -> T:
        """The value for this width."""
        return wide if self.width >= WIDE.width else narrow

    @property
    def small(self) -> float:
        """The size of notes, in points."""
        return 0.9 * self.text * PT

    def rc(self) -> dict[str, Any]:
        """The matplotlib settings of this style, for `rc_context`."""
        theme, size = self.theme, self.text * PT
        return {
            "figure.facecolor": "none",
            "savefig.facecolor": "none",
            "axes.facecolor": "none",
            "axes.edgecolor": theme.muted,
            "axes.labelcolor": theme.muted,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.linewidth": 0.7,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 1.04 * size,
            "axes.titleweight": "bold",
            "axes.titlecolor": theme.ink,
            "axes.titlelocation": "left",
            # A fixed place: matplotlib would search every figure for an axis above the panel
            "axes.titley": 1.0,
            "axes.labelsize": size,
            "axes.unicode_minus": True,
            "grid.color": theme.grid,
            "grid.linewidth": 0.7,
            "text.color": theme.ink,
            "font.family": ["DejaVu Sans"],
            "font.size": size,
            "xtick.color": theme.muted,
            "ytick.color": theme.muted,
            "xtick.labelsize": size * 0.94,
            "ytick.labelsize": size * 0.94,
            "xtick.major.width": 0.7,
            "ytick.major.width": 0.7,
            "xtick.minor.visible": False,
            "ytick.minor.visible": False,
            "legend.frameon": False,
            "legend.fontsize": size * 0.94,
            "legend.labelcolor": theme.ink,
            "legend.borderpad": 0.1,
            "legend.borderaxespad": 0.25,
            "legend.handlelength": 1.6,
            "legend.handletextpad": 0.5,
            "legend.columnspacing": 1.4,
            "legend.labelspacing": 0.35,
            "svg.fonttype": "none",  # text as text, in the reader's fonts
            "svg.hashsalt": "mismatch-cli",  # the same data gives the same bytes
            "pdf.fonttype": 42,  # TrueType, which journals require
            "lines.linewidth": 1.6,
            "lines.solid_capstyle": "round",
        }


WIDE = Style("wide", 1080, 12.5)
NARROW = Style("narrow", 344, 12)


def paper(width: float) -> Style:
    """For a paper, `width` CSS pixels wide: the smallest text has 7 points."""
    return Style("paper", width, 10.7, labelled=True)
