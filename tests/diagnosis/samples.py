"""Samples of a few columns, for checks that read no others."""

from __future__ import annotations

from types import SimpleNamespace

from mismatch_cli.diagnosis.sample import Sample


class SampleColumns(SimpleNamespace):
    """The named columns of a sample, and those that follow from them."""

    num_counted = Sample.num_counted
    response_N = Sample.response_N
    logq_N = Sample.logq_N
    logp_N = Sample.logp_N
