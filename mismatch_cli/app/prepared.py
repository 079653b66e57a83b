"""Makes a configuration of the values that `probe`, `curate`, `rescore` and `bisect` were given,
and prepares the run folder that they record into.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from mismatch_cli.app.common import Common
from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.extras import require
from mismatch_cli.base.options import by_key, settings_of, values_by_key
from mismatch_cli.base.values import Values, confirmed, resumed
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
from mismatch_cli.probe.from_manifest import taken_from
from mismatch_cli.probe.settings import RecordingSettings
from mismatch_cli.probe.tasks.grading import gradable
from mismatch_cli.probe.tasks.prompts import check_prompts, load_problems
from mismatch_cli.probe.tasks.rewards import check_reward, is_own
from mismatch_cli.probe.tasks.source_rows import is_local
from mismatch_cli.trace.manifest import read_manifest, trace_folder
from mismatch_cli.trace.ownership import first_result
from mismatch_cli.trace.recording_folder import (
    begun_replacement,
    drop_replacement,
    replacing_when_complete,
)
from mismatch_cli.trace.run_folder import run_folder

_Config = TypeVar("_Config", bound=RecordingSettings)


@contextmanager
def prepared_run(
    values: Values,
    common: Common,
    kind: type[_Config],
    command: str,
    check: Callable[[_Config, Path], None] = lambda _config, _folder: None,
    like: Path | None = None,
) -> Iterator[tuple[_Config, Path, dict[str, Any]]]:
    """The configuration, where to record, and the manifest to start with: a new one, or that of the
    run to resume.

    The run folder is locked until the end of the block. An older run stays in it: the new one is
    recorded beside it until `put_in_place`. `check` may refuse configuration and folder before
    anything is created. `like` is a run whose settings apply where none was typed.
    """
    _check_flags(common, like)
    if like is not None:
        taken = taken_from(kind, _flags_of(like, command), values, like)
        values = values.over(taken, f"--like {like}")
    values = _with_resolved_paths(kind, values)
    # Building the configuration reports invalid settings, and nothing has been created yet.
    # So they are reported before anything about folders.
    config = kind.of(values)
    folder = common.output or Path(f"{command}-{config.name}")
    check(config, folder)
    if not common.resume:
        _check_inputs(config, command)
    resumable = _is_resumable(folder, kind, command)
    with (
        run_folder(folder, resume=common.resume, force=common.force, resumable=resumable),
        _work_folder(folder, kind, force=common.force) as work,
    ):
        manifest: dict[str, Any] = {"command": command}
        if common.resume:
            manifest = _manifest_to_resume(work, kind, command)
            values = _resumed_values(kind, values, manifest["flags"], folder)
            config = kind.of(values)
        yield config, work, manifest | {"flags": _recorded(kind, values)}


def _check_flags(common: Common, like: Path | None) -> None:
    if common.resume and common.force:
        raise UsageError("--resume continues a run, --force replaces it: use one of them.")
    if common.resume and like is not None:
        raise UsageError(
            "--resume continues a run, --like starts a new one with its settings: use one of them."
        )


def _resumed_values(
    kind: type[_Config], values: Values, recorded: Mapping[str, Any], folder: Path
) -> Values:
    """What a resumed run goes by: first what was typed now, then what the run recorded."""
    merged = resumed(kind, values, recorded)
    # A folder may come from somebody else, so not all that it recorded may be taken from it.
    # What was typed now, or confirms the record, was chosen by the user.
    chosen = confirmed(kind, values, recorded) | merged.typed
    safe = taken_from(kind, recorded, chosen, folder)
    return merged.only(merged.typed).over(safe, str(folder)).over(merged)


@contextmanager
def _work_folder(folder: Path, kind: type[RecordingSettings], *, force: bool) -> Iterator[Path]:
    """Where to record: beside an older run that is replaced, where such a run was begun, or in
    the folder itself.
    """
    begun = begun_replacement(folder)
    # A replacement that was killed before it wrote its note has nothing to resume.
    # Without --force it is dropped, and the older run counts again.
    if begun is not None and not force and not (begun / kind.NOTE).is_file():
        drop_replacement(folder)
        begun = None
    replaces = begun is not None or (force and first_result(folder))
    if not replaces:
        yield folder
        return
    with replacing_when_complete(folder) as work:
        yield work


def _with_resolved_paths(kind: type[_Config], values: Values) -> Values:
    """The values of a configuration, with one spelling per local path, so that equal weights are
    recognised.
    """
    values = values.only(by_key(kind))
    spelled: dict[str, Any] = {}
    for setting in settings_of(kind):
        value = values.get(setting.key)
        if value and setting.about.get("path"):
            spelled[setting.key] = _absolute(value)
        elif value and setting.key == "reward" and is_own(value):
            file, colon, function = value.rpartition(":")
            spelled[setting.key] = f"{_absolute(file)}{colon}{function}"
    return values.with_values(spelled)


def _recorded(kind: type[_Config], values: Values) -> dict[str, Any]:
    """The settings as a manifest records them: those that nobody gave have their defaults, or none
    where a default depends on the machine.
    """
    recorded = {}
    for setting in settings_of(kind):
        default = setting.about["default"]
        if callable(default):
            default = None
        recorded[setting.key] = values.get(setting.key, default)
    # Paths, tuples and the like become what JSON has, as when they are read from a manifest.
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


def _check_inputs(config: RecordingSettings, command: str) -> None:
    """Check every model, adapter and file on this machine before creating a folder; a resumed run
    has been checked.

    The order is by cost: first what needs no library, then which libraries are installed, then
    device names (torch), then the weights of adapters (peft).
    """
    # Each configuration has some of these settings, and none that it does not need.
    values = values_by_key(config)
    models = [values.get("model"), getattr(config, "scoring_model", None)]
    adapters = [getattr(config, "engine_adapter", None), getattr(config, "scorer_adapter", None)]
    for model in filter(None, models):
        check_model_folder(model)
    for adapter in filter(None, adapters):
        check_adapter(adapter)
    check_attention(values.get("attn"))
    check_threads(values["threads"])
    if isinstance(config, RolloutConfig):
        _check_sampled(config)
        require(config.engine.name, f"--engine {config.engine.name}")
    require("hf", f"`{command}`")
    check_device(values.get("device_map"))
    for adapter in filter(None, adapters):
        read_adapter(adapter)


def _check_sampled(config: RolloutConfig) -> None:
    check_settings(config.engine.name, config.engine_settings())
    tokens = known_vocabulary(config.engine.model)
    if tokens:
        config.check_vocabulary(tokens)
    if is_local(config.problems.source):
        problems = load_problems(config.prompt_source)
        check_prompts(problems, config.task.template)
        if isinstance(config, CurateConfig):
            gradable(problems, config.task.reward, config.problems.source)
    check_reward(config.task.reward, config.task.seconds)


def _absolute(name: str) -> str:
    """The one spelling of a local path; hub names stay as they are."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name and path.exists() else name


def _is_resumable(folder: Path, kind: type[RecordingSettings], command: str) -> bool:
    try:
        _manifest_to_resume(folder, kind, command)
    except MismatchError:
        return False
    return True


def _manifest_to_resume(
    folder: Path, kind: type[RecordingSettings], command: str
) -> dict[str, Any]:
    if not (folder / kind.NOTE).is_file():
        raise MismatchError(f"{folder} has no run to resume. Start one without --resume.")
    manifest = kind.read_note(folder)
    if not isinstance(manifest.get("flags"), dict) or manifest.get("command", command) != command:
        raise MismatchError(
            f"{folder} was not written by `{command}`, so it cannot be resumed. Choose another "
            "--output."
        )
    return manifest
