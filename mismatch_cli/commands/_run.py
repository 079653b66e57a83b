"""From the flags of `probe`, `curate` and `rescore` to a configuration and a run folder that may be written to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer

from mismatch_cli import custom_code, registry
from mismatch_cli.adapters import read_adapter
from mismatch_cli.bundled import bundled
from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.models import check_model_folder
from mismatch_cli.recording.config import (
    EQUAL,
    NEWER,
    CurateConfig,
    ProbeConfig,
    RescoreConfig,
    RolloutConfig,
    TrainerSettings,
)
from mismatch_cli.recording.folder import run_folder
from mismatch_cli.recording.scorer import named_scorer
from mismatch_cli.sampling import SamplingSettings
from mismatch_cli.tasks.grading import check_reward
from mismatch_cli.tasks.prompts import PromptSource, check_template, is_local, load_problems
from mismatch_cli.torch_settings import DTYPES
from mismatch_cli.trace.manifest import FILE_NAME, read_manifest
from mismatch_cli.trace.reader import Trace

_ENGINE_FLAGS = {
    "kv_cache_dtype": "kv_cache_dtype",
    "tensor_parallel": "tensor_parallel_size",
    "eager": "enforce_eager",
    "prefix_caching": "enable_prefix_caching",
    "max_model_len": "max_model_len",
    "engine_url": "url",
    "served_model": "served_model",
}
# What --resume may change: how the work is done, not what is measured.
# The samples that choose do not depend on `keep`.
_CHANGEABLE = {"threads", "token_budget", "noise_responses", "device_map", "keep", "engine_url"}
_CHANGEABLE |= {"full_divergence_memory"}
_ARGUMENTS = {"model", "trace"}
_OF_THIS_CALL = {"resume", "output", "worst", "confirm", "trust_remote_code", "force", "json", "quiet", "debug"}
_Config = TypeVar("_Config", bound=RolloutConfig | RescoreConfig)


@contextmanager
def prepared_run(
    context: typer.Context,
    to_config: Callable[[dict[str, Any]], _Config],
    check: Callable[[_Config, Path], None] = lambda _config, _folder: None,
) -> Iterator[tuple[_Config, Path, dict[str, Any]]]:
    """The configuration, the run folder, and the manifest to begin with: a new one, or that of the run to go on with.

    The folder is held until the end of the block. Nothing is deleted here: an old run goes when the new one has loaded
    and is about to write. `check` may refuse the two before anything is created.
    """
    flags, command = context.params, str(context.info_name)
    custom_code.allow(flags["trust_remote_code"])  # never by what a folder to resume says
    if flags["resume"] and flags["force"]:
        raise UsageError("--resume goes on with a run, --force replaces it: use one of them.")
    recorded = {
        name: _resolved(value) if name in _PATHS else value
        for name, value in flags.items()
        if name not in _OF_THIS_CALL
    }
    if reward := recorded.get("reward"):
        file, colon, function = str(reward).rpartition(":")
        recorded["reward"] = f"{_resolved(file) or ''}{colon}{function}"
    recorded = json.loads(json.dumps(recorded))  # as the manifest has it: pairs are lists there
    config = to_config(recorded)  # what makes no sense is said before anything about folders
    folder = flags["output"] or Path(f"{command}-{config.name}")
    check(config, folder)
    if not flags["resume"]:
        _check_inputs(config)
    resumable = _is_resumable(folder, command)
    with run_folder(folder, resume=flags["resume"], force=flags["force"], resumable=resumable):
        if not flags["resume"]:
            yield config, folder, {"command": command, "flags": recorded}
            return
        manifest = _manifest_to_resume(folder, command)
        recorded = _resumed_flags(recorded, _explicit(context), manifest)
        yield to_config(recorded), folder, manifest | {"flags": recorded}


def _check_inputs(config: RolloutConfig | RescoreConfig) -> None:
    """Whatever lies on this machine and was named: told before a folder is made. A run to go on with has been."""
    for name in config.adapters:
        read_adapter(name)
    for model in config.models:
        check_model_folder(model)
    if isinstance(config, RolloutConfig):
        check_template(config.prompt_template)
        if is_local(config.prompts.location):
            load_problems(config.prompts)
        check_reward(config.reward)


_PATHS = ("model", "trainer_model", "adapter", "rollout_adapter", "trainer_adapter", "prompts", "trace")


def _resolved(name: str | None) -> str | None:
    """One spelling for what lies on this machine, so that equal weights are known as equal; hub names as they are."""
    path = Path(name or "").expanduser()
    return str(path.resolve()) if name and path.exists() else name


def _explicit(context: typer.Context) -> set[str]:
    """The parameters that were typed: with --resume the others come from the run."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _is_resumable(folder: Path, command: str) -> bool:
    try:
        _manifest_to_resume(folder, command)
    except MismatchError:
        return False
    return True


def _manifest_to_resume(folder: Path, command: str) -> dict[str, Any]:
    if not (folder / "trace" / FILE_NAME).is_file():
        raise MismatchError(f"{folder} holds no run to resume. Start one without --resume.")
    manifest = read_manifest(folder / "trace")
    if not isinstance(manifest.get("flags"), dict) or manifest.get("command", command) != command:
        raise MismatchError(
            f"{folder} was not written by `{command}`, so it cannot be resumed. Choose another --output."
        )
    return manifest


