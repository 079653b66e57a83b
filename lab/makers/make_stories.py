"""Writes word problems at the edge of a small pretrained model, and the reward for them, into a
folder.

    python -m lab.makers.make_stories OUTPUT

`stories.jsonl` has 240 problems of one step with small numbers; `last_number.py` rewards a response
whose last number is the answer. SmolLM2-135M solves one in twenty, and learns most of them in a
quarter of an hour:

    make real-model
    export MISMATCH_LORA_RANK=16 MISMATCH_LORA_ALPHA=32 MISMATCH_EVAL_SAMPLES=1
    mismatch-cli train --model .real-model --dataset stories/stories.jsonl \\
        --reward stories/last_number.py:last_number --lora --learning-rate 5e-4 \\
        --prompts-per-step 8 --samples-per-prompt 8 --max-tokens 32 --minibatches 2 \\
        --eval-every 20 --trace-every 20 --steps 40 -o stories/run
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

PROBLEMS = 240
NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Max", "Nora")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "stickers", "cards", "shells")
ADDED = "{name} has {a} {things} and finds {b} more. How many {things} does {name} have now?"
TAKEN = "{name} has {c} {things} and gives away {b}. How many {things} are left?"
TIMES = "There are {a} boxes with {s} {things} each. How many {things} are there in all?"
ASKED = " Answer with a number only."
REWARD = """import re


def last_number(response, answer):
    numbers = re.findall(r"\\d+", response)
    return float(bool(numbers) and numbers[-1] == answer)
"""


def problems() -> list[dict[str, str]]:
    """The same 240 different problems every time."""
    rng, answers = random.Random(0), dict[str, str]()
    while len(answers) < PROBLEMS:
        story = rng.choice((ADDED, TAKEN, TIMES))
        a, b, s = rng.randint(2, 20), rng.randint(2, 20), rng.randint(2, 5)
        answer = {ADDED: a + b, TAKEN: a, TIMES: a * s}[story]
        text = story.format(
            name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b, c=a + b, s=s
        )
        answers.setdefault(text + ASKED, str(answer))
    return [{"problem": text, "answer": answer} for text, answer in answers.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(problem) + "\n" for problem in problems())
    (output / "stories.jsonl").write_text(lines, encoding="utf-8")
    (output / "last_number.py").write_text(REWARD, encoding="utf-8")


if __name__ == "__main__":
    main()
