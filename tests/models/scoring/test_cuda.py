"""The head on a GPU, if there is one: the same log-probs as on the CPU, and gradients no worse
than autograd's.
"""

from __future__ import annotations

import pytest
import torch

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.head import Head, score_hidden
from mismatch_cli.models.scoring.policy_gradient import logp_pass
from tests.models.scoring.test_head import random_case, some_ids
from tests.models.scoring.test_policy_gradient import (
    TRANSFORMS,
    assert_same,
    errors,
    make_case,
    ours,
    reference,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

COLD = SamplingSettings(temperature=0.7)


@pytest.mark.parametrize("sampling", [COLD, SamplingSettings(top_p=0.9, top_k=40)])
@pytest.mark.parametrize("tile", [None, (64, 77)])
def test_scores_are_those_of_the_cpu(
    sampling: SamplingSettings, tile: tuple[int, int] | None
) -> None:
    hidden_TH, weight_VH = random_case(150, 500)
    target_T, query_TK = some_ids(150, 500)
    expected = score_hidden(hidden_TH, Head(weight_VH), target_T, query_TK, sampling)
    scores = score_hidden(
        hidden_TH.cuda(), Head(weight_VH.cuda()), target_T, query_TK, sampling, tile
    )
    for column, exact in zip(scores[:4], expected[:4], strict=True):
        assert column.is_cuda and column.dtype == exact.dtype
        torch.testing.assert_close(column.cpu(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", TRANSFORMS.values(), ids=TRANSFORMS)
def test_float32_gradients_are_exact_to_two_parts_in_a_million(steps: dict) -> None:
    case = make_case(**steps).to("cuda").to(torch.float32)
    gradients, exact = ours(case, 0.7), reference(case.to(torch.float64), 0.7)
    assert_same(gradients, exact, 2e-6)
    assert max(errors(gradients, exact)) < 2e-6


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("steps", TRANSFORMS.values(), ids=TRANSFORMS)
def test_half_precision_gradients_are_as_good_as_autograds(
    steps: dict, dtype: torch.dtype, scale: float
) -> None:
    case = make_case(300, **steps).to("cuda").to(dtype)
    scaled = case._replace(coefficient_N=case.coefficient_N * scale)
    gradients, exact = ours(case, row_tile=64, scale=scale), reference(scaled.to(torch.float64))
    # Scaling before or after the slopes are rounded rounds different numbers (up to 9 % apart). A
    # result that is rounded twice shows as up to 30 %.
    tolerance = 1.01 if scale == 1 else 1.1
    for error, limit in zip(
        errors(gradients, exact), errors(reference(scaled), exact), strict=True
    ):
        assert error <= tolerance * limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_known_log_probs_give_the_same_gradients(dtype: torch.dtype) -> None:
    case = make_case(300, **TRANSFORMS["everything"]).to("cuda").to(dtype)
    first_pass = logp_pass(case.hidden_NH, case.head, case.ids_N, COLD)
    assert_same(
        ours(case, 0.7, first_pass=first_pass),
        ours(case, 0.7),
        1e-5 if dtype == torch.float32 else 1e-2,
    )
