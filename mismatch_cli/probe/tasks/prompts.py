"""Loads problems from a local file or a data set on the hub, and encodes them as the engine's
prompts.
"""

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mismatch_cli.base.errors import MismatchError, UsageError, first_line
from mismatch_cli.base.registry import unknown_name
from mismatch_cli.base.text import is_encodable
from mismatch_cli.probe.tasks.answers import asks_for_box, asks_for_line
from mismatch_cli.probe.tasks.prompt_templates import rendered
from mismatch_cli.probe.tasks.source_rows import Row, read_rows

_PROMPT_FIELDS = ("problem", "prompt", "question", "instruction", "input", "text", "messages")
_ANSWER_FIELDS = ("answer", "ground_truth", "reward_model.ground_truth", "target", "solution")
# For flags that name a field
A_FIELD: dict[str, Any] = {"metavar": "FIELD", "show_default": "the first with a usual name"}
LINE_TEMPLATE = "answer-line"
# Templates that turn a problem into a conversation
CONVERSATIONS = ("chat", "boxed", LINE_TEMPLATE)
TEMPLATES = ("chat", "raw", "r1-distill", "boxed", LINE_TEMPLATE)
TEMPLATE_HELP = (
    "chat (the model's own), raw, r1-distill, or chat that asks for a box (boxed) or a last "
    "line (answer-line)."
)
# The prompt for DeepSeek-R1-Distill models in the sanity test's code (sail-sg/Precision-RL, by
# oat): the response begins inside the thought. The sanity data on the hub end with these words.
_R1_DISTILL = "<｜begin▁of▁sentence｜><｜User｜>{problem}\n<｜Assistant｜><think>\n"
_R1_INSTRUCTION = (
    "{problem} Please reason step by step, and put your final answer within \\boxed{{}}."
)
# The usual words for Qwen models, and those of DAPO-Math-17k (BytedTsinghua-SIA on the hub).
_INSTRUCTIONS = {
    "boxed": "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    LINE_TEMPLATE: (
        "Solve the following math problem step by step. The last line of your response should be "
        "of the form Answer: $Answer (without quotes) where $Answer is the answer to the "
        "problem.\n\n{problem}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    ),
}
_ROLES = 4


@dataclass(frozen=True)
class Problem:
    """One problem: its row number in the source, the prompt (text or chat messages), and the
    answer, if any.
    """

    prompt_id: int
    prompt: str | list[dict[str, str]]
    answer: str | None
    columns: Mapping[str, Any] | None = None  # the rest of its row, for rewards that use it


@dataclass(frozen=True)
class PromptSource:
    """Where problems come from, and which of them to use."""

    location: str  # a local file, or a data set on the hub
    prompt_field: str | None = None  # None = the first of the usual names
    answer_field: str | None = None
    split: str = "train"
    config: str | None = None
    limit: int | None = None
    shuffle_seed: int | None = None
    columns: bool = False  # keep the other fields of each row
    unique: bool = False  # leave out repetitions of a prompt and answer


def load_problems(source: PromptSource) -> list[Problem]:
    """The problems of a source, shuffled if there is a seed, then cut to the limit; prompt_id stays
    the row number.

    Raises a `MismatchError` for a missing, empty or unreadable source and a `UsageError` for an
    unknown field.
    """
    location = source.location
    prompt_fields = _candidates(source.prompt_field, _PROMPT_FIELDS)
    answer_fields = _candidates(source.answer_field, _ANSWER_FIELDS)
    unique_in = (*prompt_fields, *answer_fields) if source.unique else None
    numbers, rows = read_rows(location, source.config, source.split, unique_in)
    if not rows:
        raise MismatchError(f"{location} holds no prompts. Give a file with one problem per line.")
    prompt_field = _filled(rows, prompt_fields, f"prompt_field, {location}", source.prompt_field)
    answer_field = _filled(rows, answer_fields, f"answer_field, {location}", source.answer_field)
    if prompt_field is None:
        raise UsageError(
            f"{location} has the fields {', '.join(rows[0])}. Name the one with the "
            "prompt in the file of --config: prompt_field = FIELD."
        )
    problems = [
        _to_problem(number, row, prompt_field, answer_field, location, columns=source.columns)
        for number, row in zip(numbers, rows, strict=True)
    ]
    if source.unique:
        problems = _first_of_each(problems)
    if source.shuffle_seed is not None:
        random.Random(source.shuffle_seed).shuffle(problems)
    return problems[: source.limit]


