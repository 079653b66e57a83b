"""A response that is in the trace twice, as if it had been sampled twice."""

from mismatch_cli.base.numbers import things
from mismatch_cli.diagnosis.counts import MOST_RESPONSES, UNREPEATABLE
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.power import clear
from mismatch_cli.diagnosis.sample import WITHOUT_IDS

NAME, STAGE = "repeated-responses", 1
TITLE = "The same response under several keys"
CAUSE = (
    "Rows were written twice (a retry, a resumed worker, a buffer that was not emptied), or "
    "copies fill up a batch; or the sampler is not random: one seed for all samples, or a "
    "temperature near 0."
)
CHANGE = (
    "Write each response once, under one step, prompt and sample; record another use of it as an "
    "epoch or a minibatch; give every sample its own seed."
)
SOURCE = "batches that frameworks fill up by repeating rows (verl: pad_dataproto_to_divisor)"


def check(evidence: Evidence) -> Finding:
    """Find equal token ids under another step, prompt or sample, among responses too improbable for
    chance.

    Copies do not change the gap, except that they count twice.
    """
    if evidence.sample.response_ids_T is None:
        return untested(NAME, WITHOUT_IDS)
    repeated, improbable = evidence.copies.count()
    if not improbable:
        return untested(NAME, f"no response is less probable than e^−{UNREPEATABLE:g}")
    share = repeated / improbable
    rows = (
        (f"responses less probable than e^−{UNREPEATABLE:g}", improbable),
        ("of these, already in the trace", repeated),
    )
    if not repeated:
        power = f"one copy among {things(improbable, 'response')}"
        return clear(NAME, share, "share of responses", power, rows)
    responses = "responses" if improbable < MOST_RESPONSES else "responses of a sample"
    sentence = (
        f"{repeated:,} of {improbable:,} {responses} are already in the trace under another key, "
        "token for token."
    )
    return Finding(NAME, "found", share, "share of responses", sentence, rows)
