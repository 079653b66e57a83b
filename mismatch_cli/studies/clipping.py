"""One pass over traces, in one process or several: every algorithm that the traces support, on
the same tokens.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, starmap
from pathlib import Path
from typing import ClassVar

import numpy as np

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.places import shorten_paths
from mismatch_cli.metrics.clipping.blocked_rows import AlgorithmRow
from mismatch_cli.metrics.clipping.breakdown import JUDGED_ROW
from mismatch_cli.metrics.clipping.clipping_summary import ClippingSummary, Question
from mismatch_cli.metrics.clipping.masked_slice import Needs, add_to_first_pass
from mismatch_cli.metrics.clipping.token_table import BlockedToken, TokensBySign
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.processes.workers import ALONE, Workers
from mismatch_cli.processes.workers.portions import Portion
from mismatch_cli.processes.workers.reading import run_pass
from mismatch_cli.rules.algorithms.algorithm import Algorithm, keep_T
from mismatch_cli.rules.algorithms.first_pass import FirstPass, batch_masks_of
from mismatch_cli.rules.algorithms.masks_and_factors import Mask, Rule
from mismatch_cli.rules.joint_batches import BatchValues
from mismatch_cli.rules.policies import Policies
from mismatch_cli.studies.algorithm_support import PAPER, Support
from mismatch_cli.studies.clipping_result import ClippingResult, SkippedAlgorithm
from mismatch_cli.studies.exploration.explore import explore
from mismatch_cli.studies.exploration.explored import Exploration
from mismatch_cli.studies.exploration.passages import MOST_TOKENS
from mismatch_cli.studies.study import Study, check_poolable, subject_of
from mismatch_cli.studies.unusable import refuse_unusable
from mismatch_cli.trace.origin import About
from mismatch_cli.trace.reader import RowGroup, Trace

_BLOCKED_TOKENS = 50  # of an algorithm and a sign, the most frequent ones
# Levels on a page: a byte for each token and mask, which hardly compresses
MOST_LEVELS = 1_000_000


@dataclass(frozen=True)
class ClippingPlotData:
    """The numbers, and a sample of judged tokens; without advantages it holds each token once
    per sign.
    """

    STUDY: ClassVar[str] = "clipping"

    result: ClippingResult
    subject: str = ""  # what is compared, in one line
    compared: tuple[Algorithm, ...] = ()  # at most two: the columns of the mask regions
    # log-probabilities in nats
    sample: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=JUDGED_ROW))

    @property
    def logp_2N(self) -> np.ndarray:
        """log μ and log π of each token in the sample."""
        return np.stack([self.sample["logp_rollout"], self.sample["logp_trainer"]])

    def of_sign(self, sign: str) -> np.ndarray:
        """Which tokens of the sample have an advantage of that sign."""
        advantage_N = self.sample["advantage"]
        return advantage_N > 0 if sign == "positive" else advantage_N < 0

    def coordinates(self, algorithm: Algorithm) -> tuple[np.ndarray, np.ndarray]:
        """The anchor's log-probability and log π of each token in the sample, in float64."""
        anchor = "recomputed" if algorithm.limiting.anchor == "recomputed" else "rollout"
        logp_anchor_N = self.sample[f"logp_{anchor}"].astype(np.float64)
        logp_trainer_N = self.sample["logp_trainer"].astype(np.float64)
        return logp_anchor_N, logp_trainer_N

    def blocked(self, algorithm: Algorithm) -> np.ndarray:
        """Whether the algorithm blocks each token of the sample."""
        names = [row.name for row in self.result.algorithms]
        bit = np.uint64(names.index(algorithm.name))
        blocked_N: np.ndarray = (self.sample["blocked_by"] >> bit) & np.uint64(1) == 1
        return blocked_N

    @staticmethod
    def blocked_at(
        algorithm: Algorithm, logp_anchor_N: np.ndarray, logp_N: np.ndarray, sign: str
    ) -> np.ndarray | None:
        """Whether the limiting masks block tokens with these log-probabilities, nats, and an
        advantage of that sign.

        None if there is no such mask, or if two probabilities do not decide: top-K masks need more
        columns, and a mask on whole responses decides differently when the same tokens form one
        response instead of many.
        """
        limiting = algorithm.limiting
        needs_more = limiting.anchor == "both" or algorithm.batch_masks or algorithm.needs_entropy
        if not limiting.masks or needs_more:
            return None
        tokens = len(logp_N)
        advantage_N = np.full(tokens, 1.0 if sign == "positive" else -1.0)
        each_its_own_S1 = np.arange(tokens + 1)
        all_in_one_S1 = np.array([0, tokens])
        answers = []
        for offset_S1 in (each_its_own_S1, all_in_one_S1):
            policies = Policies(logp_anchor_N, logp_N, logp_anchor_N, offset_S1)
            # A user's own mask may need anything that two bare probabilities lack.
            try:
                answers.append(~keep_T(limiting, policies, advantage_N))
            except Exception:
                return None
        return answers[0] if np.array_equal(*answers) else None


