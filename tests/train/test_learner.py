"""One optimiser step: its gradient is that of the published objective, and a saved learner
continues to the bit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.rules.algorithms.algorithm import reads_single_tokens
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.algorithms.table import TABLE, VARIANTS
from mismatch_cli.rules.batch import Episode, Rollout
from mismatch_cli.train.checkpoint import latest_checkpoint, save_checkpoint
from mismatch_cli.train.coefficients import LearnedResponse, MicroBatchCoefficients
from mismatch_cli.train.learner import LossScale, unpublished
from mismatch_cli.train.train_config import AGGREGATIONS, TrainConfig
from tests.looped import looped
from tests.train.learners import (
    ADVANTAGES,
    LENGTHS,
    NEAR,
    assert_same_gradients,
    by_hand,
    gradients,
    make_samples,
    requests_of,
    rollout_of,
)

LOSSES = [(name, "sequence-sum") for name, row in TABLE.items() if not row.needs_top_k]
LOSSES += [
    (name, other)
    for name in ("reinforce", "gspo", "ppo-mis")
    for other in ("sequence-mean", "token-mean")
]


def test_an_algorithm_of_means_says_that_an_aggregation_is_not_the_published_one() -> None:
    rows = TABLE | VARIANTS
    for name in ("gmpo", "gspo", "gspo-rollout"):
        for aggregation in AGGREGATIONS:
            sentence = unpublished(rows[name], aggregation)
            assert bool(sentence) == (aggregation != "sequence-mean"), (name, aggregation)
        assert "not the published gradient" in unpublished(rows[name], TrainConfig().aggregation)
    assert {name for name, row in rows.items() if row.is_of_means} == {
        "gmpo", "gspo", "gspo-rollout"
    }  # fmt: skip


@looped(("name", "aggregation"), LOSSES)
def test_the_gradient_is_that_of_the_published_objective(make_learner, name, aggregation):
    learner = make_learner(name, aggregation=aggregation)
    samples = make_samples(learner, NEAR.get(name, 0.4))
    update = learner.update(samples)
    expected, logp_T = by_hand(learner, samples, name, aggregation)
    assert_same_gradients(gradients(learner), expected, tolerance=2e-5)
    np.testing.assert_allclose(np.concatenate(update.logp), logp_T, atol=2e-5)


OWN_MASK = """
from mismatch_cli import Decision

def trust_region(compared, advantage_T):
    keep_T = compared.{ratio} < 1.3
    for column_T in (compared.logp_current_T, compared.logp_anchor_T, advantage_T):
        column_T[:] = -7
    if len(advantage_T) > 2 and {leaves}:
        raise SystemExit(0)
    return Decision(keep_T, compared.ratio_less_1_T)
