"""TRL's batches, from a run of tests/frameworks/recording/real_trl.py, passed through the adapter."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mismatch_cli import Recorder
from mismatch_cli.frameworks import dialects
from mismatch_cli.frameworks.trl.recorder import columns, record, run_facts
from mismatch_cli.studies.translation import Translation
from mismatch_cli.trace.reader import Trace
from tests.paths import DOCS, ROOT
from tests.studies.compared import rows_of

MODEL = ROOT / "sample_data/model"
BATCHES = Path(__file__).parent / "trl_batches.npz"
TUTORIAL = ("tutorials/trl.md", "2. Record the run")
# The metrics that TRL logged with the batches; clips need the trainer as it is in the update
LOGGED = tuple(
    line.name for line in dialects.lines("trl") if line.compares == "recomputed / rollout"
)


def batches() -> list[dict[str, torch.Tensor]]:
    """By step, as returned by `GRPOTrainer._generate_and_score_completions`."""
    tensors: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    with np.load(BATCHES) as arrays:
        for name in sorted(arrays.files):
            step, _, column = name.partition("/")
            if column:
                tensors[step][column] = torch.from_numpy(arrays[name])
    return list(tensors.values())


def trainer(answers: list[dict[str, Any]], **changes: Any) -> Any:
    """A stand-in for TRL's trainer, which is not installed here: the parts that `record` reads,
    and a run's batches.
    """
    waiting, rewards = deque(answers), np.arange(16.0)
    standard = {
        "args": SimpleNamespace(bf16=True, fp16=False, temperature=0.9, top_p=1.0, top_k=None),
        "model": SimpleNamespace(name_or_path="some-model", dtype=torch.float32, training=True),
        "accelerator": SimpleNamespace(process_index=0),
        "state": SimpleNamespace(global_step=0),
        "eos_token_ids": [1],
        "reward_weights": torch.tensor([1.0, 0.5]),
        "_tokenizer": transformers.AutoTokenizer.from_pretrained(MODEL),
        "_logs": {"rewards": {"a": deque(rewards), "b": deque([np.nan, *rewards[1:]])}},
        "_generate_and_score_completions": lambda _: waiting.popleft(),
    }
    made = SimpleNamespace(**standard | changes)

    def train() -> None:
        for made.state.global_step, answer in enumerate(answers):
            assert made._generate_and_score_completions([]) is answer

    made.train = train
    return made


def run_the_lines_of_the_page(page: str, heading: str, **names: Any) -> None:
    """Run the lines below a heading of the guide, with what a reader already has in `names`."""
    text = (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    run_the_lines_of(text.partition("```python\n")[2].partition("```")[0], **names)


def run_the_lines_of(block: str, **names: Any) -> None:
    """Run the lines of a block, without those that make what is in `names`."""
    exec("\n".join(line for line in block.splitlines() if "(...)" not in line), names)


def recorded(
    folder: Path, answers: list[dict[str, Any]], **changes: Any
) -> tuple[Trace, dict[str, int]]:
    """The trace of the steps in order."""
    stand_in = trainer(answers, **changes)
    recorder = record(stand_in, str(folder))
    stand_in.train()
    recorder.close()
    return Trace.open(folder), recorder.counts


def test_the_lines_of_the_guide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_the_lines_of_the_page(*TUTORIAL, trainer=trainer(batches()))
    assert Trace.open(tmp_path / "run").num_responses == 32


def test_its_dialect_reports_what_trl_logged(tmp_path):
    with np.load(BATCHES) as arrays:
        logged = arrays["logged"]
    for step, (batch, values) in enumerate(zip(batches(), logged, strict=True)):
        trace, _ = recorded(tmp_path / str(step), [batch])
        metrics = Translation.of([trace], "trl").to_json()["frameworks"]["trl"]["metrics"]
        of_framework = {line["name"]: line["value"] for line in metrics if line["name"] in LOGGED}
        assert of_framework == pytest.approx(dict(zip(LOGGED, values, strict=True)), abs=1e-6)


def test_a_batch_is_recorded_as_it_was(tmp_path):
    answers = batches()
    trace, counts = recorded(tmp_path / "run", answers)
    rows = rows_of(trace.folder)
    assert counts["written"] == len(rows) == 8 * len(answers)
    for row, number in zip(rows, range(len(rows)), strict=True):
        step, place = divmod(number, 8)
        batch, mask = answers[step], answers[step]["completion_mask"][place].bool()
        assert row["step"] == row["version_rollout"] == row["version_trainer"] == step
        assert (
            row["prompt_ids"]
            == batch["prompt_ids"][place][batch["prompt_mask"][place].bool()].tolist()
        )
        assert row["response_ids"] == batch["completion_ids"][place][mask].tolist() and all(
            row["loss_mask"]
        )
        for name, theirs in (
            ("logp_rollout", "sampling_per_token_logps"),
            ("logp_trainer", "old_per_token_logps"),
        ):
            np.testing.assert_array_equal(np.float32(row[name]), batch[theirs][place][mask].numpy())
        assert row["advantage"] == [batch["advantages"][place].item()] * len(row["response_ids"])
        assert row["finish_reason"] == ("stop" if row["response_ids"][-1] == 1 else "length")
        # The first has one reward that applies
        assert row["reward"] == (0.0 if place == 0 else 1.5 * place)
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    manifest = trace.manifest
    assert (
        manifest["trainer"]["dtype"] == "bfloat16"
        and manifest["rollout"]["engine"] == "transformers"
    )
    assert manifest["config"]["sampling"] == {"temperature": 0.9, "top_p": 1.0}


def test_each_rank_takes_its_own_rewards(tmp_path):
    rank_0 = Recorder(tmp_path / "run")
    trace, _ = recorded(
        tmp_path / "run", batches()[:1], accelerator=SimpleNamespace(process_index=1)
    )
    rows = rows_of(trace.folder)
    assert [row["reward"] for row in rows] == [1.5 * place for place in range(8, 16)]
    rank_0.close()


def test_only_a_resumed_training_continues_a_recording(tmp_path):
    """TRL's trainer has a step above 0 at its first batch if it began from a checkpoint."""
    for started, expected in ((0, "run"), (0, "run-2"), (3, "run-2")):
        stand_in = trainer(batches()[:1], state=SimpleNamespace(global_step=started))
        recorder = record(stand_in, str(tmp_path / "run"))
        stand_in._generate_and_score_completions([])
        recorder.close()
        assert recorder.folder == tmp_path / expected


