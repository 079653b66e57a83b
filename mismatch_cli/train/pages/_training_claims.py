"""Whether one algorithm learns faster than another: the screen of one comparison, and the table
of all of them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.update_table import TRAINING
from mismatch_cli.report.tables import col, percent, plain, table, text
from mismatch_cli.report.view import Facts, Screen, Status, Table, Verdict
from mismatch_cli.train.pages._training_screen import by_how_much, how_paired, profiles, subject
from mismatch_cli.train.studies.common_steps import in_words
from mismatch_cli.train.studies.learning_speed import (
    AREA,
    BAD_OF_ALL,
    BAD_OF_NEGATIVE,
    CONTRADICTED,
    FINAL,
    NO_INTERVAL,
    NOT_MEASURED,
    NOT_SHOWN,
    ONE_SEED_EACH,
    SECONDS,
    SHOWN,
    STEPS,
    Claim,
    ClaimRow,
    Measure,
)
from mismatch_cli.train.studies.runs import named_by
from mismatch_cli.train.studies.training import TrainingAnalysis

_NAMED = 3  # runs that a sentence names
_STATUS: dict[str, Status] = {SHOWN: "good", CONTRADICTED: "bad"}
_SIGNS = {SHOWN: "✔ ", CONTRADICTED: "✘ "}
_IN_PERCENT = {BAD_OF_ALL.key: "bad, % of A ≠ 0", BAD_OF_NEGATIVE.key: "bad, % of A < 0"}
_LABELS = _IN_PERCENT | {
    AREA.key: "area (mean reward)",
    STEPS.key: "steps to {}",
    SECONDS.key: "seconds to {}",
}
_SENTENCES = {
    SHOWN: "{own} learns faster than {rival}",
    CONTRADICTED: "{own} learns more slowly than {rival}",
    NOT_SHOWN: "The seeds do not decide whether {own} learns faster than {rival}",
    ONE_SEED_EACH: "One seed does not decide whether {own} learns faster than {rival}",
    NO_INTERVAL: "All seeds differ equally, so it is open whether {own} learns faster than {rival}",
}
_DECIDES = "The area decides; the other rows describe it."


class _Row(NamedTuple):
    """A row of a table: one measure of a claim."""

    claim: Claim
    of: ClaimRow


def claims_screen(study: TrainingAnalysis, notes: tuple[str, ...]) -> Screen:
    """One comparison in a screen: every measure of it, or the area in each of several settings."""
    claims, runs = study.claims, study.claimed_runs
    both = TrainingAnalysis(runs)
    if len(claims) == 1:
        (claim,) = claims
        return Screen(
            subject=subject(both),
            notes=notes,
            tables=(_measures(claim),),
            remarks=_remarks(claim),
            profiles=profiles(both),
            verdict=_verdict(claim),
            next=_next(study),
        )
    return Screen(
        subject=subject(both),
        notes=notes,
        tables=(_settings(claims),),
        verdict=_verdict_of_several(claims),
        next=_next(study),
    )


def claims_table(study: TrainingAnalysis) -> Table:
    """Every measure of every comparison: a row each."""
    claims = [claim for claim in study.claims if claim.answer != NOT_MEASURED]
    rows = [_Row(claim, row) for claim in claims for row in claim.rows]
    title, names = "Over the steps that both share", [text("first − second", _comparison)]
    if len(claims) == 1:
        title, names = f"{_comparison(rows[0])}, over the steps that both share", []
    return table(
        title,
        rows,
        [
            *names,
            text("measure", _label),
            col("first", _own),
            col("second", _rival),
            col("difference", _difference),
            col("paired seeds", _pairs, optional=True),
            text("better?", _answer, essential=True),
        ],
        note=(
            "Difference: first − second, ± 95 % over seeds. Shown: its interval excludes 0 where "
            f"the first is better; contradicted: where the second is. {_DECIDES}"
        ),
    )


def _comparison(row: _Row) -> str:
    return row.claim.title


def _measures(claim: Claim) -> Table:
    """A row per measure of one claim."""
    step_N = claim.common.step_N
    over = in_words(step_N).capitalize() if len(step_N) else "No common steps"
    return table(
        "",
        [_Row(claim, row) for row in claim.rows],
        [
            text("", _label),
            col(claim.own, _own, optional=True),
            col(claim.rival, _rival, optional=True),
            col("difference", _difference),
            text("better?", _answer, essential=True),
        ],
        note=f"{over}. Difference: first − second, ± 95 % over seeds. {_DECIDES}",
    )


def _settings(claims: Sequence[Claim]) -> Table:
    """A row per setting: the area, which decides, and the steps to the reward."""
    (own, rival), *_ = ((claim.own, claim.rival) for claim in claims)
    return table(
        "",
        [_Row(claim, claim.area) for claim in claims],
        [
            text("setting", lambda row: row.claim.setting or row.claim.title),
            col("area of first", _own, TRAINING[AREA.key], optional=True),
            col("of second", _rival, optional=True),
            col("difference", _difference),
            col("in steps", _steps, TRAINING[STEPS.key], optional=True),
            text("faster?", _answer, essential=True),
        ],
        note=(
            f"First: {own}; second: {rival}. Area: mean reward over the steps that both share. In "
            "steps: the difference of the steps to a reward half-way up. ± 95 % over seeds."
        ),
    )


def _label(row: _Row) -> str:
    if row.of.measure is FINAL:
        return _final(row.claim)
    return _LABELS[row.of.measure.key].format(numbers.number(row.claim.reward, 2))


def _final(claim: Claim) -> str:
    common = claim.common
    return "final reward" if common.is_final else f"reward, {in_words(common.window_N)}"


def _show(measure: Measure) -> Callable[[Estimate], str]:
    return percent if measure.key in _IN_PERCENT else plain


def _own(row: _Row) -> str:
    return _mean(row.of.own, row.of.measure)


def _rival(row: _Row) -> str:
    return _mean(row.of.rival, row.of.measure)


def _mean(mean: Estimate, measure: Measure) -> str:
    """The mean without its interval: that of the difference decides."""
    if mean.value is None:
        return mean.note or numbers.MISSING
    return _show(measure)(Estimate(mean.value))


def _difference(row: _Row) -> str:
    return _show(row.of.measure)(row.of.difference.estimate)


def _pairs(row: _Row) -> str:
    return numbers.count(row.of.difference.pairs)


def _steps(row: _Row) -> str:
    steps = row.claim.row(STEPS)
    return numbers.MISSING if steps is None else plain(steps.difference.estimate)


def _answer(row: _Row) -> str:
    return _SIGNS.get(row.of.answer, "") + row.of.answer


def _remarks(claim: Claim) -> Facts:
    """The area seed by seed, and which runs do not reach the reward."""
    by_seed, steps = claim.by_seed, claim.row(STEPS)
    facts: Facts = ()
    if len(by_seed) > 1:
        seeds, differences = ", ".join(map(str, by_seed)), map(numbers.number, by_seed.values())
        facts += (("By seed", f"the area differs by {', '.join(differences)} (seeds {seeds})"),)
    if steps is not None and steps.unreached:
        facts += (("Not reached", _listed(steps.unreached)),)
    return facts


def _listed(names: Sequence[str]) -> str:
    """`by 5 runs: a, b, c and 2 more`."""
    left = len(names) - _NAMED
    more = f" and {left} more" if left > 0 else ""
    return f"by {numbers.things(len(names), 'run')}: {', '.join(names[:_NAMED])}{more}"


def _verdict(claim: Claim) -> Verdict:
    """The answer by the area, then the measures that say the same or otherwise."""
    area = claim.area
    if area.answer == NOT_MEASURED:
        return Verdict("NOT MEASURED", "The runs share no step with a reward.")
    sentence = _SENTENCES[area.answer].format(own=claim.own, rival=claim.rival)
    apart = area.difference
    sentence += f": mean reward over {in_words(claim.common.step_N)} differs by "
    if area.answer == ONE_SEED_EACH:
        sentence += f"{numbers.number(apart.estimate.value)}. Repeat both with --seeds 3."
        return Verdict(area.answer.upper(), sentence)
    sentence += f"{by_how_much(apart)}{how_paired(apart)}. {_others(claim)}"
    return Verdict(area.answer.upper(), sentence.rstrip(), _STATUS.get(area.answer, ""))


def _others(claim: Claim) -> str:
    """`Shown: steps to 0.54, seconds to 0.54. Not shown: bad, % of A ≠ 0.`"""
    labels_of: dict[str, list[str]] = {}
    for row in claim.rows[1:]:
        labels_of.setdefault(row.answer, []).append(_label(_Row(claim, row)))
    return " ".join(
        f"{answer.capitalize()}: {'; '.join(labels)}." for answer, labels in labels_of.items()
    )


def _verdict_of_several(claims: Sequence[Claim]) -> Verdict:
    """In how many settings the claim is shown; contradicted ones are named."""
    answers = [claim.answer for claim in claims]
    shown, against = answers.count(SHOWN), answers.count(CONTRADICTED)
    words = f"SHOWN IN {shown} OF {len(claims)} SETTINGS"
    if against:
        words += f", CONTRADICTED IN {against}"
    own, rival = claims[0].own, claims[0].rival
    status: Status = "good" if shown == len(claims) else ""
    if against:
        status = "mixed" if shown else "bad"
    sentence = (
        f"The claim: {own} learns faster than {rival}, by the mean reward over the steps that both "
        "share in a setting."
    )
    return Verdict(words, sentence, status)


def _next(study: TrainingAnalysis) -> Facts:
    """Commands for the same two algorithms: what they block, and every number."""
    folders, flags = [run.folder for run in study.runs if run.folder], study.claim_flags
    lines = []
    trace = study.claimed_runs[0].last_trace
    if trace is not None:
        lines.append((suggest("clipstats", trace, *flags), "what both block on the same tokens"))
    if len(folders) == len(study.runs):
        line = suggest("report", *named_by(folders), *flags, "--full")
        lines.append((line, "every run and number"))
    return tuple(lines)
