"""One pass over traces, by one process or several: every algorithm that the traces can support, on the same tokens."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mismatch_cli.algorithms.algorithm import Algorithm, keep_T
from mismatch_cli.algorithms.gathering import Gathering, rules_of
from mismatch_cli.algorithms.rules import Mask, Rule
from mismatch_cli.algorithms.table import TABLE
from mismatch_cli.batches import Found
from mismatch_cli.errors import MismatchError, UsageError, quoted
from mismatch_cli.metrics.clipping.breakdown import JUDGED_ROW
from mismatch_cli.metrics.clipping.clipping_summary import ClippingSummary, Question
from mismatch_cli.metrics.clipping.masked import Needs, gather
from mismatch_cli.metrics.pairs import PAIRS, weights_are_equal
from mismatch_cli.places import shown
from mismatch_cli.policies import Policies
from mismatch_cli.studies.exploration import Exploration, explore
from mismatch_cli.studies.study import Study, about, check_poolable, who_is_compared
from mismatch_cli.trace.reader import RowGroup, Trace
from mismatch_cli.workers import ALONE, Workers
from mismatch_cli.workers.portions import Portion
from mismatch_cli.workers.reading import read_through

_BLOCKED_TOKENS = 50
PAPER = ("grpo-clip-higher", "dppo-binary-tv")  # the two of its first figure
_COLUMNS = (
    "version_rollout", "version_trainer", "reward", "response_ids", "loss_mask", "logp_trainer", "entropy_trainer",
)  # fmt: skip
_EQUAL = (
    "not applicable: the trainer has the weights that sampled, so the recomputed policy is the trainer itself. "
    "Score with later weights: mismatch-cli rescore {run} --trainer-model LATER --weights newer"
)
_NO_RECOMPUTED = (
    "the trace has no {column}. Fill it in with: mismatch-cli rescore {run} --keep-trainer --trainer-model SAMPLER"
)

_NO_BATCHES = (
    "it looks at a whole batch, and not every imported row says of which optimiser step it is. Import again with that "
    "column: mismatch-cli import DUMP --columns minibatch=NAME"
)


@dataclass(frozen=True)
class Support:
    """The algorithms that can be judged, the columns they need, and why the others are left out."""

    judged: tuple[Algorithm, ...]
    needs: Needs
    skipped: dict[str, str]  # algorithm → reason
    has: dict[str, Any]

    @classmethod
    def of(cls, traces: Sequence[Trace], algorithms: Sequence[Algorithm]) -> Support:
        """Raises a `MismatchError` where nothing can be judged."""
        columns = set[str].union(*(trace.columns() for trace in traces))
        if "logp_trainer" not in columns:
            raise MismatchError(
                f"{traces[0].folder} has no log-probabilities of a trainer, so there is nothing to hold against the "
                f"rollout. {traces[0].how_to_score}"
            )
        has = _what_is_there(traces, columns)
        run = quoted(traces[0].run_folder)
        skipped = {a.name: reason for a in algorithms if (reason := _reason(a, has, run))}
        judged = tuple(a for a in algorithms if a.name not in skipped)
        if not judged:
            name, reason = next(iter(skipped.items()))
            raise MismatchError(f"No algorithm can be judged on {traces[0].folder}. {name}: {reason}")
        needs = Needs(
            advantages=has["advantages"],
            recomputed=any(a.needs_recomputed for a in judged),
            top_k=has["top_k"] if any(a.needs_top_k for a in judged) else 0,
            full=has["full"],
            topk_recomputed=any(a.needs_top_k and a.needs_recomputed for a in judged),
            entropy=any(a.needs_entropy for a in judged),
            average=any(a.needs_average for a in judged),
        )
        return cls(judged, needs, skipped, has)

    @classmethod
    def of_paper(cls, traces: Sequence[Trace]) -> Support | None:
        """The two algorithms of the paper, or the one of them that can be judged; None where neither can."""
        try:
            return cls.of(traces, [TABLE[name] for name in PAPER])
        except MismatchError:
            return None


def _what_is_there(traces: Sequence[Trace], columns: set[str]) -> dict[str, Any]:
    recomputed = "measured" if "logp_recomputed" in columns else "absent"
    if weights_are_equal(traces):
        recomputed = "equal weights"
    return {
        "advantages": "advantage" in columns,
        "rewards": "reward" in columns,
        "entropy": "entropy_trainer" in columns,
        "full": {"tv_full", "kl_full"} <= columns,
        "top_k": min(trace.top_k for trace in traces) if "topk_logp_trainer" in columns else 0,
        "recomputed": recomputed,
        "topk_recomputed": recomputed == "equal weights" or "topk_logp_recomputed" in columns,
        "average": "logp_average" in columns,
        "batches": all(_knows_batches(trace.manifest) for trace in traces),
    }


def _knows_batches(manifest: Mapping[str, Any]) -> bool:
    """Whether rows say of which optimiser step they are: what was recorded here does, and imports that brought it."""
    imported = manifest.get("imported")
    return imported is None or imported.get("rows_without_minibatch") == 0


def _reason(algorithm: Algorithm, has: dict[str, Any], run: str) -> str:
    """Why a trace cannot support an algorithm; empty where it can."""
    recomputed, k = has["recomputed"], algorithm.needs_top_k
    if recomputed == "equal weights" and algorithm.anchor == "recomputed":
        return _EQUAL.format(run=run)
    if recomputed == "absent" and algorithm.needs_recomputed:
        return _NO_RECOMPUTED.format(column="logp_recomputed", run=run)
    if k > has["top_k"]:
        there = f"the top {has['top_k']}" if has["top_k"] else "none"
        ask = f", or ask for {algorithm.name.partition(':')[0]}:k={has['top_k']}" if has["top_k"] else ""
        lacks = f"needs the top {k} log-probs, and the trace has {there}. "
        return f"{lacks}Record with: mismatch-cli probe MODEL --top-logprobs {k}{ask}"
    if algorithm.needs_average and not has["average"]:
        return "the trace has no logp_average, which `train --average-decay` records"
    if algorithm.needs_entropy and not has["entropy"]:
        return f"the trace has no entropy of the trainer. Fill it in with: mismatch-cli rescore {run}"
    if algorithm.batch_rules and not has["advantages"]:
        return "it looks at the advantages of a whole batch, and the trace has none"
    if algorithm.batch_rules and not has["batches"]:
        return _NO_BATCHES
    if k and algorithm.needs_recomputed and not has["topk_recomputed"]:
        return _NO_RECOMPUTED.format(column="topk_logp_recomputed", run=run)
    return ""


@dataclass(frozen=True)
class OneMask:
    """An algorithm, and those that decide alike on every judged token."""

    row: Mapping[str, Any]
    others: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """`ppo (+4 alike)`."""
        name: str = self.row["name"]
        return f"{name} (+{len(self.others)} alike)" if self.others else name


@dataclass(frozen=True)
class ClippingPlotData:
    """The numbers, and a sample of judged tokens; without advantages it holds each token once for either sign."""

    STUDY: ClassVar[str] = "clipping"

    result: Mapping[str, Any]  # what docs/clipstats.md describes
    subject: str = ""  # who is compared, in one line
    compared: tuple[Algorithm, ...] = ()  # at most two: the columns of the mask regions
    sample: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=JUDGED_ROW))  # log-probabilities in nats

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The algorithms of the result, in the order of the table."""
        rows: Sequence[Mapping[str, Any]] = self.result.get("algorithms", ())
        return rows

    @property
    def blocking(self) -> list[Mapping[str, Any]]:
        """Those that block at least one token."""
        return [row for row in self.rows if any(part and part["value"] for part in row["blocked"].values())]

    def masks(self, rows: Iterable[Mapping[str, Any]], *also: str) -> list[OneMask]:
        """One for each different mask: of algorithms that decide alike the compared ones, else the first of the rows.

        `also` names keys under which those that stand for each other hold the same.
        """
        by_mask: dict[str, list[Mapping[str, Any]]] = {}
        group_of = {name: place for place, names in enumerate(self.result.get("same_mask", ())) for name in names}
        for row in rows:
            key = repr([group_of.get(row["name"], row["name"]), *(row[key] for key in also)])
            by_mask.setdefault(key, []).append(row)
        return [one for alike in by_mask.values() for one in self._shown(alike)]

    def _shown(self, alike: list[Mapping[str, Any]]) -> list[OneMask]:
        shown = [row for row in alike if row["name"] in self.result["compared"]] or alike[:1]
        others = tuple(row["name"] for row in alike if row not in shown)
        return [OneMask(row, others) for row in shown]

    @property
    def has_advantages(self) -> bool:
        return bool(self.result.get("has", {}).get("advantages"))

    def when(self, sign: str) -> str:
        """How the tokens of a sign (`>` or `<`) are called: without advantages the question is hypothetical."""
        return f"A {sign} 0" if self.has_advantages else f"if A {sign} 0"

    def of_sign(self, sign: str) -> np.ndarray:
        """Which tokens of the sample have an advantage of that sign (`>` or `<`)."""
        return self.sample["advantage"] > 0 if sign == ">" else self.sample["advantage"] < 0

    def coordinates(self, algorithm: Algorithm) -> tuple[np.ndarray, np.ndarray]:
        """Of each token of the sample, log of the anchor's probability, and log π."""
        anchor = "recomputed" if algorithm.limiting.anchor == "recomputed" else "rollout"
        return self.sample[f"logp_{anchor}"].astype(np.float64), self.sample["logp_trainer"].astype(np.float64)

    def blocked(self, algorithm: Algorithm) -> np.ndarray:
        """Whether the algorithm blocks each token of the sample."""
        bit = [row["name"] for row in self.rows].index(algorithm.name)
        blocked_N: np.ndarray = (self.sample["blocked_by"] >> np.uint64(bit)) & np.uint64(1) == 1
        return blocked_N

    @staticmethod
    def blocked_at(algorithm: Algorithm, logp_anchor_N: np.ndarray, logp_N: np.ndarray, sign: str) -> np.ndarray | None:
        """Whether the limiting masks block tokens with these log-probabilities, nats, and an advantage of that sign.

        None where there is no such mask, or where two probabilities do not decide: top-K masks need more columns, and
        a mask on whole responses answers otherwise when the same tokens form one response instead of many.
        """
        if algorithm.limiting.anchor in ("none", "both") or algorithm.batch_rules or algorithm.needs_entropy:
            return None
        advantage_N = np.full(len(logp_N), 1.0 if sign == ">" else -1.0)
        answers = []
        for offset_S1 in (np.arange(len(logp_N) + 1), np.array([0, len(logp_N)])):
            policies = Policies(logp_anchor_N, logp_N, logp_anchor_N, offset_S1)
            try:
                answers.append(~keep_T(algorithm.limiting, policies, advantage_N))
            except Exception:  # a user's own mask can ask for anything that a bare pair of probabilities does not have
                return None
        return answers[0] if np.array_equal(*answers) else None


