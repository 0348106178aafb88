"""Processes that a run starts: how they end, what ends with them, and what a channel carries."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from zerokl.engine.processes.channel import Channel
from zerokl.engine.processes.process import ForkServer, Process

from tests.helpers import importable

# Functions of processes. A stray has a session of its own, and its parent ends before it.
_PLANTED = """
import os, signal, subprocess, sys, time
from zerokl.engine.processes.keeper import accept_interrupts

def nothing(*_):
    pass

def exits(channel):
    sys.exit(7)

def echoes(channel):
    channel.send(channel.receive())

def writes(channel):
    for fd in map(int, channel.receive().split()):
        os.write(fd, b"%d" % fd)

def starts_a_stray(channel):
    code = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], start_new_session=True)
    channel.send(b"started")
    time.sleep(600)

def is_interrupted(channel):
    accept_interrupts()
    try:
        channel.send(b"ready")
        time.sleep(600)
    except KeyboardInterrupt:
        sys.exit(3)

def is_not_interrupted(channel):
    os.kill(os.getpid(), signal.SIGINT)
    channel.send(channel.receive())

def owns(words):
    from zerokl.engine.processes.process import ForkServer, Process
    forks = ForkServer("planted:nothing") if words == "forked" else None
    process = Process("planted:starts_a_stray", sys.stdout.fileno(), forks=forks)
    process.channel.receive()
    print(flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _planted(tmp_path) -> Iterator[None]:
    with importable(tmp_path, "planted", _PLANTED):
        yield


@pytest.fixture(params=["spawned", "forked"])
def start(request, marked) -> Iterator[Callable[[str], Process]]:
    """Starts a process by either way; nothing is left behind."""
    forks, processes = ForkServer("planted:nothing") if request.param == "forked" else None, []

    def started(name: str, fds: Sequence[int] = ()) -> Process:
        with open(os.devnull, "wb") as output:
            processes.append(Process(f"planted:{name}", output.fileno(), fds=fds, forks=forks))
        return processes[-1]

    yield started
    for process in processes:
        process.close()
    if forks:
        forks.close()
    assert not marked()


def test_a_process_answers_and_says_how_it_ended(start):
    process = start("echoes")
    message = bytes(3 << 20)
    process.channel.send(message)
    assert process.channel.receive() == message
    assert process.ending().code == process.ending().code == 0  # it may be asked again
    assert str(start("exits").ending()) == "ended with exit code 7"
    killed = start("is_interrupted")
    killed.channel.receive()
    assert killed.ending(wait=False) is None


def test_descriptors_keep_their_numbers(start):
    """Descending ones, of which a fork's own may have some."""
    pipes = [os.pipe() for _ in range(6)]
    writers = [writer for _, writer in reversed(pipes)]
    process = start("writes", writers)
    process.channel.send(b" ".join(b"%d" % writer for writer in writers))
    assert process.ending().code == 0
    for reader, writer in pipes:
        os.close(writer)
        assert os.read(reader, 64) == b"%d" % writer
        os.close(reader)


def test_an_interrupt_reaches_a_function_that_accepts_it_and_no_other(start):
    process = start("is_interrupted")
    process.channel.receive()
    process.interrupt()
    assert process.ending().code == 3
    process = start("is_not_interrupted")
    process.interrupt()
    process.channel.send(b"goes on")
    assert process.channel.receive() == b"goes on"


def test_a_process_that_is_closed_takes_along_what_it_has_started(start, marked):
    process = start("starts_a_stray")
    process.channel.receive()
    before = len(marked())
    process.close()
    deadline = time.monotonic() + 10
    while len(marked()) != before - 3:  # the keeper, its child and the stray
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("way", ["spawned", "forked"])
def test_neither_a_process_nor_what_it_has_started_outlives_a_killed_owner(way, marked, tmp_path):
    code = f"import planted; planted.owns({way!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    owner = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    owner.stdout.readline()
    assert len(marked()) == (4 if way == "spawned" else 5)
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while marked():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_channel_gives_one_message_at_a_time_and_refuses_one_that_is_too_long():
    ends = socket.socketpair()
    reader, writer = Channel(ends[0], longest_bytes=5), Channel(ends[1])
    writer.send(b"one")
    writer.send(b"three")
    assert reader.receive() == b"one"
    assert reader.has_more
    assert reader.receive() == b"three"
    assert not reader.has_more
    writer.send(b"longer")
    with pytest.raises(ValueError, match="6 bytes; 5 at most"):
        reader.receive()
    writer.close()
    reader.close()


def test_a_process_that_does_not_read_holds_nobody_up():
    ends = socket.socketpair()
    with pytest.raises(TimeoutError):
        Channel(ends[0], timeout_s=0.05).send(bytes(1 << 24))
