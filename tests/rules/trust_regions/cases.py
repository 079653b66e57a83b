"""Hand-made and random policies, shared by the tests of masks and algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from math import log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_cli.base import registry
from mismatch_cli.base.arrays import Array, as_numpy
from mismatch_cli.rules import trust_regions
from mismatch_cli.rules.algorithms import algorithm
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.first_pass import FirstPass, as_one_batch
from mismatch_cli.rules.algorithms.masks_and_factors import Factor, Mask, Rule, mask
from mismatch_cli.rules.joint_batches import Batches, BatchValues, RowKey
from mismatch_cli.rules.policies import TRAINER_ROLLOUT, Policies, TopKLogProbs
from mismatch_cli.rules.trust_regions import Decision, Threshold

REGIONS = registry.names(trust_regions.PACKAGE)
ONE_SIDED = [name for name in REGIONS if trust_regions.find(name).NOT_ONE_SIDED == ""]
OVER_BATCHES = [name for name in REGIONS if hasattr(trust_regions.find(name), "SCOPE")]
F64 = torch.float64
INF = float("inf")
K = 20


def policies(
    rollout: Tensor,
    trainer: Tensor,
    recomputed: Tensor | None = None,
    lengths: list[int] | None = None,
) -> Policies:
    """Policies with given log-probabilities and a matching top-K, as one response unless lengths
    are given.

    The entropy is that of {sampled token, any other}; the average of the weights is the policy that
    sampled. The sampled token is first in the top-K if μ > 0.3, else absent; nine tenths of the
    rest are spread evenly.
    """
    recomputed = trainer if recomputed is None else recomputed
    logp = rollout, trainer, recomputed
    ids_TK, first_T = torch.arange(1, K + 1).repeat(len(rollout), 1), rollout > -1.2
    ids_TK[first_T, 0] = 0
    logp_TK = []
    for x_T in logp:
        rest_T = 0.9 * -x_T.expm1() / (K - 1.0 * first_T)
        x_TK = rest_T.log()[:, None].repeat(1, K)
        x_TK[first_T, 0] = x_T[first_T]
        logp_TK.append(x_TK)
    topk = TopKLogProbs(torch.zeros(len(rollout), dtype=torch.int64), ids_TK, *logp_TK)
    entropy_T = torch.special.entr(trainer.exp()) + torch.special.entr(-trainer.expm1())
    offset_S1 = torch.tensor([0, *(lengths or [len(rollout)])]).cumsum(0)
    return Policies(*logp, offset_S1, topk, entropy_T, average=recomputed)


def random_policies(
    seed: int, responses: int = 60, longest: int = 40, vocabulary: int = 26
) -> Policies:
    """Softmaxes in float64, from almost deterministic to flat, with gaps that differ by orders
    of magnitude.
    """
    generator = torch.Generator().manual_seed(seed)
    length_S = torch.randint(1, longest + 1, (responses,), generator=generator)
    tokens = int(length_S.sum())

    def uniform(rows: int) -> Tensor:
        return torch.rand(rows, 1, generator=generator, dtype=F64)

    def normal() -> Tensor:
        return torch.randn(tokens, vocabulary, generator=generator, dtype=F64)

    logits_TV = (0.5 + 5 * uniform(tokens)) * normal()
    engine_T1, step_T1 = (
        (10 ** (4.1 * uniform(responses) - 3.5)).repeat_interleave(length_S, 0) for _ in range(2)
    )
    recomputed_TV = logits_TV + engine_T1 * normal()
    trainer_TV = recomputed_TV + step_T1 * normal()
    logp_TV = [x_TV.log_softmax(-1) for x_TV in (logits_TV, trainer_TV, recomputed_TV)]
    ids_T = torch.multinomial(logp_TV[0].exp(), 1, generator=generator).squeeze(1)
    drawn = policies_of(logp_TV, ids_T, length_S.tolist())
    # Between the two, as for averaged weights
    return replace(drawn, average=torch.logaddexp(drawn.recomputed, drawn.trainer) - log(2))


def policies_of(logp_TV: Sequence[Tensor], ids_T: Tensor, lengths: list[int]) -> Policies:
    """Of the whole distributions of rollout, trainer and recomputed, and the sampled ids."""
    own_T1, top_TK = ids_T[:, None], logp_TV[0].topk(K, dim=-1).indices
    own = [x_TV.gather(1, own_T1).squeeze(1) for x_TV in logp_TV]
    topk = TopKLogProbs(ids_T, top_TK, *(x_TV.gather(1, top_TK) for x_TV in logp_TV))
    entropy_T = torch.special.entr(logp_TV[1].exp()).sum(-1)
    return Policies(*own, torch.tensor([0, *lengths]).cumsum(0), topk, entropy_T)


def mapped(batch: Any, function: Callable[[Tensor], Array]) -> Any:
    """The same policies, or top-K, with a function applied to each of their columns."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch) if field.init}
    changed = {name: function(x) for name, x in values.items() if isinstance(x, Tensor)}
    if values.get("topk") is not None:
        changed["topk"] = mapped(batch.topk, function)
    return replace(batch, **changed)


