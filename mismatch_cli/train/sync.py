"""A weight sync that proves itself: the engine's tensors are read back, and its log μ must fit
what it was sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.metrics.sampled_with import paired_test
from mismatch_cli.models.adapters import MergedAdapter
from mismatch_cli.models.engines import Engine, OpenEngine, UnreadTensor, engine_failures
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.models.sharding import saved_state
from mismatch_cli.processes.ranks import ALONE, World
from mismatch_cli.train.checkpoint import by_name, loaded, trained_weights
from mismatch_cli.train.coefficients import LearnedResponse
from mismatch_cli.train.sent_weights import SentWeights

_BEFORE = "before"  # how checkpoints call the weights of the last decision
PROVEN, NEWER, UNDECIDABLE, UNCHECKED = "proven", "newer", "undecidable", "unchecked"
# Largest mean |π − μ| of two float32 implementations, unless their tensors are known to be equal
_SAME = 1e-5
# × the gap at the last decision, both free of how certain the policy is: more than rounding causes
_BROKEN = 5.0
_SURE = 3.0  # standard errors: few tokens differ by more from step to step
_LEAST, _MOST = 8, 16  # responses to score at the weights as sent

# What checks may cost, as a share of all forward passes. A response costs about 1.25 of them to
# sample and 3 an epoch to learn from. A check scores a few responses twice; copies of the weights,
# and reading them back, take as long again.
_SHARE = 0.015
_SAMPLED, _LEARNT, _CHECKED = 1.25, 3.0, 4.0


def steps_between_checks(responses: int, epochs: int) -> int:
    """Every how many steps a sync is checked, given the responses of a step."""
    work = responses * (_SAMPLED + _LEARNT * epochs)
    return math.ceil(_CHECKED * checked_responses(responses) / (_SHARE * work))


class WeightSync:
    """Gives the engine the trainer's weights, and checks that it samples with them.

    1. Every tensor of the engine is read back, and must equal what was sent, rounded to the
       engine's dtype: "proven". A server's tensors, or packed ones, cannot be read.
    2. In float32 on both sides the trainer scores the first minibatch at the weights that sampled
       it anyway, at every step, and must agree.
    3. In lower precision the engine never agrees exactly. There we test whether it fits the weights
       as sent better than those of the last decision, as they were sent then: "newer", and
       "undecidable" if the steps since then were too small to tell. Unrounded weights would not do:
       rounding swallows most of a small step.

    1 and 3 are done at the first two steps, and then every `every` steps: "unchecked" in between. 3
    takes copies of the weights in the engine's dtype, and two forward passes over a few responses.
    Its first pass also measures what rounding swallows: how far the engine, given the new weights,
    lags behind the trainer that learns.
    """

    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        *,
        exact: bool,
        token_budget: int,
        dtype: torch.dtype | None = None,
        reads: bool = False,
        every: int = 1,
        weights: MergedAdapter | None = None,
        world: World = ALONE,
    ) -> None:
        """`dtype`: in which the engine holds the weights; None if that is not known, or if it
        quantises them.

        `reads`: whether the engine is an `OpenEngine`. `weights`: what the engine gets, if not the
        trainer's model itself but a merged adapter.
        """
        self._engine = engine
        self._trainer = trainer
        self._model = weights or trainer.model
        self._exact = exact
        self._token_budget = token_budget
        self._reads = reads
        self._every = every
        self._world = world
        self._as_sent: SentWeights | None = None
        if dtype is not None and not exact:
            self._as_sent = SentWeights(trainer.model, dtype, adapter=weights is not None)
        # Without rounding and merging, the weights that score the first minibatch are those that
        # the engine got.
        self._sent_unchanged = weights is None and dtype == trainer.dtype
        self._sent: list[torch.Tensor] | None = None  # a copy of the weights that sample next
        self._before: list[torch.Tensor] | None = None  # and of those of the last decision
        self._tensors_equal = False  # whether all tensors of the engine were read back
        # How many weights the last step changed in the engine, of all
        self._changed: tuple[int, int] | None = None
        # log π of the first responses: at the weights as sent, and at those of the last decision
        self._logp_sent: list[np.ndarray] | None = None
        self._logp_before: list[np.ndarray] | None = None
        # In float32 mean |π − μ| at the first step, in lower precision `odds_gap` at the last
        # decision
        self._gap = np.inf

    def load(self, step: int, *, at_start: bool = False) -> None:
        """Give the engine all weights that the model has now; with them it samples `step`."""
        self.send()
        with engine_failures("loading weights", "Every finished step is on record"):
            if at_start or self._due(step):
                self._tensors_equal = self._reads and self._read_back()
        sent_before = self._sent
        self._sent = None
        # A copy is compared with the next one, so a check needs that of the step before it too.
        if self._as_sent is None or not (self._due(step) or self._due(step + 1)):
            return
        self._sent = self._as_sent.copy()
        if sent_before is not None and self._due(step):
            self._changed = self._as_sent.count_changes(sent_before, self._sent)

    def send(self) -> None:
        """Give the engine these weights without a check of them."""
        with engine_failures("loading weights", "Every finished step is on record"):
            self._engine.load_weights(self._model)

    def score_before_update(self, step: int, samples: Sequence[LearnedResponse]) -> None:
        """Before the first update of a step: score some of its first minibatch at the weights as
        sent, new and old.
        """
        self._logp_sent = None
        self._logp_before = None
        if self._as_sent is None or not self._due(step):
            return
        assert self._sent is not None
        copies = [] if self._before is None else [self._before]
        if not self._sent_unchanged:
            copies.append(self._sent)
        scores = self._as_sent.measure_at(copies, partial(self._score, samples))
        if not self._sent_unchanged:
            self._logp_sent = scores.pop()
        if self._before is not None:
            self._logp_before = scores.pop()

    def prove(
        self, step: int, samples: Sequence[LearnedResponse], logp_trainer: Sequence[np.ndarray]
    ) -> dict[str, Any]:
        """What the line of a step says: whether the engine sampled it with the weights that it was
        sent, and their lag.

        `logp_trainer`: of the first minibatch, at the weights that sampled. A `MismatchError` if
        the engine had other weights. Every rank checks its own engine's responses; the answer holds
        for all engines.
        """
        logp_rollout = [s.rollout.of_sampled(s.rollout.logp_rollout_T) for s in samples]
        logp_trainer = [
            s.rollout.of_sampled(logp_T) for s, logp_T in zip(samples, logp_trainer, strict=True)
        ]
        if self._exact:
            return {"sync": self._prove_equal(logp_rollout, logp_trainer)}
        if not self._due(step):
            return {"sync": UNCHECKED}
        if self._as_sent is None:
            return {"sync": PROVEN if self._tensors_equal else UNDECIDABLE}
        few = checked_responses(len(samples))
        checks = self._world.gather(self._check(logp_rollout[:few], logp_trainer[:few]))
        answer = NEWER if self._decide(checks) else UNDECIDABLE
        if self._tensors_equal:
            answer = PROVEN
        return {"sync": answer, "rounding": _rounding(checks)}

    def _check(
        self, logp_rollout: Sequence[np.ndarray], logp_trainer: Sequence[np.ndarray]
    ) -> _RankCheck:
        """Compare a few responses of this rank's engine with the weights as sent."""
        logp_sent = self._logp_sent or logp_trainer
        gap, error = odds_gap(logp_rollout, logp_sent)
        answer = UNDECIDABLE
        if self._logp_before is not None and logp_rollout:
            answer = prove_newer(logp_rollout, logp_sent, self._logp_before)
            # All responses share the rounding of the engine's weights, so any gap is significant.
            # It must also be several times what rounding alone causes.
            is_far = gap - _SURE * error > max(_BROKEN * self._gap, _SAME)
            # Tensors that were read back are whole, whatever a changed policy makes of them.
            if is_far and not self._tensors_equal:
                raise MismatchError(
                    f"The weight sync failed: the engine's log-odds were {self._gap:.2g} from "
                    f"the trainer's and are {gap:.2g} now, which no older weights explain. The "
                    f"engine has broken or incomplete weights. {_INSTEAD}"
                )
        lag = mean_gap(logp_trainer, logp_sent)
        tokens = sum(map(len, logp_rollout))
        return _RankCheck(answer, gap, lag, tokens, self._changed)

    def _decide(self, checks: Sequence[_RankCheck]) -> bool:
        """Whether all engines have the new weights; then the next check compares with these."""
        undecided = any(check.answer == UNDECIDABLE for check in checks if check.tokens)
        # The first check has nothing to compare with: it is where the comparison begins.
        is_first = self._before is None
        if is_first or not undecided:
            self._gap = _mean([(check.gap, check.tokens) for check in checks])
            self._before = self._sent
        return not is_first and not undecided

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights of the last decision, by name: with `facts`, a resumed run repeats an
        unbroken one.
        """
        if self._before is None:
            return {}
        return by_name(_BEFORE, trained_weights(self._trainer.model), self._before)

    def facts(self) -> dict[str, Any]:
        return {
            "before": self._before is not None,
            self._gap_name: float(self._gap),
            "equal": self._tensors_equal,
            "changed": self._changed,
        }

    def restore(
        self, facts: dict[str, Any], load: Callable[[dict[str, torch.Tensor]], None]
    ) -> None:
        """Continue from `facts()`; `load` fills tensors of these names."""
        # Older checkpoints lack some of these.
        self._gap = facts.get(self._gap_name, np.inf)
        self._tensors_equal = facts.get("equal", False)
        self._changed = facts.get("changed")
        self._before = None
        if facts["before"] and self._as_sent is not None:
            weights = trained_weights(self._trainer.model)
            self._before = loaded(_BEFORE, weights, self._as_sent.empty(), load)

    @property
    def _gap_name(self) -> str:
        return "gap" if self._exact else "odds_gap"

    def _due(self, step: int) -> bool:
        return step <= 2 or step % self._every == 0

    def _score(self, samples: Sequence[LearnedResponse]) -> list[np.ndarray]:
        """log π of the first samples, at their sampled tokens."""
        few = samples[: checked_responses(len(samples))]
        requests = [ScoreRequest.of(s.rollout) for s in few]
        scores = self._trainer.score(requests, token_budget=self._token_budget)
        return [s.rollout.of_sampled(score.logp_T) for s, score in zip(few, scores, strict=True)]

    def _read_back(self) -> bool:
        """Whether every tensor of the engine could be read; a `MismatchError` if one is not what
        was sent.
        """
        state = saved_state(self._model)
        all_readable = True
        total = 0
        differ = []
        engine: OpenEngine = self._engine  # type: ignore[assignment]
        for name, tensor in engine.weights():
            if isinstance(tensor, UnreadTensor) or name not in state:
                all_readable = False
                continue
            total += 1
            if not torch.equal(tensor, state[name].to(tensor)):
                differ.append(name)
        if differ:
            raise MismatchError(
                f"The weight sync failed: {len(differ)} of {total} tensors in the engine are not "
                f"what it was sent, such as {differ[0]}. {_INSTEAD}"
            )
        return all_readable and total > 0

    def _prove_equal(
        self, logp_rollout: Sequence[np.ndarray], logp_trainer: Sequence[np.ndarray]
    ) -> str:
        """Check an engine and a trainer in float32: the gap of equal tensors is what the two
        implementations differ by.
        """
        if not logp_rollout:
            return UNDECIDABLE
        if self._gap == np.inf and self._tensors_equal:
            self._gap = mean_gap(logp_rollout, logp_trainer)
        noise = self._gap if self._gap < np.inf else 0.0
        return prove_equal(logp_rollout, logp_trainer, noise)


class _RankCheck(NamedTuple):
    """What a rank measured at a check, over a few responses of its own engine."""

    answer: str  # of `prove_newer`
    gap: float  # `odds_gap` of the engine from the weights as sent
    lag: float  # mean |π − π′| of the weights that learn from the weights as sent
    tokens: int
    changed: tuple[int, int] | None  # weights that the last step changed in the engine, of all


_INSTEAD = (
    "Everything learned from its samples would be meaningless: try another --engine, or another "
    "version of it."
)


def checked_responses(responses: int) -> int:
    """How many responses are scored again."""
    return min(_MOST, max(_LEAST, responses // 4))


def prove_equal(
    logp_rollout: Sequence[np.ndarray], logp_trainer: Sequence[np.ndarray], noise: float = 0.0
) -> str:
    """Require that log μ equals log π, in float32 on both sides: else a `MismatchError`.

    `noise`: mean |π − μ| of the two with equal tensors, if it is known.
    """
    gap = mean_gap(logp_rollout, logp_trainer)
    most = max(_SAME, _BROKEN * noise)
    if not gap <= most:  # false for NaN too
        raise MismatchError(
            f"The weight sync failed: the engine's probabilities differ by {gap:.2g} on average "
            f"from the trainer's, and in float32 they should agree to {most:.2g}. The engine has "
            f"old or broken weights. {_INSTEAD}"
        )
    return PROVEN


def mean_gap(logp_rollout: Sequence[np.ndarray], logp_trainer: Sequence[np.ndarray]) -> float:
    """mean |π − μ| over tokens; 0 without tokens."""
    if not logp_rollout:
        return 0.0
    gap_T = np.abs(np.exp(np.concatenate(logp_trainer)) - np.exp(np.concatenate(logp_rollout)))
    return float(gap_T.mean()) if len(gap_T) else 0.0


def odds_gap(
    logp_rollout: Sequence[np.ndarray], logp_trainer: Sequence[np.ndarray]
) -> tuple[float, float]:
    """Σ |π − μ| / Σ μ(1 − μ), and its standard error over responses; 0 without tokens.

    For small shifts π − μ = μ(1 − μ) Δ: the mean shift Δ of the log-odds, weighted by how far a
    probability follows it. A policy that becomes certain, or less so, does not change it.
    """
    gaps = []
    weights = []
    for rollout_T, trainer_T in zip(logp_rollout, logp_trainer, strict=True):
        mu_T = np.exp(rollout_T)
        gaps.append(np.abs(np.exp(trainer_T) - mu_T).sum())
        weights.append((mu_T * (1 - mu_T)).sum())
    gap_S = np.array(gaps)
    weight_S = np.array(weights)
    total = float(weight_S.sum())
    if total == 0:
        return 0.0, 0.0
    gap = float(gap_S.sum()) / total
    return gap, float(np.linalg.norm(gap_S - gap * weight_S)) / total


def _mean(gaps: Sequence[tuple[float, int]]) -> float:
    """The mean over all ranks' tokens, from each rank's mean and its tokens."""
    if len(gaps) == 1:
        return gaps[0][0]
    total = sum(tokens for _, tokens in gaps)
    return sum(gap * tokens for gap, tokens in gaps) / max(total, 1)


def _rounding(checks: Sequence[_RankCheck]) -> dict[str, Any]:
    """What rounding to the engine's dtype swallows, over all ranks; without a step before, only
    the lag.
    """
    lag = _mean([(check.lag, check.tokens) for check in checks])
    differ = 0
    total = 0
    for check in checks:
        if check.changed is not None:
            differ += check.changed[0]
            total += check.changed[1]
    return {"weights_changed": differ / total if total else None, "abs_dp_mean": lag}


def prove_newer(
    logp_rollout: Sequence[np.ndarray],
    logp_new: Sequence[np.ndarray],
    logp_old: Sequence[np.ndarray],
) -> str:
    """Whether an engine in lower precision fits the new weights better than older ones.

    A paired test over the mean |π − μ| of each response; the two means must also differ by a share
    of the smaller one. "undecidable" if the steps between were too small to tell; a `MismatchError`
    if the old weights fit better.
    """
    # A low-precision engine agrees with nearby weights by chance, and significantly: all responses
    # share the rounding of its weights. So `paired_test` also requires a large difference.
    fit = paired_test(logp_rollout, logp_new, logp_old)
    if np.isnan(fit.first + fit.second):
        raise MismatchError(
            f"The weight sync failed: the engine or the trainer returns NaN. {_INSTEAD}"
        )
    if not fit.second_fits:
        return NEWER if fit.first_fits else UNDECIDABLE
    raise MismatchError(
        "The weight sync failed: the engine's probabilities fit the weights of an earlier step "
        f"better than the new ones (mean |π − μ| is {fit.second:.2g} and {fit.first:.2g}, "
        f"{-fit.deviations:.0f} standard errors apart). {_INSTEAD}"
    )
