"""An SGLang server as the sampler of an audit. It needs a GPU, so a server of its form answers here.

The form of its answers is written down from SGLang 0.5.23: that package installs no server for a CPU.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from zerokl.audit.engines.engine import ZeroklEngine
from zerokl.cli import main
from zerokl.integrations.sglang_server import request_params, served_model
from zerokl.kernels.sampling_params import SamplingParams

from tests.audit.conftest import _toy_module, model

__all__ = ["_toy_module", "model"]


class Handler(BaseHTTPRequestHandler):
    """Answers as SGLang does, with tokens and numbers of the server's engine."""

    def do_GET(self):
        info = {"model_path": "some/model", "is_generation": True, "weight_version": "default"}
        self.answer(info if self.path == self.server.info_path else None)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        self.answer(self.server.answers(asked) if self.path == "/generate" else None)

    def answer(self, value):
        body = json.dumps(value if value is not None else {"detail": "Not Found"}).encode()
        self.send_response(404 if value is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    http = HTTPServer(("127.0.0.1", 0), Handler)
    http.asked, http.info_path = [], "/model_info"
    http.address = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield http
    http.shutdown()
    thread.join()
    http.server_close()


def answers_of(engine, factor=1.0):
    """What SGLang answers, its log-probabilities times a factor."""

    def answers(asked):
        tokens = [[7, 9, 11, 8] for _ in asked["input_ids"]]
        params = SamplingParams(temperature=asked["sampling_params"]["temperature"])
        scores = engine.score(list(zip(asked["input_ids"], tokens, strict=True)), params, together=False)
        return [
            {
                "text": "",
                "output_ids": ids,
                "meta_info": {
                    "id": f"request-{i}",
                    "finish_reason": {"type": "length", "length": len(ids)},
                    "prompt_tokens": len(prompt),
                    "completion_tokens": len(ids),
                    "weight_version": "default",
                    "output_token_logprobs": [
                        [float(x) * factor, token, None] for x, token in zip(logp, ids, strict=True)
                    ],
                },
            }
            for i, (prompt, ids, logp) in enumerate(zip(asked["input_ids"], tokens, scores, strict=True))
        ]

    return answers


@pytest.mark.parametrize(
    ("factor", "code"),
    [
        pytest.param(1.0, 0, id="the model's"),
        pytest.param(1.25, 1, id="planted", marks=pytest.mark.full),
    ],
)
def test_what_a_server_draws_is_audited_beside_the_model(server, model, tmp_path, factor, code):
    server.answers, out = answers_of(ZeroklEngine(model, torch.float32), factor), tmp_path / "out"
    words = ["--sampler", server.address, "--dtype", "float32", "--temperature", "0.8", "-n", "3"]
    assert main(["audit", str(model), *words, "--max_tokens", "4", "--out", str(out)]) == code
    (asked,) = server.asked
    assert (len(asked["input_ids"]), asked["return_logprob"]) == (3, True)
    assert asked["sampling_params"]["max_new_tokens"] == 4
    assert asked["sampling_params"]["temperature"] == 0.8
    rows = [json.loads(x) for x in (out / "rollouts.jsonl").read_text().splitlines()]
    assert [row["prompt_ids"] for row in rows] == asked["input_ids"]
    assert {(row["temperature"], row["finish_reason"]["type"]) for row in rows} == {(0.8, "length")}
    report = json.loads((out / "audit.json").read_text())
    assert (report["outcome"]["kind"] == "equal") == (factor == 1.0)


def test_a_request_leaves_no_default_to_the_server():
    params = request_params(SamplingParams(top_p=0.9), 16, [2, 1])
    assert params["top_k"] == -1
    assert params["repetition_penalty"] == 1.0
    assert (params["top_p"], params["min_p"], params["stop_token_ids"]) == (0.9, 0.0, [2, 1])


def test_the_name_before_is_known(server):
    server.info_path = "/get_model_info"
    assert served_model(server.address) == "some/model"


def test_another_server_is_refused(server, model, tmp_path, capsys):
    server.info_path = "/none"
    out = str(tmp_path / "out")
    assert main(["audit", str(model), "--sampler", server.address, "--out", out]) == 2
    assert "is no server of SGLang" in capsys.readouterr().err


def test_an_answer_without_logprobs_is_refused(server, model, tmp_path, capsys):
    server.answers, out = lambda _: [{"text": "", "meta_info": {}}], str(tmp_path / "out")
    assert main(["audit", str(model), "--sampler", server.address, "-n", "1", "--out", out]) == 2
    assert "no token ids in the answer" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--full_vocab"], ["--batch_invariance", "4"]])
def test_what_a_log_has_not_is_refused(model, tmp_path, capsys, words):
    out, address = str(tmp_path / "out"), "http://127.0.0.1:9"
    assert main(["audit", str(model), "--sampler", address, *words, "--out", out]) == 2
    assert "do not go with it" in capsys.readouterr().err


def test_nobody_there(model, tmp_path, capsys):
    out, address = str(tmp_path / "out"), "http://127.0.0.1:9"
    assert main(["audit", str(model), "--sampler", address, "--out", out]) == 2
    assert "does not answer" in capsys.readouterr().err
