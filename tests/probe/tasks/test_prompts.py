"""Problems from every kind of source, and unusable prompts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pandas as pd
import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.places import bundled
from mismatch_cli.models.loading import load_tokenizer
from mismatch_cli.probe.tasks import prompt_templates as _templates
from mismatch_cli.probe.tasks.prompts import Problem, PromptSource, encode_prompts, load_problems
from mismatch_cli.probe.tasks.source_rows import is_local
from tests.frameworks.importing.layouts import write_records

ROWS = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(5)]


def write(path: Path, rows=ROWS) -> str:
    if path.suffix == ".csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_records(path, rows)
    return str(path)


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet", ".csv"])
def test_every_local_format_reads_the_same(tmp_path, ending):
    problems = load_problems(PromptSource(write(tmp_path / f"p{ending}")))
    assert problems == [Problem(i, row["problem"], row["answer"]) for i, row in enumerate(ROWS)]


def test_shuffling_is_seeded_and_keeps_the_row_number(tmp_path):
    source = write(tmp_path / "p.jsonl")
    once = load_problems(PromptSource(source, shuffle_seed=3, limit=2))
    assert once == load_problems(PromptSource(source, shuffle_seed=3, limit=2))
    assert once != load_problems(PromptSource(source, shuffle_seed=4, limit=2))
    assert all(p.prompt == ROWS[p.prompt_id]["problem"] for p in once)


def test_fields_can_be_named_nested_and_chat_messages(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"x": messages, "reward_model": {"ground_truth": 7}}]
    (problem,) = load_problems(PromptSource(write(tmp_path / "p.jsonl", rows), prompt_field="x"))
    assert problem == Problem(0, messages, "7")


SYSTEM, USER, ASSISTANT = (
    {"role": role, "content": text}
    for role, text in (("system", "Be brief."), ("user", "1 + 1?"), ("assistant", "2"))
)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_model_s_template_renders_chat_messages(tmp_path, ending):
    """In `prompt` as in TRL's and verl's files; the result equals the tokenizer's own."""
    rows = [{"prompt": [USER | {"name": None}]}, {"prompt": [SYSTEM, USER, ASSISTANT, USER]}]
    problems = load_problems(PromptSource(write(tmp_path / f"p.{ending}", rows)))
    assert [p.prompt for p in problems] == [[USER], [SYSTEM, USER, ASSISTANT, USER]]
    tokenizer = load_tokenizer(str(bundled("model")))
    encoded = encode_prompts(problems, tokenizer, max_model_len=1000)
    for ids, problem in zip(encoded.prompt_ids, problems, strict=True):
        text = tokenizer.apply_chat_template(
            problem.prompt, add_generation_prompt=True, tokenize=False
        )
        assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_a_conversation_needs_a_chat_template():
    alone, conversation = Problem(0, [USER], None), Problem(1, [SYSTEM, USER], None)
    for template in ("raw", "r1-distill"):
        texts = encode_prompts(
            problems(USER["content"]), WordTokenizer(), template=template, max_model_len=99
        )
        prompts = encode_prompts([alone], WordTokenizer(), template=template, max_model_len=99)
        assert prompts.prompt_ids == texts.prompt_ids  # a single user message is a text
        with pytest.raises(
            MismatchError,
            match=rf"Prompt 1 is a conversation .system, user., .*template is {template}",
        ):
            encode_prompts(
                [alone, conversation], WordTokenizer(), template=template, max_model_len=99
            )
    long = Problem(2, [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, USER], None)
    with pytest.raises(MismatchError, match=r"\(system, user, assistant, user\), which needs"):
        encode_prompts([long], WordTokenizer(), template="raw", max_model_len=99)
    bare = WordTokenizer()
    bare.chat_template = None
    with pytest.raises(
        MismatchError, match="which needs a chat template, but the prompt template is raw"
    ):
        encode_prompts([conversation], bare, max_model_len=99)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "is neither text nor a list of chat messages"),
        ([{"role": "user"}], "is neither"),
        ([{"role": "user", "content": [{"type": "image"}]}], "is neither"),
        ([USER, None], "is neither"),
        ({"role": "user", "content": "hi"}, "is neither"),
        ([USER, ASSISTANT], "end with one by the assistant"),
    ],
)
def test_invalid_conversations(tmp_path, prompt, said):
    with pytest.raises(MismatchError, match=said):
        load_problems(PromptSource(write(tmp_path / "p.jsonl", [{"prompt": prompt}])))


