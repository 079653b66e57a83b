"""From a Parquet table to a `TokenBatch`: flat buffers without copying, nulls as NaN, equal weights served as such.

A log-probability above 0 is no measurement: it is served as NaN, and `diagnose` says how many there are. Values pass by
DLPack, not by Arrow's `to_numpy`, which imports pandas: half a second for every process.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from mismatch_cli.batch import TokenBatch
from mismatch_cli.errors import MismatchError
from mismatch_cli.trace import foreign
from mismatch_cli.trace.foreign import strange_ids
from mismatch_cli.trace.schema import ID_COLUMNS, ROW_KEY, TOKEN_COLUMNS, TOPK_COLUMNS

_NEVER_NULL = (*ROW_KEY, "version_rollout", "version_trainer", "prompt_ids", "response_ids")
_AGAIN = "Record or import it again."


def table_to_batch(table: pa.Table) -> TokenBatch:
    """Lay the rows of one table flat; a `MismatchError` where a token column has another length than its response."""
    columns = {name: foreign.single(table.column(name)) for name in table.column_names}
    if empty := [name for name in _NEVER_NULL if name in columns and columns[name].null_count]:
        raise MismatchError(f"The trace is damaged: column {empty[0]} is empty in some rows. {_AGAIN}")
    _check("prompt_ids", columns["prompt_ids"].flatten())
    offset_S1 = _offsets(columns["response_ids"])
    lengths_S = np.diff(offset_S1)
    flat = {f"{n}_T": _token_column(n, columns[n], lengths_S, 1) for n in TOKEN_COLUMNS if n in columns}
    if top_k := _top_k(columns, lengths_S):
        for name in TOPK_COLUMNS.keys() & columns.keys():
            flat[f"{name}_TK"] = _token_column(name, columns[name], lengths_S, top_k).reshape(-1, top_k)
    flat.setdefault("loss_mask_T", torch.ones(int(offset_S1[-1]), dtype=torch.bool))
    _serve_recomputed(columns, lengths_S, flat)
    return _assemble(columns, offset_S1, flat)


def _assemble(columns: dict[str, pa.Array], offset_S1: np.ndarray, flat: dict[str, torch.Tensor]) -> TokenBatch:
    absent = {f"{name}_T": None for name in TOKEN_COLUMNS} | {f"{name}_TK": None for name in TOPK_COLUMNS}
    graded = "reward" in columns and columns["reward"].null_count < len(columns["reward"])
    return TokenBatch(
        offset_S1=torch.from_numpy(offset_S1),
        prompt_id_S=_numbers(columns["prompt_id"]),
        sample_index_S=_numbers(columns["sample_index"]),
        step_S=_numbers(columns["step"]),
        prompt_length_S=torch.from_numpy(np.diff(_offsets(columns["prompt_ids"]))),
        truncated_S=torch.tensor([r == "length" for r in columns["finish_reason"].to_pylist()], dtype=torch.bool),
        reward_S=_or_nan(columns["reward"]) if graded else None,
        **(absent | flat),  # type: ignore[arg-type]
    )


def _numbers(array: pa.Array) -> torch.Tensor:
    return torch.from_dlpack(array).clone()  # Arrow's memory is read-only


def _or_nan(array: pa.FloatArray) -> torch.Tensor:
    filled = torch.full((len(array),), torch.nan)
    filled[_flags(array.is_valid())] = torch.from_dlpack(array.drop_null())
    return filled


def _offsets(array: pa.ListArray) -> np.ndarray:
    offsets = np.from_dlpack(array.offsets).astype(np.int64)
    return offsets - offsets[0]


def _flags(values: pa.BooleanArray) -> torch.Tensor:
    """One bit each in Arrow, one byte each in torch."""
    return torch.from_dlpack(values.cast(pa.uint8())).view(torch.bool)


def _token_column(name: str, array: pa.ListArray, lengths_S: np.ndarray, width: int) -> torch.Tensor:
    """The flat values of a list column; rows that are null become NaN (-1 for integers, False for booleans)."""
    expected_S = lengths_S * width
    known_S = _flags(array.is_valid()).numpy()
    if not np.array_equal(np.diff(_offsets(array))[known_S], expected_S[known_S]):
        raise MismatchError(
            f"The trace is damaged: column {name} has another number of values than its responses have tokens. {_AGAIN}"
        )
    values = _flat(name, array)
    if known_S.all():
        return values
    missing = float("nan") if values.dtype.is_floating_point else 0 if values.dtype == torch.bool else -1
    filled = torch.full((int(expected_S.sum()),), missing, dtype=values.dtype)
    filled[torch.from_numpy(np.repeat(known_S, expected_S))] = values
    return filled


def _flat(name: str, array: pa.ListArray) -> torch.Tensor:
    values = array.flatten()  # honours slices, and leaves out what null rows may cover
    _check(name, values)
    if pa.types.is_boolean(values.type):
        return _flags(values)
    flat = torch.from_dlpack(values)
    if "logp" in name and len(flat) and not flat.max() <= 0:  # true for NaN too
        return flat.masked_fill(flat > 0, torch.nan)
    return flat


def _check(name: str, values: pa.Array) -> None:
    """No nulls among the values, and ids that a token can have."""
    if values.null_count:
        raise MismatchError(f"The trace is damaged: column {name} holds a null among its values. {_AGAIN}")
    if name in ID_COLUMNS:
        ids = np.from_dlpack(values)
        if len(strange := ids[strange_ids(ids)]):
            raise MismatchError(
                f"The trace is damaged: column {name} holds {strange[0]}, which is no token id. {_AGAIN}"
            )


def _top_k(columns: dict[str, pa.Array], lengths_S: np.ndarray) -> int:
    """K follows from the lengths: a trace needs no manifest to be laid flat."""
    if "topk_ids" not in columns:
        return 0
    known_S = _flags(columns["topk_ids"].is_valid()).numpy()
    tokens = int(lengths_S[known_S].sum())
    return len(columns["topk_ids"].flatten()) // tokens if tokens else 0


def _serve_recomputed(columns: dict[str, pa.Array], lengths_S: np.ndarray, flat: dict[str, torch.Tensor]) -> None:
    """Where the trainer scored at the weights that sampled, logp_trainer *is* logp_recomputed."""
    if "version_rollout" not in columns or "version_trainer" not in columns:
        return
    equal_S = np.from_dlpack(columns["version_rollout"]) == np.from_dlpack(columns["version_trainer"])
    for trainer, recomputed in _RECOMPUTED_OF.items():
        if trainer not in flat or not equal_S.any():
            continue
        if equal_S.all():
            flat[recomputed] = flat[trainer]
            continue
        known = flat.get(recomputed, torch.full_like(flat[trainer], float("nan")))
        equal_T = torch.from_numpy(np.repeat(equal_S, lengths_S))
        flat[recomputed] = torch.where(equal_T if known.dim() == 1 else equal_T[:, None], flat[trainer], known)


_RECOMPUTED_OF = {"logp_trainer_T": "logp_recomputed_T", "topk_logp_trainer_TK": "topk_logp_recomputed_TK"}
