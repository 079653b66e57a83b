"""prime-rl's traces: episodes as they arrive, and what is learned of them later, joined again.

Written by its file monitor since pull request 3444 (31 August 2026), in chunks that are sealed with
zstd since 3465; read in `src/prime_rl/monitors/file/` (048a6e23), `trainer/rl/annotations.py`
(65a18584), `orchestrator/annotations.py` (96e0cf47), and verifiers 0.4.0. An episode has traces,
each a tree of messages (`nodes`) of which every leaf ends a branch: one sequence. An annotation
names a trace and a branch, and has a value for each token of the sequence, null outside the loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing import SEALED, opened
from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.rows import NOTE, split_sequences
from mismatch_cli.frameworks.importing.sources import (
    TOKENS_PER_BLOCK,
    DumpFile,
    lines_of,
    records_of,
)
from mismatch_cli.trace.columns import COLUMNS
from mismatch_cli.trace.foreign_values import WRONG_TYPE, WRONG_VALUE

STREAM, ANNOTATIONS, INDEX = "stream", "annotations", ".index.jsonl"
NO_EPISODE = "trained sequences whose episode is not in traces/stream"
NO_SAMPLED = "branches without a sampled token"
EVALUATED = "episodes of evaluations"
UNREADABLE = "records that are not those of a trace"
ROUNDED = (
    "responses have log-probabilities rounded to 4 decimals (monitors.file.float_decimals): "
    "differences below 1e-4 nats are not resolved, and probabilities above 0.99995 are stored as 1"
)
_DECIMALS = 4
_NEAR = 1e-6  # of a multiple of the last decimal, in units of it
_VERSION = 1
_STREAMS = {
    "logp_rollout": "logprobs",
    "logp_trainer": "trainer_logprobs",
    "entropy_trainer": "entropies",
    "advantage": "advantages",
}
_LIMITS = frozenset(
    {"max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed"}
)
Record = dict[str, Any]
_NOT_OF_A_TRACE = (WRONG_VALUE, WRONG_TYPE, OverflowError)  # what Arrow raises for such values


_FLOATS = pa.list_(pa.float64())
_OF_ROWS = ("reward", "step", "finish_reason")
_KINDS = {
    "ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.bool_()),
    "of_tokens": pa.struct(dict.fromkeys(_STREAMS, _FLOATS).items()),
    **{name: COLUMNS[name].type for name in _OF_ROWS},
}


class _TraceFacts(NamedTuple):
    """What is recorded of a trace: its episode, itself, and what other producers say of it."""

    episode: Record
    trace: Record
    annotations: Sequence[Record] = ()


class _Sequence(NamedTuple):
    """A branch, with a value for each of its tokens; None where a column was not recorded."""

    ids: list[int]
    loss_mask: list[bool]
    of_tokens: dict[str, list[float | None] | None]  # under our names
    reward: float | None
    step: int
    finish_reason: str | None


def is_of_traces(keys: frozenset[str]) -> bool:
    """Whether a first record is an episode, a trace, an annotation, or a line of an index."""
    is_annotation = keys >= {"trace_id", "info"} and not keys.isdisjoint(("branches", "chunk"))
    records = ({"traces", "task"}, {"nodes", "task"}, {"trace_ids", "chunk", "offset"})
    return is_annotation or any(map(keys.issuperset, records))


def carriers(sources: Sequence[DumpFile]) -> list[DumpFile]:
    """The files whose lines become responses: the trainer's annotations, or, without any, the
    episodes. The others are looked up by them.
    """
    episodes: list[DumpFile] = []
    trained: list[DumpFile] = []
    for source in sources:
        if source.name.endswith(INDEX):
            continue
        folder, _ = _place(source.path)
        if folder == STREAM:
            episodes.append(source)
        elif _has_trainer(source.path):
            trained.append(source)
    return trained or episodes


def _place(path: Path) -> tuple[str, Path]:
    """Which part of `traces/` a file belongs to, and the folder of `traces/`."""
    folder = path.parent
    if folder.parent.name == ANNOTATIONS:
        return ANNOTATIONS, folder.parent.parent
    if folder.name == ANNOTATIONS:  # before there were chunks
        return ANNOTATIONS, folder.parent
    return STREAM, folder.parent if folder.name == STREAM else folder


def _has_trainer(path: Path) -> bool:
    """Whether a file holds the trainer's annotations, by its first record with a branch."""
    for record in records_of(path):
        branches = record.get("branches")
        if isinstance(branches, list) and branches:
            return any("trainer_logprobs" in branch for branch in branches)
    return False


