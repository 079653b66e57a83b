"""What can go wrong with a folder, for `kills.py folders`: two processes at once, foreign files,
links, hostile models.

The two processes are real: the second starts at a moment uniform in the run time of the first.
Afterwards the folder must have all that the last command said it wrote, complete. The other classes
are those of the tests (tests/trace/test_folder.py, tests/base/test_custom_code.py), each command
with each case: foreign files stay the same bit by bit, nothing is executed, and there is no
traceback.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from lab.broken import half_files, left_over
from mismatch_cli.app.cli import run as cli
from mismatch_cli.base.places import bundled
from mismatch_cli.trace.reader import Trace
from tests.base.test_custom_code import MODEL, Payload, commands, make_hostile
from tests.folders import contents, write_files
from tests.pictures import leave_blank
from tests.trace.test_folder import LINKS, OF_THE_USER, REPORTERS, WRITERS

_ROWS = {"import of many": 6000, "import of few": 1500}
_PROBE = (
    "probe --engine hf --num-prompts 4 --samples-per-prompt 8 --max-tokens 8 --noise-responses 4 "
    "--threads 1 --force"
)
_TRAINS = (
    ["train", "--engine", "hf", "--model", "/nowhere"],
    ["train", "--engine", "hf", "--model", "/nowhere", "--resume"],
)


def two_at_once(folder: Path, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """Two commands on one folder, the second at a random moment of the first: exit codes, and
    what is wrong.
    """
    lines = _lines(folder)
    alone = {name: _alone(line, folder / "alone") for name, line in lines.items()}
    for number in range(rounds):
        chance = random.Random(f"{seed}/{number}")
        names = chance.choices(list(lines), k=2)
        target = folder / "both"
        shutil.rmtree(target, ignore_errors=True)
        # Over an earlier run, else into a new folder
        if chance.random() < 0.7:
            assert cli([*lines["import of few"], "-q", "-o", str(target)]) == 0
        first = _start(lines[names[0]], target)
        moment = chance.random()
        time.sleep(moment * alone[names[0]])
        second = _start(lines[names[1]], target)
        ended = [_end(first), _end(second)]
        yield {
            "class": "two at once",
            "commands": names,
            "moment": round(moment, 3),
            "codes": [one.code for one in ended],
            "wrong": _wrong(target, names, ended),
        }
    shutil.rmtree(folder / "alone", ignore_errors=True)


class Ended(NamedTuple):
    """What a process printed, and its exit code."""

    out: str
    err: str
    code: int


def _end(process: subprocess.Popen[str]) -> Ended:
    return Ended(*process.communicate(timeout=600), process.returncode)


def _lines(folder: Path) -> dict[str, list[str]]:
    """The command lines by name; RUN is the folder that they share."""
    rows = []
    for table in Trace.open(bundled("traces") / "float32").tables():
        for row in table.to_pylist():
            rows.append({key: value for key, value in row.items() if value is not None})
    lines = {}
    for name, count in _ROWS.items():
        path = folder / f"{name.replace(' ', '-')}.jsonl"
        with path.open("w") as file:
            for i in range(count):
                file.write(json.dumps(rows[i % len(rows)] | {"prompt_id": i}) + "\n")
        lines[name] = ["import", str(path), "--force", "--json"]
    return lines | {
        "probe": _PROBE.split(),
        "rescore": ["rescore", "--noise-responses", "4", "--force"],
        "report": ["report", "RUN", "-q", "--export", "jsonl"],
        "diagnose": ["diagnose", "RUN", "-q"],
        "clipstats": ["clipstats", "RUN", "-q", "-a", "pg-is"],
    }


def _start(line: list[str], target: Path) -> subprocess.Popen[str]:
    words = [str(target) if word == "RUN" else word for word in line]
    if "RUN" not in line:
        words += ["-o", str(target)]
    return subprocess.Popen(
        [sys.executable, "-m", "mismatch_cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )


def _alone(line: list[str], target: Path) -> float:
    shutil.rmtree(target, ignore_errors=True)
    assert cli(["import", str(bundled("dumps")), "-q", "-o", str(target)]) == 0
    began = time.monotonic()
    process = _start(line, target)
    assert process.communicate()[1] is not None and process.returncode == 0, line
    return time.monotonic() - began


def _wrong(target: Path, names: list[str], ended: list[Ended]) -> list[str]:
    wrong, made, reported = [], 0, set()
    for name, (out, said, code) in zip(names, ended, strict=True):
        if code not in (0, 1) or "Traceback" in said or "bug" in said:
            wrong.append(f"{name}: {code}: {said[-300:]}")
        if code == 0:
            made += name in (*_ROWS, "probe", "rescore")
            if name in _ROWS:
                reported.add(json.loads(out)["rows"])
    # Two readers of a missing folder
    if not made and not (target / "trace").exists():
        return wrong
    wrong += [f"left over: {name}" for name in left_over(target)] + half_files(target)
    trace = Trace.open(target)
    if reported and made == len(reported) and trace.num_responses not in reported:
        wrong.append(f"{trace.num_responses} responses found, {reported} reported")
    if trace.completeness.partial:
        wrong.append(f"partial: {trace.completeness.reasons}")
    return wrong


def of_the_user(folder: Path) -> Iterator[dict[str, Any]]:
    """A foreign file under each of our names, in the way of every command, with and without
    --force.
    """
    for name, text in OF_THE_USER.items():
        for command, line in (WRITERS | REPORTERS).items():
            over = "--resume" if command == "train" else "--force"
            for flags in ([], [over]):
                target = folder / "foreign"
                shutil.rmtree(target, ignore_errors=True)
                write_files(target, {name: text})
                words = [*line, "-q", "-o", str(target), *flags]
                yield _held_to(["foreign file", command, name], words, target)


def links(folder: Path) -> Iterator[dict[str, Any]]:
    """Each name that we write as a symbolic or hard link to a file or folder elsewhere."""
    lines = [
        ["import", str(bundled("dumps")), "--force"],
        *([*line, "--force"] for line in REPORTERS.values()),
        *_TRAINS,
    ]
    for name in LINKS:
        # A name with a dot is a file; folders have no hard links
        kinds: dict[str, Callable[[Path, Path], None]] = {"link": os.symlink}
        if "." in name:
            kinds["hard link"] = os.link
        for kind, link in kinds.items():
            for line in lines:
                target, elsewhere = folder / "linked", folder / "elsewhere"
                for path in (target, elsewhere):
                    shutil.rmtree(path, ignore_errors=True)
                write_files(elsewhere, {"precious": "precious"})
                (target / name).parent.mkdir(parents=True)
                link(elsewhere / "precious" if "." in name else elsewhere, target / name)
                words = [*line, "-q", "-o", str(target)]
                yield _held_to([kind, line[0], name], words, elsewhere)


def hostile_models(folder: Path) -> Iterator[dict[str, Any]]:
    """Code in a model's folder, and pickles instead of weights, for every command, with a y on
    stdin.
    """
    proof = folder / "executed"
    models = {"code": make_hostile(folder / "hostile", proof)}
    models["pickle"] = shutil.copytree(MODEL, folder / "pickled", dirs_exist_ok=True)
    (models["pickle"] / "model.safetensors").unlink(missing_ok=True)
    import torch

    torch.save({"weight": Payload(proof)}, models["pickle"] / "pytorch_model.bin")
    for kind, model in models.items():
        for command, line in commands(str(model)).items():
            if kind == "pickle" and command == "import":
                # It only needs the tokenizer, which is sound
                continue
            target = folder / "run"
            shutil.rmtree(target, ignore_errors=True)
            words = [*line, "-q", "-o", str(target)]
            with mock.patch.object(sys, "stdin", io.StringIO("y\n" * 20)):
                case = _held_to([kind, command], words, folder / "nothing")
            if proof.exists():
                case["wrong"].append("it was executed")
            if case["codes"] == [0]:
                case["wrong"].append("it was loaded")
            yield case
            proof.unlink(missing_ok=True)


def _held_to(what: list[str], line: list[str], untouched: Path) -> dict[str, Any]:
    """Run a command; everything in `untouched` must stay the same."""
    before, err = contents(untouched), io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = cli(line)
    after, said = contents(untouched), err.getvalue()
    wrong = [f"{name} changed" for name in before if after.get(name) != before[name]]
    if code not in (0, 1, 2) or "Traceback" in said or "This is a bug" in said:
        wrong.append(f"{code}: {said[-300:]}")
    return {"class": what[0], "commands": what[1:], "codes": [code], "wrong": wrong}


def counted(all_cases: list[dict[str, Any]]) -> str:
    """Cases and outcomes by class, and everything wrong."""
    codes: dict[str, Counter[str]] = defaultdict(Counter)
    wrong: Counter[str] = Counter()
    mistakes = []
    for case in all_cases:
        codes[case["class"]]["+".join(map(str, case["codes"]))] += 1
        if case["wrong"]:
            wrong[case["class"]] += 1
            mistakes.append(f"  WRONG {case}")
    out = []
    for name, counts in codes.items():
        ended = ", ".join(f"{code}: {count}" for code, count in counts.most_common())
        out.append(f"{name}: {counts.total()} cases, {wrong[name]} wrong; exit codes {ended}")
    return "\n".join(out + mistakes)


def all_classes(folder: Path, rounds: int, seed: int) -> str:
    """Run every class, with blank pictures, and print findings as they come."""
    all_cases = []
    with pytest.MonkeyPatch.context() as patch:
        leave_blank(patch)
        for cases in (
            two_at_once(folder, rounds, seed),
            of_the_user(folder),
            links(folder),
            hostile_models(folder),
        ):
            for case in cases:
                all_cases.append(case)
                if case["wrong"] or case["class"] == "two at once":
                    print(json.dumps(case), flush=True)
    return counted(all_cases)
