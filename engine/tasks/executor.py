"""An executor: code of the user's runs in processes of its own, so that it can reach no state of the trainer.

Each process computes one call at a time. The order in which calls end decides nothing: a result has the place
of its call, and of several calls that fail, the first is named.

processes/process.py says why it is no pool of a library.
"""

import json
import os
import pickle
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ...files.reading import one_line
from ..processes.process import Process
from .serve import Setup

_ENTRY = "zerokl.engine.tasks.serve:serve"
# Sets have one order in every process. Threads would decide bits of the user's code, and take the cores that
# the other processes need.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
# The most lines that are shown of what the calls of one `map` print, and the most characters of a line.
_LINES, _LINE = 20, 200
# How long a process that has closed its connection may take to end, in seconds.
_END_S = 1.0
_READ_BYTES = 1 << 16
# The longest answer of a process. The longest content of an environment has 3 MiB as JSON (environment.py).
_LONGEST_ANSWER_BYTES = 1 << 22
# More processes than this are not started unless they are asked for.
_MOST_PROCESSES = 16
# Stands for the place of a call where a process makes its function.
_SETUP = -1


@dataclass(frozen=True)
class Limits:
    """Of one process. memory_bytes: that it may ask for; 0 is half of the machine's memory.

    timeout_s: of one call. setting: which setting names it.
    """

    timeout_s: float
    memory_bytes: int
    setting: str


class CallError(Exception):
    """A call that has no value. index: its place; reason, line: what happened and in which line of code.

    timed_out: it took too long.
    """

    def __init__(self, index: int, reason: str, line: str = "", timed_out: bool = False):
        super().__init__(reason)
        self.index, self.reason, self.line, self.timed_out = index, reason, line, timed_out


@dataclass(eq=False)
class _Worker:
    """A process, as the executor sees it."""

    process: Process
    output: int  # the descriptor from which its stdout and stderr are read
    call: int | None = None  # the place of the call that it computes
    deadline: float = 0.0
    unfinished_line: bytes = b""
    queue: deque[tuple[int, bytes]] = field(default_factory=deque)  # calls that only this process computes


