"""A weight sync that proves itself: the engine's log μ of its own tokens must fit the weights it was given."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mismatch_cli.adapters import Merged
from mismatch_cli.engines import Engine, engine_failures
from mismatch_cli.errors import MismatchError
from mismatch_cli.metrics.estimate import paired_test
from mismatch_cli.ranks import ALONE, World
from mismatch_cli.rl.judged import Sample
from mismatch_cli.scoring.trainer import ScoreRequest, Trainer
from mismatch_cli.sharding import like, local

PROVEN, NEWER, UNDECIDABLE = "proven", "newer", "undecidable"
_SAME = 1e-5  # largest mean |π − μ| of two float32 implementations with the same weights; measured: 3.4e-7
_LEAST, _PAIRED = 8, 16  # responses to score at the weights as sent
_BROKEN = 5.0  # × the gap at the last proof: more than rounding can cause while the policy barely moves


class WeightSync:
    """Gives the engine the trainer's weights, and compares what it samples next with them.

    In float32 on both sides the proof is free: the trainer scores the first minibatch at the weights that sampled it
    anyway. In lower precision the engine never agrees exactly, so we test which weights it fits better, the new ones or
    older ones, both rounded to the engine's dtype as they were sent: rounding swallows most of a small step. The older
    ones are from the step before ("proven"), or from the last proof if the steps since were too small to tell ("newer":
    than those, which an engine that lags by one small step would be too). That takes a copy of the weights in the
    engine's dtype, and two forward passes over a few responses.
    """

    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        *,
        exact: bool,
        token_budget: int,
        dtype: torch.dtype | None = None,
        weights: Merged | None = None,
        world: World = ALONE,
    ) -> None:
        """`dtype`: in which the engine holds the weights; None if that is not known, which leaves them unrounded.

        `weights`: what the engine gets, if not the trainer's model itself but a merged adapter.
        """
        self._engine, self._trainer, self._merged = engine, trainer, weights
        self._exact, self._token_budget, self._world = exact, token_budget, world
        # None: the weights that score a minibatch stand for those that the engine got. A merged adapter is compared
        # with the unmerged one, unrounded: merging it here by the same code would prove nothing about that code.
        self._rounded_to = None if weights is not None or dtype == trainer.dtype else dtype
        self._before: list[torch.Tensor] | None = None  # older trainable weights, for the paired test
        self._now: list[torch.Tensor] | None = None
        self._logp_before: list[np.ndarray] | None = None  # of the first responses, at the older weights as sent
        self._logp_sent: list[np.ndarray] | None = None  # and at the present ones as sent
        self._age = 0  # steps between the older weights and now
        self._gap = np.inf  # mean |π − μ| at the last proof

    def load(self) -> None:
        """Give the engine all current weights."""
        with engine_failures("loading weights", "Every finished step is on record"):
            self._engine.load_weights(self._merged or self._trainer.model)

    def look_back(self, samples: Sequence[Sample]) -> None:
        """Before the first update of a step: score some of its first minibatch at the weights as sent, new and old."""
        if self._exact:
            return
        self._age += 1
        self._now = [self._kept(part) for part in self._trainable()]
        if self._before is None and self._rounded_to is None:
            return
        with self._restored():
            if self._rounded_to is not None:
                self._put(self._now)
                self._logp_sent = self._scored(samples)
            if self._before is not None:
                self._put(self._before)
                self._logp_before = self._scored(samples)

    def _scored(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        few = samples[: _few(samples)]
        scores = self._trainer.score([ScoreRequest.of(s.rollout) for s in few], token_budget=self._token_budget)
        return [s.rollout.of_sampled(score.logp_T) for s, score in zip(few, scores, strict=True)]

    def prove(self, samples: Sequence[Sample], logp_trainer: Sequence[np.ndarray]) -> str:
        """Whether the engine sampled the first minibatch with the weights that scored it; a `MismatchError` if not.

        Every rank checks its own engine's responses; the answer holds for all engines.
        """
        logp_rollout = [s.rollout.of_sampled(s.rollout.logp_rollout_T) for s in samples]
        logp_trainer = [s.rollout.of_sampled(logp_T) for s, logp_T in zip(samples, logp_trainer, strict=True)]
        if self._exact:
            return prove_equal(logp_rollout, logp_trainer) if samples else UNDECIDABLE
        few = _few(samples)
        logp_rollout, logp_sent = logp_rollout[:few], self._logp_sent or logp_trainer[:few]
        gap, found = mean_gap(logp_rollout, logp_sent), UNDECIDABLE
        if self._logp_before is not None and samples:  # the first step has no older weights yet
            found = prove_newer(logp_rollout, logp_sent, self._logp_before)
            if found == UNDECIDABLE and gap > max(_BROKEN * self._gap, _SAME):
                raise MismatchError(
                    f"The weight sync failed: mean |π − μ| went from {self._gap:.2g} to {gap:.2g}, which no "
                    "older weights explain. The engine has broken or incomplete weights."
                )
        tokens = sum(map(len, logp_rollout))
        told = self._world.gather((found, gap, tokens))
        if self._logp_before is not None and any(found == UNDECIDABLE for found, _, tokens in told if tokens):
            return UNDECIDABLE
        found = UNDECIDABLE if self._logp_before is None else PROVEN if self._age == 1 else NEWER
        self._before, self._age, self._gap = self._now, 0, _mean(told)
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """The older weights, by name: with `facts`, a resumed run gets the same results as an unbroken one."""
        return {} if self._before is None else self._named(self._before)

    def facts(self) -> dict[str, Any]:
        return {"before": self._before is not None, "age": self._age, "gap": float(self._gap)}

    def restore(self, facts: dict[str, Any], load: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Continue from `facts()`; `load` fills tensors of these names."""
        self._age, self._gap, self._before = facts["age"], facts["gap"], None
        if facts["before"]:
            self._before = [torch.empty_like(self._kept(part)) for part in self._trainable()]
            named = self._named(self._before)
            load(named)
            self._before = [local(weight).to("cpu") for weight in named.values()]

    def _kept(self, part: torch.Tensor) -> torch.Tensor:
        """A copy of a trainable weight, in the precision in which the engine gets it."""
        return part.to("cpu", self._rounded_to or part.dtype, copy=True)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Whatever the block does to the weights is undone at its end."""
        # What `look_back` has just kept is a whole copy, unless it is rounded.
        kept = self._now if self._rounded_to is None else [part.to("cpu", copy=True) for part in self._trainable()]
        assert kept is not None
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, weights: Sequence[torch.Tensor]) -> None:
        for part, value in zip(self._trainable(), weights, strict=True):
            part.copy_(value)

    def _trainable(self) -> list[torch.Tensor]:
        """This rank's part of every trainable weight."""
        return [local(weight.detach()) for weight in self._trainer.model.parameters() if weight.requires_grad]

    def _named(self, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        trainable = ((name, weight) for name, weight in self._trainer.model.named_parameters() if weight.requires_grad)
        return {f"before.{name}": like(weight, part) for (name, weight), part in zip(trainable, parts, strict=True)}


def _few(samples: Sequence[Sample]) -> int:
    """How many responses are scored again: both passes together take some hundredths of a step."""
    return min(_PAIRED, max(_LEAST, len(samples) // 4))


def prove_equal(logp_rollout: Sequence[np.ndarray], logp_trainer: Sequence[np.ndarray]) -> str:
    """In float32 on both sides log μ must equal log π: a `MismatchError` if it does not."""
    gap = mean_gap(logp_rollout, logp_trainer)
    if not gap <= _SAME:  # false for NaN too
        raise MismatchError(
            f"The weight sync failed: the engine's probabilities differ by {gap:.2g} on average from the trainer's, "
            f"and in float32 they should agree to {_SAME:g}. The engine has old or broken weights."
        )
    return PROVEN


def mean_gap(logp_rollout: Sequence[np.ndarray], logp_trainer: Sequence[np.ndarray]) -> float:
    """mean |π − μ| over tokens; 0 without tokens."""
    if not logp_rollout:
        return 0.0
    gap_T = np.abs(np.exp(np.concatenate(logp_trainer)) - np.exp(np.concatenate(logp_rollout)))
    return float(gap_T.mean()) if len(gap_T) else 0.0


def _mean(told: Sequence[tuple[str, float, int]]) -> float:
    """The mean over all ranks' tokens."""
    if len(told) == 1:
        return told[0][1]
    return sum(gap * tokens for _, gap, tokens in told) / max(sum(tokens for *_, tokens in told), 1)


def prove_newer(
    logp_rollout: Sequence[np.ndarray], logp_new: Sequence[np.ndarray], logp_old: Sequence[np.ndarray]
) -> str:
    """In lower precision: whether the engine fits the new weights better than older ones.

    A paired test over the mean |π − μ| of each response; the two means must also differ by a share of the smaller one.
    "undecidable" if the steps between were too small to tell; a `MismatchError` if the old weights fit better.
    """
    fit = paired_test(logp_rollout, logp_new, logp_old)
    if np.isnan(fit.first + fit.second):
        raise MismatchError("The weight sync failed: the engine or the trainer returns NaN.")
    if not fit.second_fits:
        return PROVEN if fit.first_fits else UNDECIDABLE
    raise MismatchError(
        "The weight sync failed: the engine's probabilities fit the weights of an earlier step better than the new "
        f"ones (mean |π − μ| is {fit.second:.2g} and {fit.first:.2g}, "
        f"{-fit.deviations:.0f} standard errors apart)."
    )
