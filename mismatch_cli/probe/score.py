"""The second half of a recording: the trainer's log π for every sampled shard."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.attention import attention_warning
from mismatch_cli.models.rank_shares import ALL_HERE, Ranks
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import ResponseScores, Trainer
from mismatch_cli.probe.full_divergence import Distributions
from mismatch_cli.probe.rollouts import RecordingProgress
from mismatch_cli.probe.settings import ScorerSettings
from mismatch_cli.trace.reader import table_to_batch
from mismatch_cli.trace.routes import route_columns
from mismatch_cli.trace.shards import open_shard
from mismatch_cli.trace.writer import rows_to_table, write_shard

# Without a number, a fifth of the responses is scored twice, within these limits.
_NOISE_PART, _LEAST_NOISE, _MOST_NOISE = 5, 16, 128


@dataclass(frozen=True)
class ScoringPass:
    """One pass over the shards: at the trainer's weights, or at the weights that sampled where
    those differ.
    """

    column: str  # "logp_trainer" or "logp_recomputed"
    version_trainer: int | None = None  # written with the trainer's own pass
    # Only at the weights that sampled: others choose other experts anyway
    measures_routes: bool = True

    def done(self, path: Path) -> bool:
        return self.column in open_shard(path).schema_arrow.names


def passes(equal_weights: bool) -> list[ScoringPass]:
    """At equal weights logp_trainer is logp_recomputed, and one pass is enough."""
    if equal_weights:
        return [ScoringPass("logp_trainer", version_trainer=0)]
    return [
        ScoringPass("logp_recomputed"),
        ScoringPass("logp_trainer", version_trainer=1, measures_routes=False),
    ]


def load_trainer(
    model: str,
    adapter: str | None,
    settings: ScorerSettings,
    sampling: SamplingSettings,
    progress: RecordingProgress,
    ranks: Ranks,
) -> Trainer:
    """The trainer of these settings: a model, with an adapter or without."""
    with_adapter = "" if adapter is None else f" with the adapter {adapter}"
    progress.say(f"Loading {model}{with_adapter} into the trainer ({settings.dtype})")
    trainer = Trainer.load(
        model,
        dtype=settings.dtype,
        attn_implementation=settings.attn,
        sampling=sampling,
        adapter=adapter,
        sharding=ranks.sharding,
        float32_head=settings.float32_head,
        device_map=settings.device_map,
        merge_adapter=settings.merge_adapter,
        replay_routes=settings.replay_routes,
    )
    if warned := attention_warning(trainer.describe()):
        progress.say(warned)
    return trainer


def score_shards(
    score: Callable[..., None],
    paths: Sequence[Path],
    done: Sequence[bool],
    noise_responses: int | None,
    progress: RecordingProgress,
    ranks: Ranks,
) -> None:
    """Call `score`, such as `score_shard`, for the shards that are not done; the noise responses
    are scored twice.

    Without a number of noise responses it is a fifth of all, but at least 16 and at most 128. Each
    rank has its own shards, or all of them where the model is spread over ranks. All ranks return
    together.
    """
    tokens = [_tokens_fed(path) for path in paths]
    rows = [len(fed_S) for fed_S in tokens]
    repeated = evenly_spaced(noise_responses_of(noise_responses, sum(rows)), sum(rows))
    firsts = [0, *accumulate(rows)]
    repeats = np.split(np.array([repeated(i) for i in range(firsts[-1])], dtype=bool), firsts[1:-1])
    # What is scored twice counts twice: a noise response takes as long again.
    work = [
        int((fed_S * (1 + repeat_S)).sum()) for fed_S, repeat_S in zip(tokens, repeats, strict=True)
    ]
    scored = sum(count for count, is_done in zip(work, done, strict=True) if is_done)
    with progress.counting("Scoring", sum(work), scored, unit="tokens") as on_scored:
        todo = [i for i, is_done in enumerate(done) if not is_done]
        for i in todo if ranks.spreads else ranks.own(todo):
            score(
                paths[i], repeat=repeats[i].tolist(), on_scored=on_scored, first_response=firsts[i]
            )
    ranks.world.barrier()


def noise_responses_of(asked: int | None, responses: int) -> int:
    if asked is not None:
        return asked
    return min(_MOST_NOISE, max(_LEAST_NOISE, responses // _NOISE_PART))


def _tokens_fed(path: Path) -> np.ndarray:
    """How many tokens the trainer reads of each response of a shard, prompt included, `_S`."""
    table = open_shard(path).read(["prompt_ids", "response_ids"])
    lengths = [pc.list_value_length(table[name]).to_numpy() for name in table.column_names]
    return np.maximum(sum(lengths) - 1, 0)


def score_shard(
    path: Path,
    trainer: Trainer,
    scoring: ScoringPass,
    *,
    token_budget: int,
    repeat: Sequence[bool],
    on_scored: Callable[[int], None],
    distributions: Distributions | None = None,
    first_response: int = 0,
    keep_routes: int = 0,
    ranks: Ranks = ALL_HERE,
) -> None:
    """Add one pass's columns to a shard and rename it into place; `repeat` says which rows to score
    twice (noise).

    The trainer's own pass adds the full divergence of the run's first responses; the shard's first
    response is number `first_response`. After that pass only the run's first `keep_routes`
    responses keep their full routes.
    """
    table = open_shard(path).read()
    full_logp = (
        distributions.read(first_response, table)
        if distributions and scoring.version_trainer is not None
        else None
    )
    scored = score_rows(
        table,
        trainer,
        scoring,
        token_budget=token_budget,
        repeat=repeat,
        on_scored=on_scored,
        full_logp=full_logp,
    )
    if "routes" in table.column_names and scoring.version_trainer is not None:
        kept = max(0, keep_routes - first_response)
        scored["routes"] = [
            row if i < kept else None for i, row in enumerate(table["routes"].to_pylist())
        ]
    if ranks.writes:
        write_shard(path, with_columns(table, scored))


def score_rows(
    table: pa.Table,
    trainer: Trainer,
    scoring: ScoringPass,
    *,
    token_budget: int,
    repeat: Sequence[bool],
    on_scored: Callable[[int], None],
    full_logp: Sequence[np.ndarray | None] | None = None,
) -> dict[str, Any]:
    """One pass's columns for the rows of a table, one item per response; `full_logp` is log μ `[T,
    V]` where known.

    `on_scored` is called with numbers of tokens that were read, those of prompts included.
    """
    requests = requests_of(table, trainer.routing.layers)
    if full_logp is not None:
        requests = [
            replace(r, logp_rollout_TV=mu_TV) for r, mu_TV in zip(requests, full_logp, strict=True)
        ]

    def tell(rows: Sequence[int]) -> None:
        on_scored(sum(requests[row].num_fed for row in rows))

    scores = trainer.score(requests, token_budget=token_budget, on_scored=tell)
    columns = _pass_columns(scoring, scores)
    if scoring.version_trainer is not None:
        repeated_rows = [row for row, chosen in enumerate(repeat) if chosen]
        columns |= _repeat_column(trainer, requests, repeated_rows, token_budget, tell)
    return columns


def requests_of(table: pa.Table, router_layers: int = 0) -> list[ScoreRequest]:
    """Scoring requests for the rows of a table, with their routes if the trainer has layers with
    a router.
    """
    batch = table_to_batch(table.combine_chunks())
    bounds = pairwise(batch.offset_S1.tolist())
    topk_ids_TK = batch.topk_ids_TK
    known_S = (
        table["topk_ids"].is_valid().to_pylist()
        if topk_ids_TK is not None
        else [False] * len(table)
    )
    requests = [
        ScoreRequest(
            prompt, response, topk_ids_TK[start:stop] if known and topk_ids_TK is not None else None
        )
        for prompt, response, known, (start, stop) in zip(
            table["prompt_ids"].to_pylist(),
            table["response_ids"].to_pylist(),
            known_S,
            bounds,
            strict=True,
        )
    ]
    if "routes" not in table.column_names or not router_layers:
        return requests
    counted = np.split(batch.loss_mask_T, batch.offset_S1[1:-1])
    routes = (table["routes"][row].values for row in range(len(table)))
    return [
        request
        if flat is None
        else replace(request, routes_FMK=_routes(request, flat, router_layers), counted_T=mask_T)
        for request, flat, mask_T in zip(requests, routes, counted, strict=True)
    ]


def _routes(request: ScoreRequest, flat: pa.Array, layers: int) -> np.ndarray | None:
    """`_FMK`, from a response's flat row; a `MismatchError` if they do not belong to its tokens."""
    if not request.response_ids:
        return None
    if len(flat) % (request.num_fed * layers):
        raise MismatchError(
            f"The trace has {len(flat)} routes for a response that fed {request.num_fed} tokens "
            f"to {layers} layers with a router: they belong to another model. Score with the "
            "model that sampled."
        )
    return flat.to_numpy().reshape(request.num_fed, layers, -1)


def _pass_columns(scoring: ScoringPass, scores: Sequence[ResponseScores]) -> dict[str, Any]:
    columns: dict[str, Any] = {scoring.column: [s.logp_T for s in scores]}
    if any(s.logp_at_topk_TK is not None for s in scores):
        columns[f"topk_{scoring.column}"] = [s.logp_at_topk_TK for s in scores]
    if scoring.version_trainer is not None:
        columns["version_trainer"] = np.full(len(scores), scoring.version_trainer, dtype=np.int32)
        columns["entropy_trainer"] = [s.entropy_T for s in scores]
        columns["rank_trainer"] = [s.rank_T for s in scores]
    if any(s.tv_full_T is not None for s in scores):
        columns["tv_full"] = [s.tv_full_T for s in scores]
        columns["kl_full"] = [s.kl_full_T for s in scores]
    if scoring.measures_routes and any(s.routes is not None for s in scores):
        columns |= route_columns([s.routes for s in scores])
    return columns


def _repeat_column(
    trainer: Trainer,
    requests: Sequence[ScoreRequest],
    rows: Sequence[int],
    token_budget: int,
    tell: Callable[[Sequence[int]], None],
) -> dict[str, Any]:
    if not rows:
        return {}
    values: list[Any] = [None] * len(requests)
    repeated = trainer.score_again(requests, token_budget=token_budget, rows=rows, on_scored=tell)
    for row, scores in zip(rows, repeated, strict=True):
        values[row] = scores.logp_T
    return {"logp_trainer_repeat": values}


def with_columns(table: pa.Table, columns: dict[str, Any]) -> pa.Table:
    """The table with these columns; they replace those of the same name."""
    added = rows_to_table(columns)
    table = table.drop_columns([name for name in added.column_names if name in table.column_names])
    for name in added.column_names:
        table = table.append_column(name, added.column(name))
    return table


def evenly_spaced(count: int, total: int) -> Callable[[int], bool]:
    """A predicate: is index i one of `count` indices spread evenly over `total`?"""
    count = min(count, total)
    return lambda i: (i + 1) * count // total > i * count // total
