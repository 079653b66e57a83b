"""The cost of files that expand far beyond their size: peak memory and seconds of real commands,
file by file.

    python -m lab.bounds [--only NAME] [--program mismatch-cli]

The bound for an import is 1 GiB + 20 × the file size beyond what an ordinary import of a small file
takes.
"""

from __future__ import annotations

import argparse
import io
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from mismatch_cli.base.memory import allowance
from mismatch_cli.base.places import bundled

_LONG, _KILL_AFTER = 10**5, 180.0
_MEGABYTE = 2**20


def lists(rows: int, length: int, kind: type) -> pa.Array:
    """The same value repeated: a few bytes in Parquet."""
    offsets = pa.array(np.arange(rows + 1) * length, pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(np.zeros(rows * length, kind)))


def responses(rows: int, length: int) -> pa.Table:
    ids = {"prompt_ids": lists(rows, 1, np.int32), "response_ids": lists(rows, length, np.int32)}
    return pa.table(ids | {"logp_rollout": lists(rows, length, np.float32)})


def repeated(text: str, rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([text]))


def written(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def record(inside: str) -> bytes:
    return f'{{"prompt_ids":[1],"response_ids":[{inside}1],"logp_rollout":[-1]}}\n'.encode()


def sample(length: int) -> dict[str, Any]:
    ids, logp = torch.zeros(1, dtype=torch.int64).expand(length), torch.zeros(1).expand(length - 1)
    return {
        "tokens": ids,
        "response_length": length - 1,
        "rollout_log_probs": logp,
        "loss_mask": logp,
    }


def saved(samples: list[Any]) -> bytes:
    sink = io.BytesIO()
    torch.save({"rollout_id": 0, "samples": samples}, sink)
    return sink.getvalue()


def packed(content: bytes) -> bytes:
    sink = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as source,
        zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return sink.getvalue()


def many_lists(count: int) -> bytes:
    """A pickle of one byte per empty list, each of which is an object."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02(" + pickle.EMPTY_LIST * count + b"l.")
        archive.writestr("archive/version", "3\n")
    return sink.getvalue()


DUMPS: dict[str, Callable[[], bytes]] = {
    "10 rows (ordinary).parquet": lambda: written(responses(10, 100)),
    "1,000 rows × 100,000 ids.parquet": lambda: written(responses(1000, _LONG)),
    "one row of 100,000,000 ids.parquet": lambda: written(responses(1, 1000 * _LONG)),
    "30 rows × 1,000,000 ids, within the bound.parquet": lambda: written(responses(30, 10 * _LONG)),
    "20,000,000 rows of one id.parquet": lambda: written(responses(20_000_000, 1)),
    "3,000,000 rows of one id, within the bound.parquet": lambda: written(responses(3_000_000, 1)),
    "a text of 10 MB in 1,000 rows.parquet": lambda: written(
        responses(1000, 100).append_column("finish_reason", repeated("x" * 10**7, 1000))
    ),
    "a line of 240 MB.jsonl": lambda: record("[]," * 80_000_000),
    "a line of 48 MB, empty lists.jsonl": lambda: record("[]," * 16_000_000),
    "a line of 48 MB, empty objects.jsonl": lambda: record("{}," * 16_000_000),
    "a tensor of 10^9 ids, stored once.pt": lambda: saved([sample(10**9)]),
    "10,000 × the same sample.pt": lambda: saved([sample(_LONG)] * 10_000),
    "a packed record of 800 MB.pt": lambda: packed(
        saved([{"tokens": torch.zeros(10**8, dtype=torch.int64)}])
    ),
    "30,000,000 empty lists.pt": lambda: many_lists(30_000_000),
}


def measure(command: list[str], folder: Path) -> tuple[int, float, float, str]:
    """Exit code, seconds, peak memory in MB, and the last line of stderr."""
    began = time.monotonic()
    with (folder / "said").open("w+b") as said:
        child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=said)
        peak = 0.0
        while child.poll() is None:
            # The mark never falls, so the last look before the end sees the peak but for 5 ms
            peak = max(peak, high_water(child.pid))
            time.sleep(0.005)
            if time.monotonic() - began > _KILL_AFTER:
                child.kill()
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    return child.returncode, time.monotonic() - began, peak, lines[-1] if lines else ""


def high_water(pid: int) -> float:
    """The peak memory of a process in MB, without its parent's, which getrusage would count."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def trace_of(content: bytes, folder: Path) -> Path:
    """The bundled trace with its first shard replaced."""
    shutil.copytree(bundled("traces") / "fp8-kv", folder)
    shard = min(folder.glob("shard-*.parquet"))
    schema = pq.read_schema(shard)
    table = pq.read_table(io.BytesIO(content))
    rows, length = len(table), len(table.column("response_ids")[0])
    columns = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        if name in table.column_names:
            columns.append(table.column(name))
        elif name == "loss_mask":
            columns.append(lists(rows, length, np.bool_))
        elif pa.types.is_integer(kind):
            columns.append(pa.array(np.arange(rows), kind))
        elif pa.types.is_string(kind):
            columns.append(pa.array(["stop"] * rows))
        else:
            columns.append(pa.nulls(rows, kind))
    pq.write_table(pa.table(columns, schema=schema), shard, compression="zstd")
    return folder


PROMPTS: dict[str, Callable[[], bytes]] = {
    "a text of 1 MB in 100,000 rows.parquet": lambda: written(
        pa.table({"problem": repeated("x" * 10**6, 100_000)})
    ),
    "16,000,000 empty lists.json": lambda: b"[" + b"[]," * 16_000_000 + b"1]",
}
TRACES = {"1,000 rows × 100,000 ids": 1000, "150 rows × 100,000 ids, within": 150}


def cases(program: str, folder: Path, only: str) -> Iterator[tuple[str, int, list[str]]]:
    """Each case's name, the size of its file, and its command; the file exists until the next."""
    out = ["-o", str(folder / "out")]
    for name, make in DUMPS.items():
        if only in f"import: {name}":
            path = folder / name
            path.write_bytes(make())
            yield f"import: {name}", path.stat().st_size, [program, "import", str(path), *out]
            path.unlink()
    for name, make in PROMPTS.items():
        if only in f"prompts: {name}":
            path = folder / f"prompts.{name.rsplit('.')[-1]}"
            path.write_bytes(make())
            flags = ["--prompts", str(path), "--engine", "hf", *out]
            yield f"prompts: {name}", path.stat().st_size, [program, "probe", *flags]
    for name, rows in TRACES.items():
        if only in f"trace: {name}":
            trace = trace_of(written(responses(rows, _LONG)), folder / "trace")
            size = min(trace.glob("shard-*.parquet")).stat().st_size
            yield f"report: {name}", size, [program, "report", str(trace), *out]
            shutil.rmtree(trace)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--program", default=str(Path(sys.executable).with_name("mismatch-cli")))
    options = parser.parse_args()
    print(f"{'':<58}{'file':>12}{'code':>6}{'seconds':>9}{'peak MB':>9}{'1 GiB + 20 ×':>14}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, size, command in cases(options.program, folder, options.only):
            code, seconds, peak, said = measure(command, folder)
            shutil.rmtree(folder / "out", ignore_errors=True)
            bound = allowance(size) / _MEGABYTE
            print(
                f"{name:<58}{size:>12,}{code:>6}{seconds:>9.1f}{peak:>9.0f}{bound:>14.0f}  "
                f"{said[:200]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
