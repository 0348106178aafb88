"""Processes of tests as forks of one that has done the imports: torch's take two seconds, vLLM's nine.

Workers of runs are forks here, most ranks, and the scripts of tests/vllm. Fresh processes are those of
tests/engine/train/parallel/test_workers.py, of the first run over ranks in test_ranks.py, of each test in
which a rank or a run dies, and of all commands of other folders.
"""

import json
import os
import runpy
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from zerokl.engine.processes.channel import Channel
from zerokl.engine.processes.process import ForkServer, Process
from zerokl.engine.train.parallel import worker


def imports() -> None:
    """What the forks share. It computes nothing (see ForkServer)."""
    from zerokl.engine.runs.ablations.cell_command import import_what_every_run_imports

    import_what_every_run_imports()


IMPORTS = f"{__name__}:imports"


@cache
def _forks(preload: str) -> ForkServer:
    """It ends with this process."""
    return ForkServer(preload)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Here each worker of a run is a fork."""

    def start(entry: str, fds: Sequence[int]) -> Process:
        return Process(f"{__name__}:serve", fds=fds, forks=_forks(IMPORTS))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "Process", start)
        yield


def serve(channel: Channel) -> None:
    """A worker that finds the modules its owner finds now."""
    _find_the_owners_modules()
    worker.serve(channel)


def _start(words: Sequence[str], folder: Path, streams: Sequence[Path], env: dict, preload: str) -> Process:
    """Python with these words. streams: the files of its standard input, output and error."""
    process = Process(f"{__name__}:run", env=env, forks=_forks(preload))
    process.channel.send(json.dumps([str(folder), [str(x) for x in streams], *words]).encode())
    return process


def run(channel: Channel) -> None:
    """What a fork of _start runs."""
    import torch

    with closing(channel):
        folder, streams, *words = json.loads(channel.receive())
    _find_the_owners_modules()
    os.chdir(folder)
    for number, path in enumerate(streams):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def _find_the_owners_modules() -> None:
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)


def run_python(*words: str, stdin: str = "", preload: str = IMPORTS) -> subprocess.CompletedProcess[str]:
    """As subprocess.run of Python with these words, a script or -m and a module, with its output."""
    with TemporaryDirectory() as name:
        streams = [Path(name, stream) for stream in ("stdin", "stdout", "stderr")]
        streams[0].write_text(stdin)
        process = _start(words, Path.cwd(), streams, {}, preload)
        code = process.ending().code
        process.close()
        printed = [stream.read_text() if stream.exists() else "" for stream in streams[1:]]
    return subprocess.CompletedProcess([*words], code, *printed)


def run_ranks(n: int, words: Sequence[str], folder: Path, preload: str = IMPORTS) -> str:
    """What `torchrun --nproc-per-node N WORDS` prints in a folder. Fails where a rank does."""
    failed, text = ended_ranks(n, words, folder, preload)
    assert not failed, text
    return text


def ended_ranks(n: int, words: Sequence[str], folder: Path, preload: str = IMPORTS) -> tuple[int, str]:
    """How many of N ranks failed, of one thread each, and what all printed.

    As with torchrun, the others are ended once a rank has failed.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1"}
    output = folder / "output.txt"
    streams = [Path(os.devnull), output, output]
    jobs = [job | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(n)]
    running, failed = [_start(words, folder, streams, env, preload) for env in jobs], 0
    while running:
        for rank in select.select(running, [], [])[0]:
            failed += rank.ending().code != 0
        ended = [rank for rank in running if failed or rank.ending(wait=False)]
        for rank in ended:
            rank.close()
        running = [rank for rank in running if rank not in ended]
    text = output.read_text()
    output.unlink()
    return failed, text
