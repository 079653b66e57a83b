"""What checks that read the responses again answer."""

from mismatch_cli.base.numbers import things
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row, untested
from mismatch_cli.diagnosis.readings import Reading, Readings, Survey

MEASURE = "of the gap left"
_OTHER_MODEL = 2.0  # times the gap, or what is expected
_ROUNDING = 2e-5  # nats per token: float32 in other kernels
_EXACTLY = 0.5  # of the gap left


def reading_finding(name: str, evidence: Evidence, kind: str, manner: str) -> Finding:
    """Whether a hypothesis of that kind reproduces one side; `manner` says how the model read the
    responses, with the number of hypotheses in it.
    """
    readings = readings_of(name, evidence)
    if isinstance(readings, Finding):
        return readings
    survey = readings.search(kind)
    if survey.reading is not None:
        return _found(name, evidence, survey.reading)
    if survey.unread:
        return untested(name, survey.unread)
    if not survey.hypotheses:
        return untested(name, "the model and these responses have nothing of the kind")
    return _clear(name, survey, manner)


def _found(name: str, evidence: Evidence, reading: Reading) -> Finding:
    if reading.left < _EXACTLY:
        other = "rollout" if reading.side == "trainer" else "trainer"
        sentence = (
            f"With {reading.name} the model reproduces the {reading.side}'s numbers; as recorded, "
            f"the {other}'s."
        )
    else:
        sentence = (
            f"With {reading.name} the model is clearly nearer to the {reading.side}'s numbers: "
            f"that explains {100 * (1 - reading.left):.0f} % of the gap."
        )
    rows: tuple[Row, ...] = (
        ("the side that differs", reading.side),
        ("it read the responses with", reading.name),
        (f"{MEASURE} when that is undone", reading.left),
    )
    left_N = reading.left_N(evidence.sample)
    return Finding(name, "found", reading.left, MEASURE, sentence, rows, left_N=left_N)


def _clear(name: str, survey: Survey, manner: str) -> Finding:
    responses = things(survey.responses, "response")
    sentence = (
        f"The model read {responses} {manner.format(survey.hypotheses)}: none of that makes the "
        "gap clearly smaller. A fifth of the gap would show."
    )
    rows: tuple[Row, ...] = (
        ("responses read", survey.responses),
        ("hypotheses", survey.hypotheses),
        (f"{MEASURE} by the best of them", survey.left),
    )
    return Finding(name, "clear", survey.left, MEASURE, sentence, rows)


def readings_of(name: str, evidence: Evidence) -> Readings | Finding:
    """How the model reads the responses; or the check's finding if there is no model, or neither
    side had it.
    """
    readings = evidence.readings
    if readings is None:
        reason = "needs the trainer's model to read the responses again"
        return untested(name, reason, needs="--trainer-model MODEL")
    nearest = min(readings.distances.values())
    if nearest > _OTHER_MODEL * max(evidence.gap.value, evidence.expected.high, _ROUNDING):
        reason = (
            f"the model at hand is {nearest:.2g} nats per token from either side: name the "
            "trainer's, at the weights that sampled"
        )
        return untested(name, reason)
    return readings