def blocks(
    source: DumpFile, tally: Tally, advance: Callable[[int], None]
) -> Iterator[tuple[pa.Table, str]]:
    """Tables of the sequences of a file, in the order of its lines."""
    part, root = _place(source.path)
    sequences_of = _Join(root).sequences if part == ANNOTATIONS else _sequences_of_episode
    sequences: list[_Sequence] = []
    tokens = 0
    for number, line in enumerate(lines_of(source.path, source.span), 1):
        where = f"{source.name}, line {number}"
        try:
            for sequence in sequences_of(orjson.loads(line), tally, where):
                sequences.append(sequence)
                tokens += len(sequence.ids)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            tally.leave_out(UNREADABLE, 1, where)
        advance(len(line))
        if tokens >= TOKENS_PER_BLOCK:
            yield _table(sequences, tally, source.name), source.name
            sequences = []
            tokens = 0
    if sequences:
        yield _table(sequences, tally, source.name), source.name


class _Join:
    """Finds the episode of an annotation, and what other producers say of its trace."""

    def __init__(self, root: Path) -> None:
        self._episodes = _Stream(root / STREAM)
        folder = root / ANNOTATIONS
        # A hidden file, as systems leave in folders, is no producer's.
        names = {path.name.split(".")[0] for path in folder.iterdir()} - {""}
        streams = map(_Stream, map(folder.joinpath, sorted(names)))
        self._others = [stream for stream in streams if not stream.has_trainer]
        if not self._episodes.files:
            raise MismatchError(
                f"{root} has annotations, but not the episodes that they describe. Copy "
                f"{root / STREAM} too."
            )

    def sequences(self, update: Record, tally: Tally, where: str) -> list[_Sequence]:
        """The branches of an update, each with its trace."""
        if update.get("version", _VERSION) > _VERSION:
            raise MismatchError(
                f"{where} has version {update['version']}; this mismatch-cli reads {_VERSION}. "
                "Upgrade with: pip install --upgrade mismatch-cli"
            )
        facts = self._facts(update["trace_id"])
        if facts is None:
            tally.leave_out(NO_EPISODE, len(update["branches"]), where)
            return []
        others: dict[int, list[Record]] = defaultdict(list)
        for annotation in facts.annotations:
            for branch in annotation.get("branches") or ():
                others[branch["index"]].append(branch)
        sequences: list[_Sequence] = []
        for branch in update["branches"]:
            index = branch["index"]
            # The update itself comes last: of a column that several have, its own counts.
            streams = [*others[index], branch]
            _append(sequences, _sequence(facts, index, streams), tally, where)
        return sequences

    def _facts(self, name: str) -> _TraceFacts | None:
        """What is recorded of the trace of this name; None without its episode."""
        episodes = self._episodes.records(name)
        every_trace = chain.from_iterable(map(_traces, episodes))
        traces = [trace for trace in every_trace if trace["id"] == name]
        if not traces:
            return None
        annotations = chain.from_iterable(stream.records(name) for stream in self._others)
        return _TraceFacts(episodes[-1], traces[-1], list(annotations))


class _Stream:
    """The records of one producer, by the traces that they name."""

    def __init__(self, folder: Path) -> None:
        self.files = _chunks(folder)
        self._index = folder.with_name(folder.name + INDEX)
        self._places: dict[str, list[tuple[Path, int]]] = {}
        self._read_to: dict[Path, int] = {}

    @property
    def has_trainer(self) -> bool:
        return bool(self.files) and _has_trainer(self.files[0])

    def records(self, name: str) -> list[Record]:
        """The records that name a trace, in the order in which they were written."""
        if name not in self._places:
            self._read_on()
        places = self._places.get(name, ())
        return [orjson.loads(opened.line_at(*place)) for place in places]

    def _read_on(self) -> None:
        """Read on where the records are: in the index, or in the records if there is none."""
        if self._index.is_file():
            for row, _ in self._new_rows(self._index):
                path = self._chunk(row.get("chunk"))
                if path is None:
                    continue
                for name in row.get("trace_ids") or [row.get("trace_id")]:
                    self._places.setdefault(name, []).append((path, row["offset"]))
            return
        for path in self.files:
            for record, start in self._new_rows(path):
                for name in _names(record):
                    self._places.setdefault(name, []).append((path, start))

    def _chunk(self, number: int | None) -> Path | None:
        """The file of a chunk, as it is now: one may have been sealed since. None if it is not
        there, as in a copy of the newest chunks.
        """
        if number is None:
            return self.files[0]
        chunks = (path for path in self.files if path.name.startswith(f"{number:05d}."))
        return next(chunks, None)

    def _new_rows(self, path: Path) -> Iterator[tuple[Record, int]]:
        """The whole lines that were not read before, with their places."""
        start = self._read_to.get(path, 0)
        for line in opened.lines(path, start):
            if not line.endswith(b"\n"):
                return  # still being written
            yield orjson.loads(line), start
            start += len(line)
            self._read_to[path] = start


