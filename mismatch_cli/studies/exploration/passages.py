"""Which tokens fit a page: all of them, or windows around those that lead lists, and whole
responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np

from mismatch_cli.studies.exploration.explored import PASSAGE

MOST_TOKENS, MOST_RESPONSES = 200_000, 20_000  # on a page
WINDOW = 64  # tokens on each side
_LONGEST = np.int64(2**31)  # tokens of a response


class Leader(NamedTuple):
    """A token that leads a list, by the number of its response."""

    response: int
    position: int
    length: int  # of the response


def passages(lists: Sequence[Sequence[Leader]], length_S: Sequence[int], tokens: int) -> np.ndarray:
    """The passages of a page, in order, from the lists and the lengths of the first responses of
    all `tokens`.

    The first responses of leaders are whole until half of the page is full. The other leaders get
    windows, in turn, until no more fit; the other responses follow in trace order, if whole. If all
    are too long, the first one is cut.
    """
    page = _Page()
    if tokens > MOST_TOKENS or len(length_S) >= MOST_RESPONSES:
        for leader in _in_turn(lists):
            page.add(leader.response, 0, leader.length, MOST_TOKENS // 2)
        for leader in _in_turn(lists):
            first = max(0, leader.position - WINDOW)
            end = min(leader.length, leader.position + WINDOW + 1)
            if not page.add(leader.response, first, end, MOST_TOKENS):
                break
    for response, length in enumerate(length_S):
        page.add(response, 0, length, MOST_TOKENS)
    if not page.spans:
        page.add(0, 0, MOST_TOKENS, MOST_TOKENS)
    return page.passages()


def tokens_at(passage_P: np.ndarray, leaders: Sequence[Leader]) -> np.ndarray:
    """The indices of leaders among the tokens of passages, up to the first one that is in none."""
    response_U, position_U, _ = np.array(leaders, dtype=np.int64).reshape(-1, 3).T
    # A place in all responses, as one number: responses are far enough apart in it
    start_P = passage_P["response"] * _LONGEST + passage_P["start"]
    passage_U = np.searchsorted(start_P, response_U * _LONGEST + position_U, side="right") - 1
    in_passage_U = position_U - passage_P["start"][passage_U]
    is_in_passage_U = (
        (passage_U >= 0)
        & (passage_P["response"][passage_U] == response_U)
        & (in_passage_U < passage_P["tokens"][passage_U])
    )
    first_P = np.cumsum(passage_P["tokens"]) - passage_P["tokens"]
    return (first_P[passage_U] + in_passage_U)[np.logical_and.accumulate(is_in_passage_U)]


def _in_turn(lists: Sequence[Sequence[Leader]]) -> Iterator[Leader]:
    """The first of each list, the second of each …"""
    return filter(None, chain.from_iterable(zip_longest(*lists)))


class _Page:
    """Spans of responses, which merge where they meet."""

    def __init__(self) -> None:
        self.used = 0  # tokens
        self.spans: dict[int, list[tuple[int, int]]] = {}

    def add(self, response: int, first: int, end: int, most: int) -> bool:
        """Add the tokens `first : end` of a response, unless the page then has more than `most`, or
        too many responses.
        """
        if response not in self.spans and len(self.spans) == MOST_RESPONSES:
            return False
        before = self.spans.get(response, [])
        spans = _joined([*before, (first, end)])
        used = self.used + _tokens(spans) - _tokens(before)
        if used > most:
            return False
        self.spans[response] = spans
        self.used = used
        return True

    def passages(self) -> np.ndarray:
        """`PASSAGE`s, ordered by response and start."""
        rows = []
        for response, spans in sorted(self.spans.items()):
            for first, end in spans:
                rows.append((response, first, end - first))
        return np.array(rows, dtype=PASSAGE)


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans in order; those that overlap or touch become one."""
    joined: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if joined and first <= joined[-1][1]:
            last_first, last_end = joined.pop()
            first, end = last_first, max(end, last_end)
        joined.append((first, end))
    return joined


def _tokens(spans: Sequence[tuple[int, int]]) -> int:
    return sum(end - first for first, end in spans)
