"""Other Python processes of a run: how they are started, and how all that they started ends with them.

Nothing here loads torch or numpy, so a process that needs neither starts in a few hundredths of a second.
"""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

# Options of prctl (linux/prctl.h).
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
# How long a process that was told to end may take, in seconds. It then is killed.
_END_S = 5.0


def ending(code: int) -> str:
    """How a process ended, in words, from its exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = "; this is how Linux ends a process when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def start_python(
    code: str,
    *words: str,
    fds: Sequence[int],
    stdin: int | None = None,
    output: int | None = None,
    env: dict[str, str] | None = None,
    session: bool = False,
) -> subprocess.Popen:
    """A Python process that runs `code`, with the modules of this process and the file descriptors `fds`.

    output: the descriptor that stdout and stderr go to. env: variables beside this process's own. session:
    it has a session of its own, so Ctrl-C at the terminal does not reach it.

    It is not a fork, because OpenMP does not survive one. It is not started by multiprocessing, because this
    would run the caller's script again.
    """
    path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *words],
        pass_fds=fds,
        env=os.environ | {"PYTHONPATH": path} | (env or {}),
        stdin=stdin,
        stdout=output,
        stderr=output,
        start_new_session=session,
    )


class KeptProcess:
    """A process that runs a function, and that leaves nothing behind: no child of a child outlives it.

    Between this process and the one that runs the function stands a keeper (see `keep`). It ends everything
    below it when the function's process has ended, when `close` is called, and when this process has ended
    in any way.
    """

    def __init__(self, entry: str, fd: int, output: int, env: dict[str, str]):
        """entry: `module:function` of zerokl, called with the file descriptor `fd`.

        output: the descriptor that stdout and stderr of the process go to. env: variables beside this
        process's own.
        """
        self._leash, keepers_end = socket.socketpair()
        with keepers_end:
            leash = keepers_end.fileno()
            code = f"from zerokl.engine.processes.process import keep; keep({leash}, {entry!r}, {fd})"
            self._keeper = start_python(
                code, fds=[leash, fd], stdin=subprocess.DEVNULL, output=output, env=env, session=True
            )

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended."""
        return self._leash.fileno()

    def exit_code(self) -> int:
        """The exit code of the process, once it has ended: -N for signal N."""
        try:
            word = self._leash.recv(16)
        except ConnectionResetError:
            word = b""
        return int(word) if word else self._keeper.wait()

    def close(self) -> None:
        """End the process, and all that it has started."""
        with suppress(OSError):
            self._leash.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold the socket open
        self._leash.close()
        try:
            self._keeper.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()


def keep(leash: int, entry: str, fd: int) -> None:
    """What the keeper runs: a child that calls `entry`, until this child ends or the leash is let go.

    On Linux, processes below the child whose parents end become children of the keeper. So it finds all of
    them. Elsewhere it ends the child's process group.
    """
    wake, writer = wake_at_the_end_of_a_child()
    _prctl(_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        end_wakes(wake, writer)
        os.close(leash)
        os.setpgid(0, 0)  # a kill of its own group does not reach the keeper
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
        return _function(entry)(fd)
    os.close(fd)
    code = None
    while code is None:
        readable, _, _ = select.select([leash, wake], [], [])
        if leash in readable:
            break
        os.read(wake, 4096)
        code = dict(ended_children()).get(child)
    _kill_all_below(child)
    if code is not None:
        with suppress(OSError), socket.socket(fileno=leash) as connection:
            connection.send(b"%d" % code)
    os._exit(0)


def _function(entry: str) -> Callable[[int], None]:
    module, _, name = entry.partition(":")
    return getattr(import_module(module), name)


def _prctl(option: int, value: int) -> None:
    """Set an option of this process. Only Linux has it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def wake_at_the_end_of_a_child() -> tuple[int, int]:
    """Two descriptors: one that is readable once a child of this process has ended, and its writing end."""
    wake, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake, writer


def end_wakes(wake: int, writer: int) -> None:
    """In a fork of a process that has these descriptors: let go of them.

    `signal` need not know the writer any more: from Python 3.12 on, asyncio unsets it in every fork.
    """
    signal.set_wakeup_fd(-1)
    os.close(writer)
    os.close(wake)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def ended_children() -> Iterator[tuple[int, int]]:
    """Process and exit code of each child that has ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def _kill_all_below(child: int) -> None:
    """End every process below the keeper. child: whose process group is ended first."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            for pid in _children():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    """This process's children; none where the kernel does not list them."""
    pid = os.getpid()
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
