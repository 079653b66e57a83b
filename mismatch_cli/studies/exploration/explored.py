"""What an exploration holds: all responses, the passages that fit a page, and their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.studies.settings_compared import SettingDifference

# The level of a token without an advantage, or without a column that an algorithm needs
NOT_JUDGED = 255
# Σ|d|, Σd and max |d| are over the counted tokens in support, as everywhere
RESPONSE = np.dtype(
    [
        ("trace_index", np.int32),
        ("step", np.int64),
        ("prompt_id", np.int64),
        ("sample_index", np.int64),
        ("reward", np.float32),
        ("length", np.int64),
        ("absolute", np.float64),
        ("signed", np.float64),
        ("largest", np.float32),
        ("advantage", np.float32),  # of its first token
    ]
)
# A run of consecutive tokens of one response: all of them, or a window
PASSAGE = np.dtype([("response", np.int64), ("start", np.int64), ("tokens", np.int64)])


@dataclass(frozen=True)
class BlockedLevels:
    """What an algorithm blocks: a token at positions 0 … level − 1 of its slider, whose thresholds
    ascend.

    Without advantages each algorithm appears twice, as if all tokens had the `sign` > or <.
    """

    algorithm: str
    sign: str
    # At each position; a single position if none can be moved
    thresholds: tuple[Mapping[str, float], ...]
    published: int  # the position of the algorithm as requested
    judged: np.ndarray  # tokens of the traces with A > 0, and with A < 0
    blocked: np.ndarray  # of these, at each position: [2, positions]
    level_T: np.ndarray  # uint8; `NOT_JUDGED`
    unmoved: str = ""  # why no threshold can be moved

    @property
    def moves(self) -> bool:
        """Whether a threshold can be moved."""
        return len(self.thresholds) > 1


@dataclass(frozen=True)
class TokenList:
    """Tokens that lead a list, in its order, and the number of tokens of the traces that they were
    taken of.
    """

    name: str
    token_U: np.ndarray  # by index in T
    population: int


@dataclass(frozen=True)
class TopRanks:
    """The engine's first ranks at the tokens of lists, by index in T, with log-probabilities of
    both policies.
    """

    token_U: np.ndarray
    text_UK: Sequence[Sequence[str]]  # raw
    logq_UK: np.ndarray
    logp_UK: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[TopRanks]) -> TopRanks:
        """The ranks of all parts, one part after the other."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        token_U, text_UK, logq_UK, logp_UK = columns
        return cls(
            np.concatenate(token_U),
            list(chain.from_iterable(text_UK)),
            np.concatenate(logq_UK),
            np.concatenate(logp_UK),
        )


@dataclass(frozen=True)
class ExploredTokens:
    """The columns of tokens; log-probabilities in nats, NaN where not measured."""

    text_T: Sequence[str]  # raw
    logq_T: np.ndarray
    logp_T: np.ndarray
    entropy_T: np.ndarray | None
    advantage_T: np.ndarray | None
    ranks: TopRanks | None
    # Of the second of two runs on the same tokens
    logq_b_T: np.ndarray | None = None
    logp_b_T: np.ndarray | None = None


@dataclass(frozen=True)
class Exploration:
    """Scored responses `_S`, in trace order; passages `_P`, ordered by response and start; their
    tokens `_T`, laid flat.
    """

    traces: tuple[str, ...]  # their names
    pair: Pair
    judged_alike: bool  # whether π is the trainer that masks judge, which may be some steps ahead
    compared: tuple[str, ...]  # the algorithms shown first: two at most
    total_responses: int  # of the traces
    total_tokens: int
    response_S: np.recarray  # `RESPONSE`
    one_advantage: bool  # whether every response has a single advantage, or none
    prompts: Mapping[int, str]  # raw, of the responses with a passage, by index in S
    passage_P: np.recarray  # `PASSAGE`, `response` by index in S
    tokens: ExploredTokens
    judged: tuple[BlockedLevels, ...]
    lists: tuple[TokenList, ...]
    # Of the responses that have passages and are not whole, by index in S
    profile_response_R: np.ndarray
    profile_RB: np.ndarray  # the largest |d| in equal parts of each; NaN where none
    runs: tuple[str, ...] = ()  # the names of two runs that are compared
    settings: tuple[SettingDifference, ...] = ()  # in which these differ

    @property
    def paired(self) -> bool:
        """Whether two runs scored the same tokens; the traces, gaps and ranks are those of the
        first.
        """
        return self.tokens.logq_b_T is not None

    @property
    def whole_P(self) -> np.ndarray:
        """Whether a passage is its whole response."""
        whole_P: np.ndarray = (
            self.passage_P.tokens == self.response_S.length[self.passage_P.response]
        )
        return whole_P
