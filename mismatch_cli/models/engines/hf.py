"""The Hugging Face engine: `generate` with the trainer's own code, in any dtype; needs no vLLM."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.models.adapters import apply_adapter, read_adapter, state_below
from mismatch_cli.models.attention import attention_facts
from mismatch_cli.models.engines import (
    EngineSettings,
    ForcedResponse,
    OnFinished,
    Request,
    Shapes,
    Sink,
    token_counter,
)
from mismatch_cli.models.engines._checks import check_token_ids
from mismatch_cli.models.engines._hf_replay import ForcingProcessor, read_at_once
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.models.positions import first_context
from mismatch_cli.models.weights_note import weights_facts
from mismatch_cli.rules.batch import Rollout

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mismatch_cli.base.sampling import SamplingSettings
    from mismatch_cli.models.dissection.engine_pass import EnginePass
    from mismatch_cli.models.routers import Routers

REMOTE, TAKES_WEIGHTS, MEMORY_SHARE, RETURNS_ROUTES = False, True, None, True
REPLAYS = PREFILLS = OPEN = True
_ARGUMENTS = {
    "batch_size": 64,
    "attn_implementation": None,
    "device_map": None,
    "max_model_len": None,
}


def check(settings: EngineSettings) -> None:
    """A `UsageError` for an `--engine-arg` that is not one of `_ARGUMENTS`."""
    unknown = sorted(settings.extra.keys() - _ARGUMENTS.keys())
    if unknown:
        raise UsageError(
            f"--engine hf has no argument {', '.join(unknown)}. It takes: "
            f"{', '.join(sorted(_ARGUMENTS))}."
        )


def create(settings: EngineSettings) -> HfEngine:
    """Load the model for generation."""
    check(settings)
    arguments = _ARGUMENTS | settings.extra
    model = load_causal_lm(
        settings.model,
        dtype=settings.dtype,
        attn_implementation=arguments["attn_implementation"],
        device_map=arguments["device_map"],
    )
    if settings.adapter is not None:
        model = apply_adapter(model, read_adapter(settings.adapter), merge=False)
    return HfEngine(
        model,
        settings,
        batch_size=int(arguments["batch_size"]),
        max_model_len=arguments["max_model_len"],
    )


def full_bytes(vocabulary: int, tokens: int) -> int:  # noqa: ARG001
    """Memory for the full distributions of a response, in bytes: one float32 row, since each is
    passed on before the next token.
    """
    return 4 * vocabulary


class HfEngine:
    """A loaded causal LM that samples in batches of a fixed size, in the order of the requests.

    A batch has the seed of its first request: a shard's numbers depend only on the shard.
    """

    def __init__(
        self, model: Any, settings: EngineSettings, batch_size: int, max_model_len: int | None
    ) -> None:
        self.model = model
        self.settings = settings
        self._batch_size = batch_size
        # A model of several kinds of input has these facts in the configuration of its text model.
        text = model.config.get_text_config()
        self._stop_ids = _as_set(model.generation_config.eos_token_id)
        for config in (model.config, text):
            self._stop_ids |= _as_set(getattr(config, "eos_token_id", None))
        # Responses end where positions would begin to depend on the length of a batch.
        context = first_context(model.config) or int(
            getattr(text, "max_position_embeddings", 2**31)
        )
        self._max_model_len = max_model_len or context
        self._routers = _routers(model, settings)

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    def sample(self, requests: Sequence[Request], on_finished: OnFinished) -> list[Rollout]:
        return self.sample_full(requests, (), on_finished)

    def sample_full(
        self, requests: Sequence[Request], sinks: Sequence[Sink], on_finished: OnFinished
    ) -> list[Rollout]:
        """Makes the same batches with or without sinks: every step has the full distribution
        anyway.
        """
        rollouts: list[Rollout] = []
        for start in range(0, len(requests), self._batch_size):
            batch = requests[start : start + self._batch_size]
            rollouts += self._sample_batch(batch, sinks[start : start + len(batch)], on_finished)
            on_finished(len(batch))
        return rollouts

    def pass_over(self, token_ids: list[int]) -> AbstractContextManager[EnginePass]:
        from mismatch_cli.models.engines._hf_modules import pass_over

        return pass_over(self.model, token_ids, self.settings.sampling)

    def replay(
        self,
        responses: Sequence[ForcedResponse],
        on_finished: OnFinished,
        *,
        alone: bool = False,
        cached: bool = True,  # noqa: ARG002
    ) -> list[Rollout]:
        """In the batches of `sample` for requests without their own limits; there is no prefix
        cache to read.
        """
        check_token_ids([response.response_ids for response in responses], self._vocabulary)
        rollouts: list[Rollout] = []
        size = 1 if alone else self._batch_size
        for start in range(0, len(responses), size):
            batch = responses[start : start + size]
            rollouts += self._replay_batch(batch)
            on_finished(len(batch))
        return rollouts

    def prefill(
        self, responses: Sequence[ForcedResponse], on_finished: OnFinished
    ) -> list[np.ndarray]:
        check_token_ids([response.response_ids for response in responses], self._vocabulary)
        logps = []
        for response in responses:
            logps.append(read_at_once(self.model, response, self.settings.sampling))
            on_finished(1)
        return logps

    def load_weights(self, model: Any) -> None:
        from mismatch_cli.models.sharding import fill_weight, whole_state

        weights = whole_state(model)
        # One at a time, since each may have to be gathered from all ranks.
        for name, own in self.model.state_dict().items():
            fill_weight(own, weights[name])

    def weights(
        self,
        plain: Shapes | None = None,  # noqa: ARG002
    ) -> Iterator[tuple[str, torch.Tensor]]:
        from mismatch_cli.models.sharding import saved_by_layer

        return saved_by_layer(self.model, state_below(self.model))

    def describe(self) -> dict[str, Any]:
        import transformers

        return {
            "engine": "hf",
            "version": transformers.__version__,
            "model": self.settings.model,
            "architecture": type(self.model).__name__,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "kv_cache_dtype": str(self.model.dtype).removeprefix("torch."),
            "attention_backend": self.model.config._attn_implementation,
            **attention_facts(self.model),
            **weights_facts(self.model.config),
            "batch_size": self._batch_size,
            "max_model_len": self.max_model_len,
            "device": self.model.device.type,
            "seed": self.settings.seed,
            **_routers_facts(self.model, recorded=self._routers is not None),
        }

    def close(self) -> None:
        import torch

        del self.model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _sample_batch(
        self, batch: Sequence[Request], sinks: Sequence[Sink], on_finished: OnFinished
    ) -> list[Rollout]:
        """Sample requests with the same settings and room together, those with the least room
        first.
        """
        # A row is as long as the longest of the batch, unless it has less room.
        most = max(map(self._wanted, batch))
        kinds = [(min(most, self._room(request)), self._sampling(request)) for request in batch]
        rollouts: dict[int, Rollout] = {}
        for rows in _rows_by_kind(kinds):
            requests = [batch[row] for row in rows]
            sink_of = {at: sinks[row] for at, row in enumerate(rows) if row < len(sinks)}
            rollouts |= zip(rows, self._sample_kind(requests, sink_of, on_finished), strict=True)
        return [rollouts[row] for row in range(len(batch))]

    def _sample_kind(
        self, requests: Sequence[Request], sink_of: dict[int, Sink], on_finished: OnFinished
    ) -> list[Rollout]:
        import torch

        settings = replace(self.settings, sampling=self._sampling(requests[0]))
        recorder = _Recorder(
            settings, self._stop_ids, sink_of, self._routers, token_counter(on_finished)
        )
        torch.manual_seed(requests[0].seed)
        config = self._generation_config(max_new_tokens=max(map(self._wanted, requests)))
        sampled = self._generate(requests, recorder, recorder, config)
        rollouts = []
        for row, request in enumerate(requests):
            ids = self._until_stop(sampled[row][: self._wanted(request)])
            rollouts.append(recorder.rollout(row, request.prompt_ids, ids))
        return rollouts

    def _replay_batch(self, batch: Sequence[ForcedResponse]) -> list[Rollout]:
        """Replay responses with the same room together, as `_sample_batch` sampled them."""
        kinds = []
        for response in batch:
            room = self._room(Request(response.prompt_ids, seed=0))
            kinds.append((max(room, len(response.response_ids)), None))
        rollouts: dict[int, Rollout] = {}
        for rows in _rows_by_kind(kinds):
            responses = [batch[row] for row in rows]
            rollouts |= zip(rows, self._replay_kind(responses), strict=True)
        return [rollouts[row] for row in range(len(batch))]

    def _replay_kind(self, responses: Sequence[ForcedResponse]) -> list[Rollout]:
        recorder = _Recorder(self.settings, self._stop_ids, {}, self._routers)
        longest = max(len(response.response_ids) for response in responses)
        config = self._generation_config(max_new_tokens=longest, forced=True)
        forcing = ForcingProcessor(recorder, responses, filler=config.pad_token_id)
        self._generate(responses, recorder, forcing, config)
        return [
            recorder.rollout(row, response.prompt_ids, response.response_ids)
            for row, response in enumerate(responses)
        ]

    def _generate(
        self,
        batch: Sequence[Request] | Sequence[ForcedResponse],
        recorder: _Recorder,
        processor: Any,
        config: Any,
    ) -> list[list[int]]:
        """The tokens that follow each prompt; `processor` decides what can be drawn, and calls
        the recorder.
        """
        import torch

        prompts = [item.prompt_ids for item in batch]
        longest = max(map(len, prompts))
        input_ids, attention_mask = _left_pad(prompts, longest, self.model.device)
        with torch.inference_mode():
            sequences = self.model.generate(
                input_ids,
                attention_mask=attention_mask,
                generation_config=config,
                logits_processor=[processor],
            )
            recorder.record(sequences[:, -1])
        new: list[list[int]] = sequences[:, longest:].tolist()
        return new

    def _until_stop(self, ids: list[int]) -> list[int]:
        """The ids up to and including the first stop token."""
        for length, token in enumerate(ids, start=1):
            if token in self._stop_ids:
                return ids[:length]
        return ids

    def _generation_config(self, max_new_tokens: int, forced: bool = False) -> Any:
        """Plain sampling; the model's own defaults (penalties, min-p, …) must not touch the
        distribution.

        With forced tokens nothing is drawn, and no token ends a row. `generate` fills unset values
        from `model.generation_config`, so this replaces that too.
        """
        from transformers import GenerationConfig

        config = GenerationConfig(
            do_sample=not forced,
            temperature=1.0,
            top_k=None if forced else 0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
            eos_token_id=None if forced else sorted(self._stop_ids) or None,
            # Fills rows that have ended; cut off later
            pad_token_id=min(self._stop_ids, default=0),
        )
        self.model.generation_config = config
        return config

    @property
    def _vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().num_embeddings)

    def _sampling(self, request: Request) -> SamplingSettings:
        return request.sampling or self.settings.sampling

    def _room(self, request: Request) -> int:
        """The most tokens that its row may have, by its sampling's limit and the context."""
        return min(self._sampling(request).max_tokens, self.max_model_len - len(request.prompt_ids))

    def _wanted(self, request: Request) -> int:
        """The number of tokens in its row that are this request's: it may end before the others
        of its batch.
        """
        return min(request.longest(self.settings.sampling), self._room(request))


