"""Every row of the table through the policy-gradient head on a tiny tied model: all gradients
equal autograd's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.head import Head, score_hidden
from mismatch_cli.models.scoring.policy_gradient import logp_pass, policy_gradient_loss
from mismatch_cli.rules.algorithms.algorithm import Algorithm, reads_single_tokens
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.rules.policies import Policies
from tests.looped import looped
from tests.rules.trust_regions.cases import coefficient_T, policies_of

PLAIN = SamplingSettings()
LENGTHS = (21, 9, 30, 14)


class Batch(NamedTuple):
    """Four responses for a tiny model: its input, the positions that predict them, and their
    policies.
    """

    model: torch.nn.Module
    ids_SL: Tensor
    response_ids_T: Tensor
    policies: Policies  # with the trainer's log-probs from full logits
    advantage_T: Tensor
    logp_T: Tensor  # the trainer's, through full logits, with a graph

    def hidden_TH(self) -> Tensor:
        return flat(self.model.model(self.ids_SL).last_hidden_state)

    @property
    def head(self) -> Head:
        return Head(self.model.lm_head.weight)


def flat(x_SL: Tensor) -> Tensor:
    """The positions that predict the responses; a prompt is one token."""
    return torch.cat([row[:length] for row, length in zip(x_SL, LENGTHS, strict=True)])


@pytest.fixture(scope="module")
def batch() -> Batch:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 211}
    config = Qwen3Config(**sizes, initializer_range=0.2, tie_word_embeddings=True)
    model = Qwen3ForCausalLM(config).double()
    ids_SL = torch.randint(0, 211, (4, max(LENGTHS) + 1))
    response_ids_T = flat(ids_SL[:, 1:])
    logp_TV = flat(model(ids_SL[:, :-1]).logits).log_softmax(-1)
    exact_TV = logp_TV.detach()
    recomputed_TV = (exact_TV + 0.4 * torch.randn_like(exact_TV)).log_softmax(-1)
    rollout_TV = (recomputed_TV + 0.2 * torch.randn_like(exact_TV)).log_softmax(-1)
    rollout_TV[: LENGTHS[0]] = recomputed_TV[: LENGTHS[0]]  # one response without an engine gap
    policies = policies_of((rollout_TV, exact_TV, recomputed_TV), response_ids_T, LENGTHS)
    advantage_S = torch.tensor([1.0, -0.5, -1.5, 0.7], dtype=torch.float64)
    return Batch(
        model,
        ids_SL[:, :-1],
        response_ids_T,
        policies,
        advantage_S[policies.responses.response_T],
        logp_TV.gather(1, response_ids_T[:, None])[:, 0],
    )


def parameter_gradients(batch: Batch, loss: Tensor) -> dict[str, Tensor]:
    named = dict(batch.model.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
    return dict(zip(named, gradients, strict=True))


def in_one_pass(algorithm: Algorithm, batch: Batch) -> Callable[[slice, Tensor], Tensor]:
    """The rule of a row that looks only at one token and its sampled log-probs: known as soon as
    the tile is.
    """
    policies = batch.policies

    def rule(rows: slice, logp_R: Tensor) -> Tensor:
        anchors = policies.rollout[rows], logp_R, policies.recomputed[rows]
        tile = Policies(*anchors, torch.tensor([0, len(logp_R)]))
        return coefficient_T(algorithm, tile, batch.advantage_T[rows])

    return rule


def in_two_passes(algorithm: Algorithm, batch: Batch) -> Callable[[slice, Tensor], Tensor]:
    """The rule of a row that looks at whole responses or at top-K log-probs: the scoring head
    comes first.
    """
    policies, hidden_TH = batch.policies, batch.hidden_TH().detach()
    logp_T = logp_pass(hidden_TH, batch.head, batch.response_ids_T, PLAIN).logp_N.double()
    scores = score_hidden(hidden_TH, batch.head, batch.response_ids_T, policies.topk.ids_TK, PLAIN)
    topk = replace(policies.topk, trainer=scores.logp_at_ids_TK.double())
    scored = replace(policies, trainer=logp_T, topk=topk)
    coefficient = coefficient_T(algorithm, scored, batch.advantage_T)
    return lambda rows, _: coefficient[rows]


@looped("name", TABLE)
def test_every_algorithm_on_a_tied_model_is_autograd_of_its_loss(name: str, batch: Batch) -> None:
    # Blocks less
    algorithm = parse_algorithm(
        {"trm-max": "trm-max:delta=2", "trm-avg": "trm-avg:delta=0.1"}.get(name, name)
    )
    one_pass = reads_single_tokens(algorithm)
    expected_T = coefficient_T(algorithm, batch.policies, batch.advantage_T)
    assert (expected_T != 0).any()
    expected = parameter_gradients(batch, -(expected_T * batch.logp_T).sum())
    rule = (in_one_pass if one_pass else in_two_passes)(algorithm, batch)
    result = policy_gradient_loss(
        batch.hidden_TH(), batch.head, batch.response_ids_T, rule, PLAIN, row_tile=16
    )
    torch.testing.assert_close(result.logp_N, batch.policies.trainer, atol=1e-10, rtol=0)
    for key, gradient in parameter_gradients(batch, result.loss).items():
        tolerance = (1e-10 if one_pass else 1e-5) * expected[key].abs().max().item()
        torch.testing.assert_close(
            gradient, expected[key], atol=tolerance, rtol=0, msg=lambda m, key=key: f"{key}: {m}"
        )
