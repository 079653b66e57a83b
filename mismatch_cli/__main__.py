"""`mismatch-cli` and `python -m mismatch_cli`: what Ctrl-C does, from before the first import."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # instead of importing typing for it
if TYPE_CHECKING:
    from types import FrameType

_LATER = 0.01  # seconds until an interrupt within an import is tried again


def main() -> None:
    """Run the program."""
    # Else it is ignored, as in a script's background
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGALRM, _interrupt)
    try:
        from mismatch_cli.app.cli import main as program

        program()
    except KeyboardInterrupt:
        _end()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise a KeyboardInterrupt; if something is being imported, when that is done.

    Within an import, libraries make another error of it, or abort. A second Ctrl-C does not wait
    for the import.
    """
    while frame is not None and frame.f_code.co_name != "_find_and_load":
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    if number == signal.SIGINT and signal.getitimer(signal.ITIMER_REAL)[0]:
        _end()
    signal.setitimer(signal.ITIMER_REAL, _LATER)


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
