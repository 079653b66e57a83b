"""The problems of a training run: which ones a step samples, how they are posed, and who grades the answers.

And what can be wrong with the settings of runs, told before a model is loaded, a run begins or a file is written.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_cli.engines import check_returns_routes, engine_module
from mismatch_cli.errors import UsageError
from mismatch_cli.models import check_attention, check_model_folder, known_vocabulary
from mismatch_cli.rl.train_config import TrainConfig
from mismatch_cli.sampling import SamplingSettings
from mismatch_cli.tasks.grading import Grader, check_reward, gradable
from mismatch_cli.tasks.prompts import Problem, PromptSource, check_prompts, encode_prompts, is_local, load_problems
from mismatch_cli.torch_settings import check_threads


@dataclass(frozen=True)
class Posed:
    """A problem with the token ids that pose it."""

    problem: Problem
    prompt_ids: list[int]


def _load(config: TrainConfig, location: str, split: str, limit: int) -> tuple[list[Problem], int]:
    """The problems that can be judged, and how many there are in all."""
    source = PromptSource(
        location, config.prompt_field or None, config.answer_field or None, split, limit=limit or None
    )
    found = load_problems(source)
    check_prompts(found, config.prompt_template)
    return gradable(found, config.reward, location), len(found)


def _check_number(config: TrainConfig, problems: int) -> None:
    if config.prompts_per_step > problems:
        raise UsageError(
            f"prompts_per_step = {config.prompts_per_step} is more than the {problems} problems there are. "
            f"Use --prompts-per-step {problems}, or give more problems."
        )


class Task:
    """Problems with answers; a step's share follows from seed and step alone, each problem at most once in an epoch.

    The constructor says what is wrong with the data, `pose` has to know the engine's context.
    """

    def __init__(self, config: TrainConfig, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        self.left_out: list[str] = []  # sentences about problems that are not used
        self.posed: list[Posed] = []
        self.evaluation: list[Posed] = []
        self.grader = Grader(tokenizer.decode, reward=config.reward, template=config.prompt_template)
        self.problems = self._loaded(config.dataset, config.split, config.num_problems)
        _check_number(config, len(self.problems))
        self._evaluated = self._loaded(config.eval_dataset, config.eval_split, 0) if config.eval_dataset else None
        if config.reward:
            self.grader.start()

    def _loaded(self, location: str, split: str, limit: int) -> list[Problem]:
        problems, count = _load(self._config, location, split, limit)
        if len(problems) < count:
            without = count - len(problems)
            self.left_out.append(f"{location}: {without} of {count} problems have no answer and are left out.")
        return problems

    def pose(self, max_model_len: int) -> None:
        """Put the problems as token ids; one whose prompt fills the context is left out."""
        self.posed = self._encode(self.problems, self._config.dataset, max_model_len)
        _check_number(self._config, len(self.posed))
        self.evaluation = self.posed
        if self._evaluated is not None:
            self.evaluation = self._encode(self._evaluated, self._config.eval_dataset, max_model_len)

    def _encode(self, problems: list[Problem], location: str, max_model_len: int) -> list[Posed]:
        template = self._config.prompt_template
        encoded = encode_prompts(problems, self._tokenizer, template=template, max_model_len=max_model_len)
        if encoded.skipped:
            number, first = len(encoded.skipped), encoded.skipped[0]
            self.left_out.append(
                f"{location}: {number} of {len(problems)} problems are left out, the first (row {first['prompt_id']}) "
                f"because {first['reason']}."
            )
        return [Posed(p, i) for p, i in zip(encoded.problems, encoded.prompt_ids, strict=True)]

    def of_step(self, step: int) -> list[Posed]:
        """The problems of a step (they count from 1), without what is left over at the end of an epoch."""
        per_epoch = len(self.posed) // self._config.prompts_per_step
        epoch, place = divmod(step - 1, per_epoch)
        order = list(range(len(self.posed)))
        random.Random(f"{self._config.seed}/{epoch}").shuffle(order)
        first = place * self._config.prompts_per_step
        return [self.posed[i] for i in order[first : first + self._config.prompts_per_step]]


def check_runs(configs: Sequence[TrainConfig]) -> None:
    """Every run's names, thresholds and files; a `MismatchError` or `UsageError` for the first that does not do.

    What only the hub knows (a model or a data set by its name there) is found when the first run loads it.
    """
    first = configs[0]  # runs of one command differ in algorithm and seed
    if not engine_module(first.engine).TAKES_WEIGHTS:
        raise UsageError(
            f"Training sends new weights to the engine after every step, and {first.engine} takes none. "
            "Use --engine vllm, hf or server."
        )
    if bool(first.engine_url) != engine_module(first.engine).REMOTE:
        raise UsageError(
            "--engine server and --engine-url belong together: the URLs of vLLM servers that were started with "
            "VLLM_SERVER_DEV_MODE=1, which take new weights from a folder."
        )
    if first.replay_routes:
        check_returns_routes(first.engine)
    SamplingSettings(temperature=first.temperature, max_tokens=first.max_tokens)
    check_model_folder(first.model)
    check_attention(first.attn or None)
    check_threads(first.threads)
    if is_local(first.dataset):
        _check_number(first, len(_load(first, first.dataset, first.split, first.num_problems)[0]))
    if is_local(first.eval_dataset):
        _load(first, first.eval_dataset, first.eval_split, 0)
    for spec in dict.fromkeys(config.algorithm for config in configs):  # numpy, and for a user's mask torch
        _check_algorithm(spec, first)
    check_reward(first.reward)


def check_ranks(config: TrainConfig, ranks: int) -> None:
    """A `UsageError` for a number of ranks that cannot share a step, an engine or a model."""
    if ranks > config.prompts_per_step:
        raise UsageError(
            f"{ranks} ranks cannot share {config.prompts_per_step} problems a step, since the responses to a problem "
            "stay together. Use fewer ranks, or a higher --prompts-per-step."
        )
    if ranks % config.tensor_parallel:
        raise UsageError(
            f"{ranks} ranks cannot form engines of {config.tensor_parallel}. Use a --tensor-parallel that divides "
            "the number of ranks."
        )
    if config.cpu_offload and ranks == 1:
        raise UsageError("--cpu-offload is for a model that is spread over ranks. Add --nproc 2 or more.")


def _check_algorithm(spec: str, config: TrainConfig) -> None:
    """The algorithm, and what it asks of the run: no more ranks than there are tokens, an average, whole groups."""
    from mismatch_cli.algorithms.parse import find

    algorithm, tokens = find(spec, training=True), known_vocabulary(config.model)
    k = algorithm.needs_top_k
    if tokens is not None and k > tokens:
        raise UsageError(
            f"{spec} needs the top {k:,} log-probs, and {config.model} has {tokens:,} tokens. Choose a lower k."
        )
    if algorithm.needs_average and not config.average_decay:
        raise UsageError(f"{spec} measures from an average of the weights. Say which: --average-decay 0.9")
    if algorithm.looks_at_groups and config.minibatches > config.prompts_per_step:
        raise UsageError(
            f"{spec} looks at all samples of a problem at once, and {config.prompts_per_step} problems a step cannot "
            f"fill {config.minibatches} minibatches. Use fewer --minibatches, or a higher --prompts-per-step."
        )
