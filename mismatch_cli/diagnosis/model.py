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
_KEY = ("step", "prompt_id", "sample_index")
Key = tuple[int, int, int]  # of a response


@dataclass(frozen=True)
class Hypothesis:
    """How one side may have read the responses: after which prompt, and with which change to the
    model.

    `prompt` maps the recorded prompt ids to those that were read. `changed` makes a context manager
    from the Hugging Face model, entered while it scores: it sets hooks or settings and restores
    them. `before` says how many responses of the trace, each after its prompt, preceded the one at
    a place of the trace. `responses`: which ones of the sample to try it on, if not any.
    """

    name: str
    prompt: Callable[[list[int]], list[int]] = list  # unchanged
    changed: Callable[[Any], AbstractContextManager[Any]] = nullcontext
    before: Callable[[int], int] | None = None
    responses: tuple[int, ...] = ()


AS_RECORDED = Hypothesis("as recorded")


def rounded_to(dtype: str) -> Hypothesis:
    """The weights as an engine of this dtype gets them; the model computes with them as before."""

    @contextmanager
    def changed(model: Any) -> Iterator[None]:
        from mismatch_cli.models.loading import round_weights

        before = round_weights(model, dtype)
        try:
            yield
        finally:
            for weight, value in before:
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
        self._sample = sample
        self._prompts = prompts
        self._load = load
        self._ranks = ranks
        spread = np.linspace(0, sample.num_responses - 1, _RESPONSES).astype(int)
        # The indices of the responses that the model reads
        self.responses = [s for s in np.unique(spread).tolist() if prompts.get(_key(sample, s))]
        while budget is not None and len(self.responses) > 1 and self.of_all > budget:
            self.responses = self.responses[::2]
        # log π by the name of a hypothesis, and whether few responses were read
        self.scored: dict[tuple[str, bool], np.ndarray] = {}
        self.budget = budget or _TIMES_SAMPLE * self.of_all
        self.spent = 0  # tokens read
        self.is_interrupted = False
        self.on_tokens: Callable[[int], None] = lambda _: None  # called with tokens just read

    @cached_property
    def few(self) -> list[int]:
        """A few responses, to try hypotheses on: evenly from the shorter half."""
        return self._few_of(self.responses)

    def _few_of(self, responses: Sequence[int]) -> list[int]:
        count = min(FEW, max(1, round(len(self.responses) / _FEW_OF_ALL)))
        by_length = sorted(responses, key=lambda s: self._cost([s]))
        shorter = by_length[: max(count, len(responses) // 2)]
        stride = max(1, len(shorter) // count)
        return sorted(shorter[::stride][:count])

    def tried_on(self, hypothesis: Hypothesis) -> list[int]:
        """A few responses that a hypothesis changes; none, if it changes none."""
        if hypothesis.responses:
            return self._few_of(hypothesis.responses)
        if hypothesis.changed is not nullcontext or hypothesis is AS_RECORDED:
            return self.few
        own = [s for s in self.responses if self._context(hypothesis, s) != self.prompt(s)]
        return self.few if set(self.few) <= set(own) else self._few_of(own)

    def logp_T(self, hypothesis: Hypothesis = AS_RECORDED, few: bool = False) -> np.ndarray:
        """log π of the sample's tokens under a hypothesis, nats, float64; NaN = not scored.

        `few`: of a few responses only, to try many hypotheses; they leave enough of the budget to
        read two hypotheses on all. Raises `SkippedReading` if nothing is left, or after Ctrl-C.
        """
        key = (hypothesis.name, few)
        if key not in self.scored:
            self.scored[key] = self._read_few(hypothesis) if few else self._read_all(hypothesis)
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
        return self._cost(self.responses)

    def _read_all(self, hypothesis: Hypothesis) -> np.ndarray:
        return self._read(hypothesis, hypothesis.responses or self.responses, leaving=0)

    def _read_few(self, hypothesis: Hypothesis) -> np.ndarray:
        """The few responses of a reading of all, if there was one; else a reading of their own."""
        few = self.tried_on(hypothesis)
        every_T = self.scored.get((hypothesis.name, False))
        if every_T is not None:
            return np.where(np.isin(self._sample.response_T, few), every_T, np.nan)
        return self._read(hypothesis, few, leaving=_CONFIRMED * self.of_all)

    @cached_property
    def logit_step(self) -> float | None:
        """The mean step that bfloat16 has at the size of the sampled tokens' logits, nats: in a few
        responses, weighted by 1 − p, since certain tokens have the largest logits and do not move.

        None after Ctrl-C.
        """
        import torch

        try:
            with self._interruptible():
                of_responses = [self._logits_and_probabilities(s) for s in self.few]
        except SkippedReading:
            return None
        logit_T, p_T = map(torch.cat, zip(*of_responses, strict=True))
        step_T = 2.0 ** (logit_T.abs().clamp_min(_SMALLEST).log2().floor() - _BITS)
        return float((step_T * (1 - p_T)).sum() / (1 - p_T).sum())

    def _logits_and_probabilities(self, s: int) -> tuple[Any, Any]:
        """The model's raw logits and probabilities of the tokens of one response."""
        import torch

        prompt, response = self.prompt(s), self._response(s)
        ids_1T = torch.tensor([[*prompt, *response]], device=self.loaded.device)
        with torch.no_grad():
            # The logits at a token are of the next one
            logits_TV = self.loaded(input_ids=ids_1T).logits[0, len(prompt) - 1 : -1].float()
        self.spent += ids_1T.numel()
        self._report(ids_1T.numel())
        sampled_T1 = ids_1T[0, len(prompt) :, None]
        logit_T1 = logits_TV.gather(1, sampled_T1)
        p_T1 = logits_TV.softmax(dim=1).gather(1, sampled_T1)
        return logit_T1[:, 0], p_T1[:, 0]

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
    def place_of(self) -> dict[int, int]:
        """The place of each response of the sample in the order of the trace."""
        places = {key: place for place, key in enumerate(self._prompts)}
        place_of = {}
        for s in range(self._sample.num_responses):
            key = _key(self._sample, s)
            if key in places:
                place_of[s] = places[key]
        return place_of

    @cached_property
    def _response_at(self) -> dict[int, int]:
        return {place: s for s, place in self.place_of.items()}

    def _context(self, hypothesis: Hypothesis, s: int) -> list[int]:
        """The ids that a response is read after."""
        ids: list[int] = []
        if hypothesis.before is not None:
            place = self.place_of[s]
            for earlier in range(place - hypothesis.before(place), place):
                neighbour = self._response_at.get(earlier)
                if neighbour is not None:
                    ids += [*self.prompt(neighbour), *self._response(neighbour)]
        return ids + hypothesis.prompt(self.prompt(s))

    def _cost(self, responses: Sequence[int], hypothesis: Hypothesis = AS_RECORDED) -> int:
        """How many tokens a reading of these responses takes, with their prompts."""
        prompts = sum(len(self._context(hypothesis, s)) for s in responses)
        return prompts + int(self._sample.length_S[list(responses)].sum())

    def cost_of_few(self, hypothesis: Hypothesis) -> int:
        """How many tokens trying a hypothesis takes: none, if that was done."""
        if (hypothesis.name, True) in self.scored or (hypothesis.name, False) in self.scored:
            return 0
        return self._cost(self.tried_on(hypothesis), hypothesis)

    def _report(self, tokens: int) -> None:
        # Responses without tokens are reported first
        if tokens:
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

    def _read(self, hypothesis: Hypothesis, responses: Sequence[int], leaving: int) -> np.ndarray:
        """Read some responses, if that leaves so many tokens of the budget."""
        cost = self._cost(responses, hypothesis)
        # The first reading is made whatever it takes
        if self.spent and self.spent + cost + leaving > self.budget:
            raise SkippedReading(self.budget_spent)
        with self._interruptible():
            logp_T = self._score(hypothesis, responses)
        self.spent += cost
        return logp_T

    def _score(self, hypothesis: Hypothesis, responses: Sequence[int]) -> np.ndarray:
        """log π of these responses, each scored by one of the ranks."""
        from mismatch_cli.models.scoring.requests import ScoreRequest

        # Where all ranks share one model, its trainer deals the responses to them
        own = responses if self._ranks.spreads else self._ranks.own(responses)
        requests = [ScoreRequest(self._context(hypothesis, s), self._response(s)) for s in own]
        costs = [len(request.prompt_ids) + len(request.response_ids) for request in requests]
        with hypothesis.changed(self.loaded):
            scores = self._trainer.score(
                requests,
                token_budget=_TOKEN_BUDGET,
                on_scored=lambda members: self._report(sum(costs[i] for i in members)),
            )
        scored = {s: score.logp_T for s, score in zip(own, scores, strict=True)}
        by_rank = [scored] if self._ranks.spreads else self._ranks.world.gather(scored)
        logp_T = np.full(len(self._sample.logq_T), np.nan)
        for of_rank in by_rank:
            for s, own_logp_T in of_rank.items():
                logp_T[self._spans[s]] = own_logp_T
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

        support = {name: sampling[name] for name in _SUPPORT if name in sampling}
        recorded = traces[0].manifest.get("trainer", {})
        # Use attention without the model's cap or sinks if the trace did. Other kinds may need
        # another machine.
        attention = None
        if recorded.get("attention_leaves_out"):
            attention = recorded.get("attn_implementation")
        base = base_model_of_adapter(path)
        return Trainer.load(
            base or path,
            dtype=recorded.get("dtype", "auto"),
            attn_implementation=attention,
            sampling=SamplingSettings(**support),
            adapter=path if base else None,
            sharding=ranks.sharding,
        )

    return ModelAtHand(sample, _prompts_of(sample, traces), load, ranks, budget)


def _prompts_of(sample: Sample, traces: Sequence[Trace]) -> dict[Key, list[int]]:
    """The prompt ids of the sample's responses, by row key, in the order of the trace."""
    wanted = {_key(sample, s) for s in range(sample.num_responses)}
    prompts = {}
    for trace in traces:
        for table in trace.tables((*_KEY, "prompt_ids")):
            keys = zip(*(table.column(name).to_pylist() for name in _KEY), strict=True)
            prompt_ids = table.column("prompt_ids")
            for row, key in enumerate(keys):
                if key in wanted:
                    prompts[key] = prompt_ids[row].as_py()
    return prompts


def _key(sample: Sample, s: int) -> Key:
    return int(sample.step_S[s]), int(sample.prompt_id_S[s]), int(sample.sample_index_S[s])
