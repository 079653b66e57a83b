"""The child process that compares answers with math-verify: one JSON pair per line in, true or false per line out."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from mismatch_cli.tasks._lines import answer_lines

_MEMORY = 2**32  # bytes; a response can ask for any number


def _prepare() -> Callable[[str], str]:
    logging.disable()  # math-verify warns that its own timeouts are off; ours is the parent's clock
    from math_verify import parse, verify

    def compare(line: str) -> str:
        found, gold = (parse(box, parsing_timeout=None) for box in json.loads(line))
        return json.dumps(bool(verify(gold, found, timeout_seconds=None)))

    return compare


if __name__ == "__main__":
    answer_lines(_prepare, memory=_MEMORY)
