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
from mismatch_cli.train.tracking import Trackers, Tracking, TrackSettings
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
        "Defaults of all settings: miniature, paper, dense-base, … (`guide train`), or a file.",
        metavar="NAME|FILE.toml",
        completes=presets,
    )
    seeds: int = setting(1, "Runs per algorithm, a seed each.", least=1)
    show_config: bool = setting(
        False, "Check settings, print them as TOML with their sources, and stop."
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
    configs, resolved = _configs(values, runs, common)
    first = configs[0]
    ranks = number_of_ranks(shared.nproc)
    output = common.output or Path(f"train-{Path(runs.preset).stem}")
    tracking = Tracking.of_settings(tracked, named.name, several=len(configs) > 1)
    if not runs.show_config:
        check_ranks(first, ranks)
        _say_whose_rate(first, runs.preset, values, common)
    folders = _run_folders(configs, output)  # report equal names before problems in the files
    check_runs(configs)
    if runs.show_config:
        print(_with_sources(first, resolved), end="")
        _say_right_ranks(first, ranks, common)
        return
    require(first.engine.name, f"--engine {first.engine.name}")
    require("hf", "`train`")
    # Restarted ranks continue with existing files, so a folder of another run would be taken for
    # theirs: it is refused here, before any rank starts.
    starts_ranks = shared.nproc > 1 or shared.max_restarts
    if starts_ranks and not launched():
        with _locked(configs, folders, output, common.resume):
            pass
    shared.launch(context, _RECORDED)
    session = _Session(
        output=output,
        resume=common.resume or restarted(),
        report_every=page.report_every,
        common=common,
        tracking=tracking,
        say_start=partial(_say_start, expected, runs.preset, common.progress),
    )
    with joined(_RECORDED) as world:
        if not world.first:
            for config, folder in zip(configs, folders, strict=True):
                _follow(config, folder, session.resume, world)
            return
        with _locked(configs, folders, output, session.resume):
            _train(configs, folders, session, world)


def _configs(
    values: Values, runs: RunsSettings, common: Common
) -> tuple[list[TrainConfig], Values]:
    """The configurations of all runs (each algorithm with each seed), and the values of the first
    with their sources.
    """
    algorithms = common.meant(values.get("algorithm"))
    typed = values.without("algorithm")
    if algorithms:
        typed = Values.of({"algorithm": algorithms[0]}).over(typed)
    resolved = preset_values(runs.preset, typed)
    first = resolved.build(TrainConfig)
    configs = []
    for algorithm in algorithms or [first.algorithm]:
        for number in range(runs.seeds):
            seed = first.sampler.seed + number
            configs.append(replace_settings(first, algorithm=algorithm, seed=seed))
    return configs, resolved


def _with_sources(config: TrainConfig, values: Values) -> str:
    """The settings of a run as its file has them, each with what set it, unless that is the default
    of all presets.
    """
    lines = []
    for line in config.to_toml().splitlines():
        place = values.source(line.partition(" = ")[0])
        if place is not None:
            line += f"  # {place or 'typed'}"
        lines.append(f"{line}\n")
    return "".join(lines)


_RECORDED = (
    "Every finished step is recorded: the same command with --resume continues from the newest "
    "checkpoint, and max_restarts = N does so automatically."
)


@dataclass(frozen=True, kw_only=True)
class _Session:
    """What all runs of one command share on the first rank, which prints and writes."""

    output: Path  # of the report; with several runs, their folders are in it
    resume: bool
    report_every: float  # seconds
    common: Common
    tracking: Tracking
    say_start: _SayStart

    @property
    def progress(self) -> TerminalProgress:
        return self.common.progress


@contextmanager
def _locked(
    configs: Sequence[TrainConfig], folders: Sequence[Path], output: Path, resume: bool
) -> Iterator[None]:
    """Lock the folders of these runs and of their report; a `MismatchError` for one that must
    not be overwritten.
    """
    from mismatch_cli.trace.run_folder import folder_of_runs, training_folder

    with ExitStack() as locks:
        if len(configs) > 1:
            from mismatch_cli.train.studies.training import TrainingAnalysis

            locks.enter_context(folder_of_runs(output, TrainingAnalysis.FORMAT))
        for config, folder in zip(configs, folders, strict=True):
            is_same_run = partial(_is_saved, config)
            locks.enter_context(training_folder(folder, FILE_NAME, is_same_run, resume=resume))
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

    with _at_first_interrupt(lambda: None):
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
        name = _run_name(config)
        other = by_name.setdefault(name, config)
        if other is not config:
            raise UsageError(
                f"-a {other.algorithm} and -a {config.algorithm} would both be called "
                f"{name}. Leave one out, or train it into another --output."
            )
    return [output / name for name in by_name]


def _run_name(config: TrainConfig) -> str:
    algorithm = Path(config.algorithm).name.replace(":", "-").replace(",", "-")
    return f"{algorithm}-seed-{config.sampler.seed}"


def _say_whose_rate(config: TrainConfig, preset: str, values: Values, common: Common) -> None:
    """Say where the learning rate of the preset miniature meets a model it was not chosen for."""
    if preset != _PRESET or "learning_rate" in values:
        return
    if Path(config.engine.model).resolve() != bundled("model").resolve():
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
    configs: Sequence[TrainConfig], folders: Sequence[Path], session: _Session, world: World
) -> None:
    """Train one run after another, and report on the results, even if a run failed or the user
    stopped.
    """
    from mismatch_cli.app.refresher import Refresher

    say = session.progress.say
    refresher = Refresher(
        folders, session.output, session.report_every, say, draws=not session.common.no_plots
    )
    begun: list[Path] = []
    try:
        failed, stopped = _train_all(configs, folders, session, world, refresher, begun)
    except BaseException:
        refresher.stop()
        with suppress(MismatchError):  # the first error matters, not that the report failed too
            _report(begun, session)
        raise
    refresher.stop()
    _report(begun, session)
    if stopped:
        say(
            "Stopped and saved. Continue with the same command and: "
            f"{quoted('--resume', '--output', session.output)}"
        )
        raise KeyboardInterrupt
    if failed:
        raise MismatchError(
            f"{len(failed)} of {len(configs)} runs failed for the reasons above: "
            f"{', '.join(failed)}. Type the same command with --resume to retry them from their "
            "last checkpoints."
        )


