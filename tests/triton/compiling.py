"""Scripts that compile, run outside of this process: Triton's interpreter and its compiler exclude each
other.

Each runs with the installed Triton and with those in the folders of OTHER_TRITONS (`make test-triton` names
one: the Triton that torch 2.13 for CUDA comes with, and so vLLM 0.32 on a GPU). All of them at once, as a
compiler keeps one core busy; all targets with the last one, to save time, and Hopper with the others.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INSTALLED = "installed"
TRITONS = [INSTALLED, *filter(None, os.environ.get("OTHER_TRITONS", "").split(os.pathsep))]


def targets(triton: str, every: Iterable[str]) -> list[str]:
    """Of the targets of a script those it is to compile for with a Triton."""
    return [target for target in every if triton == TRITONS[-1] or target == "sm_90"]


def reports(script: str, every: Iterable[str]) -> dict[str, Any]:
    """What a script of this folder, given targets of `every`, prints last, as JSON, by Triton."""
    running = {triton: _start(script, triton, targets(triton, every)) for triton in TRITONS}
    found = {}
    for triton, process in running.items():
        out, err = process.communicate()
        assert process.returncode == 0, f"{triton}: {err[-4000:]}"
        found[triton] = json.loads(out.splitlines()[-1])
    return found


def _start(script: str, triton: str, targets: list[str]) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folders = [
        *([] if triton == INSTALLED else [str(Path(triton).resolve())]),
        str(Path(__file__).parents[2]),
    ]  # the tests' own modules
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    command = [sys.executable, str(Path(__file__).parent / script), *targets]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