class _Recorder:
    """The last logits processor: applies the sampler's settings and records, step by step, log μ of
    the sampled tokens.

    `generate` would keep the scores of every step (batch × steps × vocabulary); this keeps one step
    at a time.
    """

    def __init__(
        self,
        settings: EngineSettings,
        stop_ids: set[int],
        sink_of: dict[int, Sink],
        routers: Routers | None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self._sampling = settings.sampling
        self._top_k = settings.top_logprobs
        self._stop_ids = stop_ids
        self._routers = routers
        self._on_tokens = on_tokens
        self._running_B: torch.Tensor | None = None  # rows that have not drawn a stop token
        self._sink_of = dict(sink_of)  # row → the sink of its distributions, until it ends
        self._pending_BV: torch.Tensor | None = None  # log μ from which a token is being drawn
        # The lists have a tensor for each step, with a row for each response.
        self._logp: list[torch.Tensor] = []
        self._rank: list[torch.Tensor] = []
        self._topk_logp: list[torch.Tensor] = []
        self._topk_ids: list[torch.Tensor] = []
        self._routes: list[torch.Tensor] = []  # [B, tokens read, M, K], all of the prompt at first

    def __call__(self, input_ids: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        import torch

        if self._pending_BV is not None:
            self.record(input_ids[:, -1])
        if self._routers is not None:
            chosen_NMK, _ = self._routers.choices()
            chosen_BLMK = chosen_NMK.unflatten(0, (len(input_ids), -1))
            self._routes.append(chosen_BLMK.to("cpu", torch.int16))
        processed_BV = self._sampling.process(scores_BV)
        self._pending_BV = processed_BV.log_softmax(dim=-1)
        # One NaN logit makes the whole row NaN, so that the first column shows it.
        if self._pending_BV[:, 0].isnan().any():
            raise MismatchError(
                "The engine's logits are NaN: its weights are broken, or its precision "
                "overflows. Try another --rollout-dtype."
            )
        return processed_BV

    def record(self, sampled_B: torch.Tensor) -> None:
        """Record log μ of these tokens; `generate` does not call the processor after its last
        step.
        """
        logp_BV = self._pending_BV
        assert logp_BV is not None
        logp_B1 = logp_BV.gather(1, sampled_B[:, None])
        self._logp.append(logp_B1[:, 0].cpu())
        self._rank.append(((logp_BV > logp_B1).sum(1) + 1).int().cpu())
        if self._top_k:
            topk_logp_BK, topk_ids_BK = logp_BV.topk(self._top_k, dim=-1)
            self._topk_logp.append(topk_logp_BK.cpu())
            self._topk_ids.append(topk_ids_BK.int().cpu())
        # Counting waits for the device, so nothing is counted that nobody wants to know.
        if self._on_tokens is not None:
            self._on_tokens(self._count_running(sampled_B))
        for row, sink in list(self._sink_of.items()):
            sink(logp_BV[row].cpu().numpy())
            if int(sampled_B[row]) in self._stop_ids:
                del self._sink_of[row]

    def _count_running(self, sampled_B: torch.Tensor) -> int:
        """How many rows had not drawn a stop token before these tokens."""
        import torch

        running_B = self._running_B
        if running_B is None:
            running_B = torch.ones_like(sampled_B, dtype=torch.bool)
        stops = torch.tensor(sorted(self._stop_ids), device=sampled_B.device)
        self._running_B = running_B & ~torch.isin(sampled_B, stops)
        return int(running_B.sum())

    def rollout(self, row: int, prompt_ids: list[int], ids: list[int]) -> Rollout:
        """The response of one row, with these tokens."""
        import numpy as np

        length = len(ids)
        logp_T = [logp_B[row].item() for logp_B in self._logp[:length]]
        rank_T = [rank_B[row].item() for rank_B in self._rank[:length]]
        return Rollout(
            prompt_ids=prompt_ids,
            response_ids=ids,
            logp_rollout_T=np.array(logp_T, dtype=np.float32),
            rank_rollout_T=np.array(rank_T, dtype=np.int32),
            topk_ids_TK=_stack_row(row, self._topk_ids[:length]),
            topk_logp_rollout_TK=_stack_row(row, self._topk_logp[:length]),
            finish_reason="stop" if ids[-1] in self._stop_ids else "length",
            routes_FMK=self._routes_of(row, len(prompt_ids), length),
        )

    def _routes_of(self, row: int, prompt: int, length: int) -> np.ndarray | None:
        """Routes of the prompt, at the end of its padded row, and of every response token that
        was fed.
        """
        import torch

        if not self._routes:
            return None
        first, *later = (routes_BLMK[row] for routes_BLMK in self._routes[:length])
        return torch.cat([first[-prompt:], *later]).numpy().view("uint16")


def _rows_by_kind(kinds: Sequence[tuple[int, Any]]) -> list[list[int]]:
    """The rows of each kind (room, sampling), those with the least room first: what is generated
    together has the same settings, and must not run past the end of the context.
    """
    rows_of: dict[tuple[int, Any], list[int]] = {}
    for row, kind in enumerate(kinds):
        rows_of.setdefault(kind, []).append(row)
    return [rows_of[kind] for kind in sorted(rows_of, key=itemgetter(0))]


def _routers_facts(model: Any, *, recorded: bool) -> dict[str, Any]:
    """For the manifest: the experts of a mixture, and the layers whose choices are recorded."""
    from mismatch_cli.models.routers import Routers

    routers = Routers.of(model)
    if routers is None:
        return {}
    facts = routers.describe()
    if not recorded:
        del facts["router_layers"]
    return facts


def _routers(model: Any, settings: EngineSettings) -> Routers | None:
    """The routers whose choices to record, if any; a `MismatchError` if they were requested and
    cannot be read.
    """
    from mismatch_cli.models.routers import Routers

    if settings.routes is False:
        return None
    routers = Routers.proven(model)
    if routers is None and settings.routes:
        raise MismatchError(
            f"{settings.model} has no routers whose choices can be read. Leave out routes and "
            "--replay-routes."
        )
    return routers


def _stack_row(row: int, steps: Sequence[torch.Tensor]) -> np.ndarray | None:
    """One row of the tensors of all steps; None if they were not recorded."""
    import torch

    if not steps:
        return None
    return torch.stack([step_BK[row] for step_BK in steps]).numpy()


def _left_pad(
    prompts: list[list[int]], length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    ids_BL = torch.zeros(len(prompts), length, dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL)
    for row, prompt in enumerate(prompts):
        ids_BL[row, length - len(prompt) :] = torch.tensor(prompt)
        mask_BL[row, length - len(prompt) :] = 1
    return ids_BL.to(device), mask_BL.to(device)


def _as_set(token_ids: int | list[int] | None) -> set[int]:
    if token_ids is None:
        return set()
    if isinstance(token_ids, int):
        return {token_ids}
    return set(token_ids)
