"""The tokens of an exploration, packed for a page: columns as JavaScript typed arrays, compressed,
as text.

    4 bytes       how long the head is (little-endian)
    head          JSON: responses, texts, algorithms, and where each column is
    columns       each at a multiple of 4 bytes

Log-probabilities stay float32; which tokens are blocked is in whole numbers.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from mismatch_cli import numbers
from mismatch_cli.studies.exploration import MOST_TOKENS, NOT_JUDGED, Exploration, Judged
from mismatch_cli.text import for_html

_LONGEST, _LONGEST_PROMPT = 120, 2_000  # characters of a token, and of a prompt
_COMPRESSED = 6  # of 9, which takes eight times as long for 2 % less
_LARGEST_EXACT = 2**53  # integer of a JavaScript number
_TYPES = {"uint8": "u1", "uint16": "u2", "uint32": "u4", "float32": "f4"}
_LETTERS = {  # what π is in a pair, and the name of its gap
    "mismatch": ("the same weights in the trainer", "log π − log μ"),
    "total": ("the trainer as it is now", "log π − log μ"),
    "staleness": ("the trainer as it is now, against the weights that sampled", "log π − log π′"),
}


@dataclass(frozen=True)
class ExplorerView:
    """An exploration as a page has it: a sentence about it, and its packed tokens."""

    text: str
    data: str  # base64


def explorer_view(found: Exploration) -> ExplorerView:
    """The view of some responses."""
    return ExplorerView(_sentence(found), packed(found))


def _sentence(found: Exploration) -> str:
    what, _ = _LETTERS[found.pair.name]
    behind = found.judged and not found.judged_alike
    ahead = " A and B judge the trainer as it is now, some optimiser steps ahead." if behind else ""
    return (
        f"The {numbers.count(len(found.text_T))} tokens of {_which(found)}: π is {what}.{ahead} "
        "Point at a token, or step through them with ← and →. Click a dot to find its token; "
        "drag a frame around dots to show only those."
    )


def _which(found: Exploration) -> str:
    """The responses on the page, and how many are not on it."""
    which = f"the first {numbers.things(len(found.responses), 'response')}"
    if len(found.traces) > 1:
        which += f" of {len(found.traces)} traces"
    if not found.left_out:
        return which
    steps = sorted({response.step for response in found.responses})
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    why = (
        f" do not fit: a page has at most {numbers.count(MOST_TOKENS)} tokens"
        if found.full
        else ": `--page-responses`"
    )
    return f"{which}, of {span} ({numbers.count(found.left_out)} more{why})"


def packed(found: Exploration) -> str:
    """All data for the script, as base64 of gzip."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    with np.errstate(invalid="ignore"):  # −∞ − (−∞)
        d_T = found.logp_T - found.logq_T
    columns: dict[str, np.ndarray] = {
        "text": np.array([number(text) for text in found.text_T], dtype=np.uint32),
        "logq": found.logq_T.astype(np.float32),
        "d": d_T.astype(np.float32),
    }
    for name in ("entropy", "advantage"):
        if (column_T := getattr(found, f"{name}_T")) is not None:
            columns[name] = column_T.astype(np.float32)
    if found.ranks is not None:
        columns["rank_token"] = found.ranks.token_U.astype(np.uint32)
        columns["rank_text"] = np.array(
            [[number(text) for text in row] for row in found.ranks.text_UK], dtype=np.uint32
        )
        columns["rank_logq"] = found.ranks.logq_UK.astype(np.float32)
        columns["rank_logp"] = found.ranks.logp_UK.astype(np.float32)
    columns |= {f"level{place}": judged.level_T for place, judged in enumerate(found.judged)}
    head = {
        "responses": [
            [
                _exact(response.step),
                _exact(response.prompt_id),
                _exact(response.sample_index),
                _finite(response.reward),
                response.length,
                response.tokens,
                _shown(response.prompt, _LONGEST_PROMPT),
                response.trace,
            ]
            for response in found.responses
        ],
        "texts": [_shown(text, _LONGEST) for text in texts],
        "traces": [_shown(name, _LONGEST) for name in found.traces],
        "ranks": 0 if found.ranks is None else found.ranks.logq_UK.shape[1],
        "gap": _LETTERS[found.pair.name][1],
        "algorithms": [_algorithm(judged) for judged in found.judged],
        "compared": _compared(found),
        "colour": "d" if found.pair.name != "total" else "blocked",
        "notJudged": NOT_JUDGED,
    }
    return base64.b64encode(gzip.compress(_laid_out(head, columns), _COMPRESSED, mtime=0)).decode()


def _shown(text: str, longest: int) -> str:
    """Escaped text with its line breaks, cut to a readable length."""
    return for_html(text if len(text) <= longest else f"{text[:longest]}…")


def _finite(value: float | None) -> float | str | None:
    """A number for JSON; infinities become words that the script turns back into numbers."""
    return value if value is None or isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def _exact(value: int) -> int | str:
    """An integer for JSON: beyond 2⁵³ JavaScript rounds it, so it becomes text, which the script
    only shows.
    """
    return value if abs(value) <= _LARGEST_EXACT else str(value)


def _algorithm(judged: Judged) -> dict[str, Any]:
    when = f", if A {judged.sign} 0" if judged.sign else ""
    return {
        "name": f"{judged.algorithm}{when}",
        "thresholds": [_threshold(at) for at in judged.thresholds],
        "published": judged.published,
        "unmoved": judged.unmoved,
    }


def _compared(found: Exploration) -> list[int]:
    """The indices of the two initial algorithms; without advantages, one algorithm under both
    signs.
    """
    places = [
        place for place, judged in enumerate(found.judged) if judged.algorithm in found.compared
    ]
    return places[:2]


def _threshold(at: Mapping[str, float]) -> str:
    """`δ = 0.15`, or `ε = 0.2 / 0.28` for two sides that differ."""
    sides = {
        name.removesuffix(side) for name in at for side in ("_low", "_high") if name.endswith(side)
    }
    if len(at) == 2 and len(sides) == 1:
        return (
            f"{sides.pop()} = {' / '.join(dict.fromkeys(f'{value:.9g}' for value in at.values()))}"
        )
    return ", ".join(f"{name} = {value:.9g}" for name, value in at.items())


def _laid_out(head: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> bytes:
    """Head and columns; the head has the type, offset and size of each column."""
    parts: list[bytes] = []
    places: dict[str, Sequence[Any]] = {}
    start = 0
    for name, column in columns.items():
        content = np.ascontiguousarray(column).astype(column.dtype.newbyteorder("<")).tobytes()
        places[name] = [_TYPES[column.dtype.name], start, column.size]
        parts.append(_padded(content))
        start += len(parts[-1])
    text = _padded(
        json.dumps({**head, "columns": places}, ensure_ascii=True, allow_nan=False).encode(), b" "
    )
    return b"".join((len(text).to_bytes(4, "little"), text, *parts))


def _padded(content: bytes, by: bytes = b"\0") -> bytes:
    return content + by * (-len(content) % 4)
