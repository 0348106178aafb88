"""Starts vLLM with its output in a file: a vLLM that fails prints tens of lines from several processes."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def starting_vllm() -> Iterator[None]:
    """Inside this context all output of this process, and of those that it starts, goes to a file.

    Raises ValueError, with the file's place, for whatever vLLM raises. Else the file is removed.
    """
    handle, name = tempfile.mkstemp(prefix="zerokl-vllm-", suffix=".log")
    log = Path(name)
    _flush()
    saved = {stream: os.dup(stream) for stream in (1, 2)}
    try:
        for stream in saved:
            os.dup2(handle, stream)
        yield
    except Exception as error:  # vLLM may raise anything
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"vllm: the engine did not start ({type(error).__name__}: {reason}); its log is {log}"
        ) from error
    except BaseException:
        log.unlink()
        raise
    else:
        log.unlink()
    finally:
        _flush()
        for stream, copy in saved.items():
            os.dup2(copy, stream)
            os.close(copy)
        os.close(handle)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
