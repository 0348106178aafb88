"""Code of the user's changes no bit of a run, ends no run without a word, and leaves no process behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from zerokl.cli import main
from zerokl.engine.config.config_file import to_toml
from zerokl.engine.config.run_config import TaskConfig
from zerokl.engine.runs.run import train
from zerokl.engine.tasks.base import Problem
from zerokl.engine.tasks.guard import guarded
from zerokl.engine.tasks.loading import load_task
from zerokl.engine.tasks.rewards import Reward, open_reward
from zerokl.kernels import backend

from tests.helpers import importable

# Each of these rewards is `letters` of the module toy, and does something else beside it.
MODULE = '''
import asyncio, gc, os, random, signal, subprocess, sys, time, warnings
import numpy as np


def letters(problem, completion):
    return sum(c.isalpha() for c in completion) / 8


def default_dtype(problem, completion):
    import torch
    torch.set_default_dtype(torch.bfloat16)
    return letters(problem, completion)


async def meddles(problem, completion):
    """Changes all that it can reach, warns, waits, and leaves processes behind."""
    import torch
    np.exp(np.float32(1000.0)) * np.ones(2, np.float16) * 1e6
    letters_later()
    await letters_later()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    torch.autocast("cpu").__enter__()
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)
    if os.fork() == 0 and os.fork() == 0:
        os.setsid()
        time.sleep(1000)
    sys.stdout.close()
    os.environ.clear()
    os.chdir("/")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    np.seterr(all="raise")
    sys.setrecursionlimit(200)
    random.seed(0)
    np.random.seed(0)
    gc.disable()
    return letters(problem, completion)


async def letters_later():
    await asyncio.sleep(0)


def prints(problem, completion):
    print("seen\\x1b[2J", completion)
    os.write(2, b"and on stderr\\n")
    return letters(problem, completion)


def floods(problem, completion):
    print("line\\n" * 50_000)
    return letters(problem, completion)


def second(problem, completion):
    """Goes wrong at the third pair only, and the fourth goes wrong sooner."""
    if completion == "c":
        time.sleep(0.2)
        raise RuntimeError("slow")
    if completion == "d":
        raise RuntimeError("fast")
    return 1.0


def sleeps(problem, completion):
    time.sleep(0.0 if completion == "d" else 0.05)
    return float(ord(completion))


def exits(problem, completion):
    os._exit(3)


def is_killed(problem, completion):
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(problem, completion):
    import ctypes
    ctypes.string_at(0)


def kills_its_group(problem, completion):
    os.killpg(0, signal.SIGTERM)
    time.sleep(10)


def hangs(problem, completion):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    while True:
        time.sleep(0.01)


def takes_memory(problem, completion):
    return float(len(bytearray(1 << 34)))


def closes_all(problem, completion):
    os.closerange(3, 256)
    return 1.0


def writes_to_all(problem, completion):
    for fd in range(3, 64):
        try:
            os.write(fd, (5).to_bytes(8, "big") + b"[1,2]")
        except OSError:
            pass
    return 1.0


def raises(problem, completion):
    raise KeyError("a\\nb")


def none(problem, completion):
    return None


def nan(problem, completion):
    return float("nan")


def interrupts(problem, completion):
    raise KeyboardInterrupt


class Odd:
    """A task that changes the state of the trainer's process."""

    chat = False

    def __init__(self, what="dtype"):
        import torch
        random.seed(0)
        if what == "dtype":
            torch.set_default_dtype(torch.bfloat16)

    def problems(self, split):
        from zerokl.engine.tasks.base import Problem
        os.chdir("/")
        return [Problem(0, "1=", "1")]

    def reward(self, problem, completion):
        return 0.0


def no_gradient(r, A, logp, low, high, r_detached):
    return r_detached * A, r * 0.0


def turns_gradients_off(r, A, logp, low, high):
    import torch
    torch.set_grad_enabled(False)
    return r * A, r * A


def narrows(r, A, logp, low, high):
    import torch
    torch.set_default_dtype(torch.bfloat16)
    return r * A, r * A


def draws(r, A, logp, low, high):
    import torch
    torch.rand(1)
    return r * A, r * A
