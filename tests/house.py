"""The house in numbers: tokens, width and constructs of the package, each of which may only fall;
and what lab/ and the tests have of those that decide how code reads.

python -m tests.house           # today's numbers, and what they may be
python -m tests.house --lower   # write the numbers that have fallen into tests/ratchets.toml
python -m tests.house --list found-names   # where one of them is counted

Size is counted in tokens (names, operators, numbers), which no formatter moves; what depends on
size is counted per 1,000 of them.
"""

from __future__ import annotations

import ast
import bisect
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import typer

from mismatch_cli.app.cli import COMMANDS
from mismatch_cli.base import registry
from mismatch_cli.base.configuration import has_flag
from tests.paths import PACKAGE, ROOT

RATCHETS = Path(__file__).with_name("ratchets.toml")
MOST_COLUMNS, MOST_TOKENS, MOST_BRANCHES = 100, 250, 10
NO_NAMES = ("found", "told", "asked", "known", "given", "kept", "seen")
FRAMEWORKS = (
    "areal", "miles", "ms_swift", "nemo_rl", "oat", "open_instruct", "openrlhf", "prime_rl",
    "rlinf", "roll", "skyrl", "slime", "tinker", "trl", "unsloth", "verl",
)  # fmt: skip
_RENDERS = ("report", "pages", "plots", "commands")  # rooms, and folders of rooms
# Dictionaries in there that are no results: of matplotlib, of Parquet's footers, of metrics.jsonl,
# of a manifest, and what was typed
_NOT_RESULTS = {
    "app/commands/verdict.py": ("engine_dtype",),
    "bisect/commands/bisect.py": ("manifest",),
    "report/drawing/panels.py": ("rcParams",),
    "report/excerpts.py": ("group",),
    "train/commands/train.py": ("record", "values"),
}
# Fields that are keys of files: they cannot be renamed
_KEYS_OF_FILES = {
    "limits/causes.py": "seen",
    "limits/suspects.py": "seen",
    "studies/curation.py": "kept",
    "studies/diagnosis_result.py": "seen",
    "studies/watch_state.py": "told",
}
_COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
_BRANCHES = (
    ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.comprehension, ast.BoolOp,
    ast.match_case, ast.Assert,
)  # fmt: skip
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Places = Iterator[str]


class File:
    """A file, parsed; its name is its path from the package, or from another folder."""

    def __init__(self, path: Path, folder: Path = PACKAGE) -> None:
        self.name = path.relative_to(folder).as_posix()
        self.text = path.read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.nodes = list(ast.walk(ast.parse(self.text)))
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        self.token_lines = [token.start[0] for token in tokens if token.type in _COUNTED]

    @property
    def room(self) -> str:
        return self.name.partition("/")[0].removesuffix(".py")

    @property
    def module(self) -> str:
        return f"{PACKAGE.name}.{self.name[:-3].replace('/', '.')}".removesuffix(".__init__")

    def strings(self) -> Iterator[ast.Constant]:
        for node in self.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node

    def place(self, node: ast.AST) -> str:
        return f"{self.name}:{node.lineno}"

    def functions(self) -> Iterator[ast.FunctionDef]:
        return (node for node in self.nodes if isinstance(node, ast.FunctionDef))

    def tokens_of(self, node: ast.AST) -> int:
        after = bisect.bisect_right(self.token_lines, node.end_lineno)
        return after - bisect.bisect_left(self.token_lines, node.lineno)


@cache
def files() -> tuple[File, ...]:
    return tuple(map(File, sorted(PACKAGE.rglob("*.py"))))


@cache
def files_of(folder: str) -> tuple[File, ...]:
    """The files of `lab` or `tests`, named from the root of the project."""
    return tuple(File(path, ROOT) for path in sorted((ROOT / folder).rglob("*.py")))


def helpers() -> list[File]:
    """What tests import: builders, readers, stand-ins, fixtures."""
    return [file for file in files_of("tests") if "/test_" not in file.name]


def tokens(among: Iterable[File]) -> int:
    return sum(len(file.token_lines) for file in among)


def each(kind: type | tuple[type, ...], holds: Callable[[ast.AST], bool]) -> Places:
    for file in files():
        for node in file.nodes:
            if isinstance(node, kind) and holds(node):
                yield file.place(node)


def lines_that(hold: Callable[[str], object]) -> Places:
    for file in files():
        for number, line in enumerate(file.lines, 1):
            if hold(line):
                yield f"{file.name}:{number}"


def functions_that(hold: Callable[[File, ast.FunctionDef], bool]) -> Places:
    for file in files():
        for node in file.functions():
            if hold(file, node):
                yield f"{file.place(node)} {node.name}"


def is_large(file: File, node: ast.FunctionDef) -> bool:
    """But for `command`, whose signature is a list of flags."""
    return node.name != "command" and file.tokens_of(node) > MOST_TOKENS


