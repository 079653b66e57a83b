"""`mismatch-cli curate`: the problems that a model solves only sometimes, for the sanity test."""

import sys
from pathlib import Path

from mismatch_cli.app.common import Common, recording
from mismatch_cli.app.flags import flags
from mismatch_cli.base.errors import suggest
from mismatch_cli.base.options import override
from mismatch_cli.base.places import bundled
from mismatch_cli.base.values import PREFIX, Values
from mismatch_cli.probe.config import CurateConfig
from mismatch_cli.probe.settings import TaskSettings

PANEL, PLACE = "Train", 1
_FOLDER = override(
    help="Run folder, with perfectible.jsonl.",
    show_default="curate-MODEL",
)


@flags(CurateConfig)
def command(
    values: Values,
    *,
    common: Common = recording("", output=_FOLDER),
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

    prepared = prepared_run(values, common, CurateConfig, "curate")
    with prepared as (config, work, manifest):
        from mismatch_cli.base.places import shorten_paths
        from mismatch_cli.probe.curate import PROBLEMS_FILE, curate
        from mismatch_cli.studies.curation import CurationAnalysis
        from mismatch_cli.trace.recording_folder import put_in_place

        confirm = config.choice.confirm
        curation = curate(config, work, manifest, common.progress, confirm=confirm)
        folder = put_in_place(work)
        problems = folder / PROBLEMS_FILE
        training = reward_variables(config) + suggest(*training_flags(config, problems))
        study = CurationAnalysis(
            curation,
            shorten_paths(config.to_json()),
            confirm,
            tuple(shorten_paths(sys.argv[1:])),
            training,
        )
        common.show(study, folder)
    common.progress.say(f"Wrote {problems}")


def reward_variables(config: CurateConfig) -> str:
    """Variables to type before the command that trains, for settings that have no flag there and
    are not the usual ones.
    """
    task = config.task
    usual = TaskSettings()
    variables = ""
    if task.grader and task.grader != usual.grader:
        variables += f"{PREFIX}TRAIN_GRADER={task.grader} "
    if task.answer_format and task.answer_format != usual.answer_format:
        variables += f"{PREFIX}TRAIN_ANSWER_FORMAT={task.answer_format} "
    if task.seconds:
        variables += f"{PREFIX}TRAIN_REWARD_SECONDS={task.seconds} "
    return variables


def training_flags(config: CurateConfig, problems: Path) -> list[str | Path]:
    """The command that trains on the problems as they were measured."""
    sampler = config.sampler
    task = config.task
    command: list[str | Path] = ["train", "--dataset", problems]
    command += ["--max-tokens", str(sampler.max_tokens)]
    # The default preset, with its high learning rate, suits only the bundled model.
    if Path(config.engine.model).resolve() != bundled("model").resolve():
        command += ["--model", config.engine.model, "--learning-rate", "1e-6"]
    if sampler.temperature != 1:
        command += ["--temperature", str(sampler.temperature)]
    if task.template != TaskSettings().template:
        command += ["--prompt-template", task.template]
    if task.reward:
        command += ["--reward", task.reward]
    return command
