"""Trainer log-probabilities that differ when the same tokens are scored again."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row, untested
from mismatch_cli.diagnosis.model import SkippedReading
from mismatch_cli.diagnosis.origins import VERSIONS
from mismatch_cli.diagnosis.other_weights import with_dropout
from mismatch_cli.diagnosis.power import clear
from mismatch_cli.diagnosis.readings import Reading
from mismatch_cli.diagnosis.sample import CERTAIN, Sample

NAME, STAGE = "not-repeatable", 4
TITLE = "The trainer does not repeat itself"
CAUSE = (
    "Dropout is active in the log-prob pass: the model is in training mode, or its adapter has "
    "lora_dropout."
)
CHANGE = (
    "Call model.eval() before the log-prob pass, or set every dropout (lora_dropout, "
    "attention_dropout) to 0; then score one batch twice and compare."
)
SOURCE = "verl PR 4708 (LoRA log-probs change between passes), TRL 1066"
MEASURE = "of the gap, in scores of the same tokens"
_MOSTLY = 0.5  # of the gap: less is not the cause of most of it
# Two scores are √2 times as far apart as each is off; what is beyond is not of the gap
_AT_MOST = 2.5
_FEWEST = 8  # tokens that were scored twice
_TIMES_ENGINE = 3.0  # the scatter of the engine on the same tokens
_LEFT = 0.5  # of the gap, with the model's own numbers
_SAME_SIZE = 2.0  # times: dropout in the model moves as much
# Dropout moves every uncertain token, by much less than what sets it apart from the others
_TYPICAL = 0.2  # of the mean: the median difference between two scores
_CORRELATED = 0.8  # log π with log μ


class Scatter(NamedTuple):
    """Scores of the same token after the same context in several responses."""

    tokens: int
    trainer: float  # mean nats between two scores
    engine: float
    gap: float  # mean |d| of these tokens, nats
    everywhere: bool  # most tokens move, and each stays near its value


def check(evidence: Evidence) -> Finding:
    """Compares scores of the same tokens: of responses to one prompt as long as they are equal, and
    of the trainer's second pass if the trace has one.
    """
    scatter = scatter_of(evidence.sample)
    repeated = evidence.scale.trainer_noise
    if scatter.tokens < _FEWEST and repeated is None:
        return untested(NAME, "no responses to one prompt begin with the same tokens")
    rows: tuple[Row, ...] = (
        ("tokens scored in several responses", scatter.tokens),
        ("mean |Δlog p| of the trainer between them, nats", scatter.trainer),
        ("of the engine, nats", scatter.engine),
        ("their mean gap, nats", scatter.gap),
        ("mean |Δlog p| of the trainer in its second pass, nats", repeated),
    )
    share = _share(evidence, scatter, repeated)
    if share < _MOSTLY or not _is_too_large(evidence):
        return clear(NAME, share, MEASURE, "scores that differ by half of the gap", rows)
    sentence = (
        "The trainer gives the same tokens after the same context other log-probabilities: the "
        f"difference between two scores is {100 * share:.0f} % of the gap"
        f"{_dropout_clause(evidence)}."
    )
    return Finding(NAME, "found", share, MEASURE, sentence, rows, left_N=_left(evidence, share))


def scatter_of(sample: Sample) -> Scatter:
    """The scatter of each side over tokens that several responses to a prompt have in common from
    their beginning.
    """
    pairs = list(_pairs(sample))
    if not pairs:
        return Scatter(0, 0.0, 0.0, 0.0, False)
    again, first = np.array(pairs).T
    trainer_P = np.abs(sample.logp_T[again] - sample.logp_T[first])
    engine_P = np.abs(sample.logq_T[again] - sample.logq_T[first])
    trainer, gap = float(trainer_P.mean()), float(sample.abs_d_T[again].mean())
    uncertain_P = trainer_P[sample.logq_T[again] < CERTAIN]
    typical = float(np.median(uncertain_P)) if len(uncertain_P) else 0.0
    everywhere = typical > _TYPICAL * trainer and _correlation(sample, again) > _CORRELATED
    return Scatter(len(pairs), trainer, float(engine_P.mean()), gap, everywhere)


def _correlation(sample: Sample, token: np.ndarray) -> float:
    """The correlation of both sides' log-probabilities; 1 if all tokens have the same."""
    logp, logq = sample.logp_T[token], sample.logq_T[token]
    if not min(np.ptp(logp), np.ptp(logq)) > 0:
        return 1.0
    return float(np.corrcoef(logp, logq)[0, 1])


