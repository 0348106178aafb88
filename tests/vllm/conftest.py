"""The random tiny Qwen3 of `zerokl init`'s preset, and a smaller Qwen3-MoE."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from zerokl.engine.runs.init import PRESETS

from tests.random_model import EXPERTS, random_model
from tests.vllm.recording import Recording


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Sharper than at initialisation, so that tokens depend on their context.
    return random_model(tmp_path_factory.mktemp("model"), PRESETS["tiny"], sharper=3.0)


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sharper too, with heads that vLLM's own attention takes."""
    return random_model(tmp_path_factory.mktemp("moe"), EXPERTS | {"head_dim": 32}, sharper=3.0)


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[int]:
    file = tmp_path_factory.mktemp("server") / "port"
    process = subprocess.Popen([sys.executable, Path(__file__).parent / "inference_server.py", file])
    while not file.exists() or not file.read_text():
        time.sleep(0.05)
    yield int(file.read_text())
    process.terminate()
    process.wait()


@pytest.fixture
def recording(tmp_path, server) -> Iterator[Recording]:
    running = Recording(tmp_path, server)
    yield running
    running.kill()
