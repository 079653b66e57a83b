"""The screen of a search: ranked causes, distances between legs, the verdict and what to type
next.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import shorten
from types import SimpleNamespace

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.base.json_form import from_json
from mismatch_cli.bisect.decoding import (
    DECODING_FARTHER,
    EQUAL,
    PREFILL_FARTHER,
    ROUNDING,
    UNDECIDED,
)
from mismatch_cli.bisect.ranking import EXPLAINED, LEAST
from mismatch_cli.bisect.studies.bisection import BisectionAnalysis
from mismatch_cli.report.about import left_out_of, subject_lines
from mismatch_cli.report.tables import Row, col, named, parts, table, text, value_of
from mismatch_cli.report.view import Facts, Screen, Status, Table, Verdict
from mismatch_cli.trace.origin import About

_MOST = 6  # causes
# Letters of a line, of the numbers in it, and of what to change
_WIDTH, _NUMBERS, _SHORTEST = 80, 18, 24
_REASON = 64  # letters
_SEEN = 0.005  # of a gap
_LARGER = 3  # settings that make it larger
_MOSTLY = 0.5  # of the gap
# Why decoding and prefill are apart
DECODE_PREFILL = {
    ROUNDING: "kernels for few rows add in a different order; both are as far from float32",
    DECODING_FARTHER: "decoding is farther from float32; look at the KV cache",
    PREFILL_FARTHER: "the prefill is farther from float32",
    UNDECIDED: "rounding and a fault cannot be told apart here",
}
_NEARER = {
    "rollout": "the engine is closer to float32",
    "trainer": "the trainer is closer to float32",
}


def screen(analysis: BisectionAnalysis) -> Screen:
    """The effect of each cause, what else was tried, and the command that proves the first
    cause.
    """
    words, status = _words(analysis)
    return Screen(
        subject=subject_lines(
            from_json(About, analysis.result["about"]), SimpleNamespace(**counts(analysis))
        ),
        notes=left_out_of(from_json(About, analysis.result["about"])),
        tables=(_causes(analysis),) if analysis.causes else (),
        remarks=tuple(_remarks(analysis)),
        verdict=Verdict(words, f"{analysis.verdict} {combined(analysis)}".strip(), status),
        next=_next(analysis),
    )


def counts(analysis: BisectionAnalysis) -> dict[str, int | bool]:
    """How much was measured."""
    result = analysis.result
    return {name: result[name] for name in ("tokens", "responses", "prompts")} | {
        "prompts_exact": True
    }


def _words(analysis: BisectionAnalysis) -> tuple[str, Status]:
    """How the models differ comes first, then what was measured."""
    if analysis.is_equal:
        return "NO GAP", "good"
    words, status = _of_shares(analysis)
    parts = [*filter(None, (words,))]
    if analysis.differences:
        parts.insert(0, "THE MODELS DIFFER")
    if not analysis.is_finished:
        parts.append("NOT FINISHED")
    return ", ".join(parts), status if parts == [words] else "bad"


def _of_shares(analysis: BisectionAnalysis) -> tuple[str, Status]:
    """What the shares say; nothing where no cause was named and the models or the budget say
    why.
    """
    named, left = len(analysis.named), analysis.unexplained.value or 0.0
    if named:
        causes = f"{numbers.things(named, 'cause').upper()} FOUND"
        if left <= max(EXPLAINED, _noise(analysis)):
            return causes, "mixed"
        if analysis.is_finished:
            causes += ", NOT ALL EXPLAINED"
        return causes, "bad"
    if analysis.floor is not None:
        return "PRECISION ONLY", "mixed"
    if _noise(analysis) >= _MOSTLY:
        return "MOSTLY NOISE", "mixed"
    if analysis.differences or not analysis.is_finished:
        return "", "bad"
    return "NO CAUSE FOUND", "bad"


def _noise(analysis: BisectionAnalysis) -> float:
    return 0.0 if analysis.noise is None else analysis.noise.value or 0.0


def cost(row: Row) -> str:
    """The factor by which the change slows a response."""
    return numbers.times(row["cost"]["factor"]) if row["cost"] else numbers.MISSING


def _causes(analysis: BisectionAnalysis) -> Table:
    rows = analysis.result["causes"]
    shown = rows[:_MOST]
    room = max(_SHORTEST, _WIDTH - max(len(row["name"]) for row in shown) - _NUMBERS)
    return table(
        "",
        shown,
        [
            named("cause", "name"),
            col("share, %", lambda row: rounded(row["share"])),
            col("nats", lambda row: numbers.number(value_of(row["effect"]["abs_d"]), 2)),
            col("cost", cost, optional=True),
            text("what to change", lambda row: clause(row["change"], room)),
        ],
        note=f"{len(rows) - _MOST} more with --full." if len(rows) > _MOST else "",
    )


def clause(words: str, most: int) -> str:
    """The words before a colon, a bracket or an alternative, shortened to `most` letters."""
    return shorten(
        words.partition(": ")[0].partition(" (")[0].partition(", or ")[0], most, placeholder="…"
    )


def rounded(found: Row) -> str:
    """A share in percent without decimals, as the verdict has it: `56 ± 3`."""
    value, low, high = parts(found)
    spread = "" if low is None or high is None else f" ± {50 * (high - low):.0f}"
    return numbers.MISSING if value is None else f"{100 * value:.0f}{spread}".replace("-", "−")


def _remarks(analysis: BisectionAnalysis) -> Iterator[tuple[str, str]]:
    larger = [row for row in analysis.result["tested"] if makes_larger(row)]
    larger.sort(key=lambda row: value_of(row["share"]) or 0.0)
    if larger:
        yield "Makes it larger", "; ".join(map(_larger, larger[:_LARGER]))
    others = [
        row for row in analysis.result["tested"] if row["stage"] < 3 and not makes_larger(row)
    ]
    settings = dict.fromkeys(row["setting"] for row in others)
    if left := [
        setting
        for setting in settings
        if setting not in {row["setting"] for row in analysis.result["causes"]}
    ]:
        yield "Not a cause", ", ".join(left)
    if untried := dict.fromkeys(row["setting"] for row in analysis.result["untried"]):
        yield "Not tried", f"{', '.join(untried)} (--full says why)"
    if analysis.search.modules:
        yield "Modules", _modules(analysis.search.modules)
    yield from _distances(analysis)
    yield "Stages", " · ".join(_stages(analysis.result["stages"]))


def _modules(found: Row) -> str:
    """The kinds of modules that cause most of the gap that remains after settings."""
    kinds = [
        row
        for row in found["grafts"]
        if row["kind"] != "all" and (value_of(row["share"]) or 0.0) >= _SEEN
    ]
    kinds.sort(key=lambda row: -(value_of(row["share"]) or 0.0))
    shares = (
        f"{row['kind']} {100 * (value_of(row['share']) or 0.0):.0f} %" for row in kinds[:_LARGER]
    )
    different = sum(row["relation"] == "different" for row in found["isolated"])
    gap = (
        f" of {numbers.number(found.get('gap'), 2)} nats that remain after settings"
        if kinds
        else ""
    )
    makes = f"{', '.join(shares) or 'none causes a gap'}{gap}"
    return (
        f"{makes}; {numbers.things(different, 'module') if different else 'none'} beyond rounding"
    )


def _larger(row: Row) -> str:
    turned = "" if row["better"] is None else f" = {row['better']}"
    return f"{row['name']}{turned}, +{-100 * row['share']['value']:.0f} %"


def makes_larger(row: Row) -> bool:
    """Whether a change clearly enlarges the gap by enough to mention."""
    value, _, high = parts(row["share"])
    return value is not None and value <= -LEAST and (high is None or high < 0)


def _distances(analysis: BisectionAnalysis) -> Iterator[tuple[str, str]]:
    """Distances in lines: the gap and the noise, decoding against prefill, and both sides
    against float32.
    """
    found = analysis.result["triangle"]
    noise = [
        f"{side} {_nats(found[key])}"
        for side, key in (("engine", "rollout_noise"), ("trainer", "trainer_noise"))
        if found[key]
    ]
    apart = f"{_nats(found['as_recorded'])} nats"
    yield "Engine – trainer", f"{apart}; noise: {', '.join(noise)}" if noise else apart
    if found["decode_prefill"]:
        yield "Decode – prefill", _decode_prefill(found)
    if found["trainer_reference"]:
        sides = [("engine", "rollout_reference"), ("trainer", "trainer_reference")]
        both = ", ".join(
            f"{side} {numbers.number(value_of(found[key]))}" for side, key in sides if found[key]
        )
        yield (
            "To float32",
            f"{both} nats{': ' + _NEARER[found['nearer']] if found['nearer'] else ''}",
        )


def _decode_prefill(found: Row) -> str:
    """How far the engine's two ways to read the same tokens are apart, and why."""
    what = found["decode_prefill_is"]
    if what == EQUAL:
        return f"{_nats(found['decode_prefill'])} nats: the engine decodes as it prefills"
    apart = f"{_nats(found['decode_prefill'])} nats, the engine alone"
    return f"{apart}: {DECODE_PREFILL[what]}" if what in DECODE_PREFILL else apart


