"""What a reader of the guide has in the folder, and how a line is typed there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

from mismatch_cli.app.cli import build_app, run
from mismatch_cli.base.configuration import WRITTEN
from mismatch_cli.base.places import bundled
from tests.docs.pages import ROOT, Change, File, additions

_GROUP = typer.main.get_command(build_app())
# A line that would take long is run with these flags appended: the last one counts.
SMALLER = (
    (r"^probe", "--num-prompts 12 --samples-per-prompt 2 --max-tokens 24 --noise-responses 4"),
    (
        r"^curate",
        "--num-prompts 4 --samples-per-prompt 2 --held-out-samples 2 --max-tokens 24 --keep 0 1",
    ),
    (
        r"^train",
        "--prompts-per-step 2 --samples-per-prompt 4 --minibatches 1 --num-problems 2 "
        "--max-tokens 56",
    ),
    (r"^train", "--eval-samples 1 --eval-every 0 --report-every 0 --seeds 1"),
    (r"^train(?!.*--steps)", "--steps 1"),
    (r"^train --steps 10", "--steps 3 --trace-every 3"),
    (r"^train.*--environment", "--steps 12"),
    (r"^rescore", "--noise-responses 8"),
    # With vLLM: tests/bisect
    (r"^bisect(?!.*--resume)", "--engine hf --responses 4 --module-responses 1"),
    (r"--workers", "--workers 1"),
    # Real vLLM for all other lines that do not ask for another engine; lines that start it alike
    # share it. With vLLM: tests/probe/test_full_divergence.py
    (r"^probe.*--full-divergence", "--engine hf"),
    (r"^probe.*-adapter ", "--engine hf"),  # with vLLM: tests/probe/test_adapters.py
    (r"^probe.*--rollout-dtype float32", "--engine hf"),  # with vLLM: tests/probe/test_probe.py
    (r"^train .*(-a|--model|--lora|--resume)", "--engine hf"),  # with vLLM: tests/train
)
# What depends on the machine and on how much was sampled: there the words of an output count, and
# not its numbers.
_VARIES = re.compile(
    r"^(probe|train|curate|rescore|bisect)\b|\b(probe|train|curate|rescore|bisect)-"
)

MODELS = (
    "checkpoint",
    "step-90",
    "step-100",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-Math-1.5B",
)
LATER_MODELS = ("step-104", "checkpoint-40")
# Several versions, an fp8 KV cache
TRAINING_RUNS = ("run", "last", "last-release", "before", "probe-before")
RUNS = (
    "probe-model",
    "probe-step-100",
    "after",
    "probe-after",
    "probe-bf16",
    "probe-fp16",
    "probe-fp32",
    "import-run",
)
PROBLEMS = ("problems.jsonl", "math.jsonl", "tasks.jsonl", "aime.jsonl")
PROBLEMS += ("curate-checkpoint/perfectible.jsonl", "curate-model/perfectible.jsonl")
DUMPS = ("run/token_exports", "runs/math/token_exports")
FILES = {
    "my_reward.py": "def score(response, answer):\n    return float(answer in response)\n",
    "my_mask.py": (
        "from mismatch_cli import Decision\n\n\n"
        "def trust_region(compared, advantage_T, *, limit: float = 1.5):\n"
        "    return Decision(compared.ratio_T <= limit, compared.ratio_less_1_T)\n"
    ),
    "limits.toml": "[limits.k3]\nmax = 0.01\n",
}


def things(line: str, made: Path) -> None:
    """Put into the present folder what a line takes for granted; `made` holds what is made once."""
    read = re.sub(r"(?:-o|--output) \S+", "", line)  # what it writes is not there yet

    def named(name: str) -> bool:
        return (
            not Path(name).exists()
            and re.search(rf"(?<![\w/.-])(\./)?{re.escape(name)}(?![\w.-])", read) is not None
        )

    def put(name: str, source: Path, link: Callable[[Path, Path], Any]) -> None:
        if named(name):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            link(source, Path(name))

    model = bundled("model")
    for name in MODELS:
        put(name, model, _linked)
    for name in LATER_MODELS:
        if named(name):
            put(name, _later(made / "later"), _linked)
    for name in PROBLEMS:
        put(name, bundled("perfectible.jsonl"), _first_problems)
    for name in DUMPS:
        put(name, bundled("dumps") / "token_exports", shutil.copytree)
    for name in (*TRAINING_RUNS, *RUNS):
        put(name, bundled("traces") / ("fp8-kv" if name in TRAINING_RUNS else "float32"), _as_run)
    if named("lora"):
        put("lora", _adapter(made / "lora"), _linked)
    for name, content in FILES.items():
        if named(name):
            Path(name).write_text(content, encoding="utf-8")


def _linked(source: Path, folder: Path) -> None:
    """A folder of its own, because folders lend their names to runs; the files are the same."""
    shutil.copytree(source, folder, copy_function=os.symlink)


def _first_problems(source: Path, path: Path) -> None:
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()[:16]]
    path.write_text(
        "".join(json.dumps(row | {"question": row["problem"]}) + "\n" for row in rows),
        encoding="utf-8",
    )


def _as_run(trace: Path, run_folder: Path) -> None:
    _linked(trace, run_folder / "trace")


@cache
def _later(folder: Path) -> Path:
    """The bundled model after some updates: other weights, a little."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(bundled("model"), folder)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    moved = {
        name: w + 0.02 * w.float().std() * torch.randn(w.shape, generator=generator)
        for name, w in weights.items()
    }
    save_file(
        {name: w.to(weights[name].dtype) for name, w in moved.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


@cache
def _adapter(folder: Path) -> Path:
    from tests.lora import save_adapter

    return Path(save_adapter(str(bundled("model")), folder))


def save(file: File, folder: Path) -> None:
    """Write a file that a page shows."""
    path = folder / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(file.text, encoding="utf-8")


def checkout(page: Path, folder: Path) -> Path:
    """A copy of this checkout with everything that a page adds to it; `bin/mismatch-cli` in it
    runs that.
    """
    for name in ("mismatch_cli", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "sample_data").symlink_to(ROOT / "sample_data")
    for step in additions(page):
        path = folder / step.name
        save(
            File(step.name, step.made_in(path.read_text("utf-8")))
            if isinstance(step, Change)
            else step,
            folder,
        )
    script = folder / "bin" / "mismatch-cli"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m mismatch_cli "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return folder


def without_comment(line: str) -> str:
    """The line as it is run: a page may say behind a line what it does."""
    return line.partition("  #")[0].strip()


@dataclass(frozen=True)
class Ran:
    """What came of a line: its exit code, and all that was printed."""

    code: int
    text: str


def varies(line: str) -> bool:
    """Whether the numbers that a line prints depend on the machine, or on how much it sampled."""
    return _VARIES.search(line.removeprefix("mismatch-cli ")) is not None


def smaller(arguments: str) -> str:
    """The flags that make a line quick."""
    return " ".join(
        flags
        for pattern, flags in SMALLER
        if re.search(pattern, arguments) and "--show-config" not in arguments
    )


def types_a_key(arguments: str) -> bool:
    """Whether a setting that has no flag is typed like one."""
    name, *words = arguments.split() or [""]
    if name not in _GROUP.list_commands(None):  # type: ignore[attr-defined,arg-type]
        return False
    settings = _GROUP.get_command(None, name).callback.settings  # type: ignore[attr-defined,arg-type]
    return bool({each.as_flag for each in settings.values() if not each.is_typed} & {*words})


def type_line(line: str, *, quick: bool = True, checkout: Path | None = None) -> Ran:
    """Run a line in the present folder; `| jq …` and its like get what it prints on stdout.

    In this process, for speed; in a shell where it writes to a file, or with the package of a
    `checkout`.
    """
    command, *pipes = line.split(" | ")
    arguments = without_comment(command.removeprefix("mismatch-cli"))
    if types_a_key(arguments):  # the answer is that it has no flag
        return _shell(f"env -u {WRITTEN} {line}", None)
    more = smaller(arguments) if quick else ""
    if not command.startswith("mismatch-cli") or " > " in command or checkout is not None:
        return _shell(" | ".join([f"{command} {more}".strip(), *pipes]), None, checkout)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err if pipes else out):
        code = run(
            [os.path.expandvars(word) for word in shlex.split(f"{arguments} {more}", comments=True)]
        )
    if pipes and shutil.which(pipes[0].split()[0]):
        after = _shell(" | ".join(pipes), out.getvalue())
        return Ran(code or after.code, err.getvalue() + after.text)
    return Ran(code, out.getvalue())


def _shell(line: str, stdin: str | None, checkout: Path | None = None) -> Ran:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    first = (
        {"PATH": f"{checkout}/bin{os.pathsep}{path}", "PYTHONPATH": str(checkout)}
        if checkout
        else {"PATH": path}
    )
    done = subprocess.run(
        ["bash", "-c", line],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, **first},
    )
    return Ran(done.returncode, done.stdout + done.stderr)


def missing(shown: str, ran: str, *, loosely: bool) -> str:
    """The first part of a shown output that is not what was printed; "" where all of it is.

    `…` stands for anything, also at the beginning and at the end; nothing shown says nothing. How
    lines are broken and columns are filled does not count; loosely, nor do numbers.
    """
    parts = [_words(part, loosely) for part in shown.split("…")]
    rest = _words(ran, loosely)
    if not any(parts):
        return ""
    for number, part in enumerate(parts):
        at = rest.find(part)
        if number == len(parts) - 1 and part:
            at = rest.rfind(part) if rest.endswith(part) else -1
        if at < 0 or (number == 0 and part and at > 0):
            return shown.split("…")[number].strip()
        # The space at the end may be the one before the next part
        rest = rest[at + len(part) - bool(part) :]
    return ""


def _words(text: str, loosely: bool) -> str:
    words = re.findall(r"[^\W\d_]{2,}", text) if loosely else text.split()
    return f" {' '.join(words)} " if words else ""
