"""Files that are complete or absent, and folders with the hashes of their files.

A file is written to a temporary name, synced and renamed. A manifest is a JSON file with the size and the
SHA-256 of every file of its folder, and a SHA-256 over itself.
"""

import errno
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from .inputs import open_input, read_text
from .reading import read_json

MANIFEST = "manifest.json"
# The file of a folder's lock, and in it who holds it.
LOCK = ".lock"
# Bytes that are hashed at once.
_CHUNK = 1 << 20
_REMEDIES = {
    errno.ENOSPC: "make room on this disk",
    errno.ENOMEM: "memory ran out; take a smaller model, micro_batch or number of workers",
    errno.EDQUOT: "make room within the quota",
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "give yourself the right to it, or choose another place",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOTDIR: "a part of this path is a file",
}


def canonical(x: Any) -> bytes:
    """x as JSON in its one canonical form: sorted keys, no blanks, ASCII.

    Raises ValueError for infinities and NaN.
    """
    return json.dumps(x, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def hash_json(x: Any) -> str:
    """SHA-256 of the canonical JSON of x."""
    return hashlib.sha256(canonical(x)).hexdigest()


def whole_lines(content: bytes) -> tuple[list[bytes], bool]:
    """The lines that end with a newline, including it, and whether a torn line follows them."""
    *lines, rest = content.split(b"\n")
    return [line + b"\n" for line in lines], bool(rest)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError that names no file (a write to an open file has none) the name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def check_in_place(file: IO[bytes], path: Path) -> None:
    """Raise FileNotFoundError where an open file is not the one called `path` any more.

    Somebody has removed or replaced it. What is written to it would be lost without a word.
    """
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return
    raise FileNotFoundError(errno.ENOENT, "was removed or replaced while it was being written", str(path))


def os_error_line(error: OSError) -> str:
    """An OSError in one line: the file, what is wrong, and a remedy where one is known."""
    if error.errno is None or not error.strerror:
        return str(error)
    remedy = _REMEDIES.get(error.errno, "")
    where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
    return f"{where}{error.strerror}{remedy and f'; {remedy}'}"


def check_writable(folder: Path) -> None:
    """Find out now whether files can be written to a folder that may not exist yet. Nothing is left behind.

    Raises OSError that names the folder.
    """
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(p))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".zerokl-", dir=existing))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file `path`. At every moment it holds all of the old content or all of the new content.

    What is no regular file, such as /dev/null or a pipe, is written to and stays what it is. Raises OSError.
    """
    if path.exists() and not path.is_file():
        with naming(path), open(path, "wb") as handle:
            handle.write(content)
        return
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with naming(path), open(temporary, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def hold_folder(folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of `folder` inside this context, and make the folder where it does not exist.

    All writers to the folder must use this lock. It ends with the process, however the process ends. Folders
    that were made for it and are still empty at the end are removed.

    Raises ValueError, which names the holder, when another process holds the lock for longer than `wait_s`
    seconds.
    """
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK
    lock = FileLock(file)
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        raise ValueError(
            f"run: {folder} is being written to by {_holder(file)}; "
            "end it first (ranks may outlive their torchrun)"
        ) from None
    try:
        file.write_text(f"process {os.getpid()} of {platform.node()}, since {time.strftime('%F %T')}\n")
        yield
    finally:
        # Removed while it is held: who waits for it sees that it locked a removed file, and tries again.
        file.unlink(missing_ok=True)
        lock.release()
        for path in made:
            with suppress(OSError):  # it is not empty
                path.rmdir()


def _holder(file: Path) -> str:
    """Who holds a lock, as it has written down itself."""
    try:
        return read_text(file).strip() or "another process"
    except OSError:
        return "another process"


def first_free(names: Iterable[Path]) -> Path:
    """The first name that does not exist."""
    return next(path for path in names if not path.exists())


def _hash_file(path: Path) -> str:
    with open_input(path) as handle:
        digest = hashlib.sha256()
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
        return digest.hexdigest()


def write_manifest(folder: Path) -> None:
    """Sync every file of `folder`, and write the manifest with the hashes that the files have on the disk."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    for file in files:
        sync(file)
    listed = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": _hash_file(p)} for p in files}
    manifest = json.dumps({"files": listed, "sha256": hash_json(listed)}, indent=1) + "\n"
    write_whole(folder / MANIFEST, manifest.encode())
    for subfolder in {p.parent for p in files}:
        sync(subfolder)


def manifest_damage(folder: Path) -> str | None:
    """The first damage of a folder with a manifest, in words; None if the folder is intact.

    The damage is a file that is torn, altered or missing, or one that the manifest does not list.
    """
    path = folder / MANIFEST
    try:
        manifest = read_json(path)
        listed = manifest["files"]
        if set(manifest) != {"files", "sha256"} or manifest["sha256"] != hash_json(listed):
            return f"{path} was altered"
        for name, entry in listed.items():
            file = folder / name
            if not file.is_file():
                return f"{file} is missing"
            if (size := file.stat().st_size) != entry["bytes"]:
                return f"{file} is torn: it has {size} bytes, not {entry['bytes']}"
            if _hash_file(file) != entry["sha256"]:
                return f"{file} was altered: its SHA-256 is not the one in the manifest"
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path} cannot be read ({type(error).__name__})"
    present = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p != path)
    unlisted = next((name for name in present if name not in listed), None)
    return f"{folder / unlisted} is foreign: the manifest does not list it" if unlisted else None
