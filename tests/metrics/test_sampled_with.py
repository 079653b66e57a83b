"""Which of two sets of weights sampled."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.sampled_with import paired_test


def test_the_paired_test_finds_the_weights_that_sampled() -> None:
    rng = np.random.default_rng(0)
    rollout = [np.log(rng.uniform(0.2, 0.8, 20)) for _ in range(40)]
    near = [x + rng.normal(0, 0.001, 20) for x in rollout]
    far = [x + rng.normal(0, 0.05, 20) for x in rollout]
    assert (
        paired_test(rollout, near, far).first_fits and paired_test(rollout, far, near).second_fits
    )
    assert not paired_test(rollout, near, near).decided and not paired_test([], [], []).decided
