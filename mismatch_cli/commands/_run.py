"""From the flags of `probe` to a configuration and a run folder that may be written to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mismatch_cli import registry
from mismatch_cli.bundled import bundled
from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.recording.config import ProbeConfig, TrainerSettings
from mismatch_cli.recording.folder import check_run_folder
from mismatch_cli.sampling import SamplingSettings
from mismatch_cli.tasks.prompts import PromptSource
from mismatch_cli.torch_settings import DTYPES
from mismatch_cli.trace.manifest import FILE_NAME, read_manifest

_ENGINE_FLAGS = {
    "kv_cache_dtype": "kv_cache_dtype",
    "tensor_parallel": "tensor_parallel_size",
    "eager": "enforce_eager",
    "prefix_caching": "enable_prefix_caching",
    "max_model_len": "max_model_len",
}
# What --resume may change: how the work is done, not what is measured.
_CHANGEABLE = {"threads", "token_budget", "noise_responses", "device_map"}
_OF_THIS_CALL = {"resume", "output", "worst", "force", "json", "quiet", "debug"}


def prepare_run(flags: dict[str, Any], explicit: set[str]) -> tuple[ProbeConfig, Path, dict[str, Any]]:
    """The configuration, the run folder, and the manifest to begin with: a new one, or that of the run to go on with.

    Nothing is deleted here: an old run goes when the new one has loaded and is about to write.
    """
    if flags["resume"] and flags["force"]:
        raise UsageError("--resume goes on with a run, --force replaces it: use one of them.")
    recorded = {
        name: _resolved(value) if name in _PATHS else value
        for name, value in flags.items()
        if name not in _OF_THIS_CALL
    }
    config = config_from_flags(recorded)  # what makes no sense is said before anything about folders
    folder = flags["output"] or Path(f"probe-{Path(config.model).name}")
    check_run_folder(folder)
    if flags["resume"]:
        manifest = _manifest_to_resume(folder)
        recorded = _resumed_flags(recorded, explicit, manifest)
        return config_from_flags(recorded), folder, manifest | {"flags": recorded}
    if any(folder.glob("trace/shard-*.parquet")) and not flags["force"]:
        raise MismatchError(
            f"{folder} already exists. Go on with --resume, replace it with --force, or choose another --output."
        )
    return config, folder, {"flags": recorded}


_PATHS = ("model", "trainer_model", "prompts")


def _resolved(name: str | None) -> str | None:
    """One spelling for what lies on this machine, so that equal weights are known as equal; hub names as they are."""
    path = Path(name or "").expanduser()
    return str(path.resolve()) if name and path.exists() else name


def _manifest_to_resume(folder: Path) -> dict[str, Any]:
    if not (folder / "trace" / FILE_NAME).is_file():
        raise MismatchError(f"{folder} holds no run to resume. Start one without --resume.")
    manifest = read_manifest(folder / "trace")
    if not isinstance(manifest.get("flags"), dict):
        raise MismatchError(f"{folder} was not written by `probe`, so it cannot be resumed. Choose another --output.")
    return manifest


def _resumed_flags(asked: dict[str, Any], explicit: set[str], manifest: dict[str, Any]) -> dict[str, Any]:
    """The flags of the run; one that was typed now may differ from it only in how the work is done."""
    recorded = manifest["flags"]
    for name in sorted(explicit & asked.keys() - _CHANGEABLE):
        if asked[name] != recorded.get(name):
            flag = "MODEL" if name == "model" else "--" + name.replace("_", "-")
            raise UsageError(f"{flag} differs from the run to go on with. Leave it out, or start in another --output.")
    return asked | recorded | {name: asked[name] for name in explicit & _CHANGEABLE}


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
        **{
            n: flags[n]
            for n in ("samples_per_prompt", "top_logprobs", "seed", "prompt_template", "rollout_dtype", "threads")
        },
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
