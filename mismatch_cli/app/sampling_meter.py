"""How far sampling has come, counted in tokens: how long the responses will be is only known
once some have ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from mismatch_cli.app.curves import duration


class SamplingMeter:
    """Counts finished responses when it is called, and sampled tokens by `tokens`, which only some
    engines report.
    """

    def __init__(
        self, responses: int, most_tokens: int, changed: Callable[[SamplingMeter], None]
    ) -> None:
        """`responses` are still to be sampled, of at most `most_tokens` each; `changed` is
        called after every count.
        """
        self._responses = responses
        self._most = most_tokens
        self._changed = changed
        self._began = time.monotonic()
        self.finished = 0
        self.sampled = 0

    def __call__(self, count: int) -> None:
        self.finished += count
        self._changed(self)

    def tokens(self, count: int) -> None:
        self.sampled += count
        self._changed(self)

    @property
    def rate(self) -> float:
        """Tokens a second; responses, if the engine does not count tokens."""
        return (self.sampled or self.finished) / max(time.monotonic() - self._began, 1e-9)

    @property
    def is_bound(self) -> bool:
        """Whether no response has ended yet: then `left` is the most that there can be."""
        return self.finished == 0

    @property
    def left(self) -> float:
        """Tokens (or responses) that are left, as if every token were as likely to be the last one.

        Never more than if all responses had the longest length.
        """
        running = self._responses - self.finished
        if not self.sampled or not running:
            return running
        most = max(0, self._responses * self._most - self.sampled)
        if self.is_bound:
            return most
        # A token ends a response with this probability, so lengths are geometric, cut at `_most`.
        # The mean of such a length is (1 − e^(−ends·most)) / ends.
        ends = self.finished / self.sampled
        return min(most, running * (1 - math.exp(-ends * self._most)) / ends)

    def describe(self) -> str:
        """The rate and what is left, such as `310 tokens/s, about 41 s left`."""
        if not self.sampled and not self.finished:
            return "no response yet"
        unit = "tokens" if self.sampled else "responses"
        bound = "at most" if self.is_bound else "about"
        return f"{short(self.rate)} {unit}/s, {bound} {duration(self.left / self.rate)} left"


def short(rate: float) -> str:
    """A rate with two digits if it is small: never 0 for something that advances."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
