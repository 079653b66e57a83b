"""The problems of a training run: which ones a step samples, how they are encoded, and who grades
the answers.

Also the checks of a run's settings, made before a model loads, a run begins or a file is written.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.numbers import things
from mismatch_cli.base.options import settings_of, values_by_key
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import check_returns_routes, engine_module
from mismatch_cli.models.loading import check_attention, check_model_folder, known_vocabulary
from mismatch_cli.models.torch_settings import check_threads
from mismatch_cli.probe.tasks.grading import Grader, gradable
from mismatch_cli.probe.tasks.prompts import (
    Problem,
    PromptSource,
    answered_differently,
    check_prompts,
    encode_prompts,
    load_problems,
)
from mismatch_cli.probe.tasks.rewards import check_reward
from mismatch_cli.probe.tasks.source_rows import is_local
from mismatch_cli.train.environment import Environments, check_environment
from mismatch_cli.train.train_config import EnvironmentSettings, TrainConfig

_EPISODES = "episodes"  # the name of the evaluation set that an environment generates


@dataclass(frozen=True)
class EncodedProblem:
    """A problem with its prompt's token ids; none if an environment makes the prompt."""

    problem: Problem
    prompt_ids: list[int]


def evaluation_sets(config: TrainConfig) -> dict[str, tuple[str, str]]:
    """The location and split of each evaluation set, by the name of its accuracy; empty for the
    training problems.

    A set is named after its file, or the last part of its name on the hub; a second one of that
    name gets a number.
    """
    listed = config.evaluation.dataset or ""
    # A file may have commas in its name.
    if Path(listed).expanduser().is_file():
        locations = [listed]
    else:
        locations = list(filter(None, map(str.strip, listed.split(","))))
    splits = list(map(str.strip, config.evaluation.split.split(",")))
    if len(splits) == 1:
        splits *= len(locations)
    if len(splits) != len(locations):
        raise UsageError(
            f"eval_split names {len(splits)} splits for {len(locations)} evaluation sets. "
            "Give one for all, or one each, separated by commas."
        )
    sets: dict[str, tuple[str, str]] = {}
    for location, split in zip(locations, splits, strict=True):
        name = plain_name = _name_of(location)
        number = 1
        while name in sets:
            number += 1
            name = f"{plain_name}-{number}"
        sets[name] = location, split
    return sets


def _name_of(location: str) -> str:
    """The name of a set: its file without the ending, or the last part of its name on the hub."""
    path = Path(location)
    return path.stem if is_local(location) else path.name


def _load(
    config: TrainConfig, location: str, split: str, limit: int | None
) -> tuple[list[Problem], int]:
    """The problems that can be graded, and the number of all."""
    source = PromptSource(
        location,
        config.problems.prompt_field,
        config.problems.answer_field,
        split,
        limit=limit,
        columns=bool(config.task.reward),
        unique=config.problems.unique,
    )
    problems = load_problems(source)
    check_prompts(problems, config.task.template)
    grader = config.task.reward or config.turns.environment
    return gradable(problems, grader, location), len(problems)


def _by_seed(first: int, stop: int) -> list[Problem]:
    """Problems that consist of a number only, from which the environment's seed follows."""
    return [Problem(number, "", None) for number in range(first, stop)]


def _check_number(config: TrainConfig, problems: int) -> None:
    """A `UsageError` if there are too few problems for a step."""
    if config.prompts_per_step > problems:
        raise UsageError(
            f"prompts_per_step = {config.prompts_per_step} is more than the {problems} problems "
            f"available. Use --prompts-per-step {problems}, or add problems."
        )
    if config.dynamic_sampling and 2 * config.prompts_per_step > problems:
        raise UsageError(
            "dynamic_sampling replaces problems of a step by others, and a step has "
            f"{config.prompts_per_step} of only {problems}. Use --prompts-per-step "
            f"{max(1, problems // 2)} or less, or add problems."
        )


def _grader(config: TrainConfig, tokenizer: Any) -> Grader | Environments:
    """What assigns the reward of a response."""
    if config.turns.environment:
        return Environments(config.turns.environment, config.turns.seconds, config.turns.processes)
    return Grader(
        tokenizer.decode,
        reward=config.task.reward,
        seconds=config.task.seconds,
        template=config.task.template,
        answer_format=config.task.answer_format,
        rule=config.task.grader,
        chat=getattr(tokenizer, "chat_template", None) is not None,
    )


