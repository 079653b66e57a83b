"""Pictures are the slowest part of a report, and tests/report checks them: elsewhere they may
stay blank.
"""

from __future__ import annotations

import pytest


def leave_blank(patch: pytest.MonkeyPatch) -> None:
    """Let reports in this process write every file, but with blank pictures."""
    from mismatch_cli.report import figures
    from mismatch_cli.report.drawing.panels import Sheet

    patch.setattr(figures, "draw", lambda plot, data, style: Sheet(style))
