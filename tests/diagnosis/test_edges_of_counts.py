"""How many responses are remembered to find copies of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.counts import Copies, ZeroCounts


@pytest.mark.parametrize("more", [0, 1])
def test_as_many_responses_as_there_is_room_for_are_all_remembered(more):
    """One more, and the response with the largest hash is forgotten."""
    numbers_S = np.arange(20)
    batch = SimpleNamespace(
        offset_S1=np.arange(0, 21 * 8, 8),
        response_ids_T=np.arange(20 * 8),
        logp_rollout_T=np.full(20 * 8, -3.0),
        step_S=numbers_S,
        prompt_id_S=numbers_S,
        sample_index_S=numbers_S,
    )
    copies = Copies(most_responses=20 - more)
    copies.update(batch)
    assert copies.count() == (0, 20 - more)


def test_exact_zeros_are_sampled_if_the_other_side_finds_them_as_probable_as_the_rest():
    """Beside a single other token of 1 nat: up to three times as improbable."""
    rest = {"zeros": 2, "rest": 1, "rest_surprise": 1.0}
    assert ZeroCounts(zeros_surprise=6.0, **rest).are_sampled
    assert not ZeroCounts(zeros_surprise=6.1, **rest).are_sampled
