"""The docs match the code: the table of metrics, the flags, the commands."""

from __future__ import annotations

import re

from mismatch_cli.metrics.gap_table import METRICS
from tests.paths import DOCS, ROOT


def metric_table() -> str:
    """The table in docs/json/summary.md, from the catalog.

    To renew it: python tests/test_docs.py
    """
    rows = [
        f"| `{m.key}` | {m.label} | {m.formula} | {m.unit} | {m.source} |".replace("|d|", "\\|d\\|")
        for m in METRICS.values()
    ]
    rows = [re.sub(r"\|(Δlog p|π − μ)\|", r"\\|\1\\|", row) for row in rows]
    return (
        "\n".join(["| key | name | formula | unit | source |", "|---|---|---|---|---|", *rows])
        + "\n"
    )


def test_the_table_of_metrics_matches_the_catalog():
    _, table = (
        (DOCS / "json" / "summary.md").read_text(encoding="utf-8").split("<!-- metrics -->\n")
    )
    assert table.strip() == metric_table().strip()


def test_every_flag_in_the_readme_exists():
    import typer

    from mismatch_cli.app.cli import build_app

    group = typer.main.get_command(build_app())
    commands = {name: group.get_command(None, name) for name in group.list_commands(None)}
    flags = {
        name: {flag for p in command.params for flag in [*p.opts, *p.secondary_opts]}
        for name, command in commands.items()
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"mismatch-cli (\w+)([^#|`\n]*)", readme)
    assert len(lines) > 5
    for command, arguments in lines:
        assert set(re.findall(r"--[a-z0-9-]+", arguments)) <= flags[command], arguments


def test_the_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    used = set(
        re.findall(
            r"(?:^ {4}|`)make ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.M
        )
    )
    assert {"probe", "test"} <= used <= targets


if __name__ == "__main__":
    path = DOCS / "json" / "summary.md"
    head, _ = path.read_text(encoding="utf-8").split("<!-- metrics -->\n")
    path.write_text(f"{head}<!-- metrics -->\n\n{metric_table()}", encoding="utf-8")
