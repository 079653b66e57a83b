"""What each algorithm blocks: in total, by probability, position and step, compared with others,
and which tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from mismatch_cli.base import numbers
from mismatch_cli.metrics.update_table import CLIPPING
from mismatch_cli.report.pages.clipping_subject import SIGNS, Subject, counted, when
from mismatch_cli.report.pages.clipping_thresholds import same_strictness
from mismatch_cli.report.tables import (
    Col,
    Row,
    col,
    filled,
    keyed,
    mu_bin,
    named,
    number,
    percent,
    plain,
    span,
    table,
    text,
    value_of,
)
from mismatch_cli.report.view import Excerpt, Section, Table
from mismatch_cli.studies.clipping import OneMask

_ROWS_ON_TERMINAL = 12
_PAIRS_ON_TERMINAL, _PAIRS_ON_PAGE = 10, 20
_TOKENS_ON_TERMINAL, _TOKENS_ON_PAGE = 10, 25
_JACCARD = "Jaccard index of pairs of algorithms"
NOT_BY_RATIO = "†"
_DETAILS = (
    " Bins, steps and tokens are shown for the compared algorithms; of any other: clipstats -a "
    "NAME, or --json."
)
ROW_KEYS = ("blocked", "lost", "weighs_by_ratio")  # rows of a table that agree in these are merged


def algorithms_section(subject: Subject) -> Section:
    """Blocked tokens and lost update of all algorithms, the named or compared ones in detail, then
    equal strictness and formulas.
    """
    details = [part for mask in subject.detailed for part in _breakdown(subject, mask)]
    return Section(
        "What each algorithm blocks",
        _algorithms_text(subject),
        tables=filled(
            _overview(subject),
            *details,
            same_strictness(subject),
            _lost_in_parts(subject),
            _formulas(subject),
        ),
    )


def _algorithms_text(subject: Subject) -> str:
    words = (
        "A blocked token contributes nothing to the update. Lost update is the share of Σ r·|A| "
        "that no longer enters it; it is not a gradient norm, which would need the directions of "
        "the updates. "
    )
    if not all(row["weighs_by_ratio"] for row in subject.rows):
        words += f"Rows with {NOT_BY_RATIO} are not weighted by r; they show the share of Σ |A|, without r. "
    if not subject.has_advantages:
        words += (
            "The trace has no advantages: every token is judged twice, with A = 1 and with A = −1. "
        )
    words += (
        "The anchor is the policy with which the mask compares the trainer: the rollout's μ, or "
        "π′, recomputed by the trainer at the weights that sampled."
    )
    others = len(subject.masks(subject.blocking)) - len(subject.detailed)
    return words + (_DETAILS if others else "")


def _overview(subject: Subject) -> Table:
    masks = subject.masks(subject.rows, *ROW_KEYS)
    masks.sort(key=lambda mask: (mask.row not in subject.leading, -subject.strictness(mask.row)))
    return table(
        "Blocked tokens and lost update",
        masks,
        [
            text("algorithm", lambda mask: mask.label),
            text("anchor", lambda mask: str(mask.row["anchor"]), optional=True),
            *share_columns(subject),
        ],
        note=(
            "± is half the 95 % interval over prompts; none for fewer than 10 prompts, or where "
            f"all prompts agree. {_same(masks)}For the rules: mismatch-cli algorithms."
        ),
    )


def share_columns(subject: Subject, *, fewest: bool = False) -> list[Col[OneMask]]:
    """How much is blocked and lost, in percent; `fewest` leaves out the share of responses."""
    lost = [_lost(f"lost {when(sign, False)}, %", sign) for sign in SIGNS[1:]]
    if subject.has_advantages:
        lost = [_lost("lost update, %", "all")]
        lost += [] if fewest else [counted("responses hit, %", "responses_touched", optional=True)]
    return list(map(_of_row, (*_blocked(subject), *lost)))


def _of_row(column: Col[Row]) -> Col[OneMask]:
    """A column of algorithms in a table of masks."""
    return Col(column.head, lambda mask: column.cell(mask.row))


def _same(masks: Sequence[OneMask]) -> str:
    """Which algorithms share a row, in words."""
    merged = [f"{mask.row['name']} = {' = '.join(mask.others)}" for mask in masks if mask.others]
    return f"Same result on these tokens: {'; '.join(merged)}. " if merged else ""


def _blocked(subject: Subject) -> list[Col[Row]]:
    """Blocked tokens in percent: all, those with A > 0, and those with A < 0."""

    def of_sign(sign: str) -> Col[Row]:
        title = "blocked" if sign == "all" else when(sign, subject.has_advantages)
        optional = subject.has_advantages and sign != "all"
        return col(
            f"{title}, %",
            lambda row: percent(row["blocked"][sign]),
            CLIPPING["blocked"],
            optional=optional,
        )

    return [of_sign(sign) for sign in subject.signs]


def _lost(title: str, key: str, metric: str = "lost", *, optional: bool = False) -> Col[Row]:
    """A part of the lost update in percent, marked where it is not weighted by r."""

    def cell(row: Row) -> str:
        found = percent(row["lost"][key])
        return (
            found
            if row["weighs_by_ratio"] or found == numbers.MISSING
            else f"{found} {NOT_BY_RATIO}"
        )

    return col(title, cell, CLIPPING[metric], optional=optional)


def _lost_in_parts(subject: Subject) -> Table:
    """Where the lost update comes from; empty without advantages, which leave no total to break
    down.
    """
    lossy = [row for row in subject.rows if subject.has_advantages and value_of(row["lost"]["all"])]
    return table(
        "Breakdown of the lost update",
        subject.masks(lossy, *ROW_KEYS),
        [
            text("algorithm", lambda mask: mask.label),
            *map(
                _of_row,
                (
                    _lost("A > 0, %", "positive", optional=True),
                    _lost("A < 0, %", "negative", optional=True),
                    _lost("by the mask, %", "masked", "masked"),
                    _lost("by the cap, %", "capped", "capped"),
                ),
            ),
        ],
        note=(
            "A > 0 and A < 0 are shares of the update with that sign; mask and cap add up to the "
            "lost update."
        ),
        fold="Breakdown of the lost update",
    )


def _formulas(subject: Subject) -> Table:
    return table(
        "When a token is blocked, and its weight if kept",
        subject.rows,
        [
            named("algorithm", "name"),
            named("blocked when", "blocked_when"),
            named("weight", "weight"),
            named("source", "source"),
        ],
        note="p, q and p′ are π, μ and π′ of the sampled token.",
        fold="Masks and weights as formulas",
        terminal_rows=0,
    )


def _breakdown(subject: Subject, mask: OneMask) -> list[Table]:
    """One algorithm by μ, position and step; a terminal shows the compared pair only."""
    row = mask.row

    def part(by: str, key: str, name: Callable[[Row], str], *means: Col[Row]) -> Table:
        return table(
            f"{mask.label}, by {by}",
            [cell for cell in row[key] if cell["tokens"]],
            [col(by, name), keyed("tokens", "tokens", numbers.count), *_blocked(subject), *means],
            fold=f"{mask.label}, by μ, position and step",
            terminal_rows=_ROWS_ON_TERMINAL if row in subject.leading else 0,
        )

    means = (
        counted("mean μ of blocked", "mu_blocked", plain),
        counted("mean entropy of blocked, nats", "entropy_blocked", plain, optional=True),
    )
    steps = part("step", "by_step", span, *means)
    parts = [part("μ", "by_mu", mu_bin), part("position", "by_position", span), steps]
    return parts if len(steps.rows) > 1 else parts[:2]


def overlap_section(subject: Subject, examples: Sequence[Excerpt]) -> Section:
    """Which tokens two algorithms both block, and which only one of them blocks."""
    overlap = subject.result["overlap"]
    place = {name: number for number, name in enumerate(overlap["names"])}
    masks = [mask for mask in subject.masks(subject.blocking) if mask.row["name"] in place]
    places = {place[mask.row["name"]]: mask.label for mask in masks}
    tables = [_pairs(subject, overlap, places)] if len(places) > 1 else []
    if tables and subject.detailed:
        tables.append(_jaccard(subject, overlap, places))
    return Section(
        "Overlap",
        "Jaccard index: tokens that both algorithms block ÷ tokens that at least one blocks. 1 "
        "means the same tokens, 0 means no token in common.",
        tables=tuple(tables),
        excerpts=tuple(examples),
    )


def _pairs(subject: Subject, overlap: Row, places: Mapping[int, str]) -> Table:
    names, only = overlap["names"], overlap["only_row"]
    leading = {row["name"] for row in subject.leading}

    def interest(pair: tuple[int, int]) -> tuple[int, int]:
        """Sorts the compared pair first, then pairs that disagree on many tokens."""
        i, j = pair
        return -sum(names[place] in leading for place in pair), -(only[i][j] + only[j][i])

    pairs = sorted(combinations(places, 2), key=interest)
    left = len(pairs) - _PAIRS_ON_PAGE
    return table(
        "Pairs of algorithms, in tokens"
        + ("" if subject.has_advantages else ", each for both signs"),
        pairs[:_PAIRS_ON_PAGE],
        [
            text("first", lambda pair: places[pair[0]]),
            text("second", lambda pair: places[pair[1]]),
            col(
                "both",
                lambda pair: numbers.count(overlap["both"][pair[0]][pair[1]]),
                CLIPPING["both"],
            ),
            col(
                "only first",
                lambda pair: numbers.count(only[pair[0]][pair[1]]),
                CLIPPING["only_row"],
            ),
            col(
                "only second",
                lambda pair: numbers.count(only[pair[1]][pair[0]]),
                CLIPPING["only_row"],
            ),
            col(
                "Jaccard",
                lambda pair: plain(overlap["jaccard"][pair[0]][pair[1]]),
                CLIPPING["jaccard"],
            ),
        ],
        note="The compared pair, pairs with one of the two, then the others, each by disagreement"
        + (f"; the JSON has {left} more pairs." if left > 0 else "."),
        terminal_rows=_PAIRS_ON_TERMINAL,
    )


def _jaccard(subject: Subject, overlap: Row, places: Mapping[int, str]) -> Table:
    """All algorithms, compared with those shown in detail."""
    detailed = {mask.label for mask in subject.detailed}

    def beside(other: int) -> Col[int]:
        return col(
            places[other],
            lambda place: number(overlap["jaccard"][place][other]),
            CLIPPING["jaccard"],
        )

    return table(
        _JACCARD,
        places,
        [
            text("", lambda place: places[place]),
            *(beside(place) for place, label in places.items() if label in detailed),
        ],
        note="Without algorithms that block nothing. The JSON has all pairs, with intervals.",
        fold=_JACCARD,
        terminal_rows=0,
    )


def tokens_section(subject: Subject) -> Section:
    """Blocked tokens: their probability and entropy compared with kept tokens, and the most
    frequent ones.
    """
    return Section(
        "Which tokens are blocked",
        "Blocked: of how many occurrences with that sign of A, and the rate. × over-represented: "
        "rate ÷ rate of all tokens with that sign, where chance among all tokens would make less "
        "than that in 19 of 20 traces; else —. A count alone favors frequent tokens. μ, π and r "
        "are means over the blocked occurrences.",
        tables=filled(
            *(_tokens(subject, mask, sign) for mask in subject.detailed for sign in SIGNS[1:]),
            _means(subject),
        ),
    )


def _means(subject: Subject) -> Table:
    entropy = subject.result["has"]["entropy"]
    columns = [
        counted("μ, blocked", "mu_blocked", plain),
        counted("μ, kept", "mu_kept", plain, optional=True),
    ]
    if entropy:
        columns.append(counted("entropy, blocked", "entropy_blocked", plain))
        columns.append(counted("entropy, kept", "entropy_kept", plain, optional=True))
    return table(
        "Mean probability and entropy",
        subject.masks(subject.blocking),
        [text("algorithm", lambda mask: mask.label), *map(_of_row, columns)],
        note=(
            "Means over blocked and over kept tokens: μ of the sampled token, entropy of π in nats."
        )
        + ("" if entropy else " This trace has no entropy; probe records it."),
    )


def _of_occurrences(token: Row) -> str:
    return f"{numbers.count(token['blocked'])} of {numbers.count(token['tokens'])}"


def _tokens(subject: Subject, mask: OneMask, sign: str) -> Table:
    row = mask.row
    left = len(row["blocked_tokens"][sign]) - _TOKENS_ON_PAGE
    return table(
        f"{mask.label}, {when(sign, subject.has_advantages)}: most frequently blocked tokens",
        row["blocked_tokens"][sign][:_TOKENS_ON_PAGE],
        [
            # Quoted, so that spaces at its ends show
            text("token", lambda token: f"“{token['text']}”", kind="token"),
            named("class", "class", optional=True),
            col("blocked", _of_occurrences, CLIPPING["blocked_tokens"]),
            counted("rate, %", "rate"),
            counted("× over-represented", "lift", number),
            counted("μ", "mu", number),
            counted("π", "pi", number),
            counted("r", "ratio", number, optional=True),
        ],
        note=f"The JSON has {left} more." if left > 0 else "",
        fold=f"{mask.label}: most frequently blocked tokens",
        terminal_rows=_TOKENS_ON_TERMINAL if row in subject.leading else 0,
    )
