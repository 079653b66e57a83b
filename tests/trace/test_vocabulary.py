"""Token texts as bytes, however a tokenizer writes them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_cli.trace.vocabulary import CONTINUED, Vocabulary, is_byte_level, piece_bytes


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
    assert is_byte_level(SimpleNamespace(backend_tokenizer=backend)) == expected
    assert not is_byte_level(SimpleNamespace())


def test_characters_that_stand_for_bytes_are_those_of_byte_level_tokenizers():
    """Spaces, control characters and parts of characters among them."""
    from tokenizers.pre_tokenizers import ByteLevel

    text = "".join(map(chr, range(0x800))) + "東京🎂"
    ((piece, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert piece_bytes(piece, byte_level=True) == text.encode()
    assert piece_bytes("ĠaĊ", byte_level=True) == b" a\n"


def vocabulary_of(*pieces: bytes) -> Vocabulary:
    return Vocabulary(dict(enumerate(pieces)))


def test_characters_that_tokens_share_are_whole_in_the_first_of_them():
    tokyo = "東京".encode()
    vocabulary = vocabulary_of(b"in ", tokyo[:2], tokyo[2:4], tokyo[4:], b"!", "é".encode())
    ids = [0, 1, 2, 3, 4, 5]
    assert vocabulary.texts(ids) == ["in ", "東京", CONTINUED, CONTINUED, "!", "é"]
    assert vocabulary.spans(ids) == [slice(0, 1), slice(1, 4), slice(4, 5), slice(5, 6)]
    assert vocabulary.decode(ids) == "in 東京!é"


def test_a_half_of_a_character_shows_its_bytes_and_takes_no_neighbour():
    half = "東".encode()[:2]
    vocabulary = vocabulary_of(half, b" the", "東".encode()[2:], half[:1])
    assert vocabulary.decode([0]) == r"\xe6\x9d"
    assert vocabulary.texts([0, 1]) == [r"\xe6\x9d", " the"]
    assert vocabulary.texts([2, 1]) == [r"\xb1", " the"]
    assert vocabulary.texts([1, 0]) == [" the", r"\xe6\x9d"]
    assert vocabulary.texts([0, 2, 3]) == ["東", CONTINUED, r"\xe6"]
    assert vocabulary.texts([]) == []


def test_any_sequence_of_pieces_reads_as_its_spans(rng):
    """Tokens of whole characters are decoded once, whatever surrounds them."""
    tokyo = "東京".encode()
    pieces = (b"in", b"", tokyo[:1], tokyo[1:3], tokyo[2:5], b"\xb1 the", b"a\xe6", "é".encode())
    vocabulary = vocabulary_of(*pieces)
    for _ in range(300):
        ids = rng.integers(0, len(pieces) + 1, 12)
        expected = []
        for span in vocabulary.spans(ids):
            expected += [vocabulary.decode(ids[span]), *[CONTINUED] * (span.stop - span.start - 1)]
        assert vocabulary.texts(ids) == expected


def test_every_split_of_a_text_reads_like_the_text():
    text = "a東é🎂\n한"
    raw = text.encode()
    for first in range(len(raw)):
        for second in range(first, len(raw)):
            vocabulary = vocabulary_of(raw[:first], raw[first:second], raw[second:])
            shown = vocabulary.texts([0, 1, 2])
            assert "".join(shown).replace(CONTINUED, "") == text, (first, second)
