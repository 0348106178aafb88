"""What `make package` checks of zerokl-audit: its files, its use without torch, the action and the hook.

usage: check_audit.py FOLDER [PYTHON ...]: the folder holds the wheel, and its commands are checked with each
further Python, too. PyYAML reads action.yml.

A user's repository is made outside of this one, and used as docs/audit/ci.md says.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from check import compare, wheel_files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "wheels" / "audit"))
from shipped import DATA, shipped, text  # noqa: E402

SAMPLES = ROOT / "tests" / "audit" / "log_samples"
# Bytes of the wheel, and seconds of an audit, at most.
MOST_BYTES, MOST_S = 2_000_000, 10.0


def check_files(wheel: Path) -> None:
    """Exit where the wheel holds other files than shipped.py lists, or other bytes."""
    expected = {str(file.relative_to(ROOT)): text(file).encode() for file in shipped().values()}
    for package, patterns in DATA.items():
        folder = ROOT.joinpath(*package.split("."))
        files = [file for pattern in patterns for file in folder.glob(pattern)]
        expected |= {str(file.relative_to(ROOT)): file.read_bytes() for file in files}
    compare(expected, wheel_files(wheel), wheel.name, whole=True)
    if wheel.stat().st_size > MOST_BYTES:
        sys.exit(f"{wheel.name}: {wheel.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes")


class User:
    """A folder with an environment, in which a user types commands."""

    def __init__(self, folder: Path, wheel: Path, python: str = sys.executable):
        self.folder = folder
        subprocess.run([python, "-m", "venv", "env"], cwd=folder, check=True)
        outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.env = outside | {"PATH": f"{folder / 'env/bin'}:{os.environ['PATH']}"}
        (folder / "good.jsonl").write_text(log(1e-6))
        (folder / "bad.jsonl").write_text(log(0.5))
        self.run("python", "-m", "pip", "install", "-q", str(wheel))

    def run(self, *words: str, code: int = 0, says: str = "", **more: str) -> str:
        """Run a command. Exit where its exit code or what it prints is another one."""
        print(f"$ {' '.join(words)[:150]}", flush=True)
        process = subprocess.run(words, cwd=self.folder, env=self.env | more, capture_output=True, text=True)
        out = process.stdout + process.stderr
        if process.returncode != code or says not in out:
            sys.exit(f"{words}: exit code {process.returncode}, not {code}, or no {says!r} in:\n{out}")
        return out


def log(apart: float) -> str:
    """A log of which every token's logprob is off by `apart` in the trainer's column."""
    row = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-1.0, -2.0], "temperature": 1.0}
    row["trainer_logprobs"] = [x - apart for x in row["logprobs"]]
    return (json.dumps(row) + "\n") * 2


def check_commands(user: User) -> None:
    """The commands that need no torch, and the refusals of those that do."""
    if "torch" in user.run("python", "-m", "pip", "list"):
        sys.exit("the wheel's dependencies bring torch")
    began = time.monotonic()
    user.run("zerokl", "audit", str(SAMPLES / "trl.jsonl"), says="outcome: Sound")
    took_s = time.monotonic() - began
    print(f"the first audit of a log took {took_s:.1f} s")
    if took_s > MOST_S:
        sys.exit(f"the audit took more than {MOST_S:g} s")
    user.run("zerokl", "--version", says="zerokl-audit ")
    user.run("zerokl", "convert", str(SAMPLES / "trl.jsonl"), "trl.jsonl")
    user.run("zerokl", "diff", "trl.jsonl", "trl.jsonl", says="equal")
    user.run("python", "-c", "from zerokl.integrations.recorder import Recorder")
    user.run("zerokl", "audit", "good.jsonl", "--model", "m", code=2, says="pip install torch transformers")
    user.run("zerokl", "train", code=2, says="python -m pip install .")
    user.run("zerokl", "audit", "demo", "--every", "3", code=2, says="python -m pip install .")
    (user.folder / "run").mkdir()
    user.run("zerokl", "diff", "run", "run", code=2, says="python -m pip install .")
    for name, code in (("good", 0), ("bad", 1)):
        user.run("zerokl", "capsule", "make", f"{name}.jsonl", "--band", "slime", "--out", f"{name}.zkc")
        user.run("zerokl", "capsule", "check", f"{name}.zkc", code=code, says="outcome of")
    user.run(
        "zerokl", "capsule", "replay", "good.zkc", "--trainer", "hf", "--model", ".", code=2, says="torch"
    )


def act(user: User, code: int, says: str, **inputs: str) -> None:
    """Run the steps of action.yml as a runner does. says: what the summary holds."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    values = {name: row["default"] for name, row in action["inputs"].items()} | inputs
    summary, output = user.folder / "summary.md", user.folder / "output"
    summary.write_text("")
    output.write_text("")
    ended = 0
    for step in action["runs"]["steps"]:
        env = {name: value for name, value in step["env"].items()}
        for name in values:
            env = {n: v.replace("${{ inputs." + name + " }}", values[name]) for n, v in env.items()}
        paths = {"GITHUB_STEP_SUMMARY": summary, "GITHUB_OUTPUT": output, "GITHUB_ACTION_PATH": ROOT}
        ended = code if step.get("id") == "run" else 0
        script = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"])
        user.run(*script, code=ended, **env, **{name: str(path) for name, path in paths.items()})
    if says not in summary.read_text() or (code < 2 and f"exit-code={code}" not in output.read_text()):
        sys.exit(f"the action's summary or output is another:\n{summary.read_text()}{output.read_text()}")


