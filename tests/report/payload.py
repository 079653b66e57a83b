"""Unpacks what a page's explorer gets, as its script does."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import numpy as np

_KINDS = {"u1": "<u1", "u2": "<u2", "u4": "<u4", "f2": "<f2", "f4": "<f4"}


class Payload:
    """The head and the columns."""

    def __init__(self, data: str) -> None:
        self._content = gzip.decompress(base64.b64decode(data))
        self._first = 4 + int.from_bytes(self._content[:4], "little")
        self.head: dict[str, Any] = json.loads(self._content[4 : self._first])

    def __contains__(self, name: str) -> bool:
        return name in self.head["columns"]

    def column(self, name: str) -> np.ndarray:
        kind, start, count = self.head["columns"][name]
        return np.frombuffer(self._content, _KINDS[kind], count, self._first + start)

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
