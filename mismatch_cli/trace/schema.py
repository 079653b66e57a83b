"""The columns of a trace: one row per response and use, token columns as lists.

`T` values per response for token columns, `T · K` for top-K columns (K follows from the lengths).
Row key: step, epoch, minibatch, prompt_id, sample_index. A column that was not measured is absent; in a column that was
measured for some responses only, the others are null.
"""

import pyarrow as pa

ROW_KEY = ("step", "epoch", "minibatch", "prompt_id", "sample_index")

ROW_COLUMNS: dict[str, pa.DataType] = {
    "step": pa.int32(),
    "epoch": pa.int32(),
    "minibatch": pa.int32(),
    "prompt_id": pa.int64(),
    "sample_index": pa.int32(),
    "version_rollout": pa.int32(),  # optimiser steps behind the weights that sampled
    "version_trainer": pa.int32(),  # and behind the weights that scored logp_trainer
    "reward": pa.float32(),
    "finish_reason": pa.string(),  # "stop" or "length"
}

TOKEN_COLUMNS: dict[str, pa.DataType] = {
    "response_ids": pa.int32(),
    "loss_mask": pa.bool_(),
    "logp_rollout": pa.float32(),  # log μ_θ', by the engine that sampled
    "rank_rollout": pa.int32(),  # 1 = the engine's most probable token
    "logp_trainer": pa.float32(),  # log π_θ
    "logp_recomputed": pa.float32(),  # log π_θ', absent where the weights are equal: logp_trainer is it
    "logp_average": pa.float32(),  # log π at an average of the trainer's weights, which PPO-EWMA measures from
    "logp_trainer_repeat": pa.float32(),  # the trainer again, in another micro-batch shape
    "entropy_trainer": pa.float32(),
    "rank_trainer": pa.int32(),
    "advantage": pa.float32(),
    "tv_full": pa.float32(),
    "kl_full": pa.float32(),
    "route_flips": pa.uint8(),  # layers in which the trainer's routers chose other experts than the engine's
    "route_first": pa.uint8(),  # the first of them among the layers with a router; 255 = none
}

TOPK_COLUMNS: dict[str, pa.DataType] = {
    "topk_ids": pa.int32(),  # the engine's ranks 1…K; the sampled token is not inserted
    "topk_logp_rollout": pa.float32(),
    "topk_logp_trainer": pa.float32(),
    "topk_logp_recomputed": pa.float32(),
}

# Of a mixture of experts: what is known of a response as a whole.
ROUTE_COLUMNS: dict[str, pa.DataType] = {
    "route_layers": pa.int32(),  # layers × 4: tokens, flips, experts in common, the same first expert
    "route_margins": pa.int32(),  # 2 × bins of the trainer's margins: where it agrees, and where it does not
    "routes": pa.uint16(),  # (prompt + response − 1) × layers × experts per token, as the engine chose
}

PROMPT_COLUMN = "prompt_ids"
ID_COLUMNS = (PROMPT_COLUMN, "response_ids", "topk_ids")

REQUIRED = (*ROW_KEY, PROMPT_COLUMN, "response_ids", "logp_rollout", "finish_reason")


def arrow_type(column: str) -> pa.DataType:
    """The Parquet type of a column; a KeyError for a name that is no column of a trace."""
    if column in ROW_COLUMNS:
        return ROW_COLUMNS[column]
    if column == PROMPT_COLUMN:
        return pa.list_(pa.int32())
    return pa.list_((TOKEN_COLUMNS | TOPK_COLUMNS | ROUTE_COLUMNS)[column])


def column_order() -> list[str]:
    """Every column, in the order in which a shard holds them."""
    return [*ROW_COLUMNS, PROMPT_COLUMN, *TOKEN_COLUMNS, *TOPK_COLUMNS, *ROUTE_COLUMNS]
