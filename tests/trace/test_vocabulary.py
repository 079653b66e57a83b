"""Token texts as bytes, however a tokenizer writes them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_cli.trace.vocabulary import _is_byte_level


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"decoder": {"type": "ByteLevel"}, "pre_tokenizer": None}, True),
        ({"decoder": None, "pre_tokenizer": {"pretokenizers": [{"type": "ByteLevel"}]}}, True),
        ({"decoder": {"type": "WordPiece"}, "pre_tokenizer": None}, False),
    ],
)
def test_bytes_are_recognised_by_either_end_of_a_tokenizer(settings: Any, expected: bool):
    backend = SimpleNamespace(to_str=lambda: json.dumps(settings))
    assert _is_byte_level(SimpleNamespace(backend_tokenizer=backend)) == expected
    assert not _is_byte_level(SimpleNamespace())
