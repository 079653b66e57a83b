"""The columns of a trace: one row per response and use, with lists as token columns.

`T` values per response for token columns, `T · K` for top-K columns (K follows from the lengths).
Row key: step, epoch, minibatch, prompt_id, sample_index. A column that was not measured is absent;
in a column that was measured for only some responses, the others are null. So a trace of pairs of
log-probabilities has no column of token ids, and log μ says how long a response is.
"""

from collections.abc import Container
from enum import Enum

import pyarrow as pa

ROW_KEY = ("step", "epoch", "minibatch", "prompt_id", "sample_index")


class Maker(Enum):
    """Who makes a column: what a new trainer invalidates is what the old one made."""

    RUN = "run"  # which response it is, what was sampled, and what the loop made of it
    ENGINE = "engine"
    TRAINER = "trainer"  # as it is now, whatever the column is called
    RECOMPUTED = "recomputed"  # the trainer at the weights that sampled
    ROUTERS = "routers"  # those of the trainer at the weights that sampled, beside the engine's


_OF_ROW: dict[str, tuple[pa.DataType, Maker]] = {
    "step": (pa.int32(), Maker.RUN),
    "epoch": (pa.int32(), Maker.RUN),
    "minibatch": (pa.int32(), Maker.RUN),
    "prompt_id": (pa.int64(), Maker.RUN),
    "sample_index": (pa.int32(), Maker.RUN),
    # Optimizer steps made to the sampling weights
    "version_rollout": (pa.int32(), Maker.ENGINE),
    # Optimizer steps made to the weights that scored logp_trainer
    "version_trainer": (pa.int32(), Maker.TRAINER),
    "reward": (pa.float32(), Maker.RUN),
    "finish_reason": (pa.string(), Maker.ENGINE),  # "stop" or "length"
}

_OF_TOKENS: dict[str, tuple[pa.DataType, Maker]] = {
    "response_ids": (pa.int32(), Maker.ENGINE),
    "loss_mask": (pa.bool_(), Maker.RUN),
    "logp_rollout": (pa.float32(), Maker.ENGINE),  # log μ_θ', by the engine that sampled
    "rank_rollout": (pa.int32(), Maker.ENGINE),  # 1 = the engine's most probable token
    "logp_trainer": (pa.float32(), Maker.TRAINER),  # log π_θ
    # Log π_θ', absent at equal weights, where it is logp_trainer
    "logp_recomputed": (pa.float32(), Maker.RECOMPUTED),
    # Log π at an average of the trainer's weights, PPO-EWMA's reference
    "logp_average": (pa.float32(), Maker.TRAINER),
    # The trainer again, with a different micro-batch shape
    "logp_trainer_repeat": (pa.float32(), Maker.TRAINER),
    "entropy_trainer": (pa.float32(), Maker.TRAINER),
    "rank_trainer": (pa.int32(), Maker.TRAINER),
    "advantage": (pa.float32(), Maker.RUN),
    "tv_full": (pa.float32(), Maker.TRAINER),  # of the engine's and the trainer's distributions
    "kl_full": (pa.float32(), Maker.TRAINER),
    # Layers where the trainer's routers chose different experts from the engine's
    "route_flips": (pa.uint8(), Maker.ROUTERS),
    # The first of these among the layers with a router; 255 = none
    "route_first": (pa.uint8(), Maker.ROUTERS),
}

_OF_TOP_K: dict[str, tuple[pa.DataType, Maker]] = {
    # The engine's ranks 1…K; the sampled token is not inserted
    "topk_ids": (pa.int32(), Maker.ENGINE),
    "topk_logp_rollout": (pa.float32(), Maker.ENGINE),
    "topk_logp_trainer": (pa.float32(), Maker.TRAINER),
    "topk_logp_recomputed": (pa.float32(), Maker.RECOMPUTED),
}

# For mixtures of experts: columns about a response as a whole.
_OF_ROUTES: dict[str, tuple[pa.DataType, Maker]] = {
    # Layers × 4: tokens, flips, experts in common, same first expert
    "route_layers": (pa.int32(), Maker.ROUTERS),
    # 2 × bins of the trainer's margins: where it agrees, and where it differs
    "route_margins": (pa.int32(), Maker.ROUTERS),
    # (prompt + response − 1) × layers × experts per token, as the engine chose
    "routes": (pa.uint16(), Maker.ENGINE),
}


def _types(rows: dict[str, tuple[pa.DataType, Maker]]) -> dict[str, pa.DataType]:
    return {name: kind for name, (kind, _) in rows.items()}


ROW_COLUMNS, TOKEN_COLUMNS = _types(_OF_ROW), _types(_OF_TOKENS)
TOPK_COLUMNS, ROUTE_COLUMNS = _types(_OF_TOP_K), _types(_OF_ROUTES)

PROMPT_COLUMN = "prompt_ids"
ID_COLUMNS = (PROMPT_COLUMN, "response_ids", "topk_ids")

REQUIRED = (*ROW_KEY, "logp_rollout", "finish_reason")
ALWAYS_READ = (*REQUIRED, PROMPT_COLUMN, "response_ids")  # as far as a shard has them


def length_column(names: Container[str]) -> str:
    """The column whose lists say how long each response is: its ids, or, without any, log μ."""
    return "response_ids" if "response_ids" in names else "logp_rollout"


def arrow_type(column: str) -> pa.DataType:
    """The Parquet type of a column; a KeyError for an unknown column."""
    if column in ROW_COLUMNS:
        return ROW_COLUMNS[column]
    if column == PROMPT_COLUMN:
        return pa.list_(pa.int32())
    return pa.list_((TOKEN_COLUMNS | TOPK_COLUMNS | ROUTE_COLUMNS)[column])


def made_by(maker: Maker) -> tuple[str, ...]:
    """The columns that it makes, in the order of a shard."""
    rows = _OF_ROW | _OF_TOKENS | _OF_TOP_K | _OF_ROUTES
    return tuple(name for name, (_, own) in rows.items() if own is maker)


def column_order() -> list[str]:
    """Every column, in the order of a shard."""
    return [*ROW_COLUMNS, PROMPT_COLUMN, *TOKEN_COLUMNS, *TOPK_COLUMNS, *ROUTE_COLUMNS]
