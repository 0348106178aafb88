"""The one place where inputs are opened: files of people and of runs, and streams where a reader takes one.

An input is a regular file of a stated size at most. Whatever else has a name (a FIFO that nobody writes to,
/dev/zero, a socket) may never end, or keep whoever opens it waiting, so it is refused. A reader that reads a
short text once may ask for `stream`: then a pipe will do as well, such as a shell's <(command). It must reach
its end within the same number of bytes, and within STREAM_S seconds.

Each refusal is an OSError, as for a file that cannot be opened: readers have one path for both.
"""

import errno
import os
import select
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

# Bytes of a file that is read piece by piece, so that its size is no matter of memory: 16 TiB, any there is.
PIECEWISE_BYTES = 1 << 44
# Bytes of a file that a run writes: metrics, rollouts, a ledger. They are read whole, so memory ends before.
RUN_FILE_BYTES = 1 << 36
# Bytes of a text that a person writes, such as a file of prompts or a table of metrics.
TEXT_BYTES = 1 << 26
# Bytes of one line of JSON.
LINE_BYTES = 1 << 28
# Seconds within which a stream must have ended.
STREAM_S = 30.0
_CHUNK = 1 << 20
_KINDS = (
    (stat.S_ISDIR, "is a folder"),
    (stat.S_ISFIFO, "is a pipe"),
    (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
)


class InputError(OSError):
    """An input that is not read. `strerror` is the reason, with a remedy."""


def open_input(path: str | Path) -> BinaryIO:
    """A regular file, opened for reading. It may grow while it is read.

    Raises OSError for a file that cannot be opened, InputError for one that is no regular file or has more
    than PIECEWISE_BYTES.
    """
    handle = _opened(path)
    try:
        _checked_size(handle, path, PIECEWISE_BYTES)
    except BaseException:
        handle.close()
        raise
    return handle


def check_input(path: str | Path) -> None:
    """Open and close an input, for a library that opens it by its name. Raises OSError (see open_input)."""
    open_input(path).close()


def check_folder(folder: Path) -> None:
    """Check the files of a folder that a library reads by its name: all must be regular.

    Links that lead nowhere count as absent. Raises InputError.
    """
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_dir():
            check_input(path)


def read_bytes(path: str | Path, most_bytes: int = RUN_FILE_BYTES, stream: bool = False) -> bytes:
    """The content of an input of at most most_bytes. stream: it may also be a pipe.

    Raises OSError (see open_input), also for a stream that does not end within STREAM_S seconds.
    """
    chunks, length = [], 0
    with _opened(path) as handle:
        if stream and stat.S_ISFIFO(os.fstat(handle.fileno()).st_mode):
            source = _stream(handle, path)
        else:
            size = _checked_size(handle, path, most_bytes)
            # The size of a file in /proc is 0, and other files may grow: only their end ends them.
            source = iter(lambda: handle.read(max(size - length, _CHUNK)), b"")
        for chunk in source:
            chunks.append(chunk)
            length += len(chunk)
            if length > most_bytes:
                raise _too_large(path, "more", most_bytes)
    return b"".join(chunks)


def read_text(path: str | Path, most_bytes: int = TEXT_BYTES, stream: bool = False) -> str:
    """The text of an input in UTF-8, with or without a byte order mark. See read_bytes.

    Every line ends with one newline, whatever ends it in the file. Raises OSError, and ValueError that says
    what is wrong for bytes that are no UTF-8.
    """
    try:
        text = read_bytes(path, most_bytes, stream).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason} at byte {error.start})") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def input_lines(handle: BinaryIO, path: str | Path, most_bytes: int = LINE_BYTES) -> Iterator[bytes]:
    """The lines of an opened input, each with its newline; the last one may have none.

    Raises InputError for a line of more than most_bytes.
    """
    while line := handle.readline(most_bytes + 1):
        if len(line) > most_bytes:
            reason = f"has a line of more than {most_bytes:,} bytes, which is not read"
            raise InputError(errno.EFBIG, reason, str(path))
        yield line


def append_text(path: str | Path, text: str) -> None:
    """Append to a regular file, which need not exist. Raises OSError for what cannot be, or is no such file.

    A pipe that nobody reads would keep the writer waiting for ever.
    """
    with os.fdopen(_open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as handle:
        _check_regular(handle, path)
        handle.write(text)


def _opened(path: str | Path) -> BinaryIO:
    fd = _open(path, os.O_RDONLY)
    try:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _open(path: str | Path, flags: int) -> int:
    """os.open, which never waits for the other side of a pipe."""
    try:
        return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise InputError(errno.ENXIO, "is a pipe or a socket; give a regular file", str(path)) from None


def _check_regular(handle: Any, path: str | Path) -> None:
    mode = os.fstat(handle.fileno()).st_mode
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "is no file")
        raise InputError(errno.EINVAL, f"{kind}; give a regular file", str(path))


def _checked_size(handle: BinaryIO, path: str | Path, most_bytes: int) -> int:
    """The bytes of a regular file. Raises InputError for another, and for a larger one."""
    _check_regular(handle, path)
    size = os.fstat(handle.fileno()).st_size
    if size > most_bytes:
        raise _too_large(path, f"{size:,}", most_bytes)
    return size


def _too_large(path: str | Path, size: str, most_bytes: int) -> InputError:
    return InputError(errno.EFBIG, f"has {size} bytes, and {most_bytes:,} are read at most", str(path))


def _stream(handle: BinaryIO, path: str | Path) -> Iterator[bytes]:
    """The chunks of a pipe, until its writers have closed it."""
    fd, until_s = handle.fileno(), time.monotonic() + STREAM_S
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise InputError(
                errno.ETIMEDOUT,
                f"is a pipe that did not end within {STREAM_S:g} s; write it to a file first",
                str(path),
            )
        chunk = os.read(fd, _CHUNK)
        if not chunk:
            return
        yield chunk
