"""Processes of a child, as the system sees them."""

from __future__ import annotations

import psutil

from mismatch_cli.processes.child import Child


def kept(child: Child) -> list[int]:
    """The process that a child's keeper keeps, once it has started it."""
    keeper = psutil.Process(child.pid)
    return [process.pid for process in keeper.children()]
