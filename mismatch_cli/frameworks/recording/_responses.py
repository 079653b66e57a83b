"""A run's responses, single or as padded matrices, and the choice of those that are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.base.hashing import hash_keys
from mismatch_cli.frameworks.importing.rows import prompt_hash, text_key

Row = dict[str, Any]
_SEED = 2  # of the hash that selects prompts
_REMEMBERED = 2**12  # prompts: responses to the same prompt arrive close together


@dataclass
class Padded:
    """Matrices of S responses with masks of their tokens; the writer's thread splits them."""

    columns: dict[str, Any]
    prompt_SP: Any
    response_ST: Any

    def __post_init__(self) -> None:
        self.prompt_SP, self.response_ST = (
            np.asarray(mask).astype(bool, copy=False) for mask in (self.prompt_SP, self.response_ST)
        )
        for name, value in {"prompt_mask": self.prompt_SP, **self.columns}.items():
            if _has_rows(value) and len(value) != len(self):
                raise ValueError(f"{name} has {len(value)} rows, but response_mask has {len(self)}")

    def __len__(self) -> int:
        return len(self.response_ST)

    def row(self, number: int) -> Row:
        """A response without padding; single numbers or texts apply to every response."""
        return {
            name: _cut(value, number, self._masks_of(name)[number])
            for name, value in self.columns.items()
        }

    def only(self, keep_S: np.ndarray) -> Padded:
        """Some of the responses."""
        columns = {name: _some(value, keep_S) for name, value in self.columns.items()}
        return Padded(columns, self.prompt_SP[keep_S], self.response_ST[keep_S])

    def column(self, name: str) -> list[Any]:
        """One column: a value, or an array without padding, per response."""
        value = self.columns.get(name)
        return [_cut(value, number, mask_T) for number, mask_T in enumerate(self._masks_of(name))]

    def _masks_of(self, name: str) -> np.ndarray:
        masks: np.ndarray = self.prompt_SP if name == "prompt_ids" else self.response_ST
        return masks


def responses_in(given: Row | Padded) -> int:
    """Number of responses; a row that is not chosen is empty."""
    return len(given) if isinstance(given, Padded) else bool(given)


def tokens_in(given: Row | Padded) -> int:
    """Number of tokens in these responses."""
    return (
        int(given.response_ST.sum())
        if isinstance(given, Padded)
        else int(np.size(given.get("response_ids", ())))
    )


def rows_in(given: Iterable[Row | Padded]) -> Iterator[Callable[[], Row]]:
    """A function for each response, which is called where its faults are counted."""
    for item in given:
        if isinstance(item, Padded):
            yield from (partial(item.row, number) for number in range(len(item)))
        else:
            yield partial(dict, item)


def chosen(given: Row | Padded, every: int) -> Row | Padded:
    """The responses whose prompt is recorded in this step, by a hash that is the same on every
    rank.
    """
    if not isinstance(given, Padded):
        return (
            given
            if _is_chosen(
                int(given["step"]), _prompt_key(given["prompt_ids"], given.get("prompt_id")), every
            )
            else {}
        )
    steps, names, prompts = map(given.column, ("step", "prompt_id", "prompt_ids"))
    keys = (_prompt_key(ids, name) for ids, name in zip(prompts, names, strict=True))
    return given.only(
        np.array(
            [_is_chosen(int(step), key, every) for step, key in zip(steps, keys, strict=True)], bool
        )
    )


@lru_cache(_REMEMBERED)
def _is_chosen(step: int, key: int, every: int) -> bool:
    return bool(hash_keys(np.array([step]), np.array([key]), seed=_SEED)[0] % np.uint64(every) == 0)


def _prompt_key(prompt_ids: Any, name: Any) -> int:
    """The prompt's own id, or the hash of its tokens, as in an import."""
    if name is None:
        return _hash(np.asarray(prompt_ids, dtype=np.int32).tobytes())
    return text_key(name) if isinstance(name, str) else int(name)


@lru_cache(_REMEMBERED)
def _hash(prompt: bytes) -> int:
    return int(prompt_hash(pa.array([np.frombuffer(prompt, np.int32)], pa.list_(pa.int32())))[0])


def copied(value: Any) -> Any:
    """A copy on the host; anything with `detach` is a tensor, and becomes float because numpy
    lacks bfloat16.
    """
    if hasattr(value, "detach"):
        value = value.detach()
        return np.array((value.float() if value.is_floating_point() else value).cpu().numpy())
    if isinstance(value, np.ndarray):
        return value.copy()
    if not isinstance(value, list | tuple):
        return value
    return [copied(item) for item in value] if value and _has_rows(value[0]) else list(value)


def _cut(value: Any, number: int, mask_T: np.ndarray) -> Any:
    """A response's part of a column: a matrix is as wide as its mask, or has one value per
    response.
    """
    if not _has_rows(value):
        return value
    found = value[number]
    if _has_rows(found) and len(found) == len(mask_T):
        return np.asarray(found)[mask_T]
    if isinstance(value, np.ndarray) and value.ndim > 1 and value.shape[1] != 1:
        raise ValueError(f"a matrix of width {value.shape[1]} with a mask of width {len(mask_T)}")
    return found


def _some(value: Any, keep_S: np.ndarray) -> Any:
    if isinstance(value, np.ndarray) and value.ndim:
        return value[keep_S]
    return (
        [item for item, keep in zip(value, keep_S, strict=True) if keep]
        if _has_rows(value)
        else value
    )


def _has_rows(value: Any) -> bool:
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0
