"""How a value of a damaged manifest is shown, and which engine arguments have to be typed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.probe import from_manifest
from mismatch_cli.probe.config import ProbeConfig
from mismatch_cli.probe.engine_arguments import unlisted_arguments
from mismatch_cli.probe.from_manifest import damaged_setting


@pytest.mark.parametrize(("letters", "is_whole"), [(58, True), (59, False)])
def test_a_damaged_value_of_up_to_60_characters_is_shown_whole(letters, is_whole):
    """Its quotes count; a longer value of one word leaves only the mark of what is missing."""
    value = "a" * letters
    message = str(damaged_setting(Path("run"), "seed", value))
    assert (f"(seed is '{value}')" in message) == is_whole
    assert ("(seed is …)" in message) != is_whole


@pytest.mark.parametrize(
    ("items", "unlisted"),
    [
        ([], False),
        (["max_num_seqs=64"], False),
        (["max_num_seqs=64", "enforce_eager=true"], False),
        (["max_num_seqs=64", "worker_cls=evil.Worker"], True),
        (["worker_cls=evil.Worker", "max_num_seqs=64"], True),
        (["worker_cls=evil.Worker"], True),
    ],
)
def test_one_unlisted_engine_argument_among_others_has_to_be_typed(items, unlisted):
    assert unlisted_arguments(items) == unlisted


@pytest.mark.parametrize("name", ["gsm8k", "openai/gsm8k"])
def test_prompts_that_are_no_file_are_a_data_set_in_the_hubs_cache(name, monkeypatch):
    kept_off = []
    monkeypatch.setattr(from_manifest, "keep_off_the_hub", lambda: kept_off.append(name))
    from_manifest.check_file(name, Path("run"), SimpleNamespace(key="prompts"))
    assert kept_off == [name]


@pytest.mark.parametrize("name", ["of/no/hub", "two words", "problems?.jsonl"])
def test_prompts_that_are_no_file_and_no_name_on_the_hub_are_damage(name):
    with pytest.raises(MismatchError, match="is damaged"):
        from_manifest.check_file(name, Path("run"), SimpleNamespace(key="prompts"))


def test_engine_arguments_are_taken_without_a_url_and_without_typed_ones():
    recorded = {"url": "http://host", "max_num_seqs": 64, "enforce_eager": True}
    taken = from_manifest.engine_arguments(recorded, {"enforce_eager"}, Path("run"))
    assert taken == {"max_num_seqs": 64}


def test_the_sampler_of_a_manifest_is_what_has_the_type_of_each_setting():
    recorded = {
        "temperature": 0.7,
        "top_p": True,
        "top_k": 2.5,
        "min_p": 0,
        "max_tokens": 9,
        "x": 1,
    }
    assert from_manifest.sampler_of(recorded) == {"temperature": 0.7, "min_p": 0, "max_tokens": 9}
    assert from_manifest.sampler_of({"top_k": 20}) == {"top_k": 20}
    assert from_manifest.sampler_of(None) == from_manifest.sampler_of(["top_k"]) == {}


def test_an_engine_a_dtype_and_an_attention_have_names_that_are_listed_or_plain():
    source = Path("run")
    assert from_manifest.engine_of("hf", source) == "hf"
    assert from_manifest.dtype_of({"dtype": "bfloat16"}, source) == "bfloat16"
    assert from_manifest.dtype_of({}, source) == from_manifest.dtype_of({"dtype": ""}, source)
    assert from_manifest.dtype_of({}, source) == "auto"
    assert from_manifest.attention_of({"attn_implementation": "sdpa"}, source) == "sdpa"
    assert from_manifest.attention_of({}, source) is None
    for read, value in (
        (from_manifest.engine_of, "evil"),
        (from_manifest.dtype_of, {"dtype": "evil"}),
        (from_manifest.attention_of, {"attn_implementation": "evil/kernels"}),
    ):
        with pytest.raises(MismatchError, match="is damaged"):
            read(value, source)


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [
        (3, int, True),
        (True, int, False),
        (2.0, int, False),
        (3, float, True),
        (2.5, float, True),
        (True, float, False),
        ("3", float, False),
        (True, bool, True),
        (["a", "b"], list[str], True),
        (["a", 1], list[str], False),
        ("ab", list[str], False),
        ([0.2, 1], tuple[float, float], True),
    ],
)
def test_a_value_of_json_has_the_type_of_its_setting(value: Any, kind: Any, fits):
    assert from_manifest._fits(value, kind) is fits


@pytest.mark.parametrize(
    ("value", "inside"),
    [(1, True), (9, True), (0, False), (10, False), (float("nan"), False), ("text", True)],
)
def test_both_ends_of_a_range_are_in_it(value, inside):
    assert from_manifest._in_range(value, {"least": 1, "most": 9}) is inside
    assert from_manifest._in_range(5, {}) is True


def test_a_flag_that_is_repeated_is_typed_once_for_each_item_and_an_argument_without_one():
    repeated = SimpleNamespace(about={}, as_flag="--engine-arg")
    assert from_manifest._words_to_type(repeated, ["a=1", "b=2"]) == [
        "--engine-arg", "a=1", "--engine-arg", "b=2",
    ]  # fmt: skip
    argument = SimpleNamespace(about={"argument": True}, as_flag="MODEL")
    assert from_manifest._words_to_type(argument, 7) == ["7"]


def test_what_has_to_be_typed_is_words_lines_or_both():
    source = Path("run")
    words, lines = ["--reward", "a b.py:f"], ["trainer_adapter = 'x'"]
    both = str(from_manifest.must_be_typed(source, words, lines))
    assert "recorded with --reward 'a b.py:f'; trainer_adapter = 'x'. A manifest" in both
    assert "add these words to your command and write this into a file that --config names." in both
    assert "--config" not in str(from_manifest.must_be_typed(source, words))
    assert "your command" not in str(from_manifest.must_be_typed(source, (), lines))


def test_an_adapter_that_only_the_manifest_names_has_to_be_typed():
    adapter_of = from_manifest.adapter_of
    assert adapter_of("mine", "theirs", Path("run"), "rollout_adapter") == "mine"
    assert adapter_of(None, None, Path("run"), "rollout_adapter") is None
    with pytest.raises(UsageError, match=r"rollout_adapter = .*theirs"):
        adapter_of(None, "theirs", Path("run"), "rollout_adapter")


def taken(recorded: dict[str, Any], typed: Any = ()) -> dict[str, Any]:
    return from_manifest.taken_from(ProbeConfig, recorded, typed, Path("run"))


def test_what_is_set_and_not_typed_is_taken():
    recorded = {"num_prompts": 3, "temperature": 1, "seed": 5, "eager": False, "split": "test"}
    unset = {"threads": 0, "max_tokens": None, "served_model": "", "trainer_adapter": ""}
    assert taken(recorded | unset | {"unknown": 1}, {"seed", "top_p"}) == {
        name: value for name, value in recorded.items() if name != "seed"
    }
    data = {"reward": "rare-opener", "engine_arg": ["max_num_seqs=4"], "served_model": "org/m"}
    assert taken(data) == data


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_prompts", "3"),
        ("num_prompts", 0),
        ("seed", 2**32),
        ("temperature", True),
        ("split", "a/b"),
        ("split", "s" * 201),
        ("served_model", "http://host/m"),
        ("model", "http://host/m"),
    ],
)
def test_a_value_of_another_type_range_or_form_is_damage(key, value):
    with pytest.raises(MismatchError, match="is damaged"):
        taken({key: value})
    assert taken({key: value}, {key}) == {}  # typed, so that the manifest's is not read


@pytest.mark.parametrize(
    ("recorded", "words"),
    [
        ({"reward": "a.py:f"}, "with --reward a.py:f. A manifest"),
        ({"engine_url": "http://a"}, "with --engine-url http://a. A manifest"),
        ({"prompts": "http://a"}, "with --prompts http://a. A manifest"),
        ({"trainer_adapter": "lora"}, 'with trainer_adapter = "lora". A manifest'),
        (
            {"reward": "a.py:f", "trainer_adapter": "lora", "seed": 5},
            'with --reward a.py:f; trainer_adapter = "lora". A manifest',
        ),
        (
            {"engine_arg": ["max_num_seqs=4", "worker_cls=x"]},
            "with --engine-arg max_num_seqs=4 --engine-arg worker_cls=x. A manifest",
        ),
    ],
)
def test_code_hosts_and_adapters_are_shown_as_they_are_typed(recorded, words):
    with pytest.raises(UsageError) as error:
        taken(recorded)
    assert words in str(error.value)


def test_an_engine_argument_that_is_not_listed_has_to_be_typed_unless_it_is():
    recorded = {"worker_cls": "x", "max_num_seqs": 4}
    with pytest.raises(UsageError, match=r"with worker_cls=x\. A manifest"):
        from_manifest.engine_arguments(recorded, (), Path("run"))
    assert from_manifest.engine_arguments(recorded, {"worker_cls"}, Path("run")) == {
        "max_num_seqs": 4
    }
    assert from_manifest.engine_arguments(None, (), Path("run")) == {}
