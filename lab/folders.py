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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
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
        if chance.random() < 0.7:  # over an earlier run, else into a new folder
            assert cli([*lines["import of few"], "-q", "-o", str(target)]) == 0
        first = _start(lines[names[0]], target)
        moment = chance.random()
        time.sleep(moment * alone[names[0]])
        second = _start(lines[names[1]], target)
        ended = [
            (*process.communicate(timeout=600), process.returncode) for process in (first, second)
        ]
        codes = [code for _, _, code in ended]
        case = {
            "class": "two at once",
            "commands": names,
            "moment": round(moment, 3),
            "codes": codes,
        }
        yield case | {"wrong": _wrong(target, names, ended)}
    shutil.rmtree(folder / "alone", ignore_errors=True)


def _lines(folder: Path) -> dict[str, list[str]]:
    rows = [
        row
        for table in Trace.open(bundled("traces") / "float32").tables()
        for row in table.to_pylist()
    ]
    rows = [{key: value for key, value in row.items() if value is not None} for row in rows]
    imports = {}
    for name, count in _ROWS.items():
        path = folder / f"{name.replace(' ', '-')}.jsonl"
        keyed = (rows[i % len(rows)] | {"prompt_id": i} for i in range(count))
        path.write_text("".join(json.dumps(row) + "\n" for row in keyed))
        imports[name] = ["import", str(path), "--force", "--json"]
    reports = {
        name: [name, "RUN", "-q", *more]
        for name, more in (
            ("report", ["--export", "jsonl"]),
            ("diagnose", []),
            ("clipstats", ["-a", "pg-is"]),
        )
    }
    return (
        imports
        | {"probe": _PROBE.split(), "rescore": ["rescore", "--noise-responses", "4", "--force"]}
        | reports
    )


def _start(line: list[str], target: Path) -> subprocess.Popen[str]:
    words = [str(target) if word == "RUN" else word for word in line]
    words += [] if "RUN" in line else ["-o", str(target)]
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


def _wrong(target: Path, names: list[str], ended: list[tuple[str, str, int]]) -> list[str]:
    wrong = []
    for name, (_, said, code) in zip(names, ended, strict=True):
        if code not in (0, 1) or "Traceback" in said or "bug" in said:
            wrong.append(f"{name}: {code}: {said[-300:]}")
    made = [i for i in (0, 1) if ended[i][2] == 0 and names[i] in (*_ROWS, "probe", "rescore")]
    if not made and not (target / "trace").exists():
        return wrong  # two readers of a missing folder
    wrong += [f"left over: {name}" for name in left_over(target)] + half_files(target)
    trace = Trace.open(target)
    reported = {json.loads(ended[i][0])["rows"] for i in made if names[i] in _ROWS}
    if reported and len(made) == len(reported) and trace.num_responses not in reported:
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
            for force in ([], ["--force"]) if command != "train" else ([], ["--resume"]):
                target = folder / "foreign"
                shutil.rmtree(target, ignore_errors=True)
                write_files(target, {name: text})
                yield _held_to(
                    ["foreign file", command, name],
                    [*line, "-q", "-o", str(target), *force],
                    target,
                )


def links(folder: Path) -> Iterator[dict[str, Any]]:
    """Each name that we write as a symbolic or hard link to a file or folder elsewhere."""
    lines = [
        ["import", str(bundled("dumps")), "--force"],
        *([*line, "--force"] for line in REPORTERS.values()),
        *_TRAINS,
    ]
    for name in LINKS:
        for hard in (False, True) if "." in name else (False,):
            for line in lines:
                target, elsewhere = folder / "linked", folder / "elsewhere"
                for path in (target, elsewhere):
                    shutil.rmtree(path, ignore_errors=True)
                write_files(elsewhere, {"precious": "precious"})
                (target / name).parent.mkdir(parents=True)
                (os.link if hard else os.symlink)(
                    elsewhere / "precious" if "." in name else elsewhere, target / name
                )
                what = ["hard link" if hard else "link", line[0], name]
                yield _held_to(what, [*line, "-q", "-o", str(target)], elsewhere)


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
                continue  # it only needs the tokenizer, which is sound
            target = folder / "run"
            shutil.rmtree(target, ignore_errors=True)
            with mock.patch.object(sys, "stdin", io.StringIO("y\n" * 20)):
                case = _held_to(
                    [kind, command], [*line, "-q", "-o", str(target)], folder / "nothing"
                )
            executed = ["it was executed"] * proof.exists() + ["it was loaded"] * (
                case["codes"] == [0]
            )
            yield case | {"wrong": case["wrong"] + executed}
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
    out = []
    for name in dict.fromkeys(case["class"] for case in all_cases):
        cases = [case for case in all_cases if case["class"] == name]
        codes = Counter("+".join(map(str, case["codes"])) for case in cases)
        ended = ", ".join(f"{code}: {count}" for code, count in codes.most_common())
        out.append(
            f"{name}: {len(cases)} cases, {sum(bool(case['wrong']) for case in cases)} wrong; "
            f"exit codes {ended}"
        )
    return "\n".join(out + [f"  WRONG {case}" for case in all_cases if case["wrong"]])


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
