"""`vocab.parquet`: token id → bytes, so that a trace can show text without its tokenizer."""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_cli.base.errors import unreadable
from mismatch_cli.base.memory import allowance, bounded, decoded_bytes, too_large
from mismatch_cli.trace.files import replacing
from mismatch_cli.trace.manifest import VOCABULARY
from mismatch_cli.trace.stores import StoreError, decoding, source_of

_SCHEMA = pa.schema({"id": pa.int32(), "bytes": pa.binary()})
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTINUATION = range(0x80, 0xC0)  # bytes of a UTF-8 character after its first
CONTINUED = "◌"  # a token whose bytes belong to a character that an earlier one began


class Vocabulary:
    """Decodes token ids; an id that is not in the table shows as ⟨id⟩."""

    def __init__(self, bytes_by_id: dict[int, bytes]) -> None:
        self._bytes_by_id = bytes_by_id
        self._text_by_id: dict[int, str] = {}

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a token sequence; bytes that do not form a character (half of one) show as
        `\\xe6`.
        """
        return b"".join(map(self._bytes, ids)).decode("utf-8", errors="backslashreplace")

    def texts(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The text of each token of a sequence: characters that tokens share are whole in the
        first of these, and the others are `CONTINUED`.
        """
        texts: list[str] = []
        # Most tokens are whole characters, whose texts are looked up.
        # Only the short runs in between take the longer way of decoding tokens together.
        for is_whole, run in groupby(map(int, ids), self._is_whole):
            tokens = list(run)
            if is_whole:
                texts += map(self._text, tokens)
                continue
            for span in self.spans(tokens):
                texts.append(self.decode(tokens[span]))
                texts += [CONTINUED] * (span.stop - span.start - 1)
        return texts

    def spans(self, ids: Sequence[int] | np.ndarray) -> list[slice]:
        """Runs of tokens that share characters: mostly one token each."""
        decoder = getincrementaldecoder("utf-8")("backslashreplace")
        starts = []
        for position, piece in enumerate(map(self._bytes, ids)):
            half, _ = decoder.getstate()  # the bytes of a character that has begun
            continues = half and (not piece or piece[0] in _CONTINUATION)
            if not continues:
                starts.append(position)
            decoder.decode(piece)
        return [slice(start, stop) for start, stop in pairwise([*starts, len(ids)])]

    def _is_whole(self, token: int) -> bool:
        """Whether a token shares no character with its neighbours, whatever these are."""
        return bool(self._text(token))

    def _text(self, token: int) -> str:
        """The text of a token by itself; empty if its bytes are none, or not whole characters."""
        if token not in self._text_by_id:
            piece = self._bytes(token)
            text = piece.decode("utf-8", errors="ignore")
            if text.encode() != piece:
                text = ""
            self._text_by_id[token] = text
        return self._text_by_id[token]

    def _bytes(self, token: int) -> bytes:
        return self._bytes_by_id.get(int(token), f"⟨{token}⟩".encode())

    @classmethod
    def read(cls, folder: Path) -> Vocabulary:
        """The table next to a trace; empty if there is none (every id then shows as a number)."""
        path = folder / VOCABULARY
        if not path.is_file():
            return cls({})
        try:
            size = path.stat().st_size
            # `read_table` would import pandas if installed
            with bounded(path, size), decoding(path), pq.ParquetFile(source_of(path)) as file:
                if decoded_bytes(file.metadata) > allowance(size):
                    raise too_large(path, size)
                if file.schema_arrow.names != _SCHEMA.names:
                    raise pa.ArrowInvalid("it does not hold ids and their bytes")
                table = file.read(use_threads=False).cast(_SCHEMA)
                if any(column.null_count for column in table.columns):
                    raise pa.ArrowInvalid("it holds nulls")
                pieces = table["bytes"].to_pylist()
                return cls(dict(zip(table["id"].to_pylist(), pieces, strict=True)))
        except StoreError:
            raise
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise unreadable(path, error, "Delete it, and reports will show token ids.") from error


def write_vocabulary(folder: Path, tokenizer: Any) -> None:
    """Write the bytes in running text of every id that the tokenizer knows."""
    pieces = token_bytes(tokenizer)
    table = pa.table([list(pieces.keys()), list(pieces.values())], schema=_SCHEMA)
    with replacing(folder / VOCABULARY) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """The bytes of each token: byte-level BPE through its byte alphabet, SentencePiece through ▁
    and <0xNN>.
    """
    # A tokenizer passes added tokens, such as <|im_end|>, by its model: their text is literal.
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    byte_level = is_byte_level(tokenizer)
    pieces = {}
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=itemgetter(1)):
        if token in added:
            pieces[token_id] = token.encode()
        else:
            pieces[token_id] = piece_bytes(token, byte_level)
    return pieces


def is_byte_level(tokenizer: Any) -> bool:
    """Whether the tokens of a tokenizer are written in GPT-2's byte alphabet."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    settings = json.loads(backend.to_str())
    steps = json.dumps([settings.get("decoder"), settings.get("pre_tokenizer")])
    return '"ByteLevel"' in steps


def piece_bytes(token: str, byte_level: bool) -> bytes:
    """The bytes of a token that was not added; `byte_level`: in GPT-2's alphabet, if it fits."""
    if byte_level and _BYTE_OF_CHAR.keys() >= set(token):
        return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes.fromhex(byte.group(1))
    return token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable bytes stand for themselves, the others for
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of_char = {chr(byte): byte for byte in printable}
    for number, byte in enumerate(others):
        byte_of_char[chr(0x100 + number)] = byte
    return byte_of_char


_BYTE_OF_CHAR = _byte_alphabet()
