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
A_FIELD: dict[str, Any] = {
    "metavar": "FIELD",
    "show_default": "the first with a usual name",
}  # for flags that name a field
LINE_TEMPLATE = "answer-line"
# Templates that turn a problem into a conversation
CONVERSATIONS = ("chat", "boxed", LINE_TEMPLATE)
TEMPLATES = ("chat", "raw", "r1-distill", "boxed", LINE_TEMPLATE)
TEMPLATE_HELP = (
    "chat (the model's own), raw, r1-distill, or chat that asks for a box (boxed) or a last line "
    "(answer-line)."
)
# The prompt for DeepSeek-R1-Distill models in the sanity test's code (sail-sg/Precision-RL, by
# oat): the response begins inside the thought. The sanity data on the hub end with these words.
_R1_DISTILL = "<｜begin▁of▁sentence｜><｜User｜>{problem}\n<｜Assistant｜><think>\n"
_R1_WORDS = "{problem} Please reason step by step, and put your final answer within \\boxed{{}}."
# The usual words for Qwen models, and those of DAPO-Math-17k (BytedTsinghua-SIA on the hub).
_WORDS = {
    "boxed": "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    LINE_TEMPLATE: (
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
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
    asked = source.prompt_field or _PROMPT_FIELDS, source.answer_field or _ANSWER_FIELDS
    fields = [name for names in asked for name in ([names] if isinstance(names, str) else names)]
    numbers, rows = read_rows(
        source.location, source.config, source.split, fields if source.unique else None
    )
    if not rows:
        raise MismatchError(
            f"{source.location} holds no prompts. Give a file with one problem per line."
        )
    prompt_field = _choose_field(
        rows, source.prompt_field, _PROMPT_FIELDS, "prompt_field", source.location
    )
    answer_field = _choose_field(
        rows, source.answer_field, _ANSWER_FIELDS, "answer_field", source.location
    )
    if prompt_field is None:
        raise UsageError(
            f"{source.location} has the fields {', '.join(rows[0])}. Name the one with the "
            "prompt in the file of --config: prompt_field = FIELD."
        )
    numbered = zip(numbers, rows, strict=True)
    problems = [
        _to_problem(i, row, prompt_field, answer_field, source.location, columns=source.columns)
        for i, row in numbered
    ]
    if source.unique:
        problems = _first_of_each(problems)
    if source.shuffle_seed is not None:
        random.Random(source.shuffle_seed).shuffle(problems)
    return problems[: source.limit]


def _first_of_each(problems: Iterable[Problem]) -> list[Problem]:
    """The problems without repetitions of a prompt and answer."""
    found: dict[str, Problem] = {}
    for problem in problems:
        found.setdefault(json.dumps([problem.prompt, problem.answer]), problem)
    return list(found.values())


def answered_differently(problems: Sequence[Problem]) -> int:
    """Number of distinct problems whose prompt also occurs with a different answer."""
    times = Counter(json.dumps(problem.prompt) for problem in problems)
    return sum(number for number in times.values() if number > 1)


def _choose_field(
    rows: list[Row], asked: str | None, usual: tuple[str, ...], flag: str, location: str
) -> str | None:
    """The chosen field, or the first of the usual names, that is set in at least one row."""
    filled = (
        name
        for name in ([asked] if asked else usual)
        if any(_get(row, name) is not None for row in rows)
    )
    found = next(filled, None)
    if asked and found is None:
        raise UsageError(
            f"{flag}, {location}: {unknown_name('field', asked, {key for row in rows for key in row})}"
        )
    return found


def _get(row: Mapping[str, Any], dotted: str) -> Any:
    """A field by name, or by dotted path into nested objects."""
    if dotted in row:
        return row[dotted]
    value: Any = row
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _to_problem(
    index: int,
    row: Mapping[str, Any],
    prompt_field: str,
    answer_field: str | None,
    where: str,
    *,
    columns: bool,
) -> Problem:
    prompt = _get(row, prompt_field)
    if isinstance(prompt, list) and prompt and all(map(is_message, prompt)):
        prompt = [{"role": message["role"], "content": message["content"]} for message in prompt]
        if prompt[-1]["role"] == "assistant":
            raise MismatchError(
                f"{where}, row {index}: the messages in field '{prompt_field}' end with one by "
                "the assistant, which the model should write. Remove it, or name another field "
                "with prompt_field in the file of --config."
            )
    elif not isinstance(prompt, str):
        raise MismatchError(
            f"{where}, row {index}: field '{prompt_field}' is neither text nor a list of chat "
            "messages. Name another field with prompt_field in the file of --config."
        )
    answer = _get(row, answer_field) if answer_field else None
    # NaN: a missing value in a table
    unknown_answer = answer is None or answer == "" or answer != answer
    others = (
        {name: value for name, value in row.items() if name != prompt_field} if columns else None
    )
    problem = Problem(index, prompt, None if unknown_answer else str(answer), others)
    if not is_encodable(json.dumps([problem.prompt, problem.answer], ensure_ascii=False)):
        raise MismatchError(
            f"{where}, row {index} holds half a character (a lone surrogate such as \\ud800), "
            "which no tokenizer accepts. Fix the row, or remove it."
        )
    return problem


def is_message(message: Any) -> bool:
    """Whether this is a chat message of text: other parts would be rendered as Python prints
    them.
    """
    return isinstance(message, Mapping) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


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
    words = _WORDS.get(template)
    around = "chat" if words else template
    if around == "chat" and getattr(tokenizer, "chat_template", None) is None:
        around = "raw"
    put = [_asked(problem, words) for problem in problems] if words else problems
    check_prompts(put, around)
    kept, ids, skipped = [], [], []
    for problem, prompt_ids in zip(problems, _encoded(put, tokenizer, around), strict=True):
        reason = _unusable(prompt_ids, max_model_len, max_prompt)
        if reason:
            skipped.append(
                {"prompt_id": problem.prompt_id, "tokens": len(prompt_ids), "reason": reason}
            )
        else:
            kept.append(problem)
            ids.append(prompt_ids)
    if not kept:
        raise MismatchError(
            f"No prompts left: all {len(skipped)} were skipped ({skipped[0]['reason']})."
        )
    return EncodedPrompts(kept, ids, skipped, template if words else around)


def _asked(problem: Problem, words: str) -> Problem:
    """The problem with these words around the user's last message; unchanged if it already says
    how to answer.
    """
    prompt = problem.prompt
    *before, last = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if asks_for_box(prompt) or asks_for_line(prompt):
        return problem
    worded = words.format(problem=last["content"])
    return replace(
        problem,
        prompt=worded if isinstance(prompt, str) else [*before, {**last, "content": worded}],
    )


def _unusable(prompt_ids: list[int], max_model_len: int, max_prompt: int | None) -> str | None:
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
            f"The tokenizer cannot encode prompt {prompt_id} ({fault}). Fix the prompt, or "
            "remove it."
        ) from error


def _texts(problems: list[Problem], tokenizer: Any, template: str) -> Iterable[str]:
    if template == "chat":
        prompts = {problem.prompt_id: problem.prompt for problem in problems}
        chats = {
            i: [{"role": "user", "content": p}] if isinstance(p, str) else p
            for i, p in prompts.items()
        }
        return rendered(tokenizer, chats)
    plain = (plain_text(problem, template) for problem in problems)
    return plain if template == "raw" else map(_r1_distill, plain)


def _r1_distill(text: str) -> str:
    worded = text if asks_for_box(text) else _R1_WORDS.format(problem=text)
    return _R1_DISTILL.format(problem=worded)


def plain_text(problem: Problem, template: str) -> str:
    """The text of a prompt without a chat template: a text, or the single message of a user."""
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
