"""Finds the answer that a response states: in its last box, or on a line that begins with
`Answer:`.
"""

import ast
import re
import warnings

from mismatch_cli.base.numbers import count

FORMATS = ("auto", "boxed", "line")
FORMAT_HELP = (
    "Form of answers: boxed (the last box), line (a last line Answer: …), auto (as asked)."
)
VERL_RULE, OAT_RULE = "verl", "oat"
GRADERS = (VERL_RULE, OAT_RULE)
GRADER_HELP = "Rule for equal answers: verl's (math-verify), or oat's, that of the sanity test."
SECONDS_HELP = (
    "Seconds for your reward function per response, per batch and to load; 0: 30, 600, 60."
)
_BOX = re.compile(r"\\(?:boxed|fbox)\{")
THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"
# The wording of DAPO-Math-17k and simple-evals; a prompt that asks for a box on that line asks for
# a box.
_ASKS_FOR_LINE = re.compile(r"of the form:?\s*[\"'“]?Answer:(?!\s*\\boxed)", re.IGNORECASE)
_LINE = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
_TAIL, _TAIL_OF_BOX = 300, 100  # characters that verl's DAPO scorer (math_dapo) looks at


def asks_for_line(prompt: str | list[dict[str, str]]) -> bool:
    """Whether a problem asks for its answer on a separate line, `Answer: …`."""
    messages = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return _ASKS_FOR_LINE.search("\n".join(messages)) is not None


def asks_for_box(prompt: str | list[dict[str, str]]) -> bool:
    """Whether the user's last message mentions a box."""
    last = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return "\\boxed" in last


def stated_answer(response: str, *, in_thought: bool = False, on_line: bool = False) -> str | None:
    """The answer that a response states, or None.

    `in_thought`: the prompt has opened a thought, and only text after its single closing tag
    counts.
    """
    if in_thought:
        response = _after_the_thought(response)
    return _on_last_line(response) if on_line else last_boxed(response)


def _on_last_line(response: str) -> str | None:
    """The text after the last `Answer:`, as verl's DAPO scorer reads it; without one, a box at the
    very end.

    If the line holds equations, the right side of the last one counts.
    """
    tail = response[-_TAIL:]
    lines: list[str] = _LINE.findall(tail)
    if not lines:
        return last_boxed(tail[-_TAIL_OF_BOX:])
    boxed = last_boxed(lines[-1])
    if boxed is not None:
        return boxed
    return lines[-1].rpartition("=")[2].strip()


def _after_the_thought(response: str) -> str:
    """The text after the thought; empty if the thought does not end or ends twice, which is
    ambiguous.
    """
    if response.count(_END_OF_THOUGHT) != 1:
        return ""
    return response.partition(_END_OF_THOUGHT)[2]


def last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{…}` or `\\fbox{…}` with balanced braces, or None.

    Of nested boxes the inner one counts. A single pass: responses can be long and hostile.
    """
    box_starts = {match.end() for match in _BOX.finditer(text)}
    open_braces: list[int] = []
    last_start, content = -1, None
    for index, character in enumerate(text, start=1):
        if character == "{":
            open_braces.append(index)
        elif character == "}" and open_braces:
            start = open_braces.pop()
            # An outer box closes after the inner one, but starts before it.
            if start in box_starts and start > last_start:
                last_start, content = start, text[start : index - 1]
    return content


def only_answer(answer: str) -> str:
    """The text in a list of one text, which is how some data sets write their answers; any other
    answer is unchanged.
    """
    if not answer.startswith(("['", '["')):
        return answer
    try:
        with warnings.catch_warnings(action="error"):
            texts = ast.literal_eval(answer)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return answer
    is_one_text = isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], str)
    # Where backslashes are not doubled, \frac would begin with a form feed.
    return texts[0] if is_one_text and texts[0].isprintable() else answer


HOW_TO_ASK = (
    "An answer is the last \\boxed{…} of a response, or its last line Answer: … if the prompt asks "
    "for one. --prompt-template boxed or answer-line asks for one of them; answer_format = line "
    "always reads such a line, and a --reward of your own any other form."
)


def without_answer(unstated: int, responses: int) -> str:
    """What to say of responses that ended without stating an answer: they are not wrong, but
    unread; what would help, if they are most.
    """
    fact = (
        f"{count(unstated)} of {count(responses)} responses ended without an answer in the "
        "asked form, and score 0 for that alone."
    )
    are_most = 2 * unstated > responses
    return f"{fact} {HOW_TO_ASK}" if are_most else fact


def no_answers(responses: int, truncated: int, max_tokens: int) -> str:
    """The warning for a step whose responses state no answer: every reward is 0, and nothing is
    learned.
    """
    sentences = [
        f"None of the {responses} responses of a step states an answer, so every reward is 0."
    ]
    if truncated:
        sentences.append(
            f"{truncated} of them were cut at {max_tokens} tokens: raise --max-tokens."
        )
    return " ".join([*sentences, HOW_TO_ASK])