'''


@pytest.fixture(scope="module", autouse=True)
def _odd_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with importable(tmp_path_factory.mktemp("odd"), "odd", MODULE):
        yield


@pytest.fixture(autouse=True)
def _none_stays(marked) -> Iterator[None]:
    """No process that a test has started outlives it."""
    yield
    assert not marked()


def _table(name: str, texts: list[str], say=print, **settings: object) -> np.ndarray:
    settings = TaskConfig(reward=f"odd:{name}", **{"reward_processes": 2, **settings}).reward_settings
    with open_reward(load_task("add", {}), settings, say) as reward:
        return reward.values([Problem(7, "1=", "1")], [texts])


@pytest.mark.full
def test_a_reward_changes_no_bit_of_the_run(config, tmp_path, capfd):
    expected = train(config(), tmp_path / "toy")
    capfd.readouterr()
    run = train(config(task__reward="odd:meddles"), tmp_path / "meddles")
    assert run.weights == expected.weights
    assert capfd.readouterr().err == ""
    assert torch.get_default_dtype() is torch.float32


def test_control_the_same_reward_in_this_process_changes_the_weights(config, tmp_path, monkeypatch):
    import odd

    monkeypatch.setattr(backend, "library", lambda: None)  # the loops in C++ do not care
    expected = train(config(), tmp_path / "toy")
    here, values = Reward(odd.default_dtype), Reward.values
    monkeypatch.setattr(Reward, "values", lambda _, *args: values(here, *args))
    try:
        run = train(config(exact=False), tmp_path / "here")
    finally:
        torch.set_default_dtype(torch.float32)
    assert run.weights != expected.weights


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("exits", "its process ended with exit code 3"),
        ("is_killed", "its process was killed by SIGKILL"),
        ("crashes", "its process was killed by SIGSEGV"),
        ("kills_its_group", "its process was killed by SIGTERM"),
        ("hangs", "took more than 1.5 s (task.reward_timeout_s)"),
        ("takes_memory", "raised MemoryError (); its process may ask for 1,073,741,824 bytes"),
        ("closes_all", "its process ended with exit code 0"),
        ("writes_to_all", "wrote into the connection of its process to the run"),
        ("raises", "raised KeyError ('a\\nb')"),
        ("interrupts", "raised KeyboardInterrupt ()"),
        ("none", "raised TypeError (its value is of the type NoneType; it must be a number)"),
        ("nan", "is nan"),
    ],
)
def test_whatever_goes_wrong_is_one_line_that_names_the_problem(capfd, name, reason):
    with pytest.raises(ValueError, match=re.escape(f"reward: {reason}")) as caught:
        _table(name, ["x", "y"], reward_timeout_s=1.5, reward_memory_bytes=1 << 30)
    assert " for prompt 7 ('1='), sample 0 ('x')" in str(caught.value)
    assert "engine/tasks" not in str(caught.value), "a line of ours is not where the fault is"
    assert capfd.readouterr().err == ""


def test_a_command_ends_with_one_line(config, tmp_path, capfd):
    (tmp_path / "c.toml").write_text(to_toml(config(task__reward="odd:is_killed")))
    assert main(["train", str(tmp_path / "c.toml"), "--run_dir", str(tmp_path / "run")]) == 2
    error = capfd.readouterr().err
    assert error.startswith("zerokl: reward: its process was killed by SIGKILL")
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_the_order_in_which_rewards_end_decides_nothing():
    for n in (1, 3):
        assert _table("sleeps", list("abcdefgh"), reward_processes=n).tolist() == [[*range(97, 105)]]
        with pytest.raises(ValueError, match=r"RuntimeError \(slow\).* sample 2"):
            _table("second", list("abcd"), reward_processes=n)


def test_what_a_reward_prints_is_shown_as_lines_without_control_characters():
    lines = []
    _table("prints", ["x"], lines.append, reward_processes=1)
    assert lines == ["reward prints: seen\\x1b[2J x", "reward prints: and on stderr"]
    lines = []
    _table("floods", ["x"], lines.append, reward_processes=1)
    assert len(lines) == 21
    assert lines[-1] == "reward: 49,980 more lines that it printed are not shown"


def test_a_process_starts_without_torch_and_numpy():
    code = "import zerokl.engine.tasks.serve, zerokl.engine.tasks.reward_function, sys; "
    code += "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_task_may_draw_but_must_not_change_what_the_run_depends_on():
    message = r"task odd:Odd: changed torch's default dtype \(torch.float32 -> torch.bfloat16\)"
    with pytest.raises(ValueError, match=message):
        load_task("odd:Odd", {})
    assert torch.get_default_dtype() is torch.float32
    load_task("odd:Odd", {"what": "nothing else"})


STATES = {
    "torch's grad mode": lambda: torch.set_grad_enabled(False),
    "torch's default device": lambda: torch.set_default_device("meta"),
    "torch's threads": lambda: torch.set_num_threads(7),
    "torch's deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "torch's precision of fp32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "whether torch keeps subnormal numbers": lambda: torch.set_flush_denormal(True),
    "torch.backends.mkldnn.enabled": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "torch's autocast on cpu": lambda: torch.autocast("cpu").__enter__(),
    "torch's random numbers": lambda: torch.manual_seed(5),
    "NumPy's random numbers": lambda: np.random.seed(5),
    "NumPy's handling of errors": lambda: np.seterr(all="raise"),
    "the current directory": lambda: os.chdir("/"),
    "the handler of Ctrl-C": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    "the recursion limit": lambda: sys.setrecursionlimit(5000),
}


@pytest.mark.parametrize("name", STATES)
def test_what_the_guard_names_it_puts_back(name):
    with pytest.raises(ValueError, match=f"^f: changed {re.escape(name)}"):
        guarded("f:", STATES[name])
    guarded("f:", lambda: None)  # raises if the change is still there, and is now undone by nobody
    with pytest.raises(ValueError, match=f"^f: changed {re.escape(name)}"):
        guarded("f:", STATES[name])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("narrows", r"changed torch's default dtype \(torch.float32 -> torch.bfloat16\)"),
        ("turns_gradients_off", r"changed torch's grad mode \(True -> False\)"),
        ("draws", "changed torch's random numbers"),
        ("no_gradient", "gave a gradient of exactly 0, although the advantages of"),
    ],
)
def test_a_surrogate_that_reaches_beyond_itself_or_trains_nothing_is_refused(config, tmp_path, name, reason):
    with pytest.raises(ValueError, match=f"loss.surrogate: odd:{name} {reason}"):
        train(config(loss__surrogate=f"odd:{name}"), tmp_path / "run")
    assert torch.is_grad_enabled()


@pytest.mark.full
def test_a_run_that_is_killed_takes_its_rewards_along(config, tmp_path, marked):
    (tmp_path / "c.toml").write_text(to_toml(config(task__reward="odd:hangs")))
    command = [sys.executable, "-m", "zerokl", "train", str(tmp_path / "c.toml"), "--run_dir", "run"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(marked()) < 4:  # the run, the keeper, its child, and what the reward has started
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    while marked():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_ends_a_reward_that_hangs(marked):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            _table("hangs", ["x"])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not marked()
