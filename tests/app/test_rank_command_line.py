"""What was typed, as words for ranks: they read variables and files themselves."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from mismatch_cli.app.cli import build_app
from mismatch_cli.app.rank_command_line import typed_arguments

GROUP: Any = typer.main.get_command(build_app())


def again(command: str, *typed: str, without: tuple[str, ...] = ()) -> list[str]:
    context = GROUP.get_command(None, command).make_context(command, list(typed))
    return sorted(typed_arguments(context, without))


def test_ranks_get_what_was_typed_and_neither_variables_nor_files(tmp_path, monkeypatch):
    (tmp_path / "m.toml").write_text("[probe]\ntop_p = 0.5\n")
    monkeypatch.setenv("MISMATCH_SEED", "7")
    typed = ["some/model", "--config", f"{tmp_path}/m.toml", "--nproc", "2", "--no-plots"]
    expected = [word for word in typed if word not in ("--nproc", "2")]
    assert again("probe", *typed, without=("nproc",)) == sorted(expected)


@pytest.mark.parametrize(
    ("command", "typed", "words"),
    [
        ("probe", ("--engine-arg", "a=1", "--engine-arg", "b=2"), None),
        ("train", ("-a", "ppo"), ("--algorithm", "ppo")),
        ("probe", ("-q", "-o", "run"), ("--quiet", "--output", "run")),
        ("compare", ("one", "two"), None),
    ],
)
def test_every_kind_of_word_is_spelled_again(command, typed, words):
    assert again(command, *typed) == sorted(words or typed)
