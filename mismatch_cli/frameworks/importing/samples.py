"""Reads samples of slime and its fork miles: dicts of lists or tensors, with the response at the
end of `tokens`.

Each sample has the keys of `Sample.to_dict()` (rollout data: singular) or of the trainer's columns
(train data: plural).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
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
NOT_THERE = "files of rollouts that {} does not have: to read them, import their folder by itself"
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
KINDS = {"tokens": pa.int32(), **dict.fromkeys(chain.from_iterable(_LISTS.values()), pa.float32())}
KINDS |= dict.fromkeys(_LISTS["loss_mask"], pa.bool_())
_LENGTHS = ("response_length", "response_lengths", "total_length", "total_lengths")
NUMBERS = ("index", "sample_index", "truncated", *_LENGTHS)
_FINISH = {"completed": "stop", "truncated": "length"}
Sample = dict[str, Any]


def leave_out_beside(best: Sequence[DumpFile], all_files: Sequence[DumpFile], tally: Tally) -> None:
    """Count the files beside those of the best folder: of the same rollouts, or of others."""
    chosen = {source.path for source in best}
    beside = [source for source in all_files if source.path not in chosen]
    rollouts = set(map(_rollout_number, best))
    missing = [source for source in beside if _rollout_number(source) not in rollouts]
    tally.leave_out(SAME_SAMPLES, len(beside) - len(missing))
    if missing:
        reason = NOT_THERE.format(best[0].path.parent.name)
        tally.leave_out(reason, len(missing), missing[0].name)


def _rollout_number(source: DumpFile) -> int | None:
    """The first number in the name of a file; None without one."""
    number = re.search(r"\d+", source.path.name)
    return int(number[0]) if number else None


def samples_of(content: Any, source: DumpFile) -> list[Sample]:
    """The samples of a file; a `MismatchError` where it holds none."""
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise MismatchError(
            f"{source.path} holds no samples. Formats: mismatch-cli import --formats"
        )
    return samples


def with_raw_rewards(samples: list[Sample], raw: Any) -> list[Sample]:
    """Add the raw rewards: one list for the whole rollout, indexed by each sample's
    `rollout_position`. Where a position is missing or beyond the list, none is added.
    """
    if raw is None:
        return samples
    with_raw: list[Sample] = []
    for sample in samples:
        position = sample.get("rollout_position")
        if position is None or not 0 <= int(position) < len(raw):
            return samples
        with_raw.append(sample | {"raw_reward": raw[int(position)]})
    return with_raw


def tables(samples: Sequence[Sample], step: int, tally: Tally, where: str) -> Iterator[pa.Table]:
    """Blocks of samples in order, without those that lack ids or have impossible lengths."""
    block: list[Sample] = []
    tokens = 0
    for sample in samples:
        try:
            arrays = _as_arrays(sample)
            reason = _unusable(arrays)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            # numpy and torch raise any of these for values of a wrong type.
            check_memory(error)
            reason = OTHER_TYPES
        if reason is not None:
            tally.leave_out(reason, 1, where)
            continue
        block.append(arrays)
        tokens += len(arrays["tokens"])
        if tokens >= TOKENS_PER_BLOCK:
            yield _table(block, step)
            block = []
            tokens = 0
    if block:
        yield _table(block, step)


def _as_arrays(sample: Sample) -> Sample:
    """The sample with its lists and tensors as flat arrays in the types of a trace."""
    arrays = dict(sample)
    for key, kind in KINDS.items():
        if sample.get(key) is not None:
            arrays[key] = foreign_values.flat_array(sample[key], kind)
    for key in NUMBERS:
        value = sample.get(key)
        if isinstance(value, bool):
            arrays[key] = int(value)
        elif value is not None:
            arrays[key] = foreign_values.whole_number(value, np.int32)
    return arrays


def _unusable(sample: Sample) -> str | None:
    """Why a sample cannot be imported; None for one that can."""
    ids = sample.get("tokens")
    if ids is None or not len(ids):
        return NO_IDS
    length = response_length(sample)
    if length is None:
        return NO_LENGTH
    total = _first_of(sample, ("total_length", "total_lengths"))
    if not 0 <= length <= len(ids) or total not in (None, len(ids)):
        return WRONG_TOTAL
    return None


def response_length(sample: Sample) -> int | None:
    length: int | None = _first_of(sample, ("response_length", "response_lengths"))
    return length


def _table(samples: list[Sample], step: int) -> pa.Table:
    """The samples as rows of a trace; columns that no sample has are left out."""
    prompts: list[np.ndarray] = []
    responses: list[np.ndarray] = []
    for sample in samples:
        ids = sample["tokens"]
        begin = len(ids) - (response_length(sample) or 0)
        prompts.append(ids[:begin])
        responses.append(ids[begin:])
    columns = {
        "prompt_ids": _lists.from_rows(prompts, pa.int32()),
        "response_ids": _lists.from_rows(responses, pa.int32()),
        "step": pa.array(np.full(len(samples), step, np.int32)),
        "finish_reason": pa.array(map(_finish_reason, samples), pa.string()),
    }
    columns |= _rewards(samples)
    for name, keys in _LISTS.items():
        rows = [_first_of(sample, keys) for sample in samples]
        if _lists.first_value(rows) is not None:
            columns[name] = _lists.from_rows(rows, KINDS[keys[0]])
    _mask(columns, samples)
    columns |= _numbers(samples)
    return pa.table(columns)


def _first_of(sample: Sample, keys: Iterable[str]) -> Any:
    """The value of the first of these keys that has one; None without."""
    return _lists.first_value(list(map(sample.get, keys)))


def _numbers(samples: list[Sample]) -> dict[str, pa.Array]:
    """The columns of whole numbers that at least one sample has."""
    numbers: dict[str, list[int | None]] = {"sample_index": [], "version_rollout": []}
    for sample in samples:
        numbers["sample_index"].append(_first_of(sample, ("index", "sample_index")))
        numbers["version_rollout"].append(_oldest_version(sample.get("weight_versions")))
    if any(sample.get("newer_trainer") for sample in samples):
        numbers["version_trainer"] = [1 + (version or 0) for version in numbers["version_rollout"]]
    columns: dict[str, pa.Array] = {}
    for name, values in numbers.items():
        if _lists.first_value(values) is not None:
            columns[name] = pa.array(values, pa.int32())
    return columns


def _mask(columns: dict[str, pa.Array], samples: list[Sample]) -> None:
    """Make the loss mask boolean: no mask trains every token, and a removed sample trains none."""
    removed_S = np.array([bool(sample.get("remove_sample")) for sample in samples])
    if "loss_mask" not in columns and not removed_S.any():
        return
    lengths_S = _lists.lengths_of(columns["response_ids"])
    mask = _lists.from_flat(np.ones(int(lengths_S.sum()), dtype=bool), lengths_S)
    if "loss_mask" in columns:
        mask = pc.coalesce(columns["loss_mask"], mask)
    # A recorded mask may not be as long as its response, which is refused later.
    lengths_S = _lists.lengths_of(mask)
    trained_T = _lists.flat(mask) & np.repeat(~removed_S, lengths_S)
    columns["loss_mask"] = _lists.from_flat(trained_T, lengths_S)


def _finish_reason(sample: Sample) -> str | None:
    if sample.get("truncated") is not None:
        return "length" if sample["truncated"] else "stop"
    status = sample.get("status")
    if status is None:
        return None
    return _FINISH.get(str(status), str(status))


def _rewards(samples: list[Sample]) -> dict[str, pa.Array]:
    """The raw rewards, where known: `rewards` in train data may be normalized within the group."""
    rewards: list[float | None] = []
    no_number: list[bool] = []
    normalised: list[bool] = []
    for sample in samples:
        raw = _first_of(sample, ("raw_reward", "reward"))
        value = sample.get("rewards") if raw is None else raw
        reward = _number_or_none(value)
        rewards.append(reward)
        no_number.append(value is not None and reward is None)
        normalised.append(reward is not None and raw is None)
    return {
        "reward": pa.array(rewards, pa.float32()),
        NOTE + NO_NUMBER: pa.array(no_number).cast(pa.int64()),
        NOTE + NORMALISED: pa.array(normalised).cast(pa.int64()),
    }


def _number_or_none(value: Any) -> float | None:
    if value is None:
        return None
    try:
        return foreign_values.finite_number(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _oldest_version(versions: Any) -> int | None:
    """The smallest number among the names of weights; None without one."""
    names = map(str, versions if isinstance(versions, list | tuple) else ())
    numbers = [int(name) for name in names if re.fullmatch(r"\d{1,9}", name)]
    return min(numbers, default=None)
