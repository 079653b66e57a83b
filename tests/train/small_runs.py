"""Small training runs on the bundled model, and how to compare two of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mismatch_cli.models.engines import hf
from mismatch_cli.processes.ranks import ALONE, World
from mismatch_cli.train.loop import train
from mismatch_cli.train.train_config import load_config
from tests.docs.pages import DOCS, File, steps

SMALL = {
    "engine": "hf",
    "steps": 4,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "max_tokens": 64,
    "rollout_dtype": "float32",
    "learning_rate": 5e-4,
    "threads": 1,
    "num_problems": 8,
    "eval_samples": 1,
    "eval_every": 0,
    "checkpoint_every": 2,
    "trace_every": 0,
}
# Three steps of two minibatches; every response has an advantage.
SHORT: dict[str, Any] = {
    "steps": 3, "max_tokens": 16, "num_problems": 4, "checkpoint_every": 3, "trace_every": 3, "minibatches": 2,
    "learning_rate": 2e-3, "average_decay": 0.5,
}  # fmt: skip
KINDS = ("gmpo", "cppo", "dro", "m2po", "gbpo", "clip-cov", "top-entropy", "ppo-ewma")
ON_RANKS = ("dro", "m2po", "gbpo", "ppo-ewma")  # these need more communication between ranks


def reward_file(folder: Path) -> str:
    """A reward that differs within most groups: the share of characters with an even code."""
    path = folder / "even.py"
    path.write_text(
        "def even(response):\n    return sum(ord(c) % 2 for c in response) / (1 + len(response))\n"
    )
    return f"{path}:even"


# Two steps of four groups, of 18 problems; only every third problem has rewards that differ within
# its group.
DYNAMIC: dict[str, Any] = SHORT | {
    "dynamic_sampling": 2,
    "num_problems": 18,
    "prompts_per_step": 4,
    "samples_per_prompt": 3,
    "trace_every": 1,
    "checkpoint_every": 1,
    "steps": 2,
    "average_decay": 0.0,
}
_EVERY_THIRD = """
import zlib

def every_third(responses, answers):
    rows = zip(responses, answers)
    return [zlib.crc32(text.encode()) % 1009 / 1009 if int(answer) % 3 == 0 else 1.0 for text, answer in rows]
"""


def trained_dynamically(
    folder: Path, world: World = ALONE, *, resume: bool = False, stop_after: int = 0
) -> None:
    """Into `run`, with a batch per response: then its numbers do not depend on what else a rank
    samples.
    """
    rows = [json.dumps({"problem": f"What is {i} + 1?", "answer": str(i)}) for i in range(18)]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (folder / "third.py").write_text(_EVERY_THIRD, encoding="utf-8")
    own = {"dataset": str(folder / "rows.jsonl"), "reward": f"{folder}/third.py:every_third"}
    config, records = load_config("miniature", SMALL | DYNAMIC | own), list[dict[str, Any]]()
    # A response alone in its batch is the same on any number of ranks
    before, hf._ARGUMENTS["batch_size"] = hf._ARGUMENTS["batch_size"], 1
    try:
        stop = lambda: len(records) == stop_after  # noqa: E731
        train(config, folder / "run", records.append, resume=resume, stop=stop, world=world)
    finally:
        hf._ARGUMENTS["batch_size"] = before


# An episode of the guide's game has room for three turns.
GAME: dict[str, Any] = {
    "turn_tokens": 8, "max_tokens": 64, "episodes": 64, "prompts_per_step": 8, "samples_per_prompt": 8,
}  # fmt: skip


TALK = """
class Talk:
    def reset(self, seed):
        self.turns = seed % 3
        return f"Hello {seed % 10}."

    def step(self, action):
        self.turns -= 1
        return "Next.", sum(ord(c) % 2 for c in action) / (1 + len(action)), self.turns < len(action) % 2
"""


def talk_file(folder: Path) -> str:
    """An environment whose rewards differ within groups, and whose episodes differ in their
    number of turns.
    """
    (folder / "talk.py").write_text(TALK, encoding="utf-8")
    return f"{folder}/talk.py:Talk"


def game_file(folder: Path) -> str:
    """The game of docs/environments.md."""
    path = folder / "simon.py"
    for step in steps(DOCS / "environments.md"):
        if isinstance(step, File) and step.name == path.name:
            path.write_text(step.text, encoding="utf-8")
    return f"{path}:Simon"


EVALUATED = {"eval_every": 2, "eval_samples": 2}  # what the `unbroken` run also does


def run(
    folder: Path, *, resume: bool = False, stop_after: int = 0, **changes: Any
) -> list[dict[str, Any]]:
    """The records of the finished steps."""
    records: list[dict[str, Any]] = []
    config = load_config("miniature", SMALL | changes)
    train(config, folder, records.append, resume=resume, stop=lambda: len(records) == stop_after)
    return records


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The metrics without phase times; NaN and Infinity, which JSON does not have, are an error."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line, parse_constant=_refuse) for line in lines]
    for record in records:
        record.pop("seconds", None)
    return records


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def assert_same_run(folder: Path, other: Path) -> None:
    """The same lines and the same weights, to the bit."""
    assert numbers(folder) == numbers(other)
    assert weights(folder) == weights(other)
