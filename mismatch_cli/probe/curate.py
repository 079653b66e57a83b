"""The perfectible set of a model: problems that it solves sometimes, with their accuracy on
held-out samples.
"""

import json
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.options import replace_settings
from mismatch_cli.metrics.population import Curation, accuracy_by_prompt
from mismatch_cli.models.loading import load_tokenizer
from mismatch_cli.models.torch_settings import prepare_imports, set_threads
from mismatch_cli.probe.config import CurateConfig
from mismatch_cli.probe.rollouts import (
    RecordingProgress,
    describe_prompts,
    digest_of,
    is_sampled,
    loaded_sampler,
)
from mismatch_cli.probe.tasks.answers import without_answer
from mismatch_cli.probe.tasks.grading import gradable
from mismatch_cli.probe.tasks.prompts import EncodedPrompts, Problem, encode_prompts, load_problems
from mismatch_cli.trace.files import write_atomically
from mismatch_cli.trace.manifest import FILE_NAME, library_versions, read_manifest, write_manifest
from mismatch_cli.trace.ownership import remove_trace
from mismatch_cli.trace.reader import Trace

PROBLEMS_FILE = "perfectible.jsonl"
_CHOOSING, _HELD_OUT = "trace", "held-out"
_OF_TRACE = ("prompts", "shards", "shard_rows")  # entries of a manifest


def curate(
    config: CurateConfig,
    run_folder: Path,
    manifest: dict[str, Any],
    progress: RecordingProgress,
    *,
    confirm: bool = False,
) -> Curation:
    """Sample every problem, keep those in the band, sample these again, and write them as
    `perfectible.jsonl`.

    Two traces result: `trace` decides what is kept, `held-out` does not; existing shards are not
    sampled again. With `confirm` the file leaves out problems that the held-out samples put outside
    the band. The caller holds the folder. Raises a `MismatchError` if nothing is kept.
    """
    prepare_imports()
    threads = set_threads(config.cpu.threads, config.engine.model)
    manifest = manifest | {
        "config": config.to_json(),
        "threads": threads,
        "libraries": library_versions(),
    }
    tokenizer = load_tokenizer(config.engine.model)
    problems = gradable(
        load_problems(config.prompt_source), config.task.reward, config.problems.source
    )
    if _is_sampled(config, run_folder, manifest):
        context = manifest["rollout"]["max_model_len"]
        encoded = encode_prompts(
            problems, tokenizer, template=config.task.template, max_model_len=context
        )
        # Nothing is sampled, so nothing else would notice that the prompts have changed.
        describe_prompts(config, encoded, manifest)
        write_manifest(run_folder / _CHOOSING, manifest)
    else:
        _sample(config, run_folder, problems, tokenizer, manifest, progress)
    held_out = accuracy_by_prompt(Trace.open(run_folder / _HELD_OUT))
    curation = replace(_choose(config, run_folder), held_out=held_out)
    _write_problems(run_folder / PROBLEMS_FILE, problems, curation, confirm=confirm)
    return curation


def _is_sampled(config: CurateConfig, run_folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether no engine is needed: both traces are complete, and the second has the problems
    that the first chooses.
    """
    if "shards" not in manifest:
        return False
    for folder in (run_folder / _CHOOSING, run_folder / _HELD_OUT):
        if not (folder / FILE_NAME).is_file() or not is_sampled(folder, read_manifest(folder)):
            return False
    held_out = accuracy_by_prompt(Trace.open(run_folder / _HELD_OUT))
    return held_out.keys() == set(_choose(config, run_folder).kept)


def _sample(
    config: CurateConfig,
    run_folder: Path,
    problems: list[Problem],
    tokenizer: Any,
    manifest: dict[str, Any],
    progress: RecordingProgress,
) -> None:
    """Sample what the two traces lack; if the kept problems have changed, the old held-out
    samples are removed.
    """
    with loaded_sampler(
        config, run_folder, problems, tokenizer, progress, fresh="shards" not in manifest
    ) as sampler:
        sampler.sample(config, run_folder / _CHOOSING, manifest)
        chosen = _only(sampler.encoded, set(_choose(config, run_folder).kept))
        folder = run_folder / _HELD_OUT
        before = read_manifest(folder) if (folder / FILE_NAME).is_file() else {}
        if before.get("prompts", {}).get("digest") != digest_of(chosen):
            remove_trace(folder)
        # The held-out trace has prompts and shards of its own.
        manifest = {name: value for name, value in manifest.items() if name not in _OF_TRACE}
        held_out = replace_settings(config, samples_per_prompt=config.choice.held_out_samples)
        # Samples that chose a problem flatter it: the new ones have later numbers, so other seeds.
        first_sample = config.sampler.samples_per_prompt
        replace(sampler, encoded=chosen).sample(
            held_out, folder, manifest, phase="Held out", first_sample=first_sample
        )


def _choose(config: CurateConfig, run_folder: Path) -> Curation:
    """What the first trace chooses; a `MismatchError` if that is nothing."""
    trace = Trace.open(run_folder / _CHOOSING)
    accuracy = {id_: share for id_, share in accuracy_by_prompt(trace).items() if not isnan(share)}
    unstated = trace.count("unstated")
    curation = Curation(
        keep=config.choice.keep,
        samples=config.sampler.samples_per_prompt,
        held_out_samples=config.choice.held_out_samples,
        accuracy=accuracy,
        held_out={},
        unstated=unstated,
    )
    if not curation.kept:
        low, high = config.choice.keep
        if 2 * unstated > trace.num_responses:
            raise MismatchError(without_answer(unstated, trace.num_responses))
        raise MismatchError(
            f"None of the {len(accuracy)} problems has an accuracy between {low:g} and {high:g}; "
            f"the mean is {sum(accuracy.values()) / len(accuracy):.3f}. Widen --keep, or use "
            "other problems."
        )
    return curation


def _only(encoded: EncodedPrompts, rows: set[int]) -> EncodedPrompts:
    """The encoded prompts of these problems, by their rows in the source."""
    problems: list[Problem] = []
    prompt_ids: list[list[int]] = []
    for problem, ids in zip(encoded.problems, encoded.prompt_ids, strict=True):
        if problem.prompt_id in rows:
            problems.append(problem)
            prompt_ids.append(ids)
    return replace(encoded, problems=problems, prompt_ids=prompt_ids, skipped=[])


def _write_problems(
    path: Path, problems: list[Problem], curation: Curation, *, confirm: bool
) -> None:
    """One problem a line, in the order of the source, as `train --dataset` reads it."""
    chosen = set(curation.confirmed if confirm else curation.kept)
    lines: list[str] = []
    for problem in problems:
        if problem.prompt_id not in chosen:
            continue
        row = {
            "problem": problem.prompt,
            "answer": problem.answer,
            "row": problem.prompt_id,
            "accuracy": curation.accuracy[problem.prompt_id],
            "held_out_accuracy": curation.held_out[problem.prompt_id],
        }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_atomically(path, "".join(lines))