def _resumed_flags(asked: dict[str, Any], explicit: set[str], manifest: dict[str, Any]) -> dict[str, Any]:
    """The flags of the run; one that was typed now may differ from it only in how the work is done."""
    recorded = manifest["flags"]
    for name in sorted(explicit & asked.keys() - _CHANGEABLE):
        if asked[name] != recorded.get(name):
            flag = name.upper() if name in _ARGUMENTS else "--" + name.replace("_", "-")
            raise UsageError(f"{flag} differs from the run to go on with. Leave it out, or start in another --output.")
    return asked | recorded | {name: asked[name] for name in explicit & _CHANGEABLE}


def probe_config(flags: dict[str, Any]) -> ProbeConfig:
    """Check the flags and gather them; raises a `UsageError` for what makes no sense."""
    rollout = _rollout_settings(flags)
    _check_dtype("--trainer-dtype", flags["trainer_dtype"])
    full = ("full_divergence", "full_divergence_memory")
    more = {name: flags[name] for name in ("samples_per_prompt", "top_logprobs", *full)}
    both = flags.get("adapter")  # a run of an earlier version has no such flag
    alone = {name: flags.get(f"{name}_adapter") for name in ("rollout", "trainer")}
    if both and any(alone.values()):
        raise UsageError(
            "--adapter is for both sides: leave it out, or leave out --rollout-adapter and --trainer-adapter."
        )
    trainer = _trainer_settings(flags | {"trainer_adapter": both or alone["trainer"]}, rollout["model"])
    return ProbeConfig(**rollout, **more, adapter=both or alone["rollout"], trainer=trainer)


def curate_config(flags: dict[str, Any]) -> CurateConfig:
    """The same for `curate`."""
    more = {name: flags[name] for name in ("samples_per_prompt", "held_out_samples")}
    return CurateConfig(**_rollout_settings(flags), **more, keep=tuple(flags["keep"]), top_logprobs=0)


def rescore_config(flags: dict[str, Any]) -> RescoreConfig:
    """The same for `rescore`; the bundled trace goes with the bundled model, and no other trace does."""
    _check_dtype("--trainer-dtype", flags["trainer_dtype"])
    weights = flags["weights"]
    if weights not in (EQUAL, NEWER) and not weights.isdecimal():
        raise UsageError(f"--weights {weights} is not known. Use {EQUAL}, {NEWER}, or a version such as 40.")
    if flags["trace"] is not None and flags["trainer_model"] is None:
        flags = flags | _scorer_of(flags)
    return RescoreConfig(
        trace=flags["trace"] or str(bundled("traces") / "float32"),
        trainer=_trainer_settings(flags, str(bundled("model"))),
        weights=int(weights) if weights.isdecimal() else weights,
        sampling={name: flags[name] for name in ("temperature", "top_p", "top_k", "min_p")},
        **{name: flags[name] for name in ("keep_trainer", "threads")},
    )


def _scorer_of(flags: dict[str, Any]) -> dict[str, Any]:
    """The model, with its adapter, that the trace names for these weights; a `UsageError` where it names none."""
    scorer = named_scorer(Trace.open(Path(flags["trace"])).manifest, flags["weights"])
    if scorer is None:
        raise UsageError("Name the model that is to score: --trainer-model, a folder or a hub name.")
    found = {"trainer_model": scorer["model"]}
    if scorer.get("adapter") and not flags.get("trainer_adapter"):
        found |= {"trainer_adapter": scorer["adapter"], "merge_adapter": bool(scorer.get("adapter_merged"))}
    return found


def _rollout_settings(flags: dict[str, Any]) -> dict[str, Any]:
    """What both need to sample."""
    engines = registry.names("mismatch_cli.engines")
    if flags["engine"] not in engines:
        raise UsageError(registry.unknown("engine", flags["engine"], engines))
    for flag in ("engine_url", "served_model"):
        if flags[flag] and flags["engine"] != "server":
            raise UsageError(f"--{flag.replace('_', '-')} goes with --engine server. Add that, or leave it out.")
    _check_dtype("--rollout-dtype", flags["rollout_dtype"])
    return {
        "model": str(flags["model"] or bundled("model")),
        "engine": flags["engine"],
        "prompts": _prompt_source(flags),
        "sampling": SamplingSettings(
            **{name: flags[name] for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens")}
        ),
        "engine_args": _engine_args(flags),
        "reward": flags["reward"] or "",
        **{name: flags[name] for name in ("seed", "prompt_template", "rollout_dtype", "threads")},
    }


def _check_dtype(flag: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise UsageError(f"{flag}: {registry.unknown('dtype', dtype, DTYPES)}")


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
        adapter=flags.get("trainer_adapter"),
        merge_adapter=_merge_adapter(flags),
        **{n: flags[n] for n in ("float32_head", "device_map", "token_budget", "noise_responses")},
    )


def _merge_adapter(flags: dict[str, Any]) -> bool:
    merge = bool(flags.get("merge_adapter"))
    if merge and not flags.get("trainer_adapter"):
        raise UsageError("--merge-adapter needs an adapter to merge. Name one with --trainer-adapter.")
    return merge


def _engine_args(flags: dict[str, Any]) -> dict[str, Any]:
    arguments = {name: flags[flag] for flag, name in _ENGINE_FLAGS.items() if flags[flag] is not None}
    for item in flags["engine_arg"] or []:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise UsageError(f"--engine-arg {item!r} is not key=value. Example: --engine-arg max_num_seqs=64")
        if key.replace("-", "_") == "trust_remote_code":
            raise UsageError(f"--engine-arg {item} is not for one side alone. Use {custom_code.FLAG}.")
        arguments[key.replace("-", "_")] = _parse_value(value)
    return arguments


def _parse_value(value: str) -> Any:
    """Numbers, true/false, null and JSON as such; anything else is text."""
    try:
        return json.loads(value)
    except ValueError:
        return value
