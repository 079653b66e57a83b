"""Expert routing on the page of a trace: which tokens flip, where, and how much of the gap they
carry.
"""

from mismatch_cli.base import numbers
from mismatch_cli.metrics.route_flips import ROUTING, FlipsRow, RoutingSummary
from mismatch_cli.report.outline import Facts, MetricGroup, Section, Table
from mismatch_cli.report.tables import (
    col,
    filled,
    in_words,
    metric_row,
    mu_bin,
    occupied,
    percent,
    plain,
    table,
)

_TEXT = (
    "A router sends each token to the experts with the largest logits. Where two logits nearly "
    "tie, rounding decides, and engine and trainer may choose different experts: a flip. Flips "
    "at small margins come from rounding; flips at ordinary margins mean that the routing "
    "differs (weights, top-k, a stale capture)."
)
_OWN = (
    "`mismatch-cli rescore RUN --replay-routes` sends the trainer's tokens to the engine's "
    "experts (R3); then `mismatch-cli compare` shows how much of the gap that removes."
)
_REPLAYED = (
    "The trainer's tokens went to the engine's experts (R3); the counts are of the experts that "
    "its own routers would have chosen."
)
_LIKE_ALL = 0.5  # of the usual margin: a flip above it is not a near tie
_MANY = 16  # layers


def routing_section(routing: RoutingSummary | None) -> Section:
    """What the routers did; empty where no routes were recorded."""
    if routing is None:
        return Section("Routing")
    rows = tuple(metric_row(metric, routing.metrics[key]) for key, metric in ROUTING.items())
    text = f"{_TEXT} {_ties(routing)} {_REPLAYED if routing.replayed else _OWN}"
    groups = (MetricGroup("Experts of engine and trainer", rows),)
    tables = filled(_by_flips(routing), _by_mu(routing), _by_layer(routing))
    return Section("Routing", text, groups, tables=tables)


def routing_remark(routing: RoutingSummary | None) -> Facts:
    """For the screen: the share of flipped tokens, and their share of the gap."""
    if routing is None:
        return ()
    flipped, share = (
        in_words(ROUTING[key], routing.metrics[key])[0]
        for key in ("flipped_tokens", "share_of_gap")
    )
    replayed = " (replayed)" if routing.replayed else ""
    text = f"{flipped} of the tokens get different experts{replayed} and carry {share} of the gap"
    return (("Routing", text),)


def _ties(routing: RoutingSummary) -> str:
    """Whether flips are near ties."""
    shares = [row.flipped.value or 0.0 for row in occupied(routing.layers)]
    flipped, agreeing = routing.margins.flipped.p50, routing.margins.agreeing.p50
    # A choice by biased scores has no margin of logits, whether it flips or not.
    unknown = "These routers choose by biased scores, so the margins of flips are unknown."
    if flipped is None:
        return unknown if any(shares) else "No router flips."
    if agreeing is None:
        if any(share < 1 for share in shares):
            return unknown
        return (
            "Every router flips at every token: the routing differs, or the experts are numbered "
            "differently."
        )
    conclusion = "these are not near ties"
    if flipped < _LIKE_ALL * agreeing:
        conclusion = "rounding decides near ties"
    at_flips, elsewhere = numbers.number(flipped, 2), numbers.number(agreeing, 2)
    return (
        f"Here the median margin is {at_flips} where routers flip and {elsewhere} where they "
        f"agree: {conclusion}."
    )


def _by_flips(routing: RoutingSummary) -> Table:
    abs_d, of_gap = ROUTING["abs_d_flipped"], ROUTING["share_of_gap"]
    return table(
        "By number of flipped layers",
        occupied(routing.by_flips),
        [
            col("layers", _layers),
            col("tokens", lambda row: numbers.count(row.tokens)),
            col("mean |Δlog p|", lambda row: plain(row.abs_d_mean), abs_d),
            col("of the gap, %", lambda row: percent(row.share_of_gap), of_gap),
        ],
    )


def _by_mu(routing: RoutingSummary) -> Table:
    return table(
        "By rollout probability",
        occupied(routing.by_mu),
        [
            col("μ", mu_bin),
            col("tokens", lambda row: numbers.count(row.tokens)),
            col("flipped, %", lambda row: percent(row.flipped), ROUTING["flipped_tokens"]),
        ],
    )


def _by_layer(routing: RoutingSummary) -> Table:
    layers = occupied(routing.layers)
    agreement = ROUTING["agreement"]
    return table(
        "By layer",
        layers,
        [
            col("layer", lambda row: str(row.layer)),
            col("flipped, %", lambda row: percent(row.flipped), ROUTING["flipped_routers"]),
            col("experts in common, %", lambda row: percent(row.agreement), agreement),
            col("same first expert, %", lambda row: percent(row.same_first)),
        ],
        # The layers of a deep model would push everything after them off the page.
        fold="By layer" if len(layers) > _MANY else "",
        terminal_rows=_MANY,
    )


def _layers(row: FlipsRow) -> str:
    if row.high is None:
        return f"{row.low} or more"
    if row.low == row.high:
        return str(row.low)
    return f"{row.low} – {row.high}"