class Executor:
    """n processes that each make a function with maker(*arguments), and call it; with 0 one for each core.

    what: the function, as lines about it name it. maker: module:function of zerokl. say: shows a line that a
    call printed. about: what the function says of itself, its attribute `about`.

    Raises ValueError with the words of the maker's refusal, and where a process ends before it is ready.
    """

    def __init__(
        self,
        what: str,
        maker: str,
        arguments: tuple[Any, ...],
        n: int,
        limits: Limits,
        say: Callable[[str], None],
    ):
        self._what, self._limits, self._say, self._lines = what, limits, say, 0
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        memory_bytes = limits.memory_bytes or _memory_bytes() // 2
        setup = Setup(maker, arguments, memory_bytes, os.environ.get("PYTHONPATH"))
        self._setup, n = pickle.dumps(setup), n or _processes()
        # Submitted calls: their numbers, those that wait for any process, and those that cannot be sent.
        self._tickets, self._submitted = count(), 0
        self._queue: deque[tuple[int, bytes]] = deque()
        self._failed: dict[int, CallError] = {}
        self.about: dict[str, Any] = {}
        try:
            for place in range(n):
                self._start(place)
            self._collect(wait=True, replaces=False)
        except ChildProcessError as error:
            self.close()
            raise ValueError(str(error)) from None
        except BaseException:
            self.close()
            raise

    def map(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The values of function(*call), in order. Nothing else may have been submitted.

        Raises CallError for the first call without one. The executor is closed then.
        """
        answers: dict[int, Any] = {}
        try:
            tickets = [self.submit(call) for call in calls]
            for index, ticket in enumerate(tickets):
                while ticket not in answers:
                    answers |= self._collect(wait=True, replaces=False)
                if isinstance(error := answers[ticket], CallError):
                    raise CallError(index, error.reason, error.line, error.timed_out)
        except BaseException:
            self.close()
            self._read_output()
            raise
        return [answers[ticket] for ticket in tickets]

    def attempt(self, calls: Sequence[tuple[Any, ...]], homes: Sequence[int]) -> list[Any]:
        """For each call the value of function(*call), or its CallError. Nothing else may have been submitted.

        homes: see submit.
        """
        tickets, answers = [self.submit(*pair) for pair in zip(calls, homes, strict=True)], {}
        while len(answers) < len(tickets):
            answers |= self.collect(wait=True)
        return [answers[ticket] for ticket in tickets]

    def submit(self, call: tuple[Any, ...], home: int | None = None) -> int:
        """Begin function(*call), which `collect` gives the value of. Returns the number of the call.

        home: the process that computes it, 0 to n - 1; what it keeps from earlier calls stays there. None is
        any. A process that a call ended, or that was too slow, is made anew.
        """
        if not self._submitted:
            self._lines = 0
        ticket, self._submitted = next(self._tickets), self._submitted + 1
        message = _pickled(ticket, call)
        if isinstance(message, CallError):
            self._failed[ticket] = message
        else:
            queue = self._queue if home is None else self._workers[home].queue
            queue.append((ticket, message))
            self._send_queued()
        return ticket

    def collect(self, wait: bool) -> dict[int, Any]:
        """Of submitted calls that have ended, by their numbers, the value or the CallError.

        wait: for one at least, if any call has not ended.
        """
        return self._collect(wait, replaces=True)

    def _collect(self, wait: bool, replaces: bool) -> dict[int, Any]:
        """replaces: whether a process that has ended, or that was too slow, is made anew."""
        answers, self._failed = dict(self._failed), {}
        while self._send_queued():
            for worker, answer in self._answers(wait and not answers):
                ticket, worker.call = worker.call, None
                failed = _failure(ticket, answer)
                if ticket == _SETUP:
                    if failed:
                        raise ChildProcessError(f"{self._what}: {failed.reason} before its first call")
                    self.about = answer["value"]
                elif ticket is not None:
                    answers[ticket] = failed or answer.get("value")
                elif not replaces:
                    raise ChildProcessError(f"{self._what}: {failed.reason} between two calls")
                if failed and not answer.get("raised"):
                    place = self._workers.index(worker)
                    self._retire(worker)
                    if replaces:
                        self._start(place, worker.queue)
            if answers or not wait:
                break
        self._send_queued()
        self._submitted -= len(answers)
        if not self._submitted:
            self._read_output()
        return answers

    def _send_queued(self) -> bool:
        """Give each idle process its next call. Returns whether any process is busy."""
        for worker in self._workers:
            if worker.call is None and (queue := worker.queue or self._queue):
                self._send(worker, *queue.popleft())
        return any(worker.call is not None for worker in self._workers)

    @property
    def n(self) -> int:
        """The number of processes."""
        return len(self._workers)

    def close(self) -> None:
        """End the processes, and all that they have started."""
        for worker in [*self._workers]:
            self._retire(worker)
        self._selector.close()

    def _retire(self, worker: _Worker) -> None:
        """Show what a process has printed, and end it."""
        self._print(worker)
        self._say_line(worker.unfinished_line)
        for source in (worker.process, worker.process.channel, worker.output):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        self._workers.remove(worker)
        worker.process.close()
        os.close(worker.output)

    def _start(self, place: int, queue: Sequence[tuple[int, bytes]] = ()) -> None:
        """Start a process, which makes its function. queue: the calls that it computes then."""
        output, writer = os.pipe()
        limits = {"timeout_s": self._limits.timeout_s, "longest_bytes": _LONGEST_ANSWER_BYTES}
        process = Process(_ENTRY, writer, _ENVIRONMENT, **limits)
        os.close(writer)
        os.set_blocking(output, False)
        worker = _Worker(process, output, queue=deque(queue))
        for source in (process, process.channel, output):
            self._selector.register(source, selectors.EVENT_READ, worker)
        self._workers.insert(place, worker)
        self._send(worker, _SETUP, self._setup)

    def _send(self, worker: _Worker, index: int, message: bytes) -> None:
        worker.call, worker.deadline = index, time.monotonic() + self._limits.timeout_s
        # _answers says how it ended, or that it took too long.
        with suppress(OSError):
            worker.process.channel.send(message)

    def _answers(self, wait: bool = True) -> list[tuple[_Worker, dict[str, Any]]]:
        """Wait for answers. A process that has ended, or that takes too long, has answered with that."""
        busy = [worker for worker in self._workers if worker.call is not None]
        wait_s = min(worker.deadline for worker in busy) - time.monotonic() if wait else 0.0
        ready = {(key.data, key.fileobj) for key, _ in self._selector.select(max(0.0, wait_s))}
        answers, now = [], time.monotonic()
        for worker in self._workers:
            if (worker, worker.output) in ready:
                self._print(worker)
            answer = None
            if (worker, worker.process.channel) in ready:
                answer = _received(worker.process)
            elif (worker, worker.process) in ready:
                answer = _ended(worker.process)
            if answer is None and worker.call is not None and now >= worker.deadline:
                limits = self._limits
                reason = f"took more than {limits.timeout_s:g} s ({limits.setting})"
                answer = {"reason": reason, "timed_out": True}
            if answer is None:
                continue
            if worker.call is None:  # no call has asked for an answer
                answer = {"reason": answer.get("reason", "its process wrote to the run")}
            answers.append((worker, answer))
        return answers

    def _read_output(self) -> None:
        """Show what was printed before the last answers; then how many lines more there were."""
        for worker in self._workers:
            self._print(worker)
            self._say_line(worker.unfinished_line)
            worker.unfinished_line = b""
        if self._lines > _LINES:
            self._say(f"{self._what}: {self._lines - _LINES:,} more lines that it printed are not shown")

    def _print(self, worker: _Worker) -> None:
        """Show what the process has printed so far."""
        try:
            printed = os.read(worker.output, _READ_BYTES)
        except BlockingIOError:
            return
        if not printed and worker.output in self._selector.get_map():
            self._selector.unregister(worker.output)
        *lines, rest = (worker.unfinished_line + printed).split(b"\n")
        worker.unfinished_line = rest[:_READ_BYTES]
        for line in lines:
            self._say_line(line)

    def _say_line(self, line: bytes) -> None:
        if text := one_line(line.decode(errors="replace")):
            self._lines += 1
            if self._lines <= _LINES:
                self._say(f"{self._what} prints: {text[:_LINE]}")


def _pickled(index: int, call: tuple[Any, ...]) -> bytes | CallError:
    try:
        return pickle.dumps(call)
    except Exception as error:  # a user's problem may hold anything
        return CallError(index, f"has a problem that cannot be sent to its process ({error})")


def _received(process: Process) -> dict[str, Any] | None:
    """The answer of a process, or how it broke off; None where more of it is to come.

    What is there is read, and nothing is waited for: a user's code may write to the channel.
    """
    try:
        message = process.channel.part()
    except ValueError as too_long:
        return {"reason": f"wrote an answer of {too_long}"}
    except EOFError:
        with selectors.DefaultSelector() as selector:
            selector.register(process, selectors.EVENT_READ)
            if selector.select(_END_S):
                return _ended(process)
        return {"reason": "closed the connection of its process to the run"}
    if message is None:
        return None
    with suppress(ValueError, RecursionError):
        answer = json.loads(message)
        if isinstance(answer, dict) and not process.channel.has_more:
            return answer
    return {"reason": "wrote into the connection of its process to the run"}


def _failure(index: int, answer: dict[str, Any]) -> CallError | None:
    if index == _SETUP and answer.get("refusal"):
        raise ValueError(answer["refusal"])
    if "reason" in answer:
        place, timed_out = str(answer.get("place", "")), answer.get("timed_out") is True
        return CallError(index, str(answer["reason"]), place, timed_out)
    return None


def _ended(process: Process) -> dict[str, Any]:
    return {"reason": f"its process {process.ending()}"}


def _processes() -> int:
    """A process for each core that this process may use, within a limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_PROCESSES)


def _memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
