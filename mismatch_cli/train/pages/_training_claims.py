"""Whether one algorithm learns faster than another: the answer, and the table of all measures."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mismatch_cli.base import numbers
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.report.outline import Brief, Facts, Priority, Status, Table, Verdict
from mismatch_cli.report.tables import TextColumn, col, percent, plain, table, text, value_of
from mismatch_cli.train.pages._training_verdict import by_how_much, first_named, how_paired
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
)
from mismatch_cli.train.studies.training import TrainingAnalysis

_STATUS: dict[str, Status] = {SHOWN: "good", CONTRADICTED: "bad"}
_SIGNS = {SHOWN: "✔ ", CONTRADICTED: "✘ "}
_IN_PERCENT = {BAD_OF_ALL.key: "bad, % of A ≠ 0", BAD_OF_NEGATIVE.key: "bad, % of A < 0"}
_LABELS = _IN_PERCENT | {
    AREA.key: "area (mean reward)",
    FINAL.key: "final reward",
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
_DIFFERENCE = "Difference: first − second, ± 95 % over seeds."
_MEANING = (
    "Shown: its interval excludes 0 where the first is better; contradicted: where the second is."
)
_DECIDES = "The area decides; the other rows describe it."


class _Row(NamedTuple):
    """A row of the table: one measure of a claim."""

    claim: Claim
    measure: ClaimRow


def claims_table(study: TrainingAnalysis) -> Table:
    """Every measure of every comparison: a row each."""
    claims = study.claims
    if study.claimed is None:
        claims = [claim for claim in claims if claim.answer != NOT_MEASURED]
    rows = [_Row(claim, row) for claim in claims for row in claim.rows]
    title, own, rival = "Over the steps that both share", "first", "second"
    if len(claims) == 1:
        (claim,) = claims
        title = f"{claim.title}, over the steps that both share"
        own, rival = claim.own, claim.rival
    return table(
        title,
        rows,
        [
            *_names(study, claims),
            text("measure", _label),
            col(own, lambda row: _mean(row, row.measure.own), priority=Priority.SPARE),
            col(rival, lambda row: _mean(row, row.measure.rival), priority=Priority.SPARE),
            col("difference", lambda row: _show(row)(row.measure.difference)),
            col(
                "paired seeds",
                lambda row: numbers.count(row.measure.paired_seeds),
                priority=Priority.FULL,
            ),
            text("better?", _answer, priority=Priority.ALWAYS),
        ],
        note=f"{_DIFFERENCE} {_MEANING} {_DECIDES}",
        brief=_brief(rows) if study.claimed else None,
    )


def _names(study: TrainingAnalysis, claims: Sequence[Claim]) -> list[TextColumn[_Row]]:
    """What names a comparison among several."""
    if len(claims) == 1:
        return []
    if study.claimed is None:
        return [text("first − second", lambda row: row.claim.title)]
    return [text("setting", lambda row: row.claim.setting or row.claim.title)]


def _brief(rows: Sequence[_Row]) -> Brief:
    """What decides comes first: the areas of all settings, then the steps. The rest follows where
    the table is about a single comparison.
    """
    keys = [row.measure.measure for row in rows]
    ranks = {AREA.key: 0, STEPS.key: 1}
    order = sorted(range(len(rows)), key=lambda place: ranks.get(keys[place], 2))
    if keys.count(AREA.key) > 1:
        order = [place for place in order if keys[place] in ranks]
    return Brief(order, f"{_DIFFERENCE} {_DECIDES}")


def _label(row: _Row) -> str:
    common = row.claim.common
    if row.measure.measure == FINAL.key and not common.is_final:
        return f"reward, {in_words(common.window_N)}"
    return _LABELS[row.measure.measure].format(numbers.number(row.claim.reward, 2))


def _show(row: _Row) -> Callable[[Estimate | float], str]:
    return percent if row.measure.measure in _IN_PERCENT else plain


def _mean(row: _Row, mean: Estimate) -> str:
    """The mean without its interval: that of the difference decides."""
    value = value_of(mean)
    return mean.note or numbers.MISSING if value is None else _show(row)(value)


def _answer(row: _Row) -> str:
    return _SIGNS.get(row.measure.answer, "") + row.measure.answer


def claim_remarks(claims: Sequence[Claim]) -> Facts:
    """Of a single comparison: the area seed by seed, and which runs do not reach the reward."""
    if len(claims) > 1:
        return ()
    (claim,) = claims
    facts: Facts = ()
    by_seed = claim.by_seed
    if len(by_seed) > 1:
        seeds = ", ".join(map(str, by_seed))
        differences = ", ".join(map(numbers.number, by_seed.values()))
        facts += (("By seed", f"the area differs by {differences} (seeds {seeds})"),)
    steps = claim.row(STEPS)
    if steps is not None and steps.not_reached_by:
        facts += (("Not reached", _listed(steps.not_reached_by)),)
    return facts


def _listed(names: Sequence[str]) -> str:
    """`by 5 runs: a, b, c and 2 more`."""
    return f"by {numbers.things(len(names), 'run')}: {first_named(names)}"


def claim_verdict(claims: Sequence[Claim]) -> Verdict:
    """Whether the area shows that the first algorithm learns faster, or in how many settings."""
    if len(claims) > 1:
        return _of_several(claims)
    (claim,) = claims
    headline = claim.answer.upper()
    if claim.answer == NOT_MEASURED:
        return Verdict(headline, "The runs share no step with a reward.")
    area = claim.area
    sentence = _SENTENCES[claim.answer].format(own=claim.own, rival=claim.rival)
    sentence += f": mean reward over {in_words(claim.common.step_N)} differs by "
    if claim.answer == ONE_SEED_EACH:
        alone = numbers.number(area.difference.value)
        return Verdict(headline, f"{sentence}{alone}. Repeat both with --seeds 3.")
    sentence += f"{by_how_much(area.difference)}, {how_paired(area.paired_seeds)}."
    return Verdict(headline, " ".join([sentence, *_others(claim)]), _STATUS.get(claim.answer, ""))


def _others(claim: Claim) -> list[str]:
    """`Shown: steps to 0.54; seconds to 0.54.`, `Not shown: bad, % of A ≠ 0.`"""
    labels_of: dict[str, list[str]] = {}
    for row in claim.rows[1:]:
        labels_of.setdefault(row.answer, []).append(_label(_Row(claim, row)))
    return [f"{answer.capitalize()}: {'; '.join(labels)}." for answer, labels in labels_of.items()]


def _of_several(claims: Sequence[Claim]) -> Verdict:
    """In how many settings the claim is shown; contradicted ones are named."""
    answers = [claim.answer for claim in claims]
    shown, against = answers.count(SHOWN), answers.count(CONTRADICTED)
    headline = f"SHOWN IN {shown} OF {len(claims)} SETTINGS"
    status: Status = "good" if shown == len(claims) else ""
    if against:
        headline += f", CONTRADICTED IN {against}"
        status = "mixed" if shown else "bad"
    sentence = (
        f"The claim: {claims[0].own} learns faster than {claims[0].rival}, by the mean reward "
        "over the steps that both share in a setting."
    )
    return Verdict(headline, sentence, status)
