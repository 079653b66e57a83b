"""`mismatch-cli train`: the sanity test with any algorithm, real rollouts, and every step
recorded.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mismatch_cli.app.common import DRAWING, Common
from mismatch_cli.app.completions import algorithms
from mismatch_cli.app.progress import TerminalProgress
from mismatch_cli.app.rank_flags import NPROC, launch_ranks
from mismatch_cli.app.tracking import AS_FRAMEWORK, TRACK, TRACK_NAME, TRACK_PROJECT, Tracking
from mismatch_cli.base import registry
from mismatch_cli.base.errors import MismatchError, UsageError, quoted
from mismatch_cli.base.options import flags, names_cluster, setting
from mismatch_cli.base.places import bundled, shown
from mismatch_cli.processes.ranks import World
from mismatch_cli.processes.ranks.joined import joined, launched, number_of_ranks, restarted
from mismatch_cli.trace.training_folder import METRICS
from mismatch_cli.train.train_config import (
    FILE_NAME,
    TrainConfig,
    changed_from,
    load_config,
    parsed,
    presets,
    shown_defaults,
)

if TYPE_CHECKING:
    from mismatch_cli.app.refresher import Refresher
    from mismatch_cli.train.live import TrainingView
    from mismatch_cli.train.resemblance import Resemblance

PANEL, PLACE = "Train", 2

# Settings whose flags here say more than in the dataclass.
_OWN = {
    known.name: known.metadata["help"]
    for known in fields(TrainConfig)
    if known.name in ("algorithm", "seed")
}
_PRESET = "miniature"
_SHOWN = shown_defaults(_PRESET)
_SayStart = Callable[[TrainConfig, Path], None]  # after the first step of a run


@flags(TrainConfig, without=tuple(_OWN), defaults=_SHOWN)
def command(
    context: typer.Context,
    *,
    algorithm: list[str] | None = setting(
        None,
        f"{_OWN['algorithm']} Repeatable.",
        short="-a",
        metavar="ALGORITHM",
        show_default=_SHOWN["algorithm"],
        completes=algorithms,
        typed=registry.names_file,
    ),
    preset: str = setting(
        _PRESET,
        f"Defaults of all settings: {', '.join(presets())}, or a file.",
        metavar="NAME|FILE.toml",
        completes=presets,
    ),
    seed: int | None = setting(None, _OWN["seed"], show_default=_SHOWN["seed"]),
    seeds: int = setting(1, "Runs per algorithm, with consecutive seeds.", min=1),
    output: Path | None = setting(
        None,
        "Run folder: traces/, checkpoints/, model/, report.html and more.",
        short="-o",
        show_default="train-PRESET",
        panel="Output",
    ),
    resume: bool = setting(False, "Resume the runs in --output from their checkpoints."),
    devices: str | None = setting(
        None,
        "Run several trainings at once, one per GPU of this list, or on a Ray cluster.",
        metavar="0,1|ray|ray://HOST:PORT",
        typed=names_cluster,
        show_default="one after another",
        panel="Ranks",
    ),
    nproc: int = NPROC,
    max_restarts: int = setting(
        0,
        "Restarts of all processes from the last checkpoint after one has died.",
        min=0,
        panel="Ranks",
        metavar="N",
    ),
    show_config: bool = setting(False, "Check the settings, print them all as TOML, and stop."),
    report_every: float = setting(
        60,
        "Minimum time between refreshes of report.html; 0 to draw it only at the end.",
        min=0,
        metavar="SECONDS",
        panel="Output",
    ),
    track: list[str] | None = TRACK,
    track_project: str = TRACK_PROJECT,
    track_name: str | None = TRACK_NAME,
    framework: str | None = AS_FRAMEWORK,
    common: Annotated[Common, "trust_remote_code", *DRAWING, "full", "quiet", "debug"],
    **chosen: Any,
) -> None:
    """Train on a small set of problems to full accuracy, with any algorithm, and record what its
    trust region does.

    Every setting of a preset is also a flag. The defaults below are those of the preset miniature;
    type --preset paper --show-config to print those of paper.

    Examples:
      mismatch-cli train
      mismatch-cli train -a dppo-binary-tv -a pg-is -a grpo-clip-higher --seeds 3
      mismatch-cli train --model ./checkpoint --dataset problems.jsonl --steps 200
      mismatch-cli train --preset paper --nproc 8 --max-restarts 3
      mismatch-cli train --track trackio --as verl
    """
    from mismatch_cli.base.extras import require
    from mismatch_cli.train.resemblance import Resemblance
    from mismatch_cli.train.task import check_ranks, check_runs

    expected = Resemblance.of(preset)
    changes = {name: value for name, value in chosen.items() if value is not None}
    first = load_config(preset, changes | ({} if seed is None else {"seed": seed}))
    configs = [
        load_config(preset, changes | {"algorithm": name, "seed": first.seed + number})
        for name in common.meant(algorithm) or [first.algorithm]
        for number in range(seeds)
    ]
    tracking = Tracking.asked(track, track_project, track_name, framework, several=len(configs) > 1)
    output = output or Path(f"train-{Path(preset).stem}")
    if not show_config:
        check_ranks(first, number_of_ranks(nproc))
        _say_whose_rate(first, preset, changes, common)
    folders = _run_folders(configs, output)  # report equal names before problems in the files
    check_runs(configs)
    if show_config:
        print(configs[0].to_toml(), end="")
        _say_right_ranks(first, number_of_ranks(nproc), common)
        return
    require(first.engine, f"--engine {first.engine}")
    require("hf", "`train`")
    if devices is not None and (len(configs) == 1 or nproc > 1 or launched()):
        raise UsageError(
            "--devices runs several trainings, a process each: add -a or --seeds, without --nproc."
        )
    if devices is not None and first.engine_url:
        raise UsageError(
            "--devices trains several models, but servers hold the weights of one. Leave out "
            "--devices."
        )
    # Check here too: restarted ranks continue with existing files
    if not launched() and (nproc > 1 or max_restarts):
        with _held(configs, folders, output, resume):
            pass
    launch_ranks(context, nproc, _KEPT, max_restarts)
    resume = resume or restarted()
    with joined(_KEPT) as world, ExitStack() as held:  # until after the last run
        if not world.first:
            for config, folder in zip(configs, folders, strict=True):
                _follow(config, folder, resume, world)
            return
        if devices is not None:
            held.enter_context(_held(configs, [], output, resume))  # each run holds its own folder
            _train_apart(context, configs, folders, output, devices, resume, common)
            return
        held.enter_context(_held(configs, folders, output, resume))
        say_start = partial(_say_start, expected, preset, common.progress)
        _train(folders, configs, output, resume, report_every, common, world, tracking, say_start)


_KEPT = (
    "Every finished step is recorded: the same command with --resume continues from the newest "
    "checkpoint, and --max-restarts N does so automatically."
)


@contextmanager
def _held(
    configs: Sequence[TrainConfig], folders: Sequence[Path], output: Path, resume: bool
) -> Iterator[None]:
    """Lock the folders of these runs and of their report; a `MismatchError` for one that must
    not be overwritten.
    """
    from mismatch_cli.trace.run_folder import folder_of_runs, training_folder

    with ExitStack() as held:
        if len(configs) > 1:
            from mismatch_cli.train.studies.training import TrainingAnalysis

            held.enter_context(folder_of_runs(output, TrainingAnalysis.FORMAT))
        for config, folder in zip(configs, folders, strict=False):
            held.enter_context(
                training_folder(folder, FILE_NAME, partial(_is_saved, config), resume=resume)
            )
        yield


def _is_saved(config: TrainConfig, text: str) -> bool:
    """Whether a run was started with these settings; settings that are newer than the run count
    as their defaults.
    """
    try:
        return parsed(text) == config
    except MismatchError:
        return False


def _follow(config: TrainConfig, folder: Path, resume: bool, world: World) -> None:
    """Take part in a run while the first rank prints and writes; that one handles the first
    Ctrl-C.
    """
    from mismatch_cli.models.torch_settings import prepare_imports

    prepare_imports()
    from mismatch_cli.train.loop import train

    with _once(lambda: None):
        if not train(config, folder, lambda _: None, resume=resume, world=world):
            raise KeyboardInterrupt


def _run_folders(configs: Sequence[TrainConfig], output: Path) -> list[Path]:
    """One run takes the whole folder, several take one folder each; a `UsageError` if two have
    the same name.
    """
    if len(configs) == 1:
        return [output]
    by_name: dict[str, TrainConfig] = {}
    for config in configs:
        other = by_name.setdefault(_run_name(config), config)
        if other is not config:
            raise UsageError(
                f"-a {other.algorithm} and -a {config.algorithm} would both be called "
                f"{_run_name(config)}. Leave one out, or train it into another --output."
            )
    return [output / name for name in by_name]


def _run_name(config: TrainConfig) -> str:
    return f"{Path(config.algorithm).name.replace(':', '-').replace(',', '-')}-seed-{config.seed}"


def _say_whose_rate(
    config: TrainConfig, preset: str, changes: dict[str, Any], common: Common
) -> None:
    chosen = preset != _PRESET or "learning_rate" in changes
    if not chosen and Path(config.model).resolve() != bundled("model").resolve():
        common.progress.say(
            f"The learning rate of the preset miniature, {config.learning_rate:g}, was chosen "
            "for the bundled model. For another model, set --learning-rate or use --preset paper."
        )


def _say_right_ranks(config: TrainConfig, ranks: int, common: Common) -> None:
    """Say where a run with these settings would need a different number of ranks."""
    from mismatch_cli.train.task import check_ranks

    try:
        check_ranks(config, ranks)
    except UsageError as error:
        common.progress.say(str(error))


def _train(
    folders: Sequence[Path],
    configs: Sequence[TrainConfig],
    output: Path,
    resume: bool,
    report_every: float,
    common: Common,
    world: World,
    tracking: Tracking,
    say_start: _SayStart,
) -> None:
    """Train one run after another, and report on the results, even if a run failed or the user
    stopped.
    """
    from mismatch_cli.app.refresher import Refresher
    from mismatch_cli.train.live import TrainingView

    progress = common.progress
    refresher = Refresher(folders, output, report_every, progress.say, draws=not common.no_plots)
    begun: list[Path] = []
    failed: list[str] = []
    stopped = False
    try:
        for number, (config, folder) in enumerate(zip(configs, folders, strict=True), start=1):
            view = TrainingView(config, number, len(configs))
            try:
                begun.append(folder)
                stopped = not _run(
                    config, folder, resume, view, refresher, progress, world, tracking, say_start
                )
            except MismatchError as error:
                if len(configs) == 1 or world.size > 1:  # other ranks do not expect a next run
                    raise
                failed.append(folder.name)
                progress.say(f"{folder.name} failed: {error}")
            if view.stopping:
                stopped = stopped or number < len(configs)
                break
    except BaseException:
        refresher.stop()
        with suppress(MismatchError):  # the first error matters, not that the report failed too
            _report(begun, output, common)
        raise
    refresher.stop()
    _report(begun, output, common)
    if stopped:
        progress.say(
            "Stopped and saved. Continue with the same command and: "
            f"{quoted('--resume', '--output', output)}"
        )
        raise KeyboardInterrupt
    if failed:
        raise MismatchError(
            f"{len(failed)} of {len(configs)} runs failed for the reasons above: "
            f"{', '.join(failed)}. Type the same command with --resume to retry them from their "
            "last checkpoints."
        )


def _train_apart(
    context: typer.Context,
    configs: Sequence[TrainConfig],
    folders: Sequence[Path],
    output: Path,
    devices: str,
    resume: bool,
    common: Common,
) -> None:
    """Train as many runs at once as there are devices, and report on the results, even if a run
    failed.
    """
    from mismatch_cli.train.run_apart import train_apart

    for folder in folders:
        if folder.exists() and not resume:
            raise MismatchError(
                f"{folder} already exists. Continue it with --resume, or choose another --output."
            )
    try:
        train_apart(context, configs, folders, devices, common)
    finally:
        _report(folders, output, common)


def _report(folders: Sequence[Path], output: Path, common: Common) -> None:
    """Make the final report of all runs that have a step."""
    from mismatch_cli.train.studies.runs import read_runs
    from mismatch_cli.train.studies.training import TrainingAnalysis

    with_steps = [folder for folder in folders if _has_step(folder)]
    if with_steps:
        common.show(TrainingAnalysis.of(read_runs(with_steps)), output)


def _has_step(folder: Path) -> bool:
    """Whether a step can be read; a failed run may have left anything."""
    from mismatch_cli.train.studies.runs import read_runs

    try:
        return any(run.step_N.max() > 0 for run in read_runs([folder]))
    except MismatchError:
        return False


def _run(
    config: TrainConfig,
    folder: Path,
    resume: bool,
    view: TrainingView,
    refresher: Refresher,
    progress: TerminalProgress,
    world: World,
    tracking: Tracking,
    say_start: _SayStart,
) -> bool:
    """Train one run and show its progress; return whether all steps are done."""
    from mismatch_cli.models.torch_settings import prepare_imports

    prepare_imports()
    from mismatch_cli.train.loop import train

    def on_step(record: dict[str, Any]) -> None:
        if resume and not view.records:
            for earlier in _steps_before(folder, record["step"]):
                view.add(earlier, earlier=True)
        view.add(record)
        trackers.follow(folder / METRICS)
        if not progress.on_terminal:
            progress.say(view.line())
        if record["step"] == 1:
            say_start(config, folder)
        refresher.step_done()

    def on_phase(phase: str) -> None:
        view.enter(phase)
        if not progress.on_terminal and (words := view.starting()):
            progress.say(words)

    if not progress.on_terminal:  # on one, the view says so
        model, where = shown(config.model), shown(str(folder))
        progress.say(f"Training {model} with {config.algorithm}, seed {config.seed}, into {where}")
    try:
        with (
            _interruptible(progress, view),
            progress.view(view.lines),
            tracking.of(folder, asdict(config), progress.say) as trackers,
        ):
            done = train(
                config,
                folder,
                on_step,
                resume=resume,
                stop=lambda: view.stopping,
                say=progress.say,
                on_phase=on_phase,
                world=world,
                framework=tracking.framework,
            )
    except KeyboardInterrupt:
        progress.say(
            "Stopped at once. The same command with --resume continues from the last checkpoint, "
            "if there is one."
        )
        raise
    if progress.on_terminal and view.records:
        progress.say(view.result(progress.width))  # the view is gone
    elif done:
        progress.say(
            f"Wrote {folder}/metrics.jsonl, checkpoints/, model/"
            + " and traces/" * bool(config.trace_every)
        )
    return done


def _say_start(
    expected: Resemblance,
    preset: str,
    progress: TerminalProgress,
    config: TrainConfig,
    folder: Path,
) -> None:
    """Say whether a run begins like the one that its preset repeats, if it repeats one."""
    from mismatch_cli.train.resemblance import start_of

    if not expected.values:
        return
    line = start_of(folder / METRICS)
    if sentence := expected.in_words(line, changed_from(preset, config)):
        progress.say(sentence)


def _steps_before(folder: Path, step: int) -> list[dict[str, Any]]:
    """The recorded steps of the run that is resumed."""
    lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if 0 < record["step"] < step]


@contextmanager
def _interruptible(progress: TerminalProgress, view: TrainingView) -> Iterator[None]:
    """Let the first Ctrl-C ask the loop to finish its step and save; a second one stops at once."""
    from mismatch_cli.train.live import STOPPING

    def stop() -> None:
        view.stopping = True
        if not progress.on_terminal:
            progress.say(STOPPING)

    with _once(stop):
        yield


@contextmanager
def _once(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first Ctrl-C; a second one ends the program."""
    stopping = False

    def on_signal(*_: Any) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True
        stop()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
