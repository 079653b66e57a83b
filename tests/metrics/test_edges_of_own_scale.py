"""When the trainer's distance to itself is a measure of its noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.logit_steps import MEAN_OF_ROUNDING
from mismatch_cli.metrics.own_scale import _OTHERS, OwnScale
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.rules.batch import TokenBatch


@pytest.mark.parametrize(
    ("uncertain", "moved", "noise"),
    [(200, 200, 0.125), (200, 100, 0.0625), (200, 99, None), (199, 199, None)],
)
def test_noise_is_known_from_200_uncertain_tokens_of_which_half_move(
    make_batch: Callable[..., TokenBatch], uncertain: int, moved: int, noise: float | None
) -> None:
    """As many certain tokens as uncertain ones do not move: they halve the mean of 0.25 nats."""
    logp_T = [-1.0] * uncertain + [-0.001] * uncertain
    again_T = [-1.25] * moved + logp_T[moved:]
    trainer = {"logp_recomputed": [logp_T], "logp_trainer": [logp_T]}
    batch = make_batch([logp_T], **trainer, logp_trainer_repeat=[again_T])
    scale = OwnScale(PAIRS["mismatch"])
    scale.update(TokenGaps(batch, PAIRS["mismatch"], 0, 1))
    assert scale.trainer_noise == noise


def test_rounding_moves_a_single_token_by_its_uncertainty(
    make_batch: Callable[..., TokenBatch],
) -> None:
    """A step of 1/8 at temperature 2, of a token with μ = 1/4."""
    batch = make_batch([[np.log(0.25)]], logp_recomputed=[[np.log(0.25)]])
    scale = OwnScale(PAIRS["mismatch"])
    assert scale.gap_of_rounding(0.125, 2.0) == 0.0
    scale.update(TokenGaps(batch, PAIRS["mismatch"], 0, 1))
    by_hand = np.sqrt(1 + _OTHERS) * 0.75 * MEAN_OF_ROUNDING * 0.125 / 2
    assert scale.gap_of_rounding(0.125, 2.0) == pytest.approx(by_hand, rel=1e-6)
