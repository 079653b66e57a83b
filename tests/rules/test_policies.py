"""Policies and comparisons of two of them, checked against the definitions."""

from __future__ import annotations

import math

import pytest
import torch

from mismatch_cli.rules.divergences import sampled_in_topk
from mismatch_cli.rules.policies import (
    ENGINE_GAP,
    TRAINER_ROLLOUT,
    Policies,
    Ratio,
    TopKLogProbs,
)
from tests.rules.ratios import TRAINER_RECOMPUTED

F64 = torch.float64
INF = float("inf")
ROLLOUT, TRAINER, RECOMPUTED = (
    torch.tensor(p, dtype=F64).log()
    for p in ([0.5, 0.2, 0.8, 0.1], [0.25, 0.4, 0.8, 0.3], [0.4, 0.1, 0.9, 0.3])
)


def policies(trainer: torch.Tensor = TRAINER, topk: TopKLogProbs | None = None) -> Policies:
    """Three responses: three tokens, none, and one."""
    return Policies(ROLLOUT, trainer, RECOMPUTED, torch.tensor([0, 3, 3, 4]), topk)


def test_ratios_of_the_three_pairs() -> None:
    batch = policies()
    expected = {
        TRAINER_ROLLOUT: [0.5, 2, 1, 3],
        TRAINER_RECOMPUTED: [0.625, 4, 8 / 9, 1],
        ENGINE_GAP: [0.8, 0.5, 1.125, 3],
    }
    for ratio, numbers in expected.items():
        compared = batch.compare(ratio)
        assert compared.ratio_T.tolist() == pytest.approx(numbers)
        assert compared.ratio_less_1_T.tolist() == pytest.approx(
            [x - 1 for x in numbers], abs=1e-14
        )
        assert compared.log_ratio_T.tolist() == pytest.approx(
            [math.log(x) for x in numbers], abs=1e-14
        )


def test_difference_and_binary_kl() -> None:
    compared = policies().compare(TRAINER_ROLLOUT)
    assert compared.difference_T.tolist() == pytest.approx([-0.25, 0.2, 0, 0.2], abs=1e-15)
    kl = [
        q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        for q, p in ((0.5, 0.25), (0.2, 0.4), (0.1, 0.3))
    ]
    assert compared.binary_kl_T.tolist() == pytest.approx([kl[0], kl[1], 0, kl[2]], abs=1e-15)
    gap = policies().compare(ENGINE_GAP)
    assert gap.difference_T.tolist() == pytest.approx([-0.1, -0.1, 0.1, 0.2])


def test_levels() -> None:
    compared = policies().compare(TRAINER_ROLLOUT)
    assert compared.level_log_ratio_T("token").tolist() == compared.log_ratio_T.tolist()
    product = compared.level_log_ratio_T("product").exp()
    assert product.tolist() == pytest.approx([1, 1, 1, 3])  # 1/2 · 2 · 1
    mean = policies().compare(TRAINER_RECOMPUTED).level_log_ratio_T("mean").exp()
    assert mean.tolist() == pytest.approx([(0.625 * 4 * 8 / 9) ** (1 / 3)] * 3 + [1])


def test_sums_over_a_response_are_exact_in_float32() -> None:
    """A hundred thousand terms of 1e-4 after one of 1000: float32 would lose each of them."""
    rollout = torch.zeros(100_001)
    trainer = torch.full_like(rollout, -1e-5)
    trainer[0] = -1000
    batch = Policies(rollout, trainer, None, torch.tensor([0, len(rollout)]))
    total = batch.compare(TRAINER_ROLLOUT).level_log_ratio_T("product")
    assert total.dtype == F64 and total[0].item() == pytest.approx(-1001, abs=1e-5)


def test_responses_of_tokens() -> None:
    batch = policies()
    assert batch.responses.length_S.tolist() == [3, 0, 1]
    assert batch.responses.response_T.tolist() == [0, 0, 0, 2]
    empty = torch.zeros(0)
    nothing = Policies(empty, empty, None, torch.tensor([0]))
    assert nothing.responses.length_S.tolist() == nothing.responses.response_T.tolist() == []
    assert nothing.compare(TRAINER_ROLLOUT).level_log_ratio_T("mean").tolist() == []


def test_nothing_is_computed_twice() -> None:
    batch = policies()
    compared = batch.compare(TRAINER_ROLLOUT)
    # The level is an argument of its methods
    assert batch.compare(Ratio("trainer", "rollout", "mean")) is compared
    assert batch.compare(ENGINE_GAP) is not compared
    assert compared.binary_kl_T is batch.compare(TRAINER_ROLLOUT).binary_kl_T
    other = policies()
    assert other.compare(TRAINER_ROLLOUT) is not compared


