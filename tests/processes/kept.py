"""Processes of a child, as the system sees them."""

from __future__ import annotations

from pathlib import Path

from mismatch_cli.processes.child import Child


def kept(child: Child) -> list[int]:
    """The process that a child's keeper keeps, once it has started it."""
    assert child._process is not None
    keeper = child._process.pid
    return [int(pid) for pid in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()]
