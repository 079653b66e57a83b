"""A user's own mask file: it works like the package's masks, and its faults are reported before
any work.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.rules.algorithms.algorithm import coefficient_T, keep_T
from mismatch_cli.rules.algorithms.masks_and_factors import capped
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.rules.policies import TRAINER_ROLLOUT, Policies
from tests.rules.ratios import TRAINER_RECOMPUTED
from tests.rules.trust_regions.cases import columns, in_numpy, like, random_policies, same, signs

HEAD = (
    "import math\n"
    "from mismatch_cli.base.arrays import namespace\n"
    "from mismatch_cli import Decision\n"
)
MINE = HEAD + (
    'FORMULA = "{p} < {lowest} or {r} > {highest}"\n'
    "def trust_region(compared, advantage_T, *, lowest: float = 0.05, highest: float = 3.0):\n"
    "    p_T = compared.logp_current_T >= math.log(lowest)\n"
    "    return Decision(p_T & (compared.ratio_T <= highest), compared.log_ratio_T)\n"
)


def write(folder: Path, source: str) -> str:
    path = folder / "my_mask.py"
    path.write_text(source, encoding="utf-8")
    return str(path)


def test_an_own_mask_works(tmp_path: Path) -> None:
    batch = random_policies(0)
    advantage_T = signs(len(batch.trainer))
    path = write(tmp_path, MINE)
    for spec, lowest in ((path, 0.05), (f"{path}:lowest=0.2", 0.2)):
        algorithm = parse_algorithm(spec)
        expected_T = (batch.trainer.exp() >= lowest) & ((batch.trainer - batch.rollout).exp() <= 3)
        assert 0 < expected_T.sum() < len(expected_T)
        assert torch.equal(keep_T(algorithm, batch, advantage_T), expected_T)
        weight_T = (batch.trainer - batch.rollout).exp() * expected_T
        torch.testing.assert_close(
            coefficient_T(algorithm, batch, advantage_T), weight_T * advantage_T
        )
        assert algorithm.formulas == (f"p < {lowest:g} or r > 3", "r")
    assert (
        parse_algorithm(path).name == "my_mask"
        and parse_algorithm(f"{path}:lowest=0.2").name == "my_mask:lowest=0.2"
    )


def test_an_own_mask_accepts_every_parameter_of_a_mask(tmp_path: Path) -> None:
    path = write(tmp_path, MINE)
    algorithm = parse_algorithm(f"{path}:lowest=0.1,cap=4,anchor=recomputed")
    assert algorithm.weight == (capped(TRAINER_RECOMPUTED, cap=4),)
    assert algorithm.formulas == ("p < 0.1 or r′ > 3", "min(r′, 4)")
    with pytest.raises(
        UsageError,
        match=r"my_mask has no parameter 'low'\. .*lowest.*Available: anchor, cap \(C\), floor",
    ):
        parse_algorithm(f"{path}:low=0.1")


def test_the_function_by_itself_is_enough(tmp_path: Path) -> None:
    path = write(tmp_path, MINE.replace("FORMULA", "_UNUSED"))
    blocked, weight = parse_algorithm(path).formulas
    assert "my_mask" in blocked and weight == "r"


def test_two_files_of_the_same_name(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, lowest in zip(folders, ("0.1", "0.3"), strict=True):
        folder.mkdir()
        write(folder, MINE.replace("0.05", lowest))
    thresholds = [
        parse_algorithm(str(folder / "my_mask.py")).masks[0].parameters["lowest"]
        for folder in folders
    ]
    assert thresholds == [0.1, 0.3]


SIGNATURE = r"must take \(compared, advantage_T\) and keyword-only thresholds with defaults"
ANSWER = r"Decision.*one bool and one number for each token"


def answering(expression: str) -> str:
    return HEAD + f"def trust_region(compared, advantage_T):\n    return {expression}\n"


BROKEN = {
    "no function": ("FORMULA = 'never'\n", r"does not define trust_region\(compared, advantage_T"),
    "not a function": ("trust_region = 3\n", "does not define trust_region"),
    "import error": (
        "import no_such_module\n",
        r"cannot be imported \(ModuleNotFoundError: No module named",
    ),
    "syntax error": ("def trust_region(:\n", r"cannot be imported \(SyntaxError"),
    "one parameter": ("def trust_region(compared): ...\n", SIGNATURE),
    "three parameters": ("def trust_region(compared, advantage_T, limit): ...\n", SIGNATURE),
    "positional threshold": (
        "def trust_region(compared, advantage_T, limit=1.0): ...\n",
        SIGNATURE,
    ),
    "no default": ("def trust_region(compared, advantage_T, *, limit): ...\n", SIGNATURE),
    "raises": (answering("1 / 0"), r"fails \(ZeroDivisionError: division by zero\)"),
    "a bare raise": (
        HEAD + "def trust_region(compared, advantage_T):\n    raise KeyError\n",
        r"fails \(KeyError",
    ),
    "nothing": (answering("None"), "my_mask.py"),
    "a tensor": (answering("advantage_T > 0"), "my_mask.py"),
    "a list": (answering("Decision([True, True], [0.0, 0.0])"), "my_mask.py"),
    "numbers": (answering("Decision(abs(advantage_T), advantage_T)"), "my_mask.py"),
    "integers": (answering("Decision(1 * (advantage_T > 0), advantage_T)"), ANSWER),
    "too many": (
        answering("Decision(namespace(advantage_T).ones(7) > 0, advantage_T)"),
        "my_mask.py",
    ),
    "two dimensions": (answering("Decision((advantage_T > 0)[:, None], advantage_T)"), ANSWER),
    "one for each response": (
        answering("Decision(compared._sum_S > 0, advantage_T)"),
        "my_mask.py",
    ),
    "no statistic": (answering("Decision(advantage_T > 0, None)"), "my_mask.py"),
    "a formula with a stranger": (MINE.replace("{p} <", "{vocabulary} <"), "my_mask.py"),
    "a threshold named r": (MINE.replace("highest", "r"), "my_mask.py"),
    "a formula that is not a text": (MINE.replace("FORMULA =", "FORMULA = 3\n_ ="), "my_mask.py"),
    "a function without a signature": ("trust_region = dict\n", r"my_mask\.py fails \(ValueError"),
    "a default of None": (
        MINE.replace("0.05", "None"),
        r"the default of lowest must be a number or a text",
    ),
    "a default that can change": (
        MINE.replace("0.05", "[0.05]"),
        r"the default of lowest must be a number",
    ),
    "a letter of nothing": (
        MINE + "\nSYMBOLS = {'limit': 'δ'}\n",
        r"my_mask\.py: SYMBOLS names limit, which is not a thresh",
    ),
    "a letter that is another threshold": (
        MINE.replace("highest", "delta") + "\nSYMBOLS = {'lowest': 'δ'}\n",
        r"my_mask\.py: delta is a threshold, and also the letter of lowest",
    ),
    "a threshold named anchor": (
        MINE.replace("highest", "anchor"),
        r"my_mask\.py: anchor= already names the policy that a mask measures from",
    ),
    "top-K without ranks": (
        "READS_TOP_K = True\n" + MINE,
        r"my_mask\.py sets READS_TOP_K = True\. Add a whole-number",
    ),
    "top-K of a text": (
        "READS_TOP_K = True\n" + MINE.replace("*, ", "*, k='all', "),
        r"whole-number threshold k",
    ),
}


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_with_a_file(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_algorithm(write(tmp_path, source))
    assert "my_mask.py" in str(caught.value) and "\n" not in str(caught.value)


def test_the_example_of_a_threshold_without_a_bound_can_be_typed(tmp_path: Path) -> None:
    path = write(tmp_path, MINE.replace("0.05", "float('inf')"))
    for text in ("much", "inf"):
        with pytest.raises(UsageError, match=rf"lowest={text} is not a .*Example: lowest=1\.0$"):
            parse_algorithm(f"{path}:lowest={text}")
    assert parse_algorithm(f"{path}:lowest=1.0").masks[0].parameters["lowest"] == 1


def test_a_letter_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, MINE + "\nSYMBOLS = {'lowest': 'δ'}\n")
    algorithm = parse_algorithm(f"{path}:delta=0.1")
    assert algorithm.masks[0].parameters["lowest"] == 0.1
    assert algorithm.formulas[0] == "p < δ or r > 3 (δ = 0.1)"


@pytest.mark.parametrize(
    ("default", "value"), [('"both"', "high"), ("3", 7), ("2.5", 4.0), ("True", False)]
)
def test_a_threshold_may_be_called_k(tmp_path: Path, default: str, value: object) -> None:
    """It is the number of top-K columns only in a mask that sets READS_TOP_K."""
    path = write(tmp_path, MINE.replace("*, lowest", f"*, k={default}, lowest"))
    algorithm = parse_algorithm(f"{path}:k={value}")
    assert algorithm.masks[0].parameters["k"] == value and algorithm.needs_top_k == 0
    drawn = random_policies(0)
    lean = Policies(drawn.rollout, drawn.trainer, None, drawn.offset_S1)
    assert not keep_T(algorithm, lean, signs(len(drawn.trainer))).all()


TOP_K = HEAD + (
    "READS_TOP_K = True\n"
    "def trust_region(compared, advantage_T, *, k: int = 4, max_tv: float = 0.1):\n"
    "    tv_T, _ = compared.topk(k)\n"
    "    return Decision(tv_T <= max_tv, tv_T)\n"
)


def test_an_own_mask_that_reads_top_k(tmp_path: Path) -> None:
    path = write(tmp_path, TOP_K)
    assert (
        parse_algorithm(path).needs_top_k == 4 and parse_algorithm(f"{path}:k=7").needs_top_k == 7
    )
    drawn = random_policies(0)
    advantage_T = signs(len(drawn.trainer))
    for spec, k in ((path, 4), (f"{path}:k=7", 7)):
        tv_T, _ = drawn.compare(TRAINER_ROLLOUT).topk(k)
        assert torch.equal(keep_T(parse_algorithm(spec), drawn, advantage_T), tv_T <= 0.1)
    assert not torch.equal(
        keep_T(parse_algorithm(path), drawn, advantage_T),
        keep_T(parse_algorithm(f"{path}:k=7"), drawn, advantage_T),
    )


AT_WORK = {  # each is correct on the two tokens on which a mask is tried
    "raises": ("1 / 0", r"ZeroDivisionError: division by zero"),
    "a key": ("{}['lowest']", "KeyError"),
    "nothing": ("None", "my_mask.py"),
    "one too few": ("Decision(advantage_T[1:] > 0, advantage_T)", "my_mask.py"),
    "two dimensions": ("Decision((advantage_T > 0)[:, None], advantage_T)", "my_mask.py"),
    "one for all": ("Decision((advantage_T > 0)[:1], advantage_T)", "my_mask.py"),
    "whole numbers": (
        "Decision(1 * (advantage_T > 0), advantage_T)",
        r"my_mask\.py.*holds torch\.int64",
    ),
    "numbers": (
        "Decision(1.0 * (advantage_T > 0), advantage_T)",
        r"my_mask\.py.*holds torch\.float32",
    ),
    "not a number": (
        "Decision(advantage_T > 0, advantage_T * float('nan'))",
        r"my_mask\.py.*statistic_T is NaN at",
    ),
    "half a number": (
        "Decision(advantage_T > 0, namespace(advantage_T).log(advantage_T))",
        r"my_mask\.py.*NaN at [0-9,]+ of",
    ),
    "no statistic": ("Decision(advantage_T > 0, None)", r"my_mask\.py.*statistic_T is NoneType"),
    "a statistic too few": (
        "Decision(advantage_T > 0, advantage_T[1:])",
        r"my_mask\.py.*statistic_T has the shape \(\d+,\) for",
    ),
    "numpy": (
        "Decision((advantage_T > 0).numpy(), advantage_T)",
        r"my_mask\.py.*keep_T is ndarray",
    ),
    "another device": (
        "Decision((advantage_T > 0).to('meta'), advantage_T)",
        r"my_mask\.py.*is on meta",
    ),
    "a pair": ("(advantage_T > 0, advantage_T)", r"my_mask\.py.*returned tuple"),
}


@pytest.mark.parametrize(("expression", "message"), AT_WORK.values(), ids=AT_WORK)
def test_what_is_wrong_on_real_data_names_the_file(
    tmp_path: Path, expression: str, message: str
) -> None:
    source = (
        "def trust_region(compared, advantage_T):\n"
        "    if len(advantage_T) > 2:\n"
        f"        return {expression}\n"
        "    return Decision(advantage_T > 0, advantage_T)\n"
    )
    algorithm, drawn = parse_algorithm(write(tmp_path, HEAD + source)), random_policies(0)
    with pytest.raises(MismatchError, match=message) as caught:
        keep_T(algorithm, drawn, signs(len(drawn.trainer)))
    assert "my_mask.py" in str(caught.value) and "\n" not in str(caught.value)


TOUCHING = {
    "the advantages": "advantage_T[:] = 0",
    "log-probs": "compared.logp_current_T[:] += 5; compared.logp_anchor_T[:] = -1",
    "the ratio": "compared.ratio_T[:] = 1; compared.ratio_less_1_T[:] = 0; compared.log_ratio_T[:] = 0",
    "the difference": "compared.difference_T[:] = 0; compared.binary_kl_T[:] = 0; compared.rest_T[0][:] = 0",
    "its own arguments": "compared.ratio_T = compared.ratio_less_1_T = compared.ratio_T * 0",
    "where responses begin": "compared.responses.offset_S1[:] = 0; compared.responses.length_S[:] = 1",
    "sums": "compared.level_log_ratio_T('mean'); compared._sum_S[:] = 0; compared._mean_S[:] = 0",
    "top-K": "[x.__setitem__(0, -3) for x in compared.topk(4)]; compared._topk_current_TK[:] = -2",
    "top-K ids": (
        "compared._topk.ids_TK[:] = 0; compared._topk.response_ids_T[:] = 0; "
        "compared._topk.trainer[:] = 0"
    ),
}
OF_TORCH = {
    "in place": "advantage_T.zero_(); compared.ratio_T.clamp_(0, 1)",
    "as numpy": "advantage_T.numpy()[:] = 1; compared.logp_anchor_T.numpy()[:] = -1",
    "past autograd": "compared.logp_current_T.data[:] = -1",
}


@pytest.mark.parametrize("world", [in_numpy, lambda batch: batch], ids=["numpy", "torch"])
def test_a_mask_s_changes_reach_nothing_else(
    tmp_path: Path, world: Callable[[Policies], Policies]
) -> None:
    """All other algorithms and the policies give the same numbers before it, after it and next
    to it.
    """
    rows = [
        TABLE[name]
        for name in ("grpo-clip-higher", "ppo-mis", "gspo", "dppo-topk-kl", "ppo-icepop")
    ]
    for number, touch in enumerate(
        [*TOUCHING.values(), *(OF_TORCH.values() if world is not in_numpy else ())]
    ):
        source = (
            f"{HEAD}READS_TOP_K = True\n"
            "def trust_region(compared, advantage_T, *, k: int = 4):\n"
            "    answer = Decision(advantage_T > 0, compared.ratio_less_1_T + 0)\n"
            "    if len(advantage_T) > 2:\n"
            f"        {touch}\n"
            "    return answer\n"
        )
        (folder := tmp_path / str(number)).mkdir()
        mask = parse_algorithm(write(folder, source))
        alone, shared = world(random_policies(0)), world(random_policies(0))
        advantage_T, given_T = (like(alone, signs(len(alone.trainer))) for _ in range(2))
        expected = [coefficient_T(row, alone, advantage_T) for row in rows]
        for _ in range(2):
            assert same(keep_T(mask, shared, given_T), advantage_T > 0), touch
            coefficients = [coefficient_T(row, shared, given_T) for row in rows]
            assert all(same(*pair) for pair in zip(coefficients, expected, strict=True)), touch
        assert same(given_T, advantage_T), touch
        assert all(same(*pair) for pair in zip(columns(shared), columns(alone), strict=True)), touch


def test_torch_called_on_numpy_gets_one_sentence(tmp_path: Path) -> None:
    """And numpy's methods called on tensors: each with code that works for both."""
    own_file = "import torch\nfrom mismatch_cli import Decision\n"
    own_file += (
        "def trust_region(compared, advantage_T):\n    return Decision({} <= 1, compared.ratio_T)\n"
    )
    for number, expression in enumerate(
        (
            "compared.log_ratio_T.abs()",
            "torch.abs(compared.log_ratio_T)",
            "compared.log_ratio_T.clamp(0, 1)",
        )
    ):
        (folder := tmp_path / str(number)).mkdir()
        with pytest.raises(
            UsageError, match=r"columns are numpy arrays when a trace is read.*Use operators"
        ):
            parse_algorithm(write(folder, own_file.format(expression)))
    (folder := tmp_path / "numpy").mkdir()
    path = write(folder, own_file.format("compared.log_ratio_T.astype(float)"))
    assert parse_algorithm(path).name == "my_mask"
    with pytest.raises(
        UsageError, match=r"columns are numpy arrays when a trace is read.*torch tensors in `train`"
    ):
        parse_algorithm(path, training=True)
    with pytest.raises(UsageError, match=r"keep_T is Tensor, but the columns are ndarray"):
        parse_algorithm(
            write(tmp_path, own_file.replace("{} <= 1", "torch.from_numpy(advantage_T) > 0"))
        )


