"""`zerokl record` before bad clients, servers and disks: it goes on, and says what is lost."""

import contextlib
import gzip
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from zerokl.audit.formats.registry import read_rollouts

pytest.importorskip("aiohttp", reason="the proxy's library, which vLLM's environment has")
from zerokl.integrations.proxy import record

from tests.vllm.recording import IDS, Recording, ask

pytestmark = pytest.mark.vllm
PATH = "/v1/completions"


@pytest.fixture
def limited(tmp_path, server) -> Iterator[Callable[..., Recording]]:
    """Starts a recording with limits of resource."""
    started: list[Recording] = []
    yield lambda **limits: started.append(Recording(tmp_path, server, **limits)) or started[-1]
    for recording in started:
        recording.kill()


def raw(port: int, request: bytes) -> bytes:
    """What a server answers to bytes that may be no HTTP, until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def peak_mib(recording: Recording) -> int:
    status = Path(f"/proc/{recording.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) >> 10


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_small_request_does_not_unpack_to_a_large_one(recording, encoding):
    before = peak_mib(recording)
    unpacked = b'{"x": [' + b"[]," * (1 << 24) + b"0]}"
    body = gzip.compress(unpacked, 1) if encoding == "gzip" else zlib.compress(unpacked, 1)
    assert len(body) < 1 << 20
    connection = http.client.HTTPConnection("127.0.0.1", recording.port, timeout=60)
    connection.request("POST", PATH, body, {"Content-Encoding": encoding, "X-Unread": "1"})
    assert connection.getresponse().status == 200
    assert ask(recording.port, PATH, IDS)[0] == 200
    until = time.monotonic() + 30
    while not recording.log.stat().st_size:  # of the second one
        assert time.monotonic() < until
        time.sleep(0.1)
    assert peak_mib(recording) - before < 128
    assert "the request unpacks to more than 16 MiB" in recording.stop()


def test_a_body_that_is_too_large_to_be_read_passes_in_pieces(recording):
    before = peak_mib(recording)
    body = json.dumps(IDS | {"x": "y" * (96 << 20)}).encode()
    for chunked in (False, True):
        for port in (recording.port, recording.server):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            pieces = (body[i : i + (1 << 20)] for i in range(0, len(body), 1 << 20))
            connection.request("POST", PATH, pieces if chunked else body, encode_chunked=chunked)
            assert json.loads(connection.getresponse().read())["choices"][0]["token_ids"]
    assert peak_mib(recording) - before < 96
    words = recording.stop()
    assert "0 completions of 2 requests" in words
    assert "not recorded, 2 times: the request has more than 16 MiB" in words


BAD_FIELDS = [
    {"temperature": "x"},
    {"temperature": -1},
    {"temperature": True},
    {"temperature": [0.5]},
    {"temperature": 10**400},
    {"top_p": "x"},
    {"top_p": 0},
    {"top_k": "x"},
    {"top_k": 0.5},
    {"min_p": 7},
    {"logit_bias": [1]},
    {"logit_bias": {"x": 1}},
    {"allowed_token_ids": "x"},
    {"allowed_token_ids": [-1]},
]


def test_what_no_reader_takes_leaves_no_line_and_the_log_can_be_read(recording):
    for fields in BAD_FIELDS:
        assert ask(recording.port, PATH, IDS | {"top_k": 5} | fields)[0] == 200
        assert ask(recording.port, PATH, IDS)[0] == 200
    words = recording.stop()
    assert len(list(read_rollouts(recording.log))) == len(BAD_FIELDS)
    assert f"{len(BAD_FIELDS)} completions of {2 * len(BAD_FIELDS)} requests" in words
    counted = [int(line.split()[2]) for line in words.splitlines() if line.startswith("not recorded")]
    assert sum(counted) == len(BAD_FIELDS)


@pytest.mark.parametrize("options", [["--temperature", "-1"], ["--top_p", "2"], ["--port", "70000"]])
def test_an_option_that_would_spoil_every_line_is_refused(tmp_path, options):
    words = ["record", "--upstream", "http://127.0.0.1:9", "--out", tmp_path / "log.jsonl", *options]
    process = subprocess.run(
        [Path(sys.executable).with_name("zerokl"), *words], capture_output=True, text=True, timeout=60
    )
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert options[0].strip("-") in process.stderr
    assert not (tmp_path / "log.jsonl").exists()


BAD_ADDRESSES = ["", "http://", "ftp://x", "http://[::1", "http://x:99999", "http://x:y", "http://u:p@x"]


@pytest.mark.parametrize("address", [*BAD_ADDRESSES, "http://x?a=b", "http://x#a", "http:x"])
def test_the_address_of_a_server_alone_is_one(tmp_path, address):
    with pytest.raises(ValueError, match="--upstream"):
        record(address, tmp_path / "log.jsonl", "127.0.0.1", -1, print)  # the port would be refused next
    assert not list(tmp_path.iterdir())


def test_a_whole_address_is_a_path_of_the_server(recording):
    for target in ("http://elsewhere:1/a?b=%2f", "HTTPS://x/a?b=%2f", "/a?b=%2f"):
        answer = raw(
            recording.port, f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        )
        assert json.loads(answer.split(b"\r\n\r\n")[1])["path"] == "/a?b=%2f", target
    answer = raw(recording.port, b"GET http://x?b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert json.loads(answer.split(b"\r\n\r\n")[1])["path"] == "/?b"


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
MALFORMED = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"G\x00T / HTTP/1.1\r\n\r\n",
    b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET x:y HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://x:99999/ HTTP/1.1\r\nHost: x\r\n\r\n",
    HEAD + b"no header\r\n\r\n",
    HEAD + b"X: " + b"y" * 20_000 + b"\r\n\r\n",
    HEAD + b"Content-Length: x\r\n\r\n",
    HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n",
]


def test_what_is_no_request_is_answered_in_a_line_and_counted(recording):
    for _ in range(3):
        for request in MALFORMED:
            answer = raw(recording.port, request)
            assert 400 <= int(answer.split(b" ", 2)[1]) < 500, (request, answer)
    assert ask(recording.port, PATH, IDS)[0] == 200
    words = recording.stop()
    assert "Traceback" not in words
    assert len(words.splitlines()) < 20, words


def test_a_header_that_connection_names_is_one_of_the_connection(recording):
    request = (
        b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close, X-Mine\r\nConnection: x-two\r\n"
        b"X-Mine: 1\r\nX-Two: 2\r\nX-Other: 3\r\n\r\n"
    )
    names = {name for name, _ in json.loads(raw(recording.port, request).split(b"\r\n\r\n")[1])["headers"]}
    assert names & {"x-mine", "x-two", "x-other"} == {"x-other"}
    answer = raw(recording.port, b"GET /named HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b"x-hop" not in answer.lower()
    assert b"x-mine: a" in answer.lower()


@pytest.mark.parametrize("recovers", [True, False])
def test_a_disk_that_is_full_is_said_at_once_and_no_line_is_lost_without_a_word(limited, recovers):
    recording = limited(RLIMIT_FSIZE=(3000, resource.RLIM_INFINITY))
    statuses = [ask(recording.port, PATH, IDS | {"n": 2})[0] for _ in range(12)]
    recording.says("File too large")  # before any Ctrl-C
    assert ask(recording.port, PATH, IDS)[0] == 503
    assert b"cannot be written" in ask(recording.port, PATH, IDS)[2]
    assert ask(recording.port, "/metrics", {}, "GET")[0] == 207
    if recovers:
        free = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(recording.process.pid, resource.RLIMIT_FSIZE, free)
        recording.says("is written again")
        statuses.append(ask(recording.port, PATH, IDS | {"n": 2})[0])
    words = recording.stop(code=0 if recovers else 2)
    lines = len(list(read_rollouts(recording.log)))
    passed = 2 * statuses.count(200)
    assert recording.log.stat().st_size <= 3000 or recovers
    assert (lines == passed) == recovers
    assert recovers or f"LOST, {passed - lines} completions" in words


def test_a_client_that_hangs_up_at_the_last_event_has_a_line(recording):
    for end in (b"[DONE]\n\n", b"data:"):
        with socket.create_connection(("127.0.0.1", recording.port), timeout=30) as connection:
            body = json.dumps(IDS | {"stream": True, "wait_s": 0.1, "end_s": 1.0}).encode()
            head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            read = b""
            while end not in read:
                read += connection.recv(1 << 16)
        time.sleep(0.5)
    words = recording.stop()
    assert "1 completions of 2 requests" in words
    assert "not recorded, 1 times: the client ended early" in words


def test_few_open_files_are_said_and_others_are_answered_later(limited):
    recording = limited(RLIMIT_NOFILE=(64, 64))
    idle = [socket.create_connection(("127.0.0.1", recording.port)) for _ in range(80)]
    recording.says("open files ran out")
    answers = []

    def one() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            answers.append(ask(recording.port, PATH, IDS)[0])

    threads = [threading.Thread(target=one) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers
    assert len(os.listdir(f"/proc/{recording.process.pid}/fd")) < 60
    assert ask(recording.port, PATH, IDS)[0] == 200
    for connection in idle:
        connection.close()
    words = recording.stop()
    assert "Traceback" not in words
    assert len(words.splitlines()) < 10, words


def test_the_end_takes_a_second_and_says_what_was_open(recording):
    connections = [http.client.HTTPConnection("127.0.0.1", recording.port) for _ in range(3)]
    for connection, path in zip(connections, ("/hang", PATH, PATH), strict=True):
        connection.request("POST", path, json.dumps(IDS | {"wait_s": 1, "stream": path != "/hang"}))
    time.sleep(1.0)
    began = time.monotonic()
    words = recording.stop()
    assert time.monotonic() - began < 3.0  # and the process itself ends
    assert "3 requests are open" in words
    assert "not recorded, 3 times: the end of zerokl record cut it" in words
