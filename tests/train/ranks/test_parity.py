"""Two ranks compute what one does: gradients, steps and scores of fixed responses, for every
algorithm and model.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_models import saved_model
from tests.train.ranks.on_ranks import MIXTURE, MODELS, VOCABULARY, kept, run_on

TOLERANCE = 5e-6  # of each tensor's largest entry


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    for kind, (family, settings) in MODELS.items():
        saved_model(root / "models" / kind, family, vocab_size=VOCABULARY, **settings)
    return root


def _run_on_each(numbers: tuple[int, ...], what: str, folder: Path) -> None:
    with ThreadPoolExecutor(len(numbers)) as together:
        list(together.map(lambda ranks: run_on(ranks, what, folder), numbers))


@pytest.fixture(scope="module")
def gradients(folder) -> tuple[dict, dict]:
    _run_on_each((1, 2), "gradients", folder)
    return kept(folder, 1), kept(folder, 2)


def test_gradients_and_steps_are_those_of_one_rank(gradients):
    one, two = gradients
    assert one.keys() == two.keys() and len(one) > 35
    for case, expected in one.items():
        result = two[case]
        assert result["norm"] == pytest.approx(expected["norm"], rel=1e-5), case
        for kind in ("gradient", "after"):
            assert result[kind].keys() == expected[kind].keys()
            for name, tensor in expected[kind].items():
                largest = float(tensor.abs().max())
                error = float((result[kind][name] - tensor).abs().max())
                assert error <= TOLERANCE * largest, (case, kind, name, error / largest)


def test_measurements_before_and_after_the_step_are_the_same(gradients):
    one, two = gradients
    for case, expected in one.items():
        for kind in ("logp", "next"):
            for alone, shared in zip(expected.get(kind, []), two[case].get(kind, []), strict=True):
                np.testing.assert_allclose(shared, alone, atol=2e-5, err_msg=f"{case} {kind}")


def test_an_algorithm_changes_the_gradient(gradients):
    """Otherwise the comparison above would prove nothing."""
    one, _ = gradients
    norms = {case: result["norm"] for case, result in one.items() if case.startswith("tied")}
    assert len(set(norms.values())) > 15
    assert [case for case, norm in norms.items() if norm == 0] == [
        f"tied {name}"
        for name in ("ppo-mis-geometric", "trm-max", "trm-avg")  # which block all of these
    ]


def test_scores_are_those_of_one_rank(gradients, folder):
    """Each response alone in its micro-batch: then only the weights' memory layout differs,
    which chooses kernels.
    """
    one, two = kept(folder, 1, "scores"), kept(folder, 2, "scores")
    assert one.keys() == two.keys()
    for case, (scores, described) in one.items():
        rank_scores, description = two[case]
        assert description == described, case
        for expected, score in zip(scores, rank_scores, strict=True):
            assert expected.keys() == score.keys()
            for column, values in expected.items():
                if case[1] == "bfloat16":  # a kernel may round a logit to its neighbour
                    assert values is None or np.mean(score[column] != values) < 0.05, (case, column)
                elif values is not None:
                    np.testing.assert_allclose(
                        score[column], values, atol=2e-6, err_msg=f"{case} {column}"
                    )


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_resumed_on_one_and_on_three(gradients, folder):
    before = kept(folder, 2, "saved")
    _run_on_each((1, 3), "restored", folder)
    one, three = kept(folder, 1), kept(folder, 3)
    assert before.keys() == one["found"].keys() and one["version"] == three["version"] == 3
    for name, tensor in before.items():
        assert torch.equal(one["found"][name], tensor) and torch.equal(
            three["found"][name], tensor
        ), name
        # Not the weights: AdamW divides small gradients by their size
        if name.startswith("exp_avg."):
            largest = float(one["after"][name].abs().max())
            torch.testing.assert_close(
                three["after"][name], one["after"][name], atol=TOLERANCE * largest, rtol=0
            )
            assert not torch.equal(one["after"][name], tensor)


@pytest.mark.slow
def test_a_sharded_mixture_is_sent_layer_by_layer(tmp_path):
    """Not gathered whole on every rank: at the peak, at most twice the largest layer is alive
    beside the shards.
    """
    saved_model(tmp_path / "mixture", "Qwen3Moe", vocab_size=VOCABULARY, **MIXTURE)
    run_on(2, "sent", tmp_path)
    experts = (
        MIXTURE["num_experts"] * 3 * MIXTURE["hidden_size"] * MIXTURE["moe_intermediate_size"] * 4
    )
    assert 0.9 * experts < kept(tmp_path, 2, "sent")["alive"] < 2 * experts
