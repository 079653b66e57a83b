"""`mismatch-cli` and `python -m mismatch_cli`: what Ctrl-C does, from before the first import."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # instead of importing typing for it
if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """Run the program."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as in a script's background
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from mismatch_cli.cli import main as program

        program()
    except KeyboardInterrupt:
        _end()


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Raise a KeyboardInterrupt, but within an import end the program: libraries make other errors of it, or abort."""
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load":
            _end()
        frame = frame.f_back
    raise KeyboardInterrupt


def _end() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os._exit(0)  # a rank: its launcher reports the interrupt
    cursor = b"\n\x1b[?25h" if os.isatty(2) else b""  # a live display hides it
    try:
        os.write(2, cursor + b"mismatch-cli: Interrupted.\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    main()
