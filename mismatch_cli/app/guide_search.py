"""Searches the guide by what its pages say: no page has to have every word, and rare words count
more. The name of a flag or key finds the pages that define it first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import log
from typing import NamedTuple

_MOST, _MOST_DEFINING = 5, 3  # pages
_WIDEST = 92  # characters of the line that is shown
_AROUND = 30  # of them before the first word
# What a word counts by where it is: in the name of a page, its title, a heading, the text
_NAME, _TITLE, _HEADING, _TEXT = 8.0, 4.0, 2.0, 1.0
_OPTIONS = "options/"  # pages that define flags and keys
_TABLES = ("constants", "findings", "json/", _OPTIONS)  # lists of names, not explanations
_OF_TABLES = 0.6
_TOGETHER = 2.0  # words on one line
_HALF_REPEATED = 3  # occurrences that make half of what any number of them adds
_WORST = 0.4  # of the best page's score: pages below it are not listed
_SHORTEST_STEM = 4  # characters: shorter words match whole words only
_LETTERS = {"epsilon": "ε", "delta": "δ", "mu": "μ", "pi": "π", "sigma": "σ", "rho": "ρ"}
# Words that say nothing about what is looked for.
_OF_SPEECH = re.compile("[a-z]{1,2}|and|are|does|for|how|the|what|why|with")
_HEADINGS = re.compile("^#.*$", re.MULTILINE)
_WORD = re.compile(r"\w[\w-]*")
_BETWEEN = re.compile("[-_ ]+")  # words
_FLAG_OR_KEY = re.compile(r"(?<=--)[\w-]+|\w+(?= =)")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)\s]+\)")
_DEFINITION = re.compile(r"^\| `(.*?)` \|.*$", re.MULTILINE)
_MARKS = re.compile(r"[*`]|^[#>\s*|-]+|(\s*\|)+\s*$")


class Hit(NamedTuple):
    """A page, and its line that says most about the words."""

    page: str
    line: str


class Answer(NamedTuple):
    """Pages, the best first, and the words that no page has."""

    hits: list[Hit]
    absent: list[str]


def search(query: str, texts: Mapping[str, str]) -> Answer:
    """The pages that say most about the words of a query; `texts` is the Markdown of each page.

    A word scores its rarity, log(1 + pages / pages that have it), times the weight of its best
    place, and again on the line that says most. Pages that define a flag or key of this name come
    first.
    """
    rarity: dict[re.Pattern[str], float] = {}
    absent = []
    for word in _words(query):
        pattern = _pattern(word)
        rarity[pattern] = _rarity(pattern, texts)
        if not rarity[pattern]:
            absent.append(word)
    ranked: list[tuple[float, str, str]] = []
    for page, text in texts.items():
        line = _best_line(text, rarity)
        ranked.append((_score(page, text, line, rarity), page, line))
    # The sort is stable: pages of equal score stay in the order of the guide.
    ranked.sort(key=lambda scored: -scored[0])
    hits = [Hit(page, _excerpt(line, rarity)) for page, line in _definitions(query, texts)]
    defining = {hit.page for hit in hits}
    for score, page, line in ranked[:_MOST]:
        best_score = ranked[0][0]
        if score > _WORST * best_score and page not in defining:
            hits.append(Hit(page, _excerpt(line, rarity)))
    return Answer(hits[:_MOST], absent)


def _definitions(query: str, texts: Mapping[str, str]) -> list[tuple[str, str]]:
    """The first pages of options that define the flag or key of this name, with the line that
    does: `--token-budget`, `token_budget` and `token budget` are one name.
    """
    name = _BETWEEN.split(query.lower().strip("-_ "))
    definitions = []
    for page, text in texts.items():
        if not page.startswith(_OPTIONS):
            continue
        for row in _DEFINITION.finditer(text):
            if name in map(_BETWEEN.split, _FLAG_OR_KEY.findall(row[1])):
                definitions.append((page, _plain(row[0])))
    return definitions[:_MOST_DEFINING]


def _words(query: str) -> list[str]:
    """The words of a query, without those that say nothing if there are others."""
    words = list(dict.fromkeys(_WORD.findall(query.lower())))
    return [word for word in words if not _OF_SPEECH.fullmatch(word)] or words


def _score(page: str, text: str, line: str, rarity: Mapping[re.Pattern[str], float]) -> float:
    score = sum(weight * _weight(word, page, text) for word, weight in rarity.items())
    score += _TOGETHER * _rarity_on(line, rarity)
    if page.startswith(_TABLES):
        score *= _OF_TABLES
    return score


def _rarity(pattern: re.Pattern[str], texts: Mapping[str, str]) -> float:
    """log(1 + pages / pages that have the word, in their name or text); 0 if none has it."""
    pages_with_word = 0
    for page, text in texts.items():
        if pattern.search(page) or pattern.search(text):
            pages_with_word += 1
    if not pages_with_word:
        return 0.0
    return log(1 + len(texts) / pages_with_word)


def _pattern(word: str) -> re.Pattern[str]:
    """What a word matches: its beginning, `top-p` as `top_p` and `top p`, and ε for epsilon."""
    *others, last = _BETWEEN.split(word.strip("-_"))
    # The singular matches the plural too.
    if len(last) > _SHORTEST_STEM:
        last = last.removesuffix("s")
    spelled = "[-_ ]".join(map(re.escape, [*others, last]))
    if len(word) < _SHORTEST_STEM:
        spelled += r"(?![^\W_])"
    if word in _LETTERS:
        spelled += f"|{_LETTERS[word]}"
    return re.compile(rf"(?<![^\W_]){spelled}", re.IGNORECASE)


def _weight(pattern: re.Pattern[str], page: str, text: str) -> float:
    """The weight of the best place of a word, and up to as much again as in the text if it is
    often there; 0 if the page does not have it.
    """
    title = text.partition("\n")[0]
    number = len(pattern.findall(text))
    if pattern.search(page):
        place = _NAME
    elif pattern.search(title):
        place = _TITLE
    elif pattern.search("\n".join(_HEADINGS.findall(text))):
        place = _HEADING
    else:
        place = _TEXT if number else 0.0
    return place + _TEXT * number / (number + _HALF_REPEATED)


def _best_line(text: str, rarity: Mapping[re.Pattern[str], float]) -> str:
    """The first line with the rarest of the words, as text."""
    lines = filter(None, map(_plain, text.splitlines()))
    return max(lines, key=lambda line: _rarity_on(line, rarity), default="")


def _rarity_on(line: str, rarity: Mapping[re.Pattern[str], float]) -> float:
    """Σ of the rarities of the words that are on a line."""
    return sum(weight for pattern, weight in rarity.items() if pattern.search(line))


def _plain(line: str) -> str:
    """A line of Markdown without its marks."""
    text = _MARKS.sub("", _LINK.sub(r"\1", line))
    return text.replace(" |  | ", " | ").replace(" | ", " · ").strip()


def _excerpt(line: str, patterns: Iterable[re.Pattern[str]]) -> str:
    """A line, or at most `_WIDEST` characters of a long one around the first of the words, cut
    between words.
    """
    if len(line) <= _WIDEST:
        return line
    matches = filter(None, (pattern.search(line) for pattern in patterns))
    first_match = min((match.start() for match in matches), default=len(line))
    start = max(0, first_match - _AROUND)
    words = line[start : start + _WIDEST].split(" ")
    # The first and the last word may be cut: an ellipsis takes their place.
    if start:
        words[0] = "…"
    if start + _WIDEST < len(line):
        words[-1] = "…"
    return " ".join(words)
