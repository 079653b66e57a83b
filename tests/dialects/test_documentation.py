"""docs/dialects.md lists what the code knows. To renew it: python -m tests.dialects.test_documentation"""

from __future__ import annotations

from pathlib import Path

from mismatch_cli import dialects

PAGE = Path(__file__).parents[2] / "docs" / "dialects.md"
MARK = "<!-- generated -->\n"


def tables() -> str:
    parts = []
    for framework in dialects.names():
        rows = [
            " | ".join((f"| `{line.name}`", line.formula, line.compares, line.note, f"`{line.source}` |"))
            for line in dialects.lines(framework)
        ]
        head = "| metric | formula | compares | note | source |\n|---|---|---|---|---|"
        table = "\n".join(row.replace("|d|", "\\|d\\|").replace("|π − μ|", "\\|π − μ\\|") for row in rows)
        table = table.replace("|r − 1|", "\\|r − 1\\|").replace("|mean d|", "\\|mean d\\|")
        parts.append(f"## {framework}\n\n{dialects.when(framework)}\n\n{head}\n{table}\n")
    return "\n".join(parts)


def test_the_page_is_up_to_date():
    head, generated = PAGE.read_text(encoding="utf-8").split(MARK)
    assert generated.strip() == tables().strip()
    assert all(f"`{name}`" in head for name in dialects.names())


if __name__ == "__main__":
    head, _ = PAGE.read_text(encoding="utf-8").split(MARK)
    PAGE.write_text(f"{head}{MARK}\n{tables()}", encoding="utf-8")
