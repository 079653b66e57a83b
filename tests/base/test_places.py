"""Reports are shared: none contains an absolute local path, unless requested."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.places import bundled, shorten_apart, shorten_paths
from tests import pictures
from tests.folders import contents, write_files
from tests.paths import PACKAGE
from tests.train.training_runs import make_run

FLOAT32 = bundled("traces") / "float32"


def test_paths_are_shown_from_here_or_by_their_last_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        shorten_paths(str(tmp_path / "runs" / "a")) == "runs/a"
        and shorten_paths("runs/a") == "runs/a"
    )
    assert (
        shorten_paths("/home/alice/models/my model") == "…/my model"
        and shorten_paths("/data/run/trace") == "…/run/trace"
    )
    assert shorten_paths({"a": ["/x/y/z", 3, None], "Qwen/Qwen3": "owner/name"}) == {
        "a": ["…/z", 3, None],
        "Qwen/Qwen3": "owner/name",
    }
    assert shorten_paths(Path("runs/a b")) == Path("runs/a b") and shorten_paths(
        Path("/data/run")
    ) == Path("…/run")
    sentence = "Resume with: mismatch-cli probe --resume --output /data/runs/a"
    assert shorten_paths(sentence) == "Resume with: mismatch-cli probe --resume --output …/a"
    for text in (
        "|π − μ|/token",
        "tokens/s/core",
        "1/2",
        "see docs/import.md",
        "a / b / c",
        "50 % of 3/4",
    ):
        assert shorten_paths(text) == text
    assert shorten_apart("/a/x/ckpt", "/b/y/ckpt") == ("…/x/ckpt", "…/y/ckpt") and shorten_apart(
        1, 2
    ) == (1, 2)


def write_training_run(folder: Path, secret: Path) -> None:
    places = {"model": f"{secret}/model", "dataset": f"{secret}/data.jsonl"}
    made = make_run(steps=3, reward=f"{secret}/reward.py:f", **places)
    settings = made.config | {"output": str(folder), "init_from": f"{secret}/other"}
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    records = (json.dumps(record) + "\n" for record in made.records)
    write_files(folder, {"metrics.jsonl": "".join(records), "config.toml": "".join(lines)})


@pytest.mark.slow
def test_no_report_reveals_local_paths(tmp_path, monkeypatch, capfd):
    pictures.leave_blank(monkeypatch)  # no figure names a folder
    secret = tmp_path / "home-of-alice"
    for name in ("one", "other"):
        shutil.copytree(FLOAT32, secret / name / "run" / "trace")
        path = secret / name / "run" / "trace" / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["rollout"]["model"] = manifest["trainer"]["model"] = f"{secret}/{name}/model"
        manifest["prompts"]["source"] = manifest["config"]["reward"] = f"{secret}/reward.py:grade"
        manifest["shards"] = manifest.get("shards", 1) + 1  # also a trace that says how to continue
        path.write_text(json.dumps(manifest))
    one, other = (str(secret / name / "run") for name in ("one", "other"))
    for name in ("one", "other"):
        write_training_run(secret / name / "trained", secret)
    shutil.copy(PACKAGE / "rules" / "trust_regions" / "ratio_clip.py", secret / "mask.py")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    commands = {
        "report": ["report", one],
        "clipstats": ["clipstats", one, "-a", str(secret / "mask.py"), "-a", "pg-is"],
        "compare": ["compare", one, other],
        "diagnose": ["diagnose", one],
        "training": ["report", *(str(secret / name / "trained") for name in ("one", "other"))],
    }
    for name, command in commands.items():
        assert run([*command, "-q", "--force", "--json", "-o", name]) == 0, capfd.readouterr().err
        files = contents(Path(name)).values()
        text = b"".join(files).decode(errors="replace") + capfd.readouterr().out
        assert str(secret) not in text, (
            name,
            text[max(0, text.find(str(secret)) - 200) :][:400],
        )
    files = ["--junit", "gate.xml", "--markdown", "gate.md", "--force"]
    assert run(["gate", one, "--baseline", other, "--json", "-q", "--allow-partial", *files]) in (
        0,
        3,
    )
    text = capfd.readouterr().out + Path("gate.xml").read_text() + Path("gate.md").read_text()
    assert str(secret) not in text