def test_leading_zeros_of_an_answer_survive(tmp_path):
    rows = [{"problem": "a", "answer": "007"}]
    assert load_problems(PromptSource(write(tmp_path / "p.csv", rows)))[0].answer == "007"


def test_a_data_set_is_loaded_by_name_split_and_limit(tmp_path, monkeypatch, capfd):
    """A folder laid out like a hub repository goes through the same `datasets.load_dataset` as a
    name on the hub.
    """
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "math"
    repository.mkdir()
    write(repository / "train.jsonl")
    write(repository / "test.jsonl", ROWS[3:])
    assert len(load_problems(PromptSource(str(repository)))) == 5
    problems = load_problems(PromptSource(str(repository), split="test", limit=1))
    assert problems == [Problem(0, "What is 3 + 1?", "4")]
    with pytest.raises(MismatchError, match="Unknown split"):
        load_problems(PromptSource(str(repository), split="nope"))
    assert capfd.readouterr().err == ""  # the library shows no bar in a log


def test_a_name_that_is_neither_file_nor_data_set():
    with pytest.raises(MismatchError, match="not a local file"):
        load_problems(PromptSource("no-such/data-set"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", "", "holds no prompts"),
        ("p.jsonl", '{"problem": "a"}\n{oops\n', "line 2 is not JSON"),
        ("p.jsonl", "3\n", "not a JSON object"),
        ("p.json", "{}", "not a JSON list"),
        ("p.json", '[{"problem": "a"}, 3]', "not a JSON list of objects"),
        ("p.parquet", "nonsense", "cannot be read"),
        ("p.jsonl", '{"problem": 3}\n', "neither text nor"),
    ],
)
def test_bad_files_get_one_sentence(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(MismatchError, match=message):
        load_problems(PromptSource(str(tmp_path / name)))


def test_a_missing_file_and_an_unknown_ending(tmp_path):
    with pytest.raises(MismatchError, match="does not exist"):
        load_problems(PromptSource(str(tmp_path / "gone.jsonl")))
    (tmp_path / "p.xyz").write_text("a")
    with pytest.raises(UsageError, match=r"extension '\.xyz'"):
        load_problems(PromptSource(str(tmp_path / "p.xyz")))


@pytest.mark.parametrize(
    ("name", "local"),
    [("p.jsonl", True), ("gone.csv", True), ("p.txt", True), ("gone.txt", False), (".", False)],
)
def test_a_file_or_the_name_of_one_is_local_and_a_folder_or_another_name_is_not(
    tmp_path, name, local
):
    for existing in ("p.jsonl", "p.txt"):
        (tmp_path / existing).touch()
    assert is_local(str(tmp_path / name)) is local


def test_an_unknown_field_names_the_nearest(tmp_path):
    source = write(tmp_path / "p.jsonl")
    with pytest.raises(
        UsageError,
        match=r"prompt_field, .*p\.jsonl: Unknown field 'problm'. Did you mean problem\?",
    ):
        load_problems(PromptSource(source, prompt_field="problm"))
    with pytest.raises(UsageError, match="answer_field"):
        load_problems(PromptSource(source, answer_field="anwser"))


@pytest.mark.parametrize("ending", ["csv", "json", "jsonl"])
def test_the_mark_that_spreadsheets_write_is_not_part_of_the_first_name(tmp_path, ending):
    """Else the first column would be missing: with the answers in it, nothing would be graded."""
    text = {
        "csv": "answer,problem\n3,1 + 2?\n",
        "json": '[{"answer": "3", "problem": "1 + 2?"}]',
        "jsonl": '{"answer": "3", "problem": "1 + 2?"}\n',
    }[ending]
    path = tmp_path / f"p.{ending}"
    path.write_text(text, encoding="utf-8-sig")
    assert load_problems(PromptSource(str(path))) == [Problem(0, "1 + 2?", "3")]


def test_a_field_that_is_empty_in_every_row_hides_no_later_one(tmp_path):
    (tmp_path / "p.csv").write_text("problem,answer,solution\n1 + 2?,,3\n2 + 2?,,\n")
    source = str(tmp_path / "p.csv")
    assert [p.answer for p in load_problems(PromptSource(source))] == ["3", None]
    with pytest.raises(UsageError, match=r"answer_field, .*'answer' is empty in every row"):
        load_problems(PromptSource(source, answer_field="answer"))
    (tmp_path / "p.jsonl").write_text('{"problem": NaN, "prompt": "1 + 2?", "answer": NaN}')
    assert load_problems(PromptSource(str(tmp_path / "p.jsonl"))) == [Problem(0, "1 + 2?", None)]


class WordTokenizer:
    """One id per word; stands in for a tokenizer where only lengths and the template matter."""

    chat_template = "set"

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        return "USER " + messages[0]["content"] + " BOT"

    def encode(self, text, add_special_tokens=True, verbose=True):
        return [1] * add_special_tokens + [len(word) for word in text.split()]


def problems(*texts: str) -> list[Problem]:
    return [Problem(i, text, None) for i, text in enumerate(texts)]


def test_the_chat_template_is_applied_without_doubling_special_tokens():
    encoded = encode_prompts(problems("a bb"), WordTokenizer(), template="chat", max_model_len=10)
    assert encoded.prompt_ids == [[4, 1, 2, 3]]
    assert encoded.template == "chat"
    assert encode_prompts(
        problems("a bb"), WordTokenizer(), template="raw", max_model_len=10
    ).prompt_ids == [[1, 1, 2]]


def test_a_prompt_without_room_is_skipped_and_named():
    encoded = encode_prompts(
        problems("a", "a b c d"), WordTokenizer(), template="raw", max_model_len=4
    )
    assert [p.prompt_id for p in encoded.problems] == [0]
    (skipped,) = encoded.skipped
    assert skipped["prompt_id"] == 1 and "5 tokens, the context 4" in skipped["reason"]


def test_no_prompt_left_is_an_error():
    with pytest.raises(MismatchError, match="all 1 were skipped"):
        encode_prompts(problems("a b c d"), WordTokenizer(), template="raw", max_model_len=4)


def test_the_prompt_of_the_distilled_models_is_literal():
    class Literal(WordTokenizer):
        def encode(self, text, add_special_tokens=True, verbose=True):
            assert not add_special_tokens
            return [ord(character) for character in text]

    encoded = encode_prompts(
        problems("What is {1}?"), Literal(), template="r1-distill", max_model_len=1000
    )
    assert "".join(map(chr, encoded.prompt_ids[0])) == (
        "<｜begin▁of▁sentence｜><｜User｜>What is {1}? Please reason step by step, and put your "
        "final answer within \\boxed{}.\n"
        "<｜Assistant｜><think>\n"
    )


def test_no_template_repeats_an_instruction_that_is_there():
    """The sanity data on the hub are messages that already ask for a box."""
    asks = "What is 1 + 1? Please reason step by step, and put your final answer within \\boxed{}."
    for prompt in (asks, [{"role": "user", "content": asks}]):
        for template in ("r1-distill", "boxed", "answer-line"):
            text = CharTokenizer.of([Problem(0, prompt, "2")], template)
            assert text.count("\\boxed") == 1 and "Answer:" not in text, (template, text)
    r1 = CharTokenizer.of([Problem(0, asks, "2")], "r1-distill")
    assert r1 == f"<｜begin▁of▁sentence｜><｜User｜>{asks}\n<｜Assistant｜><think>\n"


class CharTokenizer(WordTokenizer):
    def encode(self, text, add_special_tokens=True, verbose=True):
        return [ord(character) for character in text]

    @classmethod
    def of(cls, posed: list[Problem], template: str) -> str:
        """The prompt as the model reads it."""
        encoded = encode_prompts(posed, cls(), template=template, max_model_len=1000)
        return "".join(map(chr, encoded.prompt_ids[0]))


def test_an_unknown_template_names_the_known_ones():
    with pytest.raises(UsageError, match="r1-distill"):
        encode_prompts(problems("a"), WordTokenizer(), template="r1", max_model_len=10)


def test_a_row_with_more_values_than_names_is_refused(tmp_path):
    """An unquoted comma would change the answer."""
    path = tmp_path / "p.csv"
    path.write_text("problem,answer\nOne, or two?,2\n", encoding="utf-8")
    with pytest.raises(MismatchError, match="line 2 has more values than the first line has names"):
        load_problems(PromptSource(path))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(bundled("model")))


