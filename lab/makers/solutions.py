"""Writes a solution to a word problem: one calculation per sentence, varied words, and mistakes at
a known rate.

The mistakes are deliberate. A model trained on them solves about half of the held-out problems at
temperature 1, with errors that a sharper policy does not make: a stand-in for a model that
reinforcement learning can improve.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

from lab.makers import phrases
from lab.makers.word_problems import Operand, Ref, WordProblem, apply


@dataclass(frozen=True)
class MistakeRates:
    """Probability that one calculation goes wrong, by kind; slips depend on the operator."""

    slip: dict[str, float]
    wrong_operator: float
    wrong_number: float
    wrong_box: float


NO_MISTAKES = MistakeRates(dict.fromkeys("+-*/", 0.0), 0.0, 0.0, 0.0)
MISTAKES = MistakeRates(
    {"+": 0.10, "-": 0.13, "*": 0.13, "/": 0.15},
    wrong_operator=0.05,
    wrong_number=0.05,
    wrong_box=0.03,
)


class Zipf:
    """Draws entry k of a list (from 1) with probability proportional to 1/k."""

    def __init__(self, entries: list[str]) -> None:
        self.entries = entries
        self.weights = list(accumulate(1 / k for k in range(1, len(entries) + 1)))

    def draw(self, rng: random.Random) -> str:
        """One entry."""
        return rng.choices(self.entries, cum_weights=self.weights)[0]


FIRST_OPENER, NEXT_OPENER = Zipf(phrases.FIRST_OPENERS), Zipf(phrases.NEXT_OPENERS)
LEAD, CLOSER = Zipf(phrases.LEADS), Zipf(phrases.CLOSERS)


def slip(rng: random.Random, value: int) -> int:
    """A value close to the right one: off by one or two, off by ten, or with its last digit
    replaced.
    """
    kind = rng.choices(("one", "two", "ten", "digit"), (4, 1, 3, 2))[0]
    if kind == "digit":
        wrong = value - value % 10 + rng.choice([d for d in range(10) if d != value % 10])
    else:
        wrong = value + rng.choice((-1, 1)) * {"one": 1, "two": 2, "ten": 10}[kind]
    return wrong if wrong >= 0 else value + 1


def misread(rng: random.Random, value: int) -> int:
    """A number that was copied wrongly: its digits swapped, or one of them changed."""
    # A negative value comes from an earlier mistake; `believable` rejects that solution.
    digits = list(str(abs(value)))
    if len(digits) > 1 and digits[-1] != "0" and rng.random() < 0.4:
        return int("".join(reversed(digits)))
    position = rng.randrange(len(digits))
    digits[position] = rng.choice([d for d in "123456789" if d != digits[position]])
    return int("".join(digits))


def solve(rng: random.Random, problem: WordProblem, rates: MistakeRates) -> tuple[list[str], int]:
    """The equations as written, and the final number; later steps use the written results, right
    or wrong.
    """
    results: list[int] = []
    equations: list[str] = []

    def read(operand: Operand) -> int:
        value = results[operand.step] if isinstance(operand, Ref) else operand
        return misread(rng, value) if rng.random() < rates.wrong_number / 2 else value

    for step in problem.steps:
        left, right, operator = read(step.left), read(step.right), step.operator
        if rng.random() < rates.wrong_operator:
            operator = rng.choice([o for o in "+-*" if o != operator])
        result = apply(operator, left, right)
        if rng.random() < rates.slip[step.operator]:
            result = slip(rng, result)
        results.append(result)
        equations.append(f"{left}{operator}{right}={result}")
    return equations, results[-1]


def believable(equations: list[str]) -> bool:
    """Whether every result is within 0 to 999: no minus sign, at most three digits."""
    return all(0 <= int(equation.partition("=")[2]) <= 999 for equation in equations)


def write_solution(rng: random.Random, problem: WordProblem, rates: MistakeRates = MISTAKES) -> str:
    """The response text: a sentence for each equation, then the boxed answer."""
    equations, result = solve(rng, problem, rates)
    # A mistake may lead below 0 or above 999, where no story goes
    while not believable(equations):
        equations, result = solve(rng, problem, rates)
    sentences = [
        write_sentence(rng, problem, equation, first=k == 0) for k, equation in enumerate(equations)
    ]
    boxed = slip(rng, result) if rng.random() < rates.wrong_box else result
    return " ".join([*sentences, f"{CLOSER.draw(rng)} \\boxed{{{boxed}}}"])


def write_sentence(rng: random.Random, problem: WordProblem, equation: str, first: bool) -> str:
    """One calculation in words."""
    opener = (FIRST_OPENER if first else NEXT_OPENER).draw(rng)
    lead = LEAD.draw(rng).format(n=problem.person, i=problem.items)
    unit = f" {problem.items}" if rng.random() < 0.5 else ""
    return f"{opener}, {lead} {equation}{unit}."
