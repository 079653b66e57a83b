"""Generates arithmetic word problems: a short story in English and the chain of calculations that
answers it.

Deterministic: the same `random.Random` state gives the same problem. Every number is between 1 and
`LIMIT`, and every division is exact.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from lab.makers import phrases

LIMIT = 150
HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Ref:
    """The result of an earlier step, by its position."""

    step: int


Operand = int | Ref


@dataclass(frozen=True)
class Step:
    """One calculation: `left operator right`, each side a number of the story or an earlier
    result.
    """

    operator: str
    left: Operand
    right: Operand


@dataclass(frozen=True)
class WordProblem:
    """A story, the calculations that answer it, and the answer."""

    text: str
    steps: tuple[Step, ...]
    answer: int
    person: str
    items: str


def apply(operator: str, left: int, right: int) -> int:
    """Integer arithmetic; division drops the remainder."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right if operator == "*" else left // right


@dataclass
class Story:
    """A problem in the making: the sentences and steps so far, and how many things the person
    has.
    """

    rng: random.Random
    person: str
    friend: str
    pronoun: str
    possessive: str
    items: str
    count: int
    holding: Operand
    sentences: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def say(self, variants: list[str], **numbers: object) -> None:
        """Adds one of the sentences, with names, things and numbers filled in."""
        words = {
            "n": self.person,
            "f": self.friend,
            "he": self.pronoun,
            "his": self.possessive,
            "i": self.items,
        }
        rng = self.rng
        words |= {"place": rng.choice(phrases.PLACES), "time": rng.choice(phrases.TIMES)}
        words |= {"boxes": rng.choice(phrases.CONTAINERS), "friends": rng.choice(phrases.SHARERS)}
        sentence = rng.choice(variants).format(**words, **numbers)
        self.sentences.append(sentence[0].upper() + sentence[1:])

    def calculate(self, operator: str, left: Operand, right: Operand) -> Ref:
        """Adds a step and returns a reference to its result."""
        self.steps.append(Step(operator, left, right))
        return Ref(len(self.steps) - 1)

    def update(self, operator: str, right: Operand, amount: int) -> None:
        """Changes how many things the person has; `amount` is the value of `right`."""
        self.holding = self.calculate(operator, self.holding, right)
        self.count = apply(operator, self.count, amount)


def begin(rng: random.Random) -> Story:
    """Introduces the person and the things."""
    names, pronoun, possessive = rng.choice(
        [(phrases.GIRLS, "she", "her"), (phrases.BOYS, "he", "his")]
    )
    person, friend = rng.choice(names), rng.choice(phrases.GIRLS + phrases.BOYS)
    while friend == person:
        friend = rng.choice(phrases.GIRLS + phrases.BOYS)
    count = rng.randint(4, 60)
    story = Story(rng, person, friend, pronoun, possessive, rng.choice(phrases.ITEMS), count, count)
    story.say(phrases.STARTS, a=count)
    return story


def gain(story: Story) -> bool:
    """The person gets some more things: one addition."""
    amount = story.rng.randint(2, 45)
    if story.count + amount > LIMIT:
        return False
    story.say(phrases.GAINS, b=amount)
    story.update("+", amount, amount)
    return True


def lose(story: Story) -> bool:
    """The person loses some things: one subtraction."""
    if story.count < 6:
        return False
    amount = story.rng.randint(2, min(45, story.count - 2))
    story.say(phrases.LOSSES, b=amount)
    story.update("-", amount, amount)
    return True


def multiply(story: Story) -> bool:
    """The number of things is multiplied by 2, 3 or 4."""
    factors = [k for k in phrases.MULTIPLY_VERBS if story.count * k <= LIMIT]
    if not factors:
        return False
    k = story.rng.choice(factors)
    story.say(
        phrases.MULTIPLICATIONS, verb=phrases.MULTIPLY_VERBS[k], times=phrases.TIMES_AS_MANY[k]
    )
    story.update("*", k, k)
    return True


def gain_groups(story: Story) -> bool:
    """Several packs of the same size arrive: a multiplication, then an addition."""
    k, size = story.rng.randint(2, 8), story.rng.randint(2, 12)
    if story.count + k * size > LIMIT:
        return False
    story.say(phrases.GROUP_GAINS, k=k, b=size)
    story.update("+", story.calculate("*", k, size), k * size)
    return True


def lose_groups(story: Story) -> bool:
    """Several people take the same number of things: a multiplication, then a subtraction."""
    k, size = story.rng.randint(2, 6), story.rng.randint(2, 12)
    if k * size > story.count - 2:
        return False
    story.say(phrases.GROUP_LOSSES, k=k, b=size)
    story.update("-", story.calculate("*", k, size), k * size)
    return True


def ask_count(story: Story) -> bool:
    """Asks how many things the person has, without a further step."""
    story.say(phrases.COUNT_QUESTIONS)
    return True


def ask_share(story: Story) -> bool:
    """Shares everything equally: one exact division."""
    divisors = [k for k in range(2, 10) if story.count % k == 0]
    if not divisors:
        return False
    k = story.rng.choice(divisors)
    story.say(phrases.SHARE_QUESTIONS, k=k)
    story.update("/", k, k)
    return True


def ask_friend(story: Story) -> bool:
    """Asks for a friend's number, given by comparison: one step."""
    operator, phrase, amount = compare(story)
    if not 1 <= apply(operator, story.count, amount) <= LIMIT:
        return False
    story.say(phrases.FRIEND_QUESTIONS, phrase=phrase, than="as" if operator == "*" else "than")
    story.update(operator, amount, amount)
    return True


def compare(story: Story) -> tuple[str, str, int]:
    """A comparison: the operator, its words, and its number."""
    operator = story.rng.choice("+-*")
    if operator == "*":
        k = story.rng.choice(list(phrases.TIMES_AS_MANY))
        return operator, f"{phrases.TIMES_AS_MANY[k]} as many", k
    amount = story.rng.randint(2, 30)
    return operator, f"{amount} {'more' if operator == '+' else 'fewer'}", amount


EVENTS = (gain, lose, multiply, gain_groups, lose_groups)
QUESTIONS = (ask_count, ask_count, ask_share, ask_friend)


def generate(rng: random.Random, least: int = 2, most: int = 4) -> WordProblem:
    """One problem with `least` to `most` calculations."""
    while True:
        story = begin(rng)
        for _ in range(rng.randint(1, 3)):
            # An event that does not fit leaves the story as it is
            rng.choice(EVENTS)(story)
        has_question = rng.choice(QUESTIONS)(story)
        if has_question and least <= len(story.steps) <= most:
            return WordProblem(
                " ".join(story.sentences),
                tuple(story.steps),
                story.count,
                story.person,
                story.items,
            )


def held_out(text: str) -> bool:
    """Whether a problem is on the held-out side; only its text decides, so no text can be on
    both sides.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def problems(seed: int, for_training: bool, least: int = 2, most: int = 4) -> Iterator[WordProblem]:
    """An endless stream of problems from one side of the split."""
    rng = random.Random(seed)
    while True:
        problem = generate(rng, least, most)
        if held_out(problem.text) != for_training:
            yield problem
