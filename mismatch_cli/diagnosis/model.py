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
_FEW = 8  # of them, to try hypotheses on
_TOKEN_BUDGET = 8192
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
    ) -> None:
        """`prompts`: ids by step, prompt and sample; `load` is called for the first hypothesis.

        All ranks must try the same hypotheses in the same order; each scores a part of the
        responses.
        """
        spread = np.unique(
            np.linspace(0, sample.num_responses - 1, _RESPONSES).astype(int)
        ).tolist()
        self.rows = [s for s in spread if prompts.get(_key(sample, s))]
        self.few = self.rows[:: max(1, len(self.rows) // _FEW)][:_FEW]
        self._sample, self._prompts, self._load, self._ranks = sample, prompts, load, ranks
        self._scored: dict[tuple[str, bool], np.ndarray] = {}

    def logp_T(self, hypothesis: Hypothesis = AS_RECORDED, few: bool = False) -> np.ndarray:
        """log π of the sample's tokens under a hypothesis, nats, float64; NaN = not scored.

        `few`: of eight responses only, to try many hypotheses.
        """
        key = (hypothesis.name, few)
        if key not in self._scored:
            self._scored[key] = self._score(hypothesis, self.few if few else self.rows)
        return self._scored[key]

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

    return ModelAtHand(sample, _prompts_of(sample, traces), load, ranks)


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
