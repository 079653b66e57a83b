"""Pictures take longest in a report, and tests/report draws and looks at them: elsewhere they may be left blank."""

from __future__ import annotations

import pytest


def leave_blank(patch: pytest.MonkeyPatch) -> None:
    """Reports drawn in this process still write every file, with nothing on the pictures."""
    from matplotlib.figure import Figure

    from mismatch_cli.report import figures

    patch.setattr(figures, "draw", lambda plot, data, style, only=None: Figure())