def test_a_mask_sees_top_k_only_if_it_asks_for_it(tmp_path: Path) -> None:
    """A mask's columns do not depend on what other algorithms of the run read."""
    source = (
        TOP_K.replace("READS_TOP_K = True", "")
        .replace("    tv_T", "    if len(advantage_T) > 2: tv_T")
        .replace(
            "return Decision(tv_T <= max_tv, tv_T)", "return Decision(advantage_T > 0, advantage_T)"
        )
    )
    drawn = random_policies(0)
    with pytest.raises(MismatchError, match=r"my_mask\.py fails .*columns"):
        keep_T(parse_algorithm(write(tmp_path, source)), drawn, signs(len(drawn.trainer)))


LEAVING = {
    "sys.exit": "sys.exit(0)",
    "a bare exit": "raise SystemExit",
    "an exit code": "sys.exit(3)",
    "a message": "sys.exit('no')",
    "exit": "exit()",
    "os._exit": "os._exit(0)",
    "base exception": "raise BaseException('stop')",
    "generator exit": "raise GeneratorExit",
    "an error whose text fails": "raise type('Odd', (Exception,), {'__str__': lambda self: sys.exit(0)})",
    "no memory": "raise MemoryError",
    "recursion": "trust_region(compared, advantage_T)",
}


