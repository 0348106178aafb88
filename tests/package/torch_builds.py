"""Which build of torch pip would install: one for CPUs, or one that brings CUDA."""

import json
import re
import subprocess
from collections.abc import Callable, Sequence

# What begins the names of the packages that a CUDA build of torch asks for.
OF_CUDA = ("nvidia-", "cuda-")
REMEDY = "name one, such as 'torch --index-url https://download.pytorch.org/whl/cpu'"
# pip of one Python: words -> what it prints. Raises CalledProcessError with its messages.
Pip = Callable[..., str]


def pip_of(python: str) -> Pip:
    """The pip of a Python."""

    def pip(*words: str) -> str:
        command = [python, "-m", "pip", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return pip


def cuda_packages(pip: Pip, requirements: Sequence[str]) -> list[str]:
    """The packages of CUDA that pip would install with the requirements; nothing is installed."""
    report = pip("install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *requirements)
    names = [row["metadata"]["name"].lower() for row in json.loads(report)["install"]]
    return sorted(name for name in names if name.startswith(OF_CUDA))


def fault(pip: Pip, requirements: Sequence[str]) -> str:
    """Why the requirements are not a build of torch for CPUs; empty where they are one."""
    try:
        packages = cuda_packages(pip, requirements)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR: ")]
        return f"pip cannot install it: {lines[0].removeprefix('ERROR: ') if lines else error.stderr.strip()}"
    return f"only a build for CUDA, with {len(packages)} packages of CUDA" if packages else ""


def newest_for_cpus(pip: Pip, lowest: str) -> tuple[str, list[str]]:
    """The newest torch of the index that is a build for CPUs, and why each newer one is not taken.

    lowest: the oldest version that the project allows. Exits with a message where there is none.
    """
    listed = re.search(r"Available versions: (.*)", pip("index", "versions", "torch"))
    passed_over = []
    for version in listed[1].split(", ") if listed else []:
        if _numbers(version) < _numbers(lowest):
            break
        why = fault(pip, [f"torch=={version}"])
        if not why:
            return f"torch=={version}", passed_over
        passed_over.append(f"torch {version}: {why}")
    raise SystemExit("\n".join([*passed_over, f"no torch of the index is a build for CPUs; {REMEDY}"]))


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release; what follows + names the build."""
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0]))
