"""A run of prime-rl as its file monitor writes it: episodes, annotations, indexes, sealed chunks."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.frameworks.importing.layouts import Row

_FRAME = 700  # bytes of content, so that lines span frames
_SKIPPED, _MAGIC = 0x184D2A5E, 0x8F92EAB1


def node(role: str, token_ids: list[int], logprobs: Sequence[float] = (), **more: Any) -> Row:
    """A message, sampled if it has log-probs."""
    mask = [bool(logprobs)] * len(token_ids)
    columns = {"token_ids": token_ids, "mask": mask, "logprobs": [*logprobs]}
    return {"message": {"role": role, "content": "1 + 1?"}} | columns | more


def trace_of(row: Row, name: str) -> Row:
    """A conversation of one turn, whose second branch ends at a message that nobody sampled."""
    nodes = [
        node("user", row["prompt_ids"]),
        node("assistant", row["response_ids"], row["logp_rollout"], parent=0, sampled=True),
        node("user", [5, 6], parent=0),
    ]
    return {
        "version": 3,
        "id": name,
        "task": {"type": "math", "data": {}},
        "nodes": nodes,
        "calls": [{"node": 1, "finish_reason": row["finish_reason"]}],
        "rewards": {"correct": {"score": row["reward"], "weight": 1.0}},
        "info": {"kind": "train", "arrival": {"step": row["step"] + 1, "time": 1.0}},
    }


def episode_of(row: Row, name: str) -> Row:
    return {
        "id": f"e{name}",
        "env": {"id": "math"},
        "task": {"type": "math", "data": {}},
        "run": {"type": "train", "id": "r", "work": {"type": "train", "step": row["step"]}},
        "ok": True,
        "traces": [trace_of(row, name)],
    }


def annotation(row: Row, name: str, before: float | None, info: Row, **columns: Any) -> Row:
    """Columns of the response, with `before` at each token of the prompt."""
    prompt = [before] * len(row["prompt_ids"])
    branch = {"index": 0} | {its: prompt + values for its, values in columns.items()}
    return {"version": 1, "trace_id": name, "info": info, "branches": [branch]}


def shipped(row: Row, name: str) -> Row:
    """The orchestrator's annotation: the step that a trace is trained in, and its credit."""
    info = {"effective": True, "ship": {"step": row["step"], "time": 2.0}}
    return annotation(row, name, 0.0, info, advantages=row["advantage"])


def trained(row: Row, name: str) -> Row:
    """The trainer's annotation: null outside the loss."""
    return annotation(
        row,
        name,
        None,
        {},
        trainer_logprobs=row["logp_trainer"],
        entropies=row["entropy_trainer"],
        is_masked=[False] * len(row["response_ids"]),
    )


class Run:
    """Appends to the files of a run."""

    def __init__(self, folder: Path, *, index: bool = True) -> None:
        self.traces = folder / "monitors" / "file" / "traces"
        self._index = index
        self.chunk = 0

    def write(self, rows: Sequence[Row], first: int = 0) -> None:
        """Episodes, then what the orchestrator and the trainer add to them."""
        for number, row in enumerate(rows, first):
            self.append("stream", [episode_of(row, f"t{number}")])
            self.append("annotations/orchestrator", [shipped(row, f"t{number}")])
            self.append("annotations/trainer", [trained(row, f"t{number}")])

    def append(self, stream: str, records: Sequence[Row]) -> None:
        folder = self.traces / stream
        folder.mkdir(parents=True, exist_ok=True)
        index = folder.with_name(f"{folder.name}.index.jsonl")
        with (folder / f"{self.chunk:05d}.jsonl").open("ab") as file:
            for record in records:
                place = {"chunk": self.chunk, "offset": file.tell()}
                about = {"trace_id": record.get("trace_id"), "info": record.get("info")}
                if "traces" in record:
                    about = {"line": 1, "trace_ids": [trace["id"] for trace in record["traces"]]}
                if self._index:
                    with index.open("a") as lines:
                        lines.write(json.dumps(about | place) + "\n")
                file.write(json.dumps(record).encode() + b"\n")

    def seal(self) -> None:
        """Compress the chunks, and begin the next ones."""
        for path in self.traces.rglob("[0-9]*.jsonl"):
            path.with_name(f"{path.name}.zst").write_bytes(sealed(path.read_bytes()))
            path.unlink()
        self.chunk += 1


def sealed(content: bytes) -> bytes:
    """Content as a seekable file: frames, and their table in a frame that decoders skip."""
    parts = [content[start : start + _FRAME] for start in range(0, len(content), _FRAME)]
    frames = [bytes(pa.Codec("zstd").compress(part)) for part in parts]
    sizes = zip(map(len, frames), map(len, parts), strict=True)
    table = b"".join(struct.pack("<II", *pair) for pair in sizes)
    table += struct.pack("<IBI", len(frames), 0, _MAGIC)
    return b"".join(frames) + struct.pack("<II", _SKIPPED, len(table)) + table
