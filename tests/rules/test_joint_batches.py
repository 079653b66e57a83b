"""Rules on whole batches and on a prompt's answers: on any parts, gathered, they decide as on
the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mismatch_cli.base.arrays import Array, as_numpy
from mismatch_cli.rules.algorithms.first_pass import FirstPass
from mismatch_cli.rules.algorithms.masks_and_factors import Factor, Mask, Rule, mask
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.algorithms.table import TABLE, VARIANTS
from mismatch_cli.rules.joint_batches import Batches, BatchValues, FirstPassError, RowKey
from mismatch_cli.rules.policies import TRAINER_ROLLOUT, Policies
from tests.rules.trust_regions.cases import (
    coefficient_T,
    gathered,
    in_numpy,
    keep_T,
    like,
    random_policies,
    settled,
    signs,
    taken,
    whole,
    with_keys,
)

ROWS = {name: row for name, row in (TABLE | VARIANTS).items() if row.batch_rules}
MORE = [
    parse_algorithm(spec)
    for spec in ("clip-cov:share=0.1", "kl-cov:share=0.1", "m2po:max_moment=0.5", "gbpo:lambda=1")
]
RULES: list[Rule] = list(
    dict.fromkeys(rule for row in (*ROWS.values(), *MORE) for rule in row.batch_rules)
)
World = Callable[[Policies], Policies]
WORLDS: dict[str, World] = {"numpy": in_numpy, "torch": lambda batch: batch}
NAMES = [f"{place} {rule.module.__name__.rpartition('.')[2]}" for place, rule in enumerate(RULES)]
RESPONSES, BATCHES = 60, 3


def keyed() -> tuple[Policies, Tensor]:
    """Three batches with mixed rows, and a prompt's four answers in one or several of them."""
    batch = random_policies(0, responses=RESPONSES)
    minibatch_S = np.random.default_rng(0).integers(BATCHES, size=RESPONSES)
    batch = with_keys(batch, minibatch_S, np.arange(RESPONSES) // 4)
    return batch, signs(RESPONSES, 1)[batch.responses.response_T]


def answer(rule: Rule, batch: Policies, advantage_T: Array) -> np.ndarray:
    if isinstance(rule, Mask):
        return as_numpy(rule.decide(batch, advantage_T).keep_T)
    assert isinstance(rule, Factor)
    return as_numpy(rule.weight_T(batch, advantage_T))


def keys_of(rule: Rule, batch: Policies) -> np.ndarray:
    assert batch.batches is not None and rule.scope is not None
    return batch.batches.key_S(rule.scope)


def on_wholes(
    rule: Rule, batch: Policies, advantage_T: Tensor, world: World = lambda batch: batch
) -> np.ndarray:
    """The decisions batch by batch, each with exactly its own rows, at the tokens' positions."""
    found_T = np.full(len(advantage_T), np.nan)
    for key in np.unique(keys_of(rule, batch)):
        rows, place_T = taken(batch, np.flatnonzero(keys_of(rule, batch) == key).tolist())
        rows, rows_advantage_T = world(rows), like(world(rows), advantage_T[place_T])
        assert rows.batches is not None
        values_F = rule.settle(rule.collect(rows, rows_advantage_T))
        rows = replace(
            rows,
            batches=rows.batches.with_values({rule: BatchValues(np.array([key]), values_F[None])}),
        )
        found_T[place_T.numpy()] = answer(rule, rows, rows_advantage_T)
    return found_T


def test_which_rules_look_at_batches() -> None:
    assert set(ROWS) == {"gbpo", "m2po", "m2po-areal", "clip-cov", "kl-cov", "top-entropy"}
    assert {rule.scope for rule in ROWS["gbpo"].batch_rules} == {"group"}
    assert {
        rule.scope for name, row in ROWS.items() for rule in row.batch_rules if name != "gbpo"
    } == {"batch"}
    assert [name for name, row in ROWS.items() if row.looks_at_groups] == ["gbpo"]


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_micro_batches_decide_as_the_whole(rule: Rule, world: World) -> None:
    """Decisions on parts: rows in another order, cut inside batches, gathered in a third order."""
    batch, advantage_T = keyed()
    expected_T = on_wholes(rule, batch, advantage_T, world)
    assert len(np.unique(expected_T)) > 1  # the rule decides something
    for seed, micro_batches in ((0, 1), (1, 4), (2, 17)):
        generator = np.random.default_rng(seed)
        parts = []
        for rows in np.array_split(generator.permutation(RESPONSES), micro_batches):
            part, place_T = taken(batch, rows.tolist())
            parts.append((world(part), like(world(part), advantage_T[place_T]), place_T.numpy()))
        values = settled(rule, [parts[i][:2] for i in generator.permutation(len(parts))])
        for part, part_advantage_T, place_T in parts:
            assert part.batches is not None
            part = replace(part, batches=part.batches.with_values({rule: values}))
            np.testing.assert_array_equal(answer(rule, part, part_advantage_T), expected_T[place_T])


def test_a_part_alone_decides_differently() -> None:
    """Otherwise no first pass would be needed; `as_one_batch` makes one of exactly these tokens."""
    batch, advantage_T = keyed()
    first, place_T = taken(batch, list(range(10)))
    for rule in RULES:
        whole_T = answer(rule, gathered(batch, [rule], advantage_T), advantage_T)
        alone = replace(first, batches=None)
        expected = rule.settle(rule.collect(alone, advantage_T[place_T]))
        assert not np.array_equal(expected, rule.settle(rule.collect(batch, advantage_T)))
        as_one = with_keys(alone, np.zeros(10, dtype=np.int64), np.zeros(10, dtype=np.int64))
        if "covariance_clip" not in rule.module.__name__:  # it draws by keys
            alone_T = answer(
                rule, gathered(as_one, [rule], advantage_T[place_T]), advantage_T[place_T]
            )
            whole_batch = whole(alone, [rule], advantage_T[place_T])
            np.testing.assert_array_equal(answer(rule, whole_batch, advantage_T[place_T]), alone_T)
    assert any(
        (answer(rule, whole_batch, advantage_T[place_T]) != whole_T[place_T.numpy()]).any()
        for rule in RULES
        for whole_batch in [whole(alone, [rule], advantage_T[place_T])]
    )


def test_an_algorithm_decides_by_what_its_rules_have_found() -> None:
    batch, advantage_T = keyed()
    for row in (*ROWS.values(), *MORE):
        whole_batch = gathered(batch, row.batch_rules, advantage_T)
        kept_T = keep_T(row, whole_batch, advantage_T)
        for rule in row.batch_rules:
            if isinstance(rule, Mask):
                assert not kept_T[torch.from_numpy(on_wholes(rule, batch, advantage_T)) == 0].any()
        found_T = coefficient_T(row, whole_batch, advantage_T)
        other_T = coefficient_T(row, in_numpy(whole_batch), advantage_T.numpy())
        np.testing.assert_allclose(other_T, found_T.numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ROWS)
def test_a_batch_that_was_not_seen_is_an_error(name: str) -> None:
    batch, advantage_T = keyed()
    assert batch.batches is not None
    for rule in ROWS[name].batch_rules:
        missing = keys_of(rule, batch)[0]
        others = np.flatnonzero(keys_of(rule, batch) != missing).tolist()
        part, place_T = taken(batch, others)
        values = settled(rule, [(part, advantage_T[place_T])])
        partly = batch.batches.with_values({rule: values})
        answer(rule, taken(replace(batch, batches=partly), others)[0], advantage_T[place_T])
        for batches in (
            partly,
            batch.batches,
            batch.batches.with_values({rule: BatchValues(values.key_B[:0], values.values_BF[:0])}),
            None,  # not taken for one batch
        ):
            with pytest.raises(FirstPassError, match="first pass"):
                answer(rule, replace(batch, batches=batches), advantage_T)


def test_found_values_by_key() -> None:
    values = BatchValues(np.array([-5, 2, 9]), np.array([[1.0, 2], [3, 4], [5, 6]]))
    assert values.of(np.array([9, -5, 9])).tolist() == [[5, 6], [1, 2], [5, 6]]
    assert len(values.of(np.array([], dtype=np.int64))) == 0
    for key in (-6, 0, 3, 10):
        with pytest.raises(FirstPassError, match="the first pass did not see"):
            values.of(np.array([2, key]))
    with pytest.raises(FirstPassError, match="the first pass did not see"):
        BatchValues(np.array([5]), np.ones((1, 2))).of(np.array([9]))


def test_a_first_pass_keeps_nothing_of_what_was_read() -> None:
    """What is gathered must not be a view of a shard's column, whose memory would then stay."""
    batch = in_numpy(
        with_keys(random_policies(0), np.zeros(60, dtype=np.int64), np.arange(60) // 5)
    )
    gathering = FirstPass(ROWS["top-entropy"].batch_rules)
    gathering.update(batch, signs(len(batch.trainer)).numpy())
    (before,) = gathering.settle().values()
    batch.entropy_T[:] = 0.0
    (after,) = gathering.settle().values()
    assert np.array_equal(before.values_BF, after.values_BF) and before.values_BF.any()


def rows(**changed: int) -> Batches:
    """Two rows, the second of which is changed."""
    keys = {"step": 3, "epoch": 0, "minibatch": 1, "prompt_id": 7, "sample_index": 2}
    key = RowKey(*(np.array([value, changed.get(name, value)]) for name, value in keys.items()))
    return Batches.of_rows(key, lambda: (np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])))


