"""`mismatch-cli rescore`: log π of a recorded trace by another model, dtype or checkpoint, into a new run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mismatch_cli.commands import _rollout_options as rollout
from mismatch_cli.commands import _trainer_options as trainer
from mismatch_cli.commands._options import Debug, Force, Json, Output, Quiet, TrustRemoteCode, Worst
from mismatch_cli.suggest import suggest

if TYPE_CHECKING:
    from mismatch_cli.recording.config import RescoreConfig

_WEIGHTS = "Weights"


def command(
    context: typer.Context,
    trace: Annotated[
        str | None,
        typer.Argument(
            help="Run folder or trace folder, only read; without one, the bundled float32 trace.", show_default=False
        ),
    ] = None,
    trainer_model: Annotated[
        str | None,
        rollout.option(
            trainer.TRAINER,
            "--trainer-model",
            help="The model that scores: a folder or a hub name; by default the trace's own.",
        ),
    ] = None,
    weights: Annotated[
        str,
        rollout.option(
            _WEIGHTS,
            "--weights",
            help="What it holds: equal, the weights that sampled; newer, a checkpoint from after them; or the version "
            "of its weights as the trace counts, such as 40.",
        ),
    ] = "equal",
    keep_trainer: Annotated[
        bool,
        rollout.option(
            _WEIGHTS,
            "--keep-trainer",
            help="Keep the trace's trainer, which has later weights, and fill in log π at the weights that sampled.",
        ),
    ] = False,
    trainer_adapter: trainer.TrainerAdapter = None,
    merge_adapter: trainer.MergeAdapter = False,
    trainer_dtype: trainer.TrainerDtype = "auto",
    attn: trainer.Attn = None,
    float32_head: trainer.Float32Head = False,
    device_map: trainer.DeviceMap = None,
    token_budget: trainer.TokenBudget = 8192,
    noise_responses: trainer.NoiseResponses = 128,
    temperature: Annotated[
        float | None,
        rollout.option(rollout.SAMPLING, "--temperature", help="As sampled; by default what the trace says."),
    ] = None,
    top_p: Annotated[float | None, rollout.option(rollout.SAMPLING, "--top-p", help="The same; 1 = off.")] = None,
    top_k: Annotated[int | None, rollout.option(rollout.SAMPLING, "--top-k", help="The same; 0 = off.")] = None,
    min_p: Annotated[float | None, rollout.option(rollout.SAMPLING, "--min-p", help="The same; 0 = off.")] = None,
    threads: rollout.Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    resume: rollout.Resume = False,
    output: Output = None,
    worst: Worst = 0,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Score the responses of a trace anew, and report the gap.

    The trace is only read; the new one goes into its own run folder. Without arguments the bundled model scores the
    bundled float32 trace in its own dtype. See docs/rescore.md.

    Examples:

      mismatch-cli rescore

      mismatch-cli rescore run --trainer-model ./model --trainer-dtype float32

      mismatch-cli rescore run --trainer-model ./checkpoint-40 --weights newer
    """
    from pathlib import Path

    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.commands._run import prepared_run, rescore_config
    from mismatch_cli.commands._show import study_mismatch
    from mismatch_cli.recording.folder import check_apart
    from mismatch_cli.recording.rescore import rescore
    from mismatch_cli.trace.reader import Trace

    def check(config: RescoreConfig, folder: Path) -> None:
        check_apart(folder, Trace.open(Path(config.trace)).run_folder)

    progress = TerminalProgress(quiet)
    with prepared_run(context, rescore_config, check) as (config, folder, manifest):
        rescore(config, folder, manifest, progress)
        study_mismatch([Trace.open(folder)], folder, worst=worst, as_json=json, progress=progress)
    progress.say(f"Next: {suggest('report', folder, '--worst', '10')}")
