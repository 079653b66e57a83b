"""One optimiser step: its gradient is that of the published objective, and a saved learner
continues to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.hashing import hash_keys, mix
from mismatch_cli.base.options import build, replaced
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.rules.algorithms.algorithm import judges_single_tokens
from mismatch_cli.rules.algorithms.parse import find
from mismatch_cli.rules.algorithms.table import TABLE, VARIANTS
from mismatch_cli.rules.batch import Rollout
from mismatch_cli.train.checkpoint import latest_checkpoint, save_checkpoint
from mismatch_cli.train.judged import Judged, Sample
from mismatch_cli.train.learner import Learner, LossScale, unpublished
from mismatch_cli.train.train_config import AGGREGATIONS, TrainConfig
from tests.looped import looped
from tests.rules.algorithms import published
from tests.rules.algorithms.published_owners import OF_TABLE

PLAIN = SamplingSettings()
CONFIG = build(
    TrainConfig,
    {"learning_rate": 1e-30, "max_tokens": 40, "max_grad_norm": 1e9, "token_budget": 120},
)
LENGTHS, ADVANTAGES = (21, 9, 30, 14, 1), (1.0, -0.5, -1.5, 0.7, 0.0)


@pytest.fixture
def make_learner(save_model) -> Callable[..., Learner]:
    folder = save_model("Qwen3", vocab_size=211, tie_word_embeddings=True)

    def make(algorithm: str = "dppo-binary-tv", dtype: str = "float32", **changes: Any) -> Learner:
        trainer = Trainer.load(folder, sampling=PLAIN, dtype=dtype)
        return Learner(trainer, find(algorithm), PLAIN, replaced(CONFIG, **changes))

    return make


def make_samples(learner: Learner, gap: float = 0.4) -> list[Sample]:
    """Responses of random tokens, with log-probs near the trainer's own; the last one has no
    advantage.
    """
    rng = np.random.default_rng(0)
    requests = [
        ScoreRequest([5, 7 + i], rng.integers(0, 211, n).tolist()) for i, n in enumerate(LENGTHS)
    ]
    samples = []
    for request, score, advantage in zip(
        requests, learner.trainer.score(requests, token_budget=500), ADVANTAGES, strict=True
    ):
        recomputed = np.minimum(
            score.logp_T + gap * rng.normal(size=len(score.logp_T)), -1e-3
        ).astype(np.float32)
        rollout = np.minimum(recomputed + gap / 2 * rng.normal(size=len(recomputed)), -1e-3).astype(
            np.float32
        )
        nothing = np.ones(len(rollout), dtype=np.int32)
        samples.append(
            Sample(
                Rollout(
                    request.prompt_ids, request.response_ids, rollout, nothing, None, None, "stop"
                ),
                advantage,
                recomputed,
                row_key=(1, 0, 0, len(samples) // 3, len(samples) % 3),
            )
        )
    return samples


def _luck(samples: list[Sample]) -> Tensor:
    """The random numbers of rules: one per token, from the key of its row and its position."""
    rows = [hash_keys(*(np.array([key]) for key in sample.row_key)) for sample in samples]
    hashes = [
        mix(row + np.arange(n, dtype=np.uint64)) for row, n in zip(rows, LENGTHS, strict=True)
    ]
    return torch.from_numpy((np.concatenate(hashes) >> np.uint64(11)) * 2.0**-53)


def through_logits(learner: Learner, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """log π and entropy of all response tokens, laid flat, with an autograd graph."""
    rows, entropies = [], []
    for sample in samples:
        ids = torch.tensor([sample.rollout.prompt_ids + sample.rollout.response_ids])
        logits = learner.model(input_ids=ids).logits[0, len(sample.rollout.prompt_ids) - 1 : -1]
        logp_TV = logits.float().log_softmax(-1)
        rows.append(logp_TV.gather(1, torch.tensor(sample.rollout.response_ids)[:, None])[:, 0])
        entropies.append(-(logp_TV.detach().exp() * logp_TV.detach()).sum(-1))
    return torch.cat(rows), torch.cat(entropies)


def gradients(learner: Learner) -> dict[str, Tensor]:
    return {
        name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None
    }


def assert_same_gradients(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-5
) -> None:
    assert set(found) == set(expected)
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name].float(), gradient.float(), atol=tolerance * largest, rtol=1e-4
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
    samples = make_samples(learner)
    update = learner.update(samples)
    found = gradients(learner)
    logp_T, entropy_T = through_logits(learner, samples)
    flat = [
        torch.from_numpy(np.concatenate([pick(s) for s in samples]))
        for pick in (_recomputed, _rollout)
    ]
    advantage_T = torch.tensor(np.repeat(ADVANTAGES, LENGTHS), dtype=torch.float32)
    nothing = torch.zeros(len(logp_T), 0)
    context = (
        (nothing, nothing, nothing),
        entropy_T,
        [s.row_key[3] for s in samples],
        _luck(samples),
    )
    terms_T = OF_TABLE[name](published.Sample(logp_T, *flat, advantage_T, list(LENGTHS), *context))
    learner.model.zero_grad(set_to_none=True)
    (
        -published.aggregated(terms_T, list(LENGTHS), aggregation, CONFIG.sampler.max_tokens)
    ).backward()
    assert_same_gradients(found, gradients(learner))
    np.testing.assert_allclose(np.concatenate(update.logp), logp_T.detach().numpy(), atol=2e-5)


def _recomputed(sample: Sample) -> np.ndarray:
    assert sample.logp_recomputed_T is not None
    return sample.logp_recomputed_T


def _rollout(sample: Sample) -> np.ndarray:
    return sample.rollout.logp_rollout_T


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
    found = []
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
            found.append(gradients(learner))
    assert all(torch.equal(found[0][name], gradient) for name, gradient in found[1].items())


def test_top_k_rows_need_the_engines_top_k(make_learner):
    learner = make_learner("dppo-topk-tv")
    with pytest.raises(MismatchError, match="top_logprobs = 20"):
        learner.update(make_samples(make_learner()))


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
            for score in learner.trainer.score(
                [ScoreRequest(s.rollout.prompt_ids, s.rollout.response_ids)], token_budget=500
            )
        ]
        norms[name] = learner.update(samples).grad_norm
    assert norms == pytest.approx(dict.fromkeys(norms, norms["reinforce"]), rel=1e-3)


def test_micro_batches_do_not_change_the_gradient(make_learner):
    one, many = make_learner(token_budget=10_000), make_learner(token_budget=1)
    samples = make_samples(one)
    for learner in (one, many):
        learner.update(samples)
    assert_same_gradients(gradients(many), gradients(one))


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
    beyond = {name for name, row in TABLE.items() if not judges_single_tokens(row)}
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
    assert_same_gradients(gradients(tiled), gradients(whole))


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
        judged = Judged(
            find("reinforce"), [Sample(rollout, -1.5)], np.array([scale]), torch.device("cpu")
        )
        found_T = judged.coefficient(slice(None), torch.zeros(2))
        assert found_T.tolist() == [np.float32(-1.5) * np.float32(scale)] * 2
