"""Processes of cells without their imports: one process imports what every run does, and forks for each cell.

The imports are a tenth of a short run. OpenMP does not survive a fork, and neither does CUDA. So the process
that forks computes nothing and asks for no GPU, and in a cell both begin anew. Cells share nothing else.
"""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from ...processes.orphans import end_with
from ...processes.process import end_wakes, ended_children, start_python, wake_at_the_end_of_a_child

_CODE = "from zerokl.engine.runs.ablations.forks import serve; serve({fd})"
# The module of the command line, whose floor is above this one.
_COMMAND_LINE = "zerokl.cli"
_BYTES = 1 << 16


class ForkServer:
    """Starts `zerokl` commands by forks of one process, and knows how they ended."""

    def __init__(self) -> None:
        self._connection, far_end = socket.socketpair()
        with far_end:
            fd = far_end.fileno()
            self._server = start_python(_CODE.format(fd=fd), fds=[fd], stdin=subprocess.DEVNULL, session=True)
        self._read = b""
        self._started = 0
        self._codes: dict[int, int] = {}

    def start(self, words: Sequence[str], log: Path, environment: Mapping[str, str], threads: int) -> int:
        """Run `zerokl` with these words in a process of its own, which is the leader of a process group.

        log: the file to whose end the process prints. threads: that torch computes with. Returns the
        process's number; 0 where there is none, because the process that forks has ended. Raises OSError
        where the log cannot be written.
        """
        message = {"words": list(words), "environment": dict(environment), "threads": threads}
        self._started = 0
        with open(log, "ab") as output, suppress(BrokenPipeError, ConnectionResetError):
            line = json.dumps(message).encode() + b"\n"
            sent = socket.send_fds(self._connection, [line], [output.fileno()])
            self._connection.sendall(line[sent:])
        while not self._started and self._receive():
            pass
        return self._started

    def exit_code(self, process: int) -> int | None:
        """How a process ended, -N for signal N; None while it runs.

        Where the process that forks has ended, it is how this one did: what it has started ends with it.
        """
        while select.select([self._connection], [], [], 0)[0] and self._receive():
            pass
        return self._codes.get(process, self._server.poll())

    def close(self) -> None:
        """End the process that forks."""
        self._connection.close()
        self._server.wait()

    def _receive(self) -> bool:
        """Take what was sent; returns whether there was anything. There is nothing after the server's end."""
        try:
            new = self._connection.recv(_BYTES)
        except ConnectionResetError:
            new = b""
        if not new:
            self._server.wait()
            return False
        *lines, self._read = (self._read + new).split(b"\n")
        for message in map(json.loads, lines):
            if "code" in message:
                self._codes[message["process"]] = message["code"]
            else:
                self._started = message["process"]
        return True


def serve(fd: int) -> None:
    """What the process that forks runs: a fork for each line, until the connection `fd` is closed.

    It returns in the forks alone, at the end of their command.
    """
    import_what_every_run_imports()
    wake, writer = wake_at_the_end_of_a_child()
    with socket.socket(fileno=fd) as connection:
        process = -1
        while process:
            readable, _, _ = select.select([connection, wake], [], [])
            if wake in readable:
                os.read(wake, _BYTES)
                for ended, code in ended_children():
                    _send(connection, process=ended, code=code)
            if connection in readable:
                line, output = _request(connection)
                process = os.fork()
                if process:
                    os.close(output)
                    _lead_a_group(process)
                    _send(connection, process=process)
    end_wakes(wake, writer)
    _run(output, **json.loads(line))


def import_what_every_run_imports() -> None:
    """Import it. No module asks for a GPU, or computes with several threads, when it is imported."""
    from transformers import AutoTokenizer  # noqa: F401

    from .. import run  # noqa: F401

    import_module(_COMMAND_LINE)


def _request(connection: socket.socket) -> tuple[bytes, int]:
    """The next line, and the descriptor that came with it. Ends the process where its owner has ended."""
    with suppress(ConnectionResetError):
        line, fds, _, _ = socket.recv_fds(connection, _BYTES, 1)
        while not line.endswith(b"\n") and (more := connection.recv(_BYTES)):
            line += more
        if line.endswith(b"\n"):
            return line, fds[0]
    os._exit(0)


def _send(connection: socket.socket, **message: int) -> None:
    with suppress(BrokenPipeError):  # the owner has ended, which `serve` sees next
        connection.sendall(json.dumps(message).encode() + b"\n")


def _lead_a_group(process: int) -> None:
    """Both sides of a fork call this, so that the group is there for whoever knows its number."""
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(process, process)


def _run(output: int, words: list[str], environment: dict[str, str], threads: int) -> None:
    """Run `zerokl` with these words in this process, a fork, and end it."""
    import torch

    _lead_a_group(os.getpid())
    end_with(os.getppid())
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    sys.argv = ["zerokl", *words]
    import_module(_COMMAND_LINE).run()
