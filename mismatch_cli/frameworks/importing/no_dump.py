"""Why rows of JSON cannot be imported: a run's metrics, a log of texts, or a side is missing."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import suggest
from mismatch_cli.base.text import visible
from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing.naming import RETOKENISED, Row, fits, is_number

_CONSOLE = re.compile(r"step:\d+ - \S+:")  # a line of metrics as trainers print it
_PAIR = re.compile(r"([\w./@-]+):(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)(?= |$)", re.IGNORECASE)
_FEWEST = 4  # numbers of a line of metrics
_LINES = 1000  # of a log, until one of metrics must have come
_EXAMPLES = 2
_PROMPTS, _RESPONSES = "prompt|query|question|input", "response|completion|output|answer"
_CHATS = 3  # one more than the depth of a batch of conversations


def metrics(rows: Sequence[Row]) -> str:
    """What a run's metrics are, with the line that judges them; empty for other rows."""
    numbers: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            # Metrics are numbers and texts: anything with a list may hold tokens.
            if isinstance(value, list | dict):
                return ""
            if is_number(value):
                numbers[name] = value
    if len(numbers) < _FEWEST:
        return ""
    if any("/" in name for name in numbers) or not _logged().isdisjoint(numbers):
        return _judged(numbers)
    return ""


def printed_metrics(path: Path) -> str:
    """What a log is that a trainer prints, with the line that judges its metrics; empty for other
    files.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in islice(file, _LINES):
            if _CONSOLE.search(line):
                return _judged({name: float(value) for name, value in _PAIR.findall(line)})
    return ""


def _judged(numbers: Mapping[str, float]) -> str:
    logged = _logged()
    arguments: list[str] = []
    for name, value in numbers.items():
        if name in logged:
            arguments.append(f"{name}={value:g}")
    line = suggest("verdict", *(arguments[:_EXAMPLES] or ["NAME=VALUE"]))
    return f"holds a run's metrics, and no tokens. A number of it is judged by: {line}"


def _logged() -> set[str]:
    """The names that dashboards have for what a trace measures."""
    from mismatch_cli.frameworks import dialects

    lines = chain.from_iterable(map(dialects.lines, dialects.names()))
    return {line.name for line in lines}


def lacking(columns: Mapping[str, Sequence[Any]], logp: Sequence[str]) -> str:
    """What a file lacks in which only the columns `logp` can be log-probabilities of a response."""
    ids: list[str] = []
    for name, values in columns.items():
        if name not in logp and any(map(_are_ids, values)):
            ids.append(name)
    examples = ", ".join(map(visible, ids[:_EXAMPLES]))
    if logp and ids:
        return f"has lists of whole numbers ({examples}), but none as long as its log-probabilities"
    if logp:
        shown = ", ".join(map(visible, logp[:_EXAMPLES]))
        return f"has log-probabilities ({shown}), but neither token ids nor those of a second side"
    if ids:
        return (
            f"has lists of whole numbers ({examples}), but no log-probabilities of the sampled "
            "tokens"
        )
    return "has neither token ids nor log-probabilities"


def text_only(rows: Sequence[Row]) -> str:
    """Why a log of texts cannot be imported; empty for anything with token ids."""
    names_of_ids = ""
    names_of_texts = ""
    for row in rows:
        for name, value in row.items():
            if _are_ids(value):
                names_of_ids += f" {name.lower()}"
            if _is_text(value):
                names_of_texts += f" {name.lower()}"
    has_ids = re.search(f"{_PROMPTS}|{_RESPONSES}|id|tok", names_of_ids)
    has_prompts = re.search(_PROMPTS, names_of_texts)
    if has_ids or not has_prompts or not re.search(_RESPONSES, names_of_texts):
        return ""
    return (
        "is a log of prompts and responses: text without token ids or log-probabilities. "
        f"{RETOKENISED}, so nothing in it can be compared. Record the run instead: see "
        "mismatch-cli guide record."
    )


def _are_ids(value: Any) -> bool:
    """Whether a value is a list of ids, or lists of any depth whose first one is."""
    while _lists.depth_of(value) > 1:
        value = _lists.first_value(value)
    return isinstance(value, list) and bool(value) and fits("response_ids", value)


def _is_text(value: Any) -> bool:
    """Whether a value is a text, chat messages, or a list of these."""
    if isinstance(value, list):
        return 0 < _lists.depth_of(value) < _CHATS and bool(value) and all(map(_is_text, value))
    return isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)