@dataclass(frozen=True)
class ClippingAnalysis(Study):
    """What each algorithm blocks on the same tokens, and which ones the traces do not support."""

    STUDY, FORMAT = "clipping", "mismatch-cli clipstats"

    traces: Sequence[Trace]
    support: Support
    summary: ClippingSummary
    requested: tuple[Algorithm, ...] = ()  # the two to compare; empty: the most informative
    arguments: tuple[str, ...] = ()  # as typed, without the traces

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """The algorithms that were applied."""
        return self.summary.question.algorithms

    @cached_property
    def compared(self) -> tuple[Algorithm, ...]:
        """At most two to compare: those requested, else those of the paper, else the first that
        block anything. Those that were named keep the order in which they were.
        """
        if self.requested:
            return self.requested
        by_name = {algorithm.name: algorithm for algorithm in self.algorithms}
        preferred = [by_name[name] for name in PAPER if name in by_name]
        # Row 0 counts the judged tokens, the others what each algorithm blocks of them.
        blocked_by_mu = self.summary.cells.by_mu[1:]
        for algorithm, blocked in zip(self.algorithms, blocked_by_mu, strict=True):
            if blocked.any():
                preferred.append(algorithm)
        two = list(dict.fromkeys([*preferred, *self.algorithms]))[:2]
        if "--algorithm" in self.arguments:
            two.sort(key=self.algorithms.index)
        return tuple(two)

    @cached_property
    def result(self) -> ClippingResult:
        """What `clipstats --json` prints (docs/json/clipstats.md)."""
        numbers = self.summary.result(_BLOCKED_TOKENS)
        rows = [self._with_text(row) for row in numbers.algorithms]
        same_strictness = []
        for algorithm in self.compared:
            row = self.summary.same_strictness(self.algorithms.index(algorithm))
            if row:
                same_strictness.append(row)
        return ClippingResult(
            traces=shorten_paths([str(trace.folder) for trace in self.traces]),
            arguments=shorten_paths(list(self.arguments)),
            compared=[algorithm.name for algorithm in self.compared],
            about=About.of(self.traces, self.summary.lacking.get("logp_trainer", 0)),
            has=self.support.has,
            skipped=list(starmap(SkippedAlgorithm, self.support.skipped.items())),
            **vars(replace(numbers, algorithms=rows)),
            same_strictness=same_strictness,
        )

    def _with_text(self, row: AlgorithmRow) -> AlgorithmRow:
        """The row with the text of its blocked tokens."""
        positive = map(self._decode, row.blocked_tokens.positive)
        negative = map(self._decode, row.blocked_tokens.negative)
        return replace(row, blocked_tokens=TokensBySign(list(positive), list(negative)))

    def _decode(self, token: BlockedToken) -> BlockedToken:
        text = self.traces[0].vocabulary.decode([token.token_id])
        return replace(token, text=text, class_=token_class(text))

    @property
    def explored_responses(self) -> int:
        return sum(trace.num_responses for trace in self.traces if trace.has_ids)

    @property
    def _moved(self) -> Sequence[Algorithm]:
        """The algorithms whose thresholds move: all, unless that needs too many levels."""
        masks = {algorithm.masks for algorithm in self.algorithms}
        levels = len(masks) * min(self.summary.counts["tokens"], MOST_TOKENS)
        return self.algorithms if levels <= MOST_LEVELS else self.compared

    def exploration(
        self, on_responses: Callable[[int], None] = lambda _: None
    ) -> Exploration | None:
        """The tokens of a page, and which of all tokens every algorithm blocks."""
        return explore(
            self.traces,
            PAIRS["total"],
            self.algorithms,
            self.support.needs,
            self.summary.question.batch_values,
            self.compared,
            moved=self._moved,
            on_responses=on_responses,
        )

    @cached_property
    def plot_data(self) -> ClippingPlotData:
        """What the plots draw: the numbers, and the token sample under two algorithms."""
        subject = subject_of(self.traces[0].manifest, self.result.counts.tokens)
        return ClippingPlotData(self.result, subject, self.compared, self.summary.sample.rows())


def analyse_clipping(
    traces: Sequence[Trace],
    algorithms: Sequence[Algorithm],
    compared: Sequence[Algorithm] = (),
    *,
    theory: bool = False,
    workers: Workers = ALONE,
    arguments: Sequence[str] = (),
    on_responses: Callable[[int], None] = lambda _: None,
) -> ClippingAnalysis:
    """Apply every algorithm to every token; the numbers are the same to the bit for any number of
    workers. `compared` has the two to compare; without them the most informative are chosen.

    Raises a `MismatchError` if no response has the columns that the algorithms need, and a
    `UsageError` if the traces do not support a compared algorithm.
    """
    check_poolable(traces)
    support = Support.of(traces, algorithms)
    for algorithm in compared:
        if algorithm.name in support.skipped:
            raise UsageError(
                f"{algorithm.name} cannot be compared: {support.skipped[algorithm.name]}"
            )
    first_pass = collect_first_pass(traces, support, workers)
    question = Question(support.judged, support.needs, theory, first_pass)
    summary = run_pass(traces, _JudgingPass(question), workers, on_responses)
    if summary.responses_read == sum(summary.lacking.values()):
        raise MismatchError(
            f"No response in {traces[0].folder} has every column that these algorithms need "
            f"(missing: {', '.join(summary.lacking)}). Choose others with --algorithm, or record "
            "the trace again."
        )
    # Tokens that the trainer calls impossible are blocked, too
    refuse_unusable(traces, summary.counts["tokens"], summary.counts["not_measured"])
    return ClippingAnalysis(traces, support, summary, tuple(compared), tuple(arguments))


