"""Training a mixture of experts with the engine's routes replayed: what it removes, records, and
cannot do.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.app.cli import run as typed
from mismatch_cli.base.errors import UsageError
from mismatch_cli.trace.reader import Trace
from mismatch_cli.train.task import check_runs
from mismatch_cli.train.train_config import load_config
from tests.moe_models import with_tokenizer
from tests.train.small_runs import assert_same_run, numbers, reward_file, run

# An engine in bfloat16: rounding flips routers.
MOE = {
    "rollout_dtype": "bfloat16",
    "max_tokens": 16,
    "steps": 2,
    "trace_every": 1,
    "minibatches": 2,
    "num_problems": 4,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("moe")
    settings = {"model": with_tokenizer(folder, num_hidden_layers=3), "reward": reward_file(folder)}
    for replay in (False, True):
        run(folder / str(replay), replay_routes=replay, **MOE, **settings)
    return folder, settings


def test_the_trainer_follows_the_engine(made):
    folder, _ = made
    traces = [Trace.open(folder / str(replay) / "traces" / "step-1") for replay in (False, True)]
    own, replayed = (next(trace.batches()) for trace in traces)
    gaps = [
        np.nanmean(np.abs(batch.logp_recomputed_T - batch.logp_rollout_T))
        for batch in (own, replayed)
    ]
    assert np.array_equal(own.response_ids_T, replayed.response_ids_T), (
        "both began with the same weights"
    )
    assert 0 < gaps[1] < 0.7 * gaps[0]
    trace = Trace.open(folder / "True" / "traces" / "step-1")
    assert trace.manifest["trainer"]["routes"] == "replayed"
    (batch,) = trace.batches()
    first_T = np.repeat(batch.minibatch_S == 0, np.diff(batch.offset_S1))
    assert (batch.route_flips_T[first_T] < 255).all() and (batch.route_flips_T[first_T] > 0).any()
    assert (batch.route_flips_T[~first_T] == 255).all(), "a later minibatch has other weights"


def test_every_step_reports_what_would_have_flipped(made):
    folder, _ = made
    for line in numbers(folder / "True"):
        assert 0 < line["routing"]["flipped_routers"] < line["routing"]["flipped_tokens"] < 1
        assert 0.9 < line["routing"]["agreement"] < 1
    assert all("routing" not in line for line in numbers(folder / "False"))


@pytest.mark.slow
def test_a_resumed_run_replays_too(made, tmp_path):
    folder, settings = made
    stopped = tmp_path / "run"
    run(stopped, replay_routes=True, stop_after=1, **MOE, **settings)
    run(stopped, replay_routes=True, resume=True, **MOE, **settings)
    assert_same_run(stopped, folder / "True")


def test_adapters_and_sequence_rules_replay_too(made, tmp_path):
    """LoRA on the experts besides the router; a first pass over whole batches; recomputed
    layers.
    """
    _, settings = made
    changes = MOE | {"steps": 1, "lora": True, "gradient_checkpointing": True, "algorithm": "m2po"}
    (record,) = run(tmp_path / "run", replay_routes=True, **changes, **settings)
    assert record["grad_norm"] > 0 and record["routing"]["flipped_tokens"] > 0


def test_engines_without_routes_are_refused_first(tmp_path, capsys):
    config = load_config(
        "miniature", {"engine": "server", "engine_url": "http://localhost:1", "replay_routes": True}
    )
    with pytest.raises(UsageError, match=r"--engine server does not report which experts it chose"):
        check_runs([config])
    flags = [
        "--steps",
        "1",
        "--prompts-per-step",
        "2",
        "--samples-per-prompt",
        "2",
        "--minibatches",
        "1",
    ]
    dense = [
        "train",
        "--engine",
        "hf",
        "--replay-routes",
        *flags,
        "--output",
        str(tmp_path / "run"),
        "--quiet",
    ]
    assert typed(dense) == 1
    assert "has no routers whose choices can be read" in capsys.readouterr().err
