"""A manifest is somebody else's: whatever it holds, no code starts, no host is asked, and no key
is sent.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socketserver
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.places import bundled
from mismatch_cli.probe import from_manifest
from mismatch_cli.probe.engine_arguments import is_listed
from mismatch_cli.trace.manifest import read_manifest, write_manifest

MODEL = bundled("model")
SMALL = ["--engine", "hf", "--num-prompts", "2", "--samples-per-prompt", "2", "--max-tokens", "4"]
CODE = "from pathlib import Path\nPath({proof!r}).touch()\ndef reward(*_, **__): return 1.0\n"
# What a foreign manifest may leave in any of its keys.
HOSTILE: tuple[Any, ...] = (
    *("{file}", "{file}:reward", "{url}", "evilmod", "evilmod.Class", "evil/model", True),
    ["{file}"],
)


EVERY = "MISMATCH_CLI_EVERY" in os.environ  # all of them in every key: 5 minutes


class World:
    """A foreign folder with code that leaves a mark, and a server that notes who asks."""

    def __init__(self, folder: Path) -> None:
        self.proof, self.file, self.asked = folder / "executed", folder / "evilmod.py", []
        self.file.write_text(CODE.format(proof=str(self.proof)))
        self.server = socketserver.ThreadingTCPServer(
            ("127.0.0.1", 0), lambda _, address, __: self.asked.append(address)
        )
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def filled(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.filled(item) for item in value]
        return value.format(file=self.file, url=self.url) if isinstance(value, str) else value

    def check(self, what: Any) -> None:
        assert not self.proof.exists() and not self.asked and "evilmod" not in sys.modules, what


@pytest.fixture
def world(tmp_path, monkeypatch) -> Iterator[World]:
    monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = World(tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A probe with every setting in its manifest."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    assert (
        run(["probe", *SMALL, "--noise-responses", "0", "--no-plots", "-q", "-o", str(folder)]) == 0
    )
    return folder


def changed(source: Path, into: Path, where: tuple[str, ...], value: Any) -> Path:
    """A copy of a run whose manifest has another value at `where`."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(source, into)
    section = content = read_manifest(into / "trace")
    for name in where[:-1]:
        section = section.setdefault(name, {})
    section[where[-1]] = value
    write_manifest(into / "trace", content)
    return into


