"""Commands that write, with a kill or a failure before each file operation, for `kills.py
operations` and for tests.

After each, the older result or the new one must be there, complete; files of the user must be
untouched; and the same command again, with --resume if it has that, must end with the result of an
unbroken one and leave nothing else.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.broken import differences, files_of, half_files, left_over
from lab.operations import KILL, Fault, Outcome, attempt, faults
from mismatch_cli.app.cli import run as cli
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.trace.drafts import NEW, RUN
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.run_folder import claim_folder
from tests.pictures import leave_blank

FLOAT32, FP8 = bundled("traces") / "float32", bundled("traces") / "fp8-kv"
_HF = "--engine hf --samples-per-prompt 2 --max-tokens 8 --threads 1"
_PROBE = f"probe {_HF} --num-prompts 2 --noise-responses 2"
_CURATE = f"curate {_HF} --num-prompts 6 --keep 0 1 --held-out-samples 2"
_TRAIN = (
    "train --engine hf --rollout-dtype float32 --steps 2 --prompts-per-step 2 "
    "--samples-per-prompt 2 --max-tokens 16 --num-problems 2 --eval-samples 1 --eval-every 0 "
    "--checkpoint-every 1 --trace-every 1 --minibatches 1 --threads 1"
)
_OF_USER = {"thesis.txt": "mine", "plots.txt": "mine", ".backup.20261122.part/photos/a.jpg": "mine"}


@dataclass(frozen=True)
class Case:
    """A command that writes into OUT, the command that wrote there before, and how an
    interrupted one is resumed.
    """

    line: str
    older: str = ""
    force: bool = True  # needed to replace the older result
    resumes: bool = False
    in_project: bool = False  # of a report: OUT has files of the user too

    def act(self, folder: Path, *more: str) -> Callable[[], int]:
        words = [*self.line.split(), "--quiet", "--output", str(folder), *more]
        return lambda: _blank(words)


def _over(line: str, older: str, **more: Any) -> dict[str, Case]:
    name = line.split()[0]
    return {name: Case(line, **more), f"{name} over an older one": Case(line, older, **more)}


CASES: dict[str, Case] = {
    **_over(f"import {bundled('dumps')}", f"import {bundled('dumps')} --temperature 0.5"),
    **_over(f"report {FLOAT32} --export jsonl", f"report {FP8} --plots svg", in_project=True),
    **_over(
        f"clipstats {FLOAT32} -a pg-is",
        f"clipstats {FP8} -a pg-is -a cispo --plots svg",
        in_project=True,
    ),
    **_over(_PROBE, f"{_PROBE} --seed 7", resumes=True),
    **_over(
        "rescore --noise-responses 2 --threads 1",
        "rescore --trainer-dtype bfloat16 --threads 1",
        resumes=True,
    ),
    **_over(_CURATE, f"{_CURATE} --seed 7", resumes=True),
    "train": Case(_TRAIN, resumes=True, force=False),
}


def _blank(words: list[str]) -> int:
    """Run a command; the process is a fork, so that nothing needs to be restored."""
    leave_blank(pytest.MonkeyPatch())
    return cli(words)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@dataclass(frozen=True)
class Trial:
    """A case with its results: what existed before, and what an unbroken command makes of it."""

    case: Case
    before: Path
    whole: Path
    folder: Path

    @classmethod
    def of(cls, case: Case, base: Path) -> Trial:
        shutil.rmtree(base, ignore_errors=True)
        base.mkdir(parents=True)
        before, whole, folder = base / "before", base / "whole", base / "tried" / "run"
        folder.parent.mkdir()
        for line, target in ((case.older, before), (case.line, whole)):
            if line:
                made = attempt(Case(line).act(folder), folder)
                assert made.code == 0, made.said
                made.preload()
                # Reports say where they were made
                folder.rename(target)
        before.mkdir(exist_ok=True)
        write(folder.parent, _OF_USER)
        if case.in_project:
            write(before, _OF_USER)
        return cls(case, before, whole, folder)

    def prepare(self) -> Path:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.before, self.folder)
        return self.folder

    def act(self, *more: str) -> Callable[[], int]:
        replaces = self.case.force and (self.case.older or self.case.in_project)
        if replaces and "--resume" not in more:
            return self.case.act(self.folder, "--force", *more)
        return self.case.act(self.folder, *more)

    def faults(self, step: int = 1) -> Iterator[Fault]:
        return faults(self.act(), self.prepare, step=step)

    def wrong_after(self, fault: Fault) -> list[str]:
        """What is wrong after a fault, and after the command that follows it."""
        outcome = attempt(self.act(), self.prepare(), fault)
        wrong = self._wrong_end(fault, outcome)
        # A reader may come first, which holds nothing
        if (self.before / "trace").is_dir() and fault.at % 2:
            try:
                Trace.open(self.folder)
            except MismatchError as error:
                wrong.append(f"a reader: {error}")
        return wrong + self._wrong_now() + self._wrong_after_again()

    def _wrong_after_again(self) -> list[str]:
        """What is wrong after the same command again, resumed if it has that."""
        wrong = []
        flags = ["--resume"] if self._can_resume() else []
        again = attempt(self.act(*flags), self.folder)
        if again.code and "no run to resume" in again.said:
            again = attempt(self.act(), self.folder)
        # Complete, and the fault came while the draft was removed
        if again.code and "already exists" in again.said:
            wrong += [f"neither new nor replaced: {name}" for name in self._of_new()]
            again = attempt(self.act("--force"), self.folder)
        if again.code:
            wrong.append(f"the next command: {again.code}: {again.said[-500:]}")
        else:
            wrong += [f"differs: {name}" for name in self._of_new()]
        return wrong + [f"left over: {name}" for name in left_over(self.folder)] + self._gone()

    def _wrong_end(self, fault: Fault, outcome: Outcome) -> list[str]:
        expected = (0, -9) if fault.what == KILL else (0, 1, 2)
        is_bug = "Traceback" in outcome.said or "This is a bug" in outcome.said
        if outcome.code in expected and not is_bug:
            return []
        return [f"{outcome.code}: {outcome.said[-500:]}"]

    def _wrong_now(self) -> list[str]:
        """Whether the next one that holds the folder finds the older result or the new one, each
        complete.
        """
        with claim_folder(self.folder, lambda: None):
            pass
        wrong = half_files(self.folder) + self._gone()
        has = files_of(self.folder).difference(_OF_USER)
        if not self.case.older and (self.case.resumes or not has):
            return wrong
        # A trace is there before its report, a report before an export
        first: tuple[str, ...] = ("",)
        if self.case.resumes:
            first = ("trace/", "held-out/")
        elif self.case.in_project:
            first = ("trace/", "held-out/", "plots/", "report.html", "summary.json")
        of_new = []
        for name in self._of_new():
            if name.startswith(first) or name.partition(":")[0] in has:
                of_new.append(name)
        of_old = differences(self.folder, self.before, without=_OF_USER)
        if of_old and of_new:
            wrong.append(f"neither old nor new: {of_old[:3]}, {of_new[:3]}")
        return wrong

    def _of_new(self) -> list[str]:
        """Where the folder differs from the result of an unbroken command."""
        return differences(self.folder, self.whole, without=_OF_USER)

    def _can_resume(self) -> bool:
        if not self.case.resumes:
            return False
        if self.case.older:
            draft = self.folder / RUN / NEW / "trace/manifest.json"
            return draft.is_file() or self._has_new_trace()
        manifest, settings = self.folder / "trace/manifest.json", self.folder / "config.toml"
        return manifest.is_file() or settings.is_file()

    def _has_new_trace(self) -> bool:
        own, older = self.folder / "trace/manifest.json", self.before / "trace/manifest.json"
        return own.is_file() and own.read_bytes() != older.read_bytes()

    def _gone(self) -> list[str]:
        """The files of the user that are no longer as they were, beside OUT and in it."""
        places = [self.folder.parent]
        if self.case.in_project:
            places.append(self.folder)
        gone = []
        for place in places:
            for name in _OF_USER:
                path = place / name
                if not path.is_file() or path.read_text() != "mine":
                    gone.append(f"lost: {path}")
        return gone


def all_operations(base: Path, say: Callable[[str], None], only: str = "", step: int = 1) -> str:
    """Every fault in every case: counts by case, and everything wrong."""
    lines, total, failed = [], Counter[str](), 0
    for name, case in CASES.items():
        if only and not name.startswith(only):
            continue
        trial, counts, wrong = Trial.of(case, base / "trial"), Counter[str](), []
        for fault in trial.faults(step):
            counts[fault.what] += 1
            mistakes = trial.wrong_after(fault)
            if mistakes:
                wrong.append(f"  WRONG {name}, {fault}: {mistakes}")
                say(wrong[-1])
        total += counts
        failed += len(wrong)
        kinds = ", ".join(f"{count} {what}" for what, count in counts.items())
        lines.append(f"{name}: {counts.total()} faults ({kinds}), {len(wrong)} wrong")
        say(lines[-1])
    return "\n".join(
        [*lines, f"{total.total()} kills and failed operations ({dict(total)}): {failed} wrong"]
    )
