"""Settings: parts that compose a configuration, values by key from several places, and back."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.options import (
    by_key,
    override,
    replace_settings,
    setting,
    settings_group,
    settings_of,
    values_by_key,
)
from mismatch_cli.base.values import (
    Values,
    as_typed,
    check_typed,
    confirmed,
    read,
    resumed,
    toml,
    toml_line,
)


@dataclass(frozen=True, kw_only=True)
class Engine:
    name: str = setting("vllm", "Engine.", key="engine", choices=("engine", ("vllm", "hf")))
    dtype: str = setting("auto", "Dtype.", key="rollout_dtype", flag=False)
    cache: str | None = setting(None, "Cache.", key="kv_cache_dtype", nothing="auto")
    threads: int | None = setting(None, "Threads.", least=0, most=64, nothing=0, changeable=True)
    eager: bool | None = setting(None, "Eager.", flag=False, off="--compiled", changeable=True)
    url: str | None = setting(None, "URL.", typed=True)


@dataclass(frozen=True, kw_only=True)
class Own:
    steps: int = setting(3, "Steps.", least=1, why=": a run has a step")
    keep: tuple[float, float] = setting((0.2, 0.8), "Keep.")
    folder: Path | None = setting(None, "Folder.")
    engine: Engine = settings_group(Engine, dtype=override("bfloat16"))


@dataclass(frozen=True, kw_only=True)
class Few:
    engine: Engine = settings_group(Engine, "name", "url", name=override(None))


def test_a_configuration_is_built_from_keys_and_flattened_again() -> None:
    config = Values.of({"rollout_dtype": "float32", "steps": 7, "keep": [0.1, 0.9]}).build(Own)
    assert (config.engine.dtype, config.engine.name, config.keep) == ("float32", "vllm", (0.1, 0.9))
    values = values_by_key(config)
    assert list(values)[:4] == ["steps", "keep", "folder", "engine"]
    assert Values.of(values).build(Own) == config
    assert (
        replace_settings(config, steps=9).steps == 9
        and replace_settings(config, steps=9).engine == config.engine
    )


def test_what_is_remembered_of_a_dataclass_is_remembered_once() -> None:
    settings = [list(settings_of(Own)) for _ in range(2)]
    assert all(first is again for first, again in zip(*settings, strict=True))


def test_a_part_has_its_own_defaults_and_only_the_settings_that_it_names() -> None:
    assert Own().engine.dtype == "bfloat16" and Engine().dtype == "auto"
    assert [each.key for each in settings_of(Few)] == ["engine", "url"]
    few = Values.of({}).build(Few)
    assert few.engine.name is None, "a command may leave unset what others have a default for"
    assert values_by_key(few).keys() == {"engine", "url"}
    with pytest.raises(ValueError, match="Engine has no setting naem"):
        settings_group(Engine, naem=override("hf"))


@pytest.mark.parametrize(
    ("meaning", "key", "value"),
    [
        ({"threads": 0}, "threads", None),
        ({"threads": 5}, "threads", 5),
        ({"kv_cache_dtype": "auto"}, "kv_cache_dtype", None),
        ({"kv_cache_dtype": ""}, "kv_cache_dtype", None),
        ({"url": ""}, "url", None),
        ({"eager": False}, "eager", False),
    ],
)
def test_what_stands_for_nothing_is_none(meaning, key, value) -> None:
    assert values_by_key(Values.of(meaning).build(Own))[key] == value


def test_a_file_has_the_words_for_nothing_and_is_read_back_the_same() -> None:
    config = Values.of({"steps": 2, "engine": "hf"}).build(Own)
    settings, values = by_key(Own), values_by_key(config)
    assert toml_line(settings["threads"], None) == "threads = 0"
    assert toml_line(settings["kv_cache_dtype"], None) == 'kv_cache_dtype = "auto"'
    assert toml_line(settings["keep"], (0.2, 0.8)) == "keep = [0.2, 0.8]"
    spelled = [
        key for key in values if settings[key].nothing is not None or values[key] is not None
    ]
    text = "\n".join(toml_line(settings[key], values[key]) for key in spelled)
    assert read(Own, tomllib.loads(text), "a.toml").build(Own) == config


@pytest.mark.parametrize("text", ["Q: {problem}\nA:", 'a "b" \\ c', "\t\r\x00\x1b\x7f", "μ ⏎ 😀"])
def test_a_text_is_one_line_of_a_file_and_read_back_the_same(text) -> None:
    """A template has line breaks, with which the file of a run could not be read again."""
    line = f"key = {toml([text, True, 0.5])}"
    assert len(line.splitlines()) == 1 and tomllib.loads(line) == {"key": [text, True, 0.5]}


def test_the_first_place_that_gives_a_value_wins_and_is_remembered() -> None:
    typed, file = Values.of({"steps": 1}), Values.of({"steps": 2, "engine": "hf"}, "a.toml")
    values = typed.over(file).over({"threads": 4, "engine": "vllm"}, "preset b")
    assert dict(values) == {"steps": 1, "engine": "hf", "threads": 4}
    places = {key: values.source(key) for key in ("steps", "engine", "threads", "url")}
    assert places == {"steps": "", "engine": "a.toml", "threads": "preset b", "url": None}
    assert values.typed == {"steps"} and dict(values.without("steps")) == {
        "engine": "hf",
        "threads": 4,
    }


@pytest.mark.parametrize(
    ("key", "value", "place", "said"),
    [
        ("steps", 0, "", "--steps 0 is too small. Use at least 1: a run has a step."),
        ("steps", 0, "a.toml", "a.toml: steps = 0 is too small. Use at least 1: a run has a step."),
        ("threads", 99, "MISMATCH_THREADS", "MISMATCH_THREADS = 99 is too large. Use at most 64."),
        ("engine", "hff", "a.toml", "a.toml: engine: Unknown engine 'hff'. Did you mean hf?"),
        ("engine", "hff", "", "--engine: Unknown engine 'hff'."),
        ("engine", "hff", "MISMATCH_ENGINE", "MISMATCH_ENGINE: Unknown engine 'hff'."),
    ],
)
def test_a_wrong_value_is_named_as_it_was_given(key, value, place, said) -> None:
    with pytest.raises(UsageError) as error:
        Values.of({key: value}, place).build(Own)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"stepps": 1}, "a.toml: Unknown setting 'stepps'. Did you mean steps?"),
        ({"steps": "many"}, 'a.toml: steps = "many" must be a whole number.'),
        ({"steps": True}, "a.toml: steps = true must be a whole number."),
        ({"steps": 1.0}, "a.toml: steps = 1.0 must be a whole number."),
        ({"eager": 1}, "a.toml: eager = 1 must be true or false."),
        ({"keep": ["a", 1]}, 'a.toml: keep = "a" must be a number.'),
        ({"engine": {"name": "hf"}}, "must be text."),
        ({"engine": 5}, "a.toml: engine = 5 must be text."),
    ],
)
def test_a_file_is_checked_for_names_and_types(content, said) -> None:
    with pytest.raises(UsageError) as error:
        read(Own, content, "a.toml")
    assert said in str(error.value)


def test_only_the_command_line_names_a_host() -> None:
    content = read(Own, {"url": "http://x"}, "a.toml")
    with pytest.raises(UsageError, match=r"may not set it\. If you trust it, add: --url"):
        check_typed(Own, content, Values.of({}))
    check_typed(Own, content, Values.of({"url": "http://x"}))
    check_typed(Own, read(Own, {"url": ""}, "a.toml"), Values.of({}))


def test_a_resumed_run_changes_only_how_its_work_is_done() -> None:
    recorded = {"steps": 5, "threads": 2, "keep": [0.2, 0.8], "engine": "hf"}
    after = resumed(Own, Values.of({"threads": 8, "steps": 5, "keep": (0.2, 0.8)}), recorded)
    assert dict(after) == recorded | {"threads": 8}
    with pytest.raises(UsageError, match="--steps differs from the run to resume"):
        resumed(Own, Values.of({"steps": 6}), recorded)
    from_file = Values.of({"steps": 6}, "a.toml")
    assert resumed(Own, from_file, recorded)["steps"] == 5, "a file does not change a recorded run"


def test_a_file_changes_what_has_no_flag_and_confirms_what_was_recorded() -> None:
    values = Values.of({"eager": True, "threads": 9, "rollout_dtype": "float32"}, "a.toml")
    recorded = {"eager": False, "threads": 2, "rollout_dtype": "float32", "steps": 5}
    after = resumed(Own, values, recorded)
    assert dict(after) == recorded | {"eager": True}, "a flag is typed to change a run"
    assert confirmed(Own, values, recorded) == {"rollout_dtype"}
    assert confirmed(Own, Values.of({"steps": 5, "threads": 3}), recorded) == {"steps"}


def test_words_without_a_flag_are_variables_before_the_command() -> None:
    variables, typed = as_typed(
        Own, ["run", "--rollout-dtype", "a b", "--steps", "3", "--compiled", Path("x")]
    )
    assert variables == ["MISMATCH_ROLLOUT_DTYPE='a b'", "MISMATCH_EAGER=false"]
    assert typed == ["run", "--steps", "3", Path("x")]
    assert as_typed(Own, ["--eager"])[0] == ["MISMATCH_EAGER=true"]
