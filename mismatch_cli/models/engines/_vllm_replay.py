"""Recorded tokens in a vLLM of this process: decoded again as if it had drawn them, or read in one
pass as a prompt.

In Model Runner V1, which a CPU uses, we replace the ids that its sampler drew, and everything
before and after is vLLM's own: it gathers log μ of the recorded tokens from the distribution to
draw from, with the caches, batches and kernels of sampling. Model Runner V2 can replay by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import EngineSettings, ForcedResponse
from mismatch_cli.models.engines._checks import check_token_ids

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_RECORDED = "recorded_token_ids"  # in a request's extra arguments, which vLLM passes on unread
# Prompts and the parameters of each → vLLM's answers
Ask = Callable[[list[list[int]], list[Any]], list[Any]]


def start_replaying(kind: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Start vLLM; only its configuration knows whether Model Runner V2 can run a model."""
    try:
        return kind(**arguments)
    except ValueError as error:
        if not (arguments.get("enable_trace_replay") and "trace replay requires" in str(error)):
            raise
        return kind(**arguments | {"enable_trace_replay": False})


def replayed(
    llm: Any,
    responses: Sequence[ForcedResponse],
    settings: EngineSettings,
    ask: Ask,
    *,
    alone: bool,
    cached: bool,
) -> list[Any]:
    """vLLM's answers, as if it had drawn the recorded tokens."""
    _check(llm, responses)
    parameters = [
        _parameters(llm, response.response_ids, settings.sampling, settings.top_logprobs, cached)
        for response in responses
    ]
    prompts = [response.prompt_ids for response in responses]
    with _choosing(llm):
        if not alone:
            return ask(prompts, parameters)
        return [
            output
            for pair in zip(prompts, parameters, strict=True)
            for output in ask(*([part] for part in pair))
        ]


def prefilled(
    llm: Any, responses: Sequence[ForcedResponse], settings: EngineSettings, ask: Ask
) -> list[np.ndarray]:
    """Log μ of the response tokens, read as a prompt.

    The last token is drawn after all others and not fed, since what follows it is not needed: so a
    sequence may fill the whole context.
    """
    _check(llm, responses)
    sampling = settings.sampling
    fed = [response.prompt_ids + response.response_ids[:-1] for response in responses]
    last = [
        _parameters(llm, response.response_ids[-1:], sampling, 0, cached=False)
        for response in responses
    ]
    if _replays_itself(llm):
        return _asked_twice(sampling, responses, fed, last, ask)
    for parameters in last:
        parameters.prompt_logprobs = 0
    with _choosing(llm), _processing(llm, sampling):
        outputs = ask(fed, last)
    return [
        _joined(response, output, output)
        for response, output in zip(responses, outputs, strict=True)
    ]


def stop_ids(llm: Any) -> set[int]:
    """The token ids at which vLLM stops sampling."""
    from vllm import SamplingParams

    processor, plain = llm.llm_engine.input_processor, SamplingParams()
    plain.update_from_generation_config(
        processor.generation_config_fields, processor.renderer.get_eos_token_id()
    )
    ids: set[int] = plain.all_stop_token_ids
    return ids


def _check(llm: Any, responses: Sequence[ForcedResponse]) -> None:
    config = llm.llm_engine.vllm_config
    check_token_ids([r.response_ids for r in responses], config.model_config.get_vocab_size())
    if config.use_v2_model_runner and not _replays_itself(llm):
        raise MismatchError(
            "This vLLM was started without enable_trace_replay, so it cannot decode recorded "
            "tokens. Leave out --engine-arg enable_trace_replay=…"
        )


def _replays_itself(llm: Any) -> bool:
    return bool(llm.llm_engine.vllm_config.model_config.enable_trace_replay)