@pytest.mark.parametrize("statement", LEAVING.values(), ids=LEAVING)
@pytest.mark.parametrize("where", ["imported", "tried out", "at work"])
def test_a_mask_that_exits_is_an_error_that_names_it(
    tmp_path: Path, where: str, statement: str
) -> None:
    at = {"imported": "", "tried out": "    ", "at work": "    if len(advantage_T) > 2: "}[where]
    function = "def trust_region(compared, advantage_T):\n"
    lines = [function, f"{at}{statement}\n"] if at else [f"{statement}\n", function]
    if where == "imported" and "trust_region(" in statement:
        lines = ["def recurse(): recurse()\n", "recurse()\n", function]
    path = write(
        tmp_path,
        "import os, sys\n"
        f"{HEAD}{''.join(lines)}    return Decision(advantage_T > 0, advantage_T)\n",
    )
    drawn = random_policies(0, responses=3)
    with pytest.raises(
        MismatchError, match=r"my_mask\.py .*(Remove the call|Fix the mask)\.$"
    ) as caught:
        keep_T(parse_algorithm(path), drawn, signs(len(drawn.trainer)))
    message = str(caught.value)
    usage = where != "at work" and "tries to end the program" not in message
    assert isinstance(caught.value, UsageError) == usage and "\n" not in message