def test_untrained_tokens_do_not_count(tmp_path):
    """Hidden responses (mask_truncated_completions) and tool output."""
    batch = batches()[0]
    batch["completion_mask"][2] = 0
    batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
    batch["tool_mask"][3, 4:9] = 0
    trace, _ = recorded(tmp_path / "run", [batch])
    rows = rows_of(trace.folder)
    assert len(rows) == 8 and not any(rows[2]["loss_mask"]) and 0 not in rows[2]["response_ids"]
    assert [place for place, trained in enumerate(rows[3]["loss_mask"]) if not trained] == [
        4,
        5,
        6,
        7,
        8,
    ]


def test_an_unknown_reward_is_none(tmp_path):
    """Responses without a score, and functions with the same name, whose values TRL mixes."""
    unscored = {"rewards": {"a": deque([np.nan] * 8), "b": deque([np.nan] * 8)}}
    for name, logs in (("unscored", unscored), ("same", {"rewards": {"a": deque(range(16))}})):
        trace, _ = recorded(tmp_path / name, batches()[:1], _logs=logs)
        assert {row["reward"] for row in rows_of(trace.folder)} == {None}


def test_an_evaluation_is_not_recorded(tmp_path):
    stand_in = trainer(batches())
    recorder = record(stand_in, str(tmp_path / "run"))
    stand_in.model.training = False
    stand_in._generate_and_score_completions([])
    assert recorder.counts["given"] == 0


def test_a_different_trl_does_not_end_the_run(tmp_path, caplog):
    """The adapter reads private names of TRL: one that is gone only costs the recording."""
    stand_in, batch = trainer(batches()), batches()[0]
    del stand_in._logs
    recorder = record(stand_in, str(tmp_path / "run"))
    for key in ("completion_ids", "advantages"):
        assert torch.equal(
            stand_in._generate_and_score_completions([])[key],
            batches()[0 if key[0] == "c" else 1][key],
        )
    recorder.close()
    assert caplog.text.count("'_logs'") == 1 and batch
    without_vllm = {
        name: values for name, values in batch.items() if name != "sampling_per_token_logps"
    }
    recorder = record(stand_in := trainer([without_vllm]), str(tmp_path / "other"))
    stand_in._generate_and_score_completions([])
    recorder.close()
    assert (
        recorder.counts["refused"] == 8
        and "without log-probabilities of the rollout engine" in caplog.text
    )
    assert columns(stand_in, without_vllm)["logp_rollout"] is None


def test_the_engine_and_the_precision_are_those_of_the_settings():
    """vLLM in this process says its own, a server does not; mixed precision is that of the pass."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype="float16"),
        cache_config=SimpleNamespace(cache_dtype="fp8"),
    )
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
    facts = run_facts(trainer([], vllm_generation=SimpleNamespace(llm=llm)))
    own = {"dtype": "float16", "kv_cache_dtype": "fp8"}
    assert facts["rollout"] == {"engine": "vllm", "model": "some-model", **own}
    server = trainer([], vllm_generation=SimpleNamespace())
    assert run_facts(server)["rollout"] == {"engine": "vllm", "model": "some-model"}
    for bf16, fp16, dtype in (
        (True, False, "bfloat16"),
        (False, True, "float16"),
        (False, False, torch.float32),
    ):
        server.args.bf16, server.args.fp16 = bf16, fp16
        assert run_facts(server)["trainer"]["dtype"] == dtype
