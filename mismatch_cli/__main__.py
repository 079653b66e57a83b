"""Starts the program, as `mismatch-cli` and `python -m mismatch_cli` do, and handles Ctrl-C from
before the first import.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # instead of importing typing for it
if TYPE_CHECKING:
    from types import FrameType

_RETRY_SECONDS = 0.01  # until an interrupt within an import is tried again


def main() -> None:
    """Run the program."""
    # A shell starts what a script runs in its background with Ctrl-C ignored.
    # Then this process leaves it ignored too: the key is meant for another program.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGALRM, _interrupt)
    try:
        from mismatch_cli.app.cli import main as program

        program()
    except KeyboardInterrupt:
        _end()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise a KeyboardInterrupt: at once, or after the import that is in progress.

    Within an import, libraries make another error of it, or abort. A second Ctrl-C does not wait
    for the import.
    """
    # Python's own import function is on the stack for as long as something is being imported.
    while frame is not None and frame.f_code.co_name != "_find_and_load":
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    # The timer runs since the first Ctrl-C: each time that it fires, this function looks again.
    if number == signal.SIGINT and signal.getitimer(signal.ITIMER_REAL)[0]:
        _end()
    signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS)


def _end() -> None:
    """Exit as interrupted, without what the program would do at its end."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os._exit(0)  # a rank: its launcher reports the interrupt
    message = b"mismatch-cli: Interrupted.\n"
    if os.isatty(2):
        message = b"\n\x1b[?25h" + message  # shows the cursor, which a live display hides
    try:
        os.write(2, message)
    finally:
        os._exit(130)


if __name__ == "__main__":
    main()
