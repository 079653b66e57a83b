"""The trainer's model, which reads responses of the sample again: as recorded, or as a side may
have misread them.

Log-probabilities alone cannot distinguish another prompt from older weights or other positions. A
model that reads the same tokens under each hypothesis can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.dealing import ALL_HERE, Ranks
from mismatch_cli.diagnosis.sample import Sample
from mismatch_cli.sampling import SamplingSettings
from mismatch_cli.trace.reader import Trace

if TYPE_CHECKING:
    from mismatch_cli.scoring.trainer import Trainer

_RESPONSES = 128  # to score
# To try hypotheses on: so many of their shorter half, one in sixteen of all, but two at least
_FEW, _FEW_OF_ALL, _FEWEST = 8, 16, 2
_TIMES_SAMPLE = 8  # the budget of all readings together, of the tokens of one
_TOKEN_BUDGET = 8192
_BITS, _SMALLEST = 7, 1e-3  # of a bfloat16 number after the first; a logit
_SUPPORT = ("temperature", "top_p", "top_k", "min_p")
Key = tuple[int, int, int]


@dataclass(frozen=True)
class Hypothesis:
    """How one side may have read the responses: after which prompt, and with which change to the
    model.

    `prompt` maps the recorded prompt ids to those that were read. `changed` makes a context manager
    from the Hugging Face model, entered while it scores: it sets hooks or settings and restores
    them.
    """

    name: str
    prompt: Callable[[list[int]], list[int]] = list  # unchanged
    changed: Callable[[Any], AbstractContextManager[Any]] = nullcontext


AS_RECORDED = Hypothesis("as recorded")


def rounded_to(dtype: str) -> Hypothesis:
    """The weights as an engine of this dtype gets them; the model computes with them as before."""

    @contextmanager
    def changed(model: Any) -> Iterator[None]:
        from mismatch_cli.models import round_weights

        kept = round_weights(model, dtype)
        try:
            yield
        finally:
            for weight, value in kept:
                weight.copy_(value)

    return Hypothesis(f"weights in {dtype}", changed=changed)


class BudgetSpent(Exception):
    """Another reading would take more tokens than all of them together may."""


class ModelAtHand:
    """A model, and the sample's responses that it scores: up to 128, the same ones under every
    hypothesis.
    """

    def __init__(
        self,
        sample: Sample,
        prompts: Mapping[Key, list[int]],
        load: Callable[[], Trainer],
        ranks: Ranks = ALL_HERE,
        budget: int | None = None,
    ) -> None:
        """`prompts`: ids by step, prompt and sample; `load` is called for the first hypothesis;
        `budget`: tokens that all readings may take, by default eight times those of the responses.

        All ranks must try the same hypotheses in the same order; each scores a part of the
        responses.
        """
        spread = np.unique(
            np.linspace(0, sample.num_responses - 1, _RESPONSES).astype(int)
        ).tolist()
        self.rows = [s for s in spread if prompts.get(_key(sample, s))]
        self._sample, self._prompts, self._load, self._ranks = sample, prompts, load, ranks
        self._scored: dict[tuple[str, bool], np.ndarray] = {}
        self.budget = budget or _TIMES_SAMPLE * self._tokens(self.rows)
        self.spent = 0  # tokens read

    @cached_property
    def few(self) -> list[int]:
        """A few rows, to try hypotheses on: evenly from the shorter half."""
        count = min(_FEW, max(_FEWEST, len(self.rows) // _FEW_OF_ALL))
        by_length = sorted(self.rows, key=lambda s: self._tokens([s]))
        shorter = by_length[: max(count, len(self.rows) // 2)]
        return sorted(shorter[:: max(1, len(shorter) // count)][:count])

    def logp_T(self, hypothesis: Hypothesis = AS_RECORDED, few: bool = False) -> np.ndarray:
        """log π of the sample's tokens under a hypothesis, nats, float64; NaN = not scored.

        `few`: of eight responses only, to try many hypotheses; `BudgetSpent` if there is nothing
        left for that. A reading of all is the last step of a search, and always made.
        """
        key = (hypothesis.name, few)
        if key not in self._scored:
            self._scored[key] = self._few_of_all(hypothesis) if few else self._read(hypothesis)
        return self._scored[key]

    def _read(self, hypothesis: Hypothesis) -> np.ndarray:
        self.spent += self._tokens(self.rows)
        return self._score(hypothesis, self.rows)

    def _few_of_all(self, hypothesis: Hypothesis) -> np.ndarray:
        """The few responses of a reading of all, if there was one; else a reading of their own."""
        every_T = self._scored.get((hypothesis.name, False))
        if every_T is not None:
            is_few_T = np.isin(self._sample.response_T, self.few)
            return np.where(is_few_T, every_T, np.nan)
        cost = self._tokens(self.few)
        if self.spent + cost > self.budget:
            raise BudgetSpent
        self.spent += cost
        return self._score(hypothesis, self.few)

    @cached_property
    def logit_step(self) -> float:
        """The mean step that bfloat16 has at the size of the sampled tokens' logits, nats: in a few
        responses, weighted by 1 − p, since certain tokens have the largest logits and do not move.
        """
        import torch

        logit_T, p_T = map(torch.cat, zip(*map(self._sampled, self.few), strict=True))
        step_T = 2.0 ** (logit_T.abs().clamp_min(_SMALLEST).log2().floor() - _BITS)
        return float((step_T * (1 - p_T)).sum() / (1 - p_T).sum())

    def _sampled(self, s: int) -> tuple[Any, ...]:
        """The model's raw logits and probabilities of the tokens of one response."""
        import torch

        prompt = self._prompts[_key(self._sample, s)]
        response = self._sample.response_ids_T[self._sample.response_T == s].tolist()
        ids_1T = torch.tensor([[*prompt, *response]], device=self._trainer.model.device)
        with torch.no_grad():
            logits_TV = self._trainer.model(input_ids=ids_1T).logits[0, len(prompt) - 1 : -1]
        sampled_T1 = ids_1T[0, len(prompt) :, None]
        logits_TV = logits_TV.float()
        both = logits_TV, logits_TV.softmax(dim=1)
        return tuple(values_TV.gather(1, sampled_T1)[:, 0] for values_TV in both)

    def _tokens(self, rows: Sequence[int]) -> int:
        """How many tokens a reading of these responses takes, with their prompts."""
        prompts = sum(len(self._prompts[_key(self._sample, s)]) for s in rows)
        return prompts + int(self._sample.length_S[list(rows)].sum())

    @property
    def longest_prompt(self) -> int:
        """In tokens, over all responses of the sample."""
        return max((len(ids) for ids in self._prompts.values()), default=0)

    @property
    def config(self) -> Any:
        """The model's configuration; loads the model."""
        return self._trainer.model.config.get_text_config()

    @cached_property
    def _trainer(self) -> Trainer:
        return self._load()

    def _score(self, hypothesis: Hypothesis, rows: Sequence[int]) -> np.ndarray:
        from mismatch_cli.scoring.trainer import ScoreRequest

        spans = list(self._sample.spans())
        own = rows if self._ranks.spreads else self._ranks.own(rows)
        requests = [
            ScoreRequest(
                hypothesis.prompt(self._prompts[_key(self._sample, s)]),
                self._sample.response_ids_T[spans[s]].tolist(),
            )
            for s in own
        ]
        with hypothesis.changed(self._trainer.model):
            scores = self._trainer.score(requests, token_budget=_TOKEN_BUDGET)
        scored = dict(zip(own, (score.logp_T for score in scores), strict=True))
        logp_T = np.full(len(self._sample.logq_T), np.nan)
        for part in [scored] if self._ranks.spreads else self._ranks.world.gather(scored):
            for s, logp in part.items():
                logp_T[spans[s]] = logp
        return logp_T