def test_a_long_prompt_may_render_sixteen_times_its_length_beside_four_million(
    tokenizer, monkeypatch
):
    monkeypatch.setattr(_templates, "_MOST_TEXT", 100)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content * 16 }}")
    render = _templates._renderer(tokenizer)
    assert len(render([{"role": "user", "content": "a" * 500}])) == 8000
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content * 18 }}")
    with pytest.raises(MismatchError, match="renders 9,000 characters"):
        render([{"role": "user", "content": "a" * 500}])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            r"takes over 0\.4 s",
        ),
        # In C, where no signal handler of Python's is called
        ("{{ 10 ** (10 ** 9) }}", r"takes over 0\.4 s"),
        ("{{ 'a' * 10 ** 11 }}", "takes over 512 MiB of memory"),
        ("{{ 'a' * 5 * 10 ** 6 }}", "renders 5,000,004 characters"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "fails .*SecurityError"),
        ("{{ range(10 ** 9) | list }}", "fails .*OverflowError"),
        ("{{ raise_exception('roles\nmust alternate') }}", "fails .*roles"),
        ("{% if %}", "fails .*TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "fails .*ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails .*RecursionError"),
    ],
)
def test_a_chat_template_that_fails_or_never_ends_is_reported_with_its_prompt(
    tokenizer, monkeypatch, template, said
):
    # The others end by themselves, on a busy machine not immediately
    if said.startswith("takes over 0"):
        monkeypatch.setattr(_templates, "_SECONDS", 0.4)
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        "{% if messages[0].content == '1' %}" + template + "{% endif %}fine",
    )
    began, before = time.monotonic(), children()
    message = f"model's chat template {said}.* on prompt [01].*--prompt-template raw"
    with pytest.raises(MismatchError, match=message) as error:
        encode_prompts(problems("0", "1", "2"), tokenizer, template="chat", max_model_len=100)
    assert "\n" not in str(error.value) and time.monotonic() - began < 10
    assert children() <= before  # no process is left


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_templates_render_as_the_tokenizer_does(tokenizer):
    chats = {
        7: [{"role": "user", "content": "ünï ⏎ \U0001d518"}],
        9: [{"role": "user", "content": "x" * 10**5}],
    }
    options = {"add_generation_prompt": True, "tokenize": False}
    expected = [tokenizer.apply_chat_template(chat, **options) for chat in chats.values()]
    assert list(_templates.rendered(tokenizer, chats)) == expected


@pytest.mark.parametrize("row", [{"problem": "a\ud800"}, {"problem": "a", "answer": "\udfff"}])
def test_half_a_character_is_refused_with_its_row(tmp_path, row):
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"problem": "fine", "answer": "1"}) + "\n" + json.dumps(row)
    )
    with pytest.raises(MismatchError, match="row 1 holds half a character"):
        load_problems(PromptSource(str(tmp_path / "p.jsonl")))


def test_a_prompt_that_the_tokenizer_refuses_is_named():
    class Refuses(WordTokenizer):
        def encode(self, text, **_):
            raise TypeError("TextEncodeInput must be text")

    with pytest.raises(MismatchError, match="cannot encode prompt 0"):
        encode_prompts(problems("a"), Refuses(), template="raw", max_model_len=4)
