"""The trainer that learns: one optimiser step from a minibatch of responses, by any algorithm of the table.

The weights that compute are in the trainer's dtype, the ones that AdamW changes in float32: a step is often too small
for half precision to hold. What the engine is given are the weights that compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_cli.algorithms.algorithm import Algorithm, coefficient_T, judges_single_tokens
from mismatch_cli.batch import Rollout
from mismatch_cli.errors import MismatchError
from mismatch_cli.policies import Policies, TopKLogProbs
from mismatch_cli.ranks import ALONE, World
from mismatch_cli.rl.train_config import TrainConfig
from mismatch_cli.sampling import SamplingSettings
from mismatch_cli.scoring.head import Head
from mismatch_cli.scoring.layout import micro_batches
from mismatch_cli.scoring.policy_gradient import Known, PolicyGradient, logp_pass, policy_gradient_loss
from mismatch_cli.scoring.trainer import NOTHING, ScoreRequest, Trainer
from mismatch_cli.sharding import is_spread, padded, sum_replicated, whole


@dataclass(frozen=True)
class Sample:
    """One response to learn from; `recomputed` None means that the trainer still has the weights that sampled it."""

    rollout: Rollout
    advantage: float
    logp_recomputed_T: np.ndarray | None = None
    topk_logp_recomputed_TK: np.ndarray | None = None


@dataclass(frozen=True)
class Update:
    """What was seen on the way: log π and entropy before the step, by sample; the gradient's norm before the clip."""

    logp: list[np.ndarray]  # _T float32, nats
    entropy: list[np.ndarray]  # _T float32, nats
    grad_norm: float
    stepped: bool  # False: float16 gradients overflowed, and the loss scale was halved instead
    topk_logp: list[np.ndarray | None]  # _TK float32, nats, of the engine's top K, where the algorithm asks


class NotFiniteError(MismatchError):
    """A loss or gradient that no loss scale can help; `update` is what was seen before it."""

    def __init__(self, message: str, update: Update) -> None:
        super().__init__(message)
        self.update = update


