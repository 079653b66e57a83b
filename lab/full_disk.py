"""A disk that fills up under every command that writes: what it says, what it leaves, and whether
it recovers.

    python -m lab.full_disk [--only train]

A real file system (tmpfs, mounted for this) is filled until only a share of what the command needs
is free, so that it runs out of space at a different file each time. The command must end with exit
code 1 and one sentence that names a file, and leave only complete files. Then there is room again,
and the same command (with --resume, if it has that) must end with the bits of a run that always had
room. Every command also runs over a folder with an earlier result.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.broken import differences, half_files, left_over
from mismatch_cli.app.cli import run as cli
from mismatch_cli.base.places import bundled

MEGABYTES = 64
SHARES = (0.0, 0.02, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.97)
_PROBE = (
    "probe --engine hf --num-prompts 9 --samples-per-prompt 32 --max-tokens 8 --noise-responses "
    "8 --threads 1"
)
_TRAIN = (
    "train --engine hf --rollout-dtype float32 --steps 3 --prompts-per-step 4 "
    "--samples-per-prompt 4 --max-tokens 48 --num-problems 4 --eval-samples 1 --eval-every 0 "
    "--checkpoint-every 1 --trace-every 1 --threads 1"
)


@dataclass(frozen=True)
class Case:
    """A command, whether it can be resumed, and whether it may overwrite an earlier result."""

    line: str
    resumes: bool = False
    over: str = "--force"  # flag to replace an earlier result; empty: impossible


CASES = {
    "probe": Case(_PROBE, resumes=True),
    "train": Case(_TRAIN, resumes=True, over=""),
    "rescore": Case("rescore --threads 1 --noise-responses 8", resumes=True),
    "import": Case(f"import --tokenizer {bundled('model')}"),
    "report": Case(f"report {bundled('traces') / 'float32'} --export parquet"),
    "clipstats": Case("clipstats -a grpo-clip-higher -a dppo-binary-tv"),
}


@contextlib.contextmanager
def disk(megabytes: int = MEGABYTES) -> Iterator[Path]:
    """An empty file system of its own; an `OSError` if mounting is not allowed."""
    with tempfile.TemporaryDirectory(prefix="full-disk-") as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "full-disk", folder],
            capture_output=True,
            text=True,
        )
        if mounted.returncode:
            raise OSError(f"cannot mount a file system here: {mounted.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def only_free(folder: Path, size: int) -> Iterator[None]:
    """Leave this many bytes free on the disk."""
    ballast = folder / "ballast"
    free = os.statvfs(folder)
    with open(ballast, "wb") as file:
        # A sparse file would take no space
        os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - size))
    try:
        yield
    finally:
        ballast.unlink()


def call(case: Case, folder: Path, *more: str) -> tuple[int, str]:
    """Run a command in this process: its exit code and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli([*case.line.split(), "--quiet", "--output", str(folder), *more])
    return code, err.getvalue()


def used(folder: Path) -> int:
    free = os.statvfs(folder)
    return (free.f_blocks - free.f_bfree) * free.f_frsize


def try_share(
    case: Case, mounted: Path, whole: Path, size: int, *, over: bool
) -> tuple[str, list[str]]:
    """Run out of disk space, free it, and resume: what was said, and what is wrong."""
    folder, flags = mounted / "run", []
    if over:
        flags.append(case.over)
        shutil.copytree(whole, folder)
    with only_free(mounted, size):
        code, said = call(case, folder, *flags)
        wrong = _broken(folder)
        if over and code:
            wrong += _missing(folder, whole)
    # It needed less than estimated
    if code == 0:
        shutil.rmtree(folder)
        return "", []
    if code != 1 or not _is_helpful(said, folder):
        wrong.append(f"exit code {code}: {said[-400:]}")
    if case.over:
        flags = [case.over]
    if not over and _can_resume(case, folder):
        flags = ["--resume"]
    code, error = call(case, folder, *flags)
    if code:
        wrong.append(f"with room again: exit code {code}: {error[-400:]}")
    else:
        wrong += [f"differs: {name}" for name in differences(folder, whole)]
    shutil.rmtree(folder)
    return said, wrong


def _is_helpful(said: str, folder: Path) -> bool:
    """One line that names the place and what to do."""
    is_one_line = len(said.splitlines()) == 1
    return is_one_line and str(folder) in said and "free some space" in said


def _broken(folder: Path) -> list[str]:
    wrong = [f"half a file: {name}" for name in half_files(folder)]
    return wrong + [
        f"left over: {name}" for name in left_over(folder) if "distributions" not in name
    ]


def _can_resume(case: Case, folder: Path) -> bool:
    """`train` resumes from its settings, the others need the manifest of a trace."""
    is_begun = case.line.startswith("train") or (folder / "trace/manifest.json").is_file()
    return case.resumes and is_begun


def _missing(folder: Path, whole: Path) -> list[str]:
    missing = []
    for path in sorted(whole.rglob("*")):
        name = path.relative_to(whole)
        if path.is_file() and not (folder / name).is_file():
            missing.append(f"gone from the earlier result: {name}")
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(CASES))
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    options = parser.parse_args()
    failed = 0
    for name, case in CASES.items():
        if options.only in (None, name):
            failed += fill(name, case, options.shares)
    sys.exit(failed > 0)


def fill(name: str, case: Case, shares: Sequence[float]) -> int:
    """Fill the disk to every share, over nothing and over an earlier result; how often something
    was wrong.
    """
    tried = failed = 0
    starts = {name: False}
    if case.over:
        starts[f"{name} over an earlier result"] = True
    with disk() as mounted, tempfile.TemporaryDirectory() as elsewhere:
        code, said = call(case, mounted / "run")
        assert code == 0, said
        needed, whole = used(mounted), Path(elsewhere) / "run"
        shutil.move(mounted / "run", whole)
        for (start, over), share in itertools.product(starts.items(), shares):
            said, wrong = try_share(case, mounted, whole, int(share * needed), over=over)
            failed += bool(wrong)
            if said:
                tried += 1
                print(f"  {start}, {share:.0%}: {said.strip()[:300]}", flush=True)
            for what in wrong:
                print(f"    WRONG {what}", flush=True)
        print(f"{name}: {tried} times full, {needed / 2**20:.1f} MB needed", flush=True)
    return failed


if __name__ == "__main__":
    main()
