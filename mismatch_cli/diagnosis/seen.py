"""Which tokens of a response stand in its context already: what a repetition penalty looks at."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def seen_before(
    prompt_ids: pa.Array, response_ids_T: np.ndarray, topk_ids_TK: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Whether the sampled ids, and the recorded ranks, stand in the prompt or earlier in the response."""
    prompt = np.asarray(prompt_ids)
    context = np.concatenate([prompt, response_ids_T])
    ids_U, first_U = np.unique(context, return_index=True)
    now_T = len(prompt) + np.arange(len(response_ids_T))
    found = {"seen_T": first_U[np.searchsorted(ids_U, response_ids_T)] < now_T}
    if topk_ids_TK is not None:
        at_TK = np.minimum(np.searchsorted(ids_U, topk_ids_TK), len(ids_U) - 1)
        found["topk_seen_TK"] = (ids_U[at_TK] == topk_ids_TK) & (first_U[at_TK] < now_T[:, None])
    return found
