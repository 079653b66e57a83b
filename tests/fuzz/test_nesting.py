"""Thousands of brackets wherever a command reads JSON or TOML, and links that lead back to
themselves: one sentence.
"""

from __future__ import annotations

import json
import shutil

import pytest

from mismatch_cli.base.places import bundled
from tests.fuzz.properties import judge
from tests.fuzz.world import call, copy

JSON = ("[" * 100_000, "[" * 900 + "]" * 900, '{"a":' * 5000 + "1" + "}" * 5000)
TOML = ("a = " + "[" * 5000 + "]" * 5000, "limits = " + "[" * 300 + "]" * 300)
READS_JSON = (
    ("run/trace/manifest.json", "report run"),
    ("training/metrics.jsonl", "report training"),
    ("training/metrics.jsonl", "watch training --once --no-plots -o new"),
    ("watched/watch.json", "watch run --once --no-plots -o watched"),
    ("search/search.json", "report search"),
    ("search/search.json", "bisect --resume -o search"),
    ("prompts.jsonl", "probe --prompts prompts.jsonl -o new"),
    ("prompts.json", "curate --prompts prompts.json -o new"),
    ("model/config.json", "probe ./model -o new"),
    ("model/config.json", "rescore run --trainer-model ./model -o new"),
    ("adapter/adapter_config.json", "probe --adapter ./adapter -o new"),
    ("new/summary.json", "report run -o new"),
)
READS_TOML = (
    ("limits.toml", "gate run --limits limits.toml"),
    ("limits.toml", "report run --config limits.toml"),
    ("preset.toml", "train --preset preset.toml --show-config"),
    ("training/config.toml", "report training"),
    ("training/config.toml", "train --resume -o training"),
)


@pytest.mark.parametrize(
    ("file", "line", "texts"),
    [(*row, JSON) for row in READS_JSON] + [(*row, TOML) for row in READS_TOML],
)
def test_brackets(file, line, texts):
    for text in texts:
        with copy() as folder:
            shutil.copytree(bundled("model"), folder / "model")
            path = folder / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(
                text + "\n" + json.dumps({"step": 2}) if file.endswith("metrics.jsonl") else text
            )
            outcome = call(folder, *line.split())
            judge(outcome, folder)
            assert outcome.code in (1, 2), outcome.out


LINES = (
    "report run -o loop", "clipstats run -o loop", "diagnose run -o loop",
    "compare run other -o loop",
    "watch run --once -o loop", "watch loop --once -o new", "import dumps/plain -o loop",
    "import loop -o new",
    "probe -o loop", "curate -o loop", "train -o loop", "rescore run -o loop", "bisect run -o loop",
    "report loop",
    "compare run loop", "gate run --limits loop", "gate run --junit loop",
    "report run --cache loop",
    "report run --config loop", "probe --prompts loop -o new", "probe ./loop -o new",
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_link_that_leads_back_to_itself(line):
    with copy() as folder:
        (folder / "loop").symlink_to("loop")
        outcome = call(folder, *line.split())
        judge(outcome, folder)
        assert outcome.code in (1, 2), outcome.err