class Learner:
    """A Hugging Face model with an optimiser, an algorithm, and the policy-gradient head in tiles.

    Where the model is spread over ranks, each rank brings its own responses of a minibatch, and all step together.
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
        self.algorithm, self._sampling, self._config, self._world = algorithm, sampling, config, world
        self._names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self._weights = [p for p in self.model.parameters() if p.requires_grad]
        self._masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self._weights]
        self.optimizer = torch.optim.AdamW(
            self._masters,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True if is_spread(self.model) else None,
        )
        self.loss_scale = LossScale(enabled=trainer.dtype == torch.float16)
        self.version = 0  # optimiser steps behind the weights

    def update(self, samples: Sequence[Sample]) -> Update:
        """One optimiser step; a `NotFiniteError`, and no step, where loss or gradient are not finite."""
        for parameter in (*self._weights, *self._masters):
            parameter.grad = None
        scale_S = self._scale(np.array([len(s.rollout.response_ids) for s in samples], dtype=np.int64))
        requests = [ScoreRequest(s.rollout.prompt_ids, s.rollout.response_ids, s.rollout.topk_ids_TK) for s in samples]
        seen: list[_Seen] = [_NOTHING_SEEN] * len(samples)
        loss = 0.0
        for learns, batch in self._micro_batches(requests, samples):
            members = [requests[i] for i in batch], [samples[i] for i in batch]
            share, parts = self._accumulate(*members, scale_S[batch], learns) if batch else self._keep_up(learns)
            loss += share
            self._collect_gradients()
            for i, part in zip(batch, parts, strict=True):
                seen[i] = part
        loss, grad_norm = sum(self._world.gather(loss)), self._gradient_norm()
        finite = bool(np.isfinite(grad_norm))
        logp, entropy, topk_logp = (list(x) for x in zip(*seen, strict=True)) if seen else ([], [], [])
        update = Update(logp, entropy, grad_norm, finite, topk_logp)
        if not np.isfinite(loss) or (not finite and not self.loss_scale.can_back_off):
            raise NotFiniteError(
                f"Update {self.version + 1} has loss {loss:g} and gradient norm {grad_norm:g}: not finite. Try a "
                "lower --learning-rate, or --trainer-dtype float32; ratios of this minibatch may be infinite.",
                update,
            )
        self.loss_scale.update(finite)
        if finite:
            self._step()
        return update

    def _scale(self, length_S: np.ndarray) -> np.ndarray:
        """What the tokens of each response are multiplied with, in view of the whole minibatch."""
        lengths = self._world.gather(length_S)
        scale_S = response_scale(self._config.aggregation, np.concatenate(lengths), self._config.max_tokens)
        first = sum(map(len, lengths[: self._world.rank]))
        return scale_S[first : first + len(length_S)]

    def _micro_batches(
        self, requests: Sequence[ScoreRequest], samples: Sequence[Sample]
    ) -> Iterator[tuple[bool, list[int]]]:
        """Indices, those without an advantage apart: they are looked at, but nothing is learnt from them."""
        for learns in (True, False):
            chosen = [i for i, sample in enumerate(samples) if (sample.advantage != 0) == learns]
            among = [requests[i] for i in chosen]
            batches = micro_batches(among, self._config.token_budget, self.trainer.packed)
            for batch in padded(batches, self._world):
                yield learns, [chosen[i] for i in batch]

    def _accumulate(
        self, requests: Sequence[ScoreRequest], samples: Sequence[Sample], scale_S: np.ndarray, learns: bool
    ) -> tuple[float, list[_Seen]]:
        """Add the gradient of one micro-batch; answers its loss, and what was seen of each response."""
        judged: _Judged | None = None

        def look(hidden_TH: Tensor, ids_T: Tensor, head: Head) -> tuple[PolicyGradient, Known | None]:
            nonlocal judged
            judged, known = _Judged(self.algorithm, requests, samples, scale_S, ids_T), None
            if not judges_single_tokens(self.algorithm):
                known = logp_pass(hidden_TH, head, ids_T, self._sampling, judged.query_ids_TK)
                judged.look_first(known)
            return policy_gradient_loss(hidden_TH, head, ids_T, judged.coefficient, self._sampling, known=known), known

        with torch.set_grad_enabled(learns):
            found, known = self.trainer.look_at(requests, look)
        if learns:
            (found.loss * self.loss_scale.value).backward()
        lengths = [len(r.response_ids) for r in requests]
        seen_first = found if known is None else known  # what the coefficients were formed from
        parts = [[x.cpu().numpy() for x in side.split(lengths)] for side in (seen_first.logp_N, seen_first.entropy_N)]
        asked = None if judged is None else judged.topk_logp_TK
        topk = [None] * len(lengths) if asked is None else asked.cpu().split(lengths)
        seen = list(zip(*parts, [x if x is None else x.numpy() for x in topk], strict=True))
        return float(found.loss.detach()), seen

    def _keep_up(self, learns: bool) -> tuple[float, list[_Seen]]:
        """A pass that adds 0, because other ranks have one more."""
        with torch.set_grad_enabled(learns):
            found = self.trainer.look_at(
                [NOTHING],
                lambda hidden_TH, ids_T, head: policy_gradient_loss(
                    hidden_TH, head, ids_T, lambda _, logp_T: torch.zeros_like(logp_T), self._sampling
                ),
            )
        if learns:
            found.loss.backward()
        return 0.0, []

    def _collect_gradients(self) -> None:
        """Move the gradients of half-precision weights to the masters: their sum over micro-batches is float32."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight is not master and weight.grad is not None:
                part = weight.grad.float()
                master.grad = part if master.grad is None else master.grad.add_(part)
                weight.grad = None

    def _gradient_norm(self) -> float:
        """Gradients unscaled, and clipped to `max_grad_norm`; answers their norm before the clip."""
        for master in self._masters:
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            sum_replicated(master.grad, self._world)
            if self.loss_scale.enabled:
                master.grad.div_(self.loss_scale.value)
        return float(whole(torch.nn.utils.clip_grad_norm_(self._masters, self._config.max_grad_norm)))

    def _step(self) -> None:
        """AdamW on the masters, which are then rounded into the weights."""
        self.optimizer.step()
        self.version += 1
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                if weight is not master:
                    weight.copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the next update depends on, by the weights' names; as they are, not copies."""
        found = dict(self._named("weight", [master.detach() for master in self._masters]))
        if self.version:
            states = [self.optimizer.state[master] for master in self._masters]
            for kind in _MOMENTS:
                found |= self._named(kind, [state[kind] for state in states])
        return found

    def facts(self) -> dict[str, Any]:
        """What else it depends on, besides the settings."""
        return {"version": self.version, "loss_scale": self.loss_scale.state_dict()}

    def restore(self, facts: dict[str, Any], load: Callable[[dict[str, Tensor]], None]) -> None:
        """Go on from `facts()`; `load` fills tensors of these names."""
        self.version = facts["version"]
        self.loss_scale.load_state_dict(facts["loss_scale"])
        for master in self._masters if self.version else ():
            moments = {kind: torch.zeros_like(master) for kind in _MOMENTS}
            self.optimizer.state[master] = {"step": torch.tensor(float(self.version)), **moments}
        load(self.tensors())
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                if weight is not master:
                    weight.copy_(master)

    def _named(self, kind: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return {f"{kind}.{name}": tensor for name, tensor in zip(self._names, tensors, strict=True)}


_MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
_Seen = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # log π, entropy, log π of the top K
_NOTHING_SEEN: _Seen = (np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.float32), None)


