"""A user's own mask that looks at a whole batch, or at a prompt's answers; and faults in one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.rules.algorithms.algorithm import reads_single_tokens
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from tests.rules.algorithms.test_own_masks import HEAD, write
from tests.rules.trust_regions.cases import (
    columns,
    gathered,
    in_numpy,
    keep_T,
    like,
    random_policies,
    same,
    signs,
    with_keys,
)

# Blocks tokens below the mean ratio of the batch, times a factor.
COLLECT = (
    "def collect(compared, advantage_T, *, share: float = 0.5):\n"
    "    return compared.ratio_T[:, None]\n"
)
SETTLE = "def settle(rows_UM, *, share: float = 0.5):\n    return [share * rows_UM[:, 0].mean()]\n"
DECIDE = (
    "def trust_region(compared, advantage_T, settled_TF, *, share: float = 0.5):\n"
    "    return Decision(compared.ratio_T >= settled_TF[:, 0], compared.log_ratio_T)\n"
)
BATCH, GROUP = (
    f'{HEAD}SCOPE = "{scope}"\n{COLLECT}{SETTLE}{DECIDE}' for scope in ("batch", "group")
)


def test_an_own_mask_of_the_batch(tmp_path: Path) -> None:
    """Without keys all tokens are one batch, with numpy and torch."""
    path, batch = write(tmp_path, BATCH), random_policies(0)
    advantage_T, ratio_T = signs(len(batch.trainer)), (batch.trainer - batch.rollout).exp()
    for spec, share in ((path, 0.5), (f"{path}:share=0.1", 0.1)):
        algorithm = parse_algorithm(spec, training=True)
        assert algorithm.batch_rules == algorithm.masks and not reads_single_tokens(algorithm)
        expected_T = ratio_T >= share * ratio_T.mean()
        assert 5 < expected_T.sum() < len(expected_T) - 5
        assert torch.equal(keep_T(algorithm, batch, advantage_T), expected_T)
        assert np.array_equal(
            keep_T(algorithm, in_numpy(batch), advantage_T.numpy()), expected_T.numpy()
        )


def test_an_own_mask_of_the_group(tmp_path: Path) -> None:
    """Each prompt's answers have their own mean."""
    batch, algorithm = random_policies(0), parse_algorithm(write(tmp_path, GROUP))
    prompt_S = np.arange(60) // 4
    batch = with_keys(batch, np.zeros(60, dtype=np.int64), prompt_S)
    advantage_T, ratio_T = signs(len(batch.trainer)), (batch.trainer - batch.rollout).exp()
    found_T = keep_T(algorithm, gathered(batch, algorithm.batch_rules, advantage_T), advantage_T)
    prompt_T = torch.from_numpy(prompt_S)[batch.responses.response_T]
    for prompt in range(15):
        of_T = prompt_T == prompt
        assert torch.equal(found_T[of_T], ratio_T[of_T] >= 0.5 * ratio_T[of_T].mean())


BROKEN = {
    "another scope": (
        BATCH.replace('"batch"', '"step"'),
        r"sets SCOPE = 'step'\. Choose one of: batch, group\.",
    ),
    "not a text": (
        BATCH.replace('"batch"', "3"),
        r"sets SCOPE = 3\. Choose one of: batch, group\.",
    ),
    "no collect": (
        BATCH.replace(COLLECT, ""),
        r"looks at a whole batch but defines no collect\(\)",
    ),
    "no settle": (GROUP.replace(SETTLE, ""), r"looks at a whole group but defines no settle\(\)"),
    "a settle that is not a function": (
        BATCH.replace(SETTLE, "settle = 3\n"),
        r"defines no settle\(\)",
    ),
    "no parameter for the settled numbers": (
        BATCH.replace("settled_TF, ", ""),
        r"trust_region must take \(compared, advantage_T, settled_TF\) and keyword-only thresholds",
    ),
    "a place without a scope": (
        BATCH.replace('SCOPE = "batch"\n', ""),
        r"trust_region must take \(compared, advantage_T\) and keyword-only thresholds",
    ),
    "collect fails": (
        BATCH.replace("compared.ratio_T[:, None]", "1 / 0"),
        r"fails \(ZeroDivisionError",
    ),
    "collect without the threshold": (
        BATCH.replace(
            "def collect(compared, advantage_T, *, share: float = 0.5)",
            "def collect(compared, advantage_T)",
        ),
        r"fails \(TypeError: .*share",
    ),
    "settle fails": (
        BATCH.replace("rows_UM[:, 0].mean()", "rows_UM[:, 3].mean()"),
        r"fails \(IndexError",
    ),
    "a row for a response": (
        BATCH.replace("compared.ratio_T[:, None]", "compared.ratio_T[:1][:, None]"),
        r"collect must return one row per token, .*shape \(1, 1\) for 2 tokens",
    ),
    "rows without columns": (
        BATCH.replace("compared.ratio_T[:, None]", "compared.ratio_T"),
        r"collect must return one row per token",
    ),
    "a table is settled": (
        BATCH.replace("[share * rows_UM[:, 0].mean()]", "[[share]]"),
        r"settle must return a list of numbers",
    ),
    "settle leaves": (
        BATCH.replace("return [share", "raise SystemExit\n    return [share"),
        "tries to end the program",
    ),
}


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_with_a_file(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(MismatchError, match=message) as caught:
        parse_algorithm(write(tmp_path, source))
    assert isinstance(caught.value, UsageError) == ("end the program" not in message)
    assert "my_mask.py" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["compared.ratio_T[:, None]", "[share * rows_UM[:, 0].mean()]"])
def test_what_is_wrong_on_real_data_names_the_file(tmp_path: Path, where: str) -> None:
    """Also in a first pass over a batch."""
    argument = "advantage_T" if "compared" in where else "rows_UM"
    source = BATCH.replace(
        f"return {where}", f"return {where} if len({argument}) < 3 else {{}}['mean']"
    )
    algorithm, batch = parse_algorithm(write(tmp_path, source)), random_policies(0)
    keyed, advantage_T = (
        with_keys(batch, *np.zeros((2, 60), dtype=np.int64)),
        signs(len(batch.trainer)),
    )
    for ask in (
        lambda: keep_T(algorithm, batch, advantage_T),
        lambda: gathered(keyed, algorithm.masks, advantage_T),
    ):
        with pytest.raises(
            MismatchError, match=r"my_mask\.py fails \(KeyError: 'mean'\)\. Fix the mask\."
        ):
            ask()


def test_changes_in_collect_reach_nothing_else(tmp_path: Path) -> None:
    touch = "compared.ratio_T[:] = 1; compared.logp_current_T[:] = -1; advantage_T[:] = 0"
    rule = parse_algorithm(
        write(tmp_path, BATCH.replace("    return compared", f"    {touch}\n    return compared"))
    ).masks[0]
    for world in (in_numpy, lambda batch: batch):
        batch = world(random_policies(0))
        advantage_T = like(batch, signs(len(batch.trainer)))
        before, untouched = (
            batch.compare(rule.ratio).ratio_T + 0,
            like(batch, signs(len(batch.trainer))),
        )
        assert (rule.collect(batch, advantage_T) == 1).all()
        assert same(batch.compare(rule.ratio).ratio_T, before) and same(advantage_T, untouched)
        assert all(
            same(*pair)
            for pair in zip(columns(batch), columns(world(random_policies(0))), strict=True)
        )
