"""prime-rl's traces (`_traces.py`), and the token exports that it wrote before 31 August 2026.

An export is JSONL, one packed sequence per line, every column as long as the sequence, written by
`src/prime_rl/trainer/rl/token_export.py` while the trainer learns from the batch; read at 559b44772
(2026-08). Values that are not finite are null there. Tokens whose RL and reference-KL
weights are both 0 (cross-entropy on another model's tokens) are masked: prime-rl did not sample
them.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.rows import NOTE, split_sequences
from mismatch_cli.frameworks.importing.sources import DumpFile, FileHead, jsonl_tables, keys_of
from mismatch_cli.frameworks.prime_rl import _traces

TITLE = "prime-rl traces and token_exports"
FILES = (
    "monitors/file/traces: stream/N.jsonl.zst and annotations/PRODUCER/N.jsonl.zst; before 31 "
    "August 2026 token_exports/step_N/rank_R.jsonl"
)
ENABLE = (
    'the file monitor (monitors.file; its float_decimals = "None" keeps every digit); before: '
    "trainer.enable_token_export = true"
)
PI = "trainer"
HOLDS = (
    "trainer_logprobs at the weights being updated, logits divided by the temperature; not "
    "recomputed"
)
SHIFT = "index i describes token i (prime-rl shifts right); index 0 is a filler, −log(vocabulary)"
PADDING = "none: prime-rl removes it; the response begins at the first 1 of loss_mask"
AVERAGING = (
    "mean over tokens; the trainer drops groups without signal before it exports "
    "(filter_zero_advantages)"
)

_FLOATS = {
    "advantage": "advantages",
    "logp_rollout": "inference_logprobs",
    "logp_trainer": "trainer_logprobs",
    "entropy_trainer": "entropy",
}
_WEIGHTS = ("rl_weights", "ref_kl_weights")
_SCHEMA = pa.schema(
    {
        "schema_version": pa.int64(),
        "step": pa.int32(),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        **{name: pa.list_(pa.float32()) for name in (*_FLOATS.values(), *_WEIGHTS)},
    }
)
_VERSION = 1
_STABLE = "STABLE"
_MONITORED = {"monitors", "traces"}  # folders of the file monitor, and of its traces
BESIDE_EXPORTS = "files of traces, beside token_exports of the same run"
UNWEIGHED = "tokens without RL weight (cross-entropy only) are masked"


def recognises(peek: FileHead) -> bool:
    if peek.source.kind != "jsonl":
        return False
    return _is_export(peek) or _traces.is_of_traces(peek.keys)


def _is_export(peek: FileHead) -> bool:
    return peek.has("token_ids", "inference_logprobs", "loss_mask")


def choose(sources: Sequence[DumpFile], tally: Tally) -> list[DumpFile]:
    """Of a run with both, the exports, which are not rounded; of traces the files that carry
    responses.
    """
    exports = [source for source in sources if _is_export(FileHead(source, keys_of(source)))]
    others = [source for source in sources if source not in exports]
    if not exports:
        return _traces.carriers(others)
    if others:
        tally.leave_out(BESIDE_EXPORTS, len(others), others[0].name)
    return exports


def carriers(sources: Sequence[DumpFile]) -> list[DumpFile]:
    """The files of a growing run whose new lines are new responses."""
    of_traces = [source for source in sources if _MONITORED.intersection(source.path.parts)]
    # Episodes become responses only once annotations of the trainer arrive.
    looked_up = set(of_traces)
    for source in _traces.carriers(of_traces):
        if _traces.ANNOTATIONS in source.path.parts:
            looked_up.discard(source)
    return [source for source in sources if source not in looked_up]


def blocks(
    sources: Sequence[DumpFile], tally: Tally, advance: Callable[[int], None]
) -> Iterator[tuple[pa.Table, str]]:
    for source in sources:
        if _traces.is_of_traces(keys_of(source)):
            yield from _traces.blocks(source, tally, advance)
            continue
        for table in jsonl_tables(source, _SCHEMA, tally, advance):
            yield _block(table, tally, source.name), source.name


def _block(table: pa.Table, tally: Tally, where: str) -> pa.Table:
    newest = pc.max(table.column("schema_version")).as_py() or _VERSION
    if newest > _VERSION:
        raise MismatchError(
            f"{where} has schema_version {newest}; this mismatch-cli reads {_VERSION}. Upgrade "
            "with: pip install --upgrade mismatch-cli"
        )
    columns = _lists.columns_of(table)
    mask, unseen_S = _with_rl_weight(columns)
    floats = {name: columns[its] for name, its in _FLOATS.items()}
    responses, keep_S = split_sequences(columns["token_ids"], mask, floats, tally, where)
    responses[NOTE + UNWEIGHED] = pa.array(unseen_S[keep_S])
    responses["step"] = columns["step"].filter(pa.array(keep_S))
    return pa.table(responses)


def _with_rl_weight(columns: dict[str, pa.Array]) -> tuple[pa.Array, np.ndarray]:
    """The loss mask without tokens outside RL loss and reference KL, and their number in each
    row.
    """
    mask = columns["loss_mask"]
    lengths_S = _lists.lengths_of(mask)
    mask_T = _lists.flat(mask).astype(bool)
    # By default a token has an RL weight of 1, and none of a reference KL.
    rl_T, kl_T = (
        _weights(columns[name], lengths_S, default)
        for name, default in zip(_WEIGHTS, (1.0, 0.0), strict=True)
    )
    unseen_T = mask_T & (rl_T == 0) & (kl_T == 0)
    if not unseen_T.any():
        return mask, np.zeros(len(mask), np.int64)
    row_T = _lists.rows_of(lengths_S)[unseen_T]
    unseen_S = np.bincount(row_T, minlength=len(mask)).astype(np.int64)
    # In Arrow, so that a null flag stays one, for which its row is left out.
    flags = pc.and_not(mask.flatten(), pa.array(unseen_T))
    return _lists.from_flat(flags, lengths_S, _lists.is_null(mask)), unseen_S


def _weights(column: pa.Array, lengths_S: np.ndarray, default: float) -> np.ndarray:
    """A weight for each token of these lengths: the default where it is null, and in rows whose
    weights are not one per token.
    """
    weights_T = np.full(int(lengths_S.sum()), default, np.float32)
    own_S = _lists.lengths_of(column)
    fits_S = own_S == lengths_S
    values_T = _lists.flat(column)[np.repeat(fits_S, own_S)]
    weights_T[np.repeat(fits_S, lengths_S)] = np.nan_to_num(values_T, nan=default)
    return weights_T


def being_written(paths: Sequence[Path]) -> set[Path]:
    """The files of steps that are not marked as STABLE, as a step is once every rank has written
    it; none if no step is marked, as in a copy without the marks.
    """
    of_steps = [path for path in paths if path.parent.name.startswith("step_")]
    unmarked = {path for path in of_steps if not (path.parent / _STABLE).exists()}
    return unmarked if len(unmarked) < len(of_steps) else set()


def unfinished(sources: Sequence[DumpFile]) -> str:
    """Why the dump is incomplete; empty if it is not."""
    paths = being_written([source.path for source in sources])
    steps = sorted({path.parent.name for path in paths})
    if not steps:
        return ""
    return f"steps without a STABLE file: {len(steps):,}, the first {steps[0]}"
