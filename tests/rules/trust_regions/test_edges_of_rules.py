"""The range of a number of ranks, and rules whose file is elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules import decisions as _rules
from mismatch_cli.rules import trust_regions
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.policies import TRAINER_ROLLOUT, Policies
from mismatch_cli.rules.trust_regions import veto


def test_a_number_of_ranks_is_from_1_to_2_to_the_20():
    for k in (1, 2**20):
        _rules.ranks(k=k)
    for k in (0, 2**20 + 1):
        with pytest.raises(UsageError, match=f"k={k} is out of range.*from 1 to 1,048,576"):
            _rules.ranks(k=k)


def test_covariances_that_no_token_can_have_are_refused():
    """The lower bound alone, above the default of the upper one, would silently draw nothing."""
    with pytest.raises(UsageError, match="cov_low=7, cov_high=5 leaves no token to draw"):
        parse_algorithm("clip-cov:cov_low=7")
    assert parse_algorithm("clip-cov:cov_low=7,cov_high=9").masks[0].parameters["cov_low"] == 7


def test_the_example_of_a_cap_is_one_that_can_be_typed():
    with pytest.raises(UsageError, match=r"cap=much is not a number\. Example: cap=1\.0"):
        parse_algorithm("pg-is:cap=much")
    assert parse_algorithm("pg-is:cap=1.0").weight[0].bounds == (0, 1)


def test_a_file_that_was_read_on_another_machine_need_not_be_here(tmp_path, monkeypatch):
    monkeypatch.setattr(trust_regions, "text_by_path", {})
    path = tmp_path / "half.py"
    text = """
from mismatch_cli.rules.trust_regions import Decision


def trust_region(compared, advantage_T, *, limit=0.5):
    return Decision(compared.ratio_T <= limit, compared.ratio_T)
"""
    trust_regions.register_texts({str(path): text})
    region = trust_regions.find(str(path))
    assert trust_regions.thresholds(region) == {"limit": 0.5}
    assert region.Decision is trust_regions.Decision


def test_a_veto_without_a_lower_bound_keeps_a_response_with_a_token_of_ratio_0():
    logq_T, logp_T, advantage_T = np.array([[-1, -1, -1], [-np.inf, -1, -2], [1, 1, 1]], float)
    compared = Policies(logq_T, logp_T, None, np.array([0, 2, 3])).compare(TRAINER_ROLLOUT)
    for band_low, keep in ((0.0, [True, True, True]), (0.1, [False, False, True])):
        decision = veto.trust_region(compared, advantage_T, band_low=band_low)
        assert decision.keep_T.tolist() == keep
