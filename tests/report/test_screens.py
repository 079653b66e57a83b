"""The screen of every study: an answer in 40 lines, uncut names, and the verdict and what to
type at the end.
"""

from __future__ import annotations

import re
import shlex

import pytest
import typer
from rich.cells import cell_len

from mismatch_cli.app.cli import build_app
from mismatch_cli.base.places import bundled
from mismatch_cli.limits import limit_sets as limits
from mismatch_cli.report.outline import Screen
from mismatch_cli.report.pages import page_of
from mismatch_cli.report.screen import print_screen, screen_of
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.studies import clipping, comparison, diagnosis, gate, mismatch
from mismatch_cli.trace.reader import Trace
from mismatch_cli.train.studies import training
from tests.report.printed import printed
from tests.train.training_runs import make_run

WIDTHS = (60, 80, 120, 10_000)


@pytest.fixture(scope="module")
def screens() -> dict[str, Screen]:
    trace, control = Trace.open(bundled("traces/fp8-kv")), Trace.open(bundled("traces") / "float32")
    runs = [
        make_run(name, seed=seed, steps=12) for name in ("ppo", "dppo-binary-tv") for seed in (0, 1)
    ]
    studies = {
        "report": mismatch.analyse_mismatch([trace], worst=3),
        "clipstats": clipping.analyse_clipping([trace], list(TABLE.values())),
        "clipstats of one": clipping.analyse_clipping([trace], [TABLE["dppo-binary-tv"]]),
        "compare": comparison.analyse_comparison([trace, control]),
        "diagnose": diagnosis.analyse_diagnosis([trace]),
        "gate": gate.GateAnalysis.of(
            [limits.load_limits("verl"), limits.load_limits("tinker")], [trace], []
        ),
        "train": training.TrainingAnalysis(runs),
    }
    return {
        name: screen for name, study in studies.items() if (screen := screen_of(page_of(study)))
    }


def in_words(text: str) -> str:
    return " ".join(text.split())


def test_every_study_has_a_screen(screens):
    assert list(screens) == [
        "report",
        "clipstats",
        "clipstats of one",
        "compare",
        "diagnose",
        "gate",
        "train",
    ]


def test_it_is_forty_lines_of_eighty_characters_at_most(screens):
    for name, screen in screens.items():
        assert printed(screen, 80, print_screen).count("\n") <= 40, name
        assert len(screen.subject) <= 2, name


@pytest.mark.parametrize("width", WIDTHS)
def test_only_commands_are_wider_than_the_terminal(screens, width):
    for name, screen in screens.items():
        typed = [command for command, _ in screen.next]
        for line in printed(screen, width, print_screen).splitlines():
            assert cell_len(line) <= width or any(line.startswith(command) for command in typed), (
                name,
                line,
            )


@pytest.mark.parametrize("width", WIDTHS)
def test_no_name_is_cut_and_what_is_hidden_is_named(screens, width):
    for name, screen in screens.items():
        text = printed(screen, width, print_screen)
        words = in_words(text)
        for table in screen.tables:
            for row in table.rows:
                if cell_len(row[0]) <= 0.6 * width:
                    assert row[0].strip() in text, (name, row[0])
                assert all(part in text for part in re.split("[ /:_]+", row[0])), (name, row[0])
            heads = [
                (place, column.title) for place, column in enumerate(table.columns) if column.title
            ]
            hidden = re.findall(r"Hidden at \d+ characters: (.*?)\. Widen the terminal", words)
            named = {title.strip() for part in hidden for title in part.split(",")}
            for place, head in heads:
                column = [row[place] for row in table.rows]
                said = head in words or head in " ".join(hidden) or {"intervals"} <= named
                assert said or (width < WIDTHS[-1] and not {*column} - {"", "—"}), (name, head)
        for label, _ in (*screen.remarks, *((profile.title, "") for profile in screen.profiles)):
            assert label in words, (name, label)
        if width == WIDTHS[-1]:
            assert "Hidden at" not in text, name


def test_a_narrow_screen_gives_up_intervals_before_names(screens):
    narrow = printed(screens["report"], 60, print_screen)
    assert "[0.00223, 0.00433]" not in narrow and "[0.00223, 0.00433]" in printed(
        screens["report"], 80, print_screen
    )
    assert all(row[0] in narrow for table in screens["report"].tables for row in table.rows)


def test_the_verdict_and_what_to_type_come_last(screens):
    for name, screen in screens.items():
        lines = printed(screen, 80, print_screen).splitlines()
        verdict = next(place for place, line in enumerate(lines) if screen.verdict.words in line)
        after = in_words("\n".join(lines[verdict:])).replace(in_words(screen.verdict.text), "")
        assert screen.next or name == "train", name  # runs without a folder
        assert all(command in after for command, _ in screen.next), name
        assert not any(
            row[0] in after for table in screen.tables for row in table.rows if len(row[0]) > 25
        ), name


def test_suggested_commands_are_valid(screens):
    root = typer.main.get_command(build_app())
    for name, screen in screens.items():
        for line, _ in screen.next:
            program, command, *arguments = shlex.split(line)
            assert program == "mismatch-cli", (name, line)
            typer_command = root.get_command(None, command)  # type: ignore[attr-defined,arg-type]
            typer_command.make_context(command, [*arguments])  # raises for an unknown flag or value


def test_the_verdict_has_the_colour_of_its_status(screens):
    colours = {"good": "32", "mixed": "33", "bad": "31"}
    for name, screen in screens.items():
        if screen.verdict.status:
            shown = printed(screen, 80, print_screen, force_terminal=True, legacy_windows=False)
            assert f"\x1b[1;{colours[screen.verdict.status]}m" in shown, name
        assert "\x1b" not in printed(screen, 80, print_screen, no_color=True), name
