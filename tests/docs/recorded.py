"""The run of a framework that a tutorial asks its reader to record: the bundled training run, as
that framework would have it, recorded or dumped with the lines and settings of the page.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mismatch_cli.base.places import bundled
from mismatch_cli.trace.reader import Trace
from tests.frameworks.importing.layouts import Row, column, nemo_rl, padded
from tests.frameworks.importing.prime_rl_run import Run
from tests.frameworks.recording.test_frameworks import registry_of_verl
from tests.frameworks.recording.test_trl import run_the_lines_of, trainer
from tests.paths import DOCS

_PAD = 0


def record_the_run(page: Path) -> bool:
    """Put into the present folder what a reader of this page has after recording; say whether the
    page asks for it.
    """
    make = _RUNS.get(page)
    if make:
        make(page.read_text(encoding="utf-8"))
    return make is not None


def steps_of_the_run() -> Iterator[tuple[int, list[Row]]]:
    rows = (r for table in Trace.open(bundled("traces/fp8-kv")).tables() for r in table.to_pylist())
    for step, of_step in groupby(rows, key=lambda row: row["step"]):
        yield step, list(of_step)


def block(text: str, kind: str) -> str:
    """The first block of a kind on a page."""
    match = re.search(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S)
    assert match, f"The page has no {kind} block."
    return match.group(1)


def _trl(text: str) -> None:
    """The lines of the page around a trainer that samples the run's batches."""
    steps = [rows for _, rows in steps_of_the_run()]
    waiting = iter(steps)

    def sample(_: Any) -> dict[str, torch.Tensor]:
        rows = next(waiting)
        made._logs["rewards"]["correct"] = column(rows, "reward")
        return _batch_of_trl(rows)

    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype="bfloat16"),
        cache_config=SimpleNamespace(cache_dtype="fp8"),
    )
    made = trainer(
        steps,
        args=SimpleNamespace(bf16=True, fp16=False, temperature=1.0, top_p=1.0, top_k=0),
        reward_weights=torch.ones(1),
        vllm_generation=SimpleNamespace(
            llm=SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
        ),
        _logs={"rewards": {}},
        _generate_and_score_completions=sample,
    )

    def train() -> None:
        for made.state.global_step, _ in enumerate(steps):
            made._generate_and_score_completions([])

    made.train = train
    run_the_lines_of(block(text, "python"), trainer=made)


def _batch_of_trl(rows: list[Row]) -> dict[str, torch.Tensor]:
    """What `GRPOTrainer._generate_and_score_completions` returns."""

    def mask_of(name: str) -> list[list[int]]:
        return [[1] * len(ids) for ids in column(rows, name)]

    def matrix(lists: list[list[Any]], *, left: bool = False) -> torch.Tensor:
        return torch.tensor(padded(lists, _PAD, left=left))

    return {
        "prompt_ids": matrix(column(rows, "prompt_ids"), left=True),
        "prompt_mask": matrix(mask_of("prompt_ids"), left=True),
        "completion_ids": matrix(column(rows, "response_ids")),
        "completion_mask": matrix(mask_of("response_ids")),
        "sampling_per_token_logps": matrix(column(rows, "logp_rollout")),
        "old_per_token_logps": matrix(column(rows, "logp_recomputed")),
        "advantages": torch.tensor([row["advantage"][0] for row in rows]),
    }


def _verl(text: str) -> None:
    """The trainer that the page's command chooses, with its settings, on the run's batches."""
    said = dict(re.findall(r"([\w.]+)=(\S+)", block(text, "bash")))
    logged = said["actor_rollout_ref.rollout.calculate_log_probs"] == "True"
    theirs = {
        "prompts": "prompt_ids",
        "responses": "response_ids",
        "loss_mask": "loss_mask",
        "old_log_probs": "logp_recomputed",
        "advantages": "advantage",
    } | ({"rollout_log_probs": "logp_rollout"} if logged else {})
    queue: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        module = said["VERL_USE_EXTERNAL_MODULES"]
        made = registry_of_verl(patch, queue, module)[said["trainer.v1.trainer_mode"]]()
        made.tokenizer = transformers.AutoTokenizer.from_pretrained(bundled("model"))
        rollout = SimpleNamespace(name="vllm", dtype="bfloat16", temperature=1.0)
        made.config = SimpleNamespace(
            trainer=SimpleNamespace(default_local_dir=said["trainer.default_local_dir"]),
            algorithm={},
            actor_rollout_ref=SimpleNamespace(
                rollout=rollout, model=SimpleNamespace(path="some-model")
            ),
        )
        for step, rows in steps_of_the_run():
            columns = {
                name: [*map(torch.tensor, column(rows, ours))] for name, ours in theirs.items()
            }
            columns["rm_scores"] = [torch.tensor([row["reward"]]) for row in rows]
            for name, values in columns.items():
                queue[name] = SimpleNamespace(unbind=lambda values=values: values)
            made.global_steps = step + 1
            tags = [{"min_global_steps": step, "max_global_steps": step}] * len(rows)
            made._compute_advantage(SimpleNamespace(tags=tags, keys=[], partition_id="train"), {})
        made.on_train_end()


def _prime_rl(text: str) -> None:
    """What the file monitor writes with the page's settings, sealed after every step."""
    decimals = tomllib.loads(block(text, "toml"))["monitors"]["file"].get("float_decimals", 4)
    run = Run(Path("runs/math"))
    first = 0
    for _, rows in steps_of_the_run():
        if decimals != "None":
            rounded = ("logp_rollout", "logp_trainer", "entropy_trainer", "advantage")
            rows = [
                row | {name: np.round(row[name], decimals).tolist() for name in rounded}
                for row in rows
            ]
        run.write(rows, first)
        run.seal()
        first += len(rows)


def _nemo_rl(_: str) -> None:
    """NeMo-RL logs its batches by itself."""
    folder = Path("logs/exp_001")
    folder.mkdir(parents=True)
    for step, rows in steps_of_the_run():
        nemo_rl(folder / f"train_data_step{step + 1}.jsonl", rows)


_TUTORIALS = DOCS / "tutorials"
_RUNS: dict[Path, Callable[[str], None]] = {
    _TUTORIALS / "trl.md": _trl,
    _TUTORIALS / "verl.md": _verl,
    _TUTORIALS / "prime-rl.md": _prime_rl,
    _TUTORIALS / "nemo-rl.md": _nemo_rl,
}
