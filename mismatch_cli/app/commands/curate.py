"""`mismatch-cli curate`: the problems that a model solves only sometimes, for the sanity test."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from mismatch_cli.app.common import Recording
from mismatch_cli.base.errors import suggest
from mismatch_cli.base.options import flags, saying, setting
from mismatch_cli.base.places import bundled
from mismatch_cli.probe.config import CurateConfig
from mismatch_cli.probe.tasks.answers import VERL_RULE

PANEL, PLACE = "Train", 1


@flags(CurateConfig)
def command(
    context: typer.Context,
    *,
    confirm: bool = setting(
        False, "Drop problems whose held-out accuracy is outside the range.", panel="Choice"
    ),
    common: Annotated[
        Recording,
        saying(
            "output",
            help=(
                "Run folder: perfectible.jsonl, trace/, held-out/, summary.json, report.html, "
                "plots/ and log/."
            ),
            show_default="curate-MODEL",
        ),
    ],
) -> None:
    """Find the problems that a model solves only sometimes: on these, a sound algorithm must reach
    full accuracy.

    It samples every problem, keeps those whose accuracy is within --keep, and measures these again
    on held-out samples: an accuracy near an end of the range is partly luck, and regresses to the
    mean.

    Examples:
      mismatch-cli curate --num-prompts 64
      mismatch-cli curate Qwen/Qwen2.5-Math-1.5B --prompts math.jsonl --max-tokens 3000
      mismatch-cli train --dataset curate-model/perfectible.jsonl
    """
    from mismatch_cli.app.prepared import prepared_run

    with prepared_run(context, common, CurateConfig) as (config, work, manifest):
        from mismatch_cli.base.places import shown
        from mismatch_cli.probe.curate import PROBLEMS_FILE, curate
        from mismatch_cli.studies.curation import CurationAnalysis
        from mismatch_cli.trace.work import put_in_place

        curation = curate(config, work, manifest, common.progress, confirm=confirm)
        folder = put_in_place(work)
        chosen = folder / PROBLEMS_FILE
        training = _variables(config) + suggest(*_training(config, chosen))
        study = CurationAnalysis(
            curation, shown(config.to_json()), confirm, tuple(shown(sys.argv[1:])), training
        )
        common.show(study, folder)
    common.progress.say(f"Wrote {chosen}")


def _variables(config: CurateConfig) -> str:
    """The variables before that command: the grader has no flag."""
    return "" if config.grader == VERL_RULE else f"MISMATCH_TRAIN_GRADER={config.grader} "


def _training(config: CurateConfig, problems: Path) -> list[str | Path]:
    """The command that trains on them as they were measured; the default preset suits only the
    bundled model.
    """
    command: list[str | Path] = [
        "train",
        "--dataset",
        problems,
        "--max-tokens",
        str(config.max_tokens),
    ]
    if Path(config.model).resolve() != bundled("model").resolve():
        command += ["--model", config.model, "--learning-rate", "1e-6"]
    if config.temperature != 1:
        command += ["--temperature", str(config.temperature)]
    usual = {"prompt_template": "chat", "answer_format": "auto", "reward": "", "reward_seconds": 0}
    for name, value in usual.items():
        if (own := getattr(config, name)) != value:
            command += [f"--{name.replace('_', '-')}", str(own)]
    return command
