"""The vLLM engine, in this process."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
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
    group_kept,
    kept_apart,
    one_sentence,
    progress_bar,
)
from mismatch_cli.models.engines._vllm_replay import prefilled, replayed, start_replaying, stop_ids
from mismatch_cli.models.engines._vllm_weights import take_over
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
Asked = TypeVar("Asked", Request, ForcedResponse)
_PARTS = ("weights", "kv_cache")  # of vLLM's memory, in wake-up order
_CPU_KV_CACHE_BYTES = 1 << 30  # vLLM's own default takes 92 % of the memory
_MAX_CPU_SEQUENCES = 256
# An id, a log-prob and a rank, as Python objects in lists: measured 123 to 130
_BYTES_PER_LOGPROB = 132


def create(settings: EngineSettings) -> VllmEngine:
    """Load the model into vLLM with processed log-probs (μ as sampled) and nothing on the
    terminal.
    """
    require("vllm", "--engine vllm")
    check_model_folder(settings.model)
    _set_environment()
    prepare_imports()
    adapter = None if settings.adapter is None else read_adapter(settings.adapter)
    before, classes, temporary = (
        TorchSettings.current(),
        ModelClasses.current(settings.model),
        TemporaryFolder.shared(),
    )
    with engine_log(settings.log_file):
        try:
            llm = load_llm(settings, lora_arguments(adapter))
            lora = load_adapter(llm, adapter)
            custom_code.note(settings.model, llm.llm_engine.vllm_config.model_config.hf_config)
            # vLLM's Transformers backend has decorated transformers' decoder class in this process.
            # So decorated, the trainer could not make its model: every way into vLLM must do this.
            classes.give_back(llm)
            before.restore_attention()
        except Exception as error:
            classes.give_back()
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
    """Memory for the full distributions of a response: vLLM keeps them as Python objects until
    it ends.
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
    import torch
    from vllm import LLM, EngineArgs
    from vllm.platforms import current_platform

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
    if current_platform.is_cpu():
        arguments |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES,
            "max_num_seqs": _MAX_CPU_SEQUENCES,
            # A prompt split over two steps makes vLLM rewind the request's generator, which a CPU
            # generator cannot do.
            "enable_chunked_prefill": False,
        }
    if settings.world.size > 1:  # in the existing process group
        backend = {"distributed_executor_backend": "external_launcher"}
        arguments |= backend | {"tensor_parallel_size": settings.tensor_parallel}
    if settings.sleeps:
        arguments["enable_sleep_mode"] = True
    if settings.routes:
        if current_platform.is_cpu():
            raise MismatchError(
                "vLLM on a CPU does not report which experts it chose: that needs a GPU (its "
                "Model Runner V2). Use --engine hf, or leave out routes and --replay-routes."
            )
        arguments |= {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    if settings.replays and not current_platform.is_cpu():
        arguments["enable_trace_replay"] = True  # for Model Runner V2; V1 needs no preparation
    arguments |= lora | settings.extra
    if (
        not arguments.get("enable_chunked_prefill", True)
        and EngineArgs(**arguments).create_model_config().is_hybrid
    ):
        # Caching recurrent states needs chunked prompts
        arguments.setdefault("enable_prefix_caching", False)
    if arguments.get("enforce_eager"):
        # Otherwise log-probs would compile one small function with inductor: seconds for nothing.
        torch._dynamo.config.disable = True
    # vLLM collects garbage three times while it loads, and once when it closes.
    # Not frozen, all imports would be walked each time: a million objects.
    gc.freeze()
    with kept_apart():
        return start_replaying(LLM, arguments)


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
        self._before, self._temporary = before, temporary
        self._asleep: set[str] = set()
        self._router_layers: list[int] = (
            next(iter(llm.apply_model(router_layers))) if settings.routes else []
        )

    def sample(
        self, requests: Sequence[Request], on_finished: Callable[[int], None]
    ) -> list[Rollout]:
        with self._awake():
            together, part = self._of_all(requests)
            outputs = self._generate(together, self.settings.top_logprobs, on_finished)[part]
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
            together, part = self._of_all(responses)
            ask = partial(self._ask, on_finished=on_finished)
            outputs = replayed(self.llm, together, self.settings, ask, alone=alone, cached=cached)[
                part
            ]
        ends = stop_ids(self.llm)
        rollouts = [
            self._rollout(response, output)
            for response, output in zip(responses, outputs, strict=True)
        ]
        return [
            replace(r, finish_reason="stop") if r.response_ids[-1] in ends else r for r in rollouts
        ]

    def prefill(
        self, responses: Sequence[ForcedResponse], on_finished: Callable[[int], None]
    ) -> list[np.ndarray]:
        with self._awake():
            together, part = self._of_all(responses)
            return prefilled(
                self.llm, together, self.settings, partial(self._ask, on_finished=on_finished)
            )[part]

    def _rollout(self, asked: Asked, output: Any, sink: Sink | None = None) -> Rollout:
        completion = output.outputs[0]
        return self._routed(
            to_rollout(asked.prompt_ids, completion, self.settings.top_logprobs, sink), completion
        )

    def _routed(self, rollout: Rollout, completion: Any) -> Rollout:
        """The rollout with vLLM's experts for each token that it read, in the layers with a
        router.
        """
        if not self._router_layers:
            return rollout
        return replace(
            rollout, routes_FMK=completion.routed_experts[:, self._router_layers].astype("uint16")
        )

    def _of_all(self, requests: Sequence[Asked]) -> tuple[Sequence[Asked], slice]:
        """All ranks that share an engine send it the same requests: those of all, and the slice
        that is this rank's.
        """
        world, size = self.settings.world, self.settings.tensor_parallel
        if size == 1:
            return requests, slice(None)
        first = world.rank // size * size
        parts = world.gather(list(requests))[first : first + size]
        start = sum(map(len, parts[: world.rank - first]))
        return [request for part in parts for request in part], slice(start, start + len(requests))

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """With an empty prefix cache; afterwards frees the GPU for the trainer, keeping the
        weights in main memory.
        """
        self._wake(*_PARTS)
        self.llm.reset_prefix_cache()
        yield
        if self.settings.sleeps:
            self.llm.sleep(level=1)
            self._asleep = set(_PARTS)

    def _wake(self, *parts: str) -> None:
        for part in parts:
            if part in self._asleep:
                self.llm.wake_up(tags=[part])
                self._asleep.discard(part)

    def sample_full(
        self, requests: Sequence[Request], sinks: Sequence[Sink], on_finished: Callable[[int], None]
    ) -> list[Rollout]:
        """The first responses each in a separate batch; the others in the batch that `sample`
        would have made.
        """
        self._wake(*_PARTS)
        self.llm.reset_prefix_cache()
        alone = []
        for request, sink in zip(requests, sinks, strict=False):
            (output,) = self._generate([request], -1, on_finished)
            alone.append(self._rollout(request, output, sink))
            del output  # frees its full distributions before the next response begins
        return alone + self.sample(requests, after(len(alone), on_finished))[len(alone) :]

    def _generate(
        self, requests: Sequence[Request], logprobs: int, on_finished: Callable[[int], None]
    ) -> list[Any]:
        parameters = [
            sampling_params(r.sampling or self.settings.sampling, logprobs, r) for r in requests
        ]
        return self._ask([r.prompt_ids for r in requests], parameters, on_finished)

    def _ask(
        self, prompts: list[list[int]], parameters: list[Any], on_finished: Callable[[int], None]
    ) -> list[Any]:
        if not prompts:  # the ranks of this engine may have none left while those of another have
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
            if not (isinstance(error, Exception) and _is_unsupported(error)):
                raise
            model = self.llm.llm_engine.vllm_config.model_config
            raise MismatchError(
                f"vLLM cannot compute {model.architecture} in "
                f"{str(model.dtype).removeprefix('torch.')} here: {one_sentence(error)} Choose "
                f"another --rollout-dtype. {_instead(error)}"
            ) from error
        return outputs

    def pass_over(self, token_ids: list[int]) -> AbstractContextManager[EnginePass]:
        self._wake(*_PARTS)
        alone = partial(Request, seed=0, max_tokens=1)
        read = lambda ids: self._generate([alone(ids)], 0, lambda _: None)  # noqa: E731
        # Imports torch, which checking settings must not
        from mismatch_cli.models.engines._vllm_modules import pass_over

        return pass_over(self.llm, read, token_ids, self.settings.sampling)

    def load_weights(self, model: Any) -> None:
        # The cache sleeps until the next response: both models are in memory now
        self._wake("weights")
        with engine_log(self.settings.log_file):
            take_over(self.llm, model)
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
        # the name as asked for: vLLM puts the folder of the cache in its place when the hub is not
        # to be asked
        described = describe_config(self.llm.llm_engine.vllm_config) | {
            "model": self.settings.model
        }
        return described | ({"router_layers": self._router_layers} if self._router_layers else {})

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        core = self.llm.llm_engine.engine_core
        del self.llm
        with engine_log(self.settings.log_file), kept_apart(), group_kept(self.settings.world):
            try:
                core.shutdown()  # includes this clean-up; a second one would take half a second
            except Exception:  # a failure here cannot harm what has been recorded
                cleanup_dist_env_and_memory()
        gc.unfreeze()  # undoes `load_llm`
        self._before.restore()
        self._temporary.close()


def _is_unsupported(error: Exception) -> bool:
    """Whether vLLM says, in one of a dozen ways, that it lacks something for a model."""
    told = str(error).lower()
    return isinstance(error, AssertionError | NotImplementedError) or any(
        lacks in told
        for lacks in ("not supported", "not implemented", "does not support", "unsupported")
    )


def _instead(error: Exception) -> str:
    return "--engine hf samples with transformers' own code. " if _is_unsupported(error) else ""


def describe_config(config: Any) -> dict[str, Any]:
    """The settings that can move log μ, as vLLM resolved them."""
    import vllm

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    return {
        "engine": "vllm",
        "version": vllm.__version__,
        "model": model.model,
        "architecture": model.architecture,
        "dtype": dtype,
        "quantization": model.quantization,
        "kv_cache_dtype": dtype if cache.cache_dtype == "auto" else cache.cache_dtype,
        "prefix_caching": cache.enable_prefix_caching,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_model_len": model.max_model_len,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "enforce_eager": model.enforce_eager,
        "compilation_mode": config.compilation_config.mode.name,
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "attention_backend": getattr(config.attention_config.backend, "name", None),
        "cascade_attention": not model.disable_cascade_attn,
        "logprobs_mode": model.logprobs_mode,
        "device": config.device_config.device_type,
        "seed": model.seed,
        **weights_facts(model.hf_config),
        **({"num_experts": experts} if (experts := model.get_num_experts()) else {}),
    }


def lora_arguments(adapter: Adapter | None) -> dict[str, Any]:
    """Arguments for `LLM(…)`: room for one adapter, of the smallest rank that has kernels."""
    if adapter is None:
        return {}
    from vllm.config.lora import MaxLoRARanks

    ranks = sorted(get_args(MaxLoRARanks))
    # vLLM refuses one that is too large
    rank = next((r for r in ranks if r >= adapter.rank), adapter.rank)
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


def after(count: int, on_finished: Callable[[int], None]) -> Callable[[int], None]:
    """Skip the first `count` that finish: they have been counted already."""

    def told(finished: int) -> None:
        nonlocal count
        skipped = min(count, finished)
        count -= skipped
        if finished > skipped:
            on_finished(finished - skipped)

    return told
