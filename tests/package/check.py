"""What `make package` checks: wheels and sdist hold git's files, and the wheels work in an empty environment.

usage: check.py FOLDER REQUIREMENT ...

FOLDER holds both wheels and one sdist; check_audit.py uses zerokl-audit without torch. The requirements (a
build of torch) are what pip installs before them. The Python is the one that runs this file. Where pip has
torch for it as a build for CUDA only, what needs no torch is used.

The environments are made outside of the repository, so nothing can come from the sources by accident.
"""

import email
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from torch_builds import fault, pip_of

ROOT = Path(__file__).parents[2]
# Folders at the root that are no part of the package.
OUTSIDE = {".ci", ".github", "benchmarks", "docs", "tests", "wheels"}
# What a user does first, in short: `make demo` has all steps. An exit code other than 0 fails.
WHEEL_COMMANDS = """
zerokl --version
python -m zerokl --version
zerokl train --preset demo --run-dir demo --steps 5 --init.target 0.1
zerokl verify run demo
zerokl report demo
zerokl sample demo/base --prompt 3+14= --n 2
zerokl eval demo/checkpoints/step-000005 --task add --problems 8
zerokl audit demo/base --sampler native --n 4 --max_tokens 5 --out audit
"""
# With zerokl-audit beside it, the same works. Where zerokl-audit is alone, with torch, a model can compute.
BESIDE_COMMANDS = """
zerokl --version
zerokl verify run demo --replays 1
"""
ALONE_COMMANDS = """
zerokl audit demo/base --sampler native --n 4 --max_tokens 5 --out audit-alone
zerokl capsule make native --model demo/base --trainer zerokl --n 2 --max_tokens 4 --out c.zkc
zerokl capsule replay c.zkc --sampler native --trainer zerokl
"""
# Where there is no torch. LOG is a log of TRL's.
COMMANDS_WITHOUT_TORCH = """
zerokl --version
zerokl audit LOG --out audit
zerokl diff LOG LOG
"""


def tracked() -> dict[str, bytes]:
    """The files of the package in git, as they are in the working tree: name -> content."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split("\0") if name]
    inside = [n for n in names if (n.split("/")[0] not in OUTSIDE if "/" in n else n.startswith("__"))]
    return {name: (ROOT / name).read_bytes() for name in inside}


def wheel_files(path: Path) -> dict[str, bytes]:
    """What a wheel installs as the package zerokl: name below it -> content."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        return {name.removeprefix("zerokl/"): wheel.read(name) for name in names}


def sdist_files(path: Path) -> dict[str, bytes]:
    """The files of an sdist: name below its one folder -> content."""
    with tarfile.open(path) as sdist:
        members = [member for member in sdist if member.isfile()]
        return {m.name.partition("/")[2]: sdist.extractfile(m).read() for m in members}


def compare(expected: dict[str, bytes], files: dict[str, bytes], what: str, *, whole: bool) -> None:
    """Exit with what is missing, altered or, with whole, too much in `files`."""
    faults = [f"lacks {name}" for name in expected.keys() - files.keys()]
    faults += [
        f"holds another {name}" for name in expected.keys() & files.keys() if expected[name] != files[name]
    ]
    faults += [f"holds {name}, which git does not" for name in files.keys() - expected.keys() if whole]
    if faults:
        sys.exit(f"{what}: {'; '.join(sorted(faults))}")
    print(f"{what}: the {len(expected)} files of git")


def use(artefact: Path, requirements: list[str], commands: str, folder: Path) -> None:
    """Install an artefact into an empty environment in `folder`, and run the commands there."""

    def run(program: str, *words: str) -> None:
        subprocess.run([program, *words], cwd=folder, check=True)

    run(sys.executable, "-m", "venv", "env")
    for wanted in (requirements, [str(artefact)]):
        run("env/bin/python", "-m", "pip", "install", "-q", *wanted)
    run_lines(commands, folder)


