"""A small folder with one of everything that the commands read, and running a command line in a
copy of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pandas
import pyarrow as pa
import torch

from mismatch_cli.app.cli import run
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.models.loading import load_tokenizer
from tests.frameworks.importing import layouts
from tests.studies.compared import Row, rows_of, write_rows

FP8 = bundled("traces") / "fp8-kv"
CANARY = "canary"  # created by a payload if it is executed
SECONDS = 60  # per case; on a busy machine the slowest takes two
STOPPED = "Stopped before a model is loaded. Try another day."
LIMITS = (
    '[limits.abs_d_mean]\nmax = 0.5\n[limits."verl:training/rollout_probs_diff_mean"]\nmax = 0.3\n'
)
MASK = """from mismatch_cli import Decision

def trust_region(compared, advantage_T, *, limit: float = 1.5):
    return Decision(compared.ratio_T <= limit, compared.ratio_less_1_T)
"""


_made = tempfile.TemporaryDirectory(prefix="fuzz-")  # gone at the end of the process


class HangError(BaseException):
    """A case that took too long; no `except Exception` swallows it."""


@dataclass(frozen=True)
class Outcome:
    """The result of a command line, and the files before and after."""

    arguments: Sequence[str]
    code: int | None
    out: str
    err: str
    before: dict[str, bytes]
    after: dict[str, bytes]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@cache
def template() -> Path:
    """The folder that cases are copied from, made once per process."""
    folder = Path(_made.name) / "world"
    rows = _rows()
    for name in ("run/trace", "other"):
        write_rows(folder / name, rows, FP8, shards=2)
    (folder / "existing").mkdir()
    (folder / "existing" / "precious.txt").write_text("keep me")
    (folder / "mask.py").write_text(MASK)
    (folder / "limits.toml").write_text(LIMITS)
    (folder / "preset.toml").write_text("steps = 2\nprompts_per_step = 2\nminibatches = 1\n")
    _write_prompts(folder)
    _write_dumps(folder / "dumps", rows)
    _write_training(folder / "training")
    return folder


def _rows() -> list[Row]:
    """Twelve responses of the bundled trace to as many prompts, their first ten tokens."""
    by_prompt = {row["prompt_id"]: row for row in rows_of(FP8)}
    return list(map(_short, list(by_prompt.values())[:12]))


def _short(row: Row) -> Row:
    short = dict(row)
    for name, values in row.items():
        if isinstance(values, list) and name != "prompt_ids":
            # Twenty ranks of each token lie flat
            short[name] = values[: 10 * 20 if name.startswith("topk") else 10]
    return short


def _write_prompts(folder: Path) -> None:
    rows = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)]
    frame = pandas.DataFrame(rows)
    frame.to_json(folder / "prompts.jsonl", orient="records", lines=True)
    frame.to_json(folder / "prompts.json", orient="records")
    frame.to_csv(folder / "prompts.csv", index=False)
    frame.to_parquet(folder / "prompts.parquet")


def _write_dumps(folder: Path, rows: list[Row]) -> None:
    some = [row | {"step": 0} for row in rows[:4]]
    plain = list(map(layouts.plain_record, some))
    layouts.write_lines(folder / "plain" / "plain.jsonl", plain)
    layouts.write_parquet(folder / "plain-parquet" / "plain.parquet", pa.Table.from_pylist(plain))
    layouts.prime_rl(folder / "prime-rl", some)
    (folder / "nemo-rl").mkdir()
    layouts.nemo_rl(folder / "nemo-rl" / "train_data_step0.jsonl", some)
    samples = layouts.slime_samples(some)
    layouts.save(folder / "slime" / "rollout_0.pt", {"rollout_id": 0, "samples": samples})
    layouts.slime_train(folder / "slime-train" / "0_0.pt", some)
    layouts.write_lines(
        folder / "open-instruct" / "rollouts_000000.jsonl",
        [layouts.open_instruct_record(row, i) for i, row in enumerate(some)],
    )


def _write_training(folder: Path) -> None:
    """A run of `train` as it is after three steps."""
    from mismatch_cli.train.train_config import TrainConfig

    steps: list[Row] = [{"step": 0, "eval_accuracy": 0.5}]
    for n in (1, 2, 3):
        seconds = {"sample": 1.0}
        steps.append({"step": n, "reward_mean": 0.1 * n, "grad_norm": 1.0, "seconds": seconds})
    layouts.write_lines(folder / "metrics.jsonl", steps)
    (folder / "config.toml").write_text(TrainConfig().to_toml())


@contextlib.contextmanager
def copy() -> Iterator[Path]:
    """A copy to break, as the working directory, three levels below anything it could harm."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        folder = Path(temporary) / "a" / "b" / "c"
        # Three folders above it, a path like ../../x stays in what is removed
        shutil.copytree(template(), folder)
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


def call(folder: Path, *arguments: str) -> Outcome:
    """Run a command line in this process, as a shell would, without models and figures."""
    out, err = io.StringIO(), io.StringIO()
    before = contents(folder)
    with (
        _without_models(),
        _deadline(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run(arguments)
    return Outcome(arguments, code, out.getvalue(), err.getvalue(), before, contents(folder))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by name, also those above the folder; anything else counts as empty."""
    files = {}
    for path in folder.parents[2].rglob("*"):
        if not path.is_dir():
            content = path.read_bytes() if path.is_file() else b""
            files[os.path.relpath(path, folder)] = content
    return files


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise HangError(f"more than {SECONDS} seconds")

    # A hang in C code ends too: the alarm comes from the system
    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _stop(*_: Any, **__: Any) -> Any:
    raise MismatchError(STOPPED)


@contextlib.contextmanager
def _without_models() -> Iterator[None]:
    """Everything up to the loading of a model is real."""
    tokenizer = cache(load_tokenizer)
    replaced = {
        "mismatch_cli.probe.rollouts.create_engine": _stop,
        "mismatch_cli.train.run.create_engine": _stop,
        "mismatch_cli.models.scoring.trainer.Trainer.load": _stop,
        "mismatch_cli.probe.record.load_tokenizer": tokenizer,
        "mismatch_cli.probe.curate.load_tokenizer": tokenizer,
        "mismatch_cli.train.run.load_tokenizer": tokenizer,
        "mismatch_cli.report.figures.plots_for": lambda _: (),
    }
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as patches:
        for name, stand_in in replaced.items():
            patches.enter_context(mock.patch(name, stand_in))
        try:
            yield
        finally:
            torch.set_num_threads(threads)