def keys(content: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in content.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from keys(value, (*above, name))


def starts(monkeypatch) -> list[str]:
    """Let nothing heavy start; returns what would have been started, with which arguments."""
    started: list[str] = []

    def start(*arguments: Any, **_: Any) -> None:
        started.append(repr(arguments))
        raise KeyboardInterrupt

    heavy = ("probe.record.load_tokenizer", "probe.rescore.load_trainer")
    for name in (*heavy, "bisect.runner.create_engine", "bisect.runner.load_trainer"):
        monkeypatch.setattr(f"mismatch_cli.{name}", start)
    probe_config = "mismatch_cli.app.commands.probe.ProbeConfig"
    monkeypatch.setattr(f"{probe_config}.check_vocabulary", lambda *_: None)
    return started


@pytest.mark.slow
def test_every_key_of_a_manifest_mutated_starts_nothing_and_asks_nobody(
    recorded, world, tmp_path, monkeypatch, capfd
):
    started = starts(monkeypatch)
    content = read_manifest(recorded / "trace")
    places = [
        place
        for place in keys(content)
        if not place[0].startswith("shard") and place[0] != "libraries"
    ]
    places += [
        ("config", "engine_args", name)
        for name in ("trust_remote_code", "worker_extension_cls", "url")
    ]
    assert len(places) > 120
    count, foreign = 0, tmp_path / "foreign"
    commands = (
        ["probe", "--like", str(foreign), "-o", str(tmp_path / "out")],
        ["probe", "--resume", "-o", str(foreign)],
        ["bisect", str(foreign), "-o", str(tmp_path / "search"), "--no-plots"],
        ["rescore", str(foreign), "-o", str(tmp_path / "scored")],
    )
    for i, place in enumerate(places):
        readers = commands[:2] if place[0] == "flags" else commands[1:]
        values = HOSTILE if EVERY else [HOSTILE[(i + j) % len(HOSTILE)] for j in range(3)]
        for value in map(world.filled, values):
            changed(recorded, foreign, place, value)
            for command in readers:
                code = run([*command, "-q"])
                said = capfd.readouterr().err
                world.check((place, value, command, said))
                assert code in (0, 1, 2, 130) and "This is a bug" not in said, (
                    place,
                    value,
                    command,
                    said,
                )
                count += 1
            for name in ("out", "search", "scored"):
                shutil.rmtree(tmp_path / name, ignore_errors=True)
    assert count > 900
    # A plain word may arrive, as the name of a dtype or a backend: engines look it up in tables of
    # their own.
    hostile = [
        each for each in started if world.url in each or re.search(r"evilmod\W*(py|Class|:)", each)
    ]
    assert hostile == [], "a hostile value reached what starts engines and trainers"


ENGINE_ARGS = {
    "trust_remote_code": True,
    "logits_processors": ["evilmod:Class"],
    "worker_extension_cls": "evilmod.Class",
    "worker_cls": "evilmod.Class",
    "scheduler_cls": "evilmod.Class",
    "tokenizer": "/elsewhere",
    "download_dir": "/elsewhere",
    "hf_config_path": "/elsewhere",
    "load_format": "runai_streamer",
    "speculative_config": {"model": "evil/draft", "num_speculative_tokens": 2},
    "kv_transfer_config": {"kv_connector_module_path": "evilmod"},
    "compilation_config": {"backend": "evilmod.compile"},
    "hf_overrides": {"auto_map": {"AutoConfig": "code.MyConfig"}},
    "additional_config": {"x": 1},
    "quantization": "../evil",
}


def test_of_an_engines_arguments_only_the_listed_ones_are_taken(recorded, world, tmp_path, capfd):
    for name, value in ENGINE_ARGS.items():
        run_folder = changed(
            recorded, tmp_path / "foreign", ("config", "engine_args"), {name: value}
        )
        changed_again = json.loads((run_folder / "trace" / "manifest.json").read_text())
        changed_again["config"]["engine"] = changed_again["rollout"]["engine"] = "vllm"
        (run_folder / "trace" / "manifest.json").write_text(json.dumps(changed_again))
        assert run(["bisect", str(run_folder), "-o", str(tmp_path / "search"), "-q"]) == 2
        said = capfd.readouterr().err
        assert "add these words to your command" in said and f"{name}=" in said, said
        world.check(name)
    for name, value in {
        "max_num_seqs": 4,
        "enforce_eager": True,
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": 0.5,
        "hf_overrides": {"head_dtype": "float32", "rope_theta": 1e4},
        "speculative_config": {"method": "ngram"},
    }.items():
        assert is_listed(name, value), name
    for name, value in {
        "max_num_seqs": True,
        "block_size": -1,
        "max_model_len": 2**60,
        "enforce_eager": 1,
    }.items():
        assert not is_listed(name, value), name


def test_rewards_adapters_and_servers_are_shown_and_typed_again(recorded, world, tmp_path, capfd):
    reward = f"{world.file}:reward"
    for flag, value in (("reward", reward), ("adapter", str(tmp_path)), ("engine_url", world.url)):
        run_folder = changed(recorded, tmp_path / "foreign", ("flags", flag), value)
        for command in (
            ["probe", "--like", str(run_folder), "-o", str(tmp_path / "out")],
            ["probe", "--resume", "-o", str(run_folder)],
        ):
            assert run(command) == 2
            said = " ".join(capfd.readouterr().err.split())
            assert (
                f"was recorded with --{flag.replace('_', '-')} {value}. A manifest starts no code"
                in said
            )
            world.check(command)
    run_folder = changed(recorded, tmp_path / "foreign", ("flags", "reward"), reward)
    again = [
        "probe",
        "--like",
        str(run_folder),
        "--reward",
        reward,
        "-q",
        "--no-plots",
        "-o",
        str(tmp_path / "out"),
    ]
    assert run(again) == 0 and world.proof.exists(), "whoever types it wants it"


def test_a_model_of_a_manifest_is_data(recorded, world, tmp_path, capfd, monkeypatch):
    """No code even with the flag, no pickles, and a hub name only from the cache."""
    with_code, pickled = tmp_path / "with-code", tmp_path / "pickled"
    for folder in (with_code, pickled):
        shutil.copytree(MODEL, folder)
    config = json.loads((with_code / "config.json").read_text())
    (with_code / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoConfig": "evilmod.C"}})
    )
    shutil.copy(world.file, with_code)
    for weights in pickled.glob("*.safetensors"):
        weights.rename(weights.with_suffix(".bin"))
    for model, why in (
        (with_code, "contains its own code"),
        (pickled, "whose weights are not safetensors"),
        ("evil/model", "nor in the hub's cache"),
        (tmp_path / "gone", "neither a folder on this machine"),
    ):
        run_folder = changed(recorded, tmp_path / "foreign", ("flags", "model"), str(model))
        manifest = read_manifest(run_folder / "trace")
        manifest["config"]["model"] = manifest["trainer"]["model"] = str(model)
        write_manifest(run_folder / "trace", manifest)
        for command in (
            [
                "probe",
                "--like",
                str(run_folder),
                "-o",
                str(tmp_path / "out"),
                "--trust-remote-code",
            ],
            ["bisect", str(run_folder), "-o", str(tmp_path / "search"), "--trust-remote-code"],
            ["rescore", str(run_folder), "-o", str(tmp_path / "scored"), "--trust-remote-code"],
        ):
            assert run([*command, "-q"]) == 2, command
            assert why in " ".join(capfd.readouterr().err.split()), command
            world.check(command)


def test_a_hub_name_comes_from_the_cache_and_the_hub_is_not_asked(
    recorded, world, tmp_path, monkeypatch, capfd
):
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(MODEL.resolve())
    (tmp_path / "hub" / "models--some--model" / "refs").mkdir()
    (tmp_path / "hub" / "models--some--model" / "refs" / "main").write_text("0" * 40)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", str(tmp_path / "hub"))
    monkeypatch.setattr(
        "huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False
    )
    assert from_manifest.model_of("some/model", tmp_path, "--model") == "some/model"
    import huggingface_hub.constants

    assert huggingface_hub.constants.HF_HUB_OFFLINE is True


def test_a_resumed_search_takes_no_code_from_its_folder(tmp_path, monkeypatch):
    """Changes are read from the manifests of legs."""
    from mismatch_cli.base.errors import UsageError
    from mismatch_cli.bisect.runner import changed_environment
    from mismatch_cli.bisect.search_config import BisectConfig
    from mismatch_cli.bisect.side_settings import RolloutSide, TrainerSide

    config = BisectConfig()
    manifest = read_manifest(bundled("traces") / "bfloat16")
    rollout = RolloutSide.of(manifest, config)
    trainer = TrainerSide.of(manifest, config, rollout)
    for name, value in ENGINE_ARGS.items():
        with pytest.raises(UsageError, match="was recorded with"):
            rollout.settings({"engine_args": {name: value}})
    hostile = {"trainer_model": "/elsewhere", "trainer_adapter": "/elsewhere", "device_map": "cuda"}
    assert trainer.changed(hostile).config == trainer.config
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with changed_environment({"LD_PRELOAD": "/evil.so", "VLLM_BATCH_INVARIANT": "1"}):
        assert "LD_PRELOAD" not in os.environ and os.environ["VLLM_BATCH_INVARIANT"] == "1"


def test_a_mask_that_a_run_names_is_not_run(world, tmp_path, capfd):
    """By `watch` of a trace, and by the report on training runs that differ in a parameter of a
    mask.
    """
    run_folder = tmp_path / "foreign"
    shutil.copytree(bundled("traces") / "float32", run_folder / "trace")
    manifest = read_manifest(run_folder / "trace")
    write_manifest(run_folder / "trace", manifest | {"algorithm": str(world.file)})
    assert (
        run(
            ["watch", str(run_folder), "--once", "-o", str(tmp_path / "out"), "--report-every", "0"]
        )
        == 0
    )
    assert f"--algorithm {world.file}" in capfd.readouterr().err
    world.check("watch")
    from mismatch_cli.train.studies.sensitivity import algorithm_of

    assert algorithm_of(f"{world.file}:limit=2") is None
    world.check("report")
