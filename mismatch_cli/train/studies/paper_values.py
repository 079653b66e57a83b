"""What the sanity test of the DPPO paper (arXiv 2602.04879, section 5, figure 3) ends with: values
read off its published curves by eye. What it starts with is in presets/paper.toml.
"""

from typing import NamedTuple

READ_TO = 0.03  # of the value: how exactly it can be read off the figure


class PaperEnding(NamedTuple):
    """Where the curves of an algorithm stop; None where the figure does not show it."""

    step: int
    reward: float | None
    mismatch: float


ENDINGS = {
    "pg-tis": PaperEnding(630, None, 0.011),
    "minirl-tis": PaperEnding(1030, None, 0.0163),
    "pg-is": PaperEnding(3450, 0.88, 0.0185),
    "minirl": PaperEnding(2950, 0.935, 0.0135),
    "grpo-clip-higher": PaperEnding(2700, None, 0.0040),
    "dppo-binary-tv": PaperEnding(3600, 0.985, 0.0030),
    "dppo-binary-kl": PaperEnding(3600, 0.985, 0.0030),
}
