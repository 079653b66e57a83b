"""`mismatch-cli train`: the sanity test with any algorithm, real rollouts, and every step on record."""

from __future__ import annotations

import inspect
import json
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mismatch_cli.commands._live import STOPPING, TrainingView
from mismatch_cli.commands._options import Debug, Quiet
from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.rl.config import FILE_NAME, TrainConfig, load_config, presets, settings

if TYPE_CHECKING:
    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.commands._refresh import Refresher

_OWN = ("algorithm", "seed")  # flags with more to say than their setting
_LEFT_BY_A_FAILED_START = {FILE_NAME, "log", ".lock"}


def _train(
    algorithm: Annotated[
        list[str] | None,
        typer.Option("--algorithm", "-a", help=f"{settings()['algorithm'][1]} Repeatable.", show_default=False),
    ] = None,
    preset: Annotated[str, typer.Option("--preset", help=f"{', '.join(presets())}, or a TOML file.")] = "miniature",
    seed: Annotated[int | None, typer.Option("--seed", help=settings()["seed"][1], show_default="0")] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each algorithm, with seeds counting up.")] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the runs.", show_default="train-PRESET")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the runs in --output from their checkpoints.")
    ] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the resolved settings as TOML and stop.")
    ] = False,
    report_every: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="Least time between two drawings of report.html; 0: at the end only."
        ),
    ] = 60,
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

    changes = {name: value for name, value in chosen.items() if value is not None}
    first = load_config(preset, changes | ({} if seed is None else {"seed": seed}))
    names = algorithm or [first.algorithm]
    configs = [
        load_config(preset, changes | {"algorithm": name, "seed": first.seed + number})
        for name in names
        for number in range(seeds)
    ]
    if show_config:
        print(configs[0].to_toml(), end="")
        return
    folder = output or Path(f"train-{Path(preset).stem}")
    _train_each(configs, folder, resume, report_every, TerminalProgress(quiet))


def _train_each(
    configs: Sequence[TrainConfig], output: Path, resume: bool, report_every: float, progress: TerminalProgress
) -> None:
    """Train one after the other, and report on what there is, also where the user stopped."""
    from mismatch_cli.commands._present import present_training
    from mismatch_cli.commands._refresh import Refresher
    from mismatch_cli.recording.folder import locked

    folders = [output if len(configs) == 1 else output / _run_name(config) for config in configs]
    for config, folder in zip(configs, folders, strict=True):
        _prepare(folder, config, resume)
    refresher = Refresher(folders, output, report_every, progress.say)
    try:
        for number, (config, folder) in enumerate(zip(configs, folders, strict=True), start=1):
            view = TrainingView(config, number, len(configs))
            with locked(folder):
                done = _run(config, folder, resume, view, refresher, progress)
            if view.stopping:
                break
    finally:
        refresher.stop()
    present_training(folders[:number], output, as_json=False, progress=progress)
    if not done or number < len(folders):
        where = shlex.quote(str(output))
        progress.say(f"Stopped and saved. Go on with the same command and: --resume --output {where}")
        raise KeyboardInterrupt


def _run_name(config: TrainConfig) -> str:
    return f"{Path(config.algorithm).name.replace(':', '-').replace(',', '-')}-seed-{config.seed}"


def _prepare(run_folder: Path, config: TrainConfig, resume: bool) -> None:
    """Never write over a run; a resumed one must be the same run."""
    saved = run_folder / FILE_NAME
    in_it = {path.name for path in run_folder.iterdir()} if run_folder.exists() else set()
    if not resume and in_it - _LEFT_BY_A_FAILED_START:
        raise MismatchError(f"{run_folder} already exists. Go on with --resume, or choose another --output.")
    if resume and saved.is_file() and saved.read_text(encoding="utf-8") != config.to_toml():
        raise UsageError(f"{saved} has other settings. Resume with the flags of that run, or choose another --output.")


def _run(
    config: TrainConfig,
    folder: Path,
    resume: bool,
    view: TrainingView,
    refresher: Refresher,
    progress: TerminalProgress,
) -> bool:
    """Train one run in view of the user; answers whether all steps are done."""
    from mismatch_cli.compat import prepare_imports

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


def _with_every_setting(function: Any) -> Any:
    """Give the command a flag for each setting, in the order of the configuration."""
    signature = inspect.signature(function, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    for name, (default, help_text) in settings().items():
        if name not in _OWN:
            option = typer.Option(
                f"--{name.replace('_', '-')}", help=help_text, show_default=False, rich_help_panel="Settings"
            )
            kind = type(default) | None
            parameters.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
                )
            )
    function.__signature__ = signature.replace(parameters=parameters)
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


command = _with_every_setting(_train)
