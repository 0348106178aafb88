"""`zerokl record`: what passes is the server's byte for byte, and what is logged is the server's to the bit.

The server answers in vLLM's and SGLang's forms. aiohttp is there where vLLM is.
"""

import gzip
import http.client
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from zerokl.audit.formats.registry import read_rollouts

pytest.importorskip("aiohttp", reason="the proxy's library, which vLLM's environment has")
from tests.vllm.inference_server import PROMPT, ids, logprobs
from tests.vllm.recording import IDS, Recording, ask

pytestmark = pytest.mark.vllm

PATHS = ("/v1/completions", "/v1/chat/completions")


def test_what_passes_is_the_servers_and_what_is_logged_too(recording):
    asked = [(p, IDS | {"stream": s, "n": 2}) for p in PATHS for s in (False, True)]
    asked += [("/v1/completions", IDS | {"compressed": True})]
    sglang = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": {"temperature": 0.5}}
    asked += [
        ("/generate", sglang | more) for more in ({}, {"stream": True}, {"stream": True, "new_only": True})
    ]
    for path, body in asked:
        assert ask(recording.port, path, body) == ask(recording.server, path, body), (path, body)
    assert f"log.jsonl: {2 * 4 + 1 + 3} completions of 8 requests" in recording.stop()
    lines = [rollout for _, rollout in read_rollouts(recording.log)]
    assert "secret" not in recording.log.read_text()
    for line in lines:
        seed = 4 if line.weight_span else line.sample
        assert (line.prompt_ids, line.completion_ids) == (tuple(PROMPT), tuple(ids(seed)))
        assert line.logprobs.tobytes() == np.array(logprobs(seed), np.float32).tobytes()
        params = line.sampling_params
        assert (params.temperature, params.top_p) == ((0.5, 1.0) if line.weight_span else (0.7, 0.9))
    assert sum(line.weight_span == (3, 3) for line in lines) == 3


def test_any_request_arrives_as_it_was_sent(recording):
    paths = ("/v1/models?a=%2f&b=c%20d", "/%E2%82%AC//x", "/metrics")
    for method in ("GET", "POST", "DELETE", "PUT"):
        for path in paths:
            through, direct = (
                ask(port, path, {"x": 1}, method) for port in (recording.port, recording.server)
            )
            assert through == direct
    large = {"x": "y" * (8 << 20)}
    assert ask(recording.port, "/big", large) == ask(recording.server, "/big", large)


def test_a_compressed_request_passes_and_a_client_that_hangs_up_is_known_to_the_server(recording):
    for port in (recording.server, recording.port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(
            "POST", PATHS[0], gzip.compress(json.dumps(IDS).encode()), {"Content-Encoding": "gzip"}
        )
        assert json.loads(connection.getresponse().read())["choices"][0]["token_ids"] == ids(0)
    connection = http.client.HTTPConnection("127.0.0.1", recording.port, timeout=60)
    connection.request("POST", "/hang", b"{}")
    time.sleep(0.5)
    connection.close()
    until = time.monotonic() + 20
    while ask(recording.server, "/left", {}, "GET")[2] != b"1":
        assert time.monotonic() < until
        time.sleep(0.1)
    words = recording.stop()
    assert "1 completions of 2 requests" in words
    assert "not recorded, 1 times: the client ended early" in words


def test_errors_pass_and_what_lacks_ids_or_was_cut_is_counted(recording):
    for body in (IDS | {"fail": True}, {"logprobs": True}, IDS | {"presence_penalty": 1.0}):
        assert ask(recording.port, PATHS[0], body) == ask(recording.server, PATHS[0], body)
    for port in (recording.port, recording.server):
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            ask(port, PATHS[1], IDS | {"stream": True, "dies": True})
    words = recording.stop()
    assert "0 completions of 4 requests" in words
    for why in (
        "the server answered 404",
        "ask for return_token_ids and logprobs",
        "presence_penalty",
        "was cut",
    ):
        assert why in words
    assert recording.log.read_text() == ""


def test_a_server_that_is_not_there_is_said(tmp_path):
    running = Recording(tmp_path, 9)  # discard: nobody listens
    status, _, body = ask(running.port, PATHS[0], IDS)
    assert (status, b"was not reached" in body) == (502, True)
    assert "the server was not reached" in running.stop()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--upstream", "localhost:8000", "--out", "o.jsonl"], "must be the address of a server"),
        (["--upstream", "http://x", "--out", __file__], "exists; choose another file"),
    ],
)
def test_bad_input_is_one_line(words, reason):
    command = [Path(sys.executable).with_name("zerokl"), "record", *words]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert reason in process.stderr
