"""The guide is short, and a page answers its question on the first screen.

python -m tests.docs.test_length prints the words of every page.
"""

from __future__ import annotations

import io
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from mismatch_cli.app.commands.guide import _without_cut_cells, for_reading
from tests.docs.pages import README, text_of
from tests.docs.site import pages
from tests.paths import DOCS, ROOT

MOST_WORDS = 45_000  # of all pages of the site, those that are made included
MOST_OF_A_PAGE = 900
# Looked up, not read: every formula, row, key, option, constant or way to extend
REFERENCES = (
    "docs/constants.md",
    "docs/extending.md",
    "docs/findings.md",
    "docs/formulas.md",
    "docs/published-limits.md",
    "docs/json/",
    "docs/options/",
)
WIDTH, HEIGHT = 80, 40  # of the first screen
QUESTIONS_FILE = Path(__file__).with_name("questions.toml")
FEWEST_QUESTIONS = 30

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK_TARGET = re.compile(r"\]\([^)]*\)")
_LETTER = re.compile(r"[^\W\d_]")


class Question(NamedTuple):
    """What a reader asks, the page that answers, and words of the answer."""

    asks: str
    page: str
    answer: str


def questions() -> list[Question]:
    rows = tomllib.loads(QUESTIONS_FILE.read_text(encoding="utf-8"))["question"]
    return [Question(**row) for row in rows]


def words(markdown: str) -> int:
    """How many runs without a space have a letter; targets of links and comments do not count."""
    shown = _LINK_TARGET.sub("]", _COMMENT.sub("", markdown))
    return sum(bool(_LETTER.search(run)) for run in shown.split())


def words_by_page() -> dict[str, int]:
    """The words of every page of the site, by its file in the repository."""
    return {page: words(text_of(ROOT / page)) for page in pages()}


def is_reference(page: str) -> bool:
    return page.startswith(REFERENCES)


def first_screen(page: Path) -> str:
    """What a terminal shows of a page before anybody scrolls, as one line of words."""
    file = page.relative_to(ROOT).as_posix().removeprefix("docs/")
    terminal = Console(file=io.StringIO(), width=WIDTH, force_terminal=False)
    with terminal.capture() as printed:
        terminal.print(_without_cut_cells(for_reading(text_of(page), file)))
    screen = printed.get().splitlines()[:HEIGHT]
    return " ".join(" ".join(screen).split())


def test_the_site_has_few_words():
    counts = words_by_page()
    assert sum(counts.values()) <= MOST_WORDS
    long = {
        page: count
        for page, count in counts.items()
        if count > MOST_OF_A_PAGE and not is_reference(page)
    }
    assert not long


def test_every_question_is_answered_on_the_first_screen_of_one_page():
    all_questions = questions()
    assert len({question.page for question in all_questions}) >= FEWEST_QUESTIONS
    hidden = [
        question
        for question in all_questions
        if question.answer not in first_screen(ROOT / question.page)
    ]
    assert not hidden


def test_every_page_that_is_read_answers_a_question():
    """References and what only developers read apart."""
    read = {path.relative_to(ROOT).as_posix() for path in (README, *DOCS.rglob("*.md"))}
    answering = {question.page for question in questions()}
    assert {page for page in read - answering if not is_reference(page)} == set()


def test_words_are_counted_as_a_reader_sees_them():
    text = "Two <!-- not these --> [words](of/a/link.md) | 0.5 | – | `--flag`\n"
    assert words(text) == 3


if __name__ == "__main__":
    counts = words_by_page()
    for page, count in sorted(counts.items(), key=lambda item: item[1]):
        print(f"{count:7,}  {page}")
    print(f"{sum(counts.values()):7,}  of at most {MOST_WORDS:,}")
