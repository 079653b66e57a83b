"""From the flags of `probe` to a configuration and a run folder that may be written to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mismatch_cli import registry
from mismatch_cli.bundled import bundled
from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.recording.config import ProbeConfig, TrainerSettings
from mismatch_cli.sampling import SamplingSettings
from mismatch_cli.tasks.prompts import PromptSource
from mismatch_cli.torch_settings import DTYPES

_ENGINE_FLAGS = {
    "kv_cache_dtype": "kv_cache_dtype",
    "tensor_parallel": "tensor_parallel_size",
    "eager": "enforce_eager",
    "prefix_caching": "enable_prefix_caching",
    "max_model_len": "max_model_len",
}
# What may differ between a run and its resumption, because the trace does not depend on it.
_NOT_RECORDED = {"resume", "output", "worst", "force", "json", "quiet", "debug", "threads"}


def prepare_run(flags: dict[str, Any], explicit: set[str]) -> tuple[ProbeConfig, Path, dict[str, Any] | None]:
    """The configuration, the run folder, and the manifest of the run to go on with (None for a new one)."""
    from mismatch_cli.trace.manifest import FILE_NAME, read_manifest

    folder = flags["output"] or Path(f"probe-{Path(flags['model'] or bundled('model')).name}")
    recorded = (folder / "trace" / FILE_NAME).is_file()
    if flags["resume"]:
        if not recorded:
            raise MismatchError(f"{folder} holds no run to resume. Start one without --resume.")
        manifest = read_manifest(folder / "trace")
        return _resumed_config(flags, explicit, manifest), folder, manifest
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        if not flags["force"]:
            raise MismatchError(
                f"{folder} already exists. Go on with --resume, replace it with --force, or choose another --output."
            )
        _remove_run(folder, recorded)
    return config_from_flags(flags), folder, None


def _remove_run(folder: Path, recorded: bool) -> None:
    if not recorded:
        raise MismatchError(f"{folder} is no run folder, so --force does not replace it. Choose another --output.")
    shutil.rmtree(folder)


def _resumed_config(flags: dict[str, Any], explicit: set[str], manifest: dict[str, Any]) -> ProbeConfig:
    recorded = ProbeConfig.from_json(manifest["config"])
    asked = config_from_flags(flags).to_json()
    changed = [
        name for name in sorted(explicit - _NOT_RECORDED) if _lookup(asked, name) != _lookup(recorded.to_json(), name)
    ]
    if changed:
        flag = "--" + changed[0].replace("_", "-") if changed[0] != "model" else "MODEL"
        raise UsageError(
            f"{flag} differs from the run that --resume would go on with. Leave it out, or start in another --output."
        )
    return recorded


def _lookup(config: dict[str, Any], name: str) -> Any:
    """Where a flag has gone in the configuration."""
    nested = {
        "prompts": ("prompts", "location"),
        "num_prompts": ("prompts", "limit"),
        "subset": ("prompts", "config"),
        "shuffle": ("prompts", "shuffle_seed"),
        "trainer_model": ("trainer", "model"),
        "trainer_dtype": ("trainer", "dtype"),
        "attn": ("trainer", "attn_implementation"),
        "engine_arg": ("engine_args",),
    } | {flag: ("engine_args", name) for flag, name in _ENGINE_FLAGS.items()}
    parts = [config, config["prompts"], config["sampling"], config["trainer"]]
    if name in nested:
        value: Any = config
        for key in nested[name]:
            value = value.get(key)
        return value
    return next((part[name] for part in parts if name in part), None)


def config_from_flags(flags: dict[str, Any]) -> ProbeConfig:
    """Check the flags and gather them; raises a `UsageError` for what makes no sense."""
    model = str(flags["model"] or bundled("model"))
    engines = registry.names("mismatch_cli.engines")
    if flags["engine"] not in engines:
        raise UsageError(registry.unknown("engine", flags["engine"], engines))
    for flag in ("rollout_dtype", "trainer_dtype"):
        if flags[flag] not in DTYPES:
            raise UsageError(f"--{flag.replace('_', '-')}: {registry.unknown('dtype', flags[flag], DTYPES)}")
    return ProbeConfig(
        model=model,
        engine=flags["engine"],
        prompts=_prompt_source(flags),
        sampling=SamplingSettings(**{n: flags[n] for n in ("temperature", "top_p", "top_k", "min_p", "max_tokens")}),
        trainer=_trainer_settings(flags, model),
        engine_args=_engine_args(flags),
        **{n: flags[n] for n in ("samples_per_prompt", "top_logprobs", "seed", "raw", "rollout_dtype", "threads")},
    )


def _prompt_source(flags: dict[str, Any]) -> PromptSource:
    return PromptSource(
        location=flags["prompts"] or str(bundled("problems.jsonl")),
        prompt_field=flags["prompt_field"],
        answer_field=flags["answer_field"],
        split=flags["split"],
        config=flags["subset"],
        limit=flags["num_prompts"],
        shuffle_seed=flags["seed"] if flags["shuffle"] else None,
    )


def _trainer_settings(flags: dict[str, Any], model: str) -> TrainerSettings:
    return TrainerSettings(
        model=flags["trainer_model"] or model,
        dtype=flags["trainer_dtype"],
        attn_implementation=flags["attn"],
        **{n: flags[n] for n in ("float32_head", "device_map", "token_budget", "noise_responses")},
    )


def _engine_args(flags: dict[str, Any]) -> dict[str, Any]:
    arguments = {name: flags[flag] for flag, name in _ENGINE_FLAGS.items() if flags[flag] is not None}
    for item in flags["engine_arg"] or []:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise UsageError(f"--engine-arg {item!r} is not key=value. Example: --engine-arg max_num_seqs=64")
        arguments[key.replace("-", "_")] = _parse_value(value)
    return arguments


def _parse_value(value: str) -> Any:
    """Numbers, true/false, null and JSON as such; anything else is text."""
    try:
        return json.loads(value)
    except ValueError:
        return value
