"""Benchmarks in processes of their own: for engines that keep memory or settings, and for several at once.

Such a process prints its rows as lines of JSON.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from zerokl.benchmarks.machine import END_S, Machine, Row

# Set for vLLM's Triton kernels in the process of a part. An engine beside it sets what it needs itself.
KERNEL_VARIABLES = {"VLLM_BATCH_INVARIANT": "1", "TRITON_F32_DEFAULT": "ieee"}
# FlashInfer's sampler would be compiled at its first call, by an nvcc that need not be there.
_ENGINE_VARIABLES = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


def module_command(m: Machine, module: str, *words: str, end_s: float = END_S) -> list[str]:
    """The command that runs a module of the benchmarks, which calls `serve`, on the device of `m`.

    end_s: seconds that it has.
    """
    place = ["--device", m.device.type, "--end", str(end_s), *(["--small"] if m.small else [])]
    return [sys.executable, "-P", "-m", f"zerokl.benchmarks.{module}", *words, *place]


def serve(rows: Callable[..., Iterator[Row]]) -> None:
    """In such a process: print the rows of rows(machine, *words), and end at once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--device", required=True)
    parser.add_argument("--end", type=float, required=True)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    for row in rows(Machine(args.device, args.small, args.end), *args.words):
        print(json.dumps(row), flush=True)
    os._exit(0)  # vLLM's own shutdown takes seconds


def rows_of(
    m: Machine,
    jobs: Mapping[str, list[str]],
    limit_s: float,
    turns: int = 0,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Row]:
    """Run the commands `jobs` at the same time. Yields their rows, job after job.

    turns: so many lines go to each command's stdin (by_turns.py). variables: for the commands. A command that
    fails has a row that says why. One that takes more than `limit_s`, or than the part has left, has a row
    that says so.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = {
            name: _Job(command, Path(folder), i, turns, variables)
            for i, (name, command) in enumerate(jobs.items())
        }
        end = time.perf_counter() + min(limit_s, m.left_s())
        try:
            for name, job in running.items():
                yield from job.rows(name, end - time.perf_counter())
        finally:
            for job in running.values():
                job.close()


class _Job:
    """One process, with its files."""

    def __init__(self, command: list[str], folder: Path, i: int, turns: int, variables: Mapping[str, str]):
        names = (folder / f"{i}.{kind}" for kind in ("in", "out", "err"))
        stdin, self._stdout, self._stderr = names
        stdin.write_text("\n" * turns)
        inherited = {k: v for k, v in os.environ.items() if k not in KERNEL_VARIABLES}
        environment = _ENGINE_VARIABLES | inherited | dict(variables)
        with stdin.open() as reads, self._stdout.open("w") as out, self._stderr.open("w") as err:
            self._process = subprocess.Popen(
                command, stdin=reads, stdout=out, stderr=err, env=environment, start_new_session=True
            )

    def rows(self, name: str, limit_s: float) -> Iterator[Row]:
        """The rows that the process printed until its end, and one for what went wrong."""
        try:
            code = self._process.wait(timeout=max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            code = None
        lines = [line.removeprefix("turn ") for line in self._stdout.read_text().splitlines()]
        rows = [json.loads(line) for line in lines if line.startswith('{"')]
        yield from rows
        if code is None:
            yield {"what": f"{name}: not compared further (no time left)"}
        elif code or not rows:
            reason = (self._stderr.read_text().strip().splitlines() or ["no output"])[-1][:160]
            yield {"what": f"{name}: ended with {code}: {reason}", "failed": True}

    def close(self) -> None:
        """End the process, and what it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()
