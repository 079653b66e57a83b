"""The rollout engine of a training run: its settings, and in which dtype it holds the weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import Engine, EngineSettings, engine_module
from mismatch_cli.models.torch_settings import DTYPES
from mismatch_cli.processes.ranks import World
from mismatch_cli.train.train_config import TrainConfig


def engine_settings(
    config: TrainConfig,
    sampling: SamplingSettings,
    top_k: int,
    folder: Path,
    say: Callable[[str], None],
    world: World,
) -> EngineSettings:
    """The settings for this rank's engine; `folder` is that of the run."""
    engine = config.engine
    seed = config.sampler.seed
    module = engine_module(engine.name)
    # A server has its dtypes, its memory and its log since it was started.
    if module.REMOTE:
        named = {"url": engine.url, "served_model": engine.served_model}
        return EngineSettings(
            engine.model,
            sampling,
            top_k,
            seed=seed,
            extra={key: value for key, value in named.items() if value} | _context_length(config),
            say=say,
            world=world,
            weights_folder=Path(engine.weights_folder or folder / "weights"),
        )
    extra = _context_length(config)
    if engine.kv_cache_dtype is not None:
        extra["kv_cache_dtype"] = engine.kv_cache_dtype
    # The trainer is on the same device and needs the rest of its memory.
    if module.MEMORY_SHARE is not None and torch.cuda.is_available():
        extra[module.MEMORY_SHARE] = engine.memory
    return EngineSettings(
        engine.model,
        sampling,
        top_k,
        engine.dtype,
        seed,
        folder / "log" / f"{engine.name}{world.suffix}.log",
        extra,
        world=world,
        tensor_parallel=engine.tensor_parallel,
        sleeps=torch.cuda.is_available(),
        routes=config.scorer.replay_routes,
    )


def _context_length(config: TrainConfig) -> dict[str, Any]:
    """The maximum length of prompt plus response, under the name that every engine gives it."""
    if not config.max_context_tokens:
        return {}
    return {"max_model_len": config.max_context_tokens}


def dtype_of_weights(engine: Engine) -> tuple[torch.dtype | None, str]:
    """The dtype to which an engine rounds weights; if that cannot be known, None and a sentence
    that says why.
    """
    described = engine.describe()
    dtype, quantization = described.get("dtype"), described.get("quantization")
    if quantization:
        why = f"The engine quantises its weights ({quantization})"
    elif dtype not in DTYPES[1:]:
        why = "The engine does not say in which dtype it holds its weights"
    else:
        return getattr(torch, str(dtype)), ""
    consequence = (
        "log-probs cannot show whether it has the new ones: each weight sync is undecidable."
    )
    return None, f"{why}, so {consequence}"
