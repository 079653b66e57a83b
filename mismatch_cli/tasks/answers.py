"""Where a response states its answer: in its last box, or on a line that begins with `Answer:`."""

import re

FORMATS = ("auto", "boxed", "line")
FORMAT_HELP = (
    "Where a response states its answer: in its last box, or on a last line Answer: …; auto: as its prompt asks."
)
SECONDS_HELP = "Longest time for your reward: over a response, over a batch, and to load; 0 for 30 s, 600 s and 60 s."
_BOX = re.compile(r"\\(?:boxed|fbox)\{")
_END_OF_THOUGHT = "</think>"
# The words of DAPO-Math-17k and of simple-evals; a prompt that wants a box on that line wants a box.
_ASKS_FOR_LINE = re.compile(r"of the form:?\s*[\"'“]?Answer:(?!\s*\\boxed)", re.IGNORECASE)
_LINE = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
_TAIL, _TAIL_OF_BOX = 300, 100  # characters that verl's scorer of DAPO (math_dapo) looks at


def asks_for_line(prompt: str | list[dict[str, str]]) -> bool:
    """Whether a problem wants its answer on a line of its own, `Answer: …`."""
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    return _ASKS_FOR_LINE.search(text) is not None


def asks_for_box(prompt: str | list[dict[str, str]]) -> bool:
    """Whether what a user said last names a box."""
    return "\\boxed" in (prompt if isinstance(prompt, str) else prompt[-1]["content"])


def stated_answer(response: str, *, in_thought: bool = False, on_line: bool = False) -> str | None:
    """What a response says is its answer; None where it says nothing of the kind.

    `in_thought`: the prompt has opened a thought, and only what follows its one closing tag is the answer.
    """
    if in_thought:
        response = _after_the_thought(response)
    return _on_last_line(response) if on_line else last_boxed(response)


def _on_last_line(response: str) -> str | None:
    """What follows the last `Answer:`, as verl's scorer of DAPO reads it; without one, a box at the very end.

    Of several equations on the line, the right side of the last one.
    """
    tail = response[-_TAIL:]
    found: list[str] = _LINE.findall(tail)
    if not found:
        return last_boxed(tail[-_TAIL_OF_BOX:])
    boxed = last_boxed(found[-1])
    return found[-1].rpartition("=")[2].strip() if boxed is None else boxed


def _after_the_thought(response: str) -> str:
    """Empty where the thought does not end, or where a second one ends: which of the two was the answer?"""
    _, closed, rest = response.partition(_END_OF_THOUGHT)
    return rest if closed and _END_OF_THOUGHT not in rest else ""


def last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{…}` or `\\fbox{…}`, braces balanced; None where there is none.

    Of nested boxes the inner one, whose content both share. One pass: responses can be long and hostile.
    """
    found, best_start, open_braces = None, -1, []
    boxes = {match.end() for match in _BOX.finditer(text)}
    for index, character in enumerate(text, start=1):
        if character == "{":
            open_braces.append(index)
        elif character == "}" and open_braces:
            start = open_braces.pop()
            if start in boxes and start > best_start:
                found, best_start = text[start : index - 1], start
    return found


def no_answers(responses: int, truncated: int, max_tokens: int) -> str:
    """What to say of a step whose responses state no answer: every reward is 0, and nothing is learnt."""
    cut = f" {truncated} of them were cut at {max_tokens} tokens: see --max-tokens." if truncated else ""
    return (
        f"None of the {responses} responses of a step states an answer, so every reward is 0.{cut} An answer is the "
        "last \\boxed{…} of a response, or its last line Answer: … where the prompt asks for one. --prompt-template "
        "boxed or answer-line asks for either; --answer-format line reads such a line whatever the prompt."
    )