def _train_all(
    configs: Sequence[TrainConfig],
    folders: Sequence[Path],
    session: _Session,
    world: World,
    refresher: Refresher,
    begun: list[Path],
) -> tuple[list[str], bool]:
    """Train every run; return the names of those that failed, and whether the user stopped before
    the end. `begun` gets each folder as its run begins, so that it is complete after an error too.
    """
    from mismatch_cli.train.live import TrainingView

    failed: list[str] = []
    for number, (config, folder) in enumerate(zip(configs, folders, strict=True), start=1):
        begun.append(folder)
        view = TrainingView(config, number, len(configs))
        done = True
        try:
            done = _run(config, folder, session, world, view, refresher)
        except MismatchError as error:
            # A single run fails as the command; with several ranks, the others expect no next run.
            if len(configs) == 1 or world.size > 1:
                raise
            failed.append(folder.name)
            session.progress.say(f"{folder.name} failed: {error}")
        if view.stopping:
            return failed, not done or number < len(configs)
    return failed, not done


def _report(folders: Sequence[Path], session: _Session) -> None:
    """Make the final report of all runs that have a step."""
    from mismatch_cli.train.studies.runs import read_runs
    from mismatch_cli.train.studies.training import TrainingAnalysis

    with_steps = [folder for folder in folders if _has_step(folder)]
    if with_steps:
        study = TrainingAnalysis.of(read_runs(with_steps))
        session.common.show(study, session.output)


def _has_step(folder: Path) -> bool:
    """Whether a step can be read; a failed run may have left anything."""
    from mismatch_cli.train.studies.runs import read_runs

    try:
        (run,) = read_runs([folder])
    except MismatchError:
        return False
    return run.last_step > 0


def _run(
    config: TrainConfig,
    folder: Path,
    session: _Session,
    world: World,
    view: TrainingView,
    refresher: Refresher,
) -> bool:
    """Train one run and show its progress; return whether all steps are done."""
    from mismatch_cli.models.torch_settings import prepare_imports

    prepare_imports()
    from mismatch_cli.train.loop import train

    progress = session.progress
    display = _Display(config, folder, session, view, refresher)
    display.begin()
    try:
        with (
            _interruptible(progress, view),
            progress.view(view.lines),
            session.tracking.of(folder, values_by_key(config), progress.say) as trackers,
        ):
            done = train(
                config,
                folder,
                partial(display.add_step, trackers),
                resume=session.resume,
                stop=lambda: view.stopping,
                say=progress.say,
                on_phase=display.enter_phase,
                world=world,
                framework=session.tracking.framework,
            )
    except KeyboardInterrupt:
        progress.say(
            "Stopped at once. The same command with --resume continues from the last checkpoint, "
            "if there is one."
        )
        raise
    display.end(done)
    return done


class _Display:
    """What a user sees of one run: the view on a terminal; elsewhere a log, a line per step."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        session: _Session,
        view: TrainingView,
        refresher: Refresher,
    ) -> None:
        self._config = config
        self._folder = folder
        self._session = session
        self._view = view
        self._refresher = refresher
        self._progress = session.progress

    def _log(self, line: str) -> None:
        if line and not self._progress.on_terminal:
            self._progress.say(line)

    def begin(self) -> None:
        config = self._config
        model = shorten_paths(config.engine.model)
        place = shorten_paths(str(self._folder))
        self._log(
            f"Training {model} with {config.algorithm}, seed {config.sampler.seed}, into {place}"
        )

    def enter_phase(self, phase: str) -> None:
        self._view.enter(phase)
        self._log(self._view.starting())

    def add_step(self, trackers: Trackers, record: dict[str, Any]) -> None:
        """Show a step, and hand it on to the trackers and the report."""
        # The curves of a resumed run begin with its first step, not with the first one now.
        if self._session.resume and not self._view.records:
            for earlier in steps_before(self._folder, record["step"]):
                self._view.add(earlier, earlier=True)
        self._view.add(record)
        trackers.follow(self._folder / METRICS)
        self._log(self._view.line())
        if record["step"] == 1:
            self._session.say_start(self._config, self._folder)
        self._refresher.step_done()

    def end(self, done: bool) -> None:
        """Say in one line how it ended: the view has gone from the terminal."""
        progress = self._progress
        if progress.on_terminal and self._view.records:
            progress.say(self._view.result(progress.width))
        elif done:
            traces = " and traces/" if self._config.trace_every else ""
            progress.say(f"Wrote {self._folder}/metrics.jsonl, checkpoints/, model/{traces}")


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
    sentence = expected.in_words(start_of(folder / METRICS), changed_from(preset, config))
    if sentence:
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

    with _at_first_interrupt(stop):
        yield


@contextmanager
def _at_first_interrupt(stop: Callable[[], None]) -> Iterator[None]:
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
