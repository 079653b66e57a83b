"""The answer of `clipstats`: how strict the compared algorithms are, what else decides between
them, and what to try next.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from mismatch_cli.base import numbers, registry
from mismatch_cli.base.errors import suggest
from mismatch_cli.metrics.clipping.blocked_rows import AlgorithmRow
from mismatch_cli.metrics.update_table import THEORY
from mismatch_cli.report.outline import Facts, Verdict, stated
from mismatch_cli.report.pages.clipping_thresholds import FAMILIES
from mismatch_cli.report.tables import in_words, number, share
from mismatch_cli.rules import trust_regions
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.studies.clipping_result import SIGNS, ClippingResult

_SAME = "EQUALLY STRICT"
_ALIKE = 1.05  # times as many blocked tokens still count as equally strict
_TERMS = ("surrogate", "correction", "quadratic_bound")  # of the theory
_GUIDE = ("Guide", "mismatch-cli guide choosing-a-threshold: what ε and δ limit")
_LATER = "score with a later trainer, where masks have something to block"


def verdict(result: ClippingResult) -> Verdict:
    """How much stricter one algorithm is, and the thresholds at which both are equally strict."""
    rows = sorted(result.leading, key=lambda row: -row.strictness)
    if not rows:
        return Verdict("NOTHING JUDGED", "No algorithm can be applied to this trace.")
    if result.nothing_to_block:
        why = "Every advantage is 0, so there is no update."
        if not result.counts.zero_advantage:
            why = "No token counts: each is masked, or lacks a column that is needed."
        return Verdict("NOTHING TO BLOCK", why)
    high, low = rows[0].strictness, rows[-1].strictness
    if not high:
        names = " and ".join(result.compared)
        return Verdict("NOTHING BLOCKED", f"{names} would keep every update of this trace.")
    words = "ONLY ONE BLOCKS"
    if len(rows) == 1:
        words = f"{numbers.share(high)[0]} BLOCKED"
    elif high <= _ALIKE * low:
        words = _SAME
    elif low:
        words = f"{numbers.number(high / low, 2)} × AS STRICT"
    shares = ", ".join(_share_blocked(result, row) for row in rows)
    return Verdict(words, " ".join((f"{shares}.", *_equal(result))))


def _share_blocked(result: ClippingResult, row: AlgorithmRow) -> str:
    """`grpo-clip-higher blocks 3.30 % (mean μ 0.343)`."""
    shares = share(row.blocked.all)
    if not result.has_advantages:
        by_sign = [f"{share(row.blocked.of(sign))} {result.when(sign)}" for sign in SIGNS]
        shares = " and ".join(by_sign)
    mean = number(row.mu_blocked)
    mean_mu = "" if mean == numbers.MISSING else f" (mean μ {mean})"
    return f"{row.name} blocks {shares}{mean_mu}"


def _equal(result: ClippingResult) -> Iterator[str]:
    """The equally strict threshold of another family for each compared algorithm."""
    pairs = []
    for row, family, value in result.equally_strict:
        pairs.append(f"{row.algorithm} and {FAMILIES[family].short} = {numbers.number(value)}")
    if pairs:
        yield f"Equally strict: {'; '.join(pairs)}."


def remarks(result: ClippingResult) -> Facts:
    """What the shares do not say, and where a threshold is explained."""
    return stated(
        (
            ("Overlap", _overlap(result)),
            ("Bad updates", _bad_updates(result)),
            ("Theory", _theory(result)),
            _GUIDE,
        )
    )


def _overlap(result: ClippingResult) -> str:
    if len(result.compared) < 2 or not any(row.strictness for row in result.leading):
        return ""
    pair, count = result.overlap.pair(*result.compared), numbers.count
    return (
        f"{numbers.things(pair.both, 'token')} blocked by both, "
        f"{count(pair.only_first)} only by {pair.first}, "
        f"{count(pair.only_second)} only by {pair.second} (Jaccard {number(pair.jaccard)})"
    )


def _bad_updates(result: ClippingResult) -> str:
    bad = result.bad_updates
    if bad.over_negative.value is None:
        return ""
    where = "of tokens with A < 0" if result.has_advantages else "of tokens, if A < 0"
    return f"{share(bad.over_negative)} {where}: pushed down after losing ≥ {bad.delta:g}"


def _theory(result: ClippingResult) -> str:
    if result.theory is None:
        return ""
    terms = []
    for key in _TERMS:
        value, _ = in_words(THEORY[key], result.theory.term(key))
        terms.append(f"{THEORY[key].label} {value}")
    return ", ".join(terms)


def next_commands(result: ClippingResult, runs: Sequence[Path]) -> Facts:
    """What is worth a try, and the full output."""
    full = suggest("clipstats", *runs, "--full")
    return (_trial(result, runs), (full, "every algorithm, bin, step and token"))


def _trial(result: ClippingResult, runs: Sequence[Path]) -> tuple[str, str]:
    """The first compared algorithm against another family at equal strictness, or what gives a
    trace in which masks differ.
    """
    if result.nothing_to_block and result.counts.zero_advantage:
        return suggest("curate", "MODEL", "--prompts", "FILE"), "problems solved only sometimes"
    if result.nothing_to_block:
        return suggest("diagnose", *runs), "why no token counts"
    if result.has.recomputed == "equal weights":
        return suggest(
            "rescore", *runs[:1], "--trainer-model", "LATER", "--weights", "newer"
        ), _LATER
    # Algorithms that block alike differ, if at all, in what training makes of them.
    if verdict(result).words == _SAME and all(map(_can_be_typed, result.compared)):
        flags: list[str] = []
        for name in result.compared:
            flags += ("-a", name)
        return suggest("train", *flags), "equally strict: which learns more?"
    for row, family, value in result.equally_strict:
        if _can_be_typed(row.algorithm):
            rival = f"{FAMILIES[family].typed}={value:.3g}"
            line = suggest("clipstats", *runs, "-a", row.algorithm, "-a", rival)
            return line, "equally strict: which tokens differ?"
    return suggest("clipstats", *runs, "-a", "dppo-binary-tv:delta=0.05"), "another δ"


def _can_be_typed(name: str) -> bool:
    """Whether a command line can name an algorithm as it is named here."""
    # One from a user's file has to be typed as a path, which the result does not have.
    return name.partition(":")[0] in {*TABLE, *registry.names(trust_regions.PACKAGE)}
