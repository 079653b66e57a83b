"""An engine setting that is text, under a name typed with hyphens."""

from __future__ import annotations

import pytest

from mismatch_cli.base.errors import UsageError
from mismatch_cli.probe.engine_arguments import (
    _SPECULATION,
    is_count,
    is_listed,
    is_name_on_server,
    is_number,
    is_word,
    parsed_arguments,
    spelled,
)


def test_hyphens_of_a_name_become_underscores_whatever_the_value_is():
    arguments = parsed_arguments(["load-format=dummy", "max-num-seqs=64"])
    assert arguments == {"load_format": "dummy", "max_num_seqs": 64}


def test_a_name_on_a_server_is_text_without_an_address():
    assert is_name_on_server("org/model:7b v2") and is_name_on_server("a" * 200)
    for value in (7, None, "", "a" * 201, "http://elsewhere/model", "a\nb"):
        assert not is_name_on_server(value)


@pytest.mark.parametrize(
    ("value", "number", "count"),
    [
        (0, True, True),
        (0.0, True, False),
        (2**48 - 1, True, True),
        (2**48, False, False),
        (-1, False, False),
        (True, False, False),
        (float("nan"), False, False),
        ("1", False, False),
        (None, False, False),
    ],
)
def test_a_number_is_at_least_0_and_below_2_to_the_48(value, number, count):
    assert (is_number(value), is_count(value)) == (number, count)


def test_a_word_has_40_characters_at_most_and_no_dot_or_slash():
    assert is_word("fp8_e4m3-x") and is_word("a" * 40)
    for value in ("a" * 41, "", "a.b", "a/b", "a b", 7):
        assert not is_word(value)


@pytest.mark.parametrize(
    ("name", "value", "listed"),
    [
        ("max_num_seqs", 64, True),
        ("max_num_seqs", 64.0, False),
        ("max_num_seqs", None, True),
        ("worker_cls", None, False),
        ("gpu_memory_utilization", 0.5, True),
        ("enforce_eager", False, True),
        ("enforce_eager", 1, False),
        ("hf_overrides", {"rope": {"factor": -2.5, "type": "yarn", "on": True, "x": None}}, True),
        ("hf_overrides", {"auto_map": "x"}, False),
        ("hf_overrides", {"a.b": 1}, False),
        ("hf_overrides", {"c": 2, "a.b": 1}, False),
        ("hf_overrides", {"rope": {"path": "/etc"}}, False),
        ("hf_overrides", {"rope": {"factor": 2.0, "path": "/etc"}}, False),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 3}, True),
        ("speculative_config", dict.fromkeys(_SPECULATION, 3), True),
        ("speculative_config", {"method": "ngram", "model": "draft"}, False),
        ("speculative_config", {"method": "a/b"}, False),
        ("speculative_config", "ngram", False),
    ],
)
def test_which_arguments_a_manifest_may_set(name, value, listed):
    assert is_listed(name, value) is listed


def test_values_are_json_or_else_text_and_are_spelled_as_they_were_typed():
    words = ["a=1", 'b={"c": [true, null]}', "d=x=y", "e=", "f=007"]
    arguments = {"a": 1, "b": {"c": [True, None]}, "d": "x=y", "e": "", "f": "007"}
    assert parsed_arguments(words) == arguments and spelled(arguments) == words
    for word in ("a", "=1", ""):
        with pytest.raises(UsageError, match="is not KEY=VALUE"):
            parsed_arguments([word])
    with pytest.raises(UsageError, match="would apply to one side only"):
        parsed_arguments(["trust-remote-code=true"])
