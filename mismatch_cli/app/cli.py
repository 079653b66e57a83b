"""The entry point: a Typer app from the files in the rooms' `commands/`; the only place that
prints errors and sets exit codes.
"""

import atexit
import codecs
import errno
import gc
import io
import os
import signal
import struct
import sys
import traceback
from collections.abc import Sequence
from itertools import chain
from types import ModuleType
from typing import Any, NoReturn

import typer
import typer.core

from mismatch_cli import __version__
from mismatch_cli.app.command import Command
from mismatch_cli.app.help import HelpLine, panels, print_help, summary
from mismatch_cli.app.rank_flags import CAN_RESUME
from mismatch_cli.base import entry_points, memory, registry
from mismatch_cli.base.child_python import safe_path
from mismatch_cli.base.errors import MismatchError, denied
from mismatch_cli.base.extras import not_installed
from mismatch_cli.base.text import is_encodable, visible
from mismatch_cli.processes.ranks.joined import launched

_INTERRUPTED = 130
_READER_HAS_LEFT = 0  # `| head` has read enough, which is not a failure
# ClickException: newer versions of Typer vendor their own click
_ClickError = typer.BadParameter.__mro__[2]


COMMANDS = "mismatch_cli.*.commands.NAME"
# Of `--help`, in the order in which users need them; a command's file names its own with PANEL
_PANELS = ("Measure", "Explain", "Use elsewhere", "Train")
_GUIDE = (
    "The guide has a page per command: mismatch-cli guide NAME. To find a page: mismatch-cli "
    "guide README."
)
_LOOP = "Symlink loop from "  # how pathlib begins its RuntimeError
_REMEDY = "Free some space, or choose another --output."
_REMEDIES = {
    errno.ELOOP: "Remove the link, or name another path.",
    errno.EACCES: "Allow access with chmod, or name another path.",
}
_SPELLED_OUT = "mismatch_cli.spelled_out"
# Thresholds of Python's garbage collector. Its default of 700 new objects suits small programs, but
# importing torch and vLLM makes two million permanent objects, and traversing them repeatedly takes
# seconds.
_COLLECT_AFTER = (100_000, 50, 100)
# Arrow's own pool keeps returning pages to the system: a third of the time of an import, and more
# memory. numpy's matrix products are small here, and starting a thread per core takes a third of
# numpy's import time.
ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OPENBLAS_NUM_THREADS": "1",
    # Threads of torch that wait for each other spin for some microseconds, then sleep. Spinning for
    # long is 20 times slower beside other work on the machine, and sleeping at once up to 5 times
    # on a quiet one, which has to wake a core for every product.
    "GOMP_SPINCOUNT": "2000",
}


class _Commands(typer.core.TyperGroup):
    """Every file in a room's `commands/` is a subcommand; only the requested one is built, to
    start fast.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(registry.names(COMMANDS))  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """The command with its flags."""
        if cmd_name not in self.commands:
            return None
        module = _module(cmd_name)
        app = typer.Typer(add_completion=False)
        app.command(cmd_name, cls=getattr(module, "COMMAND", Command))(module.command)
        return typer.main.get_command(app)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """The commands in the order of their panels."""
        return list(chain.from_iterable(self._panels().values()))

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Print the help: for each command, the first sentence of its own."""
        shown = panels(self.get_params(ctx))
        for title, names in self._panels().items():
            shown[title] = list(map(_help_line, names))
        print_help(self, ctx, shown)

    def _panels(self) -> dict[str, list[str]]:
        """The commands of each panel by their PLACE in it."""
        names_of: dict[str, list[str]] = {title: [] for title in _PANELS}
        for name in sorted(self.commands, key=lambda name: _module(name).PLACE):
            names_of[_module(name).PANEL].append(name)
        return names_of


def _module(name: str) -> ModuleType:
    return registry.load(COMMANDS, name, "command")


def _help_line(name: str) -> HelpLine:
    return HelpLine(name, "", summary(_module(name).command))


def build_app() -> typer.Typer:
    """The app: its subcommands are the functions `command` in `commands/`, with their docstrings
    as help.
    """
    app = typer.Typer(
        name="mismatch-cli",
        cls=_Commands,
        help="Measure the gap between the rollout engine and the trainer of a language model.",
        epilog=_GUIDE,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mismatch-cli {__version__}")
        raise typer.Exit


def _global_options(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", is_eager=True, callback=_print_version
    ),
) -> None:
    """Options before the subcommand; `--version` acts in its callback."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code is 0 ok, 1 expected error, 2 usage, 3 a limit
    exceeded, 130 interrupted.
    """
    Command.debugging = "--debug" in arguments or "MISMATCH_DEBUG" in os.environ
    try:
        for argument in arguments:
            if not is_encodable(argument):
                return _fail(f"{argument} is not UTF-8. Rename the file, or use a link to it.", 2)
        return _run(arguments)
    finally:
        is_quiet = not {"--quiet", "-q"}.isdisjoint(arguments)
        if not is_quiet and not launched():
            for sentence in entry_points.ignored():
                print(f"mismatch-cli: {visible(sentence)}", file=sys.stderr)


