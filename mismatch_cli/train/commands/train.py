"""`mismatch-cli train`: the sanity test with any algorithm, real rollouts, and every step
recorded.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mismatch_cli.app.common import DRAWING, KEY, Common
from mismatch_cli.app.completions import algorithms
from mismatch_cli.app.flags import flags
from mismatch_cli.app.progress import TerminalProgress
from mismatch_cli.app.rank_flags import RankSettings
from mismatch_cli.app.shared_settings import FrameworkSettings, PageSettings
from mismatch_cli.base.errors import MismatchError, UsageError, quoted
from mismatch_cli.base.options import (
    override,
    replace_settings,
    setting,
    settings_group,
    values_by_key,
)
from mismatch_cli.base.places import bundled, shorten_paths
from mismatch_cli.base.values import Values
from mismatch_cli.processes.ranks import World
from mismatch_cli.processes.ranks.joined import joined, launched, number_of_ranks, restarted
from mismatch_cli.trace.training_folder import METRICS
from mismatch_cli.train.tracking import Tracking, TrackSettings
from mismatch_cli.train.train_config import (
    FILE_NAME,
    TrainConfig,
    changed_from,
    parsed,
    preset_values,
    presets,
    shown_defaults,
)

if TYPE_CHECKING:
    from mismatch_cli.app.refresher import Refresher
    from mismatch_cli.train.live import TrainingView
    from mismatch_cli.train.resemblance import Resemblance

PANEL, PLACE = "Train", 2

_PRESET = "miniature"
_SayStart = Callable[[TrainConfig, Path], None]  # after the first step of a run
_FOLDER = override(
    help="Run folder.",
    show_default="train-PRESET",
)


@dataclass(frozen=True, kw_only=True)
class RunsSettings:
    """How many runs there are, and what they have in common."""

    preset: str = setting(
        _PRESET,
        "Defaults of all settings: miniature, paper, dense-base and others, which `guide train` "
        "lists, or a file.",
        metavar="NAME|FILE.toml",
        completes=presets,
    )
    seeds: int = setting(1, "Runs per algorithm, a seed each.", least=1)
    show_config: bool = setting(
        False, "Check the settings, print them all as TOML with their sources, and stop."
    )


@flags(
    TrainConfig,
    shown=shown_defaults(_PRESET),
    algorithm=override(repeatable=True, short="-a", completes=algorithms),
)
def command(
    context: typer.Context,
    values: Values,
    *,
    runs: RunsSettings = settings_group(RunsSettings),
    shared: RankSettings = settings_group(RankSettings, "nproc", "max_restarts"),
    named: FrameworkSettings = settings_group(FrameworkSettings),
    tracked: TrackSettings = settings_group(
        TrackSettings, project=override(flag=False), name=override(flag=False)
    ),
    page: PageSettings = settings_group(PageSettings, report_every=override(flag=False)),
    common: Common = settings_group(
        Common,
        "trust_remote_code",
        "output",
        "resume",
        *DRAWING,
        "full",
        "quiet",
        "debug",
        output=_FOLDER,
        plots=KEY,
        plot_width=KEY,
        debug=KEY,
    ),
) -> None:
    """Train on a small set of problems to full accuracy, with any algorithm, and record what its
    trust region does.

    The defaults below are those of the preset miniature; --preset paper --show-config prints those
    of paper.

    Examples:
      mismatch-cli train
      mismatch-cli train -a dppo-binary-tv -a pg-is -a grpo-clip-higher --seeds 3
      mismatch-cli train --model ./checkpoint --dataset problems.jsonl --steps 200
      mismatch-cli train --preset paper --nproc 8
      mismatch-cli train --track trackio --as verl
    """
    from mismatch_cli.base.extras import require
    from mismatch_cli.train.resemblance import Resemblance
    from mismatch_cli.train.task import check_ranks, check_runs

    expected = Resemblance.of(runs.preset)
    specs = common.meant(values.get("algorithm"))
    of_first = Values.of({"algorithm": specs[0]} if specs else {})
    resolved = preset_values(runs.preset, of_first.over(values.without("algorithm")))
    first = resolved.build(TrainConfig)
    configs = [
        replace_settings(first, algorithm=spec, seed=first.sampler.seed + number)
        for spec in specs or [first.algorithm]
        for number in range(runs.seeds)
    ]
    tracking = Tracking.asked(tracked, named.name, several=len(configs) > 1)
    output, resume = common.output or Path(f"train-{Path(runs.preset).stem}"), common.resume
    if not runs.show_config:
        check_ranks(first, number_of_ranks(shared.nproc))
        _say_whose_rate(first, runs.preset, values, common)
    folders = _run_folders(configs, output)  # report equal names before problems in the files
    check_runs(configs)
    if runs.show_config:
        print(_with_sources(configs[0], resolved), end="")
        _say_right_ranks(first, number_of_ranks(shared.nproc), common)
        return
    require(first.engine.name, f"--engine {first.engine.name}")
    require("hf", "`train`")
    # Check here too: restarted ranks continue with existing files
    if not launched() and (shared.nproc > 1 or shared.max_restarts):
        with _held(configs, folders, output, resume):
            pass
    shared.launch(context, _KEPT)
    resume = resume or restarted()
    with joined(_KEPT) as world, ExitStack() as held:  # until after the last run
        if not world.first:
            for config, folder in zip(configs, folders, strict=True):
                _follow(config, folder, resume, world)
            return
        held.enter_context(_held(configs, folders, output, resume))
        say_start = partial(_say_start, expected, runs.preset, common.progress)
        every = page.report_every
        _train(folders, configs, output, resume, every, common, world, tracking, say_start)


def _with_sources(config: TrainConfig, values: Values) -> str:
    """The settings of a run as its file has them, each with what set it, unless that is the default
    of all presets.
    """
    lines = []
    for line in config.to_toml().splitlines():
        place = values.source(line.partition(" = ")[0])
        if place is not None:
            line += f"  # {place or 'typed'}"
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


_KEPT = (
    "Every finished step is recorded: the same command with --resume continues from the newest "
    "checkpoint, and max_restarts = N does so automatically."
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
        for config, folder in zip(configs, folders, strict=True):
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
    algorithm = Path(config.algorithm).name.replace(":", "-").replace(",", "-")
    return f"{algorithm}-seed-{config.sampler.seed}"


def _say_whose_rate(config: TrainConfig, preset: str, values: Values, common: Common) -> None:
    chosen = preset != _PRESET or "learning_rate" in values
    if not chosen and Path(config.engine.model).resolve() != bundled("model").resolve():
        common.progress.say(
            "The learning rate of the preset miniature, "
            f"{config.optimiser.learning_rate:g}, was chosen for the bundled model. For another "
            "model, set --learning-rate or use --preset paper."
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
            for earlier in steps_before(folder, record["step"]):
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
        model, where = shorten_paths(config.engine.model), shorten_paths(str(folder))
        progress.say(
            f"Training {model} with {config.algorithm}, seed {config.sampler.seed}, into {where}"
        )
    try:
        with (
            _interruptible(progress, view),
            progress.view(view.lines),
            tracking.of(folder, values_by_key(config), progress.say) as trackers,
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


def steps_before(folder: Path, step: int) -> list[dict[str, Any]]:
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
