"""The laws of settings: each is declared once, with one help; commands have as many flags as a person
can hold; and what has no flag is answered with the line to write.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

from mismatch_cli.app.cli import build_app, run
from mismatch_cli.base.configuration import WRITTEN
from mismatch_cli.base.options import Setting
from tests import house
from tests.paths import PACKAGE, ROOT

GROUP = typer.main.get_command(build_app())
COMMANDS = GROUP.list_commands(None)  # type: ignore[attr-defined,arg-type]
# `--help` and `--config` count, an option and its `--no-` form are one
MOST_FLAGS = defaultdict(lambda: 26, train=45, probe=36)
MOST_LINES = defaultdict(lambda: 80, train=110)  # of `--help` at 80 columns
ALWAYS = (
    "algorithm model dataset prompts reward environment steps seed learning_rate "
    "max_grad_norm num_problems num_prompts prompts_per_step samples_per_prompt max_tokens "
    "temperature minibatches epochs eval_every engine engine_url rollout_dtype trainer_dtype "
    "kv_cache_dtype float32_head adapter lora trainer_model prompt_template preset like "
    "nproc tensor_parallel threads workers token_budget replay_routes full_divergence resume "
    "force output json full quiet no_plots trust_remote_code config show_config track seeds "
    "stages budget"
)
# Keys that mean different things to different commands
SEVERAL_MEANINGS = {
    "algorithm": "the one of a run, and those that are looked at",
    "as": "also logged, or only printed",
    "model": "a model, or in `verdict` the family of one",
    "trace": "what `rescore` reads, and what `bisect` searches or probes",
    "weights": "whose they are in `rescore`, and which kind a dump has",
}
# Helps that a command words itself: what its own output is, or what it does with the setting
OWN_WORDS = {
    "trace",
    "output",
    "json",
    "traces",
    "algorithm",
    "trainer_model",
    "trainer_dtype",
    "engine_arg",
    "as",
    "model",
    "run",
    "weights",
}


@cache
def settings(command: str) -> dict[str, Setting]:
    own_settings = GROUP.get_command(None, command).callback.settings  # type: ignore[attr-defined,arg-type]
    return {each.key: each for each in own_settings.values()}


def without_flag(command: str) -> list[Setting]:
    return [each for each in settings(command).values() if not each.is_typed]


def declarations() -> Iterator[tuple[str, str]]:
    """The key and file of each setting that a class of the package declares."""
    for file in house.files():
        for field in (node for node in file.nodes if isinstance(node, ast.AnnAssign)):
            call = field.value
            function = getattr(call.func, "id", "") if isinstance(call, ast.Call) else ""
            if re.match(r"setting$|_?(of|for|at)_", function):
                keywords = {word.arg: word.value for word in call.keywords}
                key = keywords.get("key")
                yield ast.literal_eval(key) if key else ast.unparse(field.target), file.name


def test_each_setting_is_declared_once() -> None:
    by_key = defaultdict(list)
    for key, path in declarations():
        by_key[key].append(path)
    assert len(by_key) > 120
    again = {key: paths for key, paths in by_key.items() if len(paths) > 1}
    assert again.keys() == SEVERAL_MEANINGS.keys(), again
    assert all(len(paths) == 2 for paths in again.values()), again
    every = {key for name in COMMANDS for key in settings(name)} - {"config"}
    assert every == by_key.keys()


def test_each_setting_has_one_help() -> None:
    helps = defaultdict(set)
    for name in COMMANDS:
        for key, setting in settings(name).items():
            helps[key].add(setting.about["help"])
    assert {key for key, words in helps.items() if len(words) > 1} <= OWN_WORDS


@pytest.mark.parametrize("name", COMMANDS)
def test_the_flags_of_a_command_can_be_held_and_its_help_read(name, monkeypatch, capsys) -> None:
    own_settings = settings(name)
    flags = [each for each in own_settings.values() if each.has_flag]
    assert len(flags) + 1 <= MOST_FLAGS[name]
    always = ALWAYS.split() if name != "import" else []  # whose dtypes never had a flag
    missing = [key for key in always if key in own_settings and not own_settings[key].is_typed]
    assert not missing
    monkeypatch.setenv("COLUMNS", "80")
    assert run([name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) <= MOST_LINES[name]
    keys = printed.partition("Without a flag")[2]
    assert all(re.search(rf"\b{each.key}\b", keys) for each in without_flag(name))
    assert bool(keys) == bool(without_flag(name))


def sample(setting: Setting) -> str:
    """A value that this setting can have, as it is typed."""
    if "choices" in setting.about:
        names = setting.about["choices"][1]
        return sorted(names() if callable(names) else names)[0]
    number = max(setting.about.get("least", 1), 1)
    samples = {int: str(number), float: "0.5", str: "word"}
    return samples.get(setting.type, "word")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_key_that_is_typed_is_answered_with_the_line_to_write(
    name, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.delenv(WRITTEN)
    monkeypatch.chdir(tmp_path)
    for setting in without_flag(name):
        typed = [setting.as_flag, *([] if setting.type is bool else [sample(setting)])]
        assert run([name, *typed]) == 2
        said = " ".join(capsys.readouterr().err.split())
        line = re.search(r"FILE\.toml: (.+?) \(Or set (\w+)\.\)", said)
        assert line is not None, said
        written = tomllib.loads(line[1])
        assert list(written) == [setting.key] and line[2] == f"MISMATCH_{setting.key.upper()}"
        file = tmp_path / "written.toml"
        file.write_text(line[1], encoding="utf-8")
        assert run([name, "--config", str(file), "--help"]) == 0  # the file is read, and fits
        capsys.readouterr()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("probe --no-prefix-caching", "--no-prefix-caching is a key of --config"),
        ("probe --no-prefix-caching", "prefix_caching = false"),
        ("probe --compiled", "eager = false"),
        ("probe --top_p=0.9", "top_p = 0.9"),
        ("probe --top-p", "top_p = VALUE"),
        ("train --lora-rank x", "lora_rank = x"),
        ("bisect run --engine-arg a=1", "type KEY=VALUE by itself"),
        ("bisect a=1", "follow the trace: mismatch-cli bisect TRACE a=1"),
        ("probe --top_lgprobs 3", "No such option: --top_lgprobs"),
    ],
)
def test_whatever_is_typed_like_a_key_is_answered(line, said, monkeypatch, capsys) -> None:
    monkeypatch.delenv(WRITTEN)
    monkeypatch.setenv("COLUMNS", "200")
    assert run(line.split()) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert said in printed and "(Possible options: --top" not in printed


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_without_any_word_is_parsed_for_a_user_too(name, monkeypatch) -> None:
    monkeypatch.delenv(WRITTEN)
    command = GROUP.get_command(None, name)  # type: ignore[attr-defined,arg-type]
    assert command.make_context(name, []).params
    assert command.make_context(name, ["--config", "/dev/null"]).params


def test_a_typed_algorithm_stands_in_for_the_file_of_a_preset(tmp_path, monkeypatch) -> None:
    preset = tmp_path / "own.toml"
    preset.write_text('algorithm = "mask.py"\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    shown = ["train", "--preset", str(preset), "--show-config"]
    assert run(shown) == 2 and run([*shown, "-a", "pg-is"]) == 0


def texts() -> Iterator[tuple[str, str]]:
    """What people read: string constants of the package, and the pages of docs/."""
    for file in house.files():
        yield from ((file.place(node), node.value) for node in file.strings())
    for path in (*PACKAGE.rglob("*.toml"), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        if path.name != "configuration.md":
            yield str(path), path.read_text(encoding="utf-8")


# Flags of other programs, and our own words for switching something off
OF_OTHERS = re.compile(
    r"--version|torchrun[^`\n]*--max-restarts|--max-model-len \{len|"
    r"vllm serve[^\n]*|--aggregation mean|^--(compiled|no-prefix-caching|no-routes)$"
)


def test_nobody_is_told_to_type_what_has_no_flag() -> None:
    every = {each.as_flag for name in COMMANDS for each in settings(name).values() if each.is_typed}
    keys = {each.as_flag for name in COMMANDS for each in without_flag(name)} - every
    spelled = re.compile(rf"(?<![\w-])({'|'.join(sorted(keys, key=len, reverse=True))})(?![\w-])")
    mentions = [
        (place, hit[0])
        for place, text in texts()
        if (hit := spelled.search(OF_OTHERS.sub("", text)))
    ]
    assert len(keys) > 50 and not mentions


def test_the_lines_of_the_docs_type_flags_that_their_command_has() -> None:
    keys = {name: {each.as_flag for each in without_flag(name)} for name in COMMANDS}
    lines = 0
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for line in re.finditer(
            r"mismatch-cli ([\w-]+)([^`|\n]*)", page.read_text(encoding="utf-8")
        ):
            lines += 1
            flags = set(re.findall(r"(?<![\w-])--[a-z0-9-]+", line[2]))
            wrong = flags & keys.get(line[1], set())
            assert not wrong or page.name == "configuration.md", (page.name, line[0])
    assert lines > 200


def test_show_config_says_where_each_value_came_from(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.delenv(WRITTEN)
    file = tmp_path / "mine.toml"
    file.write_text("epochs = 3\nweight_decay = 0.25\n", encoding="utf-8")
    monkeypatch.setenv("MISMATCH_EPOCHS", "2")
    typed = ["--config", str(file), "--seed", "7", "--preset", "paper", "--learning-rate", "1e-3"]
    assert (
        run(
            [
                "train",
                *typed,
                "--model",
                str(ROOT / "sample_data" / "model"),
                "--dataset",
                str(ROOT / "sample_data" / "perfectible.jsonl"),
                "--show-config",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    lines = {line.partition(" = ")[0]: line.partition(" = ")[2] for line in shown.splitlines()}
    assert lines["epochs"] == "2  # MISMATCH_EPOCHS"
    assert lines["weight_decay"] == f"0.25  # {file}"
    assert lines["seed"] == "7  # typed" and lines["learning_rate"] == "0.001  # typed"
    assert lines["steps"].endswith("# preset paper") and "#" not in lines["beta1"]
    again = tmp_path / "again.toml"
    again.write_text(shown, encoding="utf-8")
    assert run(["train", "--preset", str(again), "--show-config"]) in (0, 2)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("typed", "--steps 0 is too small. Use at least 1."),
        ("variable", "MISMATCH_STEPS = 0 is too small. Use at least 1."),
        ("file", "mine.toml: steps = 0 is too small. Use at least 1."),
        ("preset", "own.toml: steps = 0 is too small. Use at least 1."),
    ],
)
def test_a_wrong_value_is_named_as_it_was_given(place, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("steps = 0", encoding="utf-8")
    Path("own.toml").write_text("steps = 0", encoding="utf-8")
    if place == "variable":
        monkeypatch.setenv("MISMATCH_STEPS", "0")
    typed = {
        "typed": ["--steps", "0"],
        "variable": [],
        "file": ["--config", "mine.toml"],
        "preset": ["--preset", "own.toml"],
    }
    assert run(["train", *typed[place]]) == 2
    assert said in capsys.readouterr().err