def _run(arguments: Sequence[str]) -> int:
    """Run a command line, and turn whatever it raises into a sentence and an exit code."""
    try:
        code = typer.main.get_command(build_app()).main(list(arguments), standalone_mode=False)
    except MismatchError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except BrokenPipeError:
        return _READER_HAS_LEFT
    except SystemExit as stopped:
        return _code_after(stopped)
    except _ClickError as error:  # type: ignore[misc]
        error.show()
        return error.exit_code
    except Exception as error:
        return _fail(_sentence(error, arguments[0]), 1)
    # Newer versions of Typer return this code for an interrupt, where older ones raise.
    # Both become the same sentence, which says whether the run can be resumed.
    if code == _INTERRUPTED:
        return _interrupted(arguments)
    return code if isinstance(code, int) else 0


def _code_after(stopped: SystemExit) -> int:
    """The exit code where a library, or foreign code, has asked Python to exit."""
    # Typer exits like this if it sees the broken pipe before we do.
    # The context tells: the reader of stdout has left, which is not a failure.
    if isinstance(stopped.__context__, BrokenPipeError):
        return _READER_HAS_LEFT
    # The completion of a shell ends with an exit, before any command runs.
    # Within a command, exit code 0 comes from foreign code: the command has not succeeded.
    if stopped.code or not Command.running:
        raise stopped
    return _fail(_unexpected(stopped), 1)


def _interrupted(arguments: Sequence[str]) -> int:
    """Report an interrupt, unless this process is a rank: its launcher reports it."""
    if launched():
        return _INTERRUPTED
    sentence = "Interrupted."
    if arguments and arguments[0] in ("probe", "curate", "rescore", "bisect"):
        sentence += f" {CAN_RESUME}"
    return _fail(sentence, _INTERRUPTED)


def _sentence(error: Exception, command: str) -> str:
    """What to say about an error that nobody has put into words."""
    if memory.is_out_of_memory(error):
        return (
            "Out of memory. Close other programs, or reduce the work: fewer --workers, a smaller "
            "--token-budget, fewer prompts."
        )
    if isinstance(error, OSError):
        return _os_sentence(error)
    if isinstance(error, RuntimeError) and str(error).startswith(_LOOP):
        link = str(error).removeprefix(_LOOP).strip("'\"")
        return f"{link} is a link that leads back to itself. {_REMEDIES[errno.ELOOP]}"
    missing_package = not_installed(error, f"`{command}`")
    if missing_package:
        return missing_package
    if isinstance(error, UnicodeEncodeError) and not is_encodable(error.object):
        return f"{error.object[:300]} is not UTF-8. Rename the file of that name, or fix the text."
    return _unexpected(error)


def _os_sentence(error: OSError) -> str:
    """What the system refused, of which file, and the usual remedy."""
    if isinstance(error, PermissionError) and error.filename:
        return str(denied(error.filename))
    fault = error.strerror or str(error)
    if error.filename:
        fault += f": {error.filename}"
    return f"{fault}. {_REMEDIES.get(error.errno or 0, _REMEDY)}"


def _unexpected(error: BaseException) -> str:
    fault = f"{type(error).__name__}: {error}".splitlines()[0]
    package = entry_points.package_at_fault(error)
    if package:
        return (
            f"Unexpected error ({fault}) in the package {package}. Report it to its author with "
            "what MISMATCH_DEBUG=1 adds."
        )
    return (
        f"Unexpected error ({fault}). This is a bug: please report it with what MISMATCH_DEBUG=1 "
        "adds."
    )


def _fail(message: str, code: int) -> int:
    if Command.debugging and sys.exc_info()[0] is not None:
        traceback.print_exc()
    print(f"mismatch-cli: {visible(message)}", file=sys.stderr)
    return code


def main() -> None:
    """The program: it owns its process, so it may tune memory management and decide how to exit."""
    # How often Python looks for cycles, and Arrow's memory pool, are up to the process's owner.
    # So they are set here and not by the library, which runs in processes of other programs.
    gc.set_threshold(*_COLLECT_AFTER)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for stream in ("stdout", "stderr"):
        # A shell may close a stream (`>&-`), and then Python sets it to None.
        # Nobody reads, which is not a failure: what is printed goes to /dev/null.
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    spell_out_what_streams_lack()
    with safe_path():
        code = run(sys.argv[1:])
    # An interrupted rank has not failed: torchrun would report another code as an error of it.
    # The launcher is interrupted too, and exits with 130 for all of them.
    if code == _INTERRUPTED and launched():
        code = 0
    _end(code)


def spell_out_what_streams_lack() -> None:
    """Escape characters that a terminal or pipe cannot encode, such as `\\u03bc`, which JSON
    reads as the same one.
    """
    codecs.register_error(_SPELLED_OUT, _spelled_out)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_SPELLED_OUT)


def _spelled_out(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    utf_16 = error.object[error.start : error.end].encode("utf-16-be", errors="surrogatepass")
    escaped = ""
    for (unit,) in struct.iter_unpack(">H", utf_16):
        escaped += f"\\u{unit:04x}"
    return escaped, error.end


def _end(code: int) -> NoReturn:
    """Exit without destroying torch's and vLLM's objects, which takes seconds; exit handlers
    run.
    """
    # A late Ctrl-C exits at once, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # the reader has left, as in `_run`
    except OSError as error:
        code = _fail(
            f"Could not write to stdout ({error.strerror}), so output is lost. Redirect it "
            "elsewhere.",
            1,
        )
    # Python does not tear down its objects: a finaliser (`__del__`) may never run.
    # Work for the end belongs in `atexit`, called above, or in a context manager.
    os._exit(code)
