"""Hand-made and random policies, shared by the tests of masks and algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import log

import numpy as np
import torch
from torch import Tensor

from mismatch_cli.base import registry
from mismatch_cli.base.arrays import Array, as_numpy
from mismatch_cli.rules import trust_regions
from mismatch_cli.rules.algorithms import algorithm
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.gathering import Gathering, as_one_batch
from mismatch_cli.rules.algorithms.parts import Factor, Mask, Rule
from mismatch_cli.rules.batches import Batches, Found, RowKey
from mismatch_cli.rules.policies import Policies, TopKLogProbs
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
    sampled.
    """
    offset_S1 = torch.tensor([0, *(lengths or [len(rollout)])]).cumsum(0)
    recomputed = trainer if recomputed is None else recomputed
    entropy_T = torch.special.entr(trainer.exp()) + torch.special.entr(-torch.expm1(trainer))
    topk = topk_around(rollout, trainer, recomputed)
    return Policies(rollout, trainer, recomputed, offset_S1, topk, entropy_T, average=recomputed)


def topk_around(rollout: Tensor, trainer: Tensor, recomputed: Tensor) -> TopKLogProbs:
    """A top-K where the sampled token is first if μ > 0.3, else absent; nine tenths of the rest
    are spread evenly.
    """
    ids_TK = torch.arange(1, K + 1).repeat(len(rollout), 1)
    first_T = rollout > -1.2
    ids_TK[first_T, 0] = 0

    def columns(logp_T: Tensor) -> Tensor:
        rest_T = -torch.expm1(logp_T)
        logp_TK = (
            torch.where(first_T, 0.9 * rest_T / (K - 1), 0.9 * rest_T / K)[:, None]
            .repeat(1, K)
            .log()
        )
        logp_TK[:, 0] = torch.where(first_T, logp_T, logp_TK[:, 0])
        return logp_TK

    sampled_ids_T = torch.zeros(len(rollout), dtype=torch.int64)
    return TopKLogProbs(
        sampled_ids_T, ids_TK, columns(rollout), columns(trainer), columns(recomputed)
    )


def random_policies(
    seed: int, responses: int = 60, longest: int = 40, vocabulary: int = 26
) -> Policies:
    """Softmaxes in float64, from almost deterministic to flat, with gaps that differ by orders
    of magnitude.
    """
    generator = torch.Generator().manual_seed(seed)
    length_S = torch.randint(1, longest + 1, (responses,), generator=generator)
    tokens = int(length_S.sum())

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    def per_response(low: float, high: float) -> Tensor:
        return 10 ** (low + (high - low) * torch.rand(responses, 1, generator=generator, dtype=F64))

    sharpness_T1 = 0.5 + 5 * torch.rand(tokens, 1, generator=generator, dtype=F64)
    logits_TV = sharpness_T1 * normal(tokens, vocabulary)
    engine_T1, step_T1 = (per_response(-3.5, 0.6).repeat_interleave(length_S, 0) for _ in range(2))
    recomputed_TV = logits_TV + engine_T1 * normal(tokens, vocabulary)
    trainer_TV = recomputed_TV + step_T1 * normal(tokens, vocabulary)
    logp_TV = [x_TV.log_softmax(-1) for x_TV in (logits_TV, trainer_TV, recomputed_TV)]
    ids_T = torch.multinomial(logp_TV[0].exp(), 1, generator=generator).squeeze(1)
    top_TK = logp_TV[0].topk(K, dim=-1).indices
    rollout, trainer, recomputed = (x_TV[torch.arange(tokens), ids_T] for x_TV in logp_TV)
    topk = TopKLogProbs(ids_T, top_TK, *(x_TV.gather(1, top_TK) for x_TV in logp_TV))
    entropy_T = torch.special.entr(logp_TV[1].exp()).sum(-1)
    offset_S1 = torch.cat([torch.zeros(1).long(), length_S.cumsum(0)])
    # Between the two, as for averaged weights
    average = torch.logaddexp(recomputed, trainer) - log(2)
    return Policies(rollout, trainer, recomputed, offset_S1, topk, entropy_T, average=average)


