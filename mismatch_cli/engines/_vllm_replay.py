"""Recorded tokens in a vLLM of this process: decoded again as if it had drawn them, or read at once as a prompt.

Model Runner V1, which a CPU has, is told what to choose: the ids that its sampler drew are replaced, and everything
before and after that is vLLM's own: log μ is gathered at the recorded tokens from what was to be drawn from, and the
caches, batches and kernels are those of sampling. Model Runner V2 replays by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from mismatch_cli.engines import EngineSettings, Forced
from mismatch_cli.engines._checks import check_known
from mismatch_cli.errors import MismatchError
from mismatch_cli.sampling import SamplingSettings

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_RECORDED = "recorded_token_ids"  # among the arguments of a request that vLLM hands on without reading them
Ask = Callable[[list[list[int]], list[Any]], list[Any]]  # prompts and vLLM's parameters of each → vLLM's answers


def start_replaying(kind: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Start vLLM, whose configuration alone knows whether its Model Runner V2 runs a model."""
    try:
        return kind(**arguments)
    except ValueError as error:
        if not (arguments.get("enable_trace_replay") and "trace replay requires" in str(error)):
            raise
        return kind(**arguments | {"enable_trace_replay": False})


def replayed(
    llm: Any, responses: Sequence[Forced], settings: EngineSettings, ask: Ask, *, alone: bool, cached: bool
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
        return [output for pair in zip(prompts, parameters, strict=True) for output in ask(*([part] for part in pair))]


def prefilled(llm: Any, responses: Sequence[Forced], settings: EngineSettings, ask: Ask) -> list[np.ndarray]:
    """Log μ of the response tokens, read as a prompt.

    The last token is drawn after all others and not fed, since nothing would be read of what follows it: so a sequence
    may fill the whole context.
    """
    _check(llm, responses)
    sampling = settings.sampling
    fed = [response.prompt_ids + response.response_ids[:-1] for response in responses]
    last = [_parameters(llm, response.response_ids[-1:], sampling, 0, cached=False) for response in responses]
    if _replays_itself(llm):
        return _asked_twice(sampling, responses, fed, last, ask)
    for parameters in last:
        parameters.prompt_logprobs = 0
    with _choosing(llm), _processing(llm, sampling):
        outputs = ask(fed, last)
    return [_joined(response, output, output) for response, output in zip(responses, outputs, strict=True)]


def stop_ids(llm: Any) -> set[int]:
    """Tokens that end what vLLM samples."""
    from vllm import SamplingParams

    processor, plain = llm.llm_engine.input_processor, SamplingParams()
    plain.update_from_generation_config(processor.generation_config_fields, processor.renderer.get_eos_token_id())
    ids: set[int] = plain.all_stop_token_ids
    return ids


def _check(llm: Any, responses: Sequence[Forced]) -> None:
    config = llm.llm_engine.vllm_config
    check_known([r.response_ids for r in responses], config.model_config.get_vocab_size())
    if config.use_v2_model_runner and not _replays_itself(llm):
        raise MismatchError(
            "This vLLM was started without enable_trace_replay, so it cannot decode recorded tokens. Leave out "
            "--engine-arg enable_trace_replay=…"
        )


def _replays_itself(llm: Any) -> bool:
    return bool(llm.llm_engine.vllm_config.model_config.enable_trace_replay)


def _parameters(llm: Any, ids: list[int], sampling: SamplingSettings, top_logprobs: int, cached: bool) -> Any:
    """For as many tokens as were recorded, stop tokens among them.

    Without a seed: nothing depends on what is drawn, and a prompt in chunks would rewind a generator of its own.
    """
    from vllm import SamplingParams

    recorded = {"trace_decode_token_ids": ids} if _replays_itself(llm) else {"extra_args": {_RECORDED: ids}}
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
    """While it lasts, the sampler chooses what was recorded."""
    if _replays_itself(llm):
        yield
        return
    llm.collective_rpc(_choose)
    try:
        yield
    finally:
        llm.collective_rpc(partial(_own_again, "sample"))


@contextmanager
def _processing(llm: Any, sampling: SamplingSettings) -> Iterator[None]:
    """While it lasts, log-probs of a prompt are after the temperature and truncation, which vLLM leaves out."""
    llm.collective_rpc(partial(_process, sampling))
    try:
        yield
    finally:
        llm.collective_rpc(partial(_own_again, "compute_logprobs"))


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

    worker.model_runner.sampler.compute_logprobs = processed


def _own_again(name: str, worker: Any) -> None:
    vars(worker.model_runner.sampler).pop(name, None)


def _recorded(runner: Any, drawn_B: Tensor) -> Tensor:
    """The next recorded token of each row; a row whose prompt is not read to its end is not looked at by vLLM."""
    states = [runner.requests[name] for name in runner.input_batch.req_ids]
    ids = [state.sampling_params.extra_args[_RECORDED][len(state.output_token_ids)] for state in states]
    return drawn_B.new_tensor(ids)


def _asked_twice(
    sampling: SamplingSettings, responses: Sequence[Forced], fed: list[list[int]], last: list[Any], ask: Ask
) -> list[np.ndarray]:
    """Model Runner V2 does not replay where it gives log-probs of a prompt, and those know no temperature."""
    from vllm import SamplingParams

    if sampling.truncates or sampling.temperature != 1:
        raise MismatchError(
            "vLLM's Model Runner V2 gives log-probs of a prompt before temperature and truncation. Read the tokens at "
            "once with --engine hf, or compare what was sampled at temperature 1 without truncation."
        )
    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, flat_logprobs=True)
    prompts, ends = ask(fed, [parameters] * len(fed)), ask(fed, last)
    return [_joined(*parts) for parts in zip(responses, prompts, ends, strict=True)]


def _joined(response: Forced, prompt: Any, end: Any) -> np.ndarray:
    """Log μ of all response tokens but the last, of which a prompt was made, and of the last one."""
    import numpy as np

    tokens, flat, last = len(response.response_ids) - 1, prompt.prompt_logprobs, end.outputs[0].logprobs
    ids = [*flat.token_ids[len(flat.token_ids) - tokens :], *last.token_ids]
    if ids != response.response_ids:
        raise MismatchError("vLLM returned log-probs of other tokens than the prompt's. Use --engine hf.")
    return np.asarray([*flat.logprobs[len(flat.logprobs) - tokens :], *last.logprobs], dtype=np.float32)
