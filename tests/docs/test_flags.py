"""Every flag that the guide, a help, a message or a docstring names exists, in the command it is
written for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import typer

from mismatch_cli.app.cli import COMMANDS
from mismatch_cli.base import registry
from tests import house
from tests.paths import DOCS, PACKAGE, ROOT

GUIDE = [
    *(DOCS).rglob("*.md"),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "action.yml",
]
GUIDE += sorted((ROOT / ".github").rglob("*.*"))
NAMES = registry.names(COMMANDS)
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")
_IN_BACKTICKS = re.compile(r"`([^`\n]+)`")
_TYPED = re.compile(r"^\s*\$ (.*)$|(mismatch-cli .*)$", re.MULTILINE)

OTHERS = {
    "pip": (
        "--upgrade --python --disable-pip-version-check --extra-index-url --find-links "
        "--no-index --wheel-dir"
    ),
    "docker": "--rm --user --ipc --tag",
    "venv": "--without-pip",
    "ray": "--head --num-cpus",
    "torchrun": "--nnodes --nproc-per-node",
    "vLLM": (
        "--logprobs-mode --max-logprobs --generation-config --enable-lora --lora-modules "
        "--hf-overrides --no-enable-prefix-caching --no-enable-chunked-prefill --enforce-eager"
    ),
    "SGLang": "--enable-fp32-lm-head",
    "slime": "--rollout-temperature --rollout-top-p --rollout-top-k --use-tis "
    "--get-mismatch-metrics --calculate-per-token-loss --save-debug-train-data "
    "--save-debug-rollout-data --rollout-data-postprocess-path --use-opsm",
    "miles": "--dump-details --use-rollout-logprobs",
    "open-instruct": "--save_traces --rollouts_save_path --loss_denominator",
    "ms-swift": "--log_rollout_offpolicy_metrics",
    "OpenRLHF": "--algo.advantage.is_correction_level --ckpt.load_enable --load_checkpoint",
    "oat": "--dump_replay_every",
    "lab/": "--folder",
    "tests/": "--list --lower --only --renew",
    "stores": "--exclude --exclude-pattern --recursive --repo-type",
    "trackers": "--project --logdir --backend-store-uri --repo",
    "uv": "--torch-backend --generate-hashes --no-annotate --no-header --no-deps",
}
FOREIGN = {flag for flags in OTHERS.values() for flag in flags.split()}


@cache
def flags_of(command: str) -> frozenset[str]:
    app = typer.Typer(add_completion=False)
    app.command(command)(registry.load(COMMANDS, command, "command").command)
    parameters = typer.main.get_command(app).params
    return frozenset(flag for p in parameters for flag in (*p.opts, *p.secondary_opts)) | {"--help"}


def texts() -> Iterator[tuple[str, str]]:
    """The pages, and of the code every text: messages, helps and docstrings; comments too, by
    line.
    """
    for path in GUIDE:
        yield path.name, path.read_text(encoding="utf-8")
    for file in house.files():
        yield from ((file.place(node), node.value) for node in file.strings())
        for number, line in enumerate(file.lines, 1):
            yield f"{file.name}:{number}", line.partition("# ")[2]
    for path in sorted(PACKAGE.rglob("*.toml")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


def test_every_flag_that_is_named_exists() -> None:
    flags = (
        {"--version", "--help", "--install-completion", "--show-completion"}
        | FOREIGN
        | {flag for command in NAMES for flag in flags_of(command)}
    )
    unknown = {
        (where, flag)
        for where, text in texts()
        for flag in _FLAG.findall(text)
        if flag not in flags
    }
    assert not unknown


def test_a_flag_beside_a_command_is_one_of_its_own() -> None:
    """In `probe --resume` and in lines that are typed; what follows a pipe or && is another
    command.
    """
    wrong = set()
    for where, text in texts():
        snippets = _IN_BACKTICKS.findall(text) + [a or b for a, b in _TYPED.findall(text)]
        for part in (
            part for snippet in snippets for part in re.split(r"[|;&`]|\$\(|\. ", snippet)
        ):
            words = part.removeprefix("mismatch-cli ").split()
            if words and words[0] in NAMES and "…" not in words[0]:
                flags = set(_FLAG.findall(part)) - FOREIGN
                wrong |= {(where, words[0], flag) for flag in flags - flags_of(words[0])}
    assert not wrong


def test_what_belongs_to_others_is_still_named() -> None:
    everything = " ".join(text for _, text in texts())
    assert [flag for flag in sorted(FOREIGN) if flag not in everything] == []
