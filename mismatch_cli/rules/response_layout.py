"""How flat tokens belong to responses: sums, means and extremes over each response, and scans
along it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import add

from mismatch_cli.base.arrays import (
    Array,
    clamp_min,
    namespace,
    response_extremes,
    response_sums,
    sorted_within,
)


@dataclass(frozen=True, eq=False)
class ResponseLayout:
    """Response `s` owns the tokens `offset_S1[s] : offset_S1[s + 1]`."""

    offset_S1: Array  # int64

    @cached_property
    def length_S(self) -> Array:
        return self.offset_S1[1:] - self.offset_S1[:-1]

    @cached_property
    def response_T(self) -> Array:
        """The response of each token."""
        xp = namespace(self.offset_S1)
        return xp.repeat(xp.arange(len(self.length_S), device=self.offset_S1.device), self.length_S)

    @cached_property
    def position_T(self) -> Array:
        """The position of each token in its response, from 0."""
        xp = namespace(self.offset_S1)
        first_T = self.per_token(self.offset_S1[:-1])
        return xp.arange(len(first_T), device=self.offset_S1.device) - first_T

    def per_token(self, values_S: Array) -> Array:
        """Repeat the value of each response for all its tokens."""
        return values_S[self.response_T]

    def sum(self, x_T: Array) -> Array:
        """Σ over each response, float64; 0 for an empty one."""
        return response_sums(x_T, self.offset_S1, self.response_T)

    def mean(self, x_T: Array) -> Array:
        """The mean over each response, float64; 0 for an empty one."""
        return self.sum(x_T) / clamp_min(self.length_S, 1)

    def largest(self, x_T: Array) -> Array:
        """The maximum over each response; 0 for an empty one."""
        return response_extremes(x_T, self.offset_S1, self.response_T, largest=True)

    def smallest(self, x_T: Array) -> Array:
        """The minimum over each response; 0 for an empty one."""
        return response_extremes(x_T, self.offset_S1, self.response_T, largest=False)

    def quantile(self, x_T: Array, share: float) -> Array:
        """The quantile of each response, with linear interpolation; 0 for an empty one."""
        xp = namespace(x_T)
        sorted_T = sorted_within(x_T, self.response_T)
        position_S = share * xp.astype(clamp_min(self.length_S - 1, 0), xp.float64)
        below_S = xp.astype(xp.floor(position_S), xp.int64)
        if not len(sorted_T):
            return 0 * position_S
        # The index stays inside even for empty responses, whose value is replaced below
        last_S = clamp_min(self.offset_S1[1:] - 1, 0)
        index_S = self.offset_S1[:-1] + below_S
        low_S = sorted_T[xp.minimum(index_S, last_S)]
        high_S = sorted_T[xp.minimum(index_S + 1, last_S)]
        quantile_S = low_S + (position_S - below_S) * (high_S - low_S)
        return xp.where(self.length_S > 0, quantile_S, xp.zeros_like(quantile_S))

    def running_sum(self, x_T: Array) -> Array:
        """Cumulative Σ along each response, including the token itself, float64."""
        xp = namespace(x_T)
        return self._running(xp.astype(x_T, xp.float64), add)

    def running_smallest(self, x_T: Array) -> Array:
        """Cumulative minimum along each response, including the token itself."""
        return self._running(x_T, namespace(x_T).minimum)

    def _running(self, x_T: Array, combine: Callable[[Array, Array], Array]) -> Array:
        """A scan by doubling steps: responses stay separate, and numpy and torch round alike."""
        if not len(self.length_S):
            return x_T
        xp = namespace(x_T)
        longest = int(xp.max(self.length_S))
        # Each token has combined the last `reach` tokens up to itself, as far as its response goes
        reach = 1
        while reach < longest:
            inside_U = self.position_T[reach:] >= reach
            later_U = xp.where(inside_U, combine(x_T[reach:], x_T[:-reach]), x_T[reach:])
            x_T = xp.concat([x_T[:reach], later_U])
            reach *= 2
        return x_T

    def ahead(self, x_T: Array, tokens: int, fill: float) -> Array:
        """The value `tokens` later in the same response; `fill` beyond its end."""
        return self._shifted(x_T, tokens, fill, later=True)

    def behind(self, x_T: Array, tokens: int, fill: float) -> Array:
        """The value `tokens` earlier in the same response; `fill` before its start."""
        return self._shifted(x_T, tokens, fill, later=False)

    def _shifted(self, x_T: Array, tokens: int, fill: float, *, later: bool) -> Array:
        xp = namespace(x_T)
        filled_T = xp.full_like(x_T, fill)
        if tokens >= len(x_T):
            return filled_T
        same_U = self.response_T[tokens:] == self.response_T[:-tokens]
        if later:
            return xp.concat([xp.where(same_U, x_T[tokens:], filled_T[tokens:]), filled_T[:tokens]])
        return xp.concat([filled_T[:tokens], xp.where(same_U, x_T[:-tokens], filled_T[tokens:])])
