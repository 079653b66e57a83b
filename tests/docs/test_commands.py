"""Every line of the guide and of README.md is typed, page by page, in a folder like the reader's.

What a page shows below a line must be what the line prints. To take over new outputs:
python -m tests.docs.test_commands [PAGE…]. It runs the lines unchanged: all on the named pages, or
by default those whose numbers are the same everywhere.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.backends.cpu import get_cpu_capability

from tests import pictures
from tests.docs.pages import PAGES, README, ROOT, File, Line, additions, not_in_a_session, steps
from tests.docs.reader import (
    Ran,
    checkout,
    missing,
    save,
    things,
    type_line,
    varies,
    without_comment,
)
from tests.docs.recorded import record_the_run
from tests.docs.shared_vllm import SharedVllm
from tests.looped import looped

_FP8_CACHE = "--kv-cache-dtype fp8"
_COLUMNS = "100"  # the width of the outputs in the guide
_TYPED = [page for page in PAGES if any(isinstance(step, Line) for step in steps(page))]
# Others need a checkout: test_extending.py
_HERE = [page for page in _TYPED if not additions(page)]
# A line of several pages is typed once; the others get what it left
_RAN: dict[str, tuple[Ran, Path]] = {}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="module", autouse=True)
def vllm():
    with pytest.MonkeyPatch.context() as patch:
        shared = SharedVllm(patch)
        yield
        shared.end()


@pytest.fixture(autouse=True)
def at_the_desk(tmp_path, monkeypatch):
    sit_down(tmp_path, monkeypatch)


def sit_down(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """An empty folder, a terminal of one width, and blank pictures."""
    folder.mkdir(exist_ok=True)
    patch.chdir(folder)
    patch.setenv("COLUMNS", _COLUMNS)
    patch.setenv("GITHUB_STEP_SUMMARY", str(folder / "step-summary.md"))
    pictures.leave_blank(patch)


# Two pages are typed at every push: an overview, and a reader of traces.
_AT_EVERY_PUSH = ("README.md", "gate.md")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page.name in _AT_EVERY_PUSH else pytest.mark.slow)
        for page in _HERE
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_lines_of_a_page_do_what_it_says(page, tmp_path, made):
    has_avx512 = get_cpu_capability().startswith("AVX512")
    if not has_avx512 and any(_FP8_CACHE in line for line in typed_on(page)):
        pytest.skip("vLLM's fp8 KV cache on a CPU needs AVX-512")
    typed: set[str] = set()
    has_recorded = record_the_run(page)
    for step in steps(page):
        if isinstance(step, File):
            save(step, tmp_path)
        elif not step.elsewhere:
            things(step.text, made)
            where = f"{page.name}, line {step.number}: {step.text}"
            line = without_comment(step.text)
            ran = _typed_once(line, made, again=has_recorded or line in typed)
            typed.add(line)
            assert ran.code == step.code, f"{where}\nexit code {ran.code}\n{ran.text}"
            lost = missing(step.shown, ran.text, loosely=varies(step.text))
            assert not lost, f"{where}\ndoes not show\n{lost}\nbut\n{ran.text}"


def typed_on(page: Path) -> list[str]:
    """The lines of a page that are typed here."""
    return [step.text for step in steps(page) if isinstance(step, Line) and not step.elsewhere]


def _typed_once(line: str, made: Path, *, again: bool) -> Ran:
    """What comes of a line; of a line on an earlier page, what came of it there.

    A page may mean it again.
    """
    before = set(os.listdir())
    if line in _RAN and not again:
        ran, left = _RAN[line]
        _copy(left, Path(), before)
        return ran
    ran, left = type_line(line), Path(tempfile.mkdtemp(dir=made))
    if line.startswith("mismatch-cli ") and not again:
        _copy(Path(), left, before)
        _RAN[line] = ran, left
    return ran


def _copy(source: Path, target: Path, there: set[str]) -> None:
    """What a line has left, into the folder of another page."""
    for path in source.iterdir():
        if path.name not in there:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, target / path.name)


@looped("page", [p for p in PAGES if p != README])
def test_no_line_of_the_guide_is_overlooked(page):
    """Whatever looks like a line to type is found as one, or says what else it needs."""
    looks = [line for line in not_in_a_session(page) if re.search(r"(?<!`)mismatch-cli ", line)]
    lines = {step.text for step in steps(page) if isinstance(step, Line)}
    assert [line for line in looks if not any(text in line for text in lines)] == []


def test_what_cannot_be_typed_here_is_little():
    lines = [step for page in _TYPED for step in steps(page) if isinstance(step, Line)]
    assert len(lines) > 60
    assert sum(bool(line.elsewhere) for line in lines) <= len(lines) / 6


def renew(pages: list[Path], wanted: Callable[[str], bool]) -> None:
    """Run the lines of pages unchanged, and take over what they print where the page shows the
    same lines.
    """
    for page in pages:
        with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
            folder, made = Path(temporary, "folder"), Path(temporary, "made")
            made.mkdir()
            where = checkout(page, Path(temporary, "checkout")) if additions(page) else None
            sit_down(folder, patch)
            record_the_run(page)
            text = page.read_text(encoding="utf-8")
            for step in steps(page):
                if isinstance(step, File):
                    save(step, folder)
                elif isinstance(step, Line) and not step.elsewhere:
                    things(step.text, made)
                    ran = type_line(step.text, quick=not wanted(step.text), checkout=where)
                    if step.shown.strip() and wanted(step.text):
                        text = text.replace(step.shown, _as_printed(step, ran.text))
            page.write_text(text, encoding="utf-8")


def _as_printed(line: Line, printed: str) -> str:
    """The shown lines as they are printed now: each is the next one with the same words."""

    def words(text: str) -> list[str]:
        # "KL(μ‖π), k3" is told from "KL(μ‖π), k1"
        label, *cells = re.split(r"\s{2,}", text.strip())
        return [label if cells else "", *re.findall(r"[^\W\d_]{2,}", text)]

    rest, lines = printed.splitlines(), []
    for shown in line.shown.splitlines():
        same = next((i for i, one in enumerate(rest) if words(one) == words(shown)), None)
        if same is None or "…" in shown or not shown.strip():
            if "…" not in shown and shown.strip() and shown not in rest:
                print(f"{line.text}: look at {shown!r}", file=sys.stderr)
            lines.append(shown)
        else:
            lines.append(rest[same].rstrip())
            rest = rest[same + 1 :]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:]:
        renew([Path(name).resolve() for name in sys.argv[1:]], lambda line: True)
    else:
        renew([page for page in _TYPED if page != README], lambda line: not varies(line))