def test_a_process_that_a_mask_forks_may_exit(tmp_path: Path) -> None:
    fork = "    assert os.waitpid(os.fork() or os._exit(3), 0)[1] >> 8 == 3\n"
    answer = "    return Decision(advantage_T > 0, advantage_T)\n"
    path = write(
        tmp_path, f"import os\n{HEAD}def trust_region(compared, advantage_T):\n{fork}{answer}"
    )
    drawn, leave = random_policies(0), os._exit
    keep_T(parse_algorithm(path), drawn, signs(len(drawn.trainer)))
    assert os._exit is leave


def test_a_mask_s_prints_are_not_output_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path, "print('imported')\n" + MINE.replace("    p_T =", "    print('asked')\n    p_T =")
    )
    parse_algorithm(path)
    out, err = capsys.readouterr()
    assert out == "" and err.split() == ["imported", "asked"]


def test_a_mask_s_own_error_on_real_data_is_passed_on(tmp_path: Path) -> None:
    source = MINE.replace(
        "    p_T =", "    if len(advantage_T) > 2: raise MismatchError('Too many.')\n    p_T ="
    )
    algorithm = parse_algorithm(
        write(tmp_path, "from mismatch_cli.base.errors import MismatchError\n" + source)
    )
    drawn = random_policies(0)
    with pytest.raises(MismatchError, match=r"^Too many\.$"):
        keep_T(algorithm, drawn, signs(len(drawn.trainer)))


def test_a_mistake_of_the_package_is_not_blamed_on_a_file() -> None:
    """Asking a mask for missing columns is a bug of the caller, and keeps its traceback."""
    drawn = random_policies(0)
    lean = Policies(drawn.rollout, drawn.trainer, None, drawn.offset_S1)
    with pytest.raises(ValueError, match="columns"):
        keep_T(parse_algorithm("dppo-topk-tv"), lean, signs(len(drawn.trainer)))


def test_a_message_of_the_mask_itself_is_passed_on(tmp_path: Path) -> None:
    source = MINE.replace(
        "    p_T =", "    if lowest > 1: raise UsageError('lowest is a probability.')\n    p_T ="
    )
    path = write(tmp_path, "from mismatch_cli.base.errors import UsageError\n" + source)
    with pytest.raises(UsageError, match=r"^lowest is a probability\.$"):
        parse_algorithm(f"{path}:lowest=2")


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    for name in ("folder.py", "missing.py"):
        with pytest.raises(UsageError, match=f"{name} does not exist"):
            parse_algorithm(str(tmp_path / name))