class Task:
    """Problems with answers; seed and step alone decide a step's problems, each at most once per
    epoch.

    The constructor checks the data; `pose` needs the engine's context length.
    """

    def __init__(self, config: TrainConfig, tokenizer: Any) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self.left_out: list[str] = []  # sentences about unused problems
        self.posed: list[EncodedProblem] = []
        self.evaluation: dict[str, list[EncodedProblem]] = {}  # by the name of the set
        self.grader = _grader(config, tokenizer)
        trained, evaluated = config.turns.episodes, config.evaluation.episodes
        if trained:
            self.problems = _by_seed(0, trained)
        else:
            data = config.problems
            self.problems = self._loaded(data.dataset, data.split, data.number)
        _check_number(config, len(self.problems))
        # Location and problems of each evaluation set, by its name.
        self._evaluated: dict[str, tuple[str, list[Problem]]] = {}
        for name, (location, split) in evaluation_sets(config).items():
            self._evaluated[name] = location, self._loaded(location, split, None)
        if evaluated:
            self._evaluated = {_EPISODES: ("", _by_seed(trained, trained + evaluated))}
        if config.task.reward or config.turns.environment:
            self.grader.start()

    def _loaded(self, location: str, split: str, limit: int | None) -> list[Problem]:
        """The problems that can be graded; of others, `left_out` says how many there are."""
        problems, total = _load(self._config, location, split, limit)
        if len(problems) < total:
            without = total - len(problems)
            self.left_out.append(
                f"{location}: skipping {without} of {total} problems that have no answer."
            )
        if self._config.problems.unique:
            unclear = answered_differently(problems)
            if unclear:
                self.left_out.append(
                    f"{location}: {unclear} of {len(problems)} problems appear with more than one "
                    "answer. They are kept, though at most one of the answers can be right."
                )
        return problems

    def pose(self, max_model_len: int) -> None:
        """Encode the problems as token ids; one whose prompt fills the context is left out."""
        dataset = self._config.problems.dataset
        self.posed = self._encode(self.problems, dataset, max_model_len)
        _check_number(self._config, len(self.posed))
        sets = {}
        for name, (location, problems) in self._evaluated.items():
            sets[name] = self._encode(problems, location, max_model_len)
        # Without a set of its own, the evaluation is on the training problems.
        if not sets:
            name = _EPISODES if self._config.turns.episodes else _name_of(dataset)
            sets[name] = self.posed
        self.evaluation = sets

    def _encode(
        self, problems: list[Problem], location: str, max_model_len: int
    ) -> list[EncodedProblem]:
        config = self._config
        if config.turns.environment:  # it makes their prompts itself, when an episode begins
            return [EncodedProblem(problem, []) for problem in problems]
        encoded = encode_prompts(
            problems,
            self._tokenizer,
            template=config.task.template,
            max_model_len=max_model_len,
            max_prompt=config.problems.max_prompt_tokens,
        )
        if encoded.skipped:
            number, first = len(encoded.skipped), encoded.skipped[0]
            self.left_out.append(
                f"{location}: skipping {number} of {len(problems)} problems, the first (row "
                f"{first['prompt_id']}) because {first['reason']}."
            )
        return list(map(EncodedProblem, encoded.problems, encoded.prompt_ids))

    def others_of_step(self, step: int) -> Iterator[list[EncodedProblem]]:
        """More problems for a step, in batches of its size; also decided by seed and step alone."""
        size = self._config.prompts_per_step
        taken = {posed.problem.prompt_id for posed in self.of_step(step)}
        others = [posed for posed in self.posed if posed.problem.prompt_id not in taken]
        random.Random(f"{self._config.sampler.seed}/{step}/others").shuffle(others)
        # A remainder that does not fill a batch is left out.
        batches = min(self._config.dynamic_sampling, len(others) // size)
        for first in range(0, batches * size, size):
            yield others[first : first + size]

    def of_step(self, step: int) -> list[EncodedProblem]:
        """The problems of a step (steps count from 1); the remainder at the end of an epoch is
        dropped.
        """
        size = self._config.prompts_per_step
        epoch, place = divmod(step - 1, len(self.posed) // size)
        # Seeded by the epoch, every step shuffles alike, so no problem comes twice within one.
        order = list(range(len(self.posed)))
        random.Random(f"{self._config.sampler.seed}/{epoch}").shuffle(order)
        return [self.posed[i] for i in order[place * size : (place + 1) * size]]


def check_runs(configs: Sequence[TrainConfig]) -> None:
    """Check every run's names, thresholds and files; a `MismatchError` or `UsageError` for the
    first bad one.

    What only the hub knows (a model or data set by its name there) is checked when the first run
    loads it.
    """
    first = configs[0]  # runs of one command differ in algorithm and seed
    _check_engine(first)
    SamplingSettings(temperature=first.sampler.temperature, max_tokens=first.sampler.max_tokens)
    check_model_folder(first.engine.model)
    check_attention(first.scorer.attn)
    check_threads(first.cpu.threads)
    _check_turns(first)
    problems = first.problems
    if first.turns.episodes:
        _check_number(first, first.turns.episodes)
    elif is_local(problems.dataset):
        usable, _ = _load(first, problems.dataset, problems.split, problems.number)
        _check_number(first, len(usable))
    for location, split in evaluation_sets(first).values():
        if is_local(location):
            _load(first, location, split, None)
    # Imports numpy, and for a user's mask torch
    for spec in dict.fromkeys(config.algorithm for config in configs):
        _check_algorithm(spec, first)
    check_reward(first.task.reward, first.task.seconds)
    check_environment(first.turns.environment)


def _check_engine(config: TrainConfig) -> None:
    name = config.engine.name
    module = engine_module(name)
    if not module.TAKES_WEIGHTS:
        raise UsageError(
            f"Training sends new weights to the engine after every step, and {name} cannot load "
            "any. Use --engine vllm, hf or server."
        )
    if bool(config.engine.url) != module.REMOTE:
        raise UsageError(
            "--engine server and --engine-url belong together. Give the URLs of vLLM servers "
            "that were started with VLLM_SERVER_DEV_MODE=1, which makes them accept new weights."
        )
    if config.scorer.replay_routes:
        check_returns_routes(name)


_OF_TURNS = ("max_turns", "turn_tokens", "environment_seconds", "environment_processes")


def _check_turns(config: TrainConfig) -> None:
    """Check what an environment needs, and what needs an environment."""
    if config.turns.environment:
        _check_with_environment(config)
    else:
        _check_without_environment(config)
    if config.evaluation.episodes and not config.turns.episodes:
        raise UsageError("eval_episodes needs episodes. Give both, or an --eval-dataset.")
    if config.evaluation.episodes and config.evaluation.dataset:
        raise UsageError(
            "eval_episodes and --eval-dataset both set what to evaluate on. Leave one out."
        )


def _check_with_environment(config: TrainConfig) -> None:
    if config.task.reward:
        raise UsageError(
            "--environment assigns the rewards itself. Leave out --reward or --environment."
        )
    if config.task.template not in ("chat", "raw"):
        raise UsageError(
            f"--prompt-template {config.task.template} asks for one answer. With --environment "
            "use chat or raw."
        )


def _check_without_environment(config: TrainConfig) -> None:
    values = values_by_key(config.turns)
    for each in settings_of(EnvironmentSettings):
        if each.key in _OF_TURNS and values[each.key] != each.default:
            raise UsageError(
                f"{each.flag} needs --environment FILE.py:NAME. Add that, or leave {each.flag} out."
            )
    if config.turns.episodes or config.evaluation.episodes:
        raise UsageError(
            "episodes and eval_episodes need an environment. Add --environment FILE.py:NAME."
        )


def check_ranks(config: TrainConfig, ranks: int) -> None:
    """A `UsageError` for a number of ranks that cannot share a step, an engine or a model; it
    names the nearest that can.
    """
    engine = config.engine.tensor_parallel  # ranks
    most = config.prompts_per_step // engine * engine
    right = min(most, -(-ranks // engine) * engine)  # whole engines, rounded up
    who, problems = things(ranks, "rank"), things(config.prompts_per_step, "problem")
    if not right:
        raise UsageError(
            f"An engine of {engine} ranks cannot share {problems} per step: the responses to a "
            f"problem stay together. Use --prompts-per-step {engine}, or a lower --tensor-parallel."
        )
    if ranks > config.prompts_per_step:
        raise UsageError(
            f"{who} cannot share {problems} per step: the responses to a problem stay together. "
            f"Use --nproc {right}, or a higher --prompts-per-step."
        )
    if ranks % engine:
        raise UsageError(
            f"{who} cannot form engines of {engine} (--tensor-parallel): add --nproc {right}, or "
            f"start any multiple of {engine} with torchrun."
        )
    if config.scorer.cpu_offload and ranks == 1:
        raise UsageError(
            "cpu_offload needs a model that is spread over ranks. Add --nproc 2 or more."
        )


def _check_algorithm(spec: str, config: TrainConfig) -> None:
    """Check the algorithm, and what it needs: a vocabulary of top-k size, a weight average,
    complete groups.
    """
    from mismatch_cli.rules.algorithms.parse import parse_algorithm

    algorithm = parse_algorithm(spec, training=True)
    tokens = known_vocabulary(config.engine.model)
    k = algorithm.needs_top_k
    if tokens is not None and k > tokens:
        raise UsageError(
            f"{spec} needs the top {k:,} log-probs, but {config.engine.model} has only {tokens:,} "
            "tokens. Choose a lower k."
        )
    if algorithm.needs_average and not config.average_decay:
        raise UsageError(
            f"{spec} needs a moving average of the weights. Set its decay, such as "
            "average_decay = 0.9"
        )
    if algorithm.looks_at_groups and config.minibatches > config.prompts_per_step:
        raise UsageError(
            f"{spec} needs all samples of a problem together, and {config.prompts_per_step} "
            f"problems per step cannot fill {config.minibatches} minibatches. Use fewer "
            "--minibatches, or a higher --prompts-per-step."
        )
