"""Settings that are not typed: a `--config` file and MISMATCH_ variables, for every option of
every command.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from mismatch_cli.app.cli import build_app, run
from mismatch_cli.app.common import Common
from mismatch_cli.app.prepared import prepared_run
from mismatch_cli.base.configuration import CONFIG, key_of
from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.options import values_by_key
from mismatch_cli.base.values import Values
from mismatch_cli.probe.config import ProbeConfig

GROUP: Any = typer.main.get_command(build_app())
ROOT = GROUP.make_context("mismatch-cli", ["report"], resilient_parsing=True)
COMMANDS = GROUP.list_commands(None)
ALWAYS_TYPED = {"trust_remote_code", "environment", "engine_url", "on_alarm", "cache"}
FEW = "--engine hf --num-prompts 2 --samples-per-prompt 1 --noise-responses 0 --quiet --no-plots"


def parameters() -> Iterator[tuple[str, Any, Any]]:
    """Every parameter of every command except `--config`, with the command."""
    for name in COMMANDS:
        command = GROUP.get_command(None, name)
        yield from (
            (name, command, parameter) for parameter in command.params if parameter.name != CONFIG
        )


def sample(parameter: Any) -> Any:
    """A valid, non-default value of a parameter, as in TOML."""
    described = parameter.type_descriptor
    if described.is_tuple:
        return [0.3, 0.7] if parameter.name == "keep" else ["a", "b"]
    if parameter.name == "engine_arg":
        return ["max_num_seqs=1", "block_size=16"]
    if described.is_list:
        return ["1", "2"]
    return {bool: parameter.default is not True, int: 7, float: 7.5}.get(
        described.annotation, "text"
    )


def context_of(name: str, command: Any, *typed: str) -> Any:
    return command.make_context(name, list(typed), parent=ROOT)


def toml(value: Any) -> str:
    return json.dumps(value)


def test_every_parameter_of_every_command_is_a_key_and_a_variable(tmp_path, monkeypatch):
    """General and for one command; the more specific variable wins, and both win over the file."""
    many = list(parameters())
    assert len(many) > 250
    for name, command, parameter in many:
        if parameter.name in ALWAYS_TYPED:
            continue
        key, value = key_of(parameter), sample(parameter)
        path = tmp_path / "mismatch.toml"
        path.write_text(f"{key} = {toml(value)}\n")
        context = context_of(name, command, "--config", str(path))
        expected = tuple(value) if parameter.type_descriptor.is_tuple else value
        assert context.get_parameter_source(parameter.name).name == "DEFAULT_MAP"
        assert as_plain(context.params[parameter.name]) == as_plain(expected), (name, key)

        general, own = (
            f"MISMATCH_{of}{key.upper().replace('-', '_')}" for of in ("", f"{name.upper()}_")
        )
        between = os.pathsep if parameter.type_descriptor.annotation == list[Path] else " "
        text = between.join(map(str, value)) if isinstance(value, list) else str(value)
        of_one_command = (name, key) == ("report", "algorithm")
        for variable in (own,) if of_one_command else (general, own):
            with monkeypatch.context() as patch:
                patch.setenv(variable, text)
                context = context_of(name, command, "--config", str(path))
            assert context.get_parameter_source(parameter.name).name == "ENVIRONMENT", (
                name,
                variable,
            )
            assert as_plain(context.params[parameter.name]) == as_plain(expected), (name, variable)


def as_plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return value if isinstance(value, bool | float | int) else str(value)


def test_what_starts_code_or_sends_keys_is_typed(tmp_path, monkeypatch, capfd):
    """Neither a file nor a variable may set it: they may be somebody else's."""
    values = {
        "algorithm": ["evil.py:limit=2"], "compare": ["ppo", "evil.py"], "workers": "ray://evil:1",
        "engine_arg": ["logits_processors=evil"], "reward": "evil.py:f",
    }  # fmt: skip
    names = set()
    for name, command, parameter in parameters():
        if parameter.name not in values and parameter.name not in ALWAYS_TYPED:
            continue
        if (name, parameter.name) == ("report", "algorithm"):
            continue  # compared with the names in the runs: it starts nothing
        value = values.get(parameter.name, sample(parameter))
        if name in ("train", "watch") and parameter.name == "algorithm":
            value = value if name == "train" else value[0]
        names.add(parameter.name)
        path = tmp_path / "mismatch.toml"
        path.write_text(f"[{name}]\n{key_of(parameter)} = {toml(value)}\n")
        with pytest.raises(
            UsageError, match=r"mismatch.toml: .*neither a file nor a variable.*type "
        ):
            context_of(name, command, "--config", str(path))
        with monkeypatch.context() as patch:
            variable = f"MISMATCH_{key_of(parameter).upper().replace('-', '_')}"
            patch.setenv(variable, " ".join(value) if isinstance(value, list) else str(value))
            with pytest.raises(UsageError, match=f"{variable}: .*neither a file nor a variable"):
                context_of(name, command)
    assert names == {*values, *ALWAYS_TYPED}
    capfd.readouterr()


