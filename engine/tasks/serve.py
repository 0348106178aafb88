"""What a process of the executor runs: it makes a function, and answers calls of it, one at a time.

Messages to it are pickled. Answers are JSON, because a user's code may have written them.
Nothing here loads torch or numpy (see processes/process.py); what the user's code loads is its own affair.
"""

import json
import os
import pickle
import resource
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..processes.channel import Channel
from ..processes.keeper import accept_interrupts
from .users_code import raised

# How gladly Linux ends this process where memory runs out, before any other of the run.
_OOM_SCORE = "1000"


@dataclass(frozen=True)
class Setup:
    """What a process makes its function from: maker(*arguments) -> function(*call) -> a JSON value."""

    maker: str  # module:function of zerokl
    arguments: tuple[Any, ...]
    memory_bytes: int  # that the process may ask for; 0 is no limit
    python_path: str | None  # of the run's own environment


def serve(channel: Channel) -> None:
    """Answer calls until the run, or a call, closes the channel."""
    accept_interrupts()  # a user's code may send itself one
    with suppress(EOFError, OSError):
        setup = pickle.loads(channel.receive())
        _prepare(setup)
        function, refusal = _made(setup)
        about = getattr(function, "about", {})
        channel.send(json.dumps({"refusal": refusal, "value": about}).encode())
        process = os.getpid()
        while True:
            answer = _answer(function, channel.receive(), setup.memory_bytes)
            if os.getpid() != process:
                os._exit(0)  # a child that the call forked has come back from it too
            channel.send(json.dumps(answer).encode())


def _prepare(setup: Setup) -> None:
    """Bound the memory; drop warnings; have what is printed sent line by line."""
    if setup.memory_bytes:
        # Of memory that is written to. A limit of addresses would refuse libraries that only reserve them.
        resource.setrlimit(resource.RLIMIT_DATA, (setup.memory_bytes, setup.memory_bytes))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_SCORE)
    if setup.python_path is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = setup.python_path
    warnings.simplefilter("ignore")
    sys.stdout.reconfigure(line_buffering=True)


def _made(setup: Setup) -> tuple[Callable[..., Any], str]:
    """The function, or the line that says why there is none."""
    module, _, name = setup.maker.partition(":")
    try:
        return getattr(import_module(module), name)(*setup.arguments), ""
    except ValueError as refusal:
        return lambda: None, str(refusal)


def _answer(function: Callable[..., Any], call: bytes, memory_bytes: int) -> dict[str, Any]:
    """The value of a call, or what it raised and where."""
    try:
        value = function(*pickle.loads(call))
        json.dumps(value)
        return {"value": value}
    except BaseException as error:  # a user's code may raise anything
        reason, place = raised(error)
        if isinstance(error, MemoryError) and memory_bytes:
            reason += f"; its process may ask for {memory_bytes:,} bytes"
        return {"reason": reason, "place": place, "raised": True}