class _Judged:
    """The tokens of a micro-batch as its algorithm sees them: asked for coefficients as soon as log π is known."""

    def __init__(
        self,
        algorithm: Algorithm,
        requests: Sequence[ScoreRequest],
        samples: Sequence[Sample],
        scale_S: np.ndarray,
        ids_T: Tensor,
    ) -> None:
        self._algorithm, self._samples, self._ids_T, self._device = algorithm, samples, ids_T, ids_T.device
        length_S = np.array([len(r.response_ids) for r in requests])
        self._offset_S1 = torch.from_numpy(np.concatenate([[0], np.cumsum(length_S)])).to(self._device)
        self._rollout_T = self._flat([s.rollout.logp_rollout_T for s in samples])
        advantage_S = np.array([s.advantage for s in samples], dtype=np.float32)
        self._advantage_T = self._flat([np.repeat(advantage_S, length_S)])
        self._scale_T = self._flat([np.repeat(scale_S, length_S).astype(np.float32)])
        recomputed = [s.logp_recomputed_T for s in samples]
        self._recomputed_T = None if any(x is None for x in recomputed) else self._flat(recomputed)  # type: ignore[arg-type]
        self._ready_T: Tensor | None = None
        self.topk_logp_TK: Tensor | None = None
        k = algorithm.needs_top_k
        if k and any(r.topk_ids_TK is None or r.topk_ids_TK.shape[1] < k for r in requests):
            raise MismatchError(
                f"{algorithm.name} needs the engine's top {k} log-probs. Sample with --top-logprobs {k}."
            )
        ids_TK = [r.topk_ids_TK[:, :k] for r in requests if r.topk_ids_TK is not None] if k else []
        self.query_ids_TK = self._flat(ids_TK).long() if ids_TK else ids_T.new_zeros((len(ids_T), 0))

    def look_first(self, known: Known) -> None:
        """Form every coefficient from a log-prob pass, for rules that look at whole responses or at other tokens."""
        topk = None
        if self._algorithm.needs_top_k:
            self.topk_logp_TK = known.logp_at_ids_NK
            topk = self._topk(self.topk_logp_TK)
        self._ready_T = self._coefficients(known.logp_N, slice(None), self._offset_S1, topk)

    def coefficient(self, rows: slice, logp_T: Tensor) -> Tensor:
        """The coefficients of some tokens, with their response's factor in the aggregation."""
        if self._ready_T is not None:
            return self._ready_T[rows]
        return self._coefficients(logp_T, rows, torch.tensor([0, len(logp_T)], device=self._device), None)

    def _coefficients(self, logp_T: Tensor, rows: slice, offset_S1: Tensor, topk: TopKLogProbs | None) -> Tensor:
        recomputed_T = logp_T if self._recomputed_T is None else self._recomputed_T[rows]
        policies = Policies(self._rollout_T[rows], logp_T, recomputed_T, offset_S1, topk)
        return coefficient_T(self._algorithm, policies, self._advantage_T[rows]) * self._scale_T[rows]

    def _topk(self, trainer_TK: Tensor) -> TopKLogProbs:
        k = self._algorithm.needs_top_k
        rollout_TK = self._flat([s.rollout.topk_logp_rollout_TK[:, :k] for s in self._samples])  # type: ignore[index]
        recomputed = [s.topk_logp_recomputed_TK for s in self._samples]
        known = all(x is not None for x in recomputed)
        recomputed_TK = self._flat([x[:, :k] for x in recomputed]) if known else trainer_TK  # type: ignore[index]
        return TopKLogProbs(self._ids_T, self.query_ids_TK, rollout_TK, trainer_TK, recomputed_TK)

    def _flat(self, parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._device)


# Of N responses with lengths |y| and at most T_max tokens each.
_SCALES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "sequence-sum": lambda length_S, longest: np.full(len(length_S), 1 / (len(length_S) * longest)),
    "sequence-mean": lambda length_S, _: 1 / (len(length_S) * np.maximum(length_S, 1)),
    "token-mean": lambda length_S, _: np.full(len(length_S), 1 / max(length_S.sum(), 1)),
}


def response_scale(aggregation: str, length_S: np.ndarray, max_tokens: int) -> np.ndarray:
    """What every token of each response is multiplied with, float64.

    sequence-sum: 1/(N · T_max), the sum over a response by a constant, then the mean (Dr. GRPO, arXiv 2503.20783; the
    sanity test). sequence-mean: 1/(N · |y|), the only one that divides by a response's own length. token-mean: 1/Σ|y|.
    The terms of GSPO are its response's, each at all |y| tokens.
    """
    return _SCALES[aggregation](np.asarray(length_S, dtype=np.int64), max_tokens)


class LossScale:
    """The factor on the loss; 1 and fixed where the dtype has float32's range.

    `growth_interval` finite steps double it (400 in the FP16 mismatch paper's runs), an overflow halves it.
    """

    def __init__(self, enabled: bool, initial: float = 2.0**16, growth_interval: int = 400) -> None:
        self.enabled, self.growth_interval = enabled, growth_interval
        self.value = initial if enabled else 1.0
        self.finite_steps = self.back_offs = 0

    @property
    def can_back_off(self) -> bool:
        """Whether a smaller factor could make an overflow go away: at 1 the gradients themselves are too large."""
        return self.enabled and self.value > 1

    def update(self, finite: bool) -> None:
        """Learn from one step whether its gradients were finite."""
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
        self.value, self.finite_steps, self.back_offs = state["value"], state["finite_steps"], state["back_offs"]
