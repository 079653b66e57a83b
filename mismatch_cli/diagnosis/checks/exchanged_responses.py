"""Log-probabilities that belong to another response, in the same group or anywhere."""

import numpy as np

from mismatch_cli.diagnosis.alignment import MISFIT, SHORTEST_ELSEWHERE
from mismatch_cli.diagnosis.checks.index_shift import too_few
from mismatch_cli.diagnosis.evidence import Evidence, Finding
from mismatch_cli.diagnosis.far_responses import Subset
from mismatch_cli.diagnosis.power import clear, of_responses, varied_S

NAME, STAGE = "exchanged-responses", 2
TITLE = "Log-probabilities of another response"
CAUSE = (
    "One side's log-probabilities are attached to another response, usually one to the same "
    "prompt: results came back in another order, or a sort by length was not undone."
)
CHANGE = (
    "Keep the key of each response (prompt and sample) through scoring, and join by it, never by "
    "position."
)
SOURCE = (
    "SkyRL PR 2043 (results in the order of micro-batches), FastDeploy PR 7773 (rows reordered)"
)
_MOSTLY = 0.7  # of the misfits whose groups are known, to assume it of the others


def check(evidence: Evidence) -> Finding:
    """Find responses whose first 128 log μ fit the log π of another response, and not their own."""
    exchanges = evidence.exchanges
    exchanged_R = exchanges.exchanged_R & ~_repaired_R(evidence)
    count = int(exchanged_R.sum())
    share = count / max(1, len(exchanged_R))
    group_R = exchanges.heads.group_R
    same_prompt = group_R[exchanged_R] == group_R[exchanges.partner_R[exchanged_R]]
    rows = (
        ("responses compared with each other", len(exchanged_R)),
        ("that do not fit their own values", int(exchanges.misfit_R.sum())),
        ("of these, that fit another response to the same prompt", int(same_prompt.sum())),
        ("that fit a response to another prompt", int((~same_prompt).sum())),
    )
    testable_S = varied_S(evidence.sample, SHORTEST_ELSEWHERE, MISFIT)
    if too_few(exchanged_R):
        return clear(NAME, share, "share of responses", of_responses(testable_S), rows)
    sentence = (
        f"{count:,} of {len(exchanged_R):,} responses have the log-probabilities of another "
        "response."
    )
    exchanged_S = _exchanged_S(evidence, exchanged_R)
    left_N = evidence.sample.left_without(exchanged_S[evidence.sample.response_T])
    part = Subset(exchanged_S, testable_S)
    return Finding(
        NAME, "found", share, "share of responses", sentence, rows, left_N=left_N, part=part
    )


def _exchanged_S(evidence: Evidence, exchanged_R: np.ndarray) -> np.ndarray:
    """The sample's exchanged responses, and its other misfits if most misfits are exchanged."""
    head_S = _head_S(evidence)
    exchanged_S = exchanged_R[head_S] & (head_S >= 0)
    if exchanged_R.sum() >= _MOSTLY * evidence.exchanges.misfit_R.sum():
        exchanged_S |= (head_S < 0) & (evidence.alignment.gap_S >= MISFIT)
    return np.asarray(exchanged_S)


def _repaired_R(evidence: Evidence) -> np.ndarray:
    """Responses of the sample that fit their own values once other checks' findings are undone."""
    head_S = _head_S(evidence)
    fits_S = (head_S >= 0) & (evidence.alignment.gap_S < MISFIT)
    repaired_R = np.zeros(len(evidence.exchanges.misfit_R), dtype=bool)
    repaired_R[head_S[fits_S]] = True
    return repaired_R


def _head_S(evidence: Evidence) -> np.ndarray:
    """The index of each response of the sample among the heads; −1 = none."""
    sample, index_of = evidence.sample, evidence.exchanges.heads.index_of
    keys = zip(
        sample.step_S.tolist(),
        sample.prompt_id_S.tolist(),
        sample.sample_index_S.tolist(),
        strict=True,
    )
    return np.array([index_of.get(key, -1) for key in keys], dtype=np.int64)
