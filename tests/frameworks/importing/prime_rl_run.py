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


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def trace_of(row: Row, name: str) -> dict[str, Any]:
    """A conversation of one turn, whose second branch ends at a message that nobody sampled."""
    nodes = [
        {
            "message": {"role": "user", "content": "1 + 1?"},
            "token_ids": row["prompt_ids"],
            "mask": [False] * len(row["prompt_ids"]),
            "logprobs": [],
        },
        {
            "parent": 0,
            "message": {"role": "assistant", "content": "2"},
            "sampled": True,
            "token_ids": row["response_ids"],
            "mask": [True] * len(row["response_ids"]),
            "logprobs": rounded(row["logp_rollout"]),
        },
        {
            "parent": 0,
            "message": {"role": "user", "content": "?"},
            "token_ids": [5, 6],
            "mask": [False, False],
            "logprobs": [],
        },
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


def episode_of(row: Row, name: str) -> dict[str, Any]:
    return {
        "id": f"e{name}",
        "env": {"id": "math"},
        "task": {"type": "math", "data": {}},
        "run": {"type": "train", "id": "r", "work": {"type": "train", "step": row["step"]}},
        "ok": True,
        "traces": [trace_of(row, name)],
    }


def shipped(row: Row, name: str) -> dict[str, Any]:
    """The orchestrator's annotation: the step that a trace is trained in, and its credit."""
    before = [0.0] * len(row["prompt_ids"])
    advantages = before + rounded(row["advantage"])
    info = {"effective": True, "ship": {"step": row["step"], "time": 2.0}}
    branches = [{"index": 0, "advantages": advantages}]
    return {"version": 1, "trace_id": name, "info": info, "branches": branches}


def trained(row: Row, name: str) -> dict[str, Any]:
    """The trainer's annotation: null outside the loss."""
    before = [None] * len(row["prompt_ids"])
    streams = {
        "trainer_logprobs": before + rounded(row["logp_trainer"]),
        "entropies": before + rounded(row["entropy_trainer"]),
        "is_masked": [*before, *[False] * len(row["response_ids"])],
    }
    branches = [{"index": 0, **streams}]
    return {"version": 1, "trace_id": name, "info": {}, "branches": branches}


class Run:
    """Appends to the files of a run."""

    def __init__(self, folder: Path, *, index: bool = True) -> None:
        self.traces = folder / "monitors" / "file" / "traces"
        self._index = index
        self.chunk = 0

    def write(self, rows: Sequence[Row], first: int = 0) -> None:
        """Episodes, then what the orchestrator and the trainer add to them."""
        names = [f"t{first + number}" for number in range(len(rows))]
        pairs = list(zip(rows, names, strict=True))
        self.append("stream", [episode_of(*pair) for pair in pairs])
        self.append("annotations/orchestrator", [shipped(*pair) for pair in pairs])
        self.append("annotations/trainer", [trained(*pair) for pair in pairs])

    def append(self, stream: str, records: Sequence[dict[str, Any]]) -> None:
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
