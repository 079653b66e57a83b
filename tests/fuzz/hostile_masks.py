"""Masks that change their inputs, exit, raise, print and return anything: no other number
changes.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.strategies import pick
from tests.fuzz.world import Outcome, call, copy

_NUMBERS = count()
PAIR = ("grpo-clip-higher", "dppo-binary-tv")
_COMPARED = (
    "logp_current_T",
    "logp_anchor_T",
    "log_ratio_T",
    "ratio_T",
    "ratio_less_1_T",
    "difference_T",
    "rest_T[0]",
)
COLUMNS = ("advantage_T", *(f"compared.{name}" for name in _COMPARED))
CHANGES = (
    "[:] = 0",
    "[...] = -1",
    "[:] = float('nan')",
    ".resize(0)",
    "[:] *= -1",
    ".sort()",
    ".setflags(write=0)",
)
ELSEWHERE = (
    "print('a word')",
    "compared.__dict__.clear()",
    "compared._responses.offset_S1[:] = 0",
    "compared.level_log_ratio_T('mean'); compared._sum_S[:] = 0",
    "vars(compared).update(ratio_T=None)",
)
LEAVES = (
    "sys.exit(0)",
    "__import__('os')._exit(0)",
    "raise SystemExit('bye')",
    "raise BaseException",
    "raise Exception('\\x1b[31m')",
    "1 / 0",
    "trust_region(compared, advantage_T)",
    "raise GeneratorExit",
    *["pass"] * 14,
)
ANSWERS = (
    *["Decision(advantage_T > 0, advantage_T)"] * 8,
    "Decision(advantage_T == advantage_T, 0 * advantage_T)",
    "Decision(advantage_T, advantage_T)",
    "Decision(advantage_T[1:] > 0, advantage_T)",
    "Decision(advantage_T > 0, advantage_T * float('nan'))",
    "None",
    "(advantage_T > 0, advantage_T)",
)


@st.composite
def masks(draw: st.DrawFn) -> tuple[str, bool]:
    """The source of a mask that misbehaves on import, in the trial or at work, and whether it
    runs first.
    """
    changes = st.builds(str.__add__, st.sampled_from(COLUMNS), st.sampled_from(CHANGES))
    lines = draw(st.lists(changes, max_size=3)) + draw(
        st.lists(st.sampled_from(ELSEWHERE), max_size=2)
    )
    lines.insert(draw(st.integers(0, len(lines))), pick(draw, *LEAVES))
    # A mask is tried on two tokens
    patience = pick(draw, 0, 2)
    lines = [
        f"    answer = {pick(draw, *ANSWERS)}",
        f"    if len(advantage_T) > {patience}:",
    ] + [f"        {line}" for line in lines]
    source = (
        "import sys\n"
        "from mismatch_cli import Decision\n"
        f"{pick(draw, *[''] * 9, 'print(1)', 'sys.exit(0)')}\n"
        "def trust_region(compared, advantage_T):\n" + "\n".join([*lines, "    return answer", ""])
    )
    return source, draw(st.booleans())


@cache
def _alone() -> dict[str, Any]:
    with copy() as folder:
        return _rows(call(folder, "clipstats", "run", *_asked(PAIR), "--json", "--output", "new"))


def _asked(algorithms: tuple[str, ...]) -> list[str]:
    return [word for name in algorithms for word in ("-a", name)]


def _rows(outcome: Outcome) -> dict[str, Any]:
    """The two algorithms' rows in stdout, which must be JSON."""
    return {row["name"]: row for row in outcome.json["algorithms"] if row["name"] in PAIR}


def run_beside(case: tuple[str, bool]) -> tuple[Outcome, str]:
    """Run `clipstats` with the mask and two other algorithms; returns the outcome, and its
    fault, if any.
    """
    source, first = case
    # A process reads each file once
    name = f"hostile_{next(_NUMBERS)}.py"
    with copy() as folder:
        (folder / name).write_text(source)
        algorithms = (name, *PAIR) if first else (*PAIR, name)
        outcome = call(folder, "clipstats", "run", *_asked(algorithms), "--json", "--output", "new")
    if outcome.code == 0:
        return outcome, "" if _rows(
            outcome
        ) == _alone() else "the numbers of other algorithms have changed"
    return (
        outcome,
        "" if name in outcome.err and not outcome.out else f"not named: {outcome.err[-300:]}",
    )