def test_the_file_of_a_preset_starts_nothing_either(tmp_path, capfd):
    load_config = pytest.importorskip("mismatch_cli.train.train_config").load_config
    for name, value in (
        ("reward", "evil.py:f"),
        ("environment", "evil.py:E"),
        ("algorithm", "evil.py"),
        ("engine_url", "http://evil"),
    ):
        path = tmp_path / "preset.toml"
        path.write_text(f"{name} = {toml(value)}\n")
        assert run(["train", "--preset", str(path), "--show-config"]) == 2
        assert f"If you trust it, add: --{name.replace('_', '-')} {value}" in capfd.readouterr().err
        assert values_by_key(load_config(str(path), {name: value}))[name] == value


def test_typed_wins_over_the_commands_variable_that_over_the_general_one_and_that_over_the_file(
    tmp_path, monkeypatch
):
    (tmp_path / "m.toml").write_text("max-tokens = 1\n[probe]\nmax_tokens = 2\n")
    command, typed = GROUP.get_command(None, "probe"), ["--config", f"{tmp_path}/m.toml"]
    steps = [
        lambda: None,
        lambda: monkeypatch.setenv("MISMATCH_MAX_TOKENS", "3"),
        lambda: monkeypatch.setenv("MISMATCH_PROBE_MAX_TOKENS", "4"),
        lambda: typed.extend(["--max-tokens", "5"]),
    ]
    for number, step in enumerate(steps, start=2):
        step()
        assert context_of("probe", command, *typed).params["max_tokens"] == number
    monkeypatch.setenv(f"MISMATCH_{CONFIG.upper()}", typed[1])
    assert context_of("curate", GROUP.get_command(None, "curate")).params["max_tokens"] == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("max-tokns = 3", "Unknown setting 'max-tokns'. Did you mean max-tokens"),
        ("[prob]\nseed = 3", "[prob]: Unknown command 'prob'. Did you mean probe?"),
        (
            "[probe]\ntemprature = 3",
            "[probe]: Unknown setting 'temprature'. Did you mean temperature",
        ),
        ("config = 'x'", "Unknown setting 'config'"),
        ("[probe]\nconfig = 'x'", "Unknown setting 'config'"),
        ("temperature = 'hot'", 'temperature = "hot" must be a number.'),
        ("seed = 1.5", "seed = 1.5 must be a whole number."),
        ("seed = true", "seed = true must be a whole number."),
        ("eager = 1", "eager = 1 must be true or false."),
        ("engine = 'vlm'", "m.toml: engine: Unknown engine 'vlm'. Did you mean vllm?"),
        ("engine =", "cannot be read"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest(tmp_path, capfd, content, said):
    (tmp_path / "m.toml").write_text(content)
    assert run(["probe", "--config", f"{tmp_path}/m.toml"]) in (1, 2)
    assert said in capfd.readouterr().err


def test_the_source_of_a_setting_is_named(tmp_path, monkeypatch, capfd):
    (tmp_path / "mismatch.toml").write_text("[verdict]\nmodel = 'moe'\n")
    monkeypatch.chdir(tmp_path)
    assert run(["verdict", "k3=0.001", "--json"]) == 0  # the file is here, but was not named
    without_file, err = capfd.readouterr()
    assert "Settings from" not in err
    monkeypatch.setenv("MISMATCH_JSON", "yes")
    monkeypatch.setenv("MISMATCH_TEMPRATURE", "1")
    monkeypatch.setenv("MISMATCH_CLI_ANYTHING", "ours")
    assert run(["verdict", "k3=0.001", "--config", "mismatch.toml"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) != json.loads(without_file)
    assert "Settings from mismatch.toml: model; MISMATCH_JSON: json" in err
    assert (
        "The variable MISMATCH_TEMPRATURE belongs to no command and is ignored. Did you mean "
        "MISMATCH_TEMPER" in err
    )
    assert run(["verdict", "k3=0.001", "--config", "mismatch.toml", "--quiet"]) == 0
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("MISMATCH_TOP_P", "much")
    assert run(["verdict", "k3=0.001"]) == 2
    assert "Invalid value for '--top-p' in MISMATCH_TOP_P" in capfd.readouterr().err


def test_a_run_records_resolved_settings_and_resumes_with_them(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("m.toml").write_text("[probe]\nmax-tokens = 4\nseed = 3\noutput = 'run'\n")
    monkeypatch.setenv("MISMATCH_SEED", "5")
    assert run(["probe", *FEW.split(), "--config", "m.toml"]) == 0, capfd.readouterr().err
    flags = json.loads(Path("run/trace/manifest.json").read_text())["flags"]
    assert (flags["max_tokens"], flags["seed"], CONFIG in flags) == (4, 5, False)
    # A later file: the settings of the run win
    Path("m.toml").write_text("[probe]\nmax-tokens = 9\noutput = 'run'\n")
    monkeypatch.setenv("MISMATCH_SEED", "6")
    assert run(["probe", "--config", "m.toml", "--resume", "--quiet", "--no-plots"]) == 0, (
        capfd.readouterr().err
    )
    assert json.loads(Path("run/trace/manifest.json").read_text())["flags"] == flags
    assert run(["train", "--config", "t.toml", "--show-config"]) == 1
    Path("t.toml").write_text("[train]\nalgorithm = ['pg-is']\nsteps = 3\nlora = true\n")
    capfd.readouterr()
    assert run(["train", "--config", "t.toml", "--show-config"]) == 0
    config = tomllib.loads(capfd.readouterr().out)
    assert (config["algorithm"], config["steps"], config["lora"], config["seed"]) == (
        "pg-is",
        3,
        True,
        6,
    )


def test_a_resumed_run_takes_what_has_no_flag_from_a_file(tmp_path):
    """How the work is done, and the adapter that a manifest alone must not load."""
    folder = tmp_path / "run"
    recorded = ["probe", "--engine", "hf", "--num-prompts", "1", "--samples-per-prompt", "2"]
    assert run([*recorded, "--max-tokens", "4", "--quiet", "--no-plots", "-o", str(folder)]) == 0
    common = Common(output=folder, resume=True, quiet=True)
    settings = {
        "device_map": "cpu",
        "noise_responses": 1,
        "token_budget": 100,
        "answer_format": "line",
    }
    with prepared_run(Values.of(settings, "k.toml"), common, ProbeConfig, "probe") as (
        config,
        _,
        _,
    ):
        assert (config.scorer.device_map, config.scorer.noise_responses) == ("cpu", 1)
        assert config.scorer.token_budget == 8192, "which has a flag"
        assert config.task.answer_format == "auto", "which decides what is recorded"
    manifest = folder / "trace" / "manifest.json"
    content = json.loads(manifest.read_text(encoding="utf-8"))
    content["flags"]["rollout_adapter"] = "some/adapter"
    manifest.write_text(json.dumps(content), encoding="utf-8")
    for values in ({}, {"rollout_adapter": "another/adapter"}):
        named = Values.of(values, "k.toml")
        with (
            pytest.raises(UsageError, match=r"rollout_adapter = .some/adapter"),
            prepared_run(named, common, ProbeConfig, "probe"),
        ):
            pass
    named = Values.of({"rollout_adapter": "some/adapter"}, "k.toml")
    with prepared_run(named, common, ProbeConfig, "probe") as (config, _, _):
        assert config.engine.adapter == "some/adapter"