def wheel_of(sdist: Path, folder: Path) -> Path:
    """Build the wheel of an sdist in `folder`."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "built", str(sdist)]
    subprocess.run(command, cwd=folder, check=True)
    (wheel,) = (folder / "built").glob("*.whl")
    return wheel


def use_without_torch(artefact: Path, folder: Path) -> None:
    """Install an artefact without torch, compile every file, and run the commands that need none."""

    def python(*words: str) -> None:
        subprocess.run(["env/bin/python", *words], cwd=folder, check=True)

    subprocess.run([sys.executable, "-m", "venv", "env"], cwd=folder, check=True)
    python("-m", "pip", "install", "-q", "--no-deps", str(artefact))
    (installed,) = folder.glob("env/lib/python*/site-packages")
    (metadata,) = installed.glob("zerokl-*.dist-info/METADATA")
    required = email.message_from_string(metadata.read_text()).get_all("Requires-Dist")
    python("-m", "pip", "install", "-q", *needed_but_torch(required))
    python("-W", "error", "-m", "compileall", "-q", "-f", str((installed / "zerokl").relative_to(folder)))
    run_lines(COMMANDS_WITHOUT_TORCH.replace("LOG", str(ROOT / "tests/audit/log_samples/trl.jsonl")), folder)


def needed_but_torch(required: Sequence[str]) -> list[str]:
    """The requirements of no extra, less torch."""
    return [r for r in required if "extra ==" not in r and not r.startswith("torch>")]


def run_lines(commands: str, folder: Path) -> None:
    """Run commands of the environment in `folder`, a line each."""
    for line in commands.strip().splitlines():
        print(f"$ {line}", flush=True)
        program, *words = line.split()
        subprocess.run([f"env/bin/{program}", *words], cwd=folder, check=True)


def use_audit(wheel: Path, folder: Path) -> None:
    """Install zerokl-audit beside zerokl, and then in its place, in the environment of `use`."""
    pip = [folder / "env/bin/python", "-m", "pip"]
    install = [*pip, "install", "-q", "--no-deps", "--force-reinstall", wheel]
    subprocess.run(install, cwd=folder, check=True)
    run_lines(BESIDE_COMMANDS, folder)
    subprocess.run([*pip, "uninstall", "-q", "-y", "zerokl"], cwd=folder, check=True)
    subprocess.run(install, cwd=folder, check=True)
    run_lines(ALONE_COMMANDS, folder)


def main(folder: Path, *requirements: str) -> None:
    """Check the wheel and the sdist in `folder`."""
    (wheel,), (sdist,) = folder.glob("zerokl-*.whl"), folder.glob("*.tar.gz")
    (audit,) = folder.glob("zerokl_audit-*.whl")
    expected = tracked()
    compare(expected, wheel_files(wheel), wheel.name, whole=True)
    compare(expected, sdist_files(sdist), sdist.name, whole=False)
    python = "Python " + ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):  # noqa: UP036 - `make package` runs this file with zerokl-audit's Pythons
        print(f"{python}: zerokl is for Python 3.11 and later; zerokl-audit is checked with it")
        return
    why = fault(pip_of(sys.executable), requirements or ["torch"])
    if why:
        print(f"{python}: {' '.join(requirements)}: {why}; what needs no torch is used", flush=True)
    if why:
        for artefact in (wheel, sdist):
            with tempfile.TemporaryDirectory() as work:
                use_without_torch(artefact.resolve(), Path(work))
        return
    with tempfile.TemporaryDirectory() as work:
        use(wheel.resolve(), list(requirements), WHEEL_COMMANDS, Path(work))
        use_audit(audit.resolve(), Path(work))
        # What pip installs of an sdist is this wheel. With the same files it works as the other one does.
        compare(expected, wheel_files(wheel_of(sdist.resolve(), Path(work))), "its wheel", whole=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
