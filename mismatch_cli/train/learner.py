"""The learner: one optimiser step from a minibatch of responses, by any algorithm of the table.

The weights that compute are in the trainer's dtype, the ones that AdamW changes in float32: half
precision often rounds a step away. The engine gets the weights that compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.head import Head
from mismatch_cli.models.scoring.layout import micro_batches
from mismatch_cli.models.scoring.policy_gradient import (
    PolicyGradient,
    logp_pass,
    policy_gradient_loss,
)
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import DUMMY_REQUEST, Trainer
from mismatch_cli.models.sharding import is_spread, pad_for_all_ranks, sum_replicated, whole
from mismatch_cli.processes.ranks import ALONE, World
from mismatch_cli.rules.algorithms.algorithm import Algorithm, reads_single_tokens
from mismatch_cli.rules.algorithms.first_pass import FirstPass
from mismatch_cli.trace.routes import RouteComparison
from mismatch_cli.train.average import WeightAverage
from mismatch_cli.train.bounds import Bounds, compared, no_bounds
from mismatch_cli.train.coefficients import LearnedResponse, MicroBatchCoefficients
from mismatch_cli.train.past_weights import PastWeights
from mismatch_cli.train.train_config import TrainConfig


@dataclass(frozen=True)
class Update:
    """What an update measured: log π and entropy before the step, by sample; the gradient norm
    before clipping.
    """

    logp: list[np.ndarray]  # _T float32, nats
    entropy: list[np.ndarray]  # _T float32, nats
    grad_norm: float
    stepped: bool  # False: float16 gradients overflowed, and the loss scale was halved instead
    # _TK float32, nats, of the engine's top K, if the algorithm needs it
    topk_logp: list[np.ndarray | None]
    # The engine's experts vs the trainer's, if the engine reports them
    routes: list[RouteComparison | None]
    # _T float32, nats, at the weight average, if there is one
    logp_average: list[np.ndarray] | None = None
    bounds: Bounds = field(default_factory=no_bounds)  # of few tokens


class NotFiniteError(MismatchError):
    """A loss or gradient that no loss scale can fix; `update` is what was measured before."""

    def __init__(self, message: str, update: Update) -> None:
        super().__init__(message)
        self.update = update


class Learner:
    """A Hugging Face model with an optimiser, an algorithm, and the policy-gradient head in tiles.

    If the model is spread over ranks, each rank brings its own responses of a minibatch, and all
    step together.
    """

    def __init__(
        self,
        trainer: Trainer,
        algorithm: Algorithm,
        sampling: SamplingSettings,
        config: TrainConfig,
        world: World = ALONE,
    ) -> None:
        self.trainer, self.model = trainer, trainer.model
        self.algorithm, self._sampling, self._config, self._world = (
            algorithm,
            sampling,
            config,
            world,
        )
        self._names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self._weights = [p for p in self.model.parameters() if p.requires_grad]
        self._masters = [
            p if p.dtype == torch.float32 else p.detach().float() for p in self._weights
        ]
        fused = True if is_spread(self.model) else None
        self.optimizer = _adam(self._masters, config, fused)
        self.loss_scale = LossScale(enabled=trainer.dtype == torch.float16)
        self.version = 0  # optimiser steps that led to the weights
        self.past = PastWeights(self.model, config.staleness)
        self.average = (
            WeightAverage(self._weights, self._masters, config.average_decay)
            if config.average_decay
            else None
        )

    def update(self, samples: Sequence[LearnedResponse]) -> Update:
        """Take one optimiser step; a `NotFiniteError`, and no step, if loss or gradient are not
        finite.
        """
        self.drop_gradients()
        scale_S = self._scale(np.array([s.rollout.num_sampled for s in samples], dtype=np.int64))
        samples = self._with_average(samples)
        batches = list(self._micro_batches(samples, scale_S))
        self._look_first(batches)
        seen: list[_Seen] = [_NOTHING_SEEN] * len(samples)
        loss = 0.0
        for batch in batches:
            share, parts = self._accumulate(batch) if batch.samples else self._keep_up(batch.learns)
            loss += share
            self._collect_gradients()
            for i, part in zip(batch.places, parts, strict=True):
                seen[i] = part
        loss, grad_norm = sum(self._world.gather(loss)), self._gradient_norm()
        finite = bool(np.isfinite(grad_norm))
        logp, entropy, topk_logp, routes = (
            (list(x) for x in zip(*seen, strict=True)) if seen else ([], [], [], [])
        )
        average = (
            None
            if self.average is None
            else [s.logp_average_T for s in samples if s.logp_average_T is not None]
        )
        bounds = np.concatenate([no_bounds(), *(batch.bounds for batch in batches)])
        update = Update(logp, entropy, grad_norm, finite, topk_logp, routes, average, bounds)
        if not np.isfinite(loss) or (not finite and not self.loss_scale.can_back_off):
            raise NotFiniteError(
                f"Update {self.version + 1} has loss {loss:g} and gradient norm {grad_norm:g}: "
                "not finite. Try a lower --learning-rate or --trainer-dtype float32; ratios in "
                "this minibatch may be infinite.",
                update,
            )
        self.loss_scale.update(finite)
        if finite:
            self._step()
        return update

    def drop_gradients(self) -> None:
        """Free the gradients of the last update, which nothing needs while the engine samples."""
        for parameter in (*self._weights, *self._masters):
            parameter.grad = None

    def _scale(self, length_S: np.ndarray) -> np.ndarray:
        """The factor for the tokens of each response, given the whole minibatch."""
        lengths = self._world.gather(length_S)
        scale_S = response_scale(
            self._config.aggregation, np.concatenate(lengths), self._config.sampler.max_tokens
        )
        first = sum(map(len, lengths[: self._world.rank]))
        return scale_S[first : first + len(length_S)]

    def _with_average(self, samples: Sequence[LearnedResponse]) -> Sequence[LearnedResponse]:
        """The samples with their log π at the weight average, if there is one."""
        if self.average is None:
            return samples
        with self.average.in_place():
            scores = self.trainer.score(
                list(map(_request, samples)), token_budget=self._config.scorer.token_budget
            )
        return [
            replace(s, logp_average_T=score.logp_T)
            for s, score in zip(samples, scores, strict=True)
        ]

    def _micro_batches(
        self, samples: Sequence[LearnedResponse], scale_S: np.ndarray
    ) -> Iterator[_MicroBatch]:
        """Responses without an advantage go separately: they are measured, and only a term
        learns from them.
        """
        acts = self.algorithm.term is not None
        for learns in (True, False):
            chosen = [
                i for i, sample in enumerate(samples) if (acts or sample.advantage != 0) == learns
            ]
            requests = [_request(samples[i]) for i in chosen]
            batches = micro_batches(requests, self._config.scorer.token_budget, self.trainer.packed)
            for batch in pad_for_all_ranks(batches, self._world):
                places = [chosen[i] for i in batch]
                yield _MicroBatch(learns, places, [samples[i] for i in places], scale_S[places])

    def _look_first(self, batches: Sequence[_MicroBatch]) -> None:
        """The first pass of rules on whole batches, over the responses of every rank; skipped
        without such rules.
        """
        rules = self.algorithm.batch_rules
        if not rules:
            return
        gathering, merged = FirstPass(rules), FirstPass(rules)
        for batch in batches:
            with torch.no_grad():
                self.trainer.forward_pass(batch.requests, partial(self._know_first, batch))
            if batch.judged is not None:
                gathering.update(batch.judged.seen(), batch.judged.advantage_T)
        for part in self._world.gather(gathering):
            merged.merge(part)
        found = merged.settle()
        for batch in batches:
            if batch.judged is not None:
                batch.judged.found = found

    def _know_first(self, batch: _MicroBatch, hidden_TH: Tensor, ids_T: Tensor, head: Head) -> None:
        if batch.samples:
            self._know(self._judged(batch, ids_T), hidden_TH, ids_T, head)

    def _judged(self, batch: _MicroBatch, ids_T: Tensor) -> MicroBatchCoefficients:
        batch.judged = batch.judged or MicroBatchCoefficients(
            self.algorithm, batch.samples, batch.scale_S, ids_T.device
        )
        return batch.judged

    def _know(
        self, judged: MicroBatchCoefficients, hidden_TH: Tensor, ids_T: Tensor, head: Head
    ) -> None:
        """Run a log-prob pass over a micro-batch, once, if its algorithm looks beyond single
        tokens.
        """
        if judged.known is None and not reads_single_tokens(self.algorithm):
            hidden_NH, ids_N = judged.chosen(hidden_TH), judged.chosen(ids_T)
            judged.known = logp_pass(hidden_NH, head, ids_N, self._sampling, judged.query_ids_TK)

    def _accumulate(self, batch: _MicroBatch) -> tuple[float, list[_Seen]]:
        """Add the gradient of one micro-batch; returns its loss, and what was measured of each
        response.
        """

        def look(
            hidden_TH: Tensor, ids_T: Tensor, head: Head
        ) -> tuple[PolicyGradient, MicroBatchCoefficients]:
            judged = self._judged(batch, ids_T)
            batch.bounds = self._bounds(batch.samples, hidden_TH, ids_T, head)
            self._know(judged, hidden_TH, ids_T, head)
            if judged.known is not None:
                judged.form()
            hidden_NH, ids_N = judged.chosen(hidden_TH), judged.chosen(ids_T)
            coefficient, known = judged.coefficient, judged.known
            return policy_gradient_loss(
                hidden_NH, head, ids_N, coefficient, self._sampling, known=known
            ), judged

        with torch.set_grad_enabled(batch.learns):
            found, judged = self.trainer.forward_pass(batch.requests, look)
        routes = self.trainer.routing.compared(batch.requests, self.trainer.packed)
        if batch.learns:
            (found.loss * self.loss_scale.value).backward()
        # The coefficients follow from these
        seen_first = found if judged.known is None else judged.known
        parts = [judged.by_response(side) for side in (seen_first.logp_N, seen_first.entropy_N)]
        topk_logp_TK = judged.topk_logp_TK
        topk = (
            [None] * len(batch.samples)
            if topk_logp_TK is None
            else judged.by_response(topk_logp_TK)
        )
        return float(found.loss.detach()), list(zip(*parts, topk, routes, strict=True))

    def _bounds(
        self, samples: Sequence[LearnedResponse], hidden_TH: Tensor, ids_T: Tensor, head: Head
    ) -> Bounds:
        """Those of the responses with a reference."""
        parts, start = [no_bounds()], 0
        for sample in samples:
            reference = sample.reference
            if reference is not None:
                at_U = torch.from_numpy(start + reference.at_U).to(ids_T.device)
                now = hidden_TH[at_U], ids_T[at_U]
                parts.append(compared(reference, *now, head, self._sampling))
            start += len(sample.rollout.response_ids)
        return np.concatenate(parts)

    def _keep_up(self, learns: bool) -> tuple[float, list[_Seen]]:
        """A pass that adds 0, because other ranks have another micro-batch."""
        with torch.set_grad_enabled(learns):
            found = self.trainer.forward_pass(
                [DUMMY_REQUEST],
                lambda hidden_TH, ids_T, head: policy_gradient_loss(
                    hidden_TH,
                    head,
                    ids_T,
                    lambda _, logp_T: torch.zeros_like(logp_T),
                    self._sampling,
                ),
            )
        if learns:
            found.loss.backward()
        return 0.0, []

    def _collect_gradients(self) -> None:
        """Move the gradients of half-precision weights to the masters, to sum them over
        micro-batches in float32.
        """
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight is not master and weight.grad is not None:
                part = weight.grad.float()
                master.grad = part if master.grad is None else master.grad.add_(part)
                weight.grad = None

    def _gradient_norm(self) -> float:
        """Unscale the gradients and clip them to `max_grad_norm`; returns their norm before
        clipping.
        """
        for master in self._masters:
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            sum_replicated(master.grad, self._world)
            if self.loss_scale.enabled:
                master.grad.div_(self.loss_scale.value)
        return float(
            whole(
                torch.nn.utils.clip_grad_norm_(self._masters, self._config.optimiser.max_grad_norm)
            )
        )

    def _step(self) -> None:
        """Step AdamW on the masters, then round them into the weights."""
        self.past.keep(self.version)
        self.optimizer.step()
        self.version += 1
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                if weight is not master:
                    weight.copy_(master)
        if self.average is not None:
            self.average.update()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the next update depends on, by the weights' names; not copies."""
        found = dict(self._named("weight", [master.detach() for master in self._masters]))
        if self.version:
            states = [self.optimizer.state[master] for master in self._masters]
            for kind in _MOMENTS:
                found |= self._named(kind, [state[kind] for state in states])
        if self.average is not None:
            found |= self._named("average", self.average.tensors)
        return found | self.past.tensors()

    def facts(self) -> dict[str, Any]:
        """Whatever else the next update depends on, besides the settings."""
        average = {} if self.average is None else {"average": self.average.total}
        return {
            "version": self.version,
            "loss_scale": self.loss_scale.state_dict(),
            "past": self.past.versions(),
        } | average

    def restore(self, facts: dict[str, Any], load: Callable[[dict[str, Tensor]], None]) -> None:
        """Continue from `facts()`; `load` fills tensors of these names."""
        self.version = facts["version"]
        self.loss_scale.load_state_dict(facts["loss_scale"])
        if self.average is not None:
            self.average.total = facts["average"]
        for master in self._masters if self.version else ():
            moments = {kind: torch.zeros_like(master) for kind in _MOMENTS}
            self.optimizer.state[master] = {"step": torch.tensor(float(self.version)), **moments}
        load(self.tensors())
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                if weight is not master:
                    weight.copy_(master)
        self.past.restore(facts.get("past", ()), load)  # absent in older checkpoints

    def _named(self, kind: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return {f"{kind}.{name}": tensor for name, tensor in zip(self._names, tensors, strict=True)}


def _adam(weights: Sequence[Tensor], config: TrainConfig, fused: bool | None) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        weights,
        lr=config.optimiser.learning_rate,
        betas=(config.optimiser.beta1, config.optimiser.beta2),
        eps=config.optimiser.epsilon,
        weight_decay=config.optimiser.weight_decay,
        fused=fused,
    )


