"""The ids between turns: the model's own ids stay as sampled, and the whole reads as the
template renders it.
"""

from __future__ import annotations

from typing import Any

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.models.loading import load_tokenizer
from mismatch_cli.probe.tasks.prompts import Problem, encode_prompts
from mismatch_cli.train.turns import Turns
from tests.train.learners import rollout_of

CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n"
    "' + m['content'] + '<|im_end|>\n"
    "' }}{% endfor %}"
)
TEMPLATES = {
    "of the model": None,
    "a default system": "{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}" + CHAT,
    "no end of a turn": CHAT.replace("<|im_end|>", ""),
}
GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(str(bundled("model")))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_whole_reads_as_the_template_renders_the_conversation(tokenizer, name):
    if TEMPLATES[name] is not None:
        tokenizer.chat_template = TEMPLATES[name] + GENERATION
    chat = [{"role": "user", "content": "Guess."}]
    (ids,) = encode_prompts([Problem(0, "Guess.", None)], tokenizer, max_model_len=500).prompt_ids
    end = [] if name == "no end of a turn" else tokenizer.encode("<|im_end|>")
    turns = Turns(tokenizer, "chat")
    for said, answer in (
        ("12", "More."),
        ("47", [{"role": "tool", "content": "Less."}, {"role": "user", "content": "?"}]),
    ):
        turn = rollout_of(tokenizer.encode(said) + end)
        (between,) = turns.after([turn], [answer])
        ids = ids + turn.response_ids + between
        chat += [
            {"role": "assistant", "content": said},
            *([{"role": "user", "content": answer}] if isinstance(answer, str) else answer),
        ]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids) == whole and ids == tokenizer.encode(
        whole, add_special_tokens=False
    )


def test_a_template_that_drops_earlier_thoughts_changes_nothing(tokenizer):
    """It would render a different history, which the model did not sample."""
    said, turns = rollout_of(tokenizer.encode("7</think>12<|im_end|>")), []
    for template in (CHAT, CHAT.replace("m['content']", "m['content'].split('</think>')[-1]")):
        tokenizer.chat_template = template + GENERATION
        turns.append(Turns(tokenizer, "chat").after([said], ["More."]))
    assert turns[0] == turns[1]


def test_the_template_ends_a_truncated_turn(tokenizer):
    end, text = tokenizer.encode("<|im_end|>"), tokenizer.encode("12")
    cut, whole = rollout_of(text, finish_reason="length"), rollout_of(text + end)
    for answer in ("More.", ""):
        after_cut, after_whole = Turns(tokenizer, "chat").after([cut, whole], [answer] * 2)
        assert after_cut == end + after_whole
    other = rollout_of([*text, 0])  # a different end token from the template's
    assert Turns(tokenizer, "chat").after([other], ["More."])[0][:1] == end


def test_raw_observations_stay_as_they_are(tokenizer):
    for settings in ("raw", "chat"):  # a tokenizer without a template gets them raw
        tokenizer.chat_template = None
        said = rollout_of(tokenizer.encode("\n"))
        assert Turns(tokenizer, settings).after([said], ["\nMore."]) == [
            tokenizer.encode("\nMore.")
        ]
    with pytest.raises(MismatchError, match="conversation"):
        Turns(tokenizer, "raw").after([said], [[{"role": "tool", "content": "x"}]])


def test_repeated_and_new_observations(tokenizer):
    turns, said = Turns(tokenizer, "chat"), rollout_of([5], finish_reason="length")
    first = turns.after([said] * 3, ["a", "b", "a"])
    assert first[0] == first[2] != first[1] and turns.after([said], ["b"]) == [first[1]]
    assert turns.after([], []) == []


def test_a_template_that_forgets_the_assistant_is_refused(tokenizer):
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(MismatchError, match="drops earlier assistant messages"):
        Turns(tokenizer, "chat").after([rollout_of([5])], ["a"])
