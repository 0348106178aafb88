"""The process that forks for each cell: what a cell gets of it, and what it gets of a cell's end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from zerokl.engine.runs.ablations.forks import ForkServer

_NO_GPU = """
import torch
def refuse(*_):
    raise AssertionError("asked for a GPU")
for name in ("init", "_lazy_init", "is_available", "device_count", "current_device", "get_device_name"):
    setattr(torch.cuda, name, refuse)
if hasattr(torch._C, "_cuda_getDeviceCount"):
    torch._C._cuda_getDeviceCount = refuse
{planted}
from zerokl.engine.runs.ablations.forks import import_what_every_run_imports
import_what_every_run_imports()
import threading
assert threading.active_count() == 1, threading.enumerate()
"""
_OWNER = """
import sys, time
from pathlib import Path
from zerokl.engine.runs.ablations.forks import ForkServer
server = ForkServer()
print(server.start(["train", "--steps", "100000"], Path(sys.argv[1]), {}, 1), flush=True)
time.sleep(600)
"""


def ended(server: ForkServer, process: int) -> int:
    """The exit code of a process, which ends by itself."""
    while (code := server.exit_code(process)) is None:
        time.sleep(0.02)
    return code


@pytest.fixture
def server():
    server = ForkServer()
    yield server
    server.close()


def test_each_process_has_its_own_words_log_and_environment(server, tmp_path):
    refused = ["train", "--steps", "-1"]
    jobs = {
        "help": (["train", "--help"], {}),
        "refused": (refused, {}),
        "with its traceback": (refused, {"ZEROKL_TRACEBACK": "1"}),
    }
    started = {
        name: server.start(words, tmp_path / name, variables, 1) for name, (words, variables) in jobs.items()
    }
    assert len(set(started.values())) == 3
    codes = {name: ended(server, process) for name, process in started.items()}
    assert codes == {"help": 0, "refused": 2, "with its traceback": 1}
    logs = {name: (tmp_path / name).read_text() for name in jobs}
    assert "Traceback" in logs["with its traceback"]
    assert logs["refused"].startswith("zerokl: ")
    assert "Usage: zerokl train" in logs["help"]


def test_a_killed_process_has_its_signal_and_the_next_one_starts(server, tmp_path):
    process = server.start(["serve", "--help"], tmp_path / "a", os.environ, 1)
    os.kill(process, signal.SIGKILL)
    assert ended(server, process) == -signal.SIGKILL
    assert ended(server, server.start(["--version"], tmp_path / "b", os.environ, 1)) == 0


def test_after_the_end_of_the_server_every_process_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    server = ForkServer()
    process = server.start(["--version"], tmp_path / "log", {}, 1)
    assert (process, server.exit_code(process)) == (0, 1)
    server.close()


def test_the_imports_ask_for_no_gpu_and_start_no_thread():
    """A CUDA that was asked for anything before a fork cannot be used after it."""

    def run(planted: str) -> str:
        code = _NO_GPU.format(planted=planted)
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        return process.stderr

    assert run("") == ""
    assert "asked for a GPU" in run("torch.cuda.is_available()"), "control"


def test_a_process_does_not_outlive_its_owner(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path / "log")], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    process = int(owner.stdout.readline())
    assert Path(f"/proc/{process}").exists()
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{process}").exists()
