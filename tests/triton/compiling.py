"""Runs scripts that compile in other processes: Triton's interpreter and its compiler exclude each other.

A script runs with the installed Triton, and with the Triton in each folder of OTHER_TRITONS. `make
test-triton` names one such folder. It holds the Triton that torch 2.13 for CUDA comes with, and so vLLM 0.32
on a GPU. The float comparison runs with those of FLOAT_TRITONS too: that of torch 2.11, and that of torch
2.14, which vLLM 0.33 has. All processes run at once, because a compiler keeps one core busy. To save time,
each compiles for one target: the installed Triton for sm_80, and the others for Hopper. With ALL_TARGETS
(`make test-proofs`) the last of OTHER_TRITONS compiles for all targets, as `zerokl verify binaries` does.
With ONE_BINARY_IN=n (`make test-triton CASES=--diagonal`) each builds one binary in n of every kernel, and
the launches of each model are recorded in one dtype.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zerokl.kernels.compiled_cases import configurations
from zerokl.kernels.launch import Launch

INSTALLED = "installed"
TRITONS = [INSTALLED, *filter(None, os.environ.get("OTHER_TRITONS", "").split(os.pathsep))]
FLOAT_TRITONS = [*TRITONS, *filter(None, os.environ.get("FLOAT_TRITONS", "").split(os.pathsep))]

ONE_IN = int(os.environ.get("ONE_BINARY_IN", "1"))


def some_configurations(target: str) -> list[tuple[str, Launch]]:
    """Of each kernel's configurations one in ONE_IN, and the first."""
    by_kernel: dict[str, list[tuple[str, Launch]]] = defaultdict(list)
    for name, launch in configurations(target):
        by_kernel[name.rsplit(": ", 1)[1]].append((name, launch))
    return [configuration for same in by_kernel.values() for configuration in same[::ONE_IN]]


def targets(triton: str, all_targets: Iterable[str]) -> list[str]:
    """The targets that a Triton compiles for."""
    if triton == TRITONS[-1] and "ALL_TARGETS" in os.environ:
        return list(all_targets)
    chosen = "sm_80" if triton == INSTALLED and len(TRITONS) > 1 else "sm_90"
    return [target for target in all_targets if target == chosen]


def reports(script: str, all_targets: Iterable[str], tritons: Sequence[str] = TRITONS) -> dict[str, Any]:
    """The report of a script of this folder by Triton: the last line that the script prints, as JSON."""
    running = {triton: _start(script, triton, targets(triton, all_targets)) for triton in tritons}
    by_triton = {}
    for triton, process in running.items():
        out, err = process.communicate()
        assert process.returncode == 0, f"{triton}: {err[-4000:]}"
        by_triton[triton] = json.loads(out.splitlines()[-1])
    return by_triton


def _start(script: str, triton: str, targets: list[str]) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # The last folder holds the modules of the tests.
    folders = [] if triton == INSTALLED else [str(Path(triton).resolve())]
    folders.append(str(Path(__file__).parents[2]))
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    command = [sys.executable, str(Path(__file__).parent / script), *targets]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
