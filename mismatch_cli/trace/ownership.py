"""Which files in a folder are ours: those with our mark and one of our names. Nothing else is
replaced or removed.

A name is not enough: people have their own `plots/` and `summary.json`.
"""

import csv
import os
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from mismatch_cli.base.errors import MismatchError, denied
from mismatch_cli.base.text import parse_json
from mismatch_cli.trace.drafts import UNFINISHED
from mismatch_cli.trace.files import LOG_HEAD

_Tests = dict[str, Callable[[Path], bool]]  # of files with a mark, by the pattern of their names
LOCK = ".lock"
LOG = "log"
PLOTS = "plots"
REPORT = ("summary.json", "report.html", PLOTS)
_FORMAT = "mismatch-cli "  # how the format of every JSON file of ours begins
_IN_PNG = b"Software\x00mismatch-cli"
_IN_SVG = b"<!-- mismatch-cli -->"
_IN_PDF = b"/Creator (mismatch-cli)"
_IN_PAGE = b'<meta name="generator" content="mismatch-cli">'
_HEAD = 4096  # a mark is within these first bytes
_EXPORTED = {"step", "prompt_id", "sample_index", "response_ids", "logp_rollout"}
_TOKEN = {"step", "prompt_id", "sample_index", "position", "token_id", "token"}
_COLUMNS_OF_TRACE = ({"id", "bytes"}, _EXPORTED)  # of a vocabulary, and of a shard
_PROBLEM = {"problem", "answer", "row", "accuracy", "held_out_accuracy"}


def format_of(folder: Path) -> str | None:
    """The format of our report in a folder, None without one."""
    try:
        stated = parse_json((folder / "summary.json").read_text(encoding="utf-8")).get("format")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(stated, str) and stated.startswith(_FORMAT):
        return stated
    return None


def is_own_file(path: Path, root: Path) -> bool:
    """Whether we wrote a file or folder in the run folder `root`; never true of a link."""
    name = path.relative_to(root).as_posix()
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:  # the holder of the folder has removed it since it was listed
        return True
    if S_ISDIR(mode):
        return _matches(name, FOLDERS)
    if not S_ISREG(mode):
        return False
    tests = [test for pattern, test in _FILES.items() if fnmatchcase(name, pattern)]
    return any(_passes(test, path) for test in tests)


def first_foreign(root: Path) -> str | None:
    """The path in the run folder of the first file or folder that is not ours; in `log/` only
    logs count.
    """
    for path, ours in _walk(root):
        if not ours:
            return str(path.relative_to(root))
    return None


def first_result(root: Path) -> str | None:
    """The first of our files that took work to make; a failed start leaves only a log or a trace
    without shards.
    """
    for path, ours in _walk(root):
        name = path.relative_to(root).as_posix()
        if ours and not path.is_dir() and not _matches(name, _OF_A_START):
            return name
    return None


def result_files(root: Path) -> list[Path]:
    """Our files, except the lock and the log, which outlive a run; a `MismatchError` if there
    are others.
    """
    files = []
    for path, ours in _walk(root):
        if not ours:
            raise not_a_run_folder(root, path.relative_to(root))
        if not path.is_dir() and not _outlives_a_run(path, root):
            files.append(path)
    return files


def not_a_run_folder(root: Path, foreign: Path | str) -> MismatchError:
    return MismatchError(
        f"{root} is not a run folder: it contains {foreign}, which mismatch-cli did not write. "
        "Move it away, or choose another --output."
    )


def remove_results(root: Path) -> None:
    """Remove our files, except the lock and the log: the engine of the new run already writes
    there.
    """
    folders = []
    for path, ours in list(_walk(root)):
        if path.is_dir() and not path.is_symlink():
            folders.append(path)
        elif ours and not _outlives_a_run(path, root):
            path.unlink()
    for folder in reversed(folders):  # the inner ones first, which empties the outer ones
        stays = folder.name == LOG or UNFINISHED.fullmatch(folder.name)
        if not stays and not any(folder.iterdir()):
            folder.rmdir()


def _outlives_a_run(path: Path, root: Path) -> bool:
    """Whether this is the lock of the run folder `root`, or a log."""
    return _matches(path.relative_to(root).as_posix(), (LOCK, f"{LOG}/*"))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def remove_trace(folder: Path) -> None:
    """Remove our trace; reports on it and all other files stay."""
    ours = []
    for pattern, test in _TRACE.items():
        for path in folder.glob(pattern):
            if not path.is_symlink() and _passes(test, path):
                ours.append(path)
    # A shard is recognised by the manifest beside it, so nothing goes before all are recognised.
    for path in ours:
        path.unlink()


def pictures_in(plots: Path) -> list[Path]:
    """The pictures of a report in its `plots/`."""
    return [path for path in plots.glob("*") if is_own_file(path, plots.parent)]


