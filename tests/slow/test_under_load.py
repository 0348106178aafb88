"""A run on a busy machine, without memory, without disk, or with a clock that jumps: the same bits, or one
line that says why not. After such a line the run goes on to the same bits.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.helpers import write_letters_reward
from tests.random_model import ONE_LAYER, random_model

pytestmark = pytest.mark.slow

_MB = 1 << 20
_MEMORY = Path("/sys/fs/cgroup/memory")  # the first version of cgroups
_UNIFIED = Path("/sys/fs/cgroup/cgroup.controllers")  # the second one
_FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")

# Every look at the clock of the wall goes forwards or backwards by up to eleven days. The monotonic clocks
# never jump, and libraries wait for them.
_JUMPS = """
import random, sys, time
draw = random.Random(0)
plain, plain_ns = time.time, time.time_ns
time.time = lambda: plain() + draw.uniform(-1e6, 1e6)
time.time_ns = lambda: plain_ns() + draw.randrange(-10**15, 10**15)
from zerokl.cli import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a reward, and the run `plain`, which nothing disturbed."""
    folder = tmp_path_factory.mktemp("load")
    write_letters_reward(folder)
    random_model(folder, ONE_LAYER)
    process = zerokl(folder, *new("plain"))
    assert process.returncode == 0, process.stderr
    return folder


def new(run: str | Path) -> list[str]:
    """The command line of a run of twelve steps with a checkpoint after each step, in two processes."""
    model = "model"
    words = {
        "model": model,
        "steps": 12,
        "prompts": 2,
        "num_generations": 4,
        "sampling.max_tokens": 4,
        "workers": 2,
        "evaluation.every": 4,
        "evaluation.problems": 4,
        "checkpoint.every": 1,
        "checkpoint.keep": 100,
        "virtual_shards": 2,
        "task.reward": "letters_reward:reward",
        "task.options.max_value": 9,
        "task.options.train": 50,
        "task.options.held_out": 10,
    }
    settings = [word for key, value in words.items() for word in (f"--{key}", str(value))]
    return ["train", "--run_dir", str(run), *settings]


def command(*words: str, code: str = "") -> list[str]:
    return [sys.executable, *(["-c", code] if code else ["-m", "zerokl"]), *words]


def start(folder: Path, words: Sequence[str], **environment: str) -> subprocess.Popen:
    """Start a command in `folder`, which its imports see."""
    path = os.pathsep.join([str(folder), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2"} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, cwd=folder, env=environment, **pipes)


def ended(process: subprocess.Popen) -> subprocess.CompletedProcess:
    out, error = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def zerokl(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    return ended(start(folder, command(*words), **environment))


def bits(run: Path) -> dict[str, object]:
    """All that the law decides of a run: fingerprint and weights, the ledger's lines, every token."""
    summary = json.loads((run / "summary.json").read_text())
    ledger = [
        line for line in (run / "ledger.jsonl").read_text().splitlines()[1:] if '"kind":"resumed"' not in line
    ]
    rollouts = (run / "rollouts.jsonl").read_text()
    return {
        "fingerprint": summary["fingerprint"],
        "weights": summary["weights"],
        "ledger": ledger,
        "rollouts": rollouts,
    }


def check_outcome(folder: Path, run: Path, process: subprocess.CompletedProcess) -> None:
    """The run has the same bits, or ended with one line, or the kernel killed it; then it goes on to them."""
    if process.returncode == 2:
        (line,) = process.stderr.splitlines()
        assert line.startswith("zerokl: ")
        assert "internal error" not in line
    else:
        assert process.returncode in (0, -9), process.stderr
    if process.returncode != 0:
        goes_on = (run / "config.toml").exists()
        again = zerokl(folder, *(["train", "--resume", str(run)] if goes_on else new(run)))
        assert again.returncode == 0, again.stderr
    assert bits(run) == bits(folder / "plain")


