"""Runs a program of the model's in a Python process of its own, within limits, and says what it printed.

What a program prints follows from its text, as far as it draws no random bits of the system, reads no clock,
and does not come near a limit of time or memory. Sets have one order (PYTHONHASHSEED=0), Python starts
without site-packages and without the user's settings (-s -S -P), and nothing is left from one program to the
next. Not fixed are time and time zone, os.urandom and what draws from it (`random` without a seed, uuid4,
secrets), the process's number, the addresses of objects and the name of the directory.

Nothing here loads torch or numpy (see processes/process.py).
"""

import os
import selectors
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass

from .confinement import PYTHON, Confinement, ProcessLimits

_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "TZ": "UTC", "OMP_NUM_THREADS": "1"}
# -I would ignore PYTHONHASHSEED too. These are its other parts, and there are no other variables to ignore.
_WORDS = (PYTHON, "-s", "-S", "-P", "-X", "utf8", "-")
# The clock's limit, as a multiple of the limit of processor time: a busy machine gives a part of a core.
_CLOCK_PER_PROCESSOR = 5
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class ToolLimits:
    """Of one program. timeout_s: seconds of processor time, and five times as many by the clock.

    output_chars: of what it prints; a program that prints more ends there. file_bytes: of each of its files.
    """

    timeout_s: int
    memory_bytes: int
    output_chars: int
    file_bytes: int = 1 << 24


def run_python(program: str, limits: ToolLimits) -> str:
    """What a program prints, its errors included; in brackets at the end, how it was ended, if it was.

    It runs in a directory of its own, which is removed. Raises OSError, or SubprocessError, where no process
    can be confined and started.
    """
    scratch = tempfile.mkdtemp(prefix="zerokl-python-")
    process_limits = ProcessLimits(limits.timeout_s, limits.memory_bytes, limits.file_bytes)
    confinement = Confinement(scratch, process_limits, _WORDS, _ENVIRONMENT)
    code = os.memfd_create("program")
    reader, writer = os.pipe()
    try:
        with open(code, "wb", closefd=False) as file:
            file.write(program.encode("utf-8", "surrogatepass"))
        os.lseek(code, 0, os.SEEK_SET)
        process = subprocess.Popen(
            _WORDS,
            stdin=code,
            stdout=writer,
            stderr=writer,
            cwd=scratch,
            start_new_session=True,
            preexec_fn=confinement.begin,  # it does not come back
        )
        os.close(writer)
        writer = -1
        return _said(process, reader, limits)
    finally:
        for descriptor in (code, reader, writer):
            if descriptor >= 0:
                os.close(descriptor)
        confinement.close()
        _remove(scratch)


def _said(process: subprocess.Popen, reader: int, limits: ToolLimits) -> str:
    """What a process prints until it ends or is ended, and how it was ended."""
    output, is_late = _output(process.pid, reader, limits)
    process.kill()
    code = process.wait()
    text = output.decode("utf-8", "replace")
    if len(text) > limits.output_chars:
        return f"{text[: limits.output_chars]}\n[more than {limits.output_chars} characters]"
    if is_late or code == -signal.SIGXCPU:
        return f"{text}[more than {limits.timeout_s} s]"
    return f"{text}[killed by signal {-code}]" if code < 0 else text


def _output(process: int, reader: int, limits: ToolLimits) -> tuple[bytes, bool]:
    """What a process prints until it has ended, or has printed too much; and whether it took too long."""
    output, most = bytearray(), 4 * limits.output_chars  # no character has more bytes
    deadline = time.monotonic() + _CLOCK_PER_PROCESSOR * limits.timeout_s
    descriptor = os.pidfd_open(process)
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        selector.register(descriptor, selectors.EVENT_READ)
        try:
            while len(output) <= most:
                ready = {key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
                if reader in ready:
                    chunk = os.read(reader, _READ_BYTES)
                    output += chunk
                    if not chunk:  # it has closed what it prints to
                        selector.unregister(reader)
                elif descriptor in ready or not ready:
                    return bytes(output), not ready
        finally:
            os.close(descriptor)
    return bytes(output), False


def _remove(folder: str) -> None:
    """Remove the directory of a program. Most leave nothing in it."""
    with suppress(OSError):
        os.rmdir(folder)
        return
    # A tree may be deeper than Python's stack, and the program may have made folders that cannot be read.
    for words in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        subprocess.run([*words, folder], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