_PREFIX = 16  # tokens: longer equal beginnings add little


def _pairs(sample: Sample) -> Iterator[tuple[int, int]]:
    """Tokens after equal contexts, scored with the same weights as far as these are on record:
    each with the first of its kind; none without ids.
    """
    if sample.response_ids_T is None:
        return
    weights = [sample.origin_S[name] for name in VERSIONS if name in sample.origin_S]
    key_S = zip(sample.step_S, sample.prompt_id_S, *weights, strict=True)
    first: dict[tuple[int, ...], int] = {}
    for span, key in zip(sample.spans(), key_S, strict=True):
        context = tuple(map(int, key))
        ids = sample.response_ids_T[span][:_PREFIX].tolist()
        for t, token in enumerate(ids, span.start):
            context = (*context, token)
            if sample.counts_T[t] and first.setdefault(context, t) != t:
                yield t, first[context]


def _share(evidence: Evidence, scatter: Scatter, repeated: float | None) -> float:
    """How much of the gap the trainer's scatter is, the larger of both measurements; one that is
    beyond what the gap can hold is of something else.
    """
    shares = [0.0]
    by_itself = scatter.trainer > _TIMES_ENGINE * scatter.engine
    if scatter.tokens >= _FEWEST and by_itself and scatter.everywhere:
        shares.append(scatter.trainer / scatter.gap if scatter.gap else 0.0)
    if repeated is not None and evidence.gap.value:
        shares.append(repeated / evidence.gap.value)
    return max(share for share in shares if share <= _AT_MOST)


def _is_too_large(evidence: Evidence) -> bool:
    """Whether the trainer's scatter is more than precision: the gap is too large, or the model's
    own numbers are much nearer to the engine's.
    """
    reading = _as_recorded(evidence)
    return evidence.gap_is_too_large if reading is None else reading.left < _LEFT


def _as_recorded(evidence: Evidence) -> Reading | None:
    """The model's own numbers instead of the trainer's, if it read the responses and the trainer's
    are not its own.
    """
    if evidence.readings is None:
        return None
    try:
        return evidence.readings.as_recorded
    except SkippedReading:
        return None


def _left(evidence: Evidence, share: float) -> np.ndarray:
    """The gap with the model's own numbers; without a model, what one score's part of the
    difference between two leaves.
    """
    reading = _as_recorded(evidence)
    if reading is None:
        return evidence.sample.d_N * max(0.0, 1 - share / np.sqrt(2))
    return reading.left_N(evidence.sample)


def _dropout_clause(evidence: Evidence) -> str:
    """Whether the model at hand, with its dropout on, moves as much as the trainer; empty without
    a model.
    """
    model, readings = evidence.model, evidence.readings
    if model is None or readings is None:
        return ""
    dropout = with_dropout(model.loaded)
    if dropout is None:
        return "; the model's configuration has no dropout, so the script may set one"
    try:
        moved_T = model.logp_T(dropout, few=True) - model.logp_T()
    except SkippedReading:
        return ""
    moved = float(np.nanmean(np.abs(moved_T)))
    off = readings.distances["trainer"]
    same = "as far as" if off / _SAME_SIZE < moved < _SAME_SIZE * off else "not as far as"
    return f"; with its dropout on, the model moves by {moved:.2g} nats, {same} the trainer"
