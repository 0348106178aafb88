"""What `zerokl record` reads of bodies, and how a line is written, without a server or its library."""

import gzip
import json
import resource
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from zerokl.integrations.proxy_answers import REQUEST_BYTES, Exchange, NotRecordedError, completions
from zerokl.integrations.recorder import Recorder

PACKED = {"gzip": gzip.compress, "deflate": zlib.compress}
EMPTY = b'{"choices": []}'


@pytest.mark.parametrize("encoding", PACKED)
@pytest.mark.parametrize("side", ["request", "answer"])
def test_no_body_unpacks_to_more_than_is_read(monkeypatch, encoding, side):
    monkeypatch.setattr("zerokl.integrations.proxy_answers.ANSWER_BYTES", REQUEST_BYTES)
    bomb = PACKED[encoding](b" " * (20 * REQUEST_BYTES))
    headers = {"Content-Encoding": encoding}
    request, answer = ((bomb, headers), (EMPTY, {})) if side == "request" else ((b"{}", {}), (bomb, headers))
    exchange = Exchange("/v1/completions", request[1], request[0], answer[1], [answer[0]])
    tracemalloc.start()
    with pytest.raises(NotRecordedError, match=f"the {side} unpacks to more than 16 MiB"):
        list(completions(exchange))
    assert tracemalloc.get_traced_memory()[1] < 4 * REQUEST_BYTES
    tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "x" * 5000])
def test_another_compression_is_said_in_the_same_words(encoding):
    exchange = Exchange("/generate", {"Content-Encoding": encoding}, b"", {}, [b""])
    with pytest.raises(NotRecordedError, match=r"^the request is compressed, and not by gzip or deflate$"):
        list(completions(exchange))


@contextmanager
def largest_file(length: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_is_on_the_disk_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    recorder = Recorder(path, temperature=1.0)
    recorder.record([1], [2], [-0.5])
    length = path.stat().st_size
    for room in (0, 1, length - 1):
        with largest_file(length + room), pytest.raises(OSError, match="File too large") as error:
            recorder.record([1], [3], [-0.5])
        assert error.value.filename == str(path)
        assert path.stat().st_size == length
    recorder.record([1], [4], [-0.5])
    recorder.close()
    assert [json.loads(line)["completion_ids"] for line in path.read_text().splitlines()] == [[2], [4]]


@pytest.mark.parametrize(
    "constant",
    [{"temperature": "x"}, {"temperature": -1.0}, {"top_p": 2.0}, {"top_k": 0.5}, {"min_p": float("inf")}],
    ids=str,
)
def test_sampling_parameters_of_every_line_are_checked_first(tmp_path: Path, constant):
    with pytest.raises(ValueError, match=f"recorder: {next(iter(constant))}"):
        Recorder(tmp_path / "log.jsonl", **constant)
    assert not list(tmp_path.iterdir())