@dataclass
class _MicroBatch:
    """Responses of one forward pass, by their place in the minibatch; empty if only other ranks
    have responses left.
    """

    learns: bool
    places: list[int]
    samples: list[LearnedResponse]
    scale_S: np.ndarray
    judged: MicroBatchCoefficients | None = None  # once a pass has begun
    bounds: Bounds = field(default_factory=no_bounds)  # likewise

    @property
    def requests(self) -> list[ScoreRequest]:
        return list(map(_request, self.samples)) or [DUMMY_REQUEST]


def _request(sample: LearnedResponse) -> ScoreRequest:
    return ScoreRequest.of(sample.rollout)


_MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
# Log π, entropy, top K, routes
_Seen = tuple[np.ndarray, np.ndarray, np.ndarray | None, RouteComparison | None]
_NOTHING_SEEN: _Seen = (np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.float32), None, None)


# Of N responses with lengths |y| and at most T_max tokens each.
_SCALES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "sequence-sum": lambda length_S, longest: np.full(len(length_S), 1 / (len(length_S) * longest)),
    "sequence-mean": lambda length_S, _: 1 / (len(length_S) * np.maximum(length_S, 1)),
    "token-mean": lambda length_S, _: np.full(len(length_S), 1 / max(length_S.sum(), 1)),
}


