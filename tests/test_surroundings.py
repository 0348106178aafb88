"""What lies around a run: other directories, disks, removed reports, a user's code, Ctrl-C, libraries."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file
from zerokl.cli import main
from zerokl.cli.command_line import failure_line
from zerokl.engine.runs import run as run_module

from tests.helpers import contents
from tests.random_model import ONE_LAYER, random_model

SMALL = (
    *("--steps", "2", "--prompts", "2", "--num-generations", "2", "--sampling.max_tokens", "4"),
    *("--evaluation.every", "0", "--threads", "1", "--checkpoint.every", "1"),
)
REWARDS = """
import asyncio


def letters(problem, completion):
    return sum(c.isalpha() for c in completion) / 8


def exits(problem, completion):
    raise SystemExit(0)


def cancels(problem, completion):
    raise asyncio.CancelledError


def is_closed(problem, completion):
    raise GeneratorExit


class Unprintable(BaseException):
    def __str__(self):
        raise RuntimeError


def unprintable(problem, completion):
    raise Unprintable
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The working directory, with a model, data and rewards below it."""
    place = tmp_path / "here"
    place.mkdir()
    random_model(place, ONE_LAYER)
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(8)]
    (place / "data.jsonl").write_text("\n".join(lines))
    (place / "mine_here.py").write_text(REWARDS)
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])
    monkeypatch.delitem(sys.modules, "mine_here", raising=False)
    return place


def refused(capsys, *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1, error
    assert "internal error" not in error
    return error


def test_a_run_with_relative_places_is_found_from_another_directory(place, tmp_path, monkeypatch, capsys):
    task = ("--task.name", "jsonl", "--task.options.file", "data.jsonl", "--task.reward", "mine_here:letters")
    assert main(["train", "--run_dir", "run", "--model", "model", *task, *SMALL]) == 0
    shutil.copytree(place / "run", tmp_path / "again")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(place)])
    monkeypatch.delitem(sys.modules, "mine_here", raising=False)
    assert main(["verify", "run", "again"]) == 0
    assert main(["train", "--resume", "again", "--steps", "3"]) == 0
    assert main(["verify", "run", "again"]) == 0
    # Where the data are now can be said.
    shutil.move(place, tmp_path / "moved")
    moved = ("--task.directory", str(tmp_path / "moved"), "--model", str(tmp_path / "moved" / "model"))
    assert "data.jsonl cannot be read" in refused(
        capsys, "train", "--resume", "again", "--steps", "4", *moved[2:]
    )
    assert main(["train", "--resume", "again", "--steps", "4", *moved]) == 0


@pytest.mark.parametrize("out", ["model/config.json/out", "/proc/nowhere/out"])
@pytest.mark.parametrize("command", ["init", "train", "audit", "ablate", "replay"])
def test_a_place_that_cannot_be_written_is_found_out_first(place, monkeypatch, capsys, command, out):
    (place / "grid.toml").write_text('preset = "demo"\n')
    words = {
        "init": ["init", out],
        "train": ["train", "--run_dir", out, "--model", "model", *SMALL],
        "audit": ["audit", "model", "--out", out],
        "ablate": ["ablate", "grid.toml", "--out", out],
        "replay": ["replay", "run", "--step", "0", "--trace", f"{out}.safetensors"],
    }[command]
    before = contents(place)
    assert out.rpartition("/")[0] in refused(capsys, *words)
    assert contents(place) == before


@pytest.mark.parametrize("name", ["exits", "cancels", "is_closed", "unprintable"])
def test_whatever_a_reward_raises_is_named_and_the_folder_is_free_again(place, capsys, name):
    words = ["train", "--run_dir", "run", "--model", "model", "--task.options.max_value", "9", *SMALL]
    words += ["--task.options.train", "20", "--task.options.held_out", "10"]
    error = refused(capsys, *words, "--task.reward", f"mine_here:{name}")
    assert error.startswith("zerokl: reward: raised ")
    assert " for prompt " in error
    assert f"{place / 'mine_here.py'} line " in error
    assert not (place / "run").exists()
    assert main([*words, "--task.reward", "mine_here:letters"]) == 0


def test_a_run_outlives_its_reports(place, monkeypatch, capsys):
    train_step = run_module.train_step

    def without_reports(state, recorder):
        shutil.rmtree("run/tensorboard", ignore_errors=True)
        if state.step == 1:
            Path("run/report.html").mkdir()
        return train_step(state, recorder)

    monkeypatch.setattr(run_module, "train_step", without_reports)
    task = ("--task.options.max_value", "9", "--task.options.train", "20", "--task.options.held_out", "10")
    assert main(["train", "--run_dir", "run", "--model", "model", *task, *SMALL]) == 0
    output = capsys.readouterr()
    # The file is gone when a step is written, or when the tracker's thread opens it.
    assert (
        len(re.findall(r"^tracking: tensorboard failed \(.*; the run goes on without it$", output.out, re.M))
        == 1
    )
    assert output.err.splitlines() == [
        "zerokl: no report was written: report: run/report.html is no report of zerokl and is not replaced; "
        "choose another --out"
    ]
    assert Path("run/summary.json").exists()


@pytest.mark.full
@pytest.mark.parametrize("delay_s", [0.0, 0.2, 0.6])
def test_ctrl_c_while_workers_start_is_one_line(place, delay_s):
    words = ["--run_dir", "run", "--model", "model", "--workers", "2", "--threads", "2", "--steps", "500"]
    task = ["--task.options.max_value", "9", "--task.options.train", "20", "--task.options.held_out", "10"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "zerokl", "train", *words, *task],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None and not children.read_text().strip():
        time.sleep(0.01)
    time.sleep(delay_s)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (130, "zerokl: interrupted\n")


AUDIT = (
    "--sampler",
    "hf",
    "--trainer",
    "hf",
    "--out",
    "audit",
    "-n",
    "2",
    "--max_tokens",
    "4",
    "--device",
    "cpu",
)


def test_a_missing_weight_is_refused_before_an_engine_loads_the_model(place, monkeypatch, capsys):
    weights = load_file("model/model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, "model/model.safetensors")

    def loaded(*args, **kwargs):
        raise AssertionError("an engine loaded the model")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", loaded)
    assert "lacks 1 weights, the first being model.norm.weight" in refused(capsys, "audit", "model", *AUDIT)
    assert not Path("audit").exists()


@pytest.mark.parametrize("error", [OverflowError, RuntimeError, KeyError, ZeroDivisionError, ImportError])
def test_what_a_library_raises_is_one_line_and_no_difference(place, monkeypatch, capsys, error):
    def fails(*args, **kwargs):
        raise error("first\nsecond")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fails)
    message = refused(capsys, "audit", "model", *AUDIT)
    assert f"audit: hf and hf could not start with model ({error.__name__}: " in message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
        ),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory", "rollouts.jsonl"),
    ],
)
def test_memory_that_runs_out_is_said_in_one_line(error):
    assert "memory ran out; take a smaller model" in failure_line(error)
