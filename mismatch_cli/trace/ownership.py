"""Which files in a folder are ours: those with our mark and one of our names. Nothing else is
replaced or removed.

A name is not enough: people have their own `plots/` and `summary.json`.
"""

import csv
import os
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from mismatch_cli.base.errors import MismatchError, denied
from mismatch_cli.base.text import parse_json
from mismatch_cli.trace.drafts import UNFINISHED
from mismatch_cli.trace.files import LOG_HEAD

LOCK = ".lock"
LOG = "log"
PLOTS = "plots"
REPORT = ("summary.json", "report.html", PLOTS)
_FORMAT = "mismatch-cli "  # how the format of every JSON file of ours begins
_IN_PNG, _IN_SVG, _IN_PDF = (
    b"Software\x00mismatch-cli",
    b"<!-- mismatch-cli -->",
    b"/Creator (mismatch-cli)",
)
_IN_PAGE = b'<meta name="generator" content="mismatch-cli">'
_HEAD = 4096  # a mark is within these first bytes
_EXPORTED = {"step", "prompt_id", "sample_index", "response_ids", "logp_rollout"}
_TOKEN = {"step", "prompt_id", "sample_index", "position", "token_id", "token"}
_OF_TRACE = ({"id", "bytes"}, _EXPORTED)
_PROBLEM = {"problem", "answer", "row", "accuracy", "held_out_accuracy"}


def format_of(folder: Path) -> str | None:
    """The format of our report in a folder, None without one."""
    try:
        found = parse_json((folder / "summary.json").read_text(encoding="utf-8")).get("format")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) and found.startswith(_FORMAT) else None


def is_own_file(path: Path, root: Path) -> bool:
    """Whether we wrote a file or folder in the run folder `root`; never true of a link."""
    name = path.relative_to(root).as_posix()
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:  # the holder of the folder has removed it since it was listed
        return True
    if S_ISDIR(mode):
        return any(fnmatchcase(name, pattern) for pattern in FOLDERS)
    if not S_ISREG(mode):
        return False
    return any(
        fnmatchcase(name, pattern) and _holds(test, path) for pattern, test in _FILES.items()
    )


def first_foreign(root: Path) -> str | None:
    """The path in the run folder of the first file or folder that is not ours; in `log/` only
    logs count.
    """
    return next((str(path.relative_to(root)) for path, ours in _walk(root) if not ours), None)


def first_result(root: Path) -> str | None:
    """The first of our files that took work to make; a failed start leaves only a log or a trace
    without shards.
    """
    found = (
        path.relative_to(root).as_posix()
        for path, ours in _walk(root)
        if ours and not path.is_dir()
    )
    return next(
        (name for name in found if not any(fnmatchcase(name, start) for start in _OF_A_START)), None
    )


def result_files(root: Path) -> list[Path]:
    """Our files, except the lock and the log, which outlive a run; a `MismatchError` if there
    are others.
    """
    found = list(_walk(root))
    if foreign := next((path for path, ours in found if not ours), None):
        raise not_a_run_folder(root, foreign.relative_to(root))
    kept = (LOCK, f"{LOG}/*")
    files = [path for path, _ in found if not path.is_dir()]
    return [
        path
        for path in files
        if not any(fnmatchcase(path.relative_to(root).as_posix(), name) for name in kept)
    ]


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
        elif ours and not any(
            fnmatchcase(path.relative_to(root).as_posix(), name) for name in (LOCK, f"{LOG}/*")
        ):
            path.unlink()
    for folder in reversed(folders):
        if (
            folder.name != LOG
            and not UNFINISHED.fullmatch(folder.name)
            and not any(folder.iterdir())
        ):
            folder.rmdir()


def remove_trace(folder: Path) -> None:
    """Remove our trace; reports on it and all other files stay."""
    found = [(path, test) for name, test in _TRACE.items() for path in folder.glob(name)]
    for path in [path for path, test in found if not path.is_symlink() and _holds(test, path)]:
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


def _holds(test: Callable[[Path], bool], path: Path) -> bool:
    """Whether a file has our mark; an error if it cannot be read now, which does not make it
    another's.
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


def _has(mark: bytes) -> Callable[[Path], bool]:
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
    return _holds(_is_json, path.parent / "manifest.json") or any(
        _columns(path) >= known for known in _OF_TRACE
    )


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


_TRACE: dict[str, Callable[[Path], bool]] = {
    "manifest.json": _is_json,
    "vocab.parquet": _is_of_trace,
    "shard-[0-9][0-9][0-9][0-9][0-9].parquet": _is_of_trace,
}
_REPORTS: dict[str, Callable[[Path], bool]] = {
    LOCK: _is_empty,
    "summary.json": _is_json,
    "report.html": _has(_IN_PAGE),
    "plots/*.png": _has(_IN_PNG),
    "plots/*.svg": _has(_IN_SVG),
    "plots/*.pdf": lambda path: _IN_PDF in path.read_bytes(),
}
_EXPORTS: dict[str, Callable[[Path], bool]] = {
    "tokens.csv": _is_token_list,
    "tokens.parquet": lambda path: _columns(path) >= _TOKEN,
    "responses.jsonl": lambda path: _first_record(path) >= _EXPORTED,
}
_REPORT_FOLDERS = ("", "clipstats/", "diagnosis/")
# Patterns of what commands write into a run folder, and the test that recognises such a file. The
# second trace of `curate` has its own reports in its folder.
_FILES: dict[str, Callable[[Path], bool]] = {
    **{f"trace/{name}": test for name, test in _TRACE.items()},
    **{f"held-out/{name}": test for name, test in _TRACE.items()},
    **{
        f"{run}{report}{name}": test
        for run in ("", "held-out/")
        for report in _REPORT_FOLDERS
        for name, test in _REPORTS.items()
    },
    **{f"{run}{name}": test for run in ("", "held-out/") for name, test in _EXPORTS.items()},
    f"{LOG}/*.log": _has(LOG_HEAD),
    **{f"legs/*/{name}": test for name, test in _TRACE.items()},
    "search.json": _is_json,
    "metrics.parquet": _is_metrics_table,
    "weights/~engine-[0-9][0-9][0-9][0-9][0-9].safetensors": lambda _: True,
    **{f"probe/trace/{name}": test for name, test in _TRACE.items()},
    "probe/log/*.log": _has(LOG_HEAD),
    "perfectible.jsonl": lambda path: _is_empty(path) or _first_record(path) == _PROBLEM,
    "distributions/response-[0-9][0-9][0-9][0-9][0-9].float32": lambda _: True,
}
FOLDERS = {parent.as_posix() for name in _FILES for parent in Path(name).parents} - {"."}
_OF_A_START = (LOCK, f"{LOG}/*", "*/manifest.json", "*/vocab.parquet", "distributions/*")