def collect_first_pass(
    traces: Sequence[Trace], support: Support, workers: Workers = ALONE
) -> dict[Rule, BatchValues]:
    """What masks on whole batches find, on tokens with the columns they need; reads nothing
    without such masks.
    """
    algorithms = [algorithm for algorithm in support.judged if algorithm.batch_masks]
    if not algorithms:
        return {}
    collecting = _CollectingPass(batch_masks_of(algorithms), Needs.of(algorithms))
    return run_pass(traces, collecting, workers).settle()


def columns_for(needs: Needs) -> list[str]:
    """The columns to read, besides the required ones, to judge the tokens of a trace."""
    columns = [*ClippingSummary.READS, *needs.trace_columns]
    if needs.full:
        columns += ["tv_full", "kl_full"]
    return columns


@dataclass(frozen=True)
class _CollectingPass:
    """The first pass, in which rules on whole batches collect."""

    rules: tuple[Rule, ...]
    needs: Needs

    @property
    def columns(self) -> Sequence[str]:
        return columns_for(self.needs)

    @property
    def files(self) -> list[Path]:
        return _own_files(self.rules)

    def begin(self, _portion: Portion) -> FirstPass:
        return FirstPass(self.rules)

    def read(self, first_pass: FirstPass, portion: Portion, groups: Iterator[RowGroup]) -> None:
        for group in groups:
            if not self.needs.first_missing_in(group.batch):
                add_to_first_pass(first_pass, group.batch, self.needs, portion.trace)


@dataclass(frozen=True)
class _JudgingPass:
    """The pass that makes a summary of each portion, whose examples carry the number of their
    trace.
    """

    question: Question

    @property
    def columns(self) -> Sequence[str]:
        return columns_for(self.question.needs)

    @property
    def files(self) -> list[Path]:
        masks = chain.from_iterable(algorithm.masks for algorithm in self.question.algorithms)
        return _own_files(masks)

    def begin(self, _portion: Portion) -> ClippingSummary:
        return ClippingSummary(self.question)

    def read(self, summary: ClippingSummary, portion: Portion, groups: Iterator[RowGroup]) -> None:
        for group in groups:
            summary.update(group.batch, portion.trace)
        summary.overlap.examples["trace"] = portion.trace


def _own_files(rules: Iterable[Rule]) -> list[Path]:
    """The files of the user's own masks, which a reader on another machine lacks."""
    files = []
    for rule in rules:
        if isinstance(rule, Mask) and rule.region.endswith(".py"):
            files.append(Path(rule.region))
    return files


_OPERATOR = re.compile(
    rf"[{re.escape('+-*/=<>^%×÷·±≤≥≠≈√∑∏∫−→|&')}]+"
    r"|\\(times|cdot|div|frac|sqrt|sum|prod|int|pm|leq|geq|neq|approx|equiv|to|le|ge)"
)
# Words that open or turn a step of reasoning: the examples in the appendix of arXiv 2602.04879, and
# similar ones.
_CONNECTIVE = re.compile(
    "wait|thus|since|so|therefore|hence|however|but|then|next|also|because|instead|first|second|"
    "finally|now|if|let|alternatively|and|or|while|as|for|given|suppose|assume|note|recall|here|"
    "this|that|we|when|where"
)
_MARKUP = re.compile(r"<[^<>\s]*>|\\[a-z]*")


def token_class(text: str) -> str:
    """digit, operator, connective (Wait, Thus, Since …), structure (punctuation, spaces,
    markup), or other.
    """
    core = text.strip()
    # Decimal digits of any script, but neither ² nor ½
    if core.isdecimal():
        return "digit"
    if _OPERATOR.fullmatch(core):
        return "operator"
    if _CONNECTIVE.fullmatch(core.lower()):
        return "connective"
    if _MARKUP.fullmatch(core) or not any(map(_is_of_a_word, core)):
        return "structure"
    return "other"


def _is_of_a_word(character: str) -> bool:
    """Whether it is a letter, a digit, or part of one: a vowel sign, or bytes of a character that
    several tokens share.
    """
    # A variation selector is a mark, too, but of symbols.
    is_mark = (
        unicodedata.category(character) in ("Mn", "Mc") and not "\ufe00" <= character <= "\ufe0f"
    )
    return character.isalnum() or is_mark or character == "\ufffd"
