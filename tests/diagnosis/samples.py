"""Samples of a few columns, for checks that read no others."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from mismatch_cli.diagnosis.sample import Sample


class SampleColumns(SimpleNamespace):
    """The named columns of a sample, and those that follow from them."""

    num_counted = Sample.num_counted
    response_N = Sample.response_N
    logq_N = Sample.logq_N
    logp_N = Sample.logp_N


def few_responses(lengths: Sequence[int], **columns: Any) -> Sample:
    """A whole sample of responses with these lengths: each of its own prompt, all of one step, with
    every token in the loss, but for the columns that are given.
    """
    numbers_S, tokens = np.arange(len(lengths)), sum(lengths)
    zeros_S = np.zeros(len(lengths), dtype=int)
    usual = {
        "offset_S1": np.concatenate([[0], np.cumsum(lengths)]),
        "prompt_id_S": numbers_S,
        "sample_index_S": zeros_S,
        "step_S": zeros_S,
        "prompt_length_S": None,
        "truncated_S": zeros_S > 0,
        "response_ids_T": None,
        "logq_T": np.full(tokens, -1.0),
        "logp_T": np.full(tokens, -1.0),
        "counts_T": np.ones(tokens, dtype=bool),
        "topk_logq_TK": None,
        "topk_logp_TK": None,
    }
    return Sample(**usual | columns)


def sample_of(
    logq_T: np.ndarray,
    logp_T: np.ndarray,
    lengths: Sequence[int],
    counts_T: np.ndarray | None = None,
    **columns: Any,
) -> Sample:
    """The same with these log-probabilities; without `counts_T`, every token is in the loss."""
    counts_T = np.ones(len(logq_T), dtype=bool) if counts_T is None else counts_T
    return few_responses(lengths, logq_T=logq_T, logp_T=logp_T, counts_T=counts_T, **columns)
