"""The bundled model and problems: size, tokenizer, split, right answers, and that the model is
as its README says.
"""

from __future__ import annotations

import json
import math
import random
import re
from itertools import islice

import pytest

from lab.makers import word_problems
from lab.makers.solutions import MISTAKES, NO_MISTAKES, solve, write_solution
from lab.makers.word_problems import LIMIT, Ref, WordProblem
from tests.paths import ROOT

pytestmark = pytest.mark.slow

FOLDER = ROOT / "sample_data"
ROWS = [json.loads(line) for line in (FOLDER / "problems.jsonl").read_text().splitlines()]
PERFECTIBLE = [json.loads(line) for line in (FOLDER / "perfectible.jsonl").read_text().splitlines()]
EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")
ARBITRARY = [
    r"Find $\frac{x^2-1}{\sqrt{y}}$ if $x \le 3$.",
    "naïve café — 東京 🙂",
    "a\n\n\tb   c\r\n",
    "",
    " 007 ",
]


def generated(n: int, seed: int = 5, for_training: bool = True) -> list[WordProblem]:
    return list(islice(word_problems.problems(seed, for_training), n))


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER / "model")


@pytest.fixture(scope="module")
def model():
    import torch
    from transformers import Qwen3ForCausalLM

    torch.set_num_threads(1)
    return Qwen3ForCausalLM.from_pretrained(FOLDER / "model", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def sampled(model, tokenizer):
    from lab.makers.measure import respond

    return respond(model, tokenizer, ROWS[:64], samples=4, seed=1)


def test_size_budget():
    files = [
        path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert sum(path.stat().st_size for path in files) <= 11 * 2**20


def test_training_problems_are_solved_sometimes_also_by_held_out_samples():
    assert len(PERFECTIBLE) >= 200
    assert len({row["row"] for row in PERFECTIBLE}) == len(PERFECTIBLE)
    for row in PERFECTIBLE:
        assert ROWS[row["row"]] == {"problem": row["problem"], "answer": row["answer"]}
        assert 0.2 <= row["accuracy"] <= 0.8 and 0.2 <= row["held_out_accuracy"] <= 0.8


def test_problems_are_many_and_different():
    assert len(ROWS) >= 400
    assert len({row["problem"] for row in ROWS}) == len(ROWS)
    assert all(set(row) == {"problem", "answer"} and row["answer"].isdigit() for row in ROWS)


def test_no_problem_can_be_in_the_training_stream():
    # The text alone decides its side, so it cannot be on both; checked on the bundled file and a
    # stretch of the stream.
    assert all(word_problems.held_out(row["problem"]) for row in ROWS)
    assert not any(word_problems.held_out(problem.text) for problem in generated(2000))


def test_generator_is_deterministic_and_varied():
    assert generated(50) == generated(50)
    assert generated(50) != generated(50, seed=6)
    assert len({problem.text for problem in generated(2000)}) > 1990


def test_answers_follow_from_the_steps():
    for problem in generated(1000):
        results: list[float] = []
        for step in problem.steps:
            left, right = (
                results[s.step] if isinstance(s, Ref) else s for s in (step.left, step.right)
            )
            results.append(
                {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[
                    step.operator
                ]
            )
            assert 1 <= results[-1] <= LIMIT and results[-1] == int(results[-1])
        assert results[-1] == problem.answer
        assert 2 <= len(problem.steps) <= 4


@pytest.mark.parametrize(
    ("tell", "start", "expected"),
    [
        ("gain", 20, "+"),
        ("lose", 20, "-"),
        ("multiply", 20, "*"),
        ("ask_share", 20, "/"),
        ("gain_groups", 20, "*+"),
        ("lose_groups", 60, "*-"),
    ],
)
def test_events_tell_the_numbers_they_use(tell, start, expected):
    for seed in range(50):
        story = word_problems.begin(random.Random(seed))
        story.count = story.holding = start
        if not getattr(word_problems, tell)(story):
            continue
        assert "".join(step.operator for step in story.steps) == expected
        said = {int(n) for n in re.findall(r"\d+", story.sentences[-1])}
        numbers = {
            s for step in story.steps for s in (step.left, step.right) if isinstance(s, int)
        } - {start}
        words = {"doubles": 2, "twice": 2, "triples": 3, "three": 3, "quadruples": 4, "four": 4}
        said |= {words[w] for w in re.findall(r"\w+", story.sentences[-1]) if w in words}
        assert said - {start} == numbers


def test_clean_solutions_are_right_line_by_line():
    rng = random.Random(3)
    for problem in generated(500):
        text = write_solution(rng, problem, NO_MISTAKES)
        equations = EQUATION.findall(text)
        assert len(equations) == len(problem.steps)
        assert all(word_problems.apply(op, int(a), int(b)) == int(c) for a, op, b, c in equations)
        assert text.endswith(f"\\boxed{{{problem.answer}}}")


def test_mistakes_come_at_the_stated_rate():
    rng = random.Random(4)
    problems = generated(3000)
    wrong = sum(
        solve(rng, p, MISTAKES)[0] != solve(rng, p, NO_MISTAKES)[0] for p in problems
    ) / len(problems)
    assert 0.3 < wrong < 0.6


def test_answers_are_gradable():
    math_verify = pytest.importorskip("math_verify")
    rng = random.Random(7)
    for problem in generated(20):
        parsed = math_verify.parse(write_solution(rng, problem, NO_MISTAKES))
        assert math_verify.verify(math_verify.parse(str(problem.answer)), parsed)
        assert not math_verify.verify(math_verify.parse(str(problem.answer + 1)), parsed)


def test_tokenizer_round_trips_any_text(tokenizer):
    rng = random.Random(8)
    texts = (
        [row["problem"] for row in ROWS]
        + [write_solution(rng, problem) for problem in generated(300)]
        + ARBITRARY
    )
    for text in texts:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_are_single_tokens_and_the_vocabulary_fits(tokenizer, model):
    assert len(tokenizer) == model.config.vocab_size
    assert len(tokenizer("12345").input_ids) == 5
    assert (
        tokenizer.eos_token_id == model.generation_config.eos_token_id == model.config.eos_token_id
    )


def test_training_prompt_is_the_chat_template(tokenizer):
    from lab.makers.train_model import encode

    problem = ROWS[0]["problem"]
    ids, n_prompt = encode(tokenizer, [(problem, "So \\boxed{3}")])[0]
    chat = [{"role": "user", "content": problem}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids[:n_prompt] == prompt
    assert (
        tokenizer.decode(prompt)
        == f"<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(ids[n_prompt:]) == "So \\boxed{3}<|im_end|>"


def test_weights_are_stored_in_bfloat16(model):
    from safetensors import safe_open

    with safe_open(FOLDER / "model" / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118 (not a dict)
    assert 1_000_000 <= model.num_parameters() <= 2_500_000


def test_sampled_accuracy_is_in_its_band(sampled):
    n = len(sampled.accuracy_G)
    # Four standard errors of a share of 4 n independent responses at p = 1/2.
    margin = 4 * 0.5 / math.sqrt(n) / 2
    assert 0.40 - margin < sampled.accuracy < 0.65 + margin
    assert sum(0 < a < 1 for a in sampled.accuracy_G) / n > 0.5


def test_responses_end(sampled):
    assert sampled.unfinished <= 2


def test_sampled_tokens_have_a_long_tail(sampled):
    assert sampled.share_between(0.0, 1e-2) >= 0.01
    assert all(sampled.share_between(10.0 ** -(k + 1), 10.0**-k) > 20 / 50_000 for k in range(1, 4))


def test_training_is_reproducible(tokenizer):
    import torch

    from lab.makers.train_model import Recipe, train

    torch.set_num_threads(1)
    first, second = ([], [])
    for losses in (first, second):
        train(tokenizer, Recipe(steps=2), lambda _, loss, losses=losses: losses.append(loss))
    assert first == second and first[0] != first[1]
