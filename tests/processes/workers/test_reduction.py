"""The shape of the tree, shown by brackets."""

from __future__ import annotations

from typing import Any

import pytest

from mismatch_cli.processes.workers.reduction import FAN_IN, LocalGroup, Reduction


class Brackets:
    """A part that shows how it was merged."""

    def __init__(self, name: str) -> None:
        self.names = [name]

    def merge(self, other: Brackets) -> None:
        self.names.append(str(other))

    def __str__(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"({' '.join(self.names)})"


class References:
    """A group as on a cluster: nothing is merged before it is full, or needed at the end."""

    def __init__(self) -> None:
        self.nodes: list[str] = []

    def take(self, node: str) -> None:
        self.nodes.append(node)

    def merged(self) -> str:
        return folded(self.nodes)


def folded(nodes: list[str]) -> str:
    """Merged from left to right, into the first, whose earlier parts stay in the same brackets."""
    first, *others = nodes
    return (
        f"({' '.join([first.removeprefix('(').removesuffix(')'), *others])})" if others else first
    )


def by_levels(names: list[str]) -> str:
    """The definition: groups of sixteen, then groups of these, until one remains."""
    while len(names) > 1:
        groups = [names[start : start + FAN_IN] for start in range(0, len(names), FAN_IN)]
        names = [folded(group) for group in groups]
    return names[0]


@pytest.mark.parametrize("form", ["parts", "references"])
def test_the_tree_depends_only_on_the_number_of_parts(form):
    group: Any = LocalGroup if form == "parts" else References
    for count in (1, 2, 15, 16, 17, 31, 32, 255, 256, 257, 272, 4095, 4096, 4097, 4369):
        names = [str(number) for number in range(count)]
        tree: Reduction[Any] = Reduction(group)
        for number, name in enumerate(names):
            tree.add(Brackets(name) if form == "parts" else name)
            if form == "references" and number % 100 == 0:
                assert len(list(tree.nodes())) <= 4
        merged = str(tree.result())
        assert flat(merged) == names
        assert merged == by_levels(names), count


def flat(brackets: str) -> list[str]:
    return brackets.replace("(", "").replace(")", "").split()
