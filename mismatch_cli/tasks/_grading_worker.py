"""The child process that compares answers with math-verify: one JSON pair per line in, true or false per line out."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

_LONGEST = 120  # seconds; the parent gives up long before


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a library that prints must not answer in our place
    logging.disable()  # math-verify warns that its own timeouts are off; ours is the parent's clock
    from math_verify import parse, verify

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        signal.alarm(_LONGEST)  # the default action ends this process: a killed parent leaves no child that computes on
        found, gold = (parse(box, parsing_timeout=None) for box in json.loads(line))
        print(json.dumps(bool(verify(gold, found, timeout_seconds=None))), file=answers, flush=True)


if __name__ == "__main__":
    main()