def test_a_token_that_the_current_policy_excludes() -> None:
    trainer = TRAINER.clone()
    trainer[1] = -INF
    compared = policies(trainer=trainer).compare(TRAINER_ROLLOUT)
    assert (
        compared.log_ratio_T[1] == -INF
        and compared.ratio_T[1] == 0
        and compared.ratio_less_1_T[1] == -1
    )
    assert compared.difference_T[1].item() == pytest.approx(-0.2)
    assert compared.binary_kl_T[1] == INF
    assert compared.level_log_ratio_T("mean")[:3].tolist() == [-INF] * 3
    assert compared.level_log_ratio_T("mean")[3].item() == pytest.approx(math.log(3))


def test_a_token_that_both_policies_exclude_has_not_moved() -> None:
    """At equal weights a truncated support excludes it from the recomputed policy too: ratio 1,
    and no NaN anywhere.
    """
    trainer = TRAINER.clone()
    trainer[1] = -INF
    compared = Policies(ROLLOUT, trainer, trainer, torch.tensor([0, 3, 3, 4])).compare(
        TRAINER_RECOMPUTED
    )
    for values_T, same in (
        (compared.log_ratio_T, 0),
        (compared.ratio_T, 1),
        (compared.difference_T, 0),
        (compared.binary_kl_T, 0),
        (compared.level_log_ratio_T("product"), 0),
    ):
        assert values_T.tolist() == [same] * 4
    assert trainer[1] == -INF  # the input is unchanged


def test_symbols_and_text() -> None:
    assert TRAINER_ROLLOUT.symbols == {"r": "r", "p": "p", "q": "q"}
    assert TRAINER_RECOMPUTED.symbols == {"r": "r′", "p": "p", "q": "p′"}
    assert ENGINE_GAP.symbols == {"r": "ρ", "p": "p′", "q": "q"}
    assert [
        str(Ratio("recomputed", "rollout", level)) for level in ("token", "product", "mean")
    ] == [
        "ρ",
        "Πρ",
        "(Πρ)^(1/|y|)",
    ]


def columns(k: int = 2) -> TopKLogProbs:
    """The sampled tokens are first, second, absent and absent."""
    rollout = torch.tensor([[0.5, 0.3], [0.6, 0.2], [0.1, 0.05], [0.5, 0.2]], dtype=F64)
    trainer = torch.tensor([[0.25, 0.5], [0.4, 0.4], [0.1, 0.05], [0.3, 0.3]], dtype=F64)
    recomputed = torch.tensor([[0.4, 0.3], [0.7, 0.1], [0.04, 0.05], [0.4, 0.2]], dtype=F64)
    ids = torch.tensor([[7, 8], [8, 7], [1, 2], [1, 2]])
    logps = (x.log()[:, :k] for x in (rollout, trainer, recomputed))
    return TopKLogProbs(torch.tensor([7, 7, 7, 7]), ids[:, :k], *logps)


def test_top_k_of_each_pair_by_hand() -> None:
    batch = policies(topk=columns())
    tv_T, kl_T = batch.compare(TRAINER_ROLLOUT).topk(2)
    # |.25| + |.2| + |.05| other;  |.2| + |.2| + 0;  0;  |.2| + |.1| + |.2| sampled + |.1| others
    assert tv_T.tolist() == pytest.approx([0.25, 0.2, 0, 0.3])
    assert kl_T[1].item() == pytest.approx(0.6 * math.log(0.6 / 0.4) + 0.2 * math.log(0.2 / 0.4))
    tv_T, _ = batch.compare(ENGINE_GAP).topk(2)
    assert tv_T.tolist() == pytest.approx([0.1, 0.1, 0.1, 0.2])
    # The second id joins the others, not the sampled one
    first_T, _ = batch.compare(TRAINER_ROLLOUT).topk(1)
    assert first_T.tolist() == pytest.approx([0.25, 0.2, 0, 0.2])
    replaced_T, _ = batch.compare(TRAINER_ROLLOUT).topk(2, replace_last=True)
    # Of the last token, .2 + .2 sampled and 0 others
    assert replaced_T.tolist() == pytest.approx([0.25, 0.2, 0, 0.2])


def test_top_k_is_computed_once_for_each_k() -> None:
    compared = policies(topk=columns()).compare(TRAINER_ROLLOUT)
    assert compared.topk(2) is compared.topk(2)
    assert compared.topk(1) is not compared.topk(2) and compared.topk(2) is not compared.topk(
        2, replace_last=True
    )


def test_the_sampled_token_among_the_first_ranks() -> None:
    topk = columns()
    for k in (1, 2):
        expected_T = sampled_in_topk(topk.response_ids_T, topk.ids_TK[:, :k])
        assert topk.sampled_in(k).tolist() == expected_T.tolist()


@pytest.mark.parametrize("present", [None, columns(1)], ids=["none", "too few"])
def test_missing_top_k_columns(present: TopKLogProbs | None) -> None:
    with pytest.raises(ValueError, match="top-2 divergences need 2 columns"):
        policies(topk=present).compare(TRAINER_ROLLOUT).topk(2)
