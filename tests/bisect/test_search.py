"""A search from the command line: killed and resumed, out of budget, on two ranks, of a model,
and refused.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.trace.reader import Trace
from tests.warm import Forked, cli

TRACE = str(bundled("traces") / "bfloat16")
# The Hugging Face engine reads again what vLLM sampled, and the trainer stays in bfloat16.
BISECT = [
    "bisect",
    TRACE,
    *["--engine", "hf", "--responses", "16", "--threads", "1", "--no-plots", "--quiet"],
]


def start(output: Path, *more: str) -> Forked:
    return cli(*BISECT, "--output", str(output), *more)


def finish(process: Forked) -> str:
    said = process.ended()
    assert process.returncode == 0, said
    return said


def result(output: Path) -> dict[str, Any]:
    """The JSON without timings and paths."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            dropped = ("seconds", "cost", "trace", "command")
            return {name: timeless(item) for name, item in value.items() if name not in dropped}
        return [timeless(item) for item in value] if isinstance(value, list) else value

    summary: dict[str, Any] = timeless(json.loads((output / "summary.json").read_text()))
    return summary


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    output: Path = tmp_path_factory.mktemp("bisect") / "unbroken"
    finish(start(output, "--stages", "1,2"))
    return output


def test_every_leg_is_a_trace_that_other_commands_read(unbroken):
    summary = json.loads((unbroken / "summary.json").read_text())
    assert {"as-recorded", "rollout-again", "rollout-prefill", "trainer-again"} <= {
        leg["name"] for leg in summary["legs"]
    }
    for leg in summary["legs"]:
        trace = Trace.open(unbroken / leg["trace"])
        assert not trace.completeness.partial
        assert trace.num_responses == leg["responses"]
    pair = [str(unbroken / "legs" / name) for name in ("as-recorded", "trainer-again")]
    compared = cli("compare", *pair, "--json", "--output", str(unbroken.parent / "compared"))
    finish(compared)


@pytest.mark.slow
def test_killed_and_resumed_equals_unbroken(unbroken, tmp_path):
    """Killed between a leg's manifest and its first shard: existing legs are kept, and the
    result is the same.
    """
    process = start(tmp_path / "run", "--stages", "1,2")
    begun = tmp_path / "run" / "legs" / "rollout-uncached"
    while not (begun / "manifest.json").exists():
        assert process.poll() is None, process.said()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.ended()
    for shard in begun.glob("shard-*"):  # which may have been written before the signal
        shard.unlink()
    first = tmp_path / "run" / "legs" / "rollout-again" / "shard-00000.parquet"
    written = first.stat().st_mtime_ns
    finish(start(tmp_path / "run", "--resume"))
    assert first.stat().st_mtime_ns == written
    assert result(tmp_path / "run") == result(unbroken)


def test_resuming_a_finished_search_loads_no_model(unbroken):
    before = {path: path.stat().st_mtime_ns for path in (unbroken / "legs").rglob("*.parquet")}
    process = cli(*BISECT[:-1], "--output", str(unbroken), "--resume")
    assert "Loading" not in finish(process)
    assert {
        path: path.stat().st_mtime_ns for path in (unbroken / "legs").rglob("*.parquet")
    } == before


def test_force_keeps_nothing_of_an_earlier_search(tmp_path):
    finish(start(tmp_path / "run", "--budget", "0"))
    finish(
        start(
            tmp_path / "run",
            "--force",
            "--budget",
            "0",
            "--responses",
            "8",
            "--trainer-dtype",
            "float32",
        )
    )
    assert result(tmp_path / "run")["responses"] == 8


def test_budget_and_stages_say_what_was_not_done(tmp_path):
    finish(start(tmp_path / "run", "--budget", "0", "--stages", "0,2"))
    stages = {
        stage["stage"]: (stage["status"], stage["why"])
        for stage in result(tmp_path / "run")["stages"]
    }
    assert stages[0][0] == "not reached"
    assert "--budget" in stages[0][1]
    assert stages[1] == stages[3] == ("skipped", "not asked for")
    assert result(tmp_path / "run")["causes"] == []


@pytest.mark.slow
def test_two_ranks_find_the_same(unbroken, tmp_path):
    """Each reads its part of every leg; in bfloat16, other batches round differently, on each
    processor in its way.

    A share may move within the half-width of its own interval.
    """
    finish(start(tmp_path / "run", "--stages", "1,2", "--nproc", "2"))
    alone, together = result(unbroken), result(tmp_path / "run")
    assert [row["setting"] for row in together["causes"]] == [
        row["setting"] for row in alone["causes"]
    ]
    assert {leg["name"]: leg["responses"] for leg in together["legs"]}.items() >= {
        ("trainer-again", 16)
    }
    for row, same in zip(together["causes"], alone["causes"], strict=True):
        low, high = same["share"]["low"], same["share"]["high"]
        assert row["share"]["value"] == pytest.approx(same["share"]["value"], abs=(high - low) / 2)


def test_a_model_is_probed_first(tmp_path):
    size = (
        "--num-prompts 12 --samples-per-prompt 1 --max-tokens 8 --rollout-dtype float32 "
        "--trainer-dtype float32"
    )
    model = str(bundled("model"))
    process = cli(
        "bisect",
        model,
        *f"--engine hf --no-plots --json {size}".split(),
        "--output",
        str(tmp_path / "run"),
    )
    said = finish(process)
    summary = result(tmp_path / "run")
    assert (summary["responses"], summary["causes"]) == (12, [])
    assert "below what float32 resolves" in said
    assert summary["verdict"].startswith("Nothing to explain")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--trainer-model", "./nowhere"], "There is no model folder nowhere"),
        (["--rollout-adapter", "./nowhere"], "is not an adapter"),
        (["--stages", "7"], "--stages 7"),
        (["--engine", "vllmm"], "vllm"),
        (["--output", TRACE], "overlaps the input"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_read(tmp_path, flags, said):
    process = cli("bisect", TRACE, "--output", str(tmp_path / "run"), *flags)
    assert said in process.ended()
    assert process.returncode in (1, 2)
    assert not (tmp_path / "run").exists()
