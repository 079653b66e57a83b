"""Merges parts in a tree whose shape depends only on their number, so that float sums have the same
bits anywhere.

Sixteen consecutive parts are merged from left to right, then sixteen of the results, and so on; the
last group of a level may be smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from mismatch_cli.processes.workers.portions import Part

# The shape of the tree depends only on the number of parts: so many workers give the bits of one.
# Another fan-in changes the last digits of traces with more portions.
FAN_IN = 16

Node = TypeVar("Node")


class NodeGroup(Protocol[Node]):
    """Up to `FAN_IN` consecutive nodes that become one."""

    def take(self, node: Node) -> None:
        """Add the next node."""

    def merged(self) -> Node:
        """The merged node, for the level above."""


class Reduction(Generic[Node]):
    """The tree while its leaves arrive, in order: the incomplete group of each level."""

    def __init__(self, group: Callable[[], NodeGroup[Node]]) -> None:
        self._group = group
        self._levels: list[tuple[NodeGroup[Node] | None, int]] = []

    def add(self, node: Node, level: int = 0) -> None:
        """Add the next leaf, or the next node of a higher level."""
        if level == len(self._levels):
            self._levels.append((None, 0))
        group, size = self._levels[level]
        if group is None:
            group = self._group()
        group.take(node)
        size += 1
        if size < FAN_IN:
            self._levels[level] = (group, size)
            return
        self._levels[level] = (None, 0)
        self.add(group.merged(), level + 1)

    def nodes(self) -> Iterator[Node]:
        """The merged nodes so far, smallest first."""
        return (group.merged() for group, _ in self._levels if group is not None)

    def result(self) -> Node:
        """The root: the rest of a level becomes the last node of the one above.

        Needs at least one leaf.
        """
        below: Node | None = None
        for group, _ in self._levels:
            if group is not None:
                if below is not None:
                    group.take(below)
                below = group.merged()
        assert below is not None
        return below


class LocalGroup(Generic[Part]):
    """A group in this process, merged as parts arrive, so that only one part per level is held."""

    def __init__(self) -> None:
        self._merged: Part | None = None

    def take(self, node: Part) -> None:
        if self._merged is None:
            self._merged = node
        else:
            self._merged.merge(node)

    def merged(self) -> Part:
        assert self._merged is not None
        return self._merged
