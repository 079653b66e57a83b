"""Compare what the program prints and draws with what it printed and drew before.

python -m tests.golden                      # what differs from tests/golden/stored; exit code 1 if anything does
python -m tests.golden --only help          # only the lines whose name contains this
python -m tests.golden --renew              # store today's outputs: the commit says why they changed
python -m tests.golden --train [COMMIT]     # ten steps of training here and at COMMIT: equal to the bit
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator

from tests.golden import outputs, training
from tests.golden.alike import STORED

_MOST_LINES = 40  # of a difference: more is not read


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--renew", action="store_true")
    parser.add_argument("--train", nargs="?", const="HEAD", metavar="COMMIT")
    options = parser.parse_args()
    if options.train:
        return training.compared(options.train)
    made = outputs.all_outputs(options.only)
    if options.renew:
        return renew(made)
    differ = list(differences(made, options.only))
    print("\n".join(differ) if differ else f"{len(made)} outputs are as stored.")
    return int(bool(differ))


def renew(made: dict[str, str]) -> int:
    for name, text in made.items():
        path = STORED / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"Stored {len(made)} outputs. Look at `git diff tests/golden/stored` before you commit.")
    return 0


def differences(made: dict[str, str], only: str) -> Iterator[str]:
    """Every stored output that is not as it was, with its changed lines."""
    stored = {
        path.relative_to(STORED).as_posix().removesuffix(".txt"): path.read_text(encoding="utf-8")
        for path in sorted(STORED.rglob("*.txt"))
    }
    for name in sorted({name for name in stored if only in name} | set(made)):
        before, now = stored.get(name, ""), made.get(name, "")
        if before != now:
            lines = list(
                difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=0)
            )
            yield f"── {name}"
            yield from lines[2 : 2 + _MOST_LINES]
            if len(lines) - 2 > _MOST_LINES:
                yield f"… {len(lines) - 2 - _MOST_LINES} more lines"


if __name__ == "__main__":
    sys.exit(main())