def cast(given: Policies, dtype: torch.dtype) -> Policies:
    """The same policies in another precision."""
    topk = given.topk
    assert topk is not None and topk.recomputed is not None and given.recomputed is not None
    columns = (topk.rollout, topk.trainer, topk.recomputed)
    converted = TopKLogProbs(topk.response_ids_T, topk.ids_TK, *(x.to(dtype) for x in columns))
    rollout, trainer, recomputed = (
        x.to(dtype) for x in (given.rollout, given.trainer, given.recomputed)
    )
    entropy_T, average = (
        None if x is None else x.to(dtype) for x in (given.entropy_T, given.average)
    )
    return Policies(
        rollout, trainer, recomputed, given.offset_S1, converted, entropy_T, given.batches, average
    )


def mapped(topk: TopKLogProbs | None, function: Callable[[Array], Array]) -> TopKLogProbs | None:
    """Apply a function to each column."""
    if topk is None:
        return None
    columns = (topk.response_ids_T, topk.ids_TK, topk.rollout, topk.trainer, topk.recomputed)
    return TopKLogProbs(*(None if x is None else function(x) for x in columns))


def in_numpy(given: Policies) -> Policies:
    """The same policies as numpy arrays."""
    return Policies(
        *(
            None if x is None else x.numpy()
            for x in (given.rollout, given.trainer, given.recomputed)
        ),
        given.offset_S1.numpy(),
        mapped(given.topk, Tensor.numpy),
        None if given.entropy_T is None else given.entropy_T.numpy(),
        given.batches,
        None if given.average is None else given.average.numpy(),
    )


def equal_policies(drawn: Policies) -> Policies:
    """On-policy: the trainer, before and now, equals the rollout."""
    assert drawn.topk is not None
    topk = TopKLogProbs(drawn.topk.response_ids_T, drawn.topk.ids_TK, *[drawn.topk.rollout] * 3)
    columns = (
        drawn.rollout,
        drawn.rollout,
        drawn.rollout,
        drawn.offset_S1,
        topk,
        drawn.entropy_T,
        drawn.batches,
    )
    return Policies(*columns, drawn.rollout)


def taken(given: Policies, responses: list[int]) -> tuple[Policies, Tensor]:
    """Some responses in some order, and the positions of their tokens; batches and their results
    are included.
    """
    offset, batches = given.offset_S1.tolist(), given.batches
    spans = [torch.arange(offset[s], offset[s + 1]) for s in responses]
    place_T = torch.cat([torch.zeros(0, dtype=torch.int64), *spans])
    topk = mapped(given.topk, lambda x: x[place_T])
    offset_S1 = torch.tensor([0, *map(len, spans)]).cumsum(0)
    columns = (
        None if x is None else x[place_T] for x in (given.rollout, given.trainer, given.recomputed)
    )
    if batches is not None:
        hash_T = batches.hash_T()[place_T.numpy()]
        batches = Batches(
            batches.batch_S[responses], batches.group_S[responses], lambda: hash_T, batches.found
        )
    entropy_T, average = (
        None if x is None else x[place_T] for x in (given.entropy_T, given.average)
    )
    return Policies(*columns, offset_S1, topk, entropy_T, batches, average), place_T


def with_keys(given: Policies, minibatch_S: np.ndarray, prompt_S: np.ndarray) -> Policies:
    """The same, as rows of one step, with a minibatch and a prompt for each."""
    sample_S, zeros_S = np.arange(len(prompt_S)), np.zeros(len(prompt_S), dtype=np.int64)
    responses = given.responses
    places = as_numpy(responses.response_T), as_numpy(responses.position_T)
    batches = Batches.of_rows(
        RowKey(zeros_S, zeros_S, minibatch_S, prompt_S, sample_S), lambda: places
    )
    return replace(given, batches=batches)


