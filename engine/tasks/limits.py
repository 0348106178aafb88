"""Refuses tokenizers and chat templates that do not end, or need all memory, before this process uses them.

A tokenizer.json can hold a rule that doubles a text a hundred times, and a template is a program. Neither
can be stopped from within: the one runs in a library, the other may compute one huge number. So each is
tried once in a process of its own, with limits. The trial has one text of all printable characters. What
goes wrong with another prompt only is not found.

The trial is a program, and no function in a Process (engine/processes): it starts nothing, says all it has to
say by its exit code, and ends by itself at its limit of processor time, also where this process was killed.
"""

import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from ...files.inputs import read_bytes
from . import try_tokenizer

# Limits of a trial. The largest tokenizers in use take a second and half a gibibyte.
PROCESSOR_S, MEMORY_BYTES = 30, 4 << 30
# A busy machine gives a process a part of a core.
_WALL_PER_PROCESSOR_S = 20
# Characters of a prompt that are given to a tokenizer: more than any context holds.
LONGEST_PROMPT = 1 << 22
_LARGEST_BYTES = 1 << 28


def check_tokenizer(file: Path) -> None:
    """Raise ValueError for a tokenizer.json that does not end in time, needs too much memory or crashes."""
    _refuse(str(file), _trial("tokenizer", read_bytes(file, _LARGEST_BYTES), PROCESSOR_S))


def check_template(template: str, source: str) -> None:
    """Raise ValueError for a template that does not end in time or needs too much memory.

    source: what the message calls it.
    """
    _refuse(source, _trial("template", template.encode("utf-8", "replace"), PROCESSOR_S))


def _refuse(source: str, fault: str) -> None:
    if fault:
        raise ValueError(f"model: {source} {fault} for a text of {len(try_tokenizer.TEXT)} characters")


@cache
def _trial(kind: str, content: bytes, processor_s: int) -> str:
    """What is wrong with a tokenizer or a template, in words; "" where nothing is."""
    with tempfile.NamedTemporaryFile(prefix="zerokl-", suffix=f".{kind}") as file:
        file.write(content)
        file.flush()
        limits = [str(MEMORY_BYTES), str(processor_s)]
        try:
            code = subprocess.run(
                [sys.executable, "-P", try_tokenizer.__file__, kind, file.name, *limits],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
                timeout=processor_s * _WALL_PER_PROCESSOR_S,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -signal.SIGXCPU
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"does not end within {processor_s} s"
    if code == try_tokenizer.PANIC:
        return "makes its library panic, as a regex with too many retries does,"
    if code in (try_tokenizer.NO_MEMORY, -signal.SIGABRT):
        return f"needs more than {MEMORY_BYTES >> 30} GiB of memory"
    return f"ends its process (exit code {code})" if code else ""
