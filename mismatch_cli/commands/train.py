"""`mismatch-cli train`: the sanity test with any algorithm, real rollouts, and every step on record."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mismatch_cli import custom_code
from mismatch_cli.commands._common_flags import Debug, Quiet, TrustRemoteCode
from mismatch_cli.commands._live import STOPPING, TrainingView
from mismatch_cli.commands._train_folders import held_folders, run_folders
from mismatch_cli.errors import MismatchError, quoted
from mismatch_cli.options import flags
from mismatch_cli.places import bundled
from mismatch_cli.rl.config import TrainConfig, load_config, presets

if TYPE_CHECKING:
    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.commands._refresh import Refresher

# Flags with more to say than their setting.
_OWN = {known.name: known.metadata["help"] for known in fields(TrainConfig) if known.name in ("algorithm", "seed")}


@flags(TrainConfig, without=tuple(_OWN), show_default=False, rich_help_panel="Settings")
def command(
    algorithm: Annotated[
        list[str] | None,
        typer.Option("--algorithm", "-a", help=f"{_OWN['algorithm']} Repeatable.", show_default=False),
    ] = None,
    preset: Annotated[str, typer.Option("--preset", help=f"{', '.join(presets())}, or a TOML file.")] = "miniature",
    seed: Annotated[int | None, typer.Option("--seed", help=_OWN["seed"], show_default="0")] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each algorithm, with seeds counting up.")] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the runs.", show_default="train-PRESET")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the runs in --output from their checkpoints.")
    ] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Check the settings, print them resolved as TOML, and stop.")
    ] = False,
    report_every: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="Least time between two drawings of report.html; 0: at the end only."
        ),
    ] = 60,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **chosen: Any,
) -> None:
    """Train a small set of problems towards full accuracy, with any algorithm, and record what its trust region does.

    Examples:

      mismatch-cli train

      mismatch-cli train -a dppo-binary-tv -a pg-is -a grpo-clip-higher --seeds 3

      mismatch-cli train --model ./checkpoint --dataset problems.jsonl --steps 200

    Every setting of a preset is a flag too.
    """
    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.rl.task import check_runs

    custom_code.allow(trust_remote_code)
    changes = {name: value for name, value in chosen.items() if value is not None}
    first = load_config(preset, changes | ({} if seed is None else {"seed": seed}))
    configs = [
        load_config(preset, changes | {"algorithm": name, "seed": first.seed + number})
        for name in algorithm or [first.algorithm]
        for number in range(seeds)
    ]
    folder, progress = output or Path(f"train-{Path(preset).stem}"), TerminalProgress(quiet)
    if not show_config:
        _say_whose_rate(first, preset, changes, progress)
    run_folders(configs, folder)  # names that are the same are told before what is in the files
    check_runs(configs)
    if show_config:
        print(configs[0].to_toml(), end="")
        return
    _train_each(configs, folder, resume, report_every, progress)


def _say_whose_rate(config: TrainConfig, preset: str, changes: dict[str, Any], progress: TerminalProgress) -> None:
    chosen = preset != "miniature" or "learning_rate" in changes
    if not chosen and Path(config.model).resolve() != bundled("model").resolve():
        progress.say(
            f"The learning rate of the preset miniature, {config.learning_rate:g}, was chosen for the bundled model: "
            "for another one see --learning-rate and --preset paper."
        )


def _train_each(
    configs: Sequence[TrainConfig], output: Path, resume: bool, report_every: float, progress: TerminalProgress
) -> None:
    """Hold the folder of every run from before the first to after the last, and train in them."""
    with held_folders(configs, output, resume) as folders:
        _train_in(folders, configs, output, resume, report_every, progress)


def _train_in(
    folders: Sequence[Path],
    configs: Sequence[TrainConfig],
    output: Path,
    resume: bool,
    report_every: float,
    progress: TerminalProgress,
) -> None:
    """Train one after the other, and report on what there is, also where a run failed or the user stopped."""
    from mismatch_cli.commands._refresh import Refresher

    refresher = Refresher(folders, output, report_every, progress.say)
    begun: list[Path] = []
    failed: list[str] = []
    stopped = False
    try:
        for number, (config, folder) in enumerate(zip(configs, folders, strict=True), start=1):
            view = TrainingView(config, number, len(configs))
            try:
                begun.append(folder)
                stopped = not _run(config, folder, resume, view, refresher, progress)
            except MismatchError as error:
                if len(configs) == 1:
                    raise
                failed.append(folder.name)
                progress.say(f"{folder.name} failed: {error}")
            if view.stopping:
                stopped = stopped or number < len(configs)
                break
    except BaseException:
        refresher.stop()
        with suppress(MismatchError):  # what ended the runs is to be told, not that the disk has no room for a report
            _report(begun, output, progress)
        raise
    refresher.stop()
    _report(begun, output, progress)
    if stopped:
        progress.say(f"Stopped and saved. Go on with the same command and: {quoted('--resume', '--output', output)}")
        raise KeyboardInterrupt
    if failed:
        raise MismatchError(
            f"{len(failed)} of {len(configs)} runs failed, for the reasons above: {', '.join(failed)}. The same "
            "command with --resume tries them again from their last checkpoints."
        )


def _report(folders: Sequence[Path], output: Path, progress: TerminalProgress) -> None:
    """The final report of those runs that have a step."""
    from mismatch_cli.commands._show import show
    from mismatch_cli.studies.runs import read_runs
    from mismatch_cli.studies.training import TrainingAnalysis

    with_steps = [folder for folder in folders if _has_step(folder)]
    if with_steps:
        show(TrainingAnalysis.of(read_runs(with_steps)), output, as_json=False, progress=progress)


def _has_step(folder: Path) -> bool:
    """Whether a step can be read; of a run that has failed anything may be there."""
    from mismatch_cli.studies.runs import read_runs

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
) -> bool:
    """Train one run in view of the user; answers whether all steps are done."""
    from mismatch_cli.torch_settings import prepare_imports

    prepare_imports()
    from mismatch_cli.rl.loop import train

    def on_step(record: dict[str, Any]) -> None:
        if resume and not view.records:
            for earlier in _steps_before(folder, record["step"]):
                view.add(earlier, earlier=True)
        view.add(record)
        if not progress.on_terminal:
            progress.say(view.line())
        refresher.step_done()

    progress.say(f"Training {config.model} with {config.algorithm}, seed {config.seed}, into {folder}")
    try:
        with _Interrupt(progress, view) as asked, progress.view(view.lines):
            done = train(config, folder, on_step, resume=resume, stop=asked, say=progress.say)
    except KeyboardInterrupt:
        progress.say(
            "Stopped at once. The same command with --resume goes on from the last checkpoint, if there is one."
        )
        raise
    if progress.on_terminal and view.records:
        progress.say(view.line())  # the view is gone
    if done:
        progress.say(f"Wrote {folder}/metrics.jsonl, checkpoints/, model/" + " and traces/" * bool(config.trace_every))
    return done


def _steps_before(folder: Path, step: int) -> list[dict[str, Any]]:
    """What the run that is resumed has on record."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if 0 < record["step"] < step]


class _Interrupt:
    """The first Ctrl-C asks the loop to finish its step and save; a second one stops at once."""

    def __init__(self, progress: TerminalProgress, view: TrainingView) -> None:
        self._progress, self._view = progress, view

    def __enter__(self) -> _Interrupt:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, self._before)

    def __call__(self) -> bool:
        return self._view.stopping

    def _on_signal(self, *_: Any) -> None:
        if self._view.stopping:
            raise KeyboardInterrupt
        self._view.stopping = True
        if not self._progress.on_terminal:
            self._progress.say(STOPPING)