@dataclass(frozen=True)
class ClippingAnalysis(Study):
    """What was counted, and what the traces could not support."""

    STUDY, FORMAT = "clipping", "mismatch-cli clipstats"

    traces: Sequence[Trace]
    support: Support
    summary: ClippingSummary
    asked: tuple[Algorithm, ...] = ()  # the two to compare; empty: those that tell the most
    arguments: tuple[str, ...] = ()  # what was asked for besides the traces

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """Those that were judged."""
        return self.summary.question.algorithms

    @cached_property
    def compared(self) -> tuple[Algorithm, ...]:
        """Two to compare, at most: as asked, else those of the paper, else the first that block anything."""
        if self.asked:
            return self.asked
        by_name = {algorithm.name: algorithm for algorithm in self.algorithms}
        paper = [by_name[name] for name in PAPER if name in by_name]
        cells = self.summary.cells.by_mu[1:]
        blocking = [algorithm for algorithm, counts in zip(self.algorithms, cells, strict=True) if counts.any()]
        return tuple(dict.fromkeys([*paper, *blocking, *self.algorithms]))[:2]

    def to_json(self) -> dict[str, Any]:
        """What `clipstats --json` prints (docs/clipstats.md)."""
        result = self.summary.result(_BLOCKED_TOKENS)
        vocabulary = self.traces[0].vocabulary
        lists = (rows for algorithm in result["algorithms"] for rows in algorithm["blocked_tokens"].values())
        for row in chain.from_iterable(lists):
            row["text"] = vocabulary.decode([row["token_id"]])
            row["class"] = token_class(row["text"])
        return {
            "format": self.FORMAT,
            "version": self.VERSION,
            "traces": shown([str(trace.folder) for trace in self.traces]),
            "arguments": shown(list(self.arguments)),
            "compared": [algorithm.name for algorithm in self.compared],
            "about": about(self.traces, self.summary.lacking.get("logp_trainer", 0)),
            "has": self.support.has,
            "skipped": [{"algorithm": name, "reason": reason} for name, reason in self.support.skipped.items()],
            **result,
            "same_strictness": self._same_strictness(),
        }

    def _same_strictness(self) -> list[dict[str, Any]]:
        found = (self.summary.same_strictness(self.algorithms.index(algorithm)) for algorithm in self.compared)
        return [row for row in found if row]

    def exploration(self, responses: int) -> Exploration | None:
        """The tokens of the first responses, and what every algorithm blocks of them."""
        needs, total = self.support.needs, PAIRS["total"]
        return explore(
            self.traces, total, self.algorithms, needs, self.compared, responses, self.summary.question.found
        )

    @cached_property
    def plot_data(self) -> ClippingPlotData:
        """What the plots draw: the numbers, and the sample of tokens under two algorithms."""
        subject = f"{who_is_compared(self.traces[0].manifest)} · {self.result['counts']['tokens']:,} tokens"
        return ClippingPlotData(self.result, subject, self.compared, self.summary.sample.rows())


