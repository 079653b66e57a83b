"""The vLLM engine, in this process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from mismatch_cli.base import custom_code
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.extras import require
from mismatch_cli.models.adapters import Adapter, read_adapter
from mismatch_cli.models.engines import (
    EngineSettings,
    ForcedResponse,
    OnFinished,
    Request,
    Shapes,
    Sink,
)
from mismatch_cli.models.engines._vllm_answers import sampling_params, to_rollout
from mismatch_cli.models.engines._vllm_process import (
    ModelClasses,
    TemporaryFolder,
    counted_steps,
    engine_log,
    one_sentence,
    preserved_gc,
    preserved_process_group,
    progress_bar,
)
from mismatch_cli.models.engines._vllm_replay import (
    prefill_recorded,
    replay_recorded,
    start_replaying,
    stop_ids,
)
from mismatch_cli.models.engines._vllm_weights import replace_weights
from mismatch_cli.models.loading import check_model_folder
from mismatch_cli.models.saved_tensors import SavedTensors
from mismatch_cli.models.torch_settings import TorchSettings, prepare_imports
from mismatch_cli.models.weights_note import weights_facts
from mismatch_cli.rules.batch import Rollout

if TYPE_CHECKING:
    import numpy as np

    from mismatch_cli.models.dissection.engine_pass import EnginePass

REMOTE, TAKES_WEIGHTS, MEMORY_SHARE, RETURNS_ROUTES = False, True, "gpu_memory_utilization", True
REPLAYS = PREFILLS = OPEN = True
Wanted = TypeVar("Wanted", Request, ForcedResponse)
_MEMORY_TAGS = ("weights", "kv_cache")  # what sleeps in vLLM, in wake-up order
_CPU_KV_CACHE_BYTES = 1 << 30  # vLLM's own default takes 92 % of the memory
_MAX_CPU_SEQUENCES = 256
# An id, a log-prob and a rank, as Python objects in lists: measured 123 to 130
_BYTES_PER_LOGPROB = 132
# In messages of vLLM, which says in many ways that it lacks something for a model
_LACKING = ("not supported", "not implemented", "does not support", "unsupported")


def create(settings: EngineSettings) -> VllmEngine:
    """Load the model into vLLM with processed log-probs (μ as sampled) and nothing on the
    terminal.
    """
    require("vllm", "--engine vllm")
    check_model_folder(settings.model)
    _set_environment()
    prepare_imports()
    adapter = None if settings.adapter is None else read_adapter(settings.adapter)
    before = TorchSettings.current()
    classes = ModelClasses.current(settings.model)
    temporary = TemporaryFolder.shared()
    with engine_log(settings.log_file):
        try:
            llm = load_llm(settings, lora_arguments(adapter))
            lora = load_adapter(llm, adapter)
            custom_code.note(settings.model, llm.llm_engine.vllm_config.model_config.hf_config)
            # vLLM's Transformers backend has decorated transformers' decoder class in this process.
            # So decorated, the trainer could not make its model: every way into vLLM must do this.
            classes.restore(llm)
            before.restore_attention()
        except Exception as error:
            classes.restore()
            before.restore()
            temporary.close()
            if isinstance(error, MismatchError):
                raise
            raise MismatchError(
                custom_code.refusal(settings.model, error)
                or f"vLLM could not load {settings.model}: {one_sentence(error)} {_instead(error)}"
                f"Full log: {settings.log_file}"
            ) from error
    return VllmEngine(llm, settings, before, temporary, lora)


def full_bytes(vocabulary: int, tokens: int) -> int:
    """Memory for the full distributions of a response, in bytes: vLLM keeps them as Python objects
    until it ends.
    """
    return _BYTES_PER_LOGPROB * (vocabulary + 1) * tokens


def _set_environment() -> None:
    # A killed run leaves no orphan worker
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # `engine_log` sends its log to a file instead
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    # Otherwise the trainer's threads would stay pinned
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def load_llm(settings: EngineSettings, lora: dict[str, Any]) -> Any:
    """Start vLLM; arguments of the user replace ours. All objects are frozen, until `close`."""
    import torch
    from vllm import LLM, EngineArgs

    arguments = _arguments(settings) | lora | settings.extra
    unchunked = not arguments.get("enable_chunked_prefill", True)
    # A hybrid model caches recurrent states, for which it needs chunked prompts.
    if unchunked and EngineArgs(**arguments).create_model_config().is_hybrid:
        arguments.setdefault("enable_prefix_caching", False)
    if arguments.get("enforce_eager"):
        # Otherwise log-probs would compile one small function with inductor: seconds for nothing.
        torch._dynamo.config.disable = True
    # vLLM collects garbage three times while it loads, and once when it closes.
    # Not frozen, all imports would be walked each time: a million objects.
    gc.freeze()
    with preserved_gc():
        return start_replaying(LLM, arguments)


def _arguments(settings: EngineSettings) -> dict[str, Any]:
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "seed": settings.seed,
        # vLLM's default is the log-probs before temperature and truncation.
        # They are not those of μ, the distribution that was sampled.
        "logprobs_mode": "processed_logprobs",
        **custom_code.loading(),
        "max_logprobs": -1 if settings.full else max(20, settings.top_logprobs),
    }
    if on_cpu:
        arguments |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES,
            "max_num_seqs": _MAX_CPU_SEQUENCES,
            # A prompt split over two steps makes vLLM rewind the request's generator, which a CPU
            # generator cannot do.
            "enable_chunked_prefill": False,
        }
    if settings.world.size > 1:
        # The ranks exist, and have made a process group, which vLLM joins.
        arguments["distributed_executor_backend"] = "external_launcher"
        arguments["tensor_parallel_size"] = settings.tensor_parallel
    if settings.sleeps:
        arguments["enable_sleep_mode"] = True
    if settings.routes:
        if on_cpu:
            raise MismatchError(
                "vLLM on a CPU does not report which experts it chose: that needs a GPU (its "
                "Model Runner V2). Use --engine hf, or leave out routes and --replay-routes."
            )
        arguments |= {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    if settings.replays and not on_cpu:
        arguments["enable_trace_replay"] = True  # for Model Runner V2; V1 needs no preparation
    return arguments


class VllmEngine:
    """A loaded vLLM; `sample` starts with an empty prefix cache: a shard's numbers depend only
    on the shard.
    """

    def __init__(
        self,
        llm: Any,
        settings: EngineSettings,
        before: TorchSettings,
        temporary: TemporaryFolder,
        lora: Any = None,
    ) -> None:
        self.llm = llm
        self._lora = lora  # vLLM's request object of the adapter, for every response
        self.settings = settings
        self._before = before  # torch's settings, to restore when it closes
        self._temporary = temporary
        self._asleep: set[str] = set()
        self._router_layers: list[int] = []
        if settings.routes:
            # All workers have the same layers.
            self._router_layers = llm.apply_model(router_layers)[0]

    def sample(self, requests: Sequence[Request], on_finished: OnFinished) -> list[Rollout]:
        with self._awake():
            together, own = self._gather_requests(requests)
            outputs = self._generate(together, self.settings.top_logprobs, on_finished)[own]
        return [
            self._rollout(request, output)
            for request, output in zip(requests, outputs, strict=True)
        ]

    def replay(
        self,
        responses: Sequence[ForcedResponse],
        on_finished: OnFinished,
        *,
        alone: bool = False,
        cached: bool = True,
    ) -> list[Rollout]:
        """Empties the prefix cache once, as `sample` does: alone, a response may read the cached
        prompt of another.
        """
        with self._awake():
            together, own = self._gather_requests(responses)
            ask = partial(self._ask, on_finished=on_finished)
            outputs = replay_recorded(
                self.llm, together, self.settings, ask, alone=alone, cached=cached
            )[own]
        ends = stop_ids(self.llm)
        rollouts = []
        for response, output in zip(responses, outputs, strict=True):
            rollout = self._rollout(response, output)
            # A replay runs past stop tokens, so vLLM says that each response was cut.
            if rollout.response_ids[-1] in ends:
                rollout = replace(rollout, finish_reason="stop")
            rollouts.append(rollout)
        return rollouts

    def prefill(
        self, responses: Sequence[ForcedResponse], on_finished: OnFinished
    ) -> list[np.ndarray]:
        with self._awake():
            together, own = self._gather_requests(responses)
            ask = partial(self._ask, on_finished=on_finished)
            return prefill_recorded(self.llm, together, self.settings, ask)[own]

    def _rollout(self, request: Wanted, output: Any, sink: Sink | None = None) -> Rollout:
        """The answer to a request, with vLLM's experts for each token that it read, in the layers
        with a router, if they are wanted.
        """
        completion = output.outputs[0]
        rollout = to_rollout(request.prompt_ids, completion, self.settings.top_logprobs, sink)
        if not self._router_layers:
            return rollout
        routes_FMK = completion.routed_experts[:, self._router_layers].astype("uint16")
        return replace(rollout, routes_FMK=routes_FMK)

    def _gather_requests(self, requests: Sequence[Wanted]) -> tuple[Sequence[Wanted], slice]:
        """The requests of all ranks that share this engine, and the slice that is this rank's.

        vLLM works only if all of them send it the same requests.
        """
        world, size = self.settings.world, self.settings.tensor_parallel
        if size == 1:
            return requests, slice(None)
        first = world.rank // size * size
        requests_of_ranks = world.gather(list(requests))[first : first + size]
        start = sum(map(len, requests_of_ranks[: world.rank - first]))
        together = list(chain.from_iterable(requests_of_ranks))
        return together, slice(start, start + len(requests))

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Inside the block the engine is awake, with an empty prefix cache; afterwards the GPU is
        free for the trainer, if it sleeps, and the weights are in main memory.
        """
        self._wake(*_MEMORY_TAGS)
        self.llm.reset_prefix_cache()
        yield
        if self.settings.sleeps:
            self.llm.sleep(level=1)
            self._asleep = set(_MEMORY_TAGS)

    def _wake(self, *tags: str) -> None:
        for tag in tags:
            if tag in self._asleep:
                self.llm.wake_up(tags=[tag])
                self._asleep.discard(tag)

    def sample_full(
        self, requests: Sequence[Request], sinks: Sequence[Sink], on_finished: OnFinished
    ) -> list[Rollout]:
        """The first responses each in a separate batch; the others in the batch that `sample`
        would have made.
        """
        self._wake(*_MEMORY_TAGS)
        self.llm.reset_prefix_cache()
        alone = []
        for request, sink in zip(requests, sinks, strict=False):
            (output,) = self._generate([request], -1, on_finished)
            alone.append(self._rollout(request, output, sink))
            del output  # frees its full distributions before the next response begins
        # The batch contains the first ones again, so that the others are sampled as always.
        batch = self.sample(requests, skip_first(len(alone), on_finished))
        return alone + batch[len(alone) :]

    def _generate(
        self, requests: Sequence[Request], logprobs: int, on_finished: OnFinished
    ) -> list[Any]:
        prompts, parameters = [], []
        for request in requests:
            prompts.append(request.prompt_ids)
            sampling = request.sampling or self.settings.sampling
            parameters.append(sampling_params(sampling, logprobs, request))
        return self._ask(prompts, parameters, on_finished)

    def _ask(
        self, prompts: list[list[int]], parameters: list[Any], on_finished: OnFinished
    ) -> list[Any]:
        """vLLM's answers, in the order of the prompts; a failure leaves nothing queued."""
        # The ranks of this engine may have none left while those of another engine have some.
        if not prompts:
            return []
        try:
            with counted_steps(self.llm, on_finished):
                outputs: list[Any] = self.llm.generate(
                    [{"prompt_token_ids": ids} for ids in prompts],
                    parameters,
                    use_tqdm=progress_bar(on_finished),
                    lora_request=self._lora,
                )
        except BaseException as error:
            # A request that failed within a step stays queued.
            # The next `generate` would run it first, or wait for it forever.
            engine = self.llm.llm_engine
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            if not isinstance(error, Exception) or not _is_unsupported(error):
                raise
            model = engine.vllm_config.model_config
            raise MismatchError(
                f"vLLM cannot compute {model.architecture} in "
                f"{str(model.dtype).removeprefix('torch.')} here: {one_sentence(error)} Choose "
                f"another --rollout-dtype. {_instead(error)}"
            ) from error
        return outputs

    def pass_over(self, token_ids: list[int]) -> AbstractContextManager[EnginePass]:
        # Imports torch, which checking settings must not
        from mismatch_cli.models.engines._vllm_modules import pass_over

        def read(ids: list[int]) -> None:
            self._generate([Request(ids, seed=0, max_tokens=1)], 0, lambda _: None)

        self._wake(*_MEMORY_TAGS)
        return pass_over(self.llm, read, token_ids, self.settings.sampling)

    def load_weights(self, model: Any) -> None:
        # The cache sleeps until the next response: both models are in memory now
        self._wake("weights")
        with engine_log(self.settings.log_file):
            replace_weights(self.llm, model)
        if not self.llm.reset_prefix_cache():
            raise MismatchError(
                "vLLM did not drop its prefix cache, which has keys of the old weights. Switch "
                "it off: enable_prefix_caching=false."
            )

    def weights(self, plain: Shapes | None = None) -> Iterator[tuple[str, Any]]:
        from mismatch_cli.models.engines._vllm_tensors import live_tensors

        self._wake("weights")
        quantised = self.llm.llm_engine.vllm_config.model_config.quantization is not None
        shapes = plain if quantised and plain else SavedTensors(self.settings.model).shapes
        with engine_log(self.settings.log_file):
            return live_tensors(self.llm, shapes)

    @property
    def max_model_len(self) -> int:
        return int(self.llm.llm_engine.vllm_config.model_config.max_model_len)

    def describe(self) -> dict[str, Any]:
        facts = describe_config(self.llm.llm_engine.vllm_config)
        # Offline, vLLM replaces a hub name by a folder of the hub's cache.
        facts["model"] = self.settings.model
        if self._router_layers:
            facts["router_layers"] = self._router_layers
        return facts

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        core = self.llm.llm_engine.engine_core
        del self.llm
        with (
            engine_log(self.settings.log_file),
            preserved_gc(),
            preserved_process_group(self.settings.world),
        ):
            try:
                core.shutdown()  # includes this clean-up; a second one would take half a second
            except Exception:  # a failure here cannot harm what has been recorded
                cleanup_dist_env_and_memory()
        gc.unfreeze()  # undoes `load_llm`
        self._before.restore()
        self._temporary.close()


