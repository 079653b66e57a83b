"""Why rows of JSON cannot be imported: a run's metrics, a log of texts, or a side is missing."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import suggest
from mismatch_cli.base.text import visible
from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing.naming import RETOKENISED, Row, fits, is_number

_CONSOLE = re.compile(r"step:\d+ - \S+:")  # a line of metrics as trainers print it
_PAIR = re.compile(r"([\w./@-]+):(-?[\d.]+(?:e[+-]?\d+)?)(?= |$)", re.IGNORECASE)
_FEWEST = 4  # numbers of a line of metrics
_LINES = 1000  # of a log, until one of metrics must have come
_EXAMPLES = 2
_PROMPTS, _RESPONSES = "prompt|query|question|input", "response|completion|output|answer"
_CHATS = 3  # one more than the depth of a batch of conversations


def metrics(rows: Sequence[Row]) -> str:
    """What a run's metrics are, with the line that judges them; empty for other rows."""
    numbers = {name: v for row in rows for name, v in row.items() if is_number(v)}
    others = [v for row in rows for v in row.values() if isinstance(v, list | dict)]
    is_named = any("/" in name or name in _logged() for name in numbers)
    if others or len(numbers) < _FEWEST or not is_named:
        return ""
    return _judged(numbers)


def printed_metrics(path: Path) -> str:
    """The same of a log that a trainer prints; empty for other files."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for _, line in zip(range(_LINES), file, strict=False):
            if _CONSOLE.search(line):
                return _judged({name: float(value) for name, value in _PAIR.findall(line)})
    return ""


def _judged(numbers: Mapping[str, float]) -> str:
    logged = _logged()
    typed = [f"{name}={value:g}" for name, value in numbers.items() if name in logged]
    line = suggest("verdict", *(typed[:_EXAMPLES] or ["NAME=VALUE"]))
    return f"holds a run's metrics, and no tokens. A number of it is judged by: {line}"


def _logged() -> set[str]:
    """The names that dashboards have for what a trace measures."""
    from mismatch_cli.frameworks import dialects

    return {line.name for name in dialects.names() for line in dialects.lines(name)}


def lacking(columns: Mapping[str, Sequence[Any]], logp: Sequence[str]) -> str:
    """What a file lacks in which only these columns can be log-probabilities of a response."""
    ids = [n for n, values in columns.items() if any(map(_are_ids, values)) and n not in logp]
    held = ", ".join(map(visible, ids[:_EXAMPLES]))
    if logp and ids:
        return f"has lists of whole numbers ({held}), but none as long as its log-probabilities"
    if logp:
        shown = ", ".join(map(visible, logp[:_EXAMPLES]))
        return f"has log-probabilities ({shown}), but neither token ids nor those of a second side"
    if ids:
        return (
            f"has lists of whole numbers ({held}), but no log-probabilities of the sampled tokens"
        )
    return "has neither token ids nor log-probabilities"


def text_only(rows: Sequence[Row]) -> str:
    """Why a log of texts cannot be imported; empty for anything with token ids."""
    ids = " ".join(name.lower() for row in rows for name, v in row.items() if _are_ids(v))
    words = " ".join(n.lower() for row in rows for n, value in row.items() if _is_text(value))
    if re.search(f"{_PROMPTS}|{_RESPONSES}|id|tok", ids) or not (
        re.search(_PROMPTS, words) and re.search(_RESPONSES, words)
    ):
        return ""
    return (
        "is a log of prompts and responses: text without token ids or log-probabilities. "
        f"{RETOKENISED}, so nothing in it can be compared. Record the run instead: see "
        "mismatch-cli guide record."
    )


def _are_ids(value: Any) -> bool:
    while _lists.depth_of(value) > 1:
        value = next(row for row in value if row is not None)
    return isinstance(value, list) and bool(value) and fits("response_ids", value)


def _is_text(value: Any) -> bool:
    """Whether a value is a text, chat messages, or a list of these."""
    if isinstance(value, list):
        return 0 < _lists.depth_of(value) < _CHATS and bool(value) and all(map(_is_text, value))
    return isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)
