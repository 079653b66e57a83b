"""The trainer's side of the measurement: a Hugging Face model that computes log π of responses
sampled elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.adapters import apply_adapter, read_adapter
from mismatch_cli.models.attention import attention_facts
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.models.positions import positions_facts
from mismatch_cli.models.scoring.head import Head, HeadScores, RolloutRows, score_hidden
from mismatch_cli.models.scoring.layout import can_pack, micro_batches, other_shape, pack, pad_right
from mismatch_cli.models.scoring.proven_head import proven_head
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.routed_pass import TrainerRouting
from mismatch_cli.models.sharding import (
    Sharding,
    is_spread,
    pad_for_all_ranks,
    pass_through,
    without_gradients,
)
from mismatch_cli.models.weights_note import weights_facts
from mismatch_cli.processes.ranks import ALONE
from mismatch_cli.trace.routes import RouteComparison

R = TypeVar("R")


@dataclass(frozen=True)
class ResponseScores:
    """The trainer's results for one response, in nats, under the sampler's temperature and
    support.
    """

    logp_T: np.ndarray  # float32
    entropy_T: np.ndarray  # float32
    rank_T: np.ndarray  # int32, 1 = most probable
    logp_at_topk_TK: np.ndarray | None  # float32
    tv_full_T: np.ndarray | None = None  # float32, from the rollout, over the full vocabulary
    kl_full_T: np.ndarray | None = None  # float32, KL(μ‖π)
    routes: RouteComparison | None = None


class Trainer:
    """A causal LM whose backbone runs without its head, and whose head runs in tiles.

    A score depends on the response, its prompt, and (in the last bits) on the shape of its
    micro-batch and the number of threads. On one thread the same set of requests gives the same
    bits, in any order. If the model is spread over ranks, either each asks for its own responses,
    all of them equally often, or all ask for the same.
    """

    def __init__(
        self,
        model: Any,
        sampling: SamplingSettings,
        *,
        name: str = "",
        float32_head: bool = False,
        adapter: dict[str, Any] | None = None,
        sharding: Sharding | None = None,
        replay_routes: bool = False,
    ) -> None:
        """`adapter`: what the manifest says about an adapter on the model; `replay_routes`: send
        tokens to the experts that their requests name.
        """
        self.model = model
        self._sampling = sampling
        self._name = name
        self._adapter = adapter or {}
        self._world = ALONE if sharding is None else sharding.world
        self._dealt = sharding is not None and sharding.dealt
        self.head, self.dtype = proven_head(model)
        # Whether micro-batches are rows of whole sequences, without padding
        self.packed = can_pack(model)
        self.routing = TrainerRouting.of(model, name or type(model).__name__, replay_routes)
        self._float32_head = float32_head
        if float32_head and not is_spread(model):
            self.head = self.head.float32()

    @classmethod
    def load(
        cls,
        path: str,
        *,
        sampling: SamplingSettings,
        dtype: str = "auto",
        attn_implementation: str | None = None,
        device_map: str | None = None,
        float32_head: bool = False,
        adapter: str | None = None,
        merge_adapter: bool = False,
        sharding: Sharding | None = None,
        replay_routes: bool = False,
    ) -> Trainer:
        """Load a model from a folder or the hub, optionally with a LoRA adapter, separate from the
        weights or merged.

        `sharding` spreads it over the ranks; `replay_routes` sends tokens to the experts that their
        requests name.

        Raises a `MismatchError` or `UsageError` with a message for the user.
        """
        # An adapter that cannot be read is reported before the model loads.
        saved = None if adapter is None else read_adapter(adapter)
        model = load_causal_lm(path, dtype, attn_implementation, device_map, sharding)
        adapter_facts = None
        if saved is not None:
            model = apply_adapter(model, saved, merge=merge_adapter)
            adapter_facts = saved.facts(merged=merge_adapter)
        return cls(
            model,
            sampling,
            name=path,
            float32_head=float32_head,
            adapter=adapter_facts,
            sharding=sharding,
            replay_routes=replay_routes,
        )

    def describe(self) -> dict[str, Any]:
        """The trainer as resolved, for the manifest."""
        import transformers

        head = self.head
        config = self.model.config
        # A model that is spread over ranks has another class, and its shards another dtype.
        architecture = type(self.model).__name__
        dtype = self.model.dtype
        if is_spread(self.model):
            architecture = config.architectures[0]
            dtype = self.dtype
        head_dtype = torch.float32 if self._float32_head else self.dtype
        packed = {"packed": True} if self.packed else {}
        return {
            "model": self._name,
            **self._adapter,
            "architecture": architecture,
            "dtype": str(dtype).removeprefix("torch."),
            "head_dtype": str(head_dtype).removeprefix("torch."),
            "head_divisor": head.divisor,
            "head_multiplier": head.multiplier,
            "head_softcap": head.softcap,
            "attn_implementation": config._attn_implementation,
            **packed,
            **self.routing.describe(),
            **attention_facts(self.model),
            **positions_facts(config),
            **weights_facts(config),
            "device": str(self.model.device),
            "parameters": self.model.num_parameters(),
            "vocab_size": head.vocabulary,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def score(
        self,
        requests: Sequence[ScoreRequest],
        *,
        token_budget: int,
        on_scored: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> list[ResponseScores]:
        """Score responses in micro-batches of at most `token_budget` tokens, padding included;
        results keep the order.

        `on_scored` is called with the indices of the requests in each micro-batch. Raises a
        `MismatchError` for token ids that the model lacks, NaN log-probs, and lack of memory; each
        names its response.
        """
        self._check(requests)
        scores = [_empty(r) for r in requests]
        on_scored([i for i, request in enumerate(requests) if not request.response_ids])
        batches = micro_batches(requests, token_budget, self.packed)
        self._score_all(scores, requests, batches, on_scored)
        return scores

    def score_again(
        self,
        requests: Sequence[ScoreRequest],
        *,
        token_budget: int,
        rows: Sequence[int] | None = None,
        on_scored: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> list[ResponseScores]:
        """Score the requests at `rows` (default: all) again, in a different micro-batch shape, to
        measure the noise.

        `on_scored` is called as in `score`, with indices in `rows` only. `requests` and
        `token_budget` must be those given to `score`: they decide which shape each response had.
        """
        requests = [replace(request, logp_rollout_TV=None) for request in requests]
        # The noise is that of log π: routes are needed if the trainer follows them, but not
        # compared again.
        if not self.routing.replays:
            requests = [replace(request, routes_FMK=None) for request in requests]
        self._check(requests)
        if rows is None:
            rows = range(len(requests))
        scores = [_empty(r) for r in requests]
        wanted = set(rows)
        batches = other_shape(micro_batches(requests, token_budget, self.packed))
        batches = [batch for batch in batches if wanted.intersection(batch)]
        self._score_all(
            scores, requests, batches, lambda batch: on_scored(sorted(wanted.intersection(batch)))
        )
        return [scores[row] for row in rows]

    def _score_all(
        self,
        scores: list[ResponseScores],
        requests: Sequence[ScoreRequest],
        batches: Sequence[list[int]],
        on_scored: Callable[[Sequence[int]], None],
    ) -> None:
        """Score micro-batches; if ranks share them, each gets the others' results."""
        own_batches = batches
        if self._dealt:
            own_batches = batches[self._world.rank :: self._world.size]
        for batch in pad_for_all_ranks(own_batches, self._world):
            self.score_into(scores, requests, batch)
            on_scored(batch)
        if not self._dealt:
            return
        own_scores = {i: scores[i] for i in chain.from_iterable(own_batches)}
        for scores_of_rank in self._world.gather(own_scores):
            for i, score in scores_of_rank.items():
                scores[i] = score
        for number, batch in enumerate(batches):
            if number % self._world.size != self._world.rank:
                on_scored(batch)

    def _check(self, requests: Sequence[ScoreRequest]) -> None:
        """Raise a `MismatchError` for a response that the model cannot read."""
        for i, request in enumerate(requests):
            if request.response_ids and not request.prompt_ids:
                raise MismatchError(
                    f"Response {i} has an empty prompt: nothing predicts its first token. Start "
                    "the prompt with BOS."
                )
            ids = np.concatenate([request.prompt_ids, request.response_ids])
            if request.topk_ids_TK is not None:
                ids = np.concatenate([ids, request.topk_ids_TK.ravel()])
            unknown = ids[(ids < 0) | (ids >= self.head.vocabulary)]
            if len(unknown):
                raise MismatchError(
                    f"Response {i} has the token id {unknown[0]:.0f}, but the trainer's "
                    f"vocabulary ends at {self.head.vocabulary - 1}. Score with a model that "
                    "shares the rollout's tokenizer."
                )
            logp_TV = request.logp_rollout_TV
            if logp_TV is not None and logp_TV.shape[1] > self.head.vocabulary:
                raise MismatchError(
                    f"The engine samples from {logp_TV.shape[1]} tokens, but the trainer has only "
                    f"{self.head.vocabulary}, so there is no full divergence. "
                    "Score with a model that shares the rollout's vocabulary."
                )

    def score_into(
        self, scores: list[ResponseScores], requests: Sequence[ScoreRequest], batch: Sequence[int]
    ) -> None:
        """Score one micro-batch; a response that is in it twice is kept once, an empty one not
        at all.
        """
        members = [requests[i] for i in batch] or [DUMMY_REQUEST]
        try:
            head_scores = self._score_batch(members)
            routes = self.routing.compare(members, self.packed)
            parts = split_requests(head_scores, members, routes)
        except torch.OutOfMemoryError as error:
            raise MismatchError(
                f"The device ran out of memory with {len(batch)} responses of up to "
                f"{members[0].num_fed + 1} tokens. Use a lower --token-budget: with --resume for "
                "probe and rescore, in another --output for train."
            ) from error
        for i, part in zip(batch, parts[: len(batch)], strict=True):
            is_nan_T = np.isnan(part.logp_T) | np.isnan(part.entropy_T)
            if is_nan_T.any():
                raise MismatchError(
                    f"The trainer's log-prob of token {int(is_nan_T.argmax())} of response {i} is "
                    "NaN: the model overflows in this dtype. Try --trainer-dtype float32 (or "
                    "bfloat16), or another attn."
                )
            scores[i] = part

    def forward_pass(
        self,
        requests: Sequence[ScoreRequest],
        at_head: Callable[[torch.Tensor, torch.Tensor, Head], R],
    ) -> R:
        """One forward pass, and what `at_head` returns in place of the LM head.

        It is called with the hidden states that predict all response tokens, `[T, H]`, the tokens'
        ids, `[T]`, and the head with the trainable weights.
        """
        self.routing.set_routes(requests, self.packed)
        if self.packed:
            ids_BL, positions_BL = pack(requests, self.model.device)
            inputs = {"input_ids": ids_BL, "position_ids": positions_BL}
        else:
            ids_BL, mask_BL = pad_right(requests, self.model.device)
            inputs = {"input_ids": ids_BL, "attention_mask": mask_BL}

        def at_weights(
            hidden_BLH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None
        ) -> R:
            hidden_TH = _predicting_states(hidden_BLH, requests, self.packed)
            tokens = chain.from_iterable(request.response_ids for request in requests)
            ids_T = torch.tensor(list(tokens), device=hidden_TH.device)
            head = replace(self.head, weight_VH=weight_VH, bias_V=bias_V)
            return at_head(hidden_TH, ids_T, head)

        return pass_through(self.model, inputs, at_weights)

    def _score_batch(self, members: Sequence[ScoreRequest]) -> HeadScores:
        """The scores of all response tokens of a micro-batch, from one pass without gradients."""
        query_ids_TK = _query_ids(members)
        rollout_rows: dict[int, np.ndarray] = {}
        for request, span in _spans(members):
            if request.logp_rollout_TV is not None:
                rollout_rows.update(enumerate(request.logp_rollout_TV, span.start))
        rollout = RolloutRows(rollout_rows)

        def at_head(hidden_TH: torch.Tensor, ids_T: torch.Tensor, head: Head) -> HeadScores:
            if self._float32_head:
                head = head.float32() if is_spread(self.model) else self.head
            queries_TK = query_ids_TK.to(ids_T.device)
            return score_hidden(hidden_TH, head, ids_T, queries_TK, self._sampling, rollout=rollout)

        with without_gradients(self.model):
            return self.forward_pass(members, at_head)