def _is_unsupported(error: Exception) -> bool:
    """Whether vLLM lacks something for a model, to judge by its error."""
    if isinstance(error, AssertionError | NotImplementedError):
        return True
    message = str(error).lower()
    return any(phrase in message for phrase in _LACKING)


def _instead(error: Exception) -> str:
    """A sentence on what to use instead of vLLM, if that would help."""
    if not _is_unsupported(error):
        return ""
    return "--engine hf samples with transformers' own code. "


def describe_config(config: Any) -> dict[str, Any]:
    """The settings that can move log μ, as vLLM resolved them."""
    import vllm

    model = config.model_config
    cache_dtype = config.cache_config.cache_dtype
    dtype = str(model.dtype).removeprefix("torch.")
    facts = {
        "engine": "vllm",
        "version": vllm.__version__,
        "model": model.model,
        "architecture": model.architecture,
        "dtype": dtype,
        "quantization": model.quantization,
        "kv_cache_dtype": dtype if cache_dtype == "auto" else cache_dtype,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_model_len": model.max_model_len,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "enforce_eager": model.enforce_eager,
        "compilation_mode": config.compilation_config.mode.name,
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "attention_backend": getattr(config.attention_config.backend, "name", None),
        "cascade_attention": not model.disable_cascade_attn,
        "logprobs_mode": model.logprobs_mode,
        "device": config.device_config.device_type,
        "seed": model.seed,
        **weights_facts(model.hf_config),
    }
    experts = model.get_num_experts()
    if experts:
        facts["num_experts"] = experts
    return facts


