"""Reads samples of slime and its fork miles: dicts of lists or tensors, with the response at the
end of `tokens`.

Each sample has the keys of `Sample.to_dict()` (rollout data: singular) or of the trainer's columns
(train data: plural).
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.rows import NO_IDS, NOTE
from mismatch_cli.frameworks.importing.sources import TOKENS_PER_BLOCK, DumpFile
from mismatch_cli.frameworks.importing.torch_file import check_memory
from mismatch_cli.trace import foreign_values

EVALUATION = "evaluation files (eval_N.pt)"
SAME_SAMPLES = "files with the same samples but less about each (rollout data next to train data)"
NO_LENGTH = "samples without a response length"
WRONG_TOTAL = "samples whose number of tokens differs from their stated length"
NO_NUMBER = "responses have a reward that is not a number: it is left empty"
OTHER_TYPES = "samples with values of the wrong type"
NORMALISED = (
    "responses have the reward that the trainer got, perhaps normalized: their raw reward is "
    "unknown"
)

# column of the trace: its keys in a sample
_LISTS = {
    "loss_mask": ("loss_mask", "loss_masks"),
    "logp_rollout": ("rollout_log_probs",),
    "logp_trainer": ("train_log_probs", "log_probs"),
    "logp_recomputed": ("old_log_probs",),
    "entropy_trainer": ("entropy",),
    "advantage": ("advantages",),
}
KINDS = {"tokens": pa.int32()} | {key: pa.float32() for keys in _LISTS.values() for key in keys}
KINDS |= dict.fromkeys(_LISTS["loss_mask"], pa.bool_())
_LENGTHS = ("response_length", "response_lengths", "total_length", "total_lengths")
NUMBERS = ("index", "sample_index", "truncated", *_LENGTHS)
_FINISH = {"completed": "stop", "truncated": "length"}
Sample = dict[str, Any]


def samples_of(content: Any, source: DumpFile) -> list[Sample]:
    """The samples of a file; a `MismatchError` where it holds none."""
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise MismatchError(
            f"{source.path} holds no samples. Formats: mismatch-cli import --formats"
        )
    return samples


def with_raw_rewards(samples: list[dict[str, Any]], raw: Any) -> list[dict[str, Any]]:
    """Add the raw rewards: one list for the whole rollout, indexed by each sample's
    `rollout_position`.
    """
    if raw is None:
        return samples
    positions = [sample.get("rollout_position") for sample in samples]
    if any(position is None or not 0 <= int(position) < len(raw) for position in positions):
        return samples
    return [
        sample | {"raw_reward": raw[int(at)]}
        for sample, at in zip(samples, positions, strict=True)
        if at is not None
    ]


def tables(samples: Sequence[Sample], step: int, tally: Tally, where: str) -> Iterator[pa.Table]:
    """Blocks of samples in order, without those that lack ids or have impossible lengths."""
    block: list[Sample] = []
    tokens = 0
    for sample in samples:
        try:
            reason = _unusable(sample := _as_arrays(sample))
        except (
            TypeError,
            ValueError,
            OverflowError,
            RuntimeError,
        ) as error:  # from numpy and torch
            check_memory(error)
            reason = OTHER_TYPES
        if reason is not None:
            tally.leave_out(reason, 1, where)
            continue
        block.append(sample)
        tokens += len(sample["tokens"])
        if tokens >= TOKENS_PER_BLOCK:
            yield _table(block, step)
            block, tokens = [], 0
    if block:
        yield _table(block, step)


def _as_arrays(sample: Sample) -> Sample:
    """The sample with its lists and tensors as flat arrays in the types of a trace."""
    found = dict(sample)
    for key, kind in KINDS.items():
        if (value := sample.get(key)) is not None:
            found[key] = foreign_values.flat_array(value, kind)
    for key in NUMBERS:
        if sample.get(key) is not None:
            value = sample[key]
            found[key] = (
                int(value)
                if isinstance(value, bool)
                else foreign_values.whole_number(value, np.int32)
            )
    return found


def _unusable(sample: Sample) -> str | None:
    if sample.get("tokens") is None or not len(sample["tokens"]):
        return NO_IDS
    length, total = response_length(sample), sample.get("total_length", sample.get("total_lengths"))
    if length is None:
        return NO_LENGTH
    if not 0 <= length <= len(sample["tokens"]) or (
        total is not None and total != len(sample["tokens"])
    ):
        return WRONG_TOTAL
    return None


def response_length(sample: Sample) -> int | None:
    return sample.get("response_length", sample.get("response_lengths"))


def _table(samples: list[Sample], step: int) -> pa.Table:
    ids = [sample["tokens"] for sample in samples]
    cuts = [
        len(row) - (response_length(sample) or 0) for row, sample in zip(ids, samples, strict=True)
    ]
    columns = {
        "prompt_ids": _lists.from_rows(
            [row[:cut] for row, cut in zip(ids, cuts, strict=True)], pa.int32()
        ),
        "response_ids": _lists.from_rows(
            [row[cut:] for row, cut in zip(ids, cuts, strict=True)], pa.int32()
        ),
        "step": pa.array(np.full(len(samples), step, np.int32)),
        "finish_reason": pa.array([_finish_reason(sample) for sample in samples], pa.string()),
    }
    columns |= _rewards(samples)
    for name, keys in _LISTS.items():
        rows = [
            next((sample[key] for key in keys if sample.get(key) is not None), None)
            for sample in samples
        ]
        if any(row is not None for row in rows):
            columns[name] = _lists.from_rows(
                rows, pa.bool_() if name == "loss_mask" else pa.float32()
            )
    _mask(columns, samples)
    numbers: dict[str, list[Any]] = {
        "sample_index": [sample.get("index", sample.get("sample_index")) for sample in samples],
        "version_rollout": [_oldest_version(sample.get("weight_versions")) for sample in samples],
    }
    if any(sample.get("newer_trainer") for sample in samples):
        numbers["version_trainer"] = [1 + (version or 0) for version in numbers["version_rollout"]]
    for name, values in numbers.items():
        if any(value is not None for value in values):
            columns[name] = pa.array(values, pa.int32())
    return pa.table(columns)


def _mask(columns: dict[str, pa.Array], samples: list[Sample]) -> None:
    """Make the loss mask boolean: no mask trains every token, and a removed sample trains none."""
    if "loss_mask" not in columns and not any(sample.get("remove_sample") for sample in samples):
        return
    lengths_S = _lists.lengths_of(columns["response_ids"])
    ones = _lists.from_flat(np.ones(int(lengths_S.sum()), dtype=bool), lengths_S)
    mask = pc.coalesce(columns["loss_mask"], ones) if "loss_mask" in columns else ones
    kept_S = np.array([not sample.get("remove_sample") for sample in samples])
    lengths_S = _lists.lengths_of(mask)
    columns["loss_mask"] = _lists.from_flat(
        _lists.flat(mask) & np.repeat(kept_S, lengths_S), lengths_S
    )


def _finish_reason(sample: Sample) -> str | None:
    if sample.get("truncated") is not None:
        return "length" if sample["truncated"] else "stop"
    status = sample.get("status")
    return None if status is None else _FINISH.get(str(status), str(status))


def _rewards(samples: list[Sample]) -> dict[str, pa.Array]:
    """The raw rewards, where known: `rewards` in train data may be normalized within the group."""
    found: list[float | None] = []
    no_number, normalised = [], []
    for sample in samples:
        raw = "raw_reward" in sample or "reward" in sample
        value = sample.get("raw_reward", sample.get("reward", sample.get("rewards")))
        try:
            found.append(None if value is None else foreign_values.finite_number(value))
        except (TypeError, ValueError, RuntimeError):
            found.append(None)
        no_number.append(int(value is not None and found[-1] is None))
        normalised.append(int(found[-1] is not None and not raw))
    return {
        "reward": pa.array(found, pa.float32()),
        NOTE + NO_NUMBER: pa.array(no_number),
        NOTE + NORMALISED: pa.array(normalised),
    }


def _oldest_version(versions: Any) -> int | None:
    named = versions if isinstance(versions, list | tuple) else []
    numbers = [int(version) for version in named if re.fullmatch(r"\d{1,9}", str(version))]
    return min(numbers) if numbers else None
