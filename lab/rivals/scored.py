"""What the three scorers of the race share: responses, turns and command line."""

from __future__ import annotations

from ready import ROOT

# isort: split
import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lab.scoring import peak, reset_peak
from lab.turns import Turn

__all__ = ["ROOT", "Response", "options", "take_turns"]


class Response(NamedTuple):
    prompt_ids: list[int]
    response_ids: list[int]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--responses", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--batch",
        type=int,
        default=32,
        help="responses in a batch, for scorers without their own batching",
    )
    return parser.parse_args()


def take_turns(score: Callable[[list[Response]], list[float]], responses: Path) -> None:
    """Score all responses in every turn; `score` returns the log-probs of their tokens, response
    by response.
    """
    found = [Response(*row) for row in json.loads(responses.read_text())]
    turn = Turn()
    score(found[:2])
    before = reset_peak()
    while turn.wait():
        logp = score(found)
        turn.done(
            samples=len(found),
            tokens=len(logp),
            mean_logp=sum(logp) / len(logp),
            peak_mb=peak() - before,
        )
