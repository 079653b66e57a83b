"""Unpacks what a page's explorer gets, as its script does."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cached_property
from typing import Any

import numpy as np

from mismatch_cli.studies.exploration.explored import NOT_JUDGED

_KINDS = {"u1": "<u1", "u2": "<u2", "u4": "<u4", "f2": "<f2", "f4": "<f4"}


def unpacked(data: str) -> bytes:
    """Head and columns."""
    return gzip.decompress(base64.b85decode(data.translate(str.maketrans(".,/", "&<>"))))


class Payload:
    """The head and the columns."""

    def __init__(self, data: str) -> None:
        self._content = unpacked(data)
        self._first = 4 + int.from_bytes(self._content[:4], "little")
        self.head: dict[str, Any] = json.loads(self._content[4 : self._first])

    def __contains__(self, name: str) -> bool:
        return name in self.head["columns"]

    def column(self, name: str) -> np.ndarray:
        kind, start, count = self.head["columns"][name]
        dtype = np.dtype(_KINDS[kind])
        size = count * dtype.itemsize
        content = np.frombuffer(self._content, np.uint8, size, self._first + start)
        if dtype.itemsize == 2:
            content = content.reshape(2, -1).T.reshape(-1)
        return content.view(dtype)

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """Every column by name."""
        return {name: self.column(name) for name in self.head["columns"]}

    @property
    def total(self) -> int:
        """Tokens on the page."""
        return len(self.column("text"))

    @property
    def owner_T(self) -> np.ndarray:
        """The response of each token."""
        return np.repeat(self.column("passage_response"), self.column("passage_tokens"))

    @property
    def advantage_T(self) -> np.ndarray:
        if "advantage" in self:
            return self.column("advantage")
        return self.column("response_advantage")[self.owner_T]

    def of_response(self, name: str) -> np.ndarray:
        """A value of each token's response."""
        return np.array(self.head["responses"][name])[self.owner_T]

    def level(self, place: int) -> np.ndarray:
        """The level of each token under an algorithm."""
        fixed: list[int] = self.head["fixed"]
        if place not in fixed:
            return self.column(f"level{place}")
        table = self.column("fixed_rows").reshape(-1, len(fixed))
        return table[self.column("fixed"), fixed.index(place)]

    def judged(self, place: int) -> np.ndarray:
        return self.level(place) != NOT_JUDGED

    def blocked(self, place: int) -> np.ndarray:
        """The tokens that an algorithm blocks with its published thresholds."""
        level_T = self.level(place)
        return self.judged(place) & (level_T > self.head["algorithms"][place]["published"])

    @property
    def passages(self) -> list[tuple[int, int, slice]]:
        """The response of each passage, its position there, and its tokens on the page."""
        columns = [
            self.column(f"passage_{name}").tolist() for name in ("response", "start", "tokens")
        ]
        ends = np.cumsum(columns[2]).tolist()
        return [
            (response, start, slice(end - tokens, end))
            for response, start, tokens, end in zip(*columns, ends, strict=True)
        ]

    @property
    def texts(self) -> list[str]:
        """The text of each token on the page."""
        return [self.head["texts"][number] for number in self.column("text").tolist()]
