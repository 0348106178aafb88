"""Workers and ranks as forks, in tests, of one process that has imported torch, which takes two seconds each.

Fresh processes are those of tests/engine/train/parallel/test_workers.py, of the first run over ranks in
test_ranks.py, of every rank that dies, and of every command that a test starts.
"""

import json
import os
import runpy
import select
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

import pytest
from zerokl.engine.processes.channel import Channel
from zerokl.engine.processes.process import ForkServer, Process
from zerokl.engine.runs.ablations.cell_command import import_what_every_run_imports
from zerokl.engine.train.parallel import worker


def imports() -> None:
    """What the forks share. It computes nothing (see ForkServer)."""
    import_what_every_run_imports()


@cache
def _forks() -> ForkServer:
    return ForkServer(f"{__name__}:imports")


@contextmanager
def forked_workers() -> Iterator[None]:
    """Here each worker of a run is a fork."""

    def start(entry: str, fds: Sequence[int]) -> Process:
        return Process(f"{__name__}:serve", fds=fds, forks=_forks())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "Process", start)
        yield
    if _forks.cache_info().currsize:
        _forks().close()
        _forks.cache_clear()


def serve(channel: Channel) -> None:
    """A worker that finds the modules its owner finds now."""
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
    worker.serve(channel)


def run_ranks(n: int, words: Sequence[str], folder: Path) -> str:
    """What `torchrun --nproc-per-node N WORDS` prints in a folder, over ranks of one thread each.

    Fails where a rank does; the others are ended then.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1"}
    running, failed = [], 0
    with open(folder / "output.txt", "w+") as output:
        for i in range(n):
            env = job | {"RANK": str(i), "LOCAL_RANK": str(i)}
            running.append(Process(f"{__name__}:run_rank", output.fileno(), env, forks=_forks()))
            running[-1].channel.send(json.dumps([str(folder), *words]).encode())
        while running:
            for rank in select.select(running, [], [])[0]:
                failed += rank.ending().code != 0
            ended = [rank for rank in running if failed or rank.ending(wait=False)]
            for rank in ended:
                rank.close()
            running = [rank for rank in running if rank not in ended]
        output.seek(0)
        text = output.read()
    assert not failed, text
    return text


def run_rank(channel: Channel) -> None:
    """A rank: Python with the words that the channel gives, after the folder that it runs in."""
    import torch

    with closing(channel):
        folder, *words = json.loads(channel.receive())
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
    os.chdir(folder)
    torch.set_num_threads(1)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")
