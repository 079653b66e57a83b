"""The columns of a trace, one row each: what it holds, in which shape and unit, and who makes it.

A trace has one row per response and use, with lists as token columns. Row key: step, epoch,
minibatch, prompt_id, sample_index. A column that was not measured is absent; in a column that was
measured for only some responses, the others are null. So a trace of pairs of log-probabilities has
no column of token ids, and log μ says how long a response is.

Types, readers, importers, the recorder, `rescore` and the page of the schema follow from these
rows: a new column is a row and its writer. Code that computes with it adds a field to `TokenBatch`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import Enum

import pyarrow as pa


class Shape(Enum):
    """How many values a response has."""

    RESPONSE = "one"
    PROMPT = "one per token of the prompt"
    TOKENS = "T, one per token"
    TOP_K = "T · K, the engine's ranks 1…K per token"  # K follows from the lengths
    LIST = "a list of its own length"


class Maker(Enum):
    """Who makes a column: what a new trainer invalidates is what the old one made."""

    RUN = "run"  # which response it is, what was sampled, and what the loop made of it
    ENGINE = "engine"
    TRAINER = "trainer"  # as it is now, whatever the column is called
    RECOMPUTED = "recomputed"  # the trainer at the weights that sampled
    ROUTERS = "routers"  # those of the trainer at the weights that sampled, beside the engine's


@dataclass(frozen=True)
class TraceColumn:
    """A column: the type of one value, its unit, and its meaning for those who write a dump.

    Every row of a trace has the `required` columns; a dump may lack those with a `default`, which
    says what is assumed instead. `aliases` are other names that an import reads.
    """

    name: str
    shape: Shape
    value: pa.DataType
    maker: Maker
    meaning: str
    unit: str = ""
    default: str = ""
    required: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def type(self) -> pa.DataType:
        """The Parquet type."""
        if self.shape is Shape.RESPONSE:
            return self.value
        return pa.list_(self.value)

    @property
    def is_required(self) -> bool:
        """Whether a dump without it is not a trace."""
        return self.required and not self.default

    @property
    def description(self) -> str:
        """Its meaning, unit and default in one line."""
        line = self.meaning
        if self.unit:
            line += f", {self.unit}"
        if self.aliases:
            line += f"; also read from {', '.join(self.aliases)}"
        if self.default:
            line += f"; default: {self.default}"
        if self.is_required:
            line += " (required)"
        return line


_ONE, _TOKENS, _TOP_K, _LIST = Shape.RESPONSE, Shape.TOKENS, Shape.TOP_K, Shape.LIST
_INT, _LONG, _FLOAT = pa.int32(), pa.int64(), pa.float32()
_RUN, _ENGINE, _TRAINER = Maker.RUN, Maker.ENGINE, Maker.TRAINER
_RECOMPUTED, _ROUTERS = Maker.RECOMPUTED, Maker.ROUTERS

# The order of these rows is that of a shard's columns.
# fmt: off
COLUMNS = {column.name: column for column in (
    TraceColumn("step", _ONE, _INT, _RUN, "training step", default="0", required=True),
    TraceColumn("epoch", _ONE, _INT, _RUN, "pass over the batch", default="0", required=True),
    TraceColumn("minibatch", _ONE, _INT, _RUN, "update within the step", default="0",
                required=True),
    TraceColumn("prompt_id", _ONE, _LONG, _RUN, "a number or a text", required=True,
                default="a hash of prompt_ids", aliases=("group_id",)),
    TraceColumn("sample_index", _ONE, _INT, _RUN, "which response to this prompt",
                default="the row number", required=True),
    TraceColumn("version_rollout", _ONE, _INT, _ENGINE, "updates of the sampling weights",
                default="0"),
    TraceColumn("version_trainer", _ONE, _INT, _TRAINER,
                "updates of logp_trainer's weights",
                default="the same, or 1 more with logp_recomputed"),
    TraceColumn("reward", _ONE, _FLOAT, _RUN, "one number"),
    TraceColumn("finish_reason", _ONE, pa.string(), _ENGINE, "stop or length", default="unknown",
                required=True),
    TraceColumn("prompt_ids", Shape.PROMPT, _INT, _RUN, "token ids of the prompt",
                default="unknown"),
    TraceColumn("response_ids", _TOKENS, _INT, _ENGINE,
                "token ids of the response, with tool output", default="unknown"),
    TraceColumn("loss_mask", _TOKENS, pa.bool_(), _RUN,
                "false (or 0) outside the loss, such as tool output",
                default="all true"),
    TraceColumn("logp_rollout", _TOKENS, _FLOAT, _ENGINE,
                "log μ of each response token", "nats", required=True),
    TraceColumn("rank_rollout", _TOKENS, _INT, _ENGINE, "1 = the engine's most probable token"),
    TraceColumn("logp_trainer", _TOKENS, _FLOAT, _TRAINER,
                "log π of each response token, at the sampling temperature", "nats"),
    # Where the trainer has the weights that sampled, this would repeat logp_trainer. The column is
    # absent there, and readers serve logp_trainer under this name.
    TraceColumn("logp_recomputed", _TOKENS, _FLOAT, _RECOMPUTED,
                "log π at the sampling weights, if logp_trainer uses newer ones", "nats"),
    TraceColumn("logp_average", _TOKENS, _FLOAT, _TRAINER,
                "log π at an average of the trainer's weights", "nats"),
    TraceColumn("logp_trainer_repeat", _TOKENS, _FLOAT, _TRAINER,
                "log π in other micro-batches: the noise floor", "nats"),
    TraceColumn("entropy_trainer", _TOKENS, _FLOAT, _TRAINER, "entropy of π", "nats"),
    TraceColumn("rank_trainer", _TOKENS, _INT, _TRAINER, "1 = the trainer's most probable token"),
    TraceColumn("advantage", _TOKENS, _FLOAT, _RUN,
                "one number, a list of one, or one per token"),
    TraceColumn("tv_full", _TOKENS, _FLOAT, _TRAINER, "TV over the vocabulary"),
    TraceColumn("kl_full", _TOKENS, _FLOAT, _TRAINER, "KL(μ‖π) over the vocabulary", "nats"),
    TraceColumn("route_flips", _TOKENS, pa.uint8(), _ROUTERS,
                "layers where trainer and engine chose different experts; 255: unknown"),
    TraceColumn("route_first", _TOKENS, pa.uint8(), _ROUTERS,
                "the first of these, among layers with a router; 255: none"),
    # The sampled token is not inserted: beyond rank K, it is in none of these columns.
    TraceColumn("topk_ids", _TOP_K, _INT, _ENGINE, "the engine's K most probable ids, flat"),
    TraceColumn("topk_logp_rollout", _TOP_K, _FLOAT, _ENGINE, "log μ of these ids", "nats"),
    TraceColumn("topk_logp_trainer", _TOP_K, _FLOAT, _TRAINER, "log π of these ids", "nats"),
    TraceColumn("topk_logp_recomputed", _TOP_K, _FLOAT, _RECOMPUTED,
                "log π of these ids, at the sampling weights", "nats"),
    TraceColumn("route_layers", _LIST, _INT, _ROUTERS,
                "layers × 4: tokens, flips, common experts, same first expert"),
    TraceColumn("route_margins", _LIST, _INT, _ROUTERS,
                "2 × bins of router margins: sides agree, sides differ"),
    TraceColumn("routes", _LIST, pa.uint16(), _ENGINE,
                "(prompt + response − 1) × layers × experts per token: the engine's experts, "
                "flat"),
)}
# fmt: on

# Other names that an import reads, each with the column that it means
ALIASES = {alias: column.name for column in COLUMNS.values() for alias in column.aliases}
ROW_KEY = ("step", "epoch", "minibatch", "prompt_id", "sample_index")
PROMPT_COLUMN = "prompt_ids"
ID_COLUMNS = (PROMPT_COLUMN, "response_ids", "topk_ids")
REQUIRED = tuple(column.name for column in COLUMNS.values() if column.required)
ALWAYS_READ = (*REQUIRED, PROMPT_COLUMN, "response_ids")  # as far as a shard has them


def of_shape(*shapes: Shape) -> tuple[str, ...]:
    """The columns of these shapes, one shape after the other, each in the order of a shard."""
    names: list[str] = []
    for shape in shapes:
        names += [column.name for column in COLUMNS.values() if column.shape is shape]
    return tuple(names)


def length_column(names: Container[str]) -> str:
    """The column whose lists say how long each response is: its ids, or, without any, log μ."""
    if "response_ids" in names:
        return "response_ids"
    return "logp_rollout"


def made_by(maker: Maker) -> tuple[str, ...]:
    """The columns that it makes, in the order of a shard."""
    return tuple(column.name for column in COLUMNS.values() if column.maker is maker)


TOKEN_COLUMNS = of_shape(Shape.TOKENS)
TOPK_COLUMNS = of_shape(Shape.TOP_K)
# A mixture of experts has one list of each per response, whose length follows from the model.
ROUTE_COLUMNS = of_shape(Shape.LIST)