def cast(batch: Policies, dtype: torch.dtype) -> Policies:
    """The same policies in another precision."""
    return mapped(batch, lambda x: x.to(dtype) if x.is_floating_point() else x)


def in_numpy(batch: Policies) -> Policies:
    """The same policies as numpy arrays."""
    return mapped(batch, Tensor.numpy)


def equal_policies(drawn: Policies) -> Policies:
    """On-policy: the trainer, before and now, equals the rollout."""
    same = dict.fromkeys(("trainer", "recomputed"), drawn.topk.rollout)
    topk = replace(drawn.topk, **same)
    same = dict.fromkeys(("trainer", "recomputed", "average"), drawn.rollout)
    return replace(drawn, topk=topk, **same)


def taken(batch: Policies, responses: list[int]) -> tuple[Policies, Tensor]:
    """Some responses in some order, and the positions of their tokens; batches and their results
    are included.
    """
    offset, batches = batch.offset_S1.tolist(), batch.batches
    spans = [torch.arange(offset[s], offset[s + 1]) for s in responses]
    place_T = torch.cat([torch.zeros(0, dtype=torch.int64), *spans])
    if batches is not None:
        hash_T = batches.hash_T()[place_T.numpy()]
        batches = Batches(
            batches.batch_S[responses],
            batches.group_S[responses],
            lambda: hash_T,
            batches.batch_values,
        )
    rows = mapped(replace(batch, offset_S1=None), lambda x: x[place_T])
    offset_S1 = torch.tensor([0, *map(len, spans)]).cumsum(0)
    return replace(rows, offset_S1=offset_S1, batches=batches), place_T


def with_keys(batch: Policies, minibatch_S: np.ndarray, prompt_S: np.ndarray) -> Policies:
    """The same, as rows of one step, with a minibatch and a prompt for each."""
    sample_S, zeros_S = np.arange(len(prompt_S)), np.zeros(len(prompt_S), dtype=np.int64)
    places = as_numpy(batch.responses.response_T), as_numpy(batch.responses.position_T)
    key = RowKey(zeros_S, zeros_S, minibatch_S, prompt_S, sample_S)
    return replace(batch, batches=Batches.of_rows(key, lambda: places))


def settled(rule: Rule, parts: list[tuple[Policies, Array]]) -> BatchValues:
    """What a rule settles for batches or groups that are spread over parts."""
    gathering = FirstPass([rule])
    for part in parts:
        gathering.update(*part)
    return gathering.settle()[rule]


def like(batch: Policies, column_T: Tensor) -> Array:
    """A column in the policies' array library."""
    return column_T.numpy() if isinstance(batch.rollout, np.ndarray) else column_T


def gathered(batch: Policies, rules: Iterable[Rule], advantage_T: Array) -> Policies:
    """The same, after a first pass over all of it."""
    values = {rule: settled(rule, [(batch, advantage_T)]) for rule in rules}
    return replace(batch, batches=batch.batches.with_values(values))


def whole(batch: Policies, rules: Iterable[Rule], advantage_T: Array) -> Policies:
    """The same; without batches of their own, its tokens are one batch that the rules have seen."""
    batch_rules = [rule for rule in rules if rule.scope is not None]
    if batch.batches is not None or not batch_rules:
        return batch
    return as_one_batch(batch, advantage_T, batch_rules)


def after_a_first_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a rule or algorithm, policies and advantages, which may need to see all."""

    def answer(rule: Rule | Algorithm, batch: Policies, advantage_T: Array) -> Any:
        rules = rule.rules if isinstance(rule, Algorithm) else [rule]
        return function(rule, whole(batch, rules, advantage_T), advantage_T)

    return answer


decide, weigh = after_a_first_pass(Mask.decide), after_a_first_pass(Factor.weight_T)
keep_T = after_a_first_pass(algorithm.keep_T)
weight_T = after_a_first_pass(algorithm.weight_T)
coefficient_T = after_a_first_pass(algorithm.coefficient_T)


def columns(batch: Policies) -> list[Array]:
    """The columns of policies, their top-K included."""
    topk, named = batch.topk, ("rollout", "trainer", "recomputed", "offset_S1", "entropy_T")
    return [*(getattr(batch, name) for name in named), topk.ids_TK, topk.rollout, topk.trainer]


def same(x: Array, y: Array) -> bool:
    return type(x) is type(y) and np.array_equal(np.asarray(x), np.asarray(y))


def signs(tokens: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """Advantages of both signs and of any size, none zero."""
    return torch.randn(tokens, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ask(name: str, batch: Policies, advantage_T: Array, **chosen: Threshold) -> Decision:
    """A trust region's decision on the trainer relative to the rollout, with all tokens as one
    batch.
    """
    rule = mask(name, **chosen)
    columns = [batch.compare(TRAINER_ROLLOUT), advantage_T]
    if rule.scope is not None:
        values_F = torch.from_numpy(rule.settle(rule.collect(batch, advantage_T)))
        columns.append(like(batch, values_F.repeat(len(advantage_T), 1)))
    return rule.module.trust_region(*columns, **chosen)


def kept(name: str, batch: Policies, advantage_T: Tensor, **chosen: Threshold) -> list[bool]:
    return ask(name, batch, advantage_T, **chosen).keep_T.tolist()