def _first_of_each(problems: Iterable[Problem]) -> list[Problem]:
    """The problems without repetitions of a prompt and answer."""
    first: dict[str, Problem] = {}
    for problem in problems:
        first.setdefault(json.dumps([problem.prompt, problem.answer]), problem)
    return list(first.values())


def answered_differently(problems: Sequence[Problem]) -> int:
    """Number of distinct problems whose prompt also occurs with a different answer; each of
    `problems` must differ from all others.
    """
    times = Counter(json.dumps(problem.prompt) for problem in problems)
    return sum(number for number in times.values() if number > 1)


def _candidates(field: str | None, usual: tuple[str, ...]) -> tuple[str, ...]:
    """The field that the user names, or else the usual names."""
    return (field,) if field else usual


def _filled(
    rows: Sequence[Row], candidates: Sequence[str], where: str, named: str | None
) -> str | None:
    """The first of these fields that is set in at least one row; a `UsageError` if there is none
    though the user `named` it.
    """
    for field in candidates:
        if any(not _is_missing(_get(row, field)) for row in rows):
            return field
    if named:
        if any(named in row for row in rows):
            raise UsageError(f"{where}: The field '{named}' is empty in every row. Name another.")
        raise UsageError(f"{where}: {unknown_name('field', named, set[str]().union(*rows))}")
    return None


def _is_missing(value: Any) -> bool:
    """Whether a field is unset; tables write that as an empty text or as NaN, which alone differs
    from itself.
    """
    return value is None or value == "" or value != value


def _get(row: Row, dotted: str) -> Any:
    """A field by name, or by dotted path into nested objects; None if there is none."""
    if dotted in row:
        return row[dotted]
    value: Any = row
    for name in dotted.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _to_problem(
    number: int,
    row: Row,
    prompt_field: str,
    answer_field: str | None,
    location: str,
    *,
    columns: bool,
) -> Problem:
    """The problem of a row; a `MismatchError` for one that cannot be posed."""
    prompt = _prompt_in(row, prompt_field, f"{location}, row {number}")
    answer = _get(row, answer_field) if answer_field else None
    others = None
    if columns:
        others = {name: value for name, value in row.items() if name != prompt_field}
    problem = Problem(number, prompt, None if _is_missing(answer) else str(answer), others)
    if not is_encodable(json.dumps([problem.prompt, problem.answer], ensure_ascii=False)):
        raise MismatchError(
            f"{location}, row {number} holds half a character (a lone surrogate such as \\ud800), "
            "which no tokenizer accepts. Fix the text of that row, or remove the row."
        )
    return problem


def _prompt_in(row: Row, field: str, where: str) -> str | list[dict[str, str]]:
    """The prompt of a row: text, or chat messages without anything but role and content."""
    prompt = _get(row, field)
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt or not all(map(is_message, prompt)):
        raise MismatchError(
            f"{where}: field '{field}' is neither text nor a list of chat "
            "messages. Name another field with prompt_field in the file of --config."
        )
    if prompt[-1]["role"] == "assistant":
        raise MismatchError(
            f"{where}: the messages in field '{field}' end with one by "
            "the assistant, which the model should write. Remove it, or name another field "
            "with prompt_field in the file of --config."
        )
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def is_message(message: Any) -> bool:
    """Whether this is a chat message of text: other parts would be rendered as Python prints
    them.
    """
    if not isinstance(message, Mapping):
        return False
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


@dataclass(frozen=True)
class EncodedPrompts:
    """Token ids per problem, and the skipped problems with the reason."""

    problems: list[Problem]
    prompt_ids: list[list[int]]
    skipped: list[dict[str, Any]]
    template: str  # as applied: also "raw" if the tokenizer has no chat template


def check_template(template: str) -> None:
    """Raise a `UsageError` for a template that does not exist."""
    if template not in TEMPLATES:
        raise UsageError(f"--prompt-template: {unknown_name('template', template, TEMPLATES)}")


def check_prompts(problems: list[Problem], template: str) -> None:
    """Raise a `MismatchError` for a conversation if the template needs a single text."""
    check_template(template)
    if template in ("raw", "r1-distill"):
        for problem in problems:
            plain_text(problem, template)


