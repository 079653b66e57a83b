"""The loop on the bundled model: every step is a line, any algorithm learns in it, and a broken
sync is noticed.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.models.engines import Request, sample_seed
from mismatch_cli.models.engines.hf import HfEngine
from mismatch_cli.models.loading import load_tokenizer
from mismatch_cli.probe.tasks.grading import MathVerify
from mismatch_cli.trace.reader import Trace
from mismatch_cli.train.coefficients import LearnedResponse
from mismatch_cli.train.evaluation import evaluate, evaluate_before
from mismatch_cli.train.learner import Learner, Update
from mismatch_cli.train.run import RunInProgress
from mismatch_cli.train.train_config import load_config
from tests.paths import DOCS
from tests.tiers import at_night
from tests.train.small_runs import SMALL, numbers, run


def test_every_step_is_a_line_with_a_proven_sync(unbroken):
    before, *lines = numbers(unbroken)
    assert before.keys() == {"step", "eval_accuracy", "eval"}
    assert [line["step"] for line in (before, *lines)] == [0, 1, 2, 3, 4]
    assert {line["sync"] for line in lines} == {"proven"}
    assert all(line["mismatch"]["abs_dp_mean"] < 1e-6 for line in lines)
    # The second minibatch is scored by newer weights
    assert lines[0]["current"]["abs_dp_mean"] > 1e-4
    assert all(0 <= line["eval_accuracy"] <= 1 for line in (before, lines[1], lines[3]))
    assert all("eval_accuracy" not in line for line in (lines[0], lines[2]))


def test_checkpoints_are_as_far_apart_as_said(unbroken):
    """A checkpoint's seconds are in the next step's line; four steps, one after every second."""
    lines = (unbroken / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    spent = {line["step"]: line["seconds"] for line in map(json.loads, lines) if line["step"]}
    assert [step for step in spent if "checkpoint" in spent[step]] == [3]


def test_every_number_of_a_line_is_documented(unbroken):
    text = (DOCS / "json" / "metrics.md").read_text(encoding="utf-8")
    line = json.loads((unbroken / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    for key in {*line, *line["mismatch"], *line["current"], *line["seconds"]}:
        assert f"`{key}`" in text, key


@pytest.mark.parametrize(
    "algorithm",
    [
        "grpo-clip-higher",
        "dppo-binary-tv-recompute",
        *at_night("pg-is", "gspo", "icepop"),
    ],
)
def test_other_algorithms_go_through_the_same_loop(algorithm, tmp_path):
    records = run(tmp_path / "run", steps=1, algorithm=algorithm)
    assert records[0]["blocked"] is not None
    assert records[0]["seconds"]["recompute"] >= 0


def test_a_trace_of_every_nth_step_can_be_opened(tmp_path):
    run(tmp_path / "run", steps=2, trace_every=2)
    assert sorted(path.name for path in (tmp_path / "run" / "traces").iterdir()) == ["step-2"]
    batch = next(iter(Trace.open(tmp_path / "run" / "traces" / "step-2").batches()))
    assert batch.num_responses == 16


@pytest.mark.slow
def test_a_resumed_low_precision_run_has_the_same_proofs(tmp_path):
    changes = {"rollout_dtype": "bfloat16", "trainer_dtype": "bfloat16", "steps": 2}
    run(tmp_path / "unbroken", **changes)
    run(tmp_path / "run", stop_after=1, **changes)
    run(tmp_path / "run", resume=True, **changes)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "unbroken")


@pytest.mark.parametrize("algorithm", ["dppo-topk-tv", *at_night("dppo-topk-kl-recompute")])
def test_top_k_masks_use_what_the_engine_reported(algorithm, tmp_path):
    records = run(tmp_path / "run", steps=2, algorithm=algorithm, trace_every=1, learning_rate=3e-3)
    assert records[0]["blocked"] is not None
    batch = next(iter(Trace.open(tmp_path / "run" / "traces" / "step-1").batches()))
    assert batch.topk_ids_TK is not None and batch.topk_ids_TK.shape[1] >= 20
    assert batch.topk_logp_trainer_TK is not None
    masses = [
        np.exp(columns_TK).sum(axis=1).mean()
        for columns_TK in (batch.topk_logp_rollout_TK, batch.topk_logp_trainer_TK)
    ]
    recorded = [records[0]["current"][f"topk_mass_{policy}"] for policy in ("rollout", "trainer")]
    assert (
        recorded == pytest.approx(masses, rel=1e-6)
        and "topk_mass_rollout" in records[0]["mismatch"]
    )


def test_a_gradient_that_is_not_finite_leaves_its_batch_as_a_trace(tmp_path, monkeypatch):
    """An engine that reports an absurdly small μ: the weight overflows, and no scaler can help."""
    sample = HfEngine.sample

    def absurd(self: HfEngine, *arguments: Any) -> Any:
        rollouts = sample(self, *arguments)
        for rollout in rollouts:
            rollout.logp_rollout_T[0] = -200.0
        return rollouts

    monkeypatch.setattr(HfEngine, "sample", absurd)
    with pytest.raises(MismatchError, match=r"not finite.*The data behind it is in"):
        run(tmp_path / "run", algorithm="pg-is")
    with pytest.raises(MismatchError, match="not finite"):
        run(tmp_path / "run", algorithm="pg-is", resume=True)
    batch = next(iter(Trace.open(tmp_path / "run" / "traces" / "not-finite").batches()))
    assert float(batch.logp_rollout_T.min()) == -200.0


def test_an_evaluation_is_the_mean_over_problems_of_the_mean_over_samples(tmp_path):
    """Computed again from the engine and the grader only; no training step uses its seeds."""
    rows = bundled("problems.jsonl").read_text(encoding="utf-8").splitlines()[100:106]
    (tmp_path / "evaluation.jsonl").write_text("\n".join(rows), encoding="utf-8")
    said: list[str] = []
    config = load_config(
        "miniature", SMALL | {"eval_dataset": str(tmp_path / "evaluation.jsonl"), "eval_samples": 3}
    )
    made = RunInProgress(config, tmp_path / "run", said.append)
    evaluate_before(made)
    evaluation = evaluate(made, 2)
    posed = made.task.evaluation["evaluation"]
    seeds = [
        [sample_seed(config.sampler.seed, place, sample, -2) for sample in range(3)]
        for place in range(6)
    ]
    requests = [
        Request(p.prompt_ids, seed)
        for p, its_seeds in zip(posed, seeds, strict=True)
        for seed in its_seeds
    ]
    rollouts = made.engine.sample(requests, lambda _: None)
    tokenizer = load_tokenizer(str(bundled("model")))
    with MathVerify() as grader:
        answers = [json.loads(rows[place])["answer"] for place in range(6) for _ in range(3)]
        texts = [tokenizer.decode(r.response_ids) for r in rollouts]
        judged = zip(texts, answers, rollouts, strict=True)
        reward_S = np.array(
            [grader.grade(text, answer, r.finish_reason) for text, answer, r in judged]
        )
    made.close()
    accuracy = pytest.approx(reward_S.reshape(6, 3).mean(axis=1).mean())
    assert (
        evaluation == {"eval_accuracy": accuracy, "eval": {"evaluation": accuracy}}
        and 0 < evaluation["eval_accuracy"] < 1
    )
    (line,) = numbers(tmp_path / "run")
    assert said == [f"Accuracy before the first step: {line['eval_accuracy']:.3f}"]
    training = {
        sample_seed(config.sampler.seed, p, s, step)
        for p in range(8)
        for s in range(4)
        for step in range(1, 5)
    }
    assert not training & {seed for of in seeds for seed in of}


@pytest.mark.slow
def test_without_eval_every_there_is_one_evaluation_at_the_end(tmp_path):
    run(tmp_path / "run", steps=2)
    assert [line.get("eval_accuracy") is not None for line in numbers(tmp_path / "run")] == [
        False,
        True,
    ]


def test_one_problem_is_enough(tmp_path):
    records = run(tmp_path / "run", steps=2, num_problems=1, prompts_per_step=1)
    assert {record["sync"] for record in records} == {"proven"}
    numbers(tmp_path / "run")


@pytest.fixture
def model_that_ends_at_once(tmp_path) -> str:
    """The bundled model, with every token an end token."""
    folder = tmp_path / "ends-at-once"
    shutil.copytree(bundled("model"), folder)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(
            json.dumps(content | {"eos_token_id": list(range(2048))}), encoding="utf-8"
        )
    return str(folder)


@pytest.mark.parametrize("algorithm", ["dppo-binary-tv", "dppo-topk-tv", "gspo"])
def test_empty_responses_teach_nothing_and_break_nothing(
    algorithm, model_that_ends_at_once, tmp_path
):
    run(
        tmp_path / "run", steps=2, model=model_that_ends_at_once, algorithm=algorithm, trace_every=1
    )
    for line in numbers(tmp_path / "run"):
        assert (line["length"], line["truncated"], line["groups_all_wrong"], line["grad_norm"]) == (
            1,
            0,
            1,
            0,
        )
        assert line["blocked"] is None and line["sync"] == "proven"


@pytest.mark.parametrize("algorithm", ["dppo-binary-tv", "dppo-topk-tv"])
def test_responses_of_the_longest_length_are_truncated_and_wrong(algorithm, tmp_path):
    run(tmp_path / "run", steps=1, algorithm=algorithm, max_tokens=5)
    (line,) = numbers(tmp_path / "run")
    assert (line["length"], line["truncated"], line["groups_all_wrong"]) == (5, 1, 1)


def _weights_of_steps(monkeypatch: Any) -> list[torch.Tensor]:
    weights: list[torch.Tensor] = []
    write = RunInProgress.write

    def recording(self: RunInProgress, record: dict[str, Any]) -> None:
        weights.append(
            torch.cat([p.detach().flatten().clone() for p in self.learner.model.parameters()])
        )
        write(self, record)

    monkeypatch.setattr(RunInProgress, "write", recording)
    return weights


def test_a_step_with_only_right_answers_moves_by_momentum_only(tmp_path, monkeypatch):
    """Grading is a mock: all right in steps 1 and 3, half in step 2.

    AdamW steps as in published trainers.
    """
    earned = iter([[1, 1], [1, 0], [1, 1]])
    monkeypatch.setattr(
        RunInProgress,
        "grade",
        lambda self, posed, _: np.resize(np.array(next(earned), np.float32), len(posed)),
    )
    monkeypatch.setattr("mismatch_cli.train.loop.evaluate", lambda *_: {"eval_accuracy": 0.0})
    weights = _weights_of_steps(monkeypatch)
    run(tmp_path / "run", steps=3, rollout_dtype="bfloat16")
    first, second, third = numbers(tmp_path / "run")
    assert [line["groups_all_right"] for line in (first, second, third)] == [1, 0, 1]
    assert [line["grad_norm"] == 0 for line in (first, second, third)] == [True, False, True]
    assert first["blocked"] is first["bad_over_negative"] is None
    assert third["updates"] == 6 and not torch.equal(weights[1], weights[2])


def test_no_gradient_takes_memory_while_the_engine_samples(tmp_path, monkeypatch):
    gradients: list[bool] = []
    sample = RunInProgress.sample

    def counting(self: RunInProgress, *arguments: Any) -> list[Any]:
        gradients.append(any(weight.grad is not None for weight in self.learner.model.parameters()))
        return sample(self, *arguments)

    monkeypatch.setattr(RunInProgress, "sample", counting)
    run(tmp_path / "run", steps=2)
    assert gradients and not any(gradients)


@pytest.fixture
def learned(monkeypatch) -> list[tuple[list[LearnedResponse], Update]]:
    """What the learner was given for every update, and what came of it."""
    updates: list[tuple[list[LearnedResponse], Update]] = []
    update = Learner.update

    def noting(self: Learner, samples: Any) -> Update:
        updates.append((list(samples), update(self, samples)))
        return updates[-1][1]

    monkeypatch.setattr(Learner, "update", noting)
    return updates


def test_a_later_minibatch_is_judged_by_the_policy_that_sampled(tmp_path, learned):
    """The first has that policy's weights, so that its own log π is the recomputed one."""
    run(tmp_path / "run", steps=1, algorithm="ppo", minibatches=2, epochs=2, trace_every=1)
    (batch,) = Trace.open(tmp_path / "run" / "traces" / "step-1").batches()
    bounds = zip(batch.offset_S1[:-1], batch.offset_S1[1:], strict=True)
    uses = zip(
        batch.step_S,
        batch.epoch_S,
        batch.minibatch_S,
        batch.prompt_id_S,
        batch.sample_index_S,
        strict=True,
    )
    recorded = {
        tuple(map(int, use)): batch.logp_recomputed_T[first:end]
        for use, (first, end) in zip(uses, bounds, strict=True)
    }
    assert all(sample.logp_recomputed_T is None for sample in learned[0][0])
    assert len(learned) == 4
    for samples, _ in learned[1:]:
        for sample in samples:
            assert np.array_equal(sample.logp_recomputed_T, recorded[sample.row_key])


