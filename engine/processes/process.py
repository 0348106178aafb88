"""The one way in which a run starts Python processes: rewards, environments, workers, cells of an ablation.

A process runs a function of ours and has a channel to it. It sets its limits itself, before it runs code of
others. It leaves nothing behind, however it or its owner ends.

No pool of a library does that. A pool of multiprocessing's, or loky's, imports the caller's script again in
each process. None that we know ends what a call has started in its turn, or says of what a process died.

What is no run's process begins elsewhere, and says why there: the model's programs, which are confined first
(tasks/run_python.py), trials of a tokenizer (tasks/limits.py), audits of checkpoints (audit/over_run.py), and
tools that end by themselves, such as a compiler.

Nothing here loads torch or numpy, so a process that needs neither starts in a few hundredths of a second.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from .channel import Channel, is_readable

# How long a process that was told to end may take, in seconds. It then is killed.
_END_S = 5.0


@dataclass(frozen=True)
class Ending:
    """How a process ended. pid: 0 where none has begun. code: its exit code, -N for signal N."""

    pid: int
    code: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        name = signal.Signals(-self.code).name
        hint = "; this is how Linux ends a process when memory runs out" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"


class Process:
    """A Python process that runs a function. It sees no Ctrl-C, unless the function accepts interrupts.

    Between it and this process stands a keeper (see keeper.keep). The keeper ends everything below it when
    the function has ended, when `close` is called, and when this process has ended in any way.

    channel: to the function, which is called with the other end.
    """

    def __init__(
        self,
        entry: str,
        output: int | None = None,
        env: Mapping[str, str] | None = None,
        fds: Sequence[int] = (),
        forks: "ForkServer | None" = None,
        timeout_s: float | None = None,
        longest_bytes: int | None = None,
    ):
        """entry: `module:function` of zerokl, called with a Channel.

        output: the descriptor that stdout and stderr go to. env: variables beside this process's own. fds:
        descriptors that it inherits. forks: starts it. timeout_s, longest_bytes: see Channel.
        """
        self._leash, keepers_leash = socket.socketpair()
        connection, functions_end = socket.socketpair()
        self.channel = Channel(connection, timeout_s, longest_bytes)
        self._is_fork, self._ending = forks is not None, None
        with keepers_leash, functions_end:
            ends = [keepers_leash.fileno(), functions_end.fileno(), *fds]
            start = forks.start_keeper if forks else _start_keeper
            self._starter = start(entry, ends, output, _environment(env or {}))

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended."""
        return self._leash.fileno()

    def ending(self, wait: bool = True) -> Ending | None:
        """How the process ended; None while it runs. wait: until it has ended."""
        if self._ending is None and (wait or is_readable(self.fileno())):
            try:
                pid_and_code = self._leash.recv(64).split()
            except ConnectionResetError:
                pid_and_code = []
            self._ending = Ending(*map(int, pid_and_code or (0, self._code_of_the_starter())))
        return self._ending

    def _code_of_the_starter(self) -> int:
        """How the keeper was ended, or the process that should have forked it."""
        try:
            return self._starter.wait(_END_S)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def interrupt(self) -> None:
        """Send the function what Ctrl-C sends."""
        with suppress(OSError):
            self._leash.send(b"i")

    def close(self) -> None:
        """End the process, and all that it has started."""
        self.channel.close()
        with suppress(OSError):
            self._leash.shutdown(socket.SHUT_WR)  # a fork of this process may hold the socket open
            self._leash.settimeout(_END_S)
            while self._leash.recv(64):
                pass
        self._leash.close()
        if not self._is_fork:
            self._starter.kill()
            self._starter.wait()


class ForkServer:
    """A process that does imports once, and forks for each Process that is started with it.

    OpenMP does not survive a fork, and neither does CUDA. So the imports must compute nothing and ask for no
    GPU; both begin anew in a fork. Forks share nothing else.
    """

    def __init__(self, preload: str):
        """preload: `module:function` of zerokl that does the imports."""
        self._connection, servers_end = socket.socketpair()
        self._channel = Channel(self._connection)
        with servers_end:
            fd = servers_end.fileno()
            code = f"from zerokl.engine.processes.keeper import serve_forks; serve_forks({fd}, {preload!r})"
            self._server = _start_python(code, [fd], None, _environment({}))

    def start_keeper(
        self, entry: str, fds: Sequence[int], output: int | None, env: Mapping[str, str]
    ) -> subprocess.Popen:
        """Returns the process that forks. Where it has ended, nothing is started."""
        outputs = [1, 2] if output is None else [output, output]
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._connection, [b"k"], [*outputs, *fds])
            self._channel.send(json.dumps([entry, [*fds], dict(env)]).encode())
        return self._server

    def close(self) -> None:
        """End the process that forks. What it has started goes on."""
        self._channel.close()
        self._server.wait()


def _start_keeper(
    entry: str, fds: Sequence[int], output: int | None, env: Mapping[str, str]
) -> subprocess.Popen:
    code = f"from zerokl.engine.processes.keeper import keep; keep({entry!r}, {[*fds]})"
    return _start_python(code, fds, output, env)


def _start_python(
    code: str, fds: Sequence[int], output: int | None, env: Mapping[str, str]
) -> subprocess.Popen:
    """A Python process that runs `code`, with the file descriptors `fds`, in a session of its own.

    Ctrl-C is blocked in it from its first instruction on; this process alone decides what it means, and sees
    one of this time afterwards. It is not a fork, because OpenMP does not survive one.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            pass_fds=fds,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process, with its modules, and `variables`."""
    path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
    return {**os.environ, "PYTHONPATH": path, **variables}
