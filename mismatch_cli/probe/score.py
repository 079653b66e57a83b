"""The second half of a recording: the trainer's log π for every sampled shard."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

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
    at_rollout_weights: bool = True  # whether it scores at the weights that sampled

    @property
    def is_trainers_own(self) -> bool:
        """Whether the pass is the trainer's own: it alone measures noise and full divergences."""
        return self.version_trainer is not None

    def is_done(self, path: Path) -> bool:
        """Whether a shard has the column of this pass."""
        return self.column in open_shard(path).schema_arrow.names

    def noise_of(self, requested: int | None) -> int | None:
        """How many responses this pass scores twice, where so many are requested."""
        return requested if self.is_trainers_own else 0


def passes(equal_weights: bool) -> list[ScoringPass]:
    """At equal weights logp_trainer is logp_recomputed, and one pass is enough."""
    if equal_weights:
        return [ScoringPass("logp_trainer", version_trainer=0)]
    return [
        ScoringPass("logp_recomputed"),
        ScoringPass("logp_trainer", version_trainer=1, at_rollout_weights=False),
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
    warning = attention_warning(trainer.describe())
    if warning:
        progress.say(warning)
    return trainer


class _ScoringTask(NamedTuple):
    """A shard to score: the number of its first response in the run, which of its responses are
    scored twice, and how many tokens the trainer reads.
    """

    path: Path
    first_response: int
    repeat_S: np.ndarray
    tokens: int


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
    tasks = _scoring_tasks(paths, noise_responses)
    todo = [task for task, is_done in zip(tasks, done, strict=True) if not is_done]
    total = sum(task.tokens for task in tasks)
    scored = total - sum(task.tokens for task in todo)
    with progress.counting("Scoring", total, scored, unit="tokens") as on_scored:
        own = todo if ranks.spreads else ranks.own(todo)
        for task in own:
            score(
                task.path,
                repeat=task.repeat_S.tolist(),
                on_scored=on_scored,
                first_response=task.first_response,
            )
    ranks.world.barrier()


def _scoring_tasks(paths: Sequence[Path], noise_responses: int | None) -> list[_ScoringTask]:
    """What there is to score in each shard; noise responses are spread evenly over all of them."""
    fed = [_tokens_fed(path) for path in paths]
    total = sum(map(len, fed))
    is_repeated = evenly_spaced(noise_responses_of(noise_responses, total), total)
    tasks: list[_ScoringTask] = []
    first = 0
    for path, fed_S in zip(paths, fed, strict=True):
        numbers = range(first, first + len(fed_S))
        repeat_S = np.fromiter(map(is_repeated, numbers), dtype=bool, count=len(numbers))
        # What is scored twice counts twice: a noise response takes as long again.
        tokens = int((fed_S * (1 + repeat_S)).sum())
        tasks.append(_ScoringTask(path, first, repeat_S, tokens))
        first += len(fed_S)
    return tasks


def noise_responses_of(requested: int | None, responses: int) -> int:
    """How many of so many responses are scored twice: as requested, or a fifth within limits."""
    if requested is not None:
        return requested
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
    full_logp = None
    if distributions and scoring.is_trainers_own:
        full_logp = distributions.read(first_response, table)
    columns = score_rows(
        table,
        trainer,
        scoring,
        token_budget=token_budget,
        repeat=repeat,
        on_scored=on_scored,
        full_logp=full_logp,
    )
    if "routes" in table.column_names and scoring.is_trainers_own:
        # The routes have been compared: beyond the first responses they are only large.
        routes = table["routes"].to_pylist()
        for row in range(max(0, keep_routes - first_response), len(routes)):
            routes[row] = None
        columns["routes"] = routes
    if ranks.writes:
        write_shard(path, with_columns(table, columns))


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

    def count_tokens(rows: Sequence[int]) -> None:
        on_scored(sum(requests[row].num_fed for row in rows))

    scores = trainer.score(requests, token_budget=token_budget, on_scored=count_tokens)
    columns = _pass_columns(scoring, scores)
    if scoring.is_trainers_own:
        repeated_rows = np.flatnonzero(repeat).tolist()
        columns |= _repeat_column(trainer, requests, repeated_rows, token_budget, count_tokens)
    return columns


def requests_of(table: pa.Table, router_layers: int = 0) -> list[ScoreRequest]:
    """Scoring requests for the rows of a table, with their routes if the trainer has layers with
    a router.
    """
    prompts = table["prompt_ids"].to_pylist()
    requests = list(map(ScoreRequest, prompts, table["response_ids"].to_pylist()))
    batch = table_to_batch(table.combine_chunks())
    topk_ids_TK = batch.topk_ids_TK
    if topk_ids_TK is not None:
        # The batch has entries for every token. Those of a response without ids are placeholders,
        # whose log π nobody wants.
        has_ids = table["topk_ids"].is_valid().to_pylist()
        for row, (start, stop) in enumerate(pairwise(batch.offset_S1.tolist())):
            if has_ids[row]:
                requests[row] = replace(requests[row], topk_ids_TK=topk_ids_TK[start:stop])
    if "routes" in table.column_names and router_layers:
        counted = np.split(batch.loss_mask_T, batch.offset_S1[1:-1])
        for row, request in enumerate(requests):
            flat = table["routes"][row].values
            if flat is not None:
                routes_FMK = _routes(request, flat, router_layers)
                requests[row] = replace(request, routes_FMK=routes_FMK, counted_T=counted[row])
    return requests


def _routes(request: ScoreRequest, flat: pa.Array, layers: int) -> np.ndarray | None:
    """The routes of a response, `_FMK`, from its flat row; a `MismatchError` if they do not belong
    to its tokens.
    """
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
    """The columns of a pass: log π always, the others where they were measured."""

    def values(attribute: str) -> list[Any]:
        return [getattr(response, attribute) for response in scores]

    columns: dict[str, Any] = {scoring.column: values("logp_T")}
    if scoring.is_trainers_own:
        columns["version_trainer"] = np.full(len(scores), scoring.version_trainer, dtype=np.int32)
        columns["entropy_trainer"] = values("entropy_T")
        columns["rank_trainer"] = values("rank_T")
    optional = {
        f"topk_{scoring.column}": values("logp_at_topk_TK"),
        "tv_full": values("tv_full_T"),
        "kl_full": values("kl_full_T"),
    }
    for name, column in optional.items():
        if _is_measured(column):
            columns[name] = column
    routes = values("routes")
    # Other weights choose other experts anyway: only at those that sampled is it a mismatch.
    if scoring.at_rollout_weights and _is_measured(routes):
        columns |= route_columns(routes)
    return columns


def _is_measured(values: Sequence[object]) -> bool:
    """Whether a column has a value for at least one response."""
    return any(value is not None for value in values)


def _repeat_column(
    trainer: Trainer,
    requests: Sequence[ScoreRequest],
    rows: Sequence[int],
    token_budget: int,
    count_tokens: Callable[[Sequence[int]], None],
) -> dict[str, Any]:
    """log π of these rows, scored once more; null for all others."""
    if not rows:
        return {}
    values: list[Any] = [None] * len(requests)
    repeated = trainer.score_again(
        requests, token_budget=token_budget, rows=rows, on_scored=count_tokens
    )
    for row, scores in zip(rows, repeated, strict=True):
        values[row] = scores.logp_T
    return {"logp_trainer_repeat": values}


def with_columns(table: pa.Table, columns: dict[str, Any]) -> pa.Table:
    """The table with these columns; they replace those of the same name."""
    added = rows_to_table(columns)
    replaced = set(added.column_names).intersection(table.column_names)
    table = table.drop_columns(list(replaced))
    for name in added.column_names:
        table = table.append_column(name, added.column(name))
    return table


def evenly_spaced(count: int, total: int) -> Callable[[int], bool]:
    """A predicate: is index i one of `count` indices spread evenly over `total`?"""
    count = min(count, total)
    return lambda i: (i + 1) * count // total > i * count // total
