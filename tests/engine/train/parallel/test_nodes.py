"""Agents of torchrun on two nodes are killed in turn and come back: the ledger is that of an undisturbed run.

Both nodes are this machine. An agent that is killed leaves its rank behind, as the kernel's out-of-memory
killer does.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from zerokl.engine.config.config_file import to_toml
from zerokl.engine.runs.run import train

# Short times, so that a lost agent is noticed in seconds. torchrun's own wait for half a minute.
_CONF = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
_DEADLINE_S = 240.0


@pytest.fixture
def endpoint(tmp_path) -> Iterator[str]:
    command = [sys.executable, "-m", "zerokl.engine.train.parallel.rendezvous", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as server:
        yield f"127.0.0.1:{server.stdout.readline().split()[-1]}"
        server.kill()


def _environment() -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/nodes.md says why
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


class _Node:
    """An agent with one rank, which is started again with the same command."""

    def __init__(self, name: str, endpoint: str, folder: Path):
        words = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "20", "--rdzv-id", "job"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-conf", _CONF]
        run = ["-m", "zerokl", "train", "config.toml", "--run_dir", "run", "--auto_resume"]
        self.command = [sys.executable, "-m", "torch.distributed.run", *words, *run]
        self.folder, self.output = folder, folder / f"{name}.txt"
        self.agent: subprocess.Popen | None = None

    def start(self) -> None:
        with self.output.open("a") as output:
            self.agent = subprocess.Popen(
                self.command,
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(),
            )

    def kill(self) -> None:
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait()


@contextmanager
def _nodes(endpoint: str, folder: Path) -> Iterator[list[_Node]]:
    nodes = [_Node(name, endpoint, folder) for name in "ab"]
    try:
        yield nodes
    finally:
        for node in nodes:
            if node.agent is not None:
                node.kill()


def _starts(run: Path) -> list[int]:
    """The number of ranks of each start of the run that the ledger notes."""
    lines = [json.loads(x) for x in (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)[:-1]]
    return [x["environment"]["process.ranks"] for x in lines if x["kind"] in ("head", "resumed")]


def _steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _wait_for(done, what: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def _held_reward(folder: Path) -> Path:
    """The reward held:letters in the folder. A completion costs 0.2 s as long as the returned file exists."""
    (folder / "held.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "def letters(problem, completion):\n"
        "    if Path(__file__).with_name('hold').exists():\n"
        "        time.sleep(0.2)\n"
        "    return sum(c.isalpha() for c in completion) / 8\n"
    )
    return folder / "hold"


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_nodes_that_are_killed_in_turn_change_nothing(config, tmp_path, endpoint, killed):
    hold, run = _held_reward(tmp_path), tmp_path / "run"
    task = {"task__reward": "held:letters", "task__directory": str(tmp_path)}
    cfg = config(steps=60, checkpoint__every=1, checkpoint__keep=2, dtype="bfloat16", **task)
    expected = train(cfg, tmp_path / "alone")
    (tmp_path / "config.toml").write_text(to_toml(cfg))
    hold.touch()
    with _nodes(endpoint, tmp_path) as nodes:
        for node in nodes:
            node.start()
        for turn, node in enumerate(nodes[:killed]):
            _wait_for(lambda: _steps(run) and _starts(run)[-1] == 2, f"two nodes, turn {turn}")
            node.kill()
            _wait_for(lambda: _starts(run)[-1] == 1, f"the other node goes on, turn {turn}")
            node.start()
        _wait_for(lambda: _starts(run)[-1] == 2, "two nodes again")
        hold.unlink()
        for node in nodes:
            assert node.agent.wait(_DEADLINE_S) == 0, node.output.read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["fingerprint"], summary["weights"]) == (expected.fingerprint, expected.weights)
    assert [a for a in _starts(run) if a == 1], "no node was alone"


_BATCH_SCRIPT = Path(__file__).parents[4] / "docs" / "examples" / "nodes" / "slurm.sbatch"
# Two tasks on this machine, whose exit codes become one, and the name of the only host.
_SRUN = '#!/bin/bash\nshift\n"$@" & a=$!\n"$@" & b=$!\nwait $a && wait $b\n'
_SCONTROL = "#!/bin/bash\necho 127.0.0.1\n"


@pytest.mark.slow
def test_the_batch_script_runs_two_nodes(config, tmp_path):
    cfg = config()
    expected = train(cfg, tmp_path / "alone")
    (tmp_path / "config.toml").write_text(to_toml(cfg))
    programs = {"srun": _SRUN, "scontrol": _SCONTROL, "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n'}
    programs["torchrun"] = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"CONFIG": "config.toml", "RUN": "run", "SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_ID": "1"}
    environment = _environment() | job | {"SLURM_JOB_NUM_NODES": "2"}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    command = ["bash", str(_BATCH_SCRIPT)]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["fingerprint"], summary["weights"]) == (expected.fingerprint, expected.weights)
    assert _starts(tmp_path / "run") == [2]
