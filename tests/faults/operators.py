"""The faults that a line can have: each is one expression replaced by another."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from tests.paths import PACKAGE

# Of training, what draws and lays out is not among what users decide by.
_DRAWN = ("train/plots/", "train/pages/", "train/commands/", "train/live.py")
ROOMS = ("diagnosis", "frameworks", "metrics", "models/scoring", "probe", "rules", "trace", "train")

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
# Operators with two sides, each with the one in its place.
_SWAPPED: dict[type[ast.AST], tuple[str, Any]] = {
    ast.Add: ("sign", ast.Sub),
    ast.Sub: ("sign", ast.Add),
    ast.BitAnd: ("mask", ast.BitOr),
    ast.BitOr: ("mask", ast.BitAnd),
    ast.And: ("condition", ast.Or),
    ast.Or: ("condition", ast.And),
}
_OPPOSITES = {
    "min": "max", "minimum": "maximum", "amin": "amax", "argmin": "argmax", "any": "all",
    "fmin": "fmax", "nanmin": "nanmax", "clamp_min": "clamp_max",
}  # fmt: skip
_OPPOSITES |= {there: here for here, there in _OPPOSITES.items()}
_NARROWER = {
    "float64": "float32", "float32": "float16", "int64": "int32", "double": "float",
}  # fmt: skip
# Functions to which the order of their first two arguments is the same.
_SYMMETRIC = (
    "maximum", "minimum", "max", "min", "fmax", "fmin", "logaddexp", "isclose", "allclose",
    "array_equal", "equal", "gcd",
)  # fmt: skip
# Columns of the two policies, μ of the engine and π of the trainer.
_POLICIES = {"rollout": "trainer", "trainer": "rollout", "recomputed": "rollout"}
_OF_A_POLICY = ("logp_", "topk_logp_", "entropy_", "rank_", "version_")
_AXES = {"-1": "0", "0": "1", "1": "0", "2": "1"}
_WITHOUT_EFFECT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Fault:
    """An expression of a file, as bytes `start:stop`, and the code in its place."""

    name: str  # FILE:FUNCTION:OPERATOR:NUMBER, which survives changes elsewhere in the file
    line: int
    last_line: int
    start: int
    stop: int
    code: str

    @property
    def path(self) -> str:
        """From the package."""
        return self.name.split(":")[0]

    def planted(self, source: bytes) -> bytes:
        return source[: self.start] + self.code.encode() + source[self.stop :]

    def shown(self) -> str:
        """Where it is, and its change."""
        return f"{self.path}:{self.line}: {self.change()}"

    def change(self) -> str:
        """Its function, and its line with what the fault replaces in it.

        Unlike the number in `name`, this means the same fault until somebody rewrites the line.
        """
        source = (PACKAGE / self.path).read_bytes()
        line_starts = source.rfind(b"\n", 0, self.start) + 1
        line_stops = source.index(b"\n", self.stop)
        before = source[line_starts : self.start].decode()
        replaced = source[self.start : self.stop].decode()
        after = source[self.stop : line_stops].decode()
        function = self.name.split(":")[1]
        line = " ".join(f"{before}«{replaced} → {self.code}»{after}".split())
        return f"{function}: {line}"


def package_digest() -> str:
    """Of the sources, whose lines are numbered."""
    sources = (path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))
    return hashlib.sha256(b"".join(sources)).hexdigest()


def all_faults() -> list[Fault]:
    """Of every module of the rooms whose numbers users decide by."""
    files: list[Path] = []
    for room in ROOMS:
        files += (PACKAGE / room).rglob("*.py")
    faults: list[Fault] = []
    for path in sorted(files):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(_DRAWN):
            faults += faults_of(name)
    return faults


def faults_of(path: str) -> Iterator[Fault]:
    source = (PACKAGE / path).read_bytes()
    # The columns of `ast` count bytes, so the source is cut as bytes
    starts = list(accumulate(map(len, source.splitlines(keepends=True)), initial=0))
    numbers: Counter[str] = Counter()
    for function, node in _expressions(ast.parse(source), ""):
        at = node.value if isinstance(node, ast.keyword) else node
        start = starts[at.lineno - 1] + at.col_offset
        stop = starts[at.end_lineno - 1] + at.end_col_offset
        for operator, code in _alternatives(node):
            name = f"{path}:{function or 'module'}:{operator}"
            numbers[name] += 1
            yield Fault(f"{name}:{numbers[name]}", at.lineno, at.end_lineno, start, stop, code)


def _expressions(node: ast.AST, function: str) -> Iterator[tuple[str, ast.expr | ast.keyword]]:
    """Every expression that runs and every `dim=` and `axis=`, with its function; annotations,
    decorators, texts and messages are left out.
    """
    if isinstance(node, _WITHOUT_EFFECT) or _is_for_types_or_readers(node):
        return
    if isinstance(node, ast.expr) or _is_axis(node):
        yield function, node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    for child in _that_run(node):
        yield from _expressions(child, function)


def _is_axis(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg in ("dim", "axis")


def _is_for_types_or_readers(node: ast.AST) -> bool:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def _that_run(node: ast.AST) -> Iterable[ast.AST]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            return [*filter(None, defaults), *node.body]
        case ast.ClassDef():
            return node.body
        case ast.AnnAssign():
            return [node.value] if node.value is not None else []
        case ast.keyword(arg="dim" | "axis") | ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
            return []
        case _:
            return ast.iter_child_nodes(node)


def _alternatives(node: ast.expr | ast.keyword) -> Iterator[tuple[str, str]]:
    """The operator and the new code of each fault of one expression."""
    match node:
        case ast.keyword(value=value):
            axis = _AXES.get(ast.unparse(value))
            if axis is not None:
                yield "axis", axis
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                for other in _COMPARISONS[type(operator)]:
                    changed = copy.deepcopy(node)
                    changed.ops[place] = other()
                    yield "comparison", _code(changed)
        case ast.Constant(value=bool()):
            return
        case ast.Constant(value=int()):
            yield "plus-one", str(node.value + 1)
        case ast.Constant(value=str()):
            other = _other_policy(node.value)
            if other:
                yield "policies", repr(other)
        case ast.UnaryOp(op=ast.USub() | ast.Invert() | ast.Not()):
            operator = "sign" if isinstance(node.op, ast.USub) else "mask"
            yield operator, _code(node.operand)
        case ast.BinOp(op=ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Pow()):
            yield "factor", _code(node.left)
        case ast.BinOp() | ast.BoolOp() if type(node.op) in _SWAPPED:
            if isinstance(node, ast.BoolOp) or not _joins_texts(node):
                operator, other = _SWAPPED[type(node.op)]
                changed = copy.deepcopy(node)
                changed.op = other()
                yield operator, _code(changed)
        case ast.IfExp():
            yield "condition", _code(ast.IfExp(node.test, node.orelse, node.body))
        case ast.Call():
            yield from _of_a_call(node)
        case ast.Attribute(ctx=ast.Load()):
            for operator, other in _other_names(node.attr):
                yield operator, _code(ast.Attribute(node.value, other, ast.Load()))
        case ast.Name(ctx=ast.Load()):
            yield from _other_names(node.id)


def _of_a_call(node: ast.Call) -> Iterator[tuple[str, str]]:
    arguments, name = node.args, ast.unparse(node.func)
    if any(isinstance(argument, ast.Starred) for argument in arguments):
        return
    if name.endswith("where") and len(arguments) == 3:
        condition, first, other = arguments
        yield "mask", _code(ast.Call(node.func, [condition, other, first], node.keywords))
    elif len(arguments) > 1 and name.split(".")[-1] not in _SYMMETRIC:
        first, other, *rest = arguments
        if ast.dump(first) != ast.dump(other):
            yield "arguments", _code(ast.Call(node.func, [other, first, *rest], node.keywords))


def _other_names(name: str) -> Iterator[tuple[str, str]]:
    if name in _OPPOSITES:
        yield "min-max", _OPPOSITES[name]
    if name in _NARROWER:
        yield "dtype", _NARROWER[name]
    other = _other_policy(name)
    if other:
        yield "policies", other


def _other_policy(name: str) -> str | None:
    if name.startswith(_OF_A_POLICY):
        for policy, other in _POLICIES.items():
            if policy in name.split("_"):
                return name.replace(policy, other)
    return None


def _joins_texts(node: ast.BinOp) -> bool:
    """Whether an operand is a text, a list or a type, which have no sign."""
    return any(
        isinstance(side, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple | ast.Dict)
        or (isinstance(side, ast.Constant) and not isinstance(side.value, int | float))
        for side in (node.left, node.right)
    )


def _code(node: ast.expr) -> str:
    return f"({ast.unparse(ast.fix_missing_locations(node))})"
