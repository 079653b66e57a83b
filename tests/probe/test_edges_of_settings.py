"""The range of seeds, and the size of shards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.errors import UsageError
from mismatch_cli.probe.config import RescoreConfig, RolloutConfig


@pytest.mark.parametrize(
    ("seed", "fault"),
    [(0, "engine"), (2**32 - 1, "engine"), (-1, "seed"), (2**32, "seed")],
)
def test_a_seed_has_32_bits(capsys, seed, fault):
    """A seed in range leaves the unknown engine to complain about."""
    assert run(["probe", "--seed", str(seed), "--engine", "none"]) == 2
    said = capsys.readouterr().err
    assert [name for name in ("engine", "seed") if f"--{name}" in said] == [fault]


@pytest.mark.parametrize(
    ("max_tokens", "samples", "prompts"),
    [(512, 1, 256), (4096, 4, 64), (8192, 1, 128), (8192, 3, 42), (2**20, 8, 1)],
)
def test_a_shard_has_256_responses_and_at_most_a_million_tokens(max_tokens, samples, prompts):
    sampler = SimpleNamespace(max_tokens=max_tokens, samples_per_prompt=samples)
    config = SimpleNamespace(sampler=sampler)
    assert RolloutConfig.prompts_per_shard.fget(config) == prompts


def test_a_version_of_the_weights_fits_a_column_of_32_bits_with_the_next_one():
    assert RescoreConfig.of({"weights": str(2**31 - 2)}).weights == "2147483646"
    with pytest.raises(UsageError, match="--weights 2147483647 is invalid"):
        RescoreConfig.of({"weights": str(2**31 - 1)})


def test_a_vocabulary_may_be_recorded_whole():
    settings = SimpleNamespace(top_logprobs=50)
    RolloutConfig.check_vocabulary(settings, 50)
    with pytest.raises(UsageError, match="top_logprobs = 50 exceeds the vocabulary of 49 tokens"):
        RolloutConfig.check_vocabulary(settings, 49)