def _nats(found: Row) -> str:
    return numbers.number(value_of(found), 2)


def _stages(rows: Sequence[Row]) -> Iterator[str]:
    """Each stage with its seconds; runs of skipped stages with the reason."""
    for why, stages in groupby(
        rows, key=lambda row: "" if row["status"] == "done" else row["why"] or row["status"]
    ):
        if why:
            yield f"{', '.join(row['name'] for row in stages)}: {clause(why, _REASON)}"
        else:
            yield from (f"{row['name']} {numbers.number(row['seconds'], 2)} s" for row in stages)


def combined(analysis: BisectionAnalysis) -> str:
    """What the causes explain together, and whether their shares overlap; empty for a single
    cause.
    """
    found, overlap, sentences = analysis.result["together"], analysis.overlap or 0.0, []
    if analysis.is_equal:
        return ""
    if found is not None:
        sentences.append(
            f"Together {' and '.join(found['settings'])} explain {rounded(found['share'])} % of "
            "the gap."
        )
    if overlap > LEAST:
        sentences.append(
            f"The shares of all causes overlap: they add up to {100 * overlap:.0f} % more than "
            "they explain together."
        )
    return " ".join(sentences)


def command(analysis: BisectionAnalysis, *flags: str) -> str:
    """The command that shows a search again from what it has measured."""
    return suggest("bisect", "--output", analysis.folder, "--resume", *flags)


def _next(analysis: BisectionAnalysis) -> Facts:
    lines = [(command(analysis, "--full"), "all effects and legs, and the tokens that move")]
    if not analysis.is_finished:
        lines.insert(0, (_resumed(analysis), "test the rest: nothing is read twice"))
    for row in analysis.result["causes"][:1]:
        shows = (f"the effect of {row['setting']} on the same tokens", "the same on new samples")
        lines += zip(row["command"], shows, strict=False)
    return tuple(lines)


def _resumed(analysis: BisectionAnalysis) -> str:
    flags: list[str] = []
    if analysis.larger_budget is not None:
        flags = ["--budget", f"{analysis.larger_budget:g}"]
    return command(analysis, *flags)