def check_action(user: User, wheel: Path) -> None:
    """The action with a log and with a capsule that pass and that fail, and without either."""
    one = {"package": str(wheel), "junit": "junit.xml"}
    act(user, 0, "zerokl audit: passed", log="good.jsonl", band="nemo-rl", out="act-1", **one)
    one["package"] = "none"
    act(
        user,
        1,
        "zerokl audit: failed",
        log="bad.jsonl",
        args="--max_k3 0.001 --max_abs 0.1",
        out="act-2",
        **one,
    )
    act(user, 0, "zerokl capsule: passed", capsule="good.zkc", **one)
    act(user, 1, "zerokl capsule: failed", capsule="bad.zkc", **one)
    if "<failure" not in (user.folder / "junit.xml").read_text():
        sys.exit("the action's JUnit has no failure")
    act(user, 2, "", **one)


def check_hook(user: User) -> None:
    """The hook in a user's repository: a good capsule is committed, and a bad one is not."""
    user.run("python", "-m", "pip", "install", "-q", "pre-commit")
    git = ("git", "-c", "user.name=u", "-c", "user.email=u@example.com", "-c", "init.defaultBranch=main")
    hooks, repository = user.folder / "hooks", user.folder / "repository"
    for folder in (hooks, repository):
        folder.mkdir()
        user.run(*git, "-C", str(folder), "init", "-q")
    (hooks / ".pre-commit-hooks.yaml").write_bytes((ROOT / ".pre-commit-hooks.yaml").read_bytes())
    user.run(*git, "-C", str(hooks), "add", ".")
    user.run(*git, "-C", str(hooks), "commit", "-qm", "hooks")
    rev = user.run("git", "-C", str(hooks), "rev-parse", "HEAD").strip()
    hook = {"repo": str(hooks), "rev": rev, "hooks": [{"id": "zerokl-capsule"}]}
    (repository / ".pre-commit-config.yaml").write_text(yaml.safe_dump({"repos": [hook]}))
    home = {"PRE_COMMIT_HOME": str(user.folder / "pre-commit")}
    for name, code, says in (("good", 0, "Passed"), ("bad", 1, "Beyond the tolerance")):
        (repository / f"{name}.zkc").write_bytes((user.folder / f"{name}.zkc").read_bytes())
        user.run("git", "-C", str(repository), "add", ".")
        script = f"cd {repository} && pre-commit run"
        user.run("bash", "-c", script, code=code, says=says, **home)


def main(folder: Path, pythons: Sequence[str]) -> None:
    """Check the wheel in `folder`, with other Pythons as well."""
    (wheel,) = folder.resolve().glob("zerokl_audit-*.whl")
    check_files(wheel)
    with tempfile.TemporaryDirectory() as work:
        user = User(Path(work), wheel)
        check_commands(user)
        check_action(user, wheel)
        check_hook(user)
    for python in pythons:
        with tempfile.TemporaryDirectory() as work:
            check_commands(User(Path(work), wheel, python))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
