"""Where a run is recorded: in its folder or, if it replaces an older run, in a draft there until
it is complete.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mismatch_cli.trace.drafts import MARK, NEW, RUN, clear, finish_run, is_begun
from mismatch_cli.trace.files import could_not_write, replacing_entries
from mismatch_cli.trace.ownership import result_files


@contextmanager
def replacing_when_complete(folder: Path) -> Iterator[Path]:
    """The folder to record a run into that replaces the one in `folder`, maybe begun before;
    `put_in_place` ends it.
    """
    draft_folder = folder / RUN
    draft_folder.mkdir(exist_ok=True)
    (draft_folder / MARK).touch()
    (draft_folder / NEW).mkdir(exist_ok=True)
    try:
        yield draft_folder / NEW
    finally:
        clear(draft_folder)  # if nothing was recorded


def begun_replacement(folder: Path) -> Path | None:
    """Where a run has begun that replaces the one in `folder`; None if there is none, or it is
    complete.
    """
    new = folder / RUN / NEW
    if is_begun(new):
        return new
    return None


def drop_replacement(folder: Path) -> None:
    """Remove a run that has begun beside the one in `folder`."""
    begun = begun_replacement(folder)
    if begun is not None:
        shutil.rmtree(begun)
        clear(folder / RUN)


def final_folder(work: Path) -> Path:
    """The folder of the run that is recorded in `work`; its log is there from the start."""
    if (work.parent.name, work.name) == (RUN, NEW):
        return work.parent.parent
    return work


def put_in_place(work: Path) -> Path:
    """Replace the older run by the complete one in `work`, if there is an older one; returns the
    run's folder.
    """
    folder = final_folder(work)
    if folder != work:
        try:
            finish_run(work.parent, result_files(folder))
        except OSError as error:
            raise could_not_write(folder, error) from error
    return folder


@contextmanager
def replacing_run(folder: Path) -> Iterator[Path]:
    """Yield an empty folder; at the end its entries replace the run in `folder`, and one that
    has begun beside it.
    """
    with replacing_entries(folder / "trace", lambda: result_files(folder)) as new:
        yield new
    drop_replacement(folder)
