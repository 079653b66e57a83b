"""A run's responses, single or as padded matrices, and the sample of prompts that is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.base.hashing import hash_keys
from mismatch_cli.frameworks.importing.rows import prompt_hash, text_key

Row = dict[str, Any]  # the columns of one response
_IDS = ("prompt_ids", "response_ids")
_SEED = 2  # of the hash that selects prompts
_REMEMBERED = 2**12  # prompts: responses to the same prompt arrive close together


@dataclass
class Padded:
    """Matrices of S responses with masks of their tokens; the writer's thread splits them."""

    columns: dict[str, Any]
    prompt_SP: Any
    response_ST: Any

    def __post_init__(self) -> None:
        self.prompt_SP = np.asarray(self.prompt_SP).astype(bool, copy=False)
        self.response_ST = np.asarray(self.response_ST).astype(bool, copy=False)
        for name, value in {"prompt_mask": self.prompt_SP, **self.columns}.items():
            if _has_rows(value) and len(value) != len(self):
                raise ValueError(f"{name} has {len(value)} rows, but response_mask has {len(self)}")

    def __len__(self) -> int:
        return len(self.response_ST)

    def row(self, number: int) -> Row:
        """A response without padding; single numbers or texts apply to every response.

        Raises a `ValueError` for ids that are not as many as the tokens of their mask.
        """
        row = {}
        for name, value in self.columns.items():
            mask_T = self._masks_of(name)[number]
            row[name] = _without_padding(value, number, mask_T)
            if name in _IDS and np.size(row[name]) != mask_T.sum():
                raise ValueError(
                    f"{name} has {np.size(row[name])} values, but its mask {mask_T.sum()} tokens"
                )
        return row

    def select(self, flags_S: np.ndarray) -> Padded:
        """The responses whose flag is set."""
        columns = {name: _select_rows(value, flags_S) for name, value in self.columns.items()}
        return Padded(columns, self.prompt_SP[flags_S], self.response_ST[flags_S])

    def column(self, name: str) -> list[Any]:
        """One column: a value, or an array without padding, per response."""
        value = self.columns.get(name)
        masks = enumerate(self._masks_of(name))
        return [_without_padding(value, number, mask_T) for number, mask_T in masks]

    def _masks_of(self, name: str) -> np.ndarray:
        masks: np.ndarray = self.prompt_SP if name == "prompt_ids" else self.response_ST
        return masks


Batch = Row | Padded  # what the run hands over at a time


def count_responses(batch: Batch) -> int:
    """The number of responses; a row whose prompt was not sampled is empty and counts as none."""
    if isinstance(batch, Padded):
        return len(batch)
    return int(bool(batch))


def count_tokens(batch: Batch) -> int:
    """The number of tokens in the responses, without prompts and padding."""
    if isinstance(batch, Padded):
        return int(batch.response_ST.sum())
    return int(np.size(batch.get("response_ids", ())))


def extractors(batches: Iterable[Batch]) -> Iterator[Callable[[], Row]]:
    """A function for each response that returns its row."""
    # Cutting a row out of a broken matrix raises, and costs only this response:
    # so it happens where the caller catches and counts, not in this iteration.
    for batch in batches:
        if isinstance(batch, Padded):
            for number in range(len(batch)):
                yield partial(batch.row, number)
        else:
            yield partial(dict, batch)


def sample_prompts(batch: Batch, every: int) -> Batch:
    """The responses whose prompt is recorded in this step: about one in `every`, by a hash that
    is the same on every rank.
    """
    if not isinstance(batch, Padded):
        step = int(batch["step"])
        prompt_key = _prompt_key(batch["prompt_ids"], batch.get("prompt_id"))
        return batch if _is_sampled(step, prompt_key, every) else {}
    columns = map(batch.column, ("step", "prompt_id", "prompt_ids"))
    sampled = []
    for step, prompt_id, prompt_ids in zip(*columns, strict=True):
        prompt_key = _prompt_key(prompt_ids, prompt_id)
        sampled.append(_is_sampled(int(step), prompt_key, every))
    return batch.select(np.array(sampled, dtype=bool))


@lru_cache(_REMEMBERED)
def _is_sampled(step: int, prompt_key: int, every: int) -> bool:
    hashes = hash_keys(np.array([step]), np.array([prompt_key]), seed=_SEED)
    return bool(hashes[0] % np.uint64(every) == 0)


def _prompt_key(prompt_ids: Any, prompt_id: Any) -> int:
    """The prompt's own id, or the hash of its tokens, as in an import."""
    if prompt_id is None:
        return _hash_prompt(np.asarray(prompt_ids, dtype=np.int32).tobytes())
    return text_key(prompt_id) if isinstance(prompt_id, str) else int(prompt_id)


@lru_cache(_REMEMBERED)
def _hash_prompt(prompt_ids: bytes) -> int:
    prompts = pa.array([np.frombuffer(prompt_ids, np.int32)], pa.list_(pa.int32()))
    return int(prompt_hash(prompts)[0])


def copy_to_host(value: Any) -> Any:
    """A copy as a numpy array on the host; lists are copied as lists, and other values returned
    as they are.
    """
    # Whatever has `detach` is a tensor: torch is not imported to ask for its type.
    if hasattr(value, "detach"):
        tensor = value.detach()
        # numpy lacks bfloat16, and every narrower float fits into float32.
        if tensor.is_floating_point():
            tensor = tensor.float()
        # A tensor on the CPU shares its memory with `numpy()`, so this copies once more.
        return np.array(tensor.cpu().numpy())
    if isinstance(value, np.ndarray):
        return value.copy()
    if not isinstance(value, list | tuple):
        return value
    if value and _has_rows(value[0]):
        return [copy_to_host(row) for row in value]
    return list(value)


def _without_padding(value: Any, number: int, mask_T: np.ndarray) -> Any:
    """What a column says of one response: its tokens without padding, its own value, or the one
    value of the whole batch.

    Raises a `ValueError` for a matrix whose width differs from that of the mask.
    """
    if not _has_rows(value):
        return value
    row = value[number]
    if _has_rows(row) and len(row) == len(mask_T):
        return np.asarray(row)[mask_T]
    # A matrix of width 1 holds one value per response; lists may be ragged, without padding.
    if isinstance(value, np.ndarray) and value.ndim > 1 and value.shape[1] != 1:
        raise ValueError(f"a matrix of width {value.shape[1]} with a mask of width {len(mask_T)}")
    return row


def _select_rows(value: Any, flags_S: np.ndarray) -> Any:
    if isinstance(value, np.ndarray) and value.ndim:
        return value[flags_S]
    if not _has_rows(value):
        return value
    return [row for row, flag in zip(value, flags_S, strict=True) if flag]


def _has_rows(value: Any) -> bool:
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0
