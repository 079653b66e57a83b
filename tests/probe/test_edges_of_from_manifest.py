"""How a value of a damaged manifest is shown, and which engine arguments have to be typed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.probe import from_manifest
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