def _chunks(folder: Path) -> list[Path]:
    """The files of a producer in order, or the only one from before there were chunks."""
    files = set(folder.glob("*.jsonl*")) if folder.is_dir() else set()
    # While it is sealed, a chunk may be there twice: as it was, and packed.
    chunks = [file for file in files if file.suffix != SEALED or file.with_suffix("") not in files]
    if chunks:
        return sorted(chunks)
    single = folder.with_name(f"{folder.name}.jsonl")
    return [single] if single.is_file() else []


def _names(record: Record) -> list[str]:
    """The traces that a record is about."""
    if "trace_id" in record:
        return [record["trace_id"]]
    return list(map(itemgetter("id"), _traces(record)))


def _traces(record: Record) -> list[Record]:
    """The traces of an episode; a line may also be a trace by itself."""
    traces: list[Record] = record.get("traces", [record])
    return traces


def _sequences_of_episode(record: Record, tally: Tally, where: str) -> list[_Sequence]:
    """The branches of an episode whose traces carry what is known of them."""
    if _kind(record) == "eval":
        tally.leave_out(EVALUATED, 1, where)
        return []
    sequences: list[_Sequence] = []
    for trace in _traces(record):
        for index in range(len(_branches(trace["nodes"]))):
            _append(sequences, _sequence(_TraceFacts(record, trace), index, []), tally, where)
    return sequences


def _append(
    sequences: list[_Sequence], sequence: _Sequence | None, tally: Tally, where: str
) -> None:
    """Append a branch; one without a token in the loss is counted."""
    if sequence is None:
        tally.leave_out(NO_SAMPLED, 1, where)
    else:
        sequences.append(sequence)


def _kind(record: Record) -> str:
    """The kind of work that an episode is: of its first trace, or else of its run."""
    work = _work(record)
    trace = next(iter(_traces(record)), {})
    kind = (trace.get("info") or {}).get("kind")
    return str(kind or work.get("type") or "")


def _work(record: Record) -> Record:
    work: Record = (record.get("run") or {}).get("work") or {}
    return work


def _sequence(
    facts: _TraceFacts, index: int, streams: Sequence[Mapping[str, Any]]
) -> _Sequence | None:
    """A branch of a trace with streams over its tokens, of which the last one that has a column
    counts; None without a token in the loss.
    """
    trace = facts.trace
    nodes = _branches(trace["nodes"])[index]
    of_tokens = {ours: _spread(nodes, its) for ours, its in _STREAMS.items()}
    for stream in streams:
        for ours, its in _STREAMS.items():
            if stream.get(its):
                of_tokens[ours] = stream[its]
    ids = _joined(nodes, "token_ids")
    # A sequence may have been cut for training: it ends where the trainer's values end.
    masks = chain.from_iterable(map(_mask_of, nodes))
    mask = zip(masks, of_tokens["logp_trainer"] or ids, strict=False)
    in_loss = [bool(is_sampled) and value is not None for is_sampled, value in mask]
    if not any(in_loss):
        return None
    size = len(in_loss)
    cut = {ours: values and values[:size] for ours, values in of_tokens.items()}
    return _Sequence(ids[:size], in_loss, cut, _reward(trace), _step(facts), _finish_reason(trace))


def _joined(nodes: Sequence[Record], name: str) -> list[Any]:
    """The lists of the nodes as one; a node without a list adds nothing."""
    return list(chain.from_iterable(node.get(name) or () for node in nodes))