@pytest.mark.proof
def test_two_runs_and_a_verify_at_once_on_two_cores(place, tmp_path):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:2]))  # the processes inherit it
    try:
        runs = [tmp_path / "a", tmp_path / "b"]
        processes = [start(place, command(*new(run))) for run in runs]
        processes.append(start(place, command("verify", "run", "plain", "--replays", "4", "--draw", "0")))
        for process in map(ended, processes):
            assert process.returncode == 0, process.stdout + process.stderr
    finally:
        os.sched_setaffinity(0, before)
    assert [bits(run) for run in runs] == [bits(place / "plain")] * 2


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group whose memory can be limited."""
    if not _MEMORY.is_dir() or _UNIFIED.exists():
        pytest.skip("needs the memory controller of cgroups v1")
    group = _MEMORY / f"zerokl-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group ({error.strerror})")
    yield group
    group.rmdir()


def in_group(group: Path, words: Sequence[str]) -> list[str]:
    """The command, in a control group from its first instruction on."""
    return ["sh", "-c", f'echo $$ > "{group}/cgroup.procs"; exec "$@"', "sh", *words]


# Between these shares a run can swap pages for minutes before it ends, which is a proof's time.
@pytest.mark.parametrize("shares", [(0.3, 1.2), pytest.param((0.85, 1.2), marks=pytest.mark.proof)])
def test_a_run_with_less_memory_than_it_needs(place, tmp_path, memory_group, shares):
    process = ended(start(place, in_group(memory_group, command(*new(tmp_path / "free")))))
    assert process.returncode == 0, process.stderr
    needed = int((memory_group / "memory.max_usage_in_bytes").read_text())
    codes = []
    for share in shares:
        (memory_group / "memory.limit_in_bytes").write_text(str(int(needed * share)))
        run = tmp_path / f"share-{share}"
        process = ended(start(place, in_group(memory_group, command(*new(run)))))
        codes.append(process.returncode)
        if process.returncode == 2:
            assert (
                "was killed by SIGKILL; this is how Linux ends a process when memory runs out"
                in process.stderr
            )
        check_outcome(place, run, process)
    assert codes[0] != 0, "a limit that changes nothing proves nothing"
    assert codes[-1] == 0, codes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 50 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a disk; root can")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    "room_mb", [0.6, *(pytest.param(mb, marks=pytest.mark.proof) for mb in (0.0, 0.1, 1.0, 2.0))]
)
def test_a_run_on_a_disk_of_50_mb_that_fills_up(place, small_disk, room_mb):
    (small_disk / "filler").write_bytes(bytes(int((50 - room_mb) * _MB) - 8192))
    run = small_disk / "run"
    process = zerokl(place, *new(run))
    assert process.returncode == 2, "the disk was large enough, which proves nothing"
    assert "No space left on device" in process.stderr
    assert str(small_disk) in process.stderr
    (small_disk / "filler").unlink()
    check_outcome(place, run, process)


def test_a_clock_that_jumps(place, tmp_path):
    process = ended(start(place, command(*new(tmp_path / "run"), code=_JUMPS)))
    assert process.returncode == 0, process.stderr
    check_outcome(place, tmp_path / "run", process)
    verify = command("verify", "run", str(tmp_path / "run"), "--replays", "2", code=_JUMPS)
    process = ended(start(place, verify))
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize(
    "clock", ["@2001-09-09 01:46:39 x1000", pytest.param("-10y i3600", marks=pytest.mark.proof)]
)
def test_the_clock_of_another_time(place, tmp_path, clock):
    if not _FAKETIME.exists():
        pytest.skip("needs libfaketime: apt-get install libfaketime")
    faked = {"LD_PRELOAD": str(_FAKETIME), "FAKETIME": clock, "FAKETIME_NO_CACHE": "1"}
    process = zerokl(place, *new(tmp_path / "run"), **faked)
    assert process.returncode == 0, process.stderr
    check_outcome(place, tmp_path / "run", process)