def test_what_makes_a_batch_and_a_group() -> None:
    """A batch has the same step, epoch and minibatch; a group the same step, epoch and prompt."""
    differs = {}
    for name in ("step", "epoch", "minibatch", "prompt_id", "sample_index"):
        batches = rows(**{name: 9})
        differs[name] = tuple(len(set(key_S)) == 2 for key_S in (batches.batch_S, batches.group_S))
    assert differs == {
        "step": (True, True),
        "epoch": (True, True),
        "minibatch": (True, False),
        "prompt_id": (False, True),
        "sample_index": (False, False),
    }
    assert not set(rows(step=9).batch_S) & set(rows(step=9).group_S)


def test_batches_and_groups_of_several_traces_have_different_keys() -> None:
    """Also where a minibatch has the number of a prompt."""
    key = RowKey(*(np.array([number]) for number in (3, 0, 7, 7, 2)))

    def keys(**more: int) -> list[int]:
        batches = Batches.of_rows(key, lambda: (np.zeros(0), np.zeros(0)), **more)
        return [*batches.batch_S.tolist(), *batches.group_S.tolist()]

    of_traces = [number for trace in range(4) for number in keys(trace=trace)]
    assert len(set(of_traces)) == 8 and keys() == keys(trace=0)


def test_a_draw_follows_from_the_key_of_the_row_and_the_place() -> None:
    """Independent of the other rows, their order, numpy or torch, and the policies."""
    batch, _ = keyed()
    draw_T = batch.compare(TRAINER_ROLLOUT).draw_T
    assert draw_T.dtype == torch.float64 and draw_T.min() >= 0 and draw_T.max() < 1
    assert (
        len(draw_T.unique()) == len(draw_T)
        and abs(draw_T.mean() - 0.5) < 0.03
        and abs(draw_T.var() - 1 / 12) < 0.01
    )
    for responses in ([59, 3, 17], list(range(60))[::-1], [3]):
        part, place_T = taken(batch, responses)
        assert torch.equal(part.compare(TRAINER_ROLLOUT).draw_T, draw_T[place_T])
        numbers = in_numpy(part).compare(TRAINER_ROLLOUT).draw_T
        assert isinstance(numbers, np.ndarray) and np.array_equal(numbers, draw_T[place_T].numpy())
    alike = rows().hash_T()
    assert alike[0] == alike[2] and alike[1] == alike[3] and alike[0] != alike[1]
    for name in ("step", "epoch", "minibatch", "prompt_id", "sample_index"):
        hash_T = rows(**{name: 9}).hash_T()
        assert len(set(hash_T.tolist())) == 4 and hash_T[:2].tolist() == alike[:2].tolist()


def test_draws_do_not_depend_on_the_cut() -> None:
    """The share of candidates that is dropped, by the smallest draws of the batch."""
    batch, advantage_T = keyed()
    rule = mask("covariance-clip", share=0.02, cov_low=0.1)
    kept_T = answer(rule, gathered(batch, [rule], advantage_T), advantage_T)
    clipped_T = ~as_numpy(
        mask("ratio-clip", ratio_low=0.2, ratio_high=0.2).decide(batch, advantage_T).keep_T
    )
    batch_T = batch.batches.batch_S[as_numpy(batch.responses.response_T)]
    for key in np.unique(batch_T):
        of_T = batch_T == key
        assert (~kept_T & ~clipped_T & of_T).sum() == int(0.02 * of_T.sum())