# A rank that has nothing left sends this through a model that is spread over ranks, while the
# others still work.
DUMMY_REQUEST = ScoreRequest([0], [0])


def _predicting_states(
    hidden_BLH: torch.Tensor, requests: Sequence[ScoreRequest], packed: bool
) -> torch.Tensor:
    """The hidden states that predict the response tokens of all requests, `[T, H]`."""
    sequences: Iterable[torch.Tensor] = hidden_BLH
    if packed:
        sequences = hidden_BLH[0].split([request.num_fed for request in requests])
    parts = []
    for hidden_LH, request in zip(sequences, requests, strict=True):
        # The hidden state at position i predicts token i + 1: a response's first is predicted by
        # the prompt's last.
        parts.append(hidden_LH[len(request.prompt_ids) - 1 : request.num_fed])
    return torch.cat(parts)


def _spans(members: Sequence[ScoreRequest]) -> Iterator[tuple[ScoreRequest, slice]]:
    """Each request, and the slice of its response tokens among those of all."""
    start = 0
    for request in members:
        stop = start + len(request.response_ids)
        yield request, slice(start, stop)
        start = stop


def _query_ids(members: Sequence[ScoreRequest]) -> torch.Tensor:
    """The top-K ids of all members, `[T, K]`; a member with fewer is padded with id 0, which
    `split_requests` cuts off.
    """
    width = max(r.num_queries for r in members)
    query_ids_TK = torch.zeros(sum(len(r.response_ids) for r in members), width, dtype=torch.int64)
    for request, span in _spans(members):
        if request.topk_ids_TK is not None:
            query_ids_TK[span, : request.num_queries] = torch.from_numpy(
                request.topk_ids_TK.astype(np.int64)
            )
    return query_ids_TK


def split_requests(
    scores: HeadScores, members: Sequence[ScoreRequest], routes: Sequence[RouteComparison | None]
) -> list[ResponseScores]:
    """The head's scores of a micro-batch, response by response, as copies."""
    columns = [column.cpu().numpy() for column in scores]
    parts = []
    for (request, span), comparison in zip(_spans(members), routes, strict=True):
        logp_T, entropy_T, rank_T, at_TK, tv_T, kl_T = (column[span].copy() for column in columns)
        part = ResponseScores(logp_T, entropy_T, rank_T, None, routes=comparison)
        if request.topk_ids_TK is not None:
            part = replace(part, logp_at_topk_TK=at_TK[:, : request.num_queries].copy())
        if request.logp_rollout_TV is not None:
            part = replace(part, tv_full_T=tv_T, kl_full_T=kl_T)
        parts.append(part)
    return parts


def _empty(request: ScoreRequest) -> ResponseScores:
    nothing_T = np.zeros(0, dtype=np.float32)
    topk_TK = None
    if request.topk_ids_TK is not None:
        topk_TK = np.zeros((0, request.num_queries), dtype=np.float32)
    return ResponseScores(nothing_T, nothing_T, np.zeros(0, dtype=np.int32), topk_TK)
