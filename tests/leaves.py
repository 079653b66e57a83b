"""Results in their JSON form, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mismatch_cli.base.json_form import to_json


def leaves(
    value: Any, is_leaf: Callable[[Any], bool] = lambda value: False, path: str = ""
) -> dict[str, Any]:
    """Numbers, texts, empty containers and what else is a leaf, by their paths."""
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(parts, dict) or not parts or is_leaf(value):
        return {path: value}
    inner = [leaves(part, is_leaf, f"{path}/{key}") for key, part in parts.items()]
    return {name: leaf for part in inner for name, leaf in part.items()}


def assert_close(result: Any, expected: Any) -> None:
    """All is equal, floats within rounding."""
    found_leaves, expected_leaves = leaves(to_json(result)), leaves(to_json(expected))
    assert found_leaves.keys() == expected_leaves.keys()
    for path, value in expected_leaves.items():
        close = pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value
        assert found_leaves[path] == close, path
        assert type(found_leaves[path]) is type(value), path
