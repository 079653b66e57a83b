"""Turns the flags of `probe`, `curate`, `rescore` and `bisect` into a configuration and a run
folder to write to.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import typer

from mismatch_cli.app.common import Common
from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.extras import require
from mismatch_cli.base.options import resumed
from mismatch_cli.models.adapters import check_adapter, read_adapter
from mismatch_cli.models.engines import check_settings
from mismatch_cli.models.loading import (
    check_attention,
    check_device,
    check_model_folder,
    known_vocabulary,
)
from mismatch_cli.models.torch_settings import check_threads
from mismatch_cli.probe.config import CurateConfig, RolloutConfig
from mismatch_cli.probe.from_manifest import settings_of
from mismatch_cli.probe.settings import Recorded
from mismatch_cli.probe.tasks.grading import gradable
from mismatch_cli.probe.tasks.prompts import check_prompts, load_problems
from mismatch_cli.probe.tasks.rewards import check_reward, is_own
from mismatch_cli.probe.tasks.source_rows import is_local
from mismatch_cli.trace.manifest import read_manifest, trace_folder
from mismatch_cli.trace.ours import results_in
from mismatch_cli.trace.run_folder import run_folder
from mismatch_cli.trace.work import begun_beside, drop_begun, replacing_when_complete

_ADAPTERS = ("engine_adapter", "scorer_adapter")
_LOOKED_AT = (*_ADAPTERS, "model", "scorer", "attn", "threads", "device_map")
_Config = TypeVar("_Config", bound=Recorded)


@contextmanager
def prepared_run(
    context: typer.Context,
    common: Common,
    kind: type[_Config],
    check: Callable[[_Config, Path], None] = lambda _config, _folder: None,
    like: Path | None = None,
) -> Iterator[tuple[_Config, Path, dict[str, Any]]]:
    """The configuration, where to record, and the manifest to start with: a new one, or that of the
    run to resume.

    The run folder is locked until the end of the block. An older run stays in it: the new one is
    recorded beside it until `put_in_place`. `check` may refuse configuration and folder before
    anything is created. `like` is a run whose settings apply where none was typed.
    """
    flags, command = context.params, str(context.info_name)
    if common.resume and common.force:
        raise UsageError("--resume continues a run, --force replaces it: use one of them.")
    if like is not None:
        if common.resume:
            raise UsageError(
                "--resume continues a run, --like starts a new one with its settings: use one of "
                "them."
            )
        flags = flags | settings_of(kind, _flags_of(like, command), _typed(context), like)
    recorded = _recorded(kind, flags)
    # Invalid settings are reported before anything about folders
    config = kind.from_flags(recorded)
    folder = common.output or Path(f"{command}-{config.name}")
    check(config, folder)
    if not common.resume:
        _check_inputs(config, command)
    resumable = _is_resumable(folder, kind, command)
    with (
        run_folder(folder, resume=common.resume, force=common.force, resumable=resumable),
        _work_folder(folder, kind, force=common.force) as work,
    ):
        if not common.resume:
            yield config, work, {"command": command, "flags": recorded}
            return
        manifest = _manifest_to_resume(work, kind, command)
        typed, before = _typed(context), manifest["flags"]
        recorded = resumed(kind, recorded, typed, before) | settings_of(kind, before, typed, folder)
        yield kind.from_flags(recorded), work, manifest | {"flags": recorded}


@contextmanager
def _work_folder(folder: Path, kind: type[Recorded], *, force: bool) -> Iterator[Path]:
    """Where to record: beside an older run that is replaced, where such a run was begun, or in
    the folder itself.
    """
    begun = begun_beside(folder)
    if begun is not None and not force and not (begun / kind.NOTE).is_file():
        drop_begun(folder)  # killed before there was anything to resume
        begun = None
    if begun is None and not (force and results_in(folder)):
        yield folder
        return
    with replacing_when_complete(folder) as work:
        yield work


def checked(kind: type[_Config], flags: Mapping[str, Any], command: str) -> None:
    """Refuse flags that cannot make a run."""
    _check_inputs(kind.from_flags(_recorded(kind, flags)), command)


def _recorded(kind: type[_Config], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags as a manifest records them, with pairs as lists."""
    paths = {known.name: known.metadata.get("path", False) for known in fields(kind)}
    recorded = {
        name: _resolved(value) if paths[name] else value
        for name, value in flags.items()
        if name in paths
    }
    reward = str(recorded.get("reward") or "")
    if is_own(reward):
        file, colon, function = reward.rpartition(":")
        recorded["reward"] = f"{_resolved(file) or ''}{colon}{function}"
    return dict(json.loads(json.dumps(recorded)))


def _flags_of(run: Path, command: str) -> dict[str, Any]:
    """The flags that were given to the run; a `MismatchError` if another command recorded it."""
    manifest = read_manifest(trace_folder(run))
    flags = manifest.get("flags")
    if flags is None or manifest.get("command", command) != command:
        raise MismatchError(
            f"{run} was not recorded by `{command}`, so it has no settings to take over. Leave "
            "out --like."
        )
    return dict(flags)


def _check_inputs(config: Recorded, command: str) -> None:
    """Check every model, adapter and file on this machine before creating a folder; a resumed run
    has been checked.

    The order is by cost: first what needs no library, then which libraries are installed, then
    device names (torch), then the weights of adapters (peft).
    """
    given = {name: getattr(config, name, None) for name in _LOOKED_AT}  # where the command has them
    models, adapters = (
        [given[name] for name in ("model", "scorer")],
        [given[name] for name in _ADAPTERS],
    )
    for model in filter(None, models):
        check_model_folder(model)
    for adapter in filter(None, adapters):
        check_adapter(adapter)
    check_attention(given["attn"])
    check_threads(given["threads"])
    if isinstance(config, RolloutConfig):
        _check_sampled(config)
        require(config.engine, f"--engine {config.engine}")
    require("hf", f"`{command}`")
    check_device(given["device_map"])
    for adapter in filter(None, adapters):
        read_adapter(adapter)


def _check_sampled(config: RolloutConfig) -> None:
    check_settings(config.engine, config.engine_settings())
    if tokens := known_vocabulary(config.model):
        config.check_vocabulary(tokens)
    if is_local(config.prompts):
        problems = load_problems(config.prompt_source)
        check_prompts(problems, config.prompt_template)
        if isinstance(config, CurateConfig):
            gradable(problems, config.reward, config.prompts)
    check_reward(config.reward, config.reward_seconds)


def _resolved(name: str | None) -> str | None:
    """One spelling per local path, so that equal weights are recognised; hub names stay as they
    are.
    """
    path = Path(name or "").expanduser()
    return str(path.resolve()) if name and path.exists() else name


def _typed(context: typer.Context) -> set[str]:
    """The parameters that were typed; with --resume the others come from the run."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }


def _is_resumable(folder: Path, kind: type[Recorded], command: str) -> bool:
    try:
        _manifest_to_resume(folder, kind, command)
    except MismatchError:
        return False
    return True


def _manifest_to_resume(folder: Path, kind: type[Recorded], command: str) -> dict[str, Any]:
    if not (folder / kind.NOTE).is_file():
        raise MismatchError(f"{folder} has no run to resume. Start one without --resume.")
    manifest = kind.read_note(folder)
    if not isinstance(manifest.get("flags"), dict) or manifest.get("command", command) != command:
        raise MismatchError(
            f"{folder} was not written by `{command}`, so it cannot be resumed. Choose another "
            "--output."
        )
    return manifest
