"""A reward for a batch: lists in, a list out, in a process that keeps what it has loaded."""

from __future__ import annotations

import math

import pytest
import torch

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.models.loading import load_causal_lm, load_tokenizer
from mismatch_cli.probe.tasks.rewards import AnsweredResponse, OwnReward, check_reward

FUNCTIONS = """
import os, time
import numpy as np

CALLS = []

def lengths(responses):
    CALLS.append(len(responses))
    return [len(text) for text in responses]

def process_and_calls(responses):
    CALLS.append(1)
    return [os.getpid(), len(CALLS)]

def everything(responses, answers, problems, finish_reasons):
    rows = zip(responses, answers, problems, finish_reasons)
    return np.array([(r == a) + (p == "p") / 2 + (f == "stop") / 4 for r, a, p, f in rows], dtype=np.float32)

def too_few(responses): return [1.0] * (len(responses) - 1)
def one_number(responses): return 1.0
def a_set(responses): return {1.0}
def nan(responses): return [1.0, float("nan")]
def text(responses): return ["1", "2"]
def broken(responses): return [1 / 0 for _ in responses]
def dies(responses): os._exit(1)
def sleeps(responses): time.sleep(30 if "long" in responses else 0); return [1.0 for _ in responses]
def mixed(responses, answer): return 0
def unknown(responses, weather): return 0
"""
ROWS = [AnsweredResponse("4", "4", "p", "stop"), AnsweredResponse("x", "5", "q", "length")]


def test_a_function_gets_lists_and_its_process_lives_on(reward_of):
    assert reward_of("everything").grade_all(ROWS) == [1.75, 0.0]
    reward = reward_of("process_and_calls")
    (first, calls), (second, second_calls) = reward.grade_all(ROWS), reward.grade_all(ROWS)
    assert first == second and (calls, second_calls) == (1, 2)
    assert reward_of("lengths").grade_all([]) == []
    assert reward_of("lengths").grade("four", None, "stop", "p") == 4


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("too_few", "returned 1 numbers for 2 responses"),
        ("one_number", "a float, not a list of numbers"),
        ("a_set", "a set, not a list of numbers"),
        ("nan", "returned nan. Call it yourself on the response 'x'"),
        ("text", "the text '1', not a number"),
        ("broken", "ZeroDivisionError"),
        ("dies", "its process died"),
        (
            "mixed",
            "parameters 'answer' and 'responses'. A reward grades either one response or a list "
            "of them",
        ),
        (
            "unknown",
            "the parameter 'weather'. It can have: response, .*; or, for lists of them, responses",
        ),
    ],
)
def test_anything_but_a_list_of_numbers_ends_the_run_with_its_reason(reward_of, name, said):
    with pytest.raises(MismatchError, match=said):
        reward_of(name).grade_all(ROWS)


def test_a_batch_that_takes_too_long_earns_nothing_and_is_counted(reward_of):
    """Its text is not kept, or a checkpoint would hold every response of the step."""
    reward, rows = (
        reward_of("sleeps", seconds=1),
        [
            AnsweredResponse("long", None, "p", "stop"),
            AnsweredResponse("x" * 70_000, None, "p", "stop"),
        ],
    )
    assert reward.grade_all(rows) == [0.0, 0.0] and reward.timeouts == 2
    (given_up,) = reward.child.given_up
    assert len(given_up) == 64
    assert reward.grade_all(rows[1:]) == [1.0]
    assert reward.grade_all(rows) == [0.0, 0.0] and reward.timeouts == 4  # at once
    other = reward_of("sleeps", seconds=5)
    other.child.give_up([given_up])
    assert other.grade_all(rows) == [0.0, 0.0] and other.timeouts == 2


MODEL_AS_REWARD = '''
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = AutoModelForCausalLM.from_pretrained({model!r}, dtype=torch.float32)
TOKENIZER = AutoTokenizer.from_pretrained({model!r})

@torch.inference_mode()
def fluency(responses, problems):
    """The mean log-prob of a response behind its problem."""
    found = []
    for response, problem in zip(responses, problems):
        prompt, said = (TOKENIZER.encode(text, add_special_tokens=False) for text in (problem, response))
        logits = MODEL(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(said)[:, None]).mean())
    return torch.stack(found)
'''


@pytest.mark.slow
def test_a_model_of_torch_judges_in_the_process(tmp_path):
    """A real model, loaded once within the memory limit of rewards; its numbers equal those of
    this process.
    """
    name = str(bundled("model"))
    (tmp_path / "judge.py").write_text(MODEL_AS_REWARD.format(model=name), encoding="utf-8")
    where = f"{tmp_path}/judge.py:fluency"
    reward = OwnReward(where)
    rows = [
        AnsweredResponse(said, None, "Tom has 3 apples.", "stop")
        for said in ("Tom has 7 apples.", "7 7 (")
    ]
    grades = [reward.grade_all(rows), reward.grade_all(rows)]
    reward.child.stop()
    model, tokenizer, expected = load_causal_lm(name, dtype="float32"), load_tokenizer(name), []
    for response, _, problem, *_ in rows:
        prompt, said = (
            tokenizer.encode(text, add_special_tokens=False) for text in (problem, response)
        )
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        expected.append(logits.log_softmax(-1).gather(1, torch.tensor(said)[:, None]).mean().item())
    assert grades[0] == grades[1] == pytest.approx(expected, abs=1e-4)
    assert grades[0][0] > grades[0][1] and all(map(math.isfinite, grades[0]))


@pytest.mark.slow
def test_a_reward_may_take_longer_to_load(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\ntime.sleep(1.5)\ndef f(responses): return responses\n"
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mismatch_cli.probe.tasks.rewards._TO_LOAD", 0.2)
        with pytest.raises(
            MismatchError,
            match=r"did not load within 0\.2 s\. Allow more, with a line reward_seconds",
        ):
            check_reward(f"{tmp_path}/slow.py:f")
        check_reward(f"{tmp_path}/slow.py:f", 30)