def _walk(root: Path) -> Iterator[tuple[Path, bool]]:
    """Every file and folder, parents first, and whether it is ours; only our folders are
    searched.
    """
    todo = _listed(root)
    while todo:
        path = todo.pop()
        if UNFINISHED.fullmatch(path.name) and not path.is_symlink():
            continue
        if path.parent == root / LOG and path.suffix != ".log":
            continue
        ours = is_own_file(path, root)
        yield path, ours
        if ours and path.is_dir():
            todo += _listed(path)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _passes(test: Callable[[Path], bool], path: Path) -> bool:
    """Whether a file passes the test for our mark; an error if it cannot be read now, which does
    not make it somebody else's.
    """
    try:
        return test(path)
    except (FileNotFoundError, ValueError, AttributeError):
        return False
    except PermissionError as error:
        raise denied(path) from error
    except OSError as error:
        if error.errno is None:  # Arrow's own, for damage
            return False
        raise MismatchError(
            f"{path} cannot be read ({error.strerror}). Try again, or choose another --output."
        ) from error


def _is_empty(path: Path) -> bool:
    return not path.stat().st_size


def _contains(mark: bytes) -> Callable[[Path], bool]:
    def is_marked(path: Path) -> bool:
        with path.open("rb") as file:
            return mark in file.read(_HEAD)

    return is_marked


def _is_json(path: Path) -> bool:
    return str(parse_json(path.read_text(encoding="utf-8")).get("format")).startswith(_FORMAT)


def _is_of_trace(path: Path) -> bool:
    """Recognises a shard or vocabulary by the manifest beside it or, if a kill left none, by its
    columns.
    """
    if _passes(_is_json, path.parent / "manifest.json"):
        return True
    columns = _columns(path)
    return any(columns >= needed for needed in _COLUMNS_OF_TRACE)


def _is_token_list(path: Path) -> bool:
    with path.open(encoding="utf-8") as file:
        return {*next(csv.reader([file.readline(_HEAD)]))} >= _TOKEN


def _columns(path: Path) -> set[str]:
    import pyarrow.parquet as pq

    return set(pq.read_schema(path).names)


def _is_metrics_table(path: Path) -> bool:
    import pyarrow.parquet as pq

    return (pq.read_schema(path).metadata or {}).get(b"format") == f"{_FORMAT}metrics".encode()


def _first_record(path: Path) -> set[str]:
    with path.open(encoding="utf-8") as file:
        return set(parse_json(file.readline()))


_TRACE: _Tests = {
    "manifest.json": _is_json,
    "vocab.parquet": _is_of_trace,
    "shard-[0-9][0-9][0-9][0-9][0-9].parquet": _is_of_trace,
}
_REPORTS: _Tests = {
    LOCK: _is_empty,
    "summary.json": _is_json,
    "report.html": _contains(_IN_PAGE),
    "plots/*.png": _contains(_IN_PNG),
    "plots/*.svg": _contains(_IN_SVG),
    "plots/*.pdf": lambda path: _IN_PDF in path.read_bytes(),
}
_EXPORTS: _Tests = {
    "tokens.csv": _is_token_list,
    "tokens.parquet": lambda path: _columns(path) >= _TOKEN,
    "responses.jsonl": lambda path: _first_record(path) >= _EXPORTED,
}


def _inside(folder: str, tests: _Tests) -> _Tests:
    """These patterns, for files in a folder."""
    return {f"{folder}{pattern}": test for pattern, test in tests.items()}


_REPORT_FOLDERS = ("", "clipstats/", "diagnosis/")
# Patterns of what commands write into a run folder, and the test that recognises such a file.
_FILES: _Tests = {
    **_inside("trace/", _TRACE),
    **_inside("held-out/", _TRACE),
    **_EXPORTS,
    **_inside("held-out/", _EXPORTS),
    f"{LOG}/*.log": _contains(LOG_HEAD),
    **_inside("legs/*/", _TRACE),
    "search.json": _is_json,
    "metrics.parquet": _is_metrics_table,
    "weights/~engine-[0-9][0-9][0-9][0-9][0-9].safetensors": lambda _: True,
    **_inside("probe/trace/", _TRACE),
    "probe/log/*.log": _contains(LOG_HEAD),
    "perfectible.jsonl": lambda path: _is_empty(path) or _first_record(path) == _PROBLEM,
    "distributions/response-[0-9][0-9][0-9][0-9][0-9].float32": lambda _: True,
}
# The second trace of `curate` has its own reports in its folder.
for _folder in _REPORT_FOLDERS:
    _FILES |= _inside(_folder, _REPORTS) | _inside(f"held-out/{_folder}", _REPORTS)
FOLDERS = {parent.as_posix() for name in _FILES for parent in Path(name).parents} - {"."}
_OF_A_START = (LOCK, f"{LOG}/*", "*/manifest.json", "*/vocab.parquet", "distributions/*")