def test_an_advantage_is_the_reward_less_the_mean_of_its_group(tmp_path, learned, monkeypatch):
    rewards = np.resize(np.array([1, 0, 0, 0, 1, 1, 1, 0], np.float32), 16)
    monkeypatch.setattr(RunInProgress, "grade", lambda *_: rewards)
    run(tmp_path / "run", steps=1, minibatches=1)
    (samples,) = (samples for samples, _ in learned)
    expected = (rewards.reshape(-1, 4) - rewards.reshape(-1, 4).mean(1, keepdims=True)).ravel()
    assert sorted(s.advantage for s in samples) == pytest.approx(sorted(expected))
    good = [s for s in samples if s.advantage > 0]
    assert len(good) == (rewards == 1).sum()


def test_every_epoch_has_its_own_minibatches(tmp_path, learned):
    run(tmp_path / "run", steps=1, minibatches=2, epochs=2)
    first, _, again, _ = ({sample.row_key[3:] for sample in samples} for samples, _ in learned)
    assert first != again


def test_the_gradient_norm_of_a_step_is_the_mean_of_its_updates(tmp_path, learned):
    run(tmp_path / "run", steps=1, minibatches=2)
    norms = [update.grad_norm for _, update in learned]
    assert norms[0] != norms[1]
    assert numbers(tmp_path / "run")[0]["grad_norm"] == pytest.approx(np.mean(norms))


def test_a_step_that_overflows_in_float16_is_no_update(tmp_path, monkeypatch):
    update = Learner.update

    def overflowing(self: Learner, samples: Any) -> Update:
        self.loss_scale.value = 2.0**100
        return update(self, samples)

    monkeypatch.setattr(Learner, "update", overflowing)
    run(tmp_path / "run", steps=1, trainer_dtype="float16", rollout_dtype="float16")
    (line,) = numbers(tmp_path / "run")
    assert (line["updates"], line["back_offs"]) == (0, 2)
