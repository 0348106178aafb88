"""One folder has one writer, from its first moment to its last: the second is refused, and death frees it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from zerokl.cli import main
from zerokl.files.writing import LOCK, hold_folder

from tests.random_model import ONE_LAYER, random_model

_CONFIG = """
model = "{model}"
steps = 3
prompts = 2
num_generations = 2
workers = 1
[task]
options = {{ max_value = 9, train = 20, held_out = 10 }}
[sampling]
max_tokens = 4
[evaluation]
every = 0
[checkpoint]
every = 1
"""


def _zerokl(folder: Path, *words: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "zerokl", *words]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment)


def _both(folder: Path, *words: str) -> None:
    """Start one command twice at once. One ends well; the other is refused in a line that names the first."""
    processes = [_zerokl(folder, *words) for _ in range(2)]
    errors = [process.communicate()[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 2], errors
    (refused,) = [error for error, code in zip(errors, codes, strict=True) if code]
    first = processes[codes.index(0)].pid
    assert f"is being written to by process {first} of" in refused or "already holds a run" in refused
    assert len(refused.splitlines()) == 1


@pytest.mark.full
def test_two_runs_or_resumes_started_at_once_leave_one_whole_run(tmp_path):
    (tmp_path / "c.toml").write_text(_CONFIG.format(model=random_model(tmp_path, ONE_LAYER)))
    _both(tmp_path, "train", "c.toml", "--run_dir", "run")
    ledger = tmp_path / "run" / "ledger.jsonl"
    lines = ledger.read_text().splitlines()
    assert sum('"kind":"head"' in line for line in lines) == 1
    ledger.write_text("\n".join(lines[:2]) + "\n")  # as after one step
    processes = [_zerokl(tmp_path, "train", "--resume", "run") for _ in range(2)]
    errors = [process.communicate()[1] for process in processes]
    assert {process.returncode for process in processes} <= {0, 2}, errors
    assert ledger.read_text().splitlines() == lines
    assert main(["verify", "run", str(tmp_path / "run"), "--replays", "1"]) == 0
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_holder_that_is_killed_holds_nothing(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from zerokl.files.writing import hold_folder\n"
        "with hold_folder(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"by process {holder.pid} of"), hold_folder(tmp_path / "run"):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with hold_folder(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).exists()  # the dead holder's file is taken over
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_folder_that_was_made_for_nothing_is_removed_again(tmp_path):
    with hold_folder(tmp_path / "a" / "b"):
        pass
    assert list(tmp_path.iterdir()) == []
    with hold_folder(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").write_text("x")
    assert (tmp_path / "a" / "b" / "file").exists()
