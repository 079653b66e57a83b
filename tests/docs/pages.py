"""The pages of the guide as a reader goes through them: files to write, lines to type, and what
is shown for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mismatch_cli.app.guide_pages import all_pages
from tests.paths import DOCS, ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
# Pages of the guide without a file: their text, by the place that links give them
MADE = {DOCS / page.file: page.text for page in all_pages().values() if page.path is None}

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_INDENTED = re.compile(r"^ {4}(?:\S*/bin/)?(mismatch-cli .*)$", re.M)
_FILE = re.compile(r"^# (\S+\.(?:py|toml|sh))\n")
_ELSEWHERE = "# elsewhere: "
EXIT_CODE = "echo $?"


@dataclass(frozen=True)
class File:
    """A block whose first line is `# NAME`: the reader saves it under that name."""

    name: str
    text: str


@dataclass(frozen=True)
class Change:
    """A `diff` block whose first line is `# NAME`: what the reader changes in an existing file."""

    name: str
    text: str

    def made_in(self, text: str) -> str:
        """The file with the change: each part (separated by `…`) is found by the lines that it
        keeps.
        """
        for part in self.text.partition("\n")[2].split("\n…\n"):
            lines = part.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] != "+")
            assert text.count(before) == 1, f"{self.name} does not have, once:\n{before}"
            text = text.replace(before, "".join(line[1:] for line in lines if line[0] != "-"))
        return text


@dataclass(frozen=True)
class Line:
    """A line to type, the output that is shown below it, and the exit code that an `echo $?`
    after it shows.
    """

    text: str
    number: int  # of the line in the page
    shown: str = ""
    code: int = 0
    elsewhere: str = ""  # why it cannot be run here


def steps(page: Path) -> list[File | Change | Line]:
    """What a page asks its reader to do, in order."""
    text = page.read_text(encoding="utf-8")
    numbered: list[tuple[int, File | Change | Line]] = []
    for block in _FENCE.finditer(text):
        number, (kind, content) = text.count("\n", 0, block.start()) + 2, block.groups()
        if named := _FILE.match(content):
            numbered.append((number, (Change if kind == "diff" else File)(named.group(1), content)))
        elif kind == "console":
            numbered += [(line.number, line) for line in _session(content, number)]
        else:  # a line of a CI file
            numbered += [
                (number + row, Line(said.group(1), number + row))
                for row, line in enumerate(content.splitlines())
                if (said := re.search(r"(?:- run|script): (mismatch-cli .*)", line))
            ]
    for line in _INDENTED.finditer(
        _FENCE.sub(lambda block: "\n" * block.group().count("\n"), text)
    ):
        number = text.count("\n", 0, line.start()) + 1
        numbered.append((number, Line(line.group(1), number)))
    return [step for _, step in sorted(numbered, key=lambda pair: pair[0])]


def additions(page: Path) -> list[File | Change]:
    """What a page adds to a checkout: to the package, its tests or its documents."""
    rooms = ("mismatch_cli/", "tests/", "docs/")
    return [
        step for step in steps(page) if not isinstance(step, Line) and step.name.startswith(rooms)
    ]


def _session(content: str, number: int) -> Iterator[Line]:
    """`$ line`, then what is shown; `# elsewhere: why` says that the lines after it need
    something else.
    """
    elsewhere = ""
    for part in re.split(r"^(?=\$ |# elsewhere: )", content, flags=re.M):
        first, _, shown = part.partition("\n")
        if first.startswith(_ELSEWHERE):
            elsewhere = first.removeprefix(_ELSEWHERE)
        elif first.startswith("$ ") and first != f"$ {EXIT_CODE}":
            line = Line(first[2:], number, shown, elsewhere=elsewhere)
            after = content.partition(part)[2]
            exit_code = re.match(rf"\$ {re.escape(EXIT_CODE)}\n(\d+)$", after, re.M)
            yield (
                Line(line.text, number, shown, int(exit_code.group(1)), elsewhere)
                if exit_code
                else line
            )
        number += part.count("\n")


def not_in_a_session(page: Path) -> list[str]:
    """The lines of all blocks but sessions and whole files, fenced or indented."""
    text = page.read_text(encoding="utf-8")
    fenced = [
        content
        for kind, content in _FENCE.findall(text)
        if kind != "console" and not _FILE.match(content)
    ]
    indented = re.findall(r"^ {4}\S.*$", _FENCE.sub("", text), re.M)
    return [*"".join(fenced).splitlines(), *indented]


def marked(text: str, mark: str) -> tuple[str, str, str]:
    """The text before, between and after `<!-- mark -->` and `<!-- /mark -->`."""
    head, rest = text.split(f"<!-- {mark} -->\n")
    inside, tail = rest.split(f"<!-- /{mark} -->")
    return head, inside, tail


def renewed(page: Path, mark: str, inside: str) -> None:
    """Write `inside` between the marks of a page."""
    head, _, tail = marked(page.read_text(encoding="utf-8"), mark)
    page.write_text(
        f"{head}<!-- {mark} -->\n\n{inside.strip()}\n\n<!-- /{mark} -->{tail}", encoding="utf-8"
    )


def is_renewed(page: Path, mark: str, inside: str) -> bool:
    return marked(page.read_text(encoding="utf-8"), mark)[1].strip() == inside.strip()


def text_of(page: Path) -> str:
    """The Markdown of a page."""
    return MADE[page] if page in MADE else page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)
    counts: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower()).replace(
            " ", "-"
        )
        counts[slug] = counts.get(slug, -1) + 1
    return {
        f"{slug}-{again}" if again else slug
        for slug, times in counts.items()
        for again in range(times + 1)
    }
