"""The commands of cells, in forks of one process: what each of them gets, and how it ended."""

import subprocess
import sys

import pytest
from zerokl.engine.processes.process import ForkServer
from zerokl.engine.runs.ablations.cells import IMPORTS, start_command

_NO_GPU = """
import torch
def refuse(*_):
    raise AssertionError("asked for a GPU")
for name in ("init", "_lazy_init", "is_available", "device_count", "current_device", "get_device_name"):
    setattr(torch.cuda, name, refuse)
if hasattr(torch._C, "_cuda_getDeviceCount"):
    torch._C._cuda_getDeviceCount = refuse
{planted}
from zerokl.engine.runs.ablations.cell_command import import_what_every_run_imports
import_what_every_run_imports()
import threading
assert threading.active_count() == 1, threading.enumerate()
"""


@pytest.mark.full
def test_each_process_has_its_words_log_and_environment(tmp_path, monkeypatch):
    refused, forks = ["train", "--steps", "-1"], ForkServer(IMPORTS)
    processes = [start_command(["train", "--help"], tmp_path / "help", forks, 1)]
    processes += [start_command(refused, tmp_path / "refused", forks, 1)]
    monkeypatch.setenv("ZEROKL_TRACEBACK", "1")
    processes += [start_command(refused, tmp_path / "with its traceback", forks, 1)]
    endings = [process.ending() for process in processes]
    assert [ending.code for ending in endings] == [0, 2, 1]
    assert len({ending.pid for ending in endings}) == 3
    logs = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert "Traceback" in logs["with its traceback"]
    assert logs["refused"].startswith("zerokl: ")
    assert "Usage: zerokl train" in logs["help"]
    for part in (*processes, forks):
        part.close()


def test_where_no_process_can_be_forked_each_has_its_ending(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    forks = ForkServer(IMPORTS)
    process = start_command(["--version"], tmp_path / "log", forks, 1)
    assert str(process.ending()) == "ended with exit code 1"
    process.close()
    forks.close()


@pytest.mark.full
def test_the_imports_ask_for_no_gpu_and_start_no_thread():
    """A CUDA that was asked for anything before a fork cannot be used after it."""
    assert errors_with("") == ""


@pytest.mark.full
def test_control_a_question_for_a_gpu_is_found():
    assert "asked for a GPU" in errors_with("torch.cuda.is_available()")


def errors_with(planted: str) -> str:
    """What the imports say in a process of their own, with a planted line."""
    command = [sys.executable, "-c", _NO_GPU.format(planted=planted)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr
