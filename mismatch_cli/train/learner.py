"""The learner: one optimiser step from a minibatch of responses, by any algorithm of the table.

The weights that compute are in the trainer's dtype, the ones that AdamW changes in float32: half
precision often rounds a step away. The engine gets the weights that compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.head import Head
from mismatch_cli.models.scoring.layout import micro_batches
from mismatch_cli.models.scoring.policy_gradient import (
    LogpPass,
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
        self.trainer = trainer
        self.model = trainer.model
        self.algorithm = algorithm
        self._sampling = sampling
        self._config = config
        self._world = world
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._names = list(trained)
        self._weights = list(trained.values())
        self._masters = [_master(weight) for weight in self._weights]
        fused = True if is_spread(self.model) else None
        self.optimizer = _adam(self._masters, config, fused)
        self.loss_scale = LossScale(enabled=trainer.dtype == torch.float16)
        self.version = 0  # optimiser steps that led to the weights
        self.past = PastWeights(self.model, config.staleness)
        self.average: WeightAverage | None = None
        if config.average_decay:
            self.average = WeightAverage(self._weights, self._masters, config.average_decay)

    def update(self, samples: Sequence[LearnedResponse]) -> Update:
        """Take one optimiser step; a `NotFiniteError`, and no step, if loss or gradient are not
        finite.
        """
        self.drop_gradients()
        length_S = np.array([s.rollout.num_sampled for s in samples], dtype=np.int64)
        scale_S = self._scale(length_S)
        samples = self._with_average(samples)
        batches = list(self._micro_batches(samples, scale_S))
        self._first_pass(batches)
        loss, responses = self._sum_gradients(batches, len(samples))
        grad_norm = self._gradient_norm()
        finite = bool(np.isfinite(grad_norm))
        update = Update(
            [response.logp_T for response in responses],
            [response.entropy_T for response in responses],
            grad_norm,
            finite,
            [response.topk_logp_TK for response in responses],
            [response.routes for response in responses],
            self._logp_average(samples),
            np.concatenate([no_bounds(), *(micro_batch.bounds for micro_batch in batches)]),
        )
        can_continue = finite or self.loss_scale.can_back_off
        if not can_continue or not np.isfinite(loss):
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
        requests = list(map(_request, samples))
        with self.average.averaged_weights():
            scores = self.trainer.score(requests, token_budget=self._config.scorer.token_budget)
        return [
            replace(sample, logp_average_T=score.logp_T)
            for sample, score in zip(samples, scores, strict=True)
        ]

    def _logp_average(self, samples: Sequence[LearnedResponse]) -> list[np.ndarray] | None:
        if self.average is None:
            return None
        return [s.logp_average_T for s in samples if s.logp_average_T is not None]

    def _micro_batches(
        self, samples: Sequence[LearnedResponse], scale_S: np.ndarray
    ) -> Iterator[_MicroBatch]:
        """First the responses that have a gradient, then those that are only measured.

        Without an advantage, only a term of the algorithm gives a response a gradient.
        """
        learns_S = np.array([sample.advantage for sample in samples]) != 0
        if self.algorithm.term is not None:
            learns_S[:] = True
        for learns in (True, False):
            members = np.flatnonzero(learns_S == learns).tolist()
            requests = [_request(samples[i]) for i in members]
            batches = micro_batches(requests, self._config.scorer.token_budget, self.trainer.packed)
            for batch in pad_for_all_ranks(batches, self._world):
                places = [members[i] for i in batch]
                yield _MicroBatch(learns, places, [samples[i] for i in places], scale_S[places])

    def _first_pass(self, batches: Sequence[_MicroBatch]) -> None:
        """Let rules on whole batches see the log-probs of all responses of every rank; nothing
        without such rules.
        """
        rules = self.algorithm.batch_rules
        if not rules:
            return
        own_rows = FirstPass(rules)
        for micro_batch in batches:
            with torch.no_grad():
                if not micro_batch.samples:
                    self.trainer.forward_pass([DUMMY_REQUEST], lambda *_: None)
                    continue
                coefficients = self.trainer.forward_pass(
                    micro_batch.requests, partial(self._logp_pass, micro_batch)
                )
            own_rows.update(coefficients.policies(), coefficients.advantage_N)
        all_rows = FirstPass(rules)
        for rows in self._world.gather(own_rows):
            all_rows.merge(rows)
        batch_values = all_rows.settle()
        for micro_batch in batches:
            if micro_batch.coefficients is not None:
                micro_batch.coefficients.batch_values = batch_values

    def _logp_pass(
        self, micro_batch: _MicroBatch, hidden_TH: Tensor, ids_T: Tensor, head: Head
    ) -> MicroBatchCoefficients:
        """The coefficients of a micro-batch, after its log-prob pass if its algorithm looks beyond
        single tokens.

        A micro-batch that had its log-prob pass in the first pass has no other.
        """
        if micro_batch.coefficients is None:
            micro_batch.coefficients = MicroBatchCoefficients(
                self.algorithm, micro_batch.samples, micro_batch.scale_S, ids_T.device
            )
        coefficients = micro_batch.coefficients
        if coefficients.logp_pass is None and not reads_single_tokens(self.algorithm):
            hidden_NH = coefficients.select_sampled(hidden_TH)
            ids_N = coefficients.select_sampled(ids_T)
            coefficients.logp_pass = logp_pass(
                hidden_NH, head, ids_N, self._sampling, coefficients.query_ids_NK
            )
        return coefficients

    def _sum_gradients(
        self, batches: Sequence[_MicroBatch], count: int
    ) -> tuple[float, list[_Measured]]:
        """Form the gradient of this rank's minibatch of `count` responses; returns the loss of all
        ranks, and what was measured of each response.
        """
        responses = [_NO_TOKENS] * count
        loss = 0.0
        for micro_batch in batches:
            if micro_batch.samples:
                share, measured = self._forward_backward(micro_batch)
                loss += share
                for place, response in zip(micro_batch.places, measured, strict=True):
                    responses[place] = response
            else:
                self._stay_in_step(micro_batch.learns)
            self._collect_gradients()
        return sum(self._world.gather(loss)), responses

    def _forward_backward(self, micro_batch: _MicroBatch) -> tuple[float, list[_Measured]]:
        """Add the gradient of one micro-batch; returns its loss, and what was measured of each
        response.
        """

        def loss_at_head(
            hidden_TH: Tensor, ids_T: Tensor, head: Head
        ) -> tuple[PolicyGradient, MicroBatchCoefficients]:
            coefficients = self._logp_pass(micro_batch, hidden_TH, ids_T, head)
            micro_batch.bounds = self._bounds(micro_batch.samples, hidden_TH, ids_T, head)
            if coefficients.logp_pass is not None:
                coefficients.compute()
            forward = policy_gradient_loss(
                coefficients.select_sampled(hidden_TH),
                head,
                coefficients.select_sampled(ids_T),
                coefficients.of_tile,
                self._sampling,
                first_pass=coefficients.logp_pass,
            )
            return forward, coefficients

        requests = micro_batch.requests
        with torch.set_grad_enabled(micro_batch.learns):
            forward, coefficients = self.trainer.forward_pass(requests, loss_at_head)
        routes = self.trainer.routing.compare(requests, self.trainer.packed)
        if micro_batch.learns:
            (forward.loss * self.loss_scale.value).backward()
        return float(forward.loss.detach()), _recorded(coefficients, forward, routes)

    def _bounds(
        self, samples: Sequence[LearnedResponse], hidden_TH: Tensor, ids_T: Tensor, head: Head
    ) -> Bounds:
        """The bounds at the tokens of every reference of these responses."""
        bounds = [no_bounds()]
        start = 0
        for sample in samples:
            reference = sample.reference
            if reference is not None:
                at_U = torch.from_numpy(start + reference.at_U).to(ids_T.device)
                bounds.append(
                    compared(reference, hidden_TH[at_U], ids_T[at_U], head, self._sampling)
                )
            start += len(sample.rollout.response_ids)
        return np.concatenate(bounds)

    def _stay_in_step(self, learns: bool) -> None:
        """Pass an empty micro-batch, which adds 0 to the gradient.

        Other ranks have responses in this one, and all must communicate equally often.
        """

        def loss_at_head(hidden_TH: Tensor, ids_T: Tensor, head: Head) -> PolicyGradient:
            return policy_gradient_loss(hidden_TH, head, ids_T, _no_coefficient, self._sampling)

        with torch.set_grad_enabled(learns):
            forward = self.trainer.forward_pass([DUMMY_REQUEST], loss_at_head)
        if learns:
            forward.loss.backward()

    def _collect_gradients(self) -> None:
        """Move the gradients of half-precision weights to the masters, to sum them over
        micro-batches in float32.
        """
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight is not master and weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None

    def _gradient_norm(self) -> float:
        """Unscale the gradients and clip them to `max_grad_norm`; returns their norm before
        clipping.
        """
        for master in self._masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            sum_replicated(master.grad, self._world)
            if self.loss_scale.enabled:
                master.grad.div_(self.loss_scale.value)
        most = self._config.optimiser.max_grad_norm
        return float(whole(torch.nn.utils.clip_grad_norm_(self._masters, most)))

    def _step(self) -> None:
        """Step AdamW on the masters, then round them into the weights."""
        self.past.keep_copy(self.version)
        self.optimizer.step()
        self.version += 1
        self._round_masters()
        if self.average is not None:
            self.average.update()

    @torch.no_grad()
    def _round_masters(self) -> None:
        """Give the weights that compute the values of their masters."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight is not master:
                weight.copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the next update depends on, by the weights' names; not copies."""
        tensors = self._named("weight", [master.detach() for master in self._masters])
        if self.version:
            for moment in _MOMENTS:
                moments = [self.optimizer.state[master][moment] for master in self._masters]
                tensors |= self._named(moment, moments)
        if self.average is not None:
            tensors |= self._named("average", self.average.tensors)
        return tensors | self.past.tensors()

    def facts(self) -> dict[str, Any]:
        """Whatever else the next update depends on, besides the settings."""
        facts: dict[str, Any] = {
            "version": self.version,
            "loss_scale": self.loss_scale.state_dict(),
            "past": self.past.versions(),
        }
        if self.average is not None:
            facts["average"] = self.average.total
        return facts

    def restore(self, facts: dict[str, Any], load: Callable[[dict[str, Tensor]], None]) -> None:
        """Continue from `facts()`; `load` fills tensors of these names."""
        self.version = facts["version"]
        self.loss_scale.load_state_dict(facts["loss_scale"])
        if self.average is not None:
            self.average.total = facts["average"]
        if self.version:
            # AdamW makes its state at the first step: there must be tensors for `load` to fill.
            for master in self._masters:
                state = {"step": torch.tensor(float(self.version))}
                for moment in _MOMENTS:
                    state[moment] = torch.zeros_like(master)
                self.optimizer.state[master] = state
        load(self.tensors())
        self._round_masters()
        self.past.restore(facts.get("past", ()), load)  # absent in older checkpoints

    def _named(self, prefix: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        names = [f"{prefix}.{name}" for name in self._names]
        return dict(zip(names, tensors, strict=True))


def _master(weight: Tensor) -> Tensor:
    """The float32 weight that AdamW changes: a copy, if the one that computes has fewer digits."""
    return weight if weight.dtype == torch.float32 else weight.detach().float()


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
    coefficients: MicroBatchCoefficients | None = None  # once a pass has begun
    bounds: Bounds = field(default_factory=no_bounds)  # likewise

    @property
    def requests(self) -> list[ScoreRequest]:
        return list(map(_request, self.samples))


class _Measured(NamedTuple):
    """What an update measures of one response: the columns of `Update`."""

    logp_T: np.ndarray
    entropy_T: np.ndarray
    topk_logp_TK: np.ndarray | None = None
    routes: RouteComparison | None = None


def _recorded(
    coefficients: MicroBatchCoefficients,
    forward: PolicyGradient,
    routes: Sequence[RouteComparison | None],
) -> list[_Measured]:
    """What the passes over a micro-batch measured, by response."""
    # The coefficients follow from the log-prob pass, if there was one.
    # Its numbers are recorded, since those of the loss may differ in the last bits.
    recorded: LogpPass | PolicyGradient = forward
    if coefficients.logp_pass is not None:
        recorded = coefficients.logp_pass
    logp = coefficients.split_by_response(recorded.logp_N)
    entropy = coefficients.split_by_response(recorded.entropy_N)
    topk_logp: Sequence[np.ndarray | None] = [None] * len(logp)
    if coefficients.logp_at_topk_NK is not None:
        topk_logp = coefficients.split_by_response(coefficients.logp_at_topk_NK)
    columns = zip(logp, entropy, topk_logp, routes, strict=True)
    return [_Measured(*column) for column in columns]


def _request(sample: LearnedResponse) -> ScoreRequest:
    return ScoreRequest.of(sample.rollout)


def _no_coefficient(_tile: slice, logp_N: Tensor) -> Tensor:
    return torch.zeros_like(logp_N)


_MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's names in its state
# A response without tokens is in no micro-batch.
_NO_TOKENS = _Measured(np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.float32))


# The factors for N responses with lengths |y| and at most T_max tokens each.
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
        self.enabled = enabled
        self.growth_interval = growth_interval
        self.value = initial if enabled else 1.0
        self.finite_steps = 0
        self.back_offs = 0

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
            self.finite_steps = 0
            self.back_offs += 1
            return
        self.finite_steps += 1
        if self.finite_steps % self.growth_interval == 0:
            self.value *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "finite_steps": self.finite_steps, "back_offs": self.back_offs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.finite_steps = state["finite_steps"]
        self.back_offs = state["back_offs"]
