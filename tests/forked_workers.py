"""Workers of runs as forks, in tests, of one process that has done the imports: two seconds a worker.

That a worker also begins in a fresh process is shown by tests/engine/train/parallel/test_workers.py, and by
all runs of a command in a process of its own.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from zerokl.engine.processes.channel import Channel
from zerokl.engine.processes.process import ForkServer, Process
from zerokl.engine.train.parallel import worker


def imports() -> None:
    """Those of this module: what the forks share."""


def serve(channel: Channel) -> None:
    """A worker that finds the modules its owner finds now."""
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
    worker.serve(channel)


@contextmanager
def forked() -> Iterator[None]:
    """Here each worker is a fork; the process that forks is started with the first one."""
    servers: list[ForkServer] = []

    def start(entry: str, fds: list[int]) -> Process:
        if not servers:
            servers.append(ForkServer(f"{__name__}:imports"))
        return Process(f"{__name__}:serve", fds=fds, forks=servers[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "Process", start)
        yield
    for server in servers:
        server.close()
