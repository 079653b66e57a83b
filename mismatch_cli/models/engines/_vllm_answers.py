"""Requests to vLLM, and its answers turned into `Rollout`s."""

from __future__ import annotations

from typing import Any

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import Request, Sink
from mismatch_cli.rules.batch import Rollout


def sampling_params(sampling: SamplingSettings, top_logprobs: int, request: Request) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=request.longest(sampling),
        seed=request.seed,
        logprobs=top_logprobs,
        # Else vLLM makes text of every top-K entry, and log-probs cost more than sampling.
        detokenize=False,
        flat_logprobs=True,
    )


def to_rollout(
    prompt_ids: list[int], completion: Any, top_k: int, sink: Sink | None = None
) -> Rollout:
    """Convert an answer: each position has the sampled token, then ranks 1…K; a sink gets all
    ranks.
    """
    import numpy as np

    width = top_k + 1
    flat = completion.logprobs if sink is None else _send_all(completion.logprobs, width, sink)
    shape = (len(completion.token_ids), width)
    if len(flat.token_ids) != shape[0] * shape[1]:
        raise MismatchError(
            f"vLLM returned {len(flat.token_ids)} log-probs for {shape[0]} tokens instead of "
            f"{width} each. Its vocabulary may be smaller than top_logprobs = {top_k}: use a "
            "lower one."
        )
    ids_TK = np.asarray(flat.token_ids, dtype=np.int32).reshape(shape)
    logp_TK = np.asarray(flat.logprobs, dtype=np.float32).reshape(shape)
    ranks_TK = np.asarray(flat.ranks, dtype=np.int32).reshape(shape)
    return Rollout(
        prompt_ids=prompt_ids,
        response_ids=list(completion.token_ids),
        logp_rollout_T=logp_TK[:, 0].copy(),
        rank_rollout_T=ranks_TK[:, 0].copy(),
        topk_ids_TK=ids_TK[:, 1:].copy() if top_k else None,
        topk_logp_rollout_TK=logp_TK[:, 1:].copy() if top_k else None,
        finish_reason=completion.finish_reason,
    )


def _send_all(flat: Any, width: int, sink: Sink) -> Any:
    """Send the sink log μ in vocabulary order, position by position; returns the first `width`
    entries.
    """
    import numpy as np

    kept = type(flat)()
    for start, stop in zip(flat.start_indices, flat.end_indices, strict=True):
        logp_V = np.full(stop - start - 1, np.nan, dtype=np.float32)
        logp_V[flat.token_ids[start + 1 : stop]] = flat.logprobs[start + 1 : stop]
        if np.isnan(logp_V).any():
            raise MismatchError(
                "vLLM did not return every token of its vocabulary. Use --engine hf."
            )
        sink(logp_V)
        for name in ("token_ids", "logprobs", "ranks"):
            getattr(kept, name).extend(getattr(flat, name)[start : start + width])
    return kept
