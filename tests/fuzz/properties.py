"""Properties for any input: no traceback, no hang, no code executed, nothing lost, no terminal
escapes.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st

from tests.fuzz import hostile_masks
from tests.fuzz import strategies as of
from tests.fuzz.command_lines import command_lines
from tests.fuzz.world import CANARY, STOPPED, Outcome, call, copy, template

CODES = {
    0: "done",
    1: "refused (1)",
    2: "usage (2)",
    3: "limit exceeded (3)",
    130: "interrupted (130)",
}
_HARMFUL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_VERBS = (
    "Add Allow Available Call Change Check Choose Copy Delete Example Export Fix Formats Free "
    "Give Go Install Keep Leave Look Make Mend Move Name Pass Raise Record Remove Rename Repair "
    "Replace Report Restore Resume Run Save Say See Set Start Try Upgrade Use Wait Write"
)
_ADVICE = re.compile(rf"--\w|mismatch-cli \w|Did you mean|\b({'|'.join(_VERBS.split())})\b")


@dataclass(frozen=True)
class Kind:
    """A kind of input: how to draw a case, and how to try it, which returns the outcome in
    words.
    """

    cases: st.SearchStrategy[Any]
    check: Callable[[Any], str]


def judge(outcome: Outcome, folder: Path) -> str:
    """The properties of every command line."""
    said = outcome.out + outcome.err
    assert outcome.code in CODES, f"exit code {outcome.code!r}: {outcome.err[-500:]}"
    assert "Traceback" not in said and "This is a bug" not in said, outcome.err[-300:]
    harmful = _HARMFUL.search(said)
    if harmful:
        around = said[max(0, harmful.start() - 80) :][:160]
        raise AssertionError(f"{harmful!r} in the output: {around!r}")
    if outcome.code in (1, 2):
        _check_message(outcome)
    assert not (folder / CANARY).exists(), "something was executed"
    _check_nothing_lost(outcome)
    for path in folder.rglob("report.html"):
        page = path.read_text(encoding="utf-8")
        assert of.PAYLOAD not in page and "<img src=x" not in page, (
            "the data's markup is in the page"
        )
    return "reached a model (1)" if STOPPED in outcome.err else CODES[outcome.code]


def _check_message(outcome: Outcome) -> None:
    lines = outcome.err.strip().splitlines()
    assert lines, "no message"
    if lines[0].startswith(("Usage:", "Error: ")):
        return
    assert lines[-1].startswith("mismatch-cli: "), f"the last line is not a message: {lines[-1]!r}"
    assert _ADVICE.search(lines[-1]), f"nothing to type next: {lines[-1]!r}"


def _check_nothing_lost(outcome: Outcome) -> None:
    """Existing files are unchanged; with --force, those at the output's location may be
    replaced.
    """
    replaced = _outputs(outcome.arguments) if "--force" in outcome.arguments else []
    for name, content in outcome.before.items():
        if not any(name == path or name.startswith(f"{path}/") for path in replaced):
            assert outcome.after.get(name) == content, f"{name} has changed or is gone"
    if "existing/precious.txt" not in replaced:
        assert "existing/precious.txt" in outcome.after
    for name in outcome.after.keys() - outcome.before.keys():
        assert not name.startswith(".."), f"{name} lies outside"


def _outputs(arguments: Any) -> list[str]:
    flags = ("--output", "-o", "--junit", "--markdown")
    named = [value for flag, value in pairwise(arguments) if flag in flags]
    return [str(Path(value)) for value in named] + ["run", "probe-model", "import-plain"]


def try_arguments(line: list[str]) -> str:
    with copy() as folder:
        return judge(call(folder, *line), folder)


@st.composite
def prompt_files(draw: st.DrawFn) -> tuple[str, bytes, list[str]]:
    name = of.pick(
        draw, "prompts.jsonl", "prompts.jsonl", "prompts.json", "prompts.csv", "prompts.parquet"
    )
    content = (template() / name).read_bytes()
    if name.endswith(".parquet"):
        content = draw(parquet_bytes(content))
    elif name.endswith(".jsonl"):
        content = draw(of.changed_jsonl(content))
    else:
        content = draw(of.changed_bytes(content))
    command = of.pick(draw, ["probe", "--prompts"], ["curate", "--prompts"], ["train", "--dataset"])
    return name, content, command


@st.composite
def parquet_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    if draw(st.integers(0, 3)) == 0:
        return draw(of.changed_bytes(content))
    sink = io.BytesIO()
    try:
        pq.write_table(draw(of.changed_table(pq.read_table(io.BytesIO(content)))), sink)
    except (pa.ArrowException, UnicodeError):
        return content[:100]
    return sink.getvalue()


def try_prompts(case: tuple[str, bytes, list[str]]) -> str:
    name, content, command = case
    with copy() as folder:
        (folder / name).write_bytes(content)
        return judge(call(folder, *command, name, "--output", "new"), folder)


READERS = (
    ["report", "run", "--output", "new"],
    ["report", "run", "--as", "all"],
    ["report", "run", "--output", "new", "--export", "jsonl"],
    ["report", "run", "--output", "new", "--export", "csv"],
    ["report", "run", "--output", "new", "--json"],
    ["clipstats", "run", "-a", "dppo-topk-tv", "-a", "gspo", "--theory", "--output", "new"],
    ["gate", "run", "--limits", "limits.toml"],
    ["compare", "run", "other", "--output", "new"],
    ["diagnose", "run", "--output", "new"],
    ["rescore", "run", "--trainer-model", "{model}", "--output", "new"],
    ["probe", "--resume", "--output", "run"],
)


@st.composite
def manifests(draw: st.DrawFn) -> tuple[str, bytes, list[str]]:
    content = (template() / "run/trace/manifest.json").read_bytes()
    record = json.loads(content) | {"flags": {"model": "x", "engine": "hf"}, "command": "probe"}
    if draw(st.integers(0, 3)):
        changed = draw(of.changed_record(record))
        content = json.dumps(changed).encode(errors="surrogatepass")
    else:
        content = draw(of.changed_bytes(content))
    return "run/trace/manifest.json", content, of.pick(draw, *READERS)


@st.composite
def shards(draw: st.DrawFn) -> tuple[str, bytes, list[str]]:
    name = of.pick(
        draw, "shard-00000.parquet", "shard-00000.parquet", "shard-00001.parquet", "vocab.parquet"
    )
    content = draw(parquet_bytes((template() / "run/trace" / name).read_bytes()))
    return f"run/trace/{name}", content, of.pick(draw, *READERS)


def try_trace(case: tuple[str, bytes, list[str]]) -> str:
    from mismatch_cli.base.places import bundled

    name, content, command = case
    with copy() as folder:
        (folder / name).write_bytes(content)
        return judge(
            call(folder, *(part.format(model=bundled("model")) for part in command)), folder
        )


class Payload:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (CANARY, "w")


@st.composite
def dumps(draw: st.DrawFn) -> tuple[str, bytes, str | None]:
    """A file of a dump, its new content, and the format that the user names, if any."""
    files = sorted(path for path in (template() / "dumps").rglob("*") if path.is_file())
    path = of.pick(draw, *files)
    content = path.read_bytes()
    if path.suffix == ".jsonl":
        content = draw(of.changed_jsonl(content))
    elif path.suffix == ".parquet":
        content = draw(parquet_bytes(content))
    else:
        content = draw(_torch_bytes(path, content))
    formats = ("plain", "prime-rl", "nemo-rl", "slime", "miles", "open-instruct")
    named = of.pick(draw, None, None, None, *formats)
    return str(path.relative_to(template())), content, named


@st.composite
def _torch_bytes(draw: st.DrawFn, path: Path, content: bytes) -> bytes:
    how = of.pick(draw, "content", "content", "content", "bytes", "payload", "zip", "old")
    if how == "bytes":
        return draw(of.changed_bytes(content))
    if how == "zip":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(
                of.pick(draw, "archive/data.pkl", "../../up", "data.pkl"),
                draw(st.binary(max_size=40)),
            )
        return buffer.getvalue()
    buffer = io.BytesIO()
    changed = (
        {"samples": [Payload()], "rollout_id": 0}
        if how == "payload"
        else draw(of.changed_content(torch.load(path, weights_only=True)))
    )
    try:
        torch.save(changed, buffer, _use_new_zipfile_serialization=how != "old")
    except (NotImplementedError, RuntimeError, UnicodeError):
        return content
    return buffer.getvalue()


def try_dump(case: tuple[str, bytes, str | None]) -> str:
    name, content, named = case
    with copy() as folder:
        (folder / name).write_bytes(content)
        line = ["import", str(Path(*Path(name).parts[:2])), "--output", "new", "--json"]
        outcome = call(folder, *line, *(["--format", named] if named else []))
        answer = judge(outcome, folder)
        if outcome.code == 0:
            _check_counts(outcome.json, folder / name)
            read = judge(call(folder, "report", "new", "--as", "all"), folder)
            answer += f", then {read}"
        return answer


def _check_counts(imported: dict[str, Any], path: Path) -> None:
    """All given rows are in the trace, or left out for a reason."""
    if path.suffix == ".jsonl":
        rows = sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
    elif path.suffix == ".parquet":
        rows = pq.read_metadata(path).num_rows
    else:
        samples = torch.load(path, weights_only=True)["samples"]
        rows = len(samples)
    left_out = sum(
        n
        for reason, n in imported["left_out"].items()
        if not reason.startswith(("columns", "files"))
    )
    counted = imported["rows"] + left_out
    assert counted == rows, (
        f"{rows} given, {imported['rows']} imported, left out: {imported['left_out']}"
    )


SETTINGS = (
    ("limits.toml", ["gate", "run", "--limits", "limits.toml"]),
    (
        "limits.toml",
        ["gate", "run", "--limits", "limits.toml", "--junit", "new.xml", "--markdown", "new.md"],
    ),
    ("preset.toml", ["train", "--preset", "preset.toml", "--output", "new"]),
    ("preset.toml", ["train", "--preset", "preset.toml", "--show-config"]),
    ("training/config.toml", ["train", "--resume", "--output", "training"]),
    ("training/config.toml", ["report", "training", "--output", "new"]),
    ("training/metrics.jsonl", ["report", "training", "--output", "new"]),
    ("training/metrics.jsonl", ["report", "training", "--output", "new", "--json"]),
    ("mask.py", ["clipstats", "run", "-a", "mask.py", "--output", "new"]),
)


@st.composite
def settings(draw: st.DrawFn) -> tuple[str, bytes, list[str]]:
    name, command = of.pick(draw, *SETTINGS)
    content = (template() / name).read_bytes()
    if name.endswith(".jsonl"):
        return name, draw(of.changed_jsonl(content)), command
    if name.endswith(".toml") and draw(st.integers(0, 2)):
        lines = content.decode().splitlines()
        at = draw(st.integers(0, len(lines) - 1))
        key = lines[at].split("=")[0]
        value = of.pick(
            draw,
            "nan",
            "inf",
            "-1",
            "1e400",
            "true",
            "[]",
            "{}",
            '"\\u001b[31m"',
            "9" * 40,
            '""',
            "0",
        )
        lines[at] = of.pick(
            draw,
            f"{key}= {value}",
            "",
            f"x{lines[at]}",
            lines[at] + "\n" + lines[at],
            "[[limits.k3]]",
        )
        return name, "\n".join(lines).encode(), command
    return name, draw(of.changed_bytes(content)), command


def try_mask(case: tuple[str, bool]) -> str:
    outcome, wrong = hostile_masks.run_beside(case)
    assert not wrong, wrong
    return judge(outcome, Path("gone"))


KINDS = {
    "arguments": Kind(command_lines(), try_arguments),
    "prompt files": Kind(prompt_files(), try_prompts),
    "manifests": Kind(manifests(), try_trace),
    "shards": Kind(shards(), try_trace),
    "dumps": Kind(dumps(), try_dump),
    "settings": Kind(settings(), try_trace),
    "masks": Kind(hostile_masks.masks(), try_mask),
}
