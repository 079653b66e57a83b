"""Questions that a real model answers in one to four tokens, with right words that it gives rarely.

    python -m lab.rare_words [--model .real-model]

measures the probability of each candidate as the answer (the product over its tokens, after
`QUESTION`) and keeps those between 1e-4 and 1e-2. The four questions whose kept words are together
the most probable, so that 32 samples hold some, go to lab/evidence/rare_words.jsonl: the
question, its rare words as the answer, and their probabilities. `rare_word` is the reward.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
CANDIDATES, KEPT = _HERE / "word_candidates.toml", _HERE / "evidence" / "rare_words.jsonl"
# Two examples, without which the model answers in sentences
QUESTION = "Name a pet: hamster\nName a toy: kite\nName {what}:"
LOWEST, HIGHEST = 1e-4, 1e-2  # probability of a rare word
_QUESTIONS = 4  # of 32 responses each: a step of eight took four minutes of CPU time
_MOST_TOKENS = 3  # of a word
_WORD = re.compile(r"[A-Za-z]+")


def rare_word(responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 if the first word of a response is one of its question's rare words, in any case."""
    pairs = zip(responses, answers, strict=True)
    return [float(_first_word(response) in words.split()) for response, words in pairs]


def _first_word(response: str) -> str:
    match = _WORD.match(response.strip())
    return match.group().lower() if match else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".real-model")
    model = _Model(parser.parse_args().model)
    rows = []
    for what, words in tomllib.loads(CANDIDATES.read_text(encoding="utf-8")).items():
        rows.append(_row(model, QUESTION.format(what=what), words.split()))
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    with KEPT.open("w", encoding="utf-8") as file:
        for row in sorted(rows, key=_together, reverse=True)[:_QUESTIONS]:
            file.write(json.dumps(row) + "\n")
            print(f"{row['problem'].splitlines()[-1]} {_together(row):.3f}: {row['answer']}")


def _together(row: dict[str, Any]) -> float:
    """The probability of any rare word of a question."""
    return sum(row["probability"])


def _row(model: _Model, question: str, words: Sequence[str]) -> dict[str, Any]:
    rare, probabilities = [], []
    for word in words:
        probability = model.probability(question, word)
        if LOWEST <= probability <= HIGHEST:
            rare.append(word)
            probabilities.append(float(f"{probability:.2g}"))
    return {"problem": question, "answer": " ".join(rare), "probability": probabilities}


class _Model:
    """A model that says how probable a word is as an answer."""

    def __init__(self, folder: str) -> None:
        from mismatch_cli.models.loading import load_causal_lm, load_tokenizer

        self._tokenizer, self._model = load_tokenizer(folder), load_causal_lm(folder, "float32")
        self._next: dict[tuple[int, ...], Any] = {}

    def probability(self, question: str, word: str) -> float:
        """The probability of the word after the question, in small letters or with a capital."""
        return self._of(question, word) + self._of(question, word.capitalize())

    def _of(self, question: str, spelled: str) -> float:
        ids = self._tokenizer(question).input_ids
        word = self._tokenizer(f" {spelled}", add_special_tokens=False).input_ids
        product = 1.0
        for place, token in enumerate(word):
            product *= self._distribution((*ids, *word[:place]))[token]
            # Each further token can only make the word rarer
            if product < LOWEST or place >= _MOST_TOKENS:
                return 0.0
        return product

    def _distribution(self, ids: tuple[int, ...]) -> Any:
        import torch

        if ids not in self._next:
            with torch.inference_mode():
                logits = self._model(torch.tensor([ids])).logits[0, -1]
            self._next[ids] = logits.softmax(-1).tolist()
        return self._next[ids]


if __name__ == "__main__":
    main()
