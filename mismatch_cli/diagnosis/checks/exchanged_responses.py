"""Log-probabilities that belong to another response, of the same group or of any."""

import numpy as np

from mismatch_cli.diagnosis.alignment import MISFIT
from mismatch_cli.diagnosis.checks.index_shift import too_few
from mismatch_cli.diagnosis.evidence import Evidence, Finding

NAME, STAGE = "exchanged-responses", 2
TITLE = "Log-probabilities of another response"
CAUSE = (
    "One side's log-probabilities stand with another response, most often one to the same prompt: results that came "
    "back in another order, or a sort by length that was not undone."
)
CHANGE = "Carry the key of each response (prompt and sample) through scoring, and join by it, never by position."
SOURCE = "SkyRL PR 2043 (results in the order of micro-batches), FastDeploy PR 7773 (rows reordered)"
_MOSTLY = 0.7  # of the misfits among whole groups, to call those misfits so whose group is not at hand


def check(evidence: Evidence) -> Finding:
    """Responses whose log μ fits the log π of another response, and not their own, over their first 128 tokens."""
    exchanges = evidence.exchanges
    exchanged_R = exchanges.exchanged_R & ~_repaired_R(evidence)
    count = int(exchanged_R.sum())
    share = count / max(1, len(exchanged_R))
    heads, partner = exchanges.heads, exchanges.partner_R[exchanged_R]
    same_R = heads.group_R[exchanged_R] == heads.group_R[partner]
    rows = (
        ("responses held against each other", len(exchanged_R)),
        ("that do not fit as they stand", int(exchanges.misfit_R.sum())),
        ("of these, that fit another response to the same prompt", int(same_R.sum())),
        ("that fit a response to another prompt", int((~same_R).sum())),
    )  # fmt: skip
    if too_few(exchanged_R):
        return Finding(NAME, "clear", share, "share of responses", evidence=rows)
    sentence = f"{count:,} of {len(exchanged_R):,} responses hold the log-probabilities of another response."
    left_N = evidence.sample.left_without(_exchanged_T(evidence, exchanged_R))
    return Finding(NAME, "found", share, "share of responses", sentence, rows, left_N=left_N)


def _exchanged_T(evidence: Evidence, exchanged_R: np.ndarray) -> np.ndarray:
    """The tokens of the sample's exchanged responses, and of its misfits where nearly all misfits are exchanged."""
    row_S = _row_S(evidence)
    exchanged_S = exchanged_R[row_S] & (row_S >= 0)
    if exchanged_R.sum() >= _MOSTLY * evidence.exchanges.misfit_R.sum():
        exchanged_S |= (row_S < 0) & (evidence.alignment.gap_S >= MISFIT)
    return exchanged_S[evidence.sample.response_T]


def _repaired_R(evidence: Evidence) -> np.ndarray:
    """Responses of the sample that fit as they stand, once what other checks found is undone."""
    row_S, repaired_R = _row_S(evidence), np.zeros(len(evidence.exchanges.misfit_R), dtype=bool)
    fits_S = (row_S >= 0) & (evidence.alignment.gap_S < MISFIT)
    repaired_R[row_S[fits_S]] = True
    return repaired_R


def _row_S(evidence: Evidence) -> np.ndarray:
    """Where each response of the sample stands among the heads; −1 = not there."""
    sample, rows = evidence.sample, evidence.exchanges.heads.rows
    keys_S = zip(sample.step_S.tolist(), sample.prompt_id_S.tolist(), sample.sample_index_S.tolist(), strict=True)
    return np.array([rows.get(key, -1) for key in keys_S], dtype=np.int64)