def encode_prompts(
    problems: list[Problem],
    tokenizer: Any,
    *,
    template: str = "chat",
    max_model_len: int,
    max_prompt: int | None = None,
) -> EncodedPrompts:
    """Encode problems with one of `TEMPLATES`; skip prompts that leave no room for a token or
    exceed `max_prompt`.

    "chat" is the tokenizer's own template; without one, prompts are raw.
    """
    check_template(template)
    instruction = _INSTRUCTIONS.get(template)
    layout = "chat" if instruction else template
    if layout == "chat" and getattr(tokenizer, "chat_template", None) is None:
        layout = "raw"
    posed = problems
    if instruction:
        posed = [_with_instruction(problem, instruction) for problem in problems]
    check_prompts(posed, layout)
    # What is recorded are the problems as they were read: the template says how they were posed.
    encoded = EncodedPrompts([], [], [], template if instruction else layout)
    for problem, prompt_ids in zip(problems, _encoded(posed, tokenizer, layout), strict=True):
        reason = _unusable(prompt_ids, max_model_len, max_prompt)
        if reason:
            encoded.skipped.append(
                {"prompt_id": problem.prompt_id, "tokens": len(prompt_ids), "reason": reason}
            )
        else:
            encoded.problems.append(problem)
            encoded.prompt_ids.append(prompt_ids)
    if not encoded.problems:
        skipped = encoded.skipped
        raise MismatchError(
            f"No prompts left: all {len(skipped)} were skipped ({skipped[0]['reason']}). Use other "
            "prompts, or raise the limit that they exceed."
        )
    return encoded


def _with_instruction(problem: Problem, instruction: str) -> Problem:
    """The problem with an instruction around the user's last message; unchanged if it already says
    how to answer.
    """
    prompt = problem.prompt
    if asks_for_box(prompt) or asks_for_line(prompt):
        return problem
    if isinstance(prompt, str):
        return replace(problem, prompt=instruction.format(problem=prompt))
    *before, last = prompt
    content = instruction.format(problem=last["content"])
    return replace(problem, prompt=[*before, {**last, "content": content}])


def _unusable(prompt_ids: list[int], max_model_len: int, max_prompt: int | None) -> str | None:
    """Why a prompt is skipped, if it is."""
    if not prompt_ids:
        return "the prompt is empty"
    if len(prompt_ids) >= max_model_len:
        return f"the prompt has {len(prompt_ids)} tokens, the context {max_model_len}"
    if max_prompt is not None and max_prompt < len(prompt_ids):
        return f"the prompt has {len(prompt_ids)} tokens, more than the limit of {max_prompt}"
    return None


def _encoded(problems: list[Problem], tokenizer: Any, template: str) -> Iterator[list[int]]:
    """The token ids of each problem, without adding special tokens that the template already
    added.
    """
    for problem, text in zip(problems, _texts(problems, tokenizer, template), strict=True):
        yield token_ids(tokenizer, text, problem.prompt_id, special=template == "raw")


def token_ids(tokenizer: Any, text: str, prompt_id: int, *, special: bool) -> list[int]:
    """The token ids of a text; if `special`, with the special tokens that the tokenizer adds."""
    options = {} if special else {"add_special_tokens": False}
    try:
        return list(tokenizer.encode(text, verbose=False, **options))
    except Exception as error:  # a foreign library, and text of any kind
        fault = f"{type(error).__name__}: {first_line(error)}"
        raise MismatchError(
            f"The tokenizer cannot encode prompt {prompt_id} ({fault}). Change the text of that "
            "prompt, or remove it."
        ) from error


def _texts(problems: list[Problem], tokenizer: Any, template: str) -> Iterable[str]:
    """The text of each problem, for the tokenizer."""
    if template == "chat":
        conversations = {each.prompt_id: _conversation(each.prompt) for each in problems}
        return rendered(tokenizer, conversations)
    texts = (plain_text(problem, template) for problem in problems)
    if template == "raw":
        return texts
    return map(_r1_distill, texts)


def _conversation(prompt: str | list[dict[str, str]]) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


def _r1_distill(text: str) -> str:
    if not asks_for_box(text):
        text = _R1_INSTRUCTION.format(problem=text)
    return _R1_DISTILL.format(problem=text)


def plain_text(problem: Problem, template: str) -> str:
    """The text of a prompt without a chat template: a text, or the single message of a user; a
    `MismatchError` for a conversation.
    """
    if isinstance(problem.prompt, str):
        return problem.prompt
    roles = [message["role"] for message in problem.prompt]
    if roles == ["user"]:
        return problem.prompt[0]["content"]
    shown = ", ".join(roles[:_ROLES])
    raise MismatchError(
        f"Prompt {problem.prompt_id} is a conversation ({shown}), which needs a chat template, "
        f"but the prompt template is {template}. Use --prompt-template chat with a model that "
        "has a template, or name a text field with prompt_field in the file of --config."
    )
