"""Phrases that no reader of English would write, kept out of code, messages, pages and tests.

python -m tests.docs.test_english [PATH …]     # lists them, with what to write instead
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from tests.paths import ROOT

READ = {".py", ".md", ".html", ".j2", ".toml", ".yml", ".yaml", ".js", ".css", ".cff", ""}
NOT_OURS = (
    "sample_data/",
    "lab/makers/phrases.py",
    "tests/docs/test_english.py",
    "LICENSE",
    "requirements/",
)
# What is wrong, and what says it in English.
WORST = {
    r"(?<!there )(?<!that )\b(?:is|are|was|were|be) no (?!more\b|less|different|\w+er\b|worse)": "is not a …",
    r"\b(?:go|goes|going|went|gone) on\b(?! top)": "continue, resume",
    r"\banew\b": "again, a new …",
    r"\b(?:held|holds?|holding)(?: [\w’']+){0,4}? (?:against|beside)\b": "compared with",
    r"\bmakes? no sense\b": "is invalid, is out of range",
    r"\bto the proof\b": "verify",
    r"(?<![\w\"'`-])(?:stands?|stood)\b(?!-| (?:for|alone|out|in for)\b)": "is in …, is on …; is",
    r"\bstanding (?:in|on|at|beside|there)\b": "in …, on …",  # the noun is a judge's word
    r"\b(?:that|what) (?:is|are|was|were) there\b(?! (?:for|to)\b)": "existing, what exists",
    r"\b(?:by turns|in turns)\b": "alternately",
    r"(?<!\")(?<!value or )\bsurely\b(?!\")": "clearly; with 95 % confidence",
    r"\b(?:lies|lie|lay|lain) (?:in|at|on|beside|there|under)\b": "is in …",
    r"\b(?:what|as|how|which|where|if|when) one (?:types|reads|sees|looks|wants|asks|would)\b": "what you type",
    r"\btells (?:no|none|nothing|its|their)\b": "does not report …, reports …",
    r"\bor not at all\b": "completely or not …; atomically",
    r"\b(?:thereby|whereby|wherein|therein|thereof|namely)\b(?!,)": "so, in which",
    r"\b(?:is|are|was|were|be|rounds?|reads?|made|written|computed|named|names|answers?|judged) otherwise\b": (
        "differently"
    ),
    r"\b(?:an)?other \w+ than\b": "a different … from",
    r"\bno talk\b": "hide progress",
    r"\bto be had\b": "available",
    r"(?:^|[.;:] )Who (?:only|reads|builds|wants|has|draws|asks|writes|does)\b": "if you …",
}


class Found(NamedTuple):
    """A phrase, and where."""

    path: Path
    line: int
    phrase: str
    better: str


def phrases(path: Path) -> Iterator[Found]:
    """The worst phrases of a file, across the ends of lines, of comments and of strings that are
    joined.
    """
    text = path.read_text(encoding="utf-8")
    text = re.sub(r'"\s*\n\s*f?"', lambda joint: re.sub(r"[^\n]", " ", joint.group()), text)
    words = [
        (word, number)
        for number, line in enumerate(text.splitlines(), 1)
        for word in re.sub(r"^\s*(?:#|//|\*|>)\s", "", line).split()
    ]
    ends = list(accumulate(len(word) + 1 for word, _ in words))
    prose = " ".join(word for word, _ in words)
    for pattern, better in WORST.items():
        for match in re.finditer(pattern, prose, re.IGNORECASE):
            number = next(
                line for (_, line), end in zip(words, ends, strict=True) if end > match.start() + 1
            )
            yield Found(path, number, prose[max(0, match.start() - 30) : match.end() + 30], better)


def tracked() -> list[Path]:
    """The files that people write and read; in an unpacked sdist, which git does not know, all
    that are there.
    """
    if (ROOT / ".git").exists():
        names = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
    else:
        ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
        names = []
        for path in ROOT.rglob("*"):
            inside = path.relative_to(ROOT)
            if not any(fnmatch(inside.parts[0], pattern) for pattern in ignored):
                names.append(str(inside))
    return [
        ROOT / n
        for n in names
        if Path(n).suffix in READ and not n.startswith(NOT_OURS) and (ROOT / n).is_file()
    ]


def test_the_worst_phrases_are_gone():
    bad_phrases = [phrase for path in tracked() for phrase in phrases(path)]
    assert not bad_phrases, "\n".join(
        f"{f.path.relative_to(ROOT)}:{f.line}: “{f.phrase}” → {f.better}" for f in bad_phrases
    )


def test_phrases_are_found_across_lines_and_joined_strings(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('# It is\n# no trace.\nraise Error(\n    "the run goes "\n    f"on"\n)\n')
    assert [(hit.line, hit.better) for hit in phrases(path)] == [
        (1, "is not a …"),
        (4, "continue, resume"),
    ]


if __name__ == "__main__":
    paths = [Path(name).resolve() for name in sys.argv[1:]]
    for file in tracked():
        if not paths or any(file == each or each in file.parents for each in paths):
            for hit in phrases(file):
                print(f"{hit.path.relative_to(ROOT)}:{hit.line}: “{hit.phrase}” → {hit.better}")