def _parameters(
    llm: Any, ids: list[int], sampling: SamplingSettings, top_logprobs: int, cached: bool
) -> Any:
    """vLLM's parameters to decode as many tokens as were recorded, past stop tokens.

    Without a seed: nothing depends on what is drawn, and a chunked prompt would rewind its own
    generator.
    """
    from vllm import SamplingParams

    recorded = (
        {"trace_decode_token_ids": ids}
        if _replays_itself(llm)
        else {"extra_args": {_RECORDED: ids}}
    )
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=len(ids),
        ignore_eos=True,
        logprobs=top_logprobs,
        detokenize=False,
        flat_logprobs=True,
        skip_reading_prefix_cache=not cached,
        **recorded,
    )


@contextmanager
def _choosing(llm: Any) -> Iterator[None]:
    """Have the sampler choose the recorded tokens inside the block."""
    if _replays_itself(llm):
        yield
        return
    llm.collective_rpc(_choose)
    try:
        yield
    finally:
        llm.collective_rpc(partial(_restore, "sample"))


@contextmanager
def _processing(llm: Any, sampling: SamplingSettings) -> Iterator[None]:
    """Apply temperature and truncation to prompt log-probs inside the block, which vLLM does not
    do.
    """
    llm.collective_rpc(partial(_process, sampling))
    try:
        yield
    finally:
        llm.collective_rpc(partial(_restore, "compute_logprobs"))


def _choose(worker: Any) -> None:
    runner = worker.model_runner
    draw = runner.sampler.sample

    def chosen(*given: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        drawn_B, logp_BV = draw(*given, **named)
        return _recorded(runner, drawn_B), logp_BV

    runner.sampler.sample = chosen


def _process(sampling: SamplingSettings, worker: Any) -> None:
    def processed(logits_NV: Tensor) -> Tensor:
        return sampling.process(logits_NV).log_softmax(dim=-1)

    # vLLM computes log-probs of a prompt from before the temperature.
    # They would not be those of μ, with which a response was sampled.
    worker.model_runner.sampler.compute_logprobs = processed


def _restore(name: str, worker: Any) -> None:
    vars(worker.model_runner.sampler).pop(name, None)


def _recorded(runner: Any, drawn_B: Tensor) -> Tensor:
    """The next recorded token of each row; vLLM ignores rows whose prompt is not fully read."""
    # Rows move between steps, when others end.
    # So a row's tokens are found by its request; by its place it would get a neighbour's.
    states = [runner.requests[name] for name in runner.input_batch.req_ids]
    ids = [
        state.sampling_params.extra_args[_RECORDED][len(state.output_token_ids)] for state in states
    ]
    return drawn_B.new_tensor(ids)


def _asked_twice(
    sampling: SamplingSettings,
    responses: Sequence[ForcedResponse],
    fed: list[list[int]],
    last: list[Any],
    ask: Ask,
) -> list[np.ndarray]:
    """Ask twice: Model Runner V2 does not replay while it returns prompt log-probs, which ignore
    the temperature.
    """
    from vllm import SamplingParams

    if sampling.truncates or sampling.temperature != 1:
        raise MismatchError(
            "vLLM's Model Runner V2 returns prompt log-probs from before temperature and "
            "truncation. Use --engine hf, or a trace sampled at temperature 1 without truncation."
        )
    parameters = SamplingParams(
        max_tokens=1, prompt_logprobs=0, detokenize=False, flat_logprobs=True
    )
    prompts, ends = ask(fed, [parameters] * len(fed)), ask(fed, last)
    return [_joined(*parts) for parts in zip(responses, prompts, ends, strict=True)]


def _joined(response: ForcedResponse, prompt: Any, end: Any) -> np.ndarray:
    """Log μ of all response tokens but the last, from the prompt, and then of the last one."""
    import numpy as np

    tokens, flat, last = (
        len(response.response_ids) - 1,
        prompt.prompt_logprobs,
        end.outputs[0].logprobs,
    )
    ids = [*flat.token_ids[len(flat.token_ids) - tokens :], *last.token_ids]
    if ids != response.response_ids:
        raise MismatchError(
            "vLLM returned log-probs that do not belong to the prompt's tokens. Use --engine hf."
        )
    return np.asarray(
        [*flat.logprobs[len(flat.logprobs) - tokens :], *last.logprobs], dtype=np.float32
    )
