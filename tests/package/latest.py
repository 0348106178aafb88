"""What `make test-latest` does: the newest of everything that the package index has, and what breaks with it.

usage: latest.py FOLDER TESTS [REQUIREMENT ...]

FOLDER gets the environment. TESTS are folders below tests/ with commas between them. The requirements are
what pip is given for torch; without any, the newest torch that is a build for CPUs is taken. A build for CUDA
is refused. The end is a table; where something breaks, the exit code is 1.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent))
from torch_builds import REMEDY, Pip, fault, newest_for_cpus, pip_of

ROOT = Path(__file__).resolve().parents[2]
# The tests that `make test` runs.
MARKERS = re.search(r'-m "(not \([^"]+)"', (ROOT / "Makefile").read_text())[1]
COMMANDS = (
    "train --preset demo --run_dir demo --steps 3",
    "verify run demo",
    "report demo",
    "sample demo/base --prompt 3+14= --n 2",
)
# A warning that a name will go is written to the file of this variable (see the hook at the end).
WARNINGS = "ZEROKL_LATEST_WARNINGS"


def requirement(text: str) -> tuple[str, str]:
    """(name as an index spells it, range) of a requirement such as `torch>=2.11`."""
    name, rest = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*)", text).groups()
    return name.lower().replace("_", "-"), rest.strip()


def asked_for() -> dict[str, str]:
    """What the project and its tests ask for: name -> range."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return dict(map(requirement, project["dependencies"] + project["optional-dependencies"]["test"]))


def pinned() -> dict[str, str]:
    """What the Makefile and requirements-vllm.txt give one version: name -> version."""
    text = (ROOT / "Makefile").read_text() + (ROOT / "requirements-vllm.txt").read_text()
    pins = re.findall(r"(?<![\w.-])([A-Za-z][\w.-]*)==(\d[\w.]*\w)", text)
    return {name.lower().replace("_", "-"): version for name, version in pins}


def install(folder: Path, torch: Sequence[str]) -> Pip:
    """Make the environment with this torch and the newest of all else."""
    pip = pip_of(str(folder / "bin" / "python"))
    pip("install", "--quiet", "--upgrade", *torch)
    versions = {row["name"]: row["version"] for row in json.loads(pip("list", "--format", "json"))}
    kept = folder / "kept.txt"
    kept.write_text(f"torch=={versions['torch']}\n")
    newest = ("install", "--quiet", "--upgrade", "--upgrade-strategy", "eager", "--constraint", str(kept))
    pip(*newest, "--editable", f"{ROOT}[test]", "triton")
    return pip


def newest(pip: Pip, name: str) -> str:
    """The newest version of a package for this Python, or why there is none."""
    try:
        return re.match(r"\S+ \((.+)\)", pip("index", "versions", name))[1]
    except subprocess.CalledProcessError:
        return "none for this Python"


def version_rows(pip: Pip) -> list[tuple[str, ...]]:
    """(package, what the project asks for, what it pins, what was taken, the newest) of each package."""
    taken = {
        requirement(row["name"])[0]: row["version"] for row in json.loads(pip("list", "--format", "json"))
    }
    behind = {
        requirement(row["name"])[0]: row["latest_version"]
        for row in json.loads(pip("list", "--outdated", "--format", "json"))
    }
    ranges, pins = asked_for(), pinned()
    rows = [("package", "asked for", "pinned", "taken", "newest")]
    for name in sorted(ranges.keys() | pins.keys()):
        latest = behind.get(name, taken[name]) if name in taken else newest(pip, name)
        rows.append((name, ranges.get(name, ""), pins.get(name, ""), taken.get(name, ""), latest))
    return rows


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def outcome(junit: str) -> tuple[str, list[str]]:
    """(counts, the names of the tests that broke) of a JUnit file's text."""
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    broken = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    counts = f"{len(cases) - len(broken) - skipped} passed, {len(broken)} broken, {skipped} skipped"
    return counts, [f"{c.get('classname')}::{c.get('name')}" for c in broken]


def test_row(python: Path, name: str, tests: Path, work: Path) -> tuple[str, str, list[str]]:
    """(name, counts, what broke) of the quick tests of a folder or file."""
    junit = work / f"{name.replace('/', '-')}.xml"
    words = ["-m", "pytest", "-q", "--quick", "-m", MARKERS, "-n", str(os.cpu_count()), "-p", "latest"]
    env = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent),
        "OMP_NUM_THREADS": "1",
        WARNINGS: str(work / "warnings"),
    }
    command = [python, *words, f"--junitxml={junit}", tests]
    process = subprocess.run(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE)
    if not junit.exists():
        return name, "did not run", [process.stdout.strip()[-2000:]]
    counts, broken = outcome(junit.read_text())
    if process.returncode and not broken:
        broken = [f"pytest ended with {process.returncode}: {process.stdout.strip()[-2000:]}"]
    if broken:
        print(process.stdout)
    return name, counts, broken


def command_rows(python: Path, work: Path) -> list[tuple[str, str, list[str]]]:
    """A row for each command, which is run in `work`. The first that fails ends them."""
    rows: list[tuple[str, str, list[str]]] = []
    for command in COMMANDS:
        words = [python, "-W", "default::DeprecationWarning:zerokl", "-m", "zerokl", *command.split()]
        process = subprocess.run(words, cwd=work, capture_output=True, text=True)
        lines = (process.stdout + process.stderr).strip().splitlines() or ["prints nothing"]
        broken = [] if process.returncode == 0 else lines[-5:]
        rows.append((f"zerokl {command}", lines[-1][:90], broken))
        if broken:
            break
    return rows


def main(folder: Path, tests: Sequence[str], torch: Sequence[str]) -> None:
    """Make the environment, say what is in it, run the tests, and end with what breaks."""
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = pip_of(str(python))
    passed_over = []
    if not torch:
        chosen, passed_over = newest_for_cpus(pip, asked_for()["torch"].lstrip(">="))
        torch = [chosen]
    elif why := fault(pip, torch):
        sys.exit(f"{' '.join(torch)}: {why}; {REMEDY}")
    install(folder.absolute(), torch)
    print(table(version_rows(pip)), *passed_over, "", sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        rows = [test_row(python, name, ROOT / "tests" / name, work) for name in tests]
        rows += command_rows(python, work)
        warned = work / "warnings"
        warnings = sorted(set(warned.read_text().splitlines())) if warned.exists() else []
    print(
        "", table([("what", "result", "breaks")] + [(n, r, "yes" if b else "") for n, r, b in rows]), sep="\n"
    )
    print(*(f"will go: {line}" for line in warnings), sep="\n")
    faults = [f"{name}: {line}" for name, _, broken in rows for line in broken]
    sys.exit("\n".join(faults) if faults else 0)


def pytest_warning_recorded(warning_message, location):
    """For pytest, which loads this file as a plugin: write down what will go in a later release."""
    text = str(warning_message.message).split("\n")[0]
    if (
        issubclass(warning_message.category, (DeprecationWarning, FutureWarning))
        or "deprecat" in text.lower()
    ):
        with open(os.environ[WARNINGS], "a") as file:
            place = f"{warning_message.filename}:{warning_message.lineno}"
            file.write(f"{warning_message.category.__name__} at {place}: {text[:200]}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