def _mask_of(node: Record) -> list[bool]:
    """Which tokens of a node were sampled: none without a mask. A ValueError for one that is not as
    long as the tokens.
    """
    ids = node.get("token_ids") or ()
    mask: list[bool] = node.get("mask") or [False] * len(ids)
    if len(mask) != len(ids):
        raise ValueError("a mask does not have one flag per token")
    return mask


def _spread(nodes: Sequence[Record], name: str) -> list[float | None] | None:
    """The compact values of the sampled tokens at their places, None elsewhere; None without. A
    ValueError for a node that has another number of values.
    """
    if not any(node.get(name) for node in nodes):
        return None
    spread: list[float | None] = []
    for node in nodes:
        mask, values = _mask_of(node), node.get(name) or ()
        if values and any(mask) and len(values) != sum(map(bool, mask)):
            raise ValueError(f"{name} do not have one value per sampled token")
        rest = iter(values)
        for is_sampled in mask:
            spread.append(next(rest, None) if is_sampled else None)
    return spread


def _branches(nodes: Sequence[Record]) -> list[list[Record]]:
    """From root to leaf, the nodes of each branch, in the order of the leaves."""
    parents = [node.get("parent") for node in nodes]
    leaves = set(range(len(nodes))).difference(parents)
    branches: list[list[Record]] = []
    for leaf in sorted(leaves):
        path: list[int] = []
        place: int | None = leaf
        # A broken record may name its own descendant as a parent.
        while place is not None and place not in path:
            path.append(place)
            place = parents[place]
        branches.append([nodes[place] for place in reversed(path)])
    return branches


def _reward(trace: Record) -> float | None:
    """The weighted sum of a trace's rewards; None without one."""
    rewards = list(filter(None, (trace.get("rewards") or {}).values()))
    if not rewards:
        return None
    return sum(reward["score"] * reward.get("weight", 1.0) for reward in rewards)


def _step(facts: _TraceFacts) -> int:
    """The step that trained a trace, else that it arrived at, else that it was sampled for."""
    info: Record = {}
    for record in (facts.trace, *facts.annotations):
        info |= record.get("info") or {}
    stages = (info.get("ship"), info.get("arrival"), info.get("dispatch"), _work(facts.episode))
    for stage in stages:
        if stage and stage.get("step") is not None:
            return int(stage["step"])
    return 0


def _finish_reason(trace: Record) -> str | None:
    """ "length" for a trace that reached a limit; for others, how its last call ended."""
    if trace.get("stop_condition") in _LIMITS:
        return "length"
    calls = [call for call in trace.get("calls") or () if not call.get("error")]
    if not calls:
        return None
    reason: str | None = calls[-1].get("finish_reason")
    return reason


def _table(sequences: Sequence[_Sequence], tally: Tally, where: str) -> pa.Table:
    try:
        columns = _columns(sequences)
    except _NOT_OF_A_TRACE:
        fitting = list(filter(_fits, sequences))
        tally.leave_out(UNREADABLE, len(sequences) - len(fitting), where)
        sequences, columns = fitting, _columns(fitting)
    per_token = dict(zip(_STREAMS, columns["of_tokens"].flatten(), strict=True))
    responses, keep_S = split_sequences(
        columns["ids"], columns["loss_mask"], per_token, tally, where
    )
    of_rows = {name: columns[name] for name in _OF_ROWS}
    of_rows[NOTE + ROUNDED] = pa.array(map(_is_rounded, sequences), pa.bool_()).cast(pa.int64())
    return pa.table(responses | _lists.select_rows(of_rows, keep_S))


def _columns(sequences: Sequence[_Sequence]) -> dict[str, pa.Array]:
    """The fields of the sequences, in the types of a trace."""
    return {name: pa.array(map(attrgetter(name), sequences), kind) for name, kind in _KINDS.items()}


def _fits(sequence: _Sequence) -> bool:
    """Whether the values of a sequence have the types of a trace."""
    try:
        _columns([sequence])
    except _NOT_OF_A_TRACE:
        return False
    return True


def _is_rounded(sequence: _Sequence) -> bool:
    """Whether every log-probability is a multiple of 1e-4."""
    values: list[float] = []
    for name in ("logp_rollout", "logp_trainer"):
        values += [value for value in sequence.of_tokens.get(name) or () if value is not None]
    scaled = np.array(values) * 10**_DECIMALS
    return len(scaled) > 0 and bool((np.abs(scaled - np.round(scaled)) < _NEAR).all())
