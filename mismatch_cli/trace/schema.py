"""The columns of a trace: one row per response and use, with lists as token columns.

`T` values per response for token columns, `T · K` for top-K columns (K follows from the lengths).
Row key: step, epoch, minibatch, prompt_id, sample_index. A column that was not measured is absent;
in a column that was measured for only some responses, the others are null.
"""

import pyarrow as pa

ROW_KEY = ("step", "epoch", "minibatch", "prompt_id", "sample_index")

ROW_COLUMNS: dict[str, pa.DataType] = {
    "step": pa.int32(),
    "epoch": pa.int32(),
    "minibatch": pa.int32(),
    "prompt_id": pa.int64(),
    "sample_index": pa.int32(),
    "version_rollout": pa.int32(),  # optimizer steps made to the sampling weights
    "version_trainer": pa.int32(),  # optimizer steps made to the weights that scored logp_trainer
    "reward": pa.float32(),
    "finish_reason": pa.string(),  # "stop" or "length"
}

TOKEN_COLUMNS: dict[str, pa.DataType] = {
    "response_ids": pa.int32(),
    "loss_mask": pa.bool_(),
    "logp_rollout": pa.float32(),  # log μ_θ', by the engine that sampled
    "rank_rollout": pa.int32(),  # 1 = the engine's most probable token
    "logp_trainer": pa.float32(),  # log π_θ
    "logp_recomputed": pa.float32(),  # log π_θ', absent at equal weights, where it is logp_trainer
    # Log π at an average of the trainer's weights, PPO-EWMA's reference
    "logp_average": pa.float32(),
    "logp_trainer_repeat": pa.float32(),  # the trainer again, with a different micro-batch shape
    "entropy_trainer": pa.float32(),
    "rank_trainer": pa.int32(),
    "advantage": pa.float32(),
    "tv_full": pa.float32(),
    "kl_full": pa.float32(),
    # Layers where the trainer's routers chose different experts from the engine's
    "route_flips": pa.uint8(),
    "route_first": pa.uint8(),  # the first of these among the layers with a router; 255 = none
}

TOPK_COLUMNS: dict[str, pa.DataType] = {
    "topk_ids": pa.int32(),  # the engine's ranks 1…K; the sampled token is not inserted
    "topk_logp_rollout": pa.float32(),
    "topk_logp_trainer": pa.float32(),
    "topk_logp_recomputed": pa.float32(),
}

# For mixtures of experts: columns about a response as a whole.
ROUTE_COLUMNS: dict[str, pa.DataType] = {
    "route_layers": pa.int32(),  # layers × 4: tokens, flips, experts in common, same first expert
    # 2 × bins of the trainer's margins: where it agrees, and where it differs
    "route_margins": pa.int32(),
    # (prompt + response − 1) × layers × experts per token, as the engine chose
    "routes": pa.uint16(),
}

PROMPT_COLUMN = "prompt_ids"
ID_COLUMNS = (PROMPT_COLUMN, "response_ids", "topk_ids")

REQUIRED = (*ROW_KEY, PROMPT_COLUMN, "response_ids", "logp_rollout", "finish_reason")


def arrow_type(column: str) -> pa.DataType:
    """The Parquet type of a column; a KeyError for an unknown column."""
    if column in ROW_COLUMNS:
        return ROW_COLUMNS[column]
    if column == PROMPT_COLUMN:
        return pa.list_(pa.int32())
    return pa.list_((TOKEN_COLUMNS | TOPK_COLUMNS | ROUTE_COLUMNS)[column])


def column_order() -> list[str]:
    """Every column, in the order of a shard."""
    return [*ROW_COLUMNS, PROMPT_COLUMN, *TOKEN_COLUMNS, *TOPK_COLUMNS, *ROUTE_COLUMNS]