def response_scale(aggregation: str, length_S: np.ndarray, max_tokens: int) -> np.ndarray:
    """The factor for every token of each response, float64.

    sequence-sum: 1/(N · T_max), the sum over a response by a constant, then the mean (Dr. GRPO,
    arXiv 2503.20783; the sanity test). sequence-mean: 1/(N · |y|), the only one that divides by a
    response's own length. token-mean: 1/Σ|y|. The terms of GSPO are its response's, each at all |y|
    tokens.
    """
    return _SCALES[aggregation](np.asarray(length_S, dtype=np.int64), max_tokens)


def unpublished(algorithm: Algorithm, aggregation: str) -> str:
    """A sentence if an aggregation changes the published gradient, else empty."""
    if aggregation == "sequence-mean" or not algorithm.is_of_means:
        return ""
    return (
        f"{algorithm.name} is published as a mean over responses. With aggregation = {aggregation} "
        "each response counts by its number of tokens, which is not the published gradient: for "
        "that, train with aggregation = sequence-mean."
    )


class LossScale:
    """The factor on the loss; fixed at 1 if the dtype has float32's range.

    `growth_interval` finite steps double it (400 in the FP16 mismatch paper's runs), an overflow
    halves it.
    """

    def __init__(self, enabled: bool, initial: float = 2.0**16, growth_interval: int = 400) -> None:
        self.enabled, self.growth_interval = enabled, growth_interval
        self.value = initial if enabled else 1.0
        self.finite_steps = self.back_offs = 0

    @property
    def can_back_off(self) -> bool:
        """Whether a smaller factor could avoid an overflow: at 1 the gradients themselves are
        too large.
        """
        return self.enabled and self.value > 1

    def update(self, finite: bool) -> None:
        """Adapt the factor to one step, whose gradients were finite or not."""
        if not self.enabled:
            return
        if not finite:
            self.value /= 2
            self.finite_steps, self.back_offs = 0, self.back_offs + 1
            return
        self.finite_steps += 1
        if self.finite_steps % self.growth_interval == 0:
            self.value *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "finite_steps": self.finite_steps, "back_offs": self.back_offs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.finite_steps, self.back_offs = (
            state["value"],
            state["finite_steps"],
            state["back_offs"],
        )
