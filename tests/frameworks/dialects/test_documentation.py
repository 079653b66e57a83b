"""docs/dialects.md lists the metrics in the code.

To renew it: python -m tests.frameworks.dialects.test_documentation
"""

from __future__ import annotations

from mismatch_cli.frameworks import dialects
from tests.paths import DOCS

PAGE = DOCS / "dialects.md"
MARK = "<!-- generated -->\n"


def tables() -> str:
    parts = []
    for framework in dialects.names():
        rows = [_row(line) for line in dialects.lines(framework)]
        head = "| metric | formula | compares | note | source |\n|---|---|---|---|---|"
        table = "\n".join(rows)
        parts.append(f"## {framework}\n\n{dialects.when(framework)}\n\n{head}\n{table}\n")
    return "\n".join(parts)


def _row(line: dialects.Line) -> str:
    lacks = f"not measured: needs {line.lacks}" if line.lacks else ""
    note = "; ".join(text for text in (line.note, lacks) if text)
    cells = (f"`{line.name}`", line.formula, line.compares, note, f"`{line.source}`")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def test_the_page_is_up_to_date():
    head, generated = PAGE.read_text(encoding="utf-8").split(MARK)
    assert generated.strip() == tables().strip()
    assert all(f"`{name}`" in head for name in dialects.names())


if __name__ == "__main__":
    head, _ = PAGE.read_text(encoding="utf-8").split(MARK)
    PAGE.write_text(f"{head}{MARK}\n{tables()}", encoding="utf-8")
