"""What each algorithm blocks: in total, by probability, position and step, compared with others,
and which tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

from mismatch_cli.base import numbers
from mismatch_cli.metrics.clipping.blocked_rows import (
    BlockedAtPositions,
    BlockedInBin,
    BlockedInSteps,
    BySign,
)
from mismatch_cli.metrics.clipping.token_table import BlockedToken
from mismatch_cli.report.outline import Brief, Excerpt, Priority, Section, Table
from mismatch_cli.report.pages.clipping_thresholds import counted, same_strictness
from mismatch_cli.report.tables import (
    TextColumn,
    col,
    filled,
    mu_bin,
    number,
    occupied,
    percent,
    plain,
    span,
    table,
    text,
)
from mismatch_cli.studies.clipping_result import SIGNS, ClippingResult, OneMask

Part = BlockedInBin | BlockedAtPositions | BlockedInSteps
P = TypeVar("P", bound=Part)
R = TypeVar("R")
_ROWS_ON_TERMINAL = 12
_PAIRS_ON_TERMINAL, _PAIRS_ON_PAGE = 10, 20
_TOKENS_ON_TERMINAL, _TOKENS_ON_PAGE = 10, 25
_ROWS_ON_SCREEN = 8
_STEPS = (0, 1, 1 / 2, 1 / 4, 3 / 4)  # of a ranking, from the strictest: what a screen shows first
_JACCARD = "Jaccard index of pairs of algorithms"
_MARKS = {True: "▸ ", False: "  "}  # of the compared algorithms and of others
_NOT_BY_RATIO = "†"
_same_numbers = attrgetter("blocked", "lost", "weighs_by_ratio")  # of algorithms in one row


def algorithms_section(result: ClippingResult) -> Section:
    """Blocked tokens and lost update of all algorithms, the named or compared ones in detail, then
    equal strictness and formulas.
    """
    tables = [_overview(result)]
    for mask in result.detailed_masks:
        tables += _breakdown(result, mask)
    tables += [same_strictness(result), _lost_in_parts(result), _formulas(result)]
    return Section("What each algorithm blocks", _algorithms_text(result), tables=filled(*tables))


def _algorithms_text(result: ClippingResult) -> str:
    sentences = [
        "A blocked token contributes nothing to the update. Lost update is the share of Σ r·|A| "
        "that no longer enters it; it is not a gradient norm, which would need the directions of "
        "the updates."
    ]
    if not all(row.weighs_by_ratio for row in result.algorithms):
        sentences.append(
            f"Rows with {_NOT_BY_RATIO} are not weighted by r; they show the share of Σ |A|, "
            "without r."
        )
    if not result.has_advantages:
        sentences.append(
            "The trace has no advantages: every token is judged twice, with A = 1 and with A = −1."
        )
    sentences.append(
        "The anchor is the policy with which the mask compares the trainer: the rollout's μ, or "
        "π′, recomputed by the trainer at the weights that sampled."
    )
    if len(result.blocking_masks) > len(result.detailed_masks):
        sentences.append(
            "Bins, steps and tokens are shown for the compared algorithms; of any other: clipstats "
            "-a NAME, or --json."
        )
    return " ".join(sentences)


def _overview(result: ClippingResult) -> Table:
    """The compared masks, then the others from strict to loose; a screen has some of them."""
    masks = result.masks(result.in_order, _same_numbers)
    masks.sort(key=lambda mask: (mask.row not in result.leading, -mask.row.strictness))
    note = (
        f"{_MARKS[True]}compared. ± is half the 95 % interval over prompts; none for fewer "
        "than 10 prompts, or where all prompts agree. "
        f"{_same(masks)}For the rules: mismatch-cli algorithms."
    )
    return table(
        "Blocked tokens and lost update",
        masks,
        [
            text("algorithm", lambda mask: _MARKS[mask.row in result.leading] + mask.label),
            text("anchor", lambda mask: mask.row.anchor, priority=Priority.FULL),
            *_shares(result),
        ],
        note=note,
        brief=_brief(result, masks),
    )


def _brief(result: ClippingResult, masks: Sequence[OneMask]) -> Brief | None:
    """The masks that a screen shows; None without a token to block."""
    if result.nothing_to_block:
        return None
    on_screen = _most_important_first(result, masks)
    if all(masks[n].row.weighs_by_ratio for n in on_screen):
        return Brief(on_screen)
    return Brief(on_screen, f"{_NOT_BY_RATIO} share of Σ |A|: its weight is not r")


def _most_important_first(result: ClippingResult, masks: Sequence[OneMask]) -> list[int]:
    """The numbers of some masks: the compared ones, the strictest and the loosest, then others
    between them; not the same mask on π′, nor those that block nothing.
    """
    compared, others = [], []
    for n, mask in enumerate(masks):
        if mask.row in result.leading:
            compared.append(n)
        elif mask.row.strictness and not result.is_twin(mask.row):
            others.append(n)
    # The others come from strict to loose: evenly spaced ones show the whole range.
    between = [others[round(step * (len(others) - 1))] for step in _STEPS if others]
    return list(dict.fromkeys([*compared, *between, *others]))[:_ROWS_ON_SCREEN]


def _same(masks: Sequence[OneMask]) -> str:
    """Which algorithms share a row, in words."""
    merged = [" = ".join((mask.row.name, *mask.others)) for mask in masks if mask.others]
    if not merged:
        return ""
    return f"Same result on these tokens: {'; '.join(merged)}. "


def _shares(result: ClippingResult) -> list[TextColumn[OneMask]]:
    """How much is blocked and lost, in percent."""
    columns: list[TextColumn[OneMask]] = _blocked(result, lambda mask: mask.row.blocked)
    if not result.has_advantages:
        return [*columns, *(_lost(f"lost {result.when(sign)}, %", sign) for sign in SIGNS)]
    hit: TextColumn[OneMask] = counted(
        "responses hit, %",
        "responses_touched",
        lambda mask: mask.row.responses_touched,
        priority=Priority.FULL,
    )
    return [*columns, _lost("lost update, %", "all"), hit]


def _blocked(result: ClippingResult, of: Callable[[R], BySign]) -> list[TextColumn[R]]:
    """Blocked tokens in percent: all, those with A > 0, and those with A < 0."""
    priority = Priority.SPARE if result.has_advantages else Priority.USUAL
    by_sign = [_of_sign(f"{result.when(sign)}, %", sign, of, priority) for sign in SIGNS]
    if not result.has_advantages:
        return by_sign
    return [_of_sign("blocked, %", "all", of, Priority.USUAL), *by_sign]


def _of_sign(title: str, sign: str, of: Callable[[R], BySign], priority: Priority) -> TextColumn[R]:
    return counted(title, "blocked", lambda row: of(row).of(sign), priority=priority)


def _lost(
    title: str, part: str, metric: str = "lost", priority: Priority = Priority.USUAL
) -> TextColumn[OneMask]:
    """A part of the lost update in percent, marked where it is not weighted by r."""

    def cell(mask: OneMask) -> str:
        lost = percent(mask.row.lost.of(part))
        marked = lost != numbers.MISSING and not mask.row.weighs_by_ratio
        return f"{lost} {_NOT_BY_RATIO}" if marked else lost

    return counted(title, metric, cell, str, priority)


def _lost_in_parts(result: ClippingResult) -> Table:
    """Where the lost update comes from; empty without advantages, which leave no total to break
    down.
    """
    lossy = [row for row in result.in_order if row.lost.all.value]
    title = "Breakdown of the lost update"
    return table(
        title,
        result.masks(lossy, _same_numbers),
        [
            text("algorithm", lambda mask: mask.label),
            _lost("A > 0, %", "positive", priority=Priority.SPARE),
            _lost("A < 0, %", "negative", priority=Priority.SPARE),
            _lost("by the mask, %", "masked", "masked"),
            _lost("by the cap, %", "capped", "capped"),
        ],
        note=(
            "A > 0 and A < 0 are shares of the update with that sign; mask and cap add up to the "
            "lost update."
        ),
        fold=title,
    )


def _formulas(result: ClippingResult) -> Table:
    return table(
        "When a token is blocked, and its weight if kept",
        result.in_order,
        [
            text("algorithm", lambda row: row.name),
            text("blocked when", lambda row: row.blocked_when),
            text("weight", lambda row: row.weight),
            text("source", lambda row: row.source),
        ],
        note="p, q and p′ are π, μ and π′ of the sampled token.",
        fold="Masks and weights as formulas",
        terminal_rows=0,
    )


def _breakdown(result: ClippingResult, mask: OneMask) -> list[Table]:
    """One algorithm by μ, position and, if there are several, step."""
    row, blocked = mask.row, _blocked_in_part(result)
    by_mu: list[TextColumn[BlockedInBin]] = [col("μ", mu_bin), *blocked]
    by_position: list[TextColumn[BlockedAtPositions]] = [col("position", span), *blocked]
    by_step: list[TextColumn[BlockedInSteps]] = [
        col("step", span),
        *blocked,
        counted("mean μ of blocked", "mu_blocked", lambda step: step.mu_blocked, plain),
        counted(
            "mean entropy of blocked, nats",
            "entropy_blocked",
            lambda step: step.entropy_blocked,
            plain,
            Priority.SPARE,
        ),
    ]
    tables = [
        _part(result, mask, "μ", row.by_mu, by_mu),
        _part(result, mask, "position", row.by_position, by_position),
    ]
    steps = _part(result, mask, "step", row.by_step, by_step)
    if len(steps.rows) > 1:
        tables.append(steps)
    return tables


def _blocked_in_part(result: ClippingResult) -> list[TextColumn[Part]]:
    shares: list[TextColumn[Part]] = _blocked(result, lambda row: row.blocked)
    return [col("tokens", lambda row: numbers.count(row.tokens)), *shares]


def _part(
    result: ClippingResult,
    mask: OneMask,
    by: str,
    rows: Sequence[P],
    columns: Sequence[TextColumn[P]],
) -> Table:
    """The parts with tokens; a terminal shows the compared pair only."""
    return table(
        f"{mask.label}, by {by}",
        occupied(rows),
        columns,
        fold=f"{mask.label}, by μ, position and step",
        terminal_rows=_ROWS_ON_TERMINAL if mask.row in result.leading else 0,
    )


def overlap_section(result: ClippingResult, examples: Sequence[Excerpt]) -> Section:
    """Which tokens two algorithms both block, and which only one of them blocks."""
    labels = {mask.row.name: mask.label for mask in result.blocking_masks}
    return Section(
        "Overlap",
        "Jaccard index: tokens that both algorithms block ÷ tokens that at least one blocks. 1 "
        "means the same tokens, 0 means no token in common.",
        tables=filled(_pairs(result, labels), _jaccard(result, labels)),
        excerpts=tuple(examples),
    )


def _pairs(result: ClippingResult, labels: Mapping[str, str]) -> Table:
    title = "Pairs of algorithms, in tokens"
    if not result.has_advantages:
        title += ", each for both signs"
    note = "The compared pair, pairs with one of the two, then the others, each by disagreement"
    others = len(result.pairs) - _PAIRS_ON_PAGE
    if others > 0:
        note += f"; the JSON has {others} more pairs"
    return table(
        title,
        result.pairs[:_PAIRS_ON_PAGE],
        [
            text("first", lambda pair: labels[pair.first]),
            text("second", lambda pair: labels[pair.second]),
            counted("both", "both", lambda pair: pair.both, numbers.count),
            counted("only first", "only_row", lambda pair: pair.only_first, numbers.count),
            counted("only second", "only_row", lambda pair: pair.only_second, numbers.count),
            counted("Jaccard", "jaccard", lambda pair: pair.jaccard, plain),
        ],
        note=f"{note}.",
        terminal_rows=_PAIRS_ON_TERMINAL,
    )


def _jaccard(result: ClippingResult, labels: Mapping[str, str]) -> Table:
    """All algorithms, compared with those shown in detail; empty without two of them."""
    overlap, beside = result.overlap, [mask.row.name for mask in result.detailed_masks]

    def beside_one(other: str) -> TextColumn[str]:
        return counted(
            labels[other], "jaccard", lambda name: overlap.pair(name, other).jaccard, number
        )

    return table(
        _JACCARD,
        labels if len(labels) > 1 and beside else (),
        [text("", lambda name: labels[name]), *map(beside_one, beside)],
        note="Without algorithms that block nothing. The JSON has all pairs, with intervals.",
        fold=_JACCARD,
        terminal_rows=0,
    )


def tokens_section(result: ClippingResult) -> Section:
    """Blocked tokens: their probability and entropy compared with kept tokens, and the most
    frequent ones.
    """
    tables = [_tokens(result, mask, sign) for mask in result.detailed_masks for sign in SIGNS]
    return Section(
        "Which tokens are blocked",
        "Blocked: of how many occurrences with that sign of A, and the rate. × over-represented: "
        "rate ÷ rate of all tokens with that sign, where chance among all tokens would make less "
        "than that in 19 of 20 traces; else —. A count alone favors frequent tokens. μ, π and r "
        "are means over the blocked occurrences.",
        tables=filled(*tables, _means(result)),
    )


def _means(result: ClippingResult) -> Table:
    note = "Means over blocked and over kept tokens: μ of the sampled token, entropy of π in nats."
    columns: list[TextColumn[OneMask]] = [
        text("algorithm", lambda mask: mask.label),
        counted("μ, blocked", "mu_blocked", lambda mask: mask.row.mu_blocked, plain),
        counted("μ, kept", "mu_kept", lambda mask: mask.row.mu_kept, plain, Priority.SPARE),
    ]
    if not result.has.entropy:
        note += " This trace has no entropy; probe records it."
    else:
        columns += [
            counted(
                "entropy, blocked", "entropy_blocked", lambda mask: mask.row.entropy_blocked, plain
            ),
            counted(
                "entropy, kept",
                "entropy_kept",
                lambda mask: mask.row.entropy_kept,
                plain,
                Priority.SPARE,
            ),
        ]
    return table("Mean probability and entropy", result.blocking_masks, columns, note=note)


def _tokens(result: ClippingResult, mask: OneMask, sign: str) -> Table:
    rows = mask.row.blocked_tokens.of(sign)
    others = len(rows) - _TOKENS_ON_PAGE
    return table(
        f"{mask.label}, {result.when(sign)}: most frequently blocked tokens",
        rows[:_TOKENS_ON_PAGE],
        [
            # The quotation marks show spaces at the ends of a token.
            text("token", lambda token: f"“{token.text}”", kind="token"),
            text("class", lambda token: str(token.class_), priority=Priority.SPARE),
            counted("blocked", "blocked_tokens", _of_occurrences, str),
            counted("rate, %", "rate", lambda token: token.rate),
            counted("× over-represented", "lift", lambda token: token.lift, number),
            counted("μ", "mu", lambda token: token.mu, number),
            counted("π", "pi", lambda token: token.pi, number),
            counted("r", "ratio", lambda token: token.ratio, number, Priority.SPARE),
        ],
        note=f"The JSON has {others} more." if others > 0 else "",
        fold=f"{mask.label}: most frequently blocked tokens",
        terminal_rows=_TOKENS_ON_TERMINAL if mask.row in result.leading else 0,
    )


def _of_occurrences(token: BlockedToken) -> str:
    return f"{numbers.count(token.blocked)} of {numbers.count(token.tokens)}"
