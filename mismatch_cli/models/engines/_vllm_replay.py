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


def start_replaying(start: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Start vLLM with these arguments, or without replay where only Model Runner V1 can run the
    model: V1 needs no preparation.
    """
    try:
        return start(**arguments)
    except ValueError as error:
        # Which runner a model gets, only vLLM's configuration knows.
        unfit = "trace replay requires" in str(error)
        if not unfit or not arguments.get("enable_trace_replay"):
            raise
        return start(**arguments | {"enable_trace_replay": False})


def replay_recorded(
    llm: Any,
    responses: Sequence[ForcedResponse],
    settings: EngineSettings,
    ask: Ask,
    *,
    alone: bool,
    cached: bool,
) -> list[Any]:
    """vLLM's answers, as if it had drawn the recorded tokens.

    `alone`: each response in a batch of its own. Not `cached`: without reading the prefix cache.
    """
    _check(llm, responses)
    prompts, parameters = [], []
    for response in responses:
        prompts.append(response.prompt_ids)
        parameters.append(
            _parameters(
                llm, response.response_ids, settings.sampling, settings.top_logprobs, cached
            )
        )
    with _choosing_recorded(llm):
        if not alone:
            return ask(prompts, parameters)
        outputs = []
        for prompt, parameters_of_one in zip(prompts, parameters, strict=True):
            outputs += ask([prompt], [parameters_of_one])
        return outputs


def prefill_recorded(
    llm: Any, responses: Sequence[ForcedResponse], settings: EngineSettings, ask: Ask
) -> list[np.ndarray]:
    """Log μ of the response tokens, float32 [T], read as a prompt.

    The last token is drawn after all others and not fed, since what follows it is not needed: so a
    sequence may fill the whole context.
    """
    _check(llm, responses)
    sampling = settings.sampling
    fed, draw_last = [], []
    for response in responses:
        fed.append(response.prompt_ids + response.response_ids[:-1])
        draw_last.append(_parameters(llm, response.response_ids[-1:], sampling, 0, cached=False))
    if _replays_itself(llm):
        # It does not replay while it returns log-probs of a prompt: the prompts are read twice.
        prompt_outputs = ask(fed, [_read_prompt(sampling)] * len(fed))
        last_outputs = ask(fed, draw_last)
    else:
        for parameters in draw_last:
            parameters.prompt_logprobs = 0
        with _choosing_recorded(llm), _processing(llm, sampling):
            prompt_outputs = last_outputs = ask(fed, draw_last)
    return [
        _join_logp(response, prompt_output, last_output)
        for response, prompt_output, last_output in zip(
            responses, prompt_outputs, last_outputs, strict=True
        )
    ]


def stop_ids(llm: Any) -> set[int]:
    """The token ids at which vLLM stops sampling."""
    from vllm import SamplingParams

    plain = SamplingParams()
    processor = llm.llm_engine.input_processor
    plain.update_from_generation_config(
        processor.generation_config_fields, processor.renderer.get_eos_token_id()
    )
    ids: set[int] = plain.all_stop_token_ids
    return ids


def _check(llm: Any, responses: Sequence[ForcedResponse]) -> None:
    """Refuse tokens that the model does not have, and a vLLM that cannot choose tokens."""
    config = llm.llm_engine.vllm_config
    response_ids_S = [response.response_ids for response in responses]
    check_token_ids(response_ids_S, config.model_config.get_vocab_size())
    if config.use_v2_model_runner and not _replays_itself(llm):
        raise MismatchError(
            "This vLLM was started without enable_trace_replay, so it cannot decode recorded "
            "tokens. Leave out --engine-arg enable_trace_replay=…"
        )


def _replays_itself(llm: Any) -> bool:
    """Whether it runs Model Runner V2, which chooses recorded tokens without our help."""
    return bool(llm.llm_engine.vllm_config.model_config.enable_trace_replay)


def _parameters(
    llm: Any, ids: list[int], sampling: SamplingSettings, top_logprobs: int, cached: bool
) -> Any:
    """vLLM's parameters to decode as many tokens as were recorded, past stop tokens.

    Without a seed: nothing depends on what is drawn, and a chunked prompt would rewind its own
    generator.
    """
    from vllm import SamplingParams

    recorded: dict[str, Any] = {"extra_args": {_RECORDED: ids}}
    if _replays_itself(llm):
        recorded = {"trace_decode_token_ids": ids}
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


def _read_prompt(sampling: SamplingSettings) -> Any:
    """The parameters for Model Runner V2 to read a prompt; a `MismatchError` if its log-probs,
    which are from before temperature and truncation, would not be log μ.
    """
    from vllm import SamplingParams

    if sampling.truncates or sampling.temperature != 1:
        raise MismatchError(
            "vLLM's Model Runner V2 returns prompt log-probs from before temperature and "
            "truncation. Use --engine hf, or a trace sampled at temperature 1 without truncation."
        )
    return SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, flat_logprobs=True)


@contextmanager
def _choosing_recorded(llm: Any) -> Iterator[None]:
    """Have the sampler choose the recorded tokens inside the block."""
    if _replays_itself(llm):
        yield
        return
    llm.collective_rpc(_choose_recorded)
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


def _choose_recorded(worker: Any) -> None:
    runner = worker.model_runner
    draw = runner.sampler.sample

    def choose(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        # It draws all the same, since it computes log μ on the way.
        drawn_B, logp_BV = draw(*args, **kwargs)
        return _next_recorded(runner, drawn_B), logp_BV

    runner.sampler.sample = choose


def _process(sampling: SamplingSettings, worker: Any) -> None:
    def compute_logprobs(logits_NV: Tensor) -> Tensor:
        return sampling.process(logits_NV).log_softmax(dim=-1)

    # vLLM computes log-probs of a prompt from before the temperature.
    # They would not be those of μ, with which a response was sampled.
    worker.model_runner.sampler.compute_logprobs = compute_logprobs


def _restore(name: str, worker: Any) -> None:
    """Uncover the method of vLLM's sampler that an attribute of this name hides."""
    vars(worker.model_runner.sampler).pop(name, None)


def _next_recorded(runner: Any, drawn_B: Tensor) -> Tensor:
    """The next recorded token of each row; vLLM ignores rows whose prompt is not fully read."""
    # Rows move between steps, when others end.
    # So a row's tokens are found by its request; by its place it would get a neighbour's.
    ids = []
    for name in runner.input_batch.req_ids:
        request = runner.requests[name]
        recorded = request.sampling_params.extra_args[_RECORDED]
        ids.append(recorded[len(request.output_token_ids)])
    return drawn_B.new_tensor(ids)


def _join_logp(response: ForcedResponse, prompt_output: Any, last_output: Any) -> np.ndarray:
    """Log μ of all response tokens but the last, from the prompt, and then of the last one."""
    import numpy as np

    prompt, last = prompt_output.prompt_logprobs, last_output.outputs[0].logprobs
    # Not -(tokens − 1): of a response of one token, this would be all of the prompt.
    start = len(prompt.token_ids) - (len(response.response_ids) - 1)
    if [*prompt.token_ids[start:], *last.token_ids] != response.response_ids:
        raise MismatchError(
            "vLLM returned log-probs that do not belong to the prompt's tokens. Use --engine hf."
        )
    return np.asarray([*prompt.logprobs[start:], *last.logprobs], dtype=np.float32)
