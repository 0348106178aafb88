"""`zerokl weights` beside vLLM's own server: it holds the checkpoint's weights, or what it holds is named."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerokl.cli import main
from zerokl.engine.runs.checks import weight_server

from tests.random_model import TWO_LAYERS, random_model

pytestmark = pytest.mark.vllm
UP, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
QWEN3 = TWO_LAYERS | {"head_dim": 32, "tie_word_embeddings": False}


def changed(model: Path, folder: Path, change) -> Path:
    """A copy of a model folder with other tensors."""
    shutil.copytree(model, folder)
    save_file(change(load_file(model / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def signed_zeros(tensors: dict) -> dict:
    """In a matrix that vLLM for CPUs packs, and in one that it keeps."""
    for name in (UP, EMBEDDING):
        tensors[name][3, :4] = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    return changed(random_model(folder / "random", QWEN3, sharper=3.0), folder / "model", signed_zeros)


@pytest.fixture(scope="module")
def address(checkpoint, tmp_path_factory) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "320", "--enforce-eager"]
    command += ["--skip-tokenizer-init"] * (not (checkpoint / "tokenizer.json").exists())
    command += ["--worker-extension-cls", "zerokl.integrations.weights.ServedWeights"]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log = tmp_path_factory.mktemp("log") / "server.txt"
    with log.open("w") as words:
        process = subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        while not answers(url):
            assert process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except OSError:
        return False


def test_a_server_holds_its_checkpoint_and_each_other_tensor_is_named(address, checkpoint, tmp_path, capsys):
    def one_bit(tensors):
        tensors[UP].view(torch.int16)[0, 5] ^= 1
        return tensors

    def swapped_rows(tensors):
        return tensors | {EMBEDDING: tensors[EMBEDDING].flip(0)}

    assert main(["weights", address, str(checkpoint)]) == 0, capsys.readouterr().out
    assert "no prefix of other weights was found" in capsys.readouterr().out
    assert main(["weights", str(changed(checkpoint, tmp_path / "bit", one_bit)), address]) == 1
    assert f"{UP}: other values\n1 of " in capsys.readouterr().out
    assert main(["weights", address, str(changed(checkpoint, tmp_path / "rows", swapped_rows))]) == 1
    assert f"{EMBEDDING}: the same values in another order" in " ".join(capsys.readouterr().out.split())


def test_a_prefix_that_survives_an_update_is_found(address, checkpoint, tmp_path, capsys):
    other = changed(checkpoint, tmp_path / "other", lambda t: t | {EMBEDDING: t[EMBEDDING].flip(0)})
    assert main(["weights", address, str(checkpoint)]) == 0
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(other)}}
    weight_server._ask(address, "/collective_rpc", reload)
    capsys.readouterr()
    assert main(["weights", address, str(other)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "0 of " in out
    assert "survived an update" in out
    urllib.request.urlopen(urllib.request.Request(f"{address}/reset_prefix_cache", method="POST"))
    assert main(["weights", address, str(other)]) == 0, capsys.readouterr().out


def test_a_server_that_was_not_started_for_it_is_told_how(server, capsys):
    assert main(["weights", f"http://127.0.0.1:{server}", "anything"]) == 2
    assert "--worker-extension-cls zerokl.integrations.weights.ServedWeights" in capsys.readouterr().err
