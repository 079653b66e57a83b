"""Where a response states its answer: in boxes, or on the last line that DAPO's prompts ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.models.loading import load_tokenizer
from mismatch_cli.probe.tasks.answers import (
    asks_for_line,
    only_answer,
    stated_answer,
    without_answer,
)
from mismatch_cli.probe.tasks.grading import Grader, MathVerify
from mismatch_cli.probe.tasks.prompts import Problem, encode_prompts
from mismatch_cli.rules.batch import Rollout

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is 30 + 4?\n\nRemember to put your "
    'answer on its own line after "Answer:".'
)
SIMPLE_EVALS = (
    'of the form Answer: $ANSWER (without quotes)… after "Answer:", and you do not need to use a '
    "\\boxed command."
)


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        (DAPO, True),
        (SIMPLE_EVALS, True),
        ('The last line should be of the form "ANSWER: $ANSWER" (without quotes).', True),
        ([{"role": "system", "content": "Think."}, {"role": "user", "content": DAPO}], True),
        # slime's: graded by its box
        ("The last line should be of the form Answer: \\boxed{$Answer} where", False),
        ("What is 30 + 4? Put your final answer within \\boxed{}.", False),
        ("Question: What is 30 + 4?\nAnswer:", False),
    ],
)
def test_what_a_prompt_asks_for(prompt, line):
    assert asks_for_line(prompt) == line


@pytest.fixture(scope="module")
def grader():
    with MathVerify() as grader:
        yield grader


# The results of verl's DAPO scorer (math_dapo) on these: it reads the last 300 characters, the last
# `Answer:` in any case, and uses its own normalization instead of math-verify.
LINES = [
    ("It is 34.\nAnswer: 34", "34", 1), ("answer :  34", "34", 1), ("ANSWER:\n34", "34", 1),
    ("Answer: $34$", "34", 1),
    ("Answer: 1,234", "1234", 1), ("Answer: x = 34", "34", 1), ("Answer: n=5 and m=34", "34", 1),
    ("Answer: 34 square units", "34", 1), ("Answer: \\text{34}", "34", 1),
    ("Answer: \\boxed{34}", "34", 1),
    ("Answer: 35\nAnswer: 34", "34", 1), ("Answer: 34\nAnswer: 35", "34", 0),
    ("Answer: 34 or 35", "34", 0),
    ("Answer: \\frac{1}{2}", "\\frac{1}{2}", 1), ("Answer: 34.", "34", 0), ("Answer: -34", "34", 0),
    ("Answer: 34" + " and so on" * 30, "34", 0), ("The answer is 34", "34", 0), ("", "34", 0),
    ("Answer:", "34", 0),
    ("so it is \\boxed{34}", "34", 1), ("\\boxed{34}" + " and so on" * 10, "34", 0),
]  # fmt: skip


def test_the_last_line_is_read_like_verl_reads_it(grader):
    for response, answer, reward in LINES:
        assert grader.grade(response, answer, "stop", on_line=True) == reward, response
    # Truncated responses score 0 here too
    assert grader.grade("Answer: 34", "34", "length", on_line=True) == 0
    assert (
        grader.grade(
            "<think>Answer: 34</think>Answer: 35", "35", "stop", in_thought=True, on_line=True
        )
        == 1
    )


def test_boxes_are_read_as_before(grader):
    assert stated_answer("\\boxed{34}" + " and so on" * 50) == "34"
    assert stated_answer("Answer: 34") is None and grader.grade("Answer: 34", "34", "stop") == 0
    assert stated_answer("\\boxed{3}\nAnswer: 34") == "3"


@pytest.mark.parametrize(("statement", "longest"), [("Answer: 34\n", 300), ("\\boxed{34}\n", 100)])
def test_a_line_is_read_within_300_characters_of_the_end_and_a_box_within_100(statement, longest):
    for length, answer in ((longest, "34"), (longest + 1, None)):
        response = statement + "x" * (length - len(statement))
        assert stated_answer(response, on_line=True) == answer


@pytest.mark.parametrize(
    ("settings", "earned"),
    [
        ({}, [1, 0, 0, 1]),  # auto: each problem's prompt decides
        ({"answer_format": "line"}, [1, 0, 1, 0]),
        ({"answer_format": "boxed"}, [0, 1, 0, 1]),
        ({"template": "answer-line"}, [1, 0, 1, 0]),
    ],
)
def test_the_format_decides_where_the_answer_is_read(settings: dict[str, Any], earned):
    texts = ["Answer: 34", "\\boxed{34}\nAnswer: 35", "Answer: 34", "\\boxed{34}\nAnswer: 35"]
    problems = [Problem(i, DAPO if i < 2 else "What is 30 + 4?", "34") for i in range(4)]
    rollouts: Any = [Rollout([1], [i], None, None, None, None, "length_of_none") for i in range(4)]  # type: ignore[arg-type]
    with Grader(lambda ids: texts[ids[0]], **settings) as grader:
        assert grader.rewards(problems, rollouts) == earned
        assert grader.stated == sum(
            1 for i in range(4) if settings.get("answer_format") != "boxed" or i % 2
        ) - (
            not settings  # the third problem asks for a box, but there is none
        )


@pytest.mark.parametrize(
    ("end", "opens"),
    [
        ("<think>\n", True),
        ("<think>", True),
        ("<think>\n\n</think>\n\n", False),  # a template that turns thinking off
        ("assistant\n", False),
    ],
)
def test_whether_a_thought_is_open_is_read_off_the_end_of_the_prompt(end, opens):
    texts = [f"Say <think>. {end}", "So \\boxed{3}, no.</think> It is \\boxed{4}.", "\\boxed{4}."]
    problem = Problem(0, "2 + 2?", "4")
    rollouts: Any = [Rollout([0], [place], None, None, None, None, "") for place in (1, 2)]  # type: ignore[arg-type]
    with Grader(lambda ids: texts[ids[0]]) as grader:
        assert grader.rewards([problem] * 2, rollouts) == [1, not opens]


def test_responses_that_end_without_an_answer_are_counted_apart():
    texts = ["\\boxed{4}", "\\boxed{5}", "It is 4.", "It is 4."]
    rollouts: Any = [Rollout([0], [i], None, None, None, None, "") for i in range(3)]  # type: ignore[arg-type]
    rollouts.append(Rollout([0], [3], None, None, None, None, "length"))  # type: ignore[arg-type]
    with Grader(lambda ids: texts[ids[0]]) as grader:
        assert grader.rewards([Problem(0, "2 + 2?", "4")] * 4, rollouts) == [1, 0, 0, 0]
        assert (grader.stated, grader.unstated) == (2, 1)
        state = grader.state_dict()
        assert state["unstated"] == 1
        grader.load_state_dict({"given_up": [], "timeouts": 0})
        assert grader.unstated == 0
    assert without_answer(1, 4) == (
        "1 of 4 responses ended without an answer in the asked form, and score 0 for that alone."
    )
    assert "--prompt-template boxed" in without_answer(3, 4)
    assert "--prompt-template boxed" not in without_answer(2, 4)  # half is not most


def test_a_problem_that_asks_for_a_box_itself_is_graded_by_its_box():
    """The template adds no words to it, so it does not ask for a line."""
    text = "So \\boxed{34}." + " That follows from the sum of both." * 5
    rollout = Rollout([1], [0], None, None, None, None, "")  # type: ignore[arg-type]
    asks = "What is 30 + 4? Put your final answer within \\boxed{}."
    for prompt in (asks, [{"role": "user", "content": asks}]):
        with Grader(lambda _: text, template="answer-line") as grader:
            assert grader.rewards([Problem(0, prompt, "34")], [rollout]) == [1]


@pytest.mark.parametrize(
    ("template", "words"), [("boxed", "within \\boxed{}."), ("answer-line", '"Answer:".')]
)
def test_words_go_only_around_problems_that_ask_for_no_format(template, words):
    tokenizer = load_tokenizer(str(bundled("model")))
    plain, chat = Problem(0, "What is 30 + 4?", "34"), [{"role": "user", "content": "What is {5}?"}]
    asks = [Problem(2, DAPO, "34"), Problem(3, "2? Put it into \\boxed{}.", "2")]
    problems = [plain, Problem(1, chat, "5"), *asks]
    encoded = encode_prompts(problems, tokenizer, template=template, max_model_len=4096)
    # Unchanged: a reward receives these
    assert encoded.problems == problems and encoded.template == template
    texts = [tokenizer.decode(ids) for ids in encoded.prompt_ids]
    assert (
        words in texts[0]
        and "What is 30 + 4?" in texts[0]
        and words in texts[1]
        and "What is {5}?" in texts[1]
    )
    own = encode_prompts(asks, tokenizer, template="chat", max_model_len=4096)
    assert encoded.prompt_ids[2:] == own.prompt_ids
    assert (
        encoded.prompt_ids[0]
        != encode_prompts([plain], tokenizer, max_model_len=4096).prompt_ids[0]
    )
    tokenizer.chat_template = None
    (raw,) = encode_prompts([plain], tokenizer, template=template, max_model_len=4096).prompt_ids
    assert words in tokenizer.decode(raw)


def test_a_prompt_that_is_too_long_is_left_out():
    tokenizer = load_tokenizer(str(bundled("model")))
    problems = [Problem(i, "and " * n, "1") for i, n in enumerate((5, 50, 500))]
    lengths = [
        len(ids) for ids in encode_prompts(problems, tokenizer, max_model_len=4096).prompt_ids
    ]
    encoded = encode_prompts(problems, tokenizer, max_model_len=lengths[2], max_prompt=lengths[1])
    assert encoded.problems == problems[:2]  # exactly as long as allowed
    encoded = encode_prompts(
        problems, tokenizer, max_model_len=lengths[2], max_prompt=lengths[1] - 1
    )
    assert [one["reason"] for one in encoded.skipped] == [
        f"the prompt has {lengths[1]} tokens, more than the limit of {lengths[1] - 1}",
        f"the prompt has {lengths[2]} tokens, the context {lengths[2]}",
    ]


# As Python and as JSON write a list: a column of lists is read as the first, a text may be either
LISTS = [
    (["1,234"], "1234", 1), (["50\\%"], "50", 1), (["\\{1,2\\}"], "\\{2,1\\}", 1), (["34"], "34", 1),
    (["\\frac{1}{2}"], "0.5", 1), (["34"], "35", 0), (["1,234"], "234", 0),
]  # fmt: skip


def test_the_answer_in_a_list_of_one_is_the_answer(grader):
    for texts, stated, reward in LISTS:
        for answer in (str(texts), json.dumps(texts)):
            assert only_answer(answer) == texts[0]
            assert grader.grade(f"\\boxed{{{stated}}}", answer, "stop") == reward, answer
    single = (r"['\frac{1}{2}']", r'["\sqrt{2}"]', r"['\xi']", r'["\text{B}"]')
    for other in (
        *single,
        "['1', '2']",
        "[1]",
        "[0,1)",
        "['",
        '["a]',
        "['a'](1)",
        "34",
        "",
        "{'a': 1}",
    ):
        assert only_answer(other) == other