def lora_arguments(adapter: Adapter | None) -> dict[str, Any]:
    """Arguments for `LLM(…)`: room for one adapter, of the smallest rank that has kernels."""
    if adapter is None:
        return {}
    from vllm.config.lora import MaxLoRARanks

    enough = [rank for rank in get_args(MaxLoRARanks) if rank >= adapter.rank]
    # A rank above all of these is left for vLLM to refuse.
    rank = min(enough, default=adapter.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


def load_adapter(llm: Any, adapter: Adapter | None) -> Any:
    """The LoRA request to send with each prompt; None without an adapter."""
    if adapter is None:
        return None
    from vllm.lora.request import LoRARequest

    request = LoRARequest(Path(adapter.name).name, 1, str(adapter.folder))
    if not llm.llm_engine.add_lora(request):
        raise ValueError(f"it did not load the adapter {adapter.name}.")
    return request


def router_layers(model: Any) -> list[int]:
    """The layers of a vLLM model that send tokens to experts."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    return sorted(module.layer_id for module in model.modules() if isinstance(module, MoERunner))


def skip_first(count: int, on_finished: OnFinished) -> OnFinished:
    """An `on_finished` without the first `count` that finish: they have been counted already."""

    def count_others(finished: int) -> None:
        nonlocal count
        skipped = min(count, finished)
        count -= skipped
        if finished > skipped:
            on_finished(finished - skipped)

    return count_others