def analyse_clipping(
    traces: Sequence[Trace],
    algorithms: Sequence[Algorithm],
    asked: Sequence[Algorithm] = (),
    *,
    theory: bool = False,
    workers: Workers = ALONE,
    arguments: Sequence[str] = (),
    on_responses: Callable[[int], None] = lambda _: None,
) -> ClippingAnalysis:
    """Judge every token with every algorithm; any number of workers gives the same numbers to the bit.

    Raises a `MismatchError` where the traces hold nothing that an algorithm could judge.
    """
    check_poolable(traces)
    support = Support.of(traces, algorithms)
    for algorithm in asked:
        if algorithm.name in support.skipped:
            raise UsageError(f"{algorithm.name} cannot be compared: {support.skipped[algorithm.name]}")
    found = first_pass(traces, support, workers)
    question = Question(support.judged, support.needs, theory, found)
    summary = read_through(traces, _Judging(question), workers, on_responses)
    if summary.seen == sum(summary.lacking.values()):
        raise MismatchError(
            f"No response in {traces[0].folder} has every column that these algorithms need "
            f"({', '.join(summary.lacking)} is missing). Choose others with --algorithm, or record it again."
        )
    return ClippingAnalysis(traces, support, summary, tuple(asked), tuple(arguments))


def first_pass(traces: Sequence[Trace], support: Support, workers: Workers = ALONE) -> dict[Rule, Found]:
    """What rules on whole batches find, of the algorithms that are judged; nothing is read where there are none."""
    rules = rules_of(support.judged)
    return read_through(traces, _Collecting(rules, support.needs), workers).found() if rules else {}


