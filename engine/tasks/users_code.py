"""Code that a user wrote: how it is imported, and how one line names whatever it raises.

Nothing here loads torch or numpy (see processes/process.py).
"""

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
_HERE = os.path.dirname(__file__)


def add_places(directory: str) -> list[str]:
    """Let this process find modules of the user's in `directory`, if there is one, and in the current one.

    Returns what the search path did not have before.
    """
    added = [place for place in (directory, os.getcwd()) if place and place not in sys.path]
    sys.path.extend(added)
    return added


@contextmanager
def importable(directory: str) -> Iterator[None]:
    """Inside this context modules of the user's are found (see add_places); afterwards they no longer are.

    A module may import others of its place when it is called. So calls of its functions belong inside, too.
    """
    added = add_places(directory)
    try:
        yield
    finally:
        for place in added:
            if place in sys.path:
                sys.path.remove(place)


def load_object(name: str, what: str, directory: str) -> Any:
    """Import `module:object` (see importable).

    Raises ValueError when the object cannot be imported.
    """
    module, _, attribute = name.partition(":")
    what = f"{what}: {name[:200]} cannot be imported as module:object; it"
    with importable(directory):
        return call_user(what, "", lambda: getattr(importlib.import_module(module), attribute))


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
        reason, place = raised(error)
        raise ValueError(f"{what} {reason}{where}{place}") from error


def raised(error: BaseException) -> tuple[str, str]:
    """What was raised, and the line of code that raised it: "raised X (its message)", ", in FILE line N".

    The line is empty where the exception comes from our own call.
    """
    return f"raised {type(error).__name__} ({_text(error)})", _line(error)


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
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(f.filename) != _HERE]
    frames = [f for f in frames if not f.filename.startswith("<frozen")]
    return f", in {frames[-1].filename} line {frames[-1].lineno}" if frames else ""


def awaited(value: Any) -> Any:
    """The value, or what it gives when it is awaited, in this process's event loop."""
    return _event_loop().run_until_complete(value) if hasattr(value, "__await__") else value


@cache
def _event_loop() -> Any:
    """The event loop in which coroutines of the user's run. Clients that they keep belong to it."""
    import asyncio  # few need it

    return asyncio.new_event_loop()
