"""The command line: a function for each subcommand. An error is one line on stderr (see exit_codes.py)."""

import os
import resource
import sys

import cyclopts

from ..files.installed import check_together, has_trainer
from .app import app
from .command_line import error_message, failure_line, foreseen, memory_ran_out, spelt_out
from .exit_codes import ExitCode

# Each registers its commands; help keeps this order.
if has_trainer():
    from . import runs, models, checks  # noqa: F401, I001
from . import audits, capsules  # noqa: F401

# Open files that a command may need: it has two dozen, and a library that can open no more may print pages.
_OPEN_FILES = 64


def _rank() -> str:
    """The beginning of an error line: the rank of this process, where there are several."""
    several = os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ
    return f"rank {os.environ['RANK']}: " if several else ""


def _check_open_files() -> None:
    """Raise ValueError where the process may not open as many files as a command needs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < _OPEN_FILES:  # -1 is no limit
        raise ValueError(f"open files ({limit}) must be at least {_OPEN_FILES}; raise the limit (ulimit -n)")


def _asked_for_help(words: list[str]) -> tuple[cyclopts.App, list[str]]:
    """The application and the words for it: `train --help NAME` asks for all settings, or one section."""
    if words[:2] != ["train", "--help"] or len(words) != 3 or not has_trainer():
        return app, words
    from .config_options import help_of

    return help_of(app, words[2]), ["--help"]


def main(argv: list[str] | None = None) -> int:
    """The exit code of a command line. With ZEROKL_TRACEBACK=1 an error shows its traceback."""
    return _outcome(argv)[0]


def _outcome(argv: list[str] | None) -> tuple[int, Exception | None]:
    """The exit code of a command line, and the error that ended it."""
    words = spelt_out(sys.argv[1:] if argv is None else argv)
    try:
        try:
            _check_open_files()
            check_together()
            chosen, words = _asked_for_help(words)
            return chosen(words, exit_on_error=False, print_error=False) or ExitCode.DONE, None
        except cyclopts.CycloptsError as error:
            raise ValueError(error_message(error)) from error
    except Exception as error:
        if os.environ.get("ZEROKL_TRACEBACK"):
            raise
        print(f"zerokl: {_rank()}{failure_line(error)}", file=sys.stderr)
        return ExitCode.REFUSED if foreseen(error) else ExitCode.INTERNAL, error
    except KeyboardInterrupt:
        print("zerokl: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED, None


def run() -> None:
    """The console script: main, and the end of the process with its exit code."""
    code, error = _outcome(None)
    if code == ExitCode.INTERRUPTED or memory_ran_out(error):
        # Python waits at its end for the threads of executors. It never wakes one whose start Ctrl-C has
        # broken off: the thread runs, and its executor does not know of it. And where memory ran out, the
        # ends of some libraries crash, with an exit code of their own.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