def columns_for(needs: Needs) -> list[str]:
    """What is read of a trace to judge its tokens, beside what always comes along."""
    columns = [*_COLUMNS, *(name.rsplit("_", 1)[0] for name in needs.columns)]
    return columns + ["topk_ids"] * (needs.top_k > 0) + ["tv_full", "kl_full"] * needs.full


@dataclass(frozen=True)
class _Collecting:
    """The first pass: what rules on whole batches collect."""

    rules: tuple[Rule, ...]
    needs: Needs

    @property
    def columns(self) -> Sequence[str]:
        return columns_for(self.needs)

    @property
    def files(self) -> list[Path]:
        return _own_files(self.rules)

    def begin(self, _portion: Portion) -> Gathering:
        return Gathering(self.rules)

    def read(self, found: Gathering, portion: Portion, groups: Iterator[RowGroup]) -> None:
        for group in groups:
            if not self.needs.missing_in(group.batch):
                gather(found, group.batch, self.needs, portion.trace)


@dataclass(frozen=True)
class _Judging:
    """The pass: a summary of each portion, whose examples bear the number of their trace."""

    question: Question

    @property
    def columns(self) -> Sequence[str]:
        return columns_for(self.question.needs)

    @property
    def files(self) -> list[Path]:
        return _own_files(mask for algorithm in self.question.algorithms for mask in algorithm.masks)

    def begin(self, _portion: Portion) -> ClippingSummary:
        return ClippingSummary(self.question)

    def read(self, found: ClippingSummary, portion: Portion, groups: Iterator[RowGroup]) -> None:
        for group in groups:
            found.update(group.batch, portion.trace)
        found.overlap.examples["trace"] = portion.trace


def _own_files(rules: Iterable[Rule]) -> list[Path]:
    """Masks of the user's, which a reader elsewhere lacks."""
    return [Path(rule.region) for rule in rules if isinstance(rule, Mask) and rule.region.endswith(".py")]


# Words that open or turn a step of reasoning: the examples in the appendix of arXiv 2602.04879, and their like.
_CONNECTIVE = re.compile(
    "wait|thus|since|so|therefore|hence|however|but|then|next|also|because|instead|first|second|finally|now|if|let|"
    "alternatively|and|or|while|as|for|given|suppose|assume|note|recall|here|this|that|we|when|where"
)
_OPERATORS = frozenset("+-*/=<>^%×÷·±≤≥≠≈√∑∏∫−→|&")
_OPERATOR_COMMANDS = re.compile(r"\\(times|cdot|div|frac|sqrt|sum|prod|int|pm|leq|geq|neq|approx|equiv|to|le|ge)")


def token_class(text: str) -> str:
    """digit, operator, connective (Wait, Thus, Since …), structure (punctuation, spaces, markup), or other."""
    core = text.strip()
    if core and all(unicodedata.category(c) == "Nd" for c in core):
        return "digit"
    if core and (all(c in _OPERATORS for c in core) or _OPERATOR_COMMANDS.fullmatch(core)):
        return "operator"
    if _CONNECTIVE.fullmatch(core.lower()):
        return "connective"
    if not any(c.isalnum() for c in core) or re.fullmatch(r"<[^<>\s]*>|\\[a-z]*", core):
        return "structure"
    return "other"