def settled(rule: Rule, parts: list[tuple[Policies, Array]]) -> Found:
    """What a rule settles for batches or groups that are spread over parts."""
    gathering = Gathering([rule])
    for part in parts:
        gathering.update(*part)
    return gathering.found()[rule]


def like(given: Policies, column_T: Tensor) -> Array:
    """A column in the policies' array library."""
    return column_T.numpy() if isinstance(given.rollout, np.ndarray) else column_T


def gathered(given: Policies, rules: Iterable[Rule], advantage_T: Array) -> Policies:
    """The same, after a first pass over all of it."""
    assert given.batches is not None
    return replace(
        given,
        batches=given.batches.settled(
            {rule: settled(rule, [(given, advantage_T)]) for rule in rules}
        ),
    )


def whole(given: Policies, rules: Iterable[Rule], advantage_T: Array) -> Policies:
    """The same; without batches of their own, its tokens are one batch that the rules have seen."""
    batch_rules = [rule for rule in rules if rule.scope is not None]
    if given.batches is not None or not batch_rules:
        return given
    return as_one_batch(given, advantage_T, batch_rules)


def decide(mask: Mask, given: Policies, advantage_T: Array) -> Decision:
    """A mask's decision, after a first pass if it needs one."""
    return mask.decide(whole(given, [mask], advantage_T), advantage_T)


def weigh(factor: Factor, given: Policies, advantage_T: Array) -> Array:
    """A factor of each token, after a first pass if it needs one."""
    return factor.weight_T(whole(given, [factor], advantage_T), advantage_T)


def keep_T(row: Algorithm, given: Policies, advantage_T: Array) -> Array:
    """What an algorithm keeps, after a first pass if it needs one."""
    return algorithm.keep_T(row, whole(given, row.masks, advantage_T), advantage_T)


def weight_T(row: Algorithm, given: Policies, advantage_T: Array) -> Array:
    """An algorithm's weight, after a first pass if it needs one."""
    return algorithm.weight_T(row, whole(given, row.weight, advantage_T), advantage_T)


def coefficient_T(row: Algorithm, given: Policies, advantage_T: Array) -> Array:
    """An algorithm's coefficients, after a first pass if it needs one."""
    return algorithm.coefficient_T(row, whole(given, row.rules, advantage_T), advantage_T)


def columns(given: Policies) -> list[Array]:
    """The columns of policies, their top-K included."""
    topk = given.topk
    assert topk is not None and given.recomputed is not None
    found = [given.rollout, given.trainer, given.recomputed, given.offset_S1, given.entropy_T]
    return [*found, topk.ids_TK, topk.rollout, topk.trainer]


def same(x: Array, y: Array) -> bool:
    return type(x) is type(y) and np.array_equal(np.asarray(x), np.asarray(y))


def signs(tokens: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """Advantages of both signs and of any size, none zero."""
    return torch.randn(tokens, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ask(name: str, given: Policies, advantage_T: Array, **chosen: Threshold) -> Decision:
    """A trust region's decision on the trainer relative to the rollout, with all tokens as one
    batch.
    """
    mask, columns = (
        Mask(name, chosen=tuple(chosen.items())),
        (given.compare(Mask(name).ratio), advantage_T),
    )
    if mask.scope is None:
        return mask.module.trust_region(*columns, **chosen)
    values_F = torch.from_numpy(mask.settle(mask.collect(given, advantage_T)))
    return mask.module.trust_region(
        *columns, like(given, values_F.repeat(len(advantage_T), 1)), **chosen
    )


def kept(name: str, given: Policies, advantage_T: Tensor, **chosen: Threshold) -> list[bool]:
    return ask(name, given, advantage_T, **chosen).keep_T.tolist()