def is_branched(_: File, node: ast.FunctionDef) -> bool:
    return sum(isinstance(inner, _BRANCHES) for inner in ast.walk(node)) > MOST_BRANCHES


def ground_floor() -> Places:
    yield from sorted({file.room for file in files()} - {"__init__", "__main__"})


def imports() -> Iterator[tuple[File, ast.ImportFrom]]:
    for file in files():
        for node in file.nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mismatch_cli."):
                yield file, node


def private_imports() -> Places:
    """Imports of another room's `_private` file."""
    for file, node in imports():
        _, room, *rest = [*node.module.split("."), *(alias.name for alias in node.names)]
        if room != file.room and any(re.match(r"_[a-z]", part) for part in rest):
            yield f"{file.place(node)} {node.module}"


def inside_another(kind: tuple[type, ...]) -> Callable[[ast.AST], bool]:
    return lambda node: any(
        isinstance(inner, kind) for inner in ast.walk(node) if inner is not node
    )


def is_condition(node: ast.AST) -> bool:
    called = (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bool"
    )
    return called or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def is_arithmetic_on_a_condition(node: ast.BinOp) -> bool:
    """`" and traces/" * bool(x)`, `[row] * (n > 1)`; products of arrays with masks are meant."""
    sides = (node.left, node.right)
    text = any(isinstance(side, ast.List | ast.Tuple | ast.JoinedStr) for side in sides)
    text |= any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides)
    compared = any(isinstance(side, ast.Compare) for side in sides)
    return isinstance(node.op, ast.Mult) and (any(map(is_condition, sides)) or (text and compared))


def string_keys() -> Places:
    """`row["key"]` and `row.get("key")` in files that render results, but for rows of tables of
    constants, such as `METRICS["k3"]`, and `_NOT_RESULTS`.
    """
    for file in files():
        if set(file.name.split("/")[:-1]) & set(_RENDERS):
            for node in file.nodes:
                keyed = keyed_by_string(node)
                if keyed and not keyed.isupper() and keyed not in _NOT_RESULTS.get(file.name, ()):
                    yield file.place(node)


