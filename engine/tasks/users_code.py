"""Calls of code that a user wrote: whatever it raises becomes one line that names the place."""

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def call_user(what: str, where: str, function: Callable[..., T], /, *args: Any, **options: Any) -> T:
    """function(*args, **options).

    what, where: the function and what it was called for, as the error names them. Raises ValueError for every
    exception, SystemExit included: it would end the run without a word. Ctrl-C stays what it is.
    """
    try:
        return function(*args, **options)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's code may raise anything
        raise ValueError(
            f"{what} raised {type(error).__name__} ({_text(error)}){where}{_line(error)}"
        ) from error


def _text(error: BaseException) -> str:
    """The message of an exception; the user's __str__ may raise too."""
    try:
        return str(error)
    except Exception as second:
        return f"its message raised {type(second).__name__}"


def _line(error: BaseException) -> str:
    """The line of code that raised the exception, where it is not our own call."""
    if isinstance(error, SyntaxError):
        return f", in {error.filename} line {error.lineno}" if error.filename else ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    frames = [f for f in frames if not f.filename.startswith("<frozen")]
    return f", in {frames[-1].filename} line {frames[-1].lineno}" if frames else ""
