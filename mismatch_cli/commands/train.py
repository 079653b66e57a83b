"""`mismatch-cli train`: the sanity test with any algorithm, real rollouts, and every step on record."""

from __future__ import annotations

import inspect
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from mismatch_cli.commands._options import Debug, Quiet
from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.rl.config import FILE_NAME, TrainConfig, load_config, presets, settings

_OWN = ("algorithm", "seed")  # flags with more to say than their setting
_LEFT_BY_A_FAILED_START = {FILE_NAME, "log"}


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
    from mismatch_cli.commands._present import present_training
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
    progress = TerminalProgress(quiet)
    folders = [folder if len(configs) == 1 else folder / _run_name(config) for config in configs]
    for config, run_folder in zip(configs, folders, strict=True):
        _prepare(run_folder, config, resume)
        _run(config, run_folder, resume, progress)
    present_training(folders, folder, as_json=False, progress=progress)


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


def _run(config: TrainConfig, run_folder: Path, resume: bool, progress: Any) -> None:
    from mismatch_cli.compat import prepare_imports

    prepare_imports()
    from mismatch_cli.rl.loop import train

    asked = _Interrupt()
    progress.say(f"Training {config.model} with {config.algorithm}, seed {config.seed}, into {run_folder}")
    try:
        done = train(
            config, run_folder, lambda record: progress.say(_line(record, config.steps)), resume=resume, stop=asked
        )
    finally:
        asked.restore()
    if not done:
        progress.say(f"Stopped and saved. Go on with the same command and: --resume --output {run_folder}")
        raise KeyboardInterrupt
    progress.say(f"Wrote {run_folder}/metrics.jsonl, checkpoints/, model/" + " and traces/" * bool(config.trace_every))


class _Interrupt:
    """The first Ctrl-C asks the loop to finish its step and save; a second one stops at once."""

    def __init__(self) -> None:
        self._asked = False
        self._before = signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, *_: Any) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def __call__(self) -> bool:
        return self._asked

    def restore(self) -> None:
        signal.signal(signal.SIGINT, self._before)


def _line(record: dict[str, Any], steps: int) -> str:
    """A step in one line: reward, mismatch, what was blocked, bad updates, time."""
    parts = [f"step {record['step']}/{steps}", f"reward {record['reward']:.3f}"]
    if record.get("eval_accuracy") is not None:
        parts.append(f"accuracy {record['eval_accuracy']:.3f}")
    for name, value in (
        ("|π−μ|", record["mismatch"].get("abs_dp_mean")),
        ("blocked", record.get("blocked")),
        ("bad", record.get("bad_over_negative")),
    ):
        if value is not None:
            parts.append(f"{name} {value:.2g}")
    seconds = sum(record["seconds"].values())
    left = (steps - record["step"]) * seconds
    return "  ".join([*parts, f"{seconds:.1f} s", f"{left / 60:.0f} min left"])


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