def keyed_by_string(node: ast.AST) -> str:
    """What a string key is looked up in, as written; empty where a node looks up none."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        table, key = node.value, node.slice
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" and node.args:
        table, key = node.func.value, node.args[0]
    else:
        return ""
    is_string = isinstance(key, ast.Constant) and isinstance(key.value, str)
    return ast.unparse(table) if is_string else ""


def repeated_classes() -> Places:
    places = defaultdict(list)
    for file in files():
        for node in file.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file.name)
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield f"{name} {', '.join(where)}"


def no_nouns(among: Iterable[File]) -> Places:
    """Participles as names of variables, arguments and loops."""
    for file in among:
        for node in file.nodes:
            name = node.arg if isinstance(node, ast.arg) else None
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            if name in NO_NAMES and name != _KEYS_OF_FILES.get(file.name):
                yield f"{file.place(node)} {name}"


def frameworks_elsewhere() -> Places:
    """A framework's name in an identifier or a key of a file that is not the framework's own.

    A string of several words cites it: a source, a note, an example.
    """
    for file in files():
        names = {word.replace("-", "_") for word in chain.from_iterable(map(names_in, file.nodes))}
        for name in FRAMEWORKS:
            belongs = file.name.startswith(f"frameworks/{name}/")
            pattern = re.compile(rf"(?<![a-z]){name}(?![a-z])")
            if not belongs and any(map(pattern.search, names)):
                yield f"{file.name} {name}"


def names_in(node: ast.AST) -> Iterator[str]:
    """The names that code uses in a node, and its string or bytes if that is one word."""
    for _, value in ast.iter_fields(node):
        word = value.decode(errors="replace") if isinstance(value, bytes) else value
        if isinstance(word, str) and len(word.split()) == 1:
            yield word.lower()


@cache
def imported() -> dict[str, set[str]]:
    """The other modules of the package that each one imports, at its top, in functions, or only
    for types.
    """
    targets: dict[str, set[str]] = {file.module: set() for file in files()}
    for file, node in imports():
        named = {f"{node.module}.{alias.name}" for alias in node.names} & targets.keys()
        targets[file.module] |= (named or {node.module}) & targets.keys() - {file.module}
    return targets


def circles() -> Places:
    """Files that import themselves through others, where imports for types count too."""
    targets = imported()
    yield from sorted(module for module in targets if module in reached(targets, module))


def reached(targets: dict[str, set[str]], start: str) -> set[str]:
    """What a module imports, directly or through others."""
    modules: set[str] = set()
    waiting = list(targets[start])
    while waiting:
        module = waiting.pop()
        if module not in modules:
            modules.add(module)
            waiting += targets[module]
    return modules


def flags() -> Places:
    """The flags of every command: a new one replaces another. A key of --config has none."""
    for command in registry.names(COMMANDS):
        app = typer.Typer(add_completion=False)
        app.command(command)(registry.load(COMMANDS, command, "command").command)
        for parameter in typer.main.get_command(app).params:
            for flag in parameter.opts if has_flag(parameter) else ():
                if flag.startswith("--"):
                    yield f"{command} {flag}"


COUNTS: dict[str, Callable[[], Places]] = {
    "ground-floor": ground_floor,
    "private-imports": private_imports,
    "files-in-circles": circles,
    "flags": flags,
    "wide-lines": lambda: lines_that(lambda line: len(line) > MOST_COLUMNS),
    "unformatted-statements": lambda: lines_that(re.compile(r"#\s*fmt: (skip|off)").search),
    "large-functions": lambda: functions_that(is_large),
    "branched-functions": lambda: functions_that(is_branched),
    "arithmetic-on-conditions": lambda: each(ast.BinOp, is_arithmetic_on_a_condition),
    "nested-comprehensions": lambda: each(_COMPREHENSIONS, inside_another(_COMPREHENSIONS)),
    "nested-conditionals": lambda: each(ast.IfExp, inside_another((ast.IfExp,))),
    "string-keys-that-render": string_keys,
    "repeated-class-names": repeated_classes,
    "found-names": lambda: no_nouns(files()),
    "frameworks-elsewhere": frameworks_elsewhere,
}
RATES: dict[str, tuple[type, ...]] = {
    "comprehensions": _COMPREHENSIONS,
    "conditional-expressions": (ast.IfExp,),
    "assignment-expressions": (ast.NamedExpr,),
}
# What is rare enough to be read once: a ratchet is not lowered any further
READS_WELL = {
    "comprehensions": 4,
    "conditional-expressions": 2.3,
    "assignment-expressions": 0.15,
    "lines-per-comment": 100,
}


def measured() -> dict[str, float]:
    """Every number of the package by its name."""
    return {name: len(list(places())) for name, places in COUNTS.items()} | rates(files())


def rates(among: Iterable[File]) -> dict[str, float]:
    """Constructs per 1,000 tokens, and lines of code for each line that holds only a comment."""
    kinds: Counter[type[ast.AST]] = Counter()
    lines = comments = 0
    for file in among:
        kinds.update(map(type, file.nodes))
        lines += len(file.lines)
        comments += sum(line.lstrip().startswith("#") for line in file.lines)
    size = tokens(among) / 1000
    numbers = {}
    for name, kind in RATES.items():
        numbers[name] = round(sum(kinds[one] for one in kind) / size, 2)
    return numbers | {"lines-per-comment": round(lines / comments, 1)}


def beside() -> dict[str, dict[str, float]]:
    """What decides how lab/ and the helpers of tests read, and the names in all tests."""
    numbers: dict[str, dict[str, float]] = {
        "lab": rates(files_of("lab")),
        "helpers": rates(helpers()),
        "tests": {},
    }
    for part, among in zip(numbers, (files_of("lab"), helpers(), files_of("tests")), strict=True):
        numbers[part]["found-names"] = len(list(no_nouns(among)))
    return numbers


def most_beside(name: str) -> float:
    """The limit of a number beside the package: names are nouns there too."""
    return READS_WELL.get(name, 0)


def ratchets() -> dict[str, float]:
    return tomllib.loads(RATCHETS.read_text(encoding="utf-8"))


def tokens_by_room() -> Counter[str]:
    sizes: Counter[str] = Counter()
    for file in files():
        sizes[file.room] += len(file.token_lines)
    return sizes


def lower() -> None:
    """Write what has fallen; what has risen stays, and the test keeps failing."""
    old = ratchets() if RATCHETS.exists() else {}
    lines = ["# What tests/house.py counts, as it is today: no number may rise."]
    for name, value in measured().items():
        lowest = READS_WELL.get(name, 0)
        lines.append(f"{name} = {max(lowest, min(value, old.get(name, value))):g}")
    RATCHETS.write_text("\n".join([*lines, ""]), encoding="utf-8")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--lower"]:
        lower()
    elif arguments[:1] == ["--list"]:
        print("\n".join(COUNTS[arguments[1]]()))
        if arguments[1] == "found-names":
            print("\n".join(no_nouns((*files_of("lab"), *files_of("tests")))))
        return
    may = ratchets()
    for name, value in measured().items():
        print(f"{name:<36}{value:>10,g}   at most {may.get(name, value):,g}")
    for part, numbers in beside().items():
        for name, value in numbers.items():
            print(f"{part + ': ' + name:<36}{value:>10,g}   at most {most_beside(name):,g}")
    print(f"{'tokens':<36}{tokens(files()):>10,}")
    for room, size in tokens_by_room().most_common(12):
        print(f"  {room:<34}{size:>10,}")


if __name__ == "__main__":
    main(sys.argv[1:])
