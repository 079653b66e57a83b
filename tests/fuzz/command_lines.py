"""Command lines: a command with random flags, and values that may or may not be valid."""

from __future__ import annotations

from functools import cache
from typing import Any

import typer
from hypothesis import strategies as st

from mismatch_cli.app.cli import build_app
from tests.fuzz.strategies import pick, texts


@cache
def options(command: str) -> tuple[tuple[str, int, str], ...]:
    """The flags of a command, with the number and type of their values."""
    app = typer.main.get_command(build_app())
    typer_command = app.get_command(None, command)  # type: ignore[attr-defined]
    return tuple(
        (flag, 0 if getattr(parameter, "is_flag", False) else parameter.nargs, _type_of(parameter))
        for parameter in typer_command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
        if flag.startswith("-")
    )


def _type_of(parameter: Any) -> str:
    # Newer versions of Typer
    return str(parameter.bare_type()) if hasattr(parameter, "bare_type") else ""


_COMMANDS = "probe train curate rescore report import clipstats compare diagnose gate"
_PATHS = """
run run/trace other training existing new new/deep gone gone.jsonl gone.toml . /dev/null /dev/full
prompts.jsonl prompts.parquet prompts.csv prompts.json limits.toml preset.toml mask.py
dumps/plain dumps/prime-rl dumps/slime/rollout_0.pt dumps /proc/self/nothing existing/precious.txt
run/trace/manifest.json run/trace/shard-00000.parquet mask.py:trust_region
"""
_WORDS = """
bfloat16 float32 auto eager chat raw hf vllm server verl all csv parquet jsonl equal newer mismatch
total dppo-binary-tv dppo-binary-tv:max_tv=nan relax-both:alpha gspo miniature paper plain prime-rl
slime http://localhost:1 a=b = x={ 0.2 0.8 1 2 3 1e-6 token-mean problem answer q_proj all-linear
cuda cpu
"""
COMMANDS, PATHS, WORDS = _COMMANDS.split(), _PATHS.split(), _WORDS.split()
# One prints tracebacks, the other starts any number of processes
_WITHOUT = {"--debug", "--workers"}


_FITTING = {
    "int": "0 1 2 3 7 -1 1000000 99999999999999999999",
    "float": "0 0.1 0.5 1 1e-6 2 nan inf -1 1e300",
    "path": _PATHS,
}


def _can_be_typed(text: str) -> bool:
    return "\x00" not in text and "\ud800" not in text


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command with random flags, each with a value that may or may not be valid."""
    command = pick(draw, *COMMANDS)
    anything = st.one_of(st.sampled_from(PATHS), st.sampled_from(WORDS), texts).filter(
        _can_be_typed
    )
    line = [command, *draw(st.lists(st.sampled_from(PATHS), max_size=2))]
    flags = [option for option in options(command) if option[0] not in _WITHOUT]
    for flag, count, kind in draw(st.lists(st.sampled_from(flags), max_size=4)):
        words = _FITTING.get(kind, _PATHS + _WORDS)
        fitting = st.sampled_from(words.split())
        line += [
            flag,
            *(draw(fitting if draw(st.integers(0, 3)) else anything) for _ in range(count)),
        ]
    if draw(st.integers(0, 9)) == 0:
        line.insert(draw(st.integers(0, len(line))), draw(anything))
    return line
