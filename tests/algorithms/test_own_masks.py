"""A user's own mask file: it works like those of the package, and what is wrong with one is said before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mismatch_cli.algorithms.algorithm import Factor, coefficient_T, keep_T
from mismatch_cli.algorithms.parse import find
from mismatch_cli.errors import UsageError
from mismatch_cli.policies import TRAINER_ROLLOUT
from tests.trust_regions.cases import random_policies, signs

HEAD = "import torch\nfrom mismatch_cli.trust_regions import Decision\n"
MINE = HEAD + (
    'FORMULA = "{p} < {lowest} or {r} > {highest}"\n'
    "def trust_region(compared, advantage_T, *, lowest: float = 0.05, highest: float = 3.0):\n"
    "    p_T = compared.logp_current_T.exp()\n"
    "    return Decision((p_T >= lowest) & (compared.ratio_T <= highest), compared.log_ratio_T)\n"
)


def write(folder: Path, source: str) -> str:
    path = folder / "my_mask.py"
    path.write_text(source, encoding="utf-8")
    return str(path)


def test_an_own_mask_works(tmp_path: Path) -> None:
    given = random_policies(0)
    advantage_T = signs(len(given.trainer))
    path = write(tmp_path, MINE)
    for spec, lowest in ((path, 0.05), (f"{path}:lowest=0.2", 0.2)):
        algorithm = find(spec)
        expected_T = (given.trainer.exp() >= lowest) & ((given.trainer - given.rollout).exp() <= 3)
        assert 0 < expected_T.sum() < len(expected_T)
        assert torch.equal(keep_T(algorithm, given, advantage_T), expected_T)
        weight_T = (given.trainer - given.rollout).exp() * expected_T
        torch.testing.assert_close(coefficient_T(algorithm, given, advantage_T), weight_T * advantage_T)
        assert algorithm.formulas == (f"p < {lowest:g} or r > 3", "r")
    assert find(path).name == "my_mask" and find(f"{path}:lowest=0.2").name == "my_mask:lowest=0.2"


def test_an_own_mask_takes_every_parameter_of_a_mask(tmp_path: Path) -> None:
    path = write(tmp_path, MINE)
    algorithm = find(f"{path}:lowest=0.1,cap=4,anchor=recomputed")
    assert algorithm.weight == (Factor(TRAINER_ROLLOUT, cap=4),)
    assert algorithm.formulas == ("p < 0.1 or r′ > 3", "min(r, 4)")
    with pytest.raises(
        UsageError, match=r"Unknown parameter of my_mask 'low'\. .*lowest.*Available: anchor, cap, floor"
    ):
        find(f"{path}:low=0.1")


def test_the_function_alone_is_enough(tmp_path: Path) -> None:
    path = write(tmp_path, MINE.replace("FORMULA", "_UNUSED"))
    blocked, weight = find(path).formulas
    assert "my_mask" in blocked and weight == "r"


def test_two_files_of_the_same_name(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, lowest in zip(folders, ("0.1", "0.3"), strict=True):
        folder.mkdir()
        write(folder, MINE.replace("0.05", lowest))
    found = [find(str(folder / "my_mask.py")).masks[0].thresholds["lowest"] for folder in folders]
    assert found == [0.1, 0.3]


SIGNATURE = r"must take \(compared, advantage_T\) and keyword-only thresholds with defaults"
ANSWER = "Decision whose keep_T is one bool for each token"


def answering(expression: str) -> str:
    return HEAD + f"def trust_region(compared, advantage_T):\n    return {expression}\n"


BROKEN = {
    "no function": ("FORMULA = 'never'\n", r"defines no trust_region\(compared, advantage_T"),
    "not a function": ("trust_region = 3\n", "defines no trust_region"),
    "import error": ("import no_such_module\n", r"cannot be imported \(ModuleNotFoundError: No module named"),
    "syntax error": ("def trust_region(:\n", r"cannot be imported \(SyntaxError"),
    "one parameter": ("def trust_region(compared): ...\n", SIGNATURE),
    "three parameters": ("def trust_region(compared, advantage_T, limit): ...\n", SIGNATURE),
    "positional threshold": ("def trust_region(compared, advantage_T, limit=1.0): ...\n", SIGNATURE),
    "no default": ("def trust_region(compared, advantage_T, *, limit): ...\n", SIGNATURE),
    "raises": (answering("1 / 0"), r"fails \(ZeroDivisionError: division by zero\)"),
    "a bare raise": (HEAD + "def trust_region(compared, advantage_T):\n    raise KeyError\n", r"fails \(KeyError"),
    "nothing": (answering("None"), "my_mask.py"),
    "a tensor": (answering("advantage_T > 0"), "my_mask.py"),
    "a list": (answering("Decision([True, True], [0.0, 0.0])"), "my_mask.py"),
    "numbers": (answering("Decision(torch.ones_like(advantage_T), advantage_T)"), "my_mask.py"),
    "integers": (answering("Decision(torch.ones_like(advantage_T).long(), advantage_T)"), ANSWER),
    "too many": (answering("Decision(torch.ones(7, dtype=torch.bool), advantage_T)"), "my_mask.py"),
    "two dimensions": (answering("Decision((advantage_T > 0)[:, None], advantage_T)"), ANSWER),
    "one for each response": (answering("Decision(compared._sum_S > 0, advantage_T)"), "my_mask.py"),
    "no statistic": (answering("Decision(advantage_T > 0, None)"), "my_mask.py"),
    "a formula with a stranger": (MINE.replace("{p} <", "{vocabulary} <"), "my_mask.py"),
    "a threshold named r": (MINE.replace("highest", "r"), "my_mask.py"),
}


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_with_a_file(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        find(write(tmp_path, source))
    assert "my_mask.py" in str(caught.value) and "\n" not in str(caught.value)


def test_a_threshold_may_be_called_k(tmp_path: Path) -> None:
    """Only the top-K masks mean a number of columns by it."""
    path = write(tmp_path, MINE.replace("*, lowest", '*, k: str = "both", lowest'))
    assert find(f"{path}:k=high").masks[0].thresholds["k"] == "high"


def test_a_message_of_the_mask_itself_is_passed_on(tmp_path: Path) -> None:
    source = MINE.replace("    p_T =", "    if lowest > 1: raise UsageError('lowest is a probability.')\n    p_T =")
    path = write(tmp_path, "from mismatch_cli.errors import UsageError\n" + source)
    with pytest.raises(UsageError, match=r"^lowest is a probability\.$"):
        find(f"{path}:lowest=2")


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    for name in ("folder.py", "missing.py"):
        with pytest.raises(UsageError, match=f"{name} does not exist"):
            find(str(tmp_path / name))