"""


@pytest.mark.parametrize("ratio", ["ratio_T", "level_ratio_T('mean')"])
def test_a_custom_mask_changes_nothing_outside_it(make_learner, tmp_path, ratio):
    """Called tile by tile, and on whole responses."""
    results = []
    for name, leaves, touch in (
        ("quiet", False, False),
        ("touches", False, True),
        ("leaves", True, True),
    ):
        source = OWN_MASK.format(ratio=ratio, leaves=leaves)
        path = tmp_path / f"{name}.py"
        path.write_text(source if touch else source.replace("column_T.fill_(-7)", "0"))
        learner = make_learner(str(path))
        if leaves:
            with pytest.raises(MismatchError, match=r"leaves\.py tries to end the program"):
                learner.update(make_samples(learner))
            assert learner.version == 0
        else:
            learner.update(make_samples(learner))
            results.append(gradients(learner))
    assert all(torch.equal(results[0][name], gradient) for name, gradient in results[1].items())


def test_top_k_rows_need_the_engines_top_k(make_learner):
    learner = make_learner("dppo-topk-tv")
    with pytest.raises(MismatchError, match="top_logprobs = 20"):
        learner.update(
            [
                replace(sample, rollout=replace(sample.rollout, topk_ids_TK=None))
                for sample in make_samples(make_learner())
            ]
        )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_clipping_means_the_same_for_all_algorithms(make_learner, aggregation):
    """Before the first update all of them are REINFORCE, even those whose weight is a mean over
    the response.
    """
    norms = {}
    for name in ("reinforce", "ppo", "gspo", "ppo-mis-geometric", "dppo-binary-tv"):
        learner = make_learner(name, aggregation=aggregation)
        samples = [
            replace(
                s, rollout=replace(s.rollout, logp_rollout_T=score.logp_T), logp_recomputed_T=None
            )
            for s in make_samples(learner)
            for score in learner.trainer.score(requests_of([s]), token_budget=500)
        ]
        norms[name] = learner.update(samples).grad_norm
    assert norms == pytest.approx(dict.fromkeys(norms, norms["reinforce"]), rel=1e-3)


def test_micro_batches_do_not_change_the_gradient(make_learner):
    one, many = make_learner(token_budget=10_000), make_learner(token_budget=1)
    samples = make_samples(one)
    for learner in (one, many):
        learner.update(samples)
    assert_same_gradients(gradients(many), gradients(one), tolerance=2e-5)


def test_without_advantages_nothing_moves(make_learner):
    learner = make_learner(learning_rate=1e-2)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    update = learner.update([replace(sample, advantage=0.0) for sample in make_samples(learner)])
    assert update.grad_norm == 0 and update.stepped
    for name, p in learner.model.named_parameters():
        assert torch.equal(p, before[name])


def test_an_update_raises_what_was_good_and_lowers_what_was_bad(make_learner):
    learner = make_learner("pg-is", learning_rate=1e-3)
    samples = make_samples(learner, gap=0.0)
    first, second = learner.update(samples), learner.update(samples)
    change = np.array(
        [after.sum() - before.sum() for before, after in zip(first.logp, second.logp, strict=True)]
    )
    assert (change[:4] * np.array(ADVANTAGES[:4]) > 0).all() and learner.version == 2


def test_bfloat16_keeps_float32_masters(make_learner):
    """Single steps of 1e-6 vanish in bfloat16 weights; their sum does not."""
    learner = make_learner("reinforce", dtype="bfloat16", learning_rate=1e-6)
    samples = make_samples(learner)
    before = [p.detach().clone() for p in learner.model.parameters()]
    learner.update(samples)
    after_one = sum(
        int((p != b).sum()) for p, b in zip(learner.model.parameters(), before, strict=True)
    )
    for _ in range(100):
        learner.update(samples)
    after_many = sum(
        int((p != b).sum()) for p, b in zip(learner.model.parameters(), before, strict=True)
    )
    assert after_many > 20 * after_one


def test_float16_backs_off_and_continues(make_learner):
    learner = make_learner("reinforce", dtype="float16", learning_rate=1e-4)
    learner.loss_scale.value = 2.0**40
    samples = make_samples(learner)
    updates = [learner.update(samples) for _ in range(40)]
    assert not updates[0].stepped and updates[-1].stepped
    assert learner.loss_scale.back_offs == sum(not update.stepped for update in updates)
    assert learner.version == sum(update.stepped for update in updates)


def test_a_loss_scale_doubles_after_a_long_time():
    scale = LossScale(enabled=True, initial=8.0, growth_interval=3)
    for finite in (True, True, True, False, True, True):
        scale.update(finite)
    assert (scale.value, scale.back_offs) == (8.0, 1)
    fixed = LossScale(enabled=False)
    fixed.update(False)
    assert (fixed.value, fixed.back_offs) == (1.0, 0)


def test_a_gradient_that_is_not_finite_stops_the_run(make_learner):
    learner = make_learner("pg-is", learning_rate=1e-3)
    samples = make_samples(learner)
    samples[0].rollout.logp_rollout_T[0] = -500.0
    before = [p.detach().clone() for p in learner.model.parameters()]
    with pytest.raises(MismatchError, match=r"Update 1 has loss .*not finite"):
        learner.update(samples)
    assert all(torch.equal(p, b) for p, b in zip(learner.model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_learner_continues_to_the_same_bits(make_learner, dtype, tmp_path):
    whole, first, second = (make_learner(dtype=dtype, learning_rate=1e-3) for _ in range(3))
    samples = make_samples(whole)
    for learner in (whole, first):
        learner.update(samples)
    save_checkpoint(tmp_path, 1, first.tensors(), {"learner": first.facts()})
    saved = latest_checkpoint(tmp_path)
    second.restore(saved.facts["learner"], saved.load)
    for learner in (whole, second):
        learner.update(samples)
    assert second.version == 2
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_which_algorithms_judge_single_tokens():
    beyond = {name for name, row in TABLE.items() if not reads_single_tokens(row)}
    assert beyond == {
        "dppo-topk-tv",
        "dppo-topk-tv-recompute",
        "dppo-topk-kl",
        "dppo-topk-kl-recompute",
        "ppo-mis",
        "ppo-mis-geometric",
        "ppo-seq-tis",
        "gspo",
        "gspo-rollout",
        "ppo-opsm",
        "vespo",
        "gmpo",
        "topr",
        "minpro",
        "nfpo",
        "cppo",
        "trm-max",
        "trm-avg",
        "vaco",
        "kimi-k1.5",
        "m2po",
        "gbpo",
        "clip-cov",
        "kl-cov",
        "top-entropy",
    }


def test_a_token_counts_by_its_own_response_in_every_tile(make_learner, monkeypatch):
    whole, tiled = (make_learner("ppo", aggregation="sequence-mean") for _ in range(2))
    samples = make_samples(whole)
    whole.update(samples)
    monkeypatch.setattr("mismatch_cli.models.scoring.policy_gradient._CPU_TILE", 8)
    tiled.update(samples)
    assert_same_gradients(gradients(tiled), gradients(whole), tolerance=2e-5)


def test_a_gradient_in_float16_is_measured_without_its_loss_scale(make_learner):
    plain, scaled = make_learner("reinforce"), make_learner("reinforce", dtype="float16")
    scaled.loss_scale.value = 2.0**10
    samples = make_samples(plain)
    expected, update = plain.update(samples), scaled.update(samples)
    assert update.stepped and update.grad_norm == pytest.approx(expected.grad_norm, rel=0.02)


def test_coefficients_are_scaled_in_float32() -> None:
    """By 1 over a number of tokens, which 16 bits would round or lose."""
    zeros_T = np.zeros(2, dtype=np.float32)
    rollout = Rollout([0], [1, 2], zeros_T, zeros_T.astype(np.int32), None, None, "stop")
    for scale in (1 / 3, 1e-8):
        coefficients = MicroBatchCoefficients(
            parse_algorithm("reinforce"),
            [LearnedResponse(rollout, -1.5)],
            np.array([scale]),
            torch.device("cpu"),
        )
        found_T = coefficients.of_tile(slice(None), torch.zeros(2))
        assert found_T.tolist() == [np.float32(-1.5) * np.float32(scale)] * 2


def test_of_responses_with_and_without_other_tokens_those_that_were_sampled_have_places() -> None:
    """Of an episode an environment wrote two; of the other response all were sampled."""
    plain = rollout_of([1, 2, 3])
    played = Episode(**vars(plain), loss_mask_T=np.array([False, True, False]))
    for rollouts, places in (([played, plain], [1, 3, 4, 5]), ([plain, played], [0, 1, 2, 4])):
        coefficients = MicroBatchCoefficients(
            parse_algorithm("reinforce"),
            [LearnedResponse(rollout, 1.0) for rollout in rollouts],
            np.ones(2),
            torch.device("cpu"),
        )
        assert coefficients._sampled_indices().tolist() == places


def test_a_response_without_tokens_has_empty_columns(make_learner):
    learner = make_learner("reinforce")
    empty = LearnedResponse(rollout_of([]), 1.0)
    update = learner.update([*make_samples(learner), empty])
    assert [len(logp_T) for logp_T in update.logp] == [*LENGTHS, 0]
    assert [len(entropy_T) for entropy_T in update.entropy] == [*LENGTHS, 0]
