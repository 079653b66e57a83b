"""Requests to vLLM, and its answers turned into `Rollout`s."""

from __future__ import annotations

from typing import Any

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import Request, Sink
from mismatch_cli.rules.batch import Rollout


def sampling_params(sampling: SamplingSettings, top_logprobs: int, request: Request) -> Any:
    """vLLM's parameters to sample a response with these settings."""
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
    """Convert an answer: each position has the sampled token, then ranks 1…K. A sink gets log μ of
    the whole vocabulary, for which each position must have all ranks.
    """
    import numpy as np

    width = top_k + 1
    tokens = len(completion.token_ids)
    flat = completion.logprobs
    if sink is not None:
        flat = _send_distributions(flat, width, sink)
    if len(flat.token_ids) != tokens * width:
        raise MismatchError(
            f"vLLM returned {len(flat.token_ids)} log-probs for {tokens} tokens instead of "
            f"{width} each. Its vocabulary may be smaller than top_logprobs = {top_k}: use a "
            "lower one."
        )
    ids_TW = np.asarray(flat.token_ids, dtype=np.int32).reshape(tokens, width)
    logp_TW = np.asarray(flat.logprobs, dtype=np.float32).reshape(tokens, width)
    ranks_TW = np.asarray(flat.ranks, dtype=np.int32).reshape(tokens, width)
    return Rollout(
        prompt_ids=prompt_ids,
        response_ids=list(completion.token_ids),
        # Copies, since views would keep all columns in memory.
        logp_rollout_T=logp_TW[:, 0].copy(),
        rank_rollout_T=ranks_TW[:, 0].copy(),
        topk_ids_TK=ids_TW[:, 1:].copy() if top_k else None,
        topk_logp_rollout_TK=logp_TW[:, 1:].copy() if top_k else None,
        finish_reason=completion.finish_reason,
    )


def _send_distributions(flat: Any, width: int, sink: Sink) -> Any:
    """Send the sink log μ in vocabulary order, position by position; returns the first `width`
    entries of each.
    """
    import numpy as np

    narrow = type(flat)()
    for start, stop in zip(flat.start_indices, flat.end_indices, strict=True):
        # The first entry is the sampled token, which comes again at its rank.
        logp_V = np.full(stop - start - 1, np.nan, dtype=np.float32)
        logp_V[flat.token_ids[start + 1 : stop]] = flat.logprobs[start + 1 : stop]
        if np.isnan(logp_V).any():
            raise MismatchError(
                "vLLM did not return every token of its vocabulary. Use --engine hf."
            )
        sink(logp_V)
        for name in ("token_ids", "logprobs", "ranks"):
            getattr(narrow, name).extend(getattr(flat, name)[start : start + width])
    return narrow
