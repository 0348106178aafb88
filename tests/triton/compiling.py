"""Scripts that compile, run outside of this process: Triton's interpreter and its compiler exclude each other.

Each runs with the installed Triton and with those in the folders of OTHER_TRITONS (`make test-triton` names one: the Triton that torch
2.13 for CUDA comes with, and so vLLM 0.32 on a GPU). All of them at once, as a compiler keeps one core busy.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

INSTALLED = "installed"
TRITONS = [INSTALLED, *filter(None, os.environ.get("OTHER_TRITONS", "").split(os.pathsep))]


def reports(script: str) -> dict[str, Any]:
    """What a script of this folder prints last, as JSON, by Triton."""
    running = {triton: _start(script, triton) for triton in TRITONS}
    found = {}
    for triton, process in running.items():
        out, err = process.communicate()
        assert process.returncode == 0, f"{triton}: {err[-4000:]}"
        found[triton] = json.loads(out.splitlines()[-1])
    return found


def _start(script: str, triton: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folders = [*([] if triton == INSTALLED else [str(Path(triton).resolve())]), str(Path(__file__).parents[2])]  # the tests' own modules
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    command = [sys.executable, str(Path(__file__).parent / script)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
