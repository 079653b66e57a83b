"""What others call healthy and what others measured, read from `reference.toml`."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Family = Literal["dense", "moe", ""]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A published limit: values up to `healthy` are healthy, values above `broken` are not."""

    who: str
    source: str
    name: str  # of the metric, as the source has it
    metric: str  # ours, a key of metrics/gap_table.py
    absolute: bool = False
    pair: str
    healthy: float = float("nan")
    broken: float = float("nan")
    says: str  # what the source concludes above it
    note: str = ""
    family: Family = ""

    @property
    def bounds(self) -> tuple[float, float]:
        """`healthy` and `broken`; if only one was published, it is both."""
        healthy = self.broken if self.healthy != self.healthy else self.healthy
        return healthy, healthy if self.broken != self.broken else self.broken


@dataclass(frozen=True)
class Measured:
    """What somebody measured, as a range; a single value is both ends."""

    model: str
    setup: str
    metric: str
    source: str
    low: float
    high: float
    family: Family = ""
    precision: str = ""
    name: str = ""  # of the framework's own metric, where it averages differently
    state: str = ""
    derived: str = ""


@dataclass(frozen=True)
class Usual:
    """The mean |Δlog p|, in nats, that a precision causes without any bug; `precision` is empty
    if it is unknown.
    """

    precision: str
    who: str
    low: float
    high: float
    source: str

    @property
    def text(self) -> str:
        return f"{self.low:g}–{self.high:g}"

    @property
    def far_above(self) -> float:
        """Nats above which the trace's precisions alone do not explain the gap."""
        return _FAR * self.high


_FAR = 2.0  # times the upper end: the usual range comes from few models


@dataclass(frozen=True)
class Reference:
    bars: tuple[Bar, ...]
    measured: tuple[Measured, ...]
    usual: tuple[Usual, ...]


@cache
def reference() -> Reference:
    """The packaged table."""
    content = tomllib.loads((Path(__file__).parent / "reference.toml").read_text(encoding="utf-8"))
    return Reference(
        tuple(Bar(**row) for row in content["bar"]),
        tuple(_measured(row) for row in content["measured"]),
        tuple(Usual(**row) for row in content["usual"]),
    )


def _measured(row: dict[str, Any]) -> Measured:
    value = row.pop("value", None)
    return Measured(**row) if value is None else Measured(**row, low=value, high=value)


_EXPERTS = re.compile(
    "moe|mixtral|gptoss|deepseekv[2-9]|qwen3next|llama4|dbrx|minimax|longcat|grok|arctic|kimi|step3",
    re.IGNORECASE,
)
_EITHER = re.compile("nemotronh|jamba", re.IGNORECASE)  # architectures with and without experts
_PRECISIONS = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
_COARSEST_FIRST = ("fp4", "fp8", "int8", "bf16", "fp16", "fp32")
_SIDES = ("rollout", "trainer", "recomputed")
_DTYPES = ("dtype", "kv_cache_dtype", "quantization")


def family(about: Mapping[str, Any]) -> Family:
    """`moe` or `dense` from the number of experts or the architecture's name; empty if unknown."""
    sides = list(_sides(about))
    experts = [side["num_experts"] for side in sides if isinstance(side.get("num_experts"), int)]
    if experts:
        return "moe" if max(experts) > 1 else "dense"
    names = [str(side["architecture"]) for side in sides if side.get("architecture")]
    if any(_EXPERTS.search(name) for name in names):
        return "moe"
    return "dense" if names and not any(_EITHER.search(name) for name in names) else ""


def precision(about: Mapping[str, Any]) -> str:
    """The coarsest precision of weights, KV cache or quantisation on either side; empty if
    unknown.
    """
    named = [str(side[key]).lower() for side in _sides(about) for key in _DTYPES if side.get(key)]
    short = [_PRECISIONS.get(name, name) for name in named]
    return next((known for known in _COARSEST_FIRST if any(known in name for name in short)), "")


def _sides(about: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (about[name] for name in _SIDES if isinstance(about.get(name), Mapping))


def usual_gap(about: Mapping[str, Any]) -> Usual:
    """The usual gap of the coarsest precision on either side; of an unknown precision if the
    manifest names none.
    """
    rows = {row.precision: row for row in reference().usual}
    return rows.get(precision(about)) or rows[""]
