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
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.diagnosis.sample import Sample
from mismatch_cli.models.rank_shares import ALL_HERE, Ranks
from mismatch_cli.trace.reader import Trace

if TYPE_CHECKING:
    from mismatch_cli.models.scoring.trainer import Trainer

_RESPONSES = 128  # to score
# To try hypotheses on: so many of their shorter half, one in sixteen of all
FEW, _FEW_OF_ALL = 8, 16
_TIMES_SAMPLE = 8  # the budget of all readings together, of the tokens of one
_CONFIRMED = 2  # readings of all responses that trying hypotheses on a few leaves tokens for
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
    them. `before` says how many responses of the trace, each after its prompt, preceded the one at
    a place of the file. `rows`: which responses to try it on, if not any.
    """

    name: str
    prompt: Callable[[list[int]], list[int]] = list  # unchanged
    changed: Callable[[Any], AbstractContextManager[Any]] = nullcontext
    before: Callable[[int], int] | None = None
    rows: tuple[int, ...] = ()


AS_RECORDED = Hypothesis("as recorded")


def rounded_to(dtype: str) -> Hypothesis:
    """The weights as an engine of this dtype gets them; the model computes with them as before."""

    @contextmanager
    def changed(model: Any) -> Iterator[None]:
        from mismatch_cli.models.loading import round_weights

        kept = round_weights(model, dtype)
        try:
            yield
        finally:
            for weight, value in kept:
                weight.copy_(value)

    return Hypothesis(f"weights in {dtype}", changed=changed)


class SkippedReading(Exception):
    """A reading that was not made; its text says why, as the reason of a check."""


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
        """`prompts`: ids by step, prompt and sample, in the order of the trace; `load` is called
        for the first hypothesis; `budget`: tokens that all readings may take, by default eight
        times those of the responses.

        All ranks must try the same hypotheses in the same order; each scores a part of the
        responses.
        """
        self._sample, self._prompts, self._load, self._ranks = sample, prompts, load, ranks
        spread = np.unique(
            np.linspace(0, sample.num_responses - 1, _RESPONSES).astype(int)
        ).tolist()
        self.rows = [s for s in spread if prompts.get(_key(sample, s))]
        while budget is not None and len(self.rows) > 1 and self._cost(self.rows) > budget:
            self.rows = self.rows[::2]
        self.scored: dict[tuple[str, bool], np.ndarray] = {}
        self.budget = budget or _TIMES_SAMPLE * self._cost(self.rows)
        self.spent = 0  # tokens read
        self.is_interrupted = False
        self.on_tokens: Callable[[int], None] = lambda _: None  # called with tokens just read

    @cached_property
    def few(self) -> list[int]:
        """A few rows, to try hypotheses on: evenly from the shorter half."""
        return self._few_of(self.rows)

    def _few_of(self, rows: Sequence[int]) -> list[int]:
        count = min(FEW, max(1, round(len(self.rows) / _FEW_OF_ALL)))
        by_length = sorted(rows, key=lambda s: self._cost([s]))
        shorter = by_length[: max(count, len(rows) // 2)]
        return sorted(shorter[:: max(1, len(shorter) // count)][:count])

    def tried_on(self, hypothesis: Hypothesis) -> list[int]:
        """A few rows that a hypothesis changes; none, if it changes none."""
        if hypothesis.rows:
            return self._few_of(hypothesis.rows)
        if hypothesis.changed is not nullcontext or hypothesis is AS_RECORDED:
            return self.few
        own = [s for s in self.rows if self._context(hypothesis, s) != self.prompt(s)]
        return self.few if set(self.few) <= set(own) else self._few_of(own)

    def logp_T(self, hypothesis: Hypothesis = AS_RECORDED, few: bool = False) -> np.ndarray:
        """log π of the sample's tokens under a hypothesis, nats, float64; NaN = not scored.

        `few`: of a few responses only, to try many hypotheses; they leave enough of the budget to
        read two hypotheses on all. Raises `SkippedReading` if nothing is left, or after Ctrl-C.
        """
        key = (hypothesis.name, few)
        if key not in self.scored:
            self.scored[key] = self._few_of_all(hypothesis) if few else self._read(hypothesis)
        return self.scored[key]

    def once_T(self) -> np.ndarray:
        """log π as recorded, where that is the only reading; Ctrl-C ends the command."""
        try:
            return self.logp_T()
        except SkippedReading:
            raise KeyboardInterrupt from None

    @property
    def of_all(self) -> int:
        """Tokens of one reading of all responses as recorded."""
        return self._cost(self.rows)

    def _read(self, hypothesis: Hypothesis) -> np.ndarray:
        return self._score(hypothesis, hypothesis.rows or self.rows, leaving=0)

    def _few_of_all(self, hypothesis: Hypothesis) -> np.ndarray:
        """The few responses of a reading of all, if there was one; else a reading of their own."""
        rows = self.tried_on(hypothesis)
        every_T = self.scored.get((hypothesis.name, False))
        if every_T is not None:
            return np.where(np.isin(self._sample.response_T, rows), every_T, np.nan)
        return self._score(hypothesis, rows, leaving=_CONFIRMED * self.of_all)

    @cached_property
    def logit_step(self) -> float | None:
        """The mean step that bfloat16 has at the size of the sampled tokens' logits, nats: in a few
        responses, weighted by 1 − p, since certain tokens have the largest logits and do not move.

        None after Ctrl-C.
        """
        import torch

        try:
            with self._interruptible():
                logit_T, p_T = map(torch.cat, zip(*map(self._sampled, self.few), strict=True))
        except SkippedReading:
            return None
        step_T = 2.0 ** (logit_T.abs().clamp_min(_SMALLEST).log2().floor() - _BITS)
        return float((step_T * (1 - p_T)).sum() / (1 - p_T).sum())

    def _sampled(self, s: int) -> tuple[Any, ...]:
        """The model's raw logits and probabilities of the tokens of one response."""
        import torch

        prompt, response = self.prompt(s), self._response(s)
        ids_1T = torch.tensor([[*prompt, *response]], device=self.loaded.device)
        with torch.no_grad():
            logits_TV = self.loaded(input_ids=ids_1T).logits[0, len(prompt) - 1 : -1]
        self.spent += ids_1T.numel()
        self._read_on(ids_1T.numel())
        sampled_T1 = ids_1T[0, len(prompt) :, None]
        logits_TV = logits_TV.float()
        both = logits_TV, logits_TV.softmax(dim=1)
        return tuple(values_TV.gather(1, sampled_T1)[:, 0] for values_TV in both)

    def prompt(self, s: int) -> list[int]:
        """The recorded prompt of a response."""
        return self._prompts[_key(self._sample, s)]

    def _response(self, s: int) -> list[int]:
        assert self._sample.response_ids_T is not None  # checked by `model_at_hand`
        ids: list[int] = self._sample.response_ids_T[self._spans[s]].tolist()
        return ids

    @cached_property
    def _spans(self) -> list[slice]:
        return list(self._sample.spans())

    @cached_property
    def place_S(self) -> dict[int, int]:
        """The place of each response of the sample in the order of the trace."""
        places = {key: place for place, key in enumerate(self._prompts)}
        keys = ((s, _key(self._sample, s)) for s in range(self._sample.num_responses))
        return {s: places[key] for s, key in keys if key in places}

    @cached_property
    def _at(self) -> dict[int, int]:
        return {place: s for s, place in self.place_S.items()}

    def _context(self, hypothesis: Hypothesis, s: int) -> list[int]:
        """The ids that a response is read after."""
        own = hypothesis.prompt(self.prompt(s))
        if hypothesis.before is None:
            return own
        place = self.place_S[s]
        earlier = [self._at.get(p) for p in range(place - hypothesis.before(place), place)]
        parts = ([*self.prompt(r), *self._response(r)] for r in earlier if r is not None)
        return [*chain.from_iterable(parts), *own]

    def _cost(self, rows: Sequence[int], hypothesis: Hypothesis = AS_RECORDED) -> int:
        """How many tokens a reading of these responses takes, with their prompts."""
        prompts = sum(len(self._context(hypothesis, s)) for s in rows)
        return prompts + int(self._sample.length_S[list(rows)].sum())

    def cost_of_few(self, hypothesis: Hypothesis) -> int:
        """How many tokens trying a hypothesis takes: none, if that was done."""
        if {(hypothesis.name, True), (hypothesis.name, False)} & set(self.scored):
            return 0
        return self._cost(self.tried_on(hypothesis), hypothesis)

    def _read_on(self, tokens: int) -> None:
        if tokens:  # responses without tokens come first
            self.on_tokens(tokens)

    @property
    def longest_prompt(self) -> int:
        """In tokens, over all responses of the sample."""
        return max((len(ids) for ids in self._prompts.values()), default=0)

    @property
    def config(self) -> Any:
        """The model's configuration; loads the model."""
        return self.loaded.config.get_text_config()

    @property
    def loaded(self) -> Any:
        """The Hugging Face model."""
        return self._trainer.model

    @cached_property
    def _trainer(self) -> Trainer:
        return self._load()

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C in the block ends this reading and all later ones, not the diagnosis; of ranks,
        which would wait for each other, it ends the command.
        """
        if self.is_interrupted:
            raise SkippedReading(INTERRUPTED)
        try:
            yield
        except KeyboardInterrupt:
            if self._ranks.world.size > 1:
                raise
            self.is_interrupted = True
            raise SkippedReading(INTERRUPTED) from None

    def _score(self, hypothesis: Hypothesis, rows: Sequence[int], leaving: int) -> np.ndarray:
        """Read some responses, if that leaves so many tokens of the budget."""
        if self.spent + self._cost(rows, hypothesis) + leaving > self.budget and self.spent:
            raise SkippedReading(self.budget_spent)
        with self._interruptible():
            return self._scores(hypothesis, rows)

    def _scores(self, hypothesis: Hypothesis, rows: Sequence[int]) -> np.ndarray:
        from mismatch_cli.models.scoring.requests import ScoreRequest

        own = rows if self._ranks.spreads else self._ranks.own(rows)
        requests = [ScoreRequest(self._context(hypothesis, s), self._response(s)) for s in own]
        costs = [len(request.prompt_ids) + len(request.response_ids) for request in requests]
        with hypothesis.changed(self.loaded):
            scores = self._trainer.score(
                requests,
                token_budget=_TOKEN_BUDGET,
                on_scored=lambda members: self._read_on(sum(costs[i] for i in members)),
            )
        self.spent += self._cost(rows, hypothesis)
        scored = dict(zip(own, (score.logp_T for score in scores), strict=True))
        logp_T = np.full(len(self._sample.logq_T), np.nan)
        for part in [scored] if self._ranks.spreads else self._ranks.world.gather(scored):
            for s, logp in part.items():
                logp_T[self._spans[s]] = logp
        return logp_T

    @property
    def budget_spent(self) -> str:
        """Why not every hypothesis was tried."""
        return (
            f"the budget of {self.budget:,} tokens ended before every reading was tried: "
            f"--config FILE.toml with reading-tokens = {2 * self.budget}"
        )


INTERRUPTED = "interrupted"


def model_at_hand(
    path: str,
    sample: Sample,
    sampling: Mapping[str, Any],
    traces: Sequence[Trace],
    ranks: Ranks = ALL_HERE,
    budget: int | None = None,
) -> ModelAtHand:
    """A model from a folder or the hub, or an adapter on its base model, with the dtype and sampler
    settings of the trace's trainer; a `MismatchError` for traces without token ids.
    """
    for trace in traces:
        trace.require_ids("A model reads")

    def load() -> Trainer:
        from mismatch_cli.models.adapters import base_model_of_adapter
        from mismatch_cli.models.scoring.trainer import Trainer

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
        base = base_model_of_adapter(path)
        return Trainer.load(
            base or path,
            dtype=dtype,
            attn_implementation=attention,
            sampling=support,
            adapter=path if base else None,
            sharding=ranks.sharding,
        )

    return ModelAtHand(sample, _prompts_of(sample, traces), load, ranks, budget)


def _prompts_of(sample: Sample, traces: Sequence[Trace]) -> dict[Key, list[int]]:
    """The prompt ids of the sample's responses, by row key, in the order of the trace."""
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
