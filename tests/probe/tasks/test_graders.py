"""Whose rule grades: verl's or oat's, on pairs whose verdicts both owners' code gave."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.app.commands.curate import reward_variables
from mismatch_cli.base.errors import UsageError
from mismatch_cli.probe.config import CurateConfig, ProbeConfig
from mismatch_cli.probe.tasks._oat_worker import _in_words, _no_difference, _verified, equal
from mismatch_cli.probe.tasks.grading import MathVerify
from mismatch_cli.trace.manifest import read_manifest

# Fractions, intervals, sets, units, words, matrices, percent, degrees, bases, times, money, and
# rewritten answers of the MATH problems (MIT), with the verdicts of oat at c1a074c (math-verify
# included) and of verl at 0ef82b4, both with the versions in requirements/cpu.lock.
PAIRS = [
    json.loads(line)
    for line in Path(__file__).with_name("graded_pairs.jsonl").read_text("utf-8").splitlines()
]


@pytest.fixture(scope="module")
def oat():
    with MathVerify(seconds=20, rule="oat") as grader:
        yield grader


def differing(grader: MathVerify, owner: str) -> list[dict]:
    return [
        pair
        for pair in PAIRS
        if grader.grade(f"\\boxed{{{pair['stated']}}}", pair["gold"], "stop") != pair[owner]
    ]


def test_each_rule_equals_its_owner(oat):
    """And the two differ, in both directions."""
    assert differing(oat, "oat") == []
    with MathVerify(seconds=20) as verl:
        assert differing(verl, "verl") == []
    assert len({(pair["oat"], pair["verl"]) for pair in PAIRS}) == 4
    assert oat.timeouts == 0


def test_elements_of_a_tuple_are_compared_by_sympy_within_equal_brackets():
    """Answers that math-verify does not read."""
    assert equal("(1/2x, 3)", "(0.5x, 3)") and equal("[1/2x, 3)", "[0.5x, 3)")
    assert not equal("(1/2x, 3]", "(0.5x, 3)") and not equal("[1/2x, 3)", "(0.5x, 3)")
    assert not equal("(1/2x, 4)", "(0.5x, 3)")


HOSTILE = [
    "9^{9^{9^{9}}}",
    "9**9**9**9",
    "1" + "+1" * 5000,
    "{" * 3000,
    "\\frac" * 3000,
    "\\frac{" * 3000 + "}" * 3000,
    "((((((((((((((((1" * 50,
    "\\",
    "\\\ud83d",
    "\\sqrt[",
    "9" * 5000,
    "__import__('os').abort()",
    "a.__b__()",
    "(1,2" * 3000,
]


def test_what_is_huge_or_hostile_earns_nothing():
    """In bounded time; the worker then answers as before."""
    with MathVerify(seconds=1, rule="oat") as grader:
        for stated in HOSTILE:
            assert grader.compare("\\text{Four}", "four") == 1
            began = time.monotonic()
            assert grader.compare(stated, "4") in (0.0, None), stated
            assert time.monotonic() - began < 20, stated


def test_the_paper_is_graded_as_its_code_does_and_everything_else_as_verl_does():
    load_config = pytest.importorskip("mismatch_cli.train.train_config").load_config
    assert load_config("paper", {}).task.grader == "oat"
    assert load_config("miniature", {}).task.grader == ProbeConfig.of({}).task.grader == "verl"
    with pytest.raises(UsageError, match="grader: Unknown grader 'oats'"):
        ProbeConfig.of({"grader": "oats"})


def test_the_next_command_of_curate_keeps_the_grader():
    assert reward_variables(CurateConfig.of({})) == ""
    own = CurateConfig.of({"grader": "oat", "answer_format": "line", "reward_seconds": 9})
    said = "MISMATCH_TRAIN_GRADER=oat MISMATCH_TRAIN_ANSWER_FORMAT=line "
    assert reward_variables(own) == f"{said}MISMATCH_TRAIN_REWARD_SECONDS=9 "


def test_a_recording_names_its_grader_and_resumes_with_it(tmp_path, monkeypatch):
    """A file that says otherwise does not change a run that is resumed."""
    grader_file = tmp_path / "oat.toml"
    grader_file.write_text('grader = "oat"\n')
    folder = tmp_path / "run"
    recorded = ["probe", "--engine", "hf", "--num-prompts", "2", "--samples-per-prompt", "2"]
    recorded += ["--max-tokens", "8", "--quiet", "-o", str(folder)]
    assert run([*recorded, "--config", str(grader_file)]) == 0
    assert read_manifest(folder / "trace")["config"]["grader"] == "oat"
    monkeypatch.setenv("MISMATCH_GRADER", "verl")
    assert run(["probe", "--resume", "--quiet", "-o", str(folder)]) == 0
    manifest = read_manifest(folder / "trace")
    assert manifest["config"]["grader"] == manifest["flags"]["grader"] == "oat"


def test_math_verify_does_not_read_an_answer_that_repeats_itself():
    """On either side: 1 plus a hundred zeros, which is 1 like 1 plus two."""
    long = "1" + "+0" * 100
    assert _verified("1+0+0", "1") and _verified("1", "1+0+0")
    assert not _verified(long, "1") and not _verified("1", long)


def test_arrays_and_matrices_have_brackets_and_other_environments_none():
    for matrix in (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{array}{cc}1&2\end{array}"):
        assert _in_words(matrix) == "[ 1 2 ]"
    assert _in_words(r"\begin{cases}1&2\end{cases}") == "1 2"


def test_sympy_reads_powers_and_roots():
    assert _no_difference("(x^2)-(x*x)") and _no_difference("(sqrt(8))-(2sqrt(2))")
    assert not _no_difference("(x^2)-(2x)")
    # Three letters are one too many, but those of a root do not count
    assert not _no_difference("(abc)-(abc)") and _no_difference("(sqrt(ab))-(sqrt(ab))")