def model_at_hand(
    path: str,
    sample: Sample,
    sampling: Mapping[str, Any],
    traces: Sequence[Trace],
    ranks: Ranks = ALL_HERE,
    budget: int | None = None,
) -> ModelAtHand:
    """A model from a folder or the hub, with the dtype and sampler settings of the trace's
    trainer.
    """

    def load() -> Trainer:
        from mismatch_cli.scoring.trainer import Trainer

        support = SamplingSettings(
            **{name: sampling[name] for name in _SUPPORT if name in sampling}
        )
        recorded = traces[0].manifest.get("trainer", {})
        # Use attention without the model's cap or sinks if the trace did. Other kinds may need
        # another machine.
        attention = (
            recorded.get("attn_implementation") if recorded.get("attention_leaves_out") else None
        )
        dtype = recorded.get("dtype", "auto")
        return Trainer.load(
            path,
            dtype=dtype,
            attn_implementation=attention,
            sampling=support,
            sharding=ranks.sharding,
        )

    return ModelAtHand(sample, _prompts_of(sample, traces), load, ranks, budget)


def _prompts_of(sample: Sample, traces: Sequence[Trace]) -> dict[Key, list[int]]:
    """The prompt ids of the sample's responses, by row key."""
    wanted = {_key(sample, s) for s in range(sample.num_responses)}
    found = {}
    for trace in traces:
        for table in trace.tables(("step", "prompt_id", "sample_index", "prompt_ids")):
            keys = zip(
                *(table.column(n).to_pylist() for n in ("step", "prompt_id", "sample_index")),
                strict=True,
            )
            for row, key in enumerate(keys):
                if key in wanted:
                    found[key] = table.column("prompt_ids")[row].as_py()
    return found


def _key(sample: Sample, s: int) -> Key:
    return int(sample.step_S[s]), int(sample.prompt_id_S[s]), int(sample.sample_index_S[s])
