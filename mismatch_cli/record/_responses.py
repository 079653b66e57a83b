"""What a run hands over: responses by themselves, or padded matrices of them; and which of them are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.importers._rows import prompt_hash, text_key
from mismatch_cli.metrics.hashing import hash_keys

Row = dict[str, Any]
_SEED = 2  # of the hash that chooses prompts


@dataclass
class Padded:
    """Matrices of S responses with the masks of their tokens; cut apart in the thread that writes."""

    columns: dict[str, Any]
    prompt_SP: Any
    response_ST: Any

    def __post_init__(self) -> None:
        self.prompt_SP, self.response_ST = (
            np.asarray(mask).astype(bool) for mask in (self.prompt_SP, self.response_ST)
        )

    def __len__(self) -> int:
        return len(self.response_ST)

    def row(self, number: int) -> Row:
        """A response without padding; a number or a text for all of them is each one's."""
        masks = {"prompt_ids": self.prompt_SP[number]}
        return {
            name: _cut(value, number, masks.get(name, self.response_ST[number])) for name, value in self.columns.items()
        }

    def only(self, keep_S: np.ndarray) -> Padded:
        """Some of the responses."""
        columns = {
            name: [item for item, keep in zip(value, keep_S, strict=True) if keep] if isinstance(value, list)
            else value[keep_S] if _has_rows(value) else value
            for name, value in self.columns.items()
        }  # fmt: skip
        return Padded(columns, self.prompt_SP[keep_S], self.response_ST[keep_S])


def responses_in(given: Row | Padded) -> int:
    """How many responses these are; a row that is not chosen is empty."""
    return len(given) if isinstance(given, Padded) else bool(given)


def tokens_in(given: Row | Padded) -> int:
    """How many tokens they have."""
    return int(given.response_ST.sum()) if isinstance(given, Padded) else int(np.size(given.get("response_ids", ())))


def rows_in(given: Iterable[Row | Padded]) -> Iterator[Callable[[], Row]]:
    """Each response, to be made where its faults are counted."""
    for item in given:
        if isinstance(item, Padded):
            yield from (partial(item.row, number) for number in range(len(item)))
        else:
            yield partial(dict, item)


def chosen(given: Row | Padded, every: int) -> Row | Padded:
    """Those whose prompt is one of those that are recorded in their step: a hash, the same on every rank."""
    if not isinstance(given, Padded):
        return given if _are_chosen([given], every)[0] else {}
    return given.only(_are_chosen([given.row(number) for number in range(len(given))], every))


def _are_chosen(rows: list[Row], every: int) -> np.ndarray:
    step_S = np.array([int(row["step"]) for row in rows], dtype=np.int64)
    key_S = np.array([_prompt_key(row) for row in rows], dtype=np.int64)
    return np.asarray(hash_keys(step_S, key_S, seed=_SEED) % np.uint64(every) == 0)


def _prompt_key(row: Row) -> int:
    """The prompt's own id, or the hash of its tokens that an import gives it, too."""
    prompt = row.get("prompt_id")
    if prompt is None:
        return int(prompt_hash(pa.array([np.ravel(row["prompt_ids"])], pa.list_(pa.int32())))[0])
    return text_key(prompt) if isinstance(prompt, str) else int(prompt)


def copied(value: Any) -> Any:
    """A copy on the host; what has `detach` is a tensor, of whatever library, and numpy knows no bfloat16."""
    if hasattr(value, "detach"):
        value = value.detach()
        return np.array((value.float() if value.is_floating_point() else value).cpu().numpy())
    if isinstance(value, np.ndarray):
        return value.copy()
    if not isinstance(value, list | tuple):
        return value
    return [copied(item) for item in value] if value and _has_rows(value[0]) else list(value)


def _cut(value: Any, number: int, mask_T: np.ndarray) -> Any:
    if not _has_rows(value):
        return value
    found = value[number]
    has_padding = _has_rows(found) and len(found) == len(mask_T)
    return np.asarray(found)[mask_T] if has_padding else found


def _has_rows(value: Any) -> bool:
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0
