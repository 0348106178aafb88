"""benchmarks/device.sh beside vLLM's Python files works on a machine that has no vLLM.

Here its comparison is interpreted, in a process of its own.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import zerokl

SCRIPT = """
import json, sys
from tests.triton import interpreter
interpreter.patch()
from zerokl.benchmarks.machine import Machine
from zerokl.benchmarks.peers import vllm_equality
from zerokl.kernels import tiles
rows = vllm_equality(Machine("cpu", small=True))
if sys.argv[1] == "control":
    tiles._16_BIT = tiles._32_BIT = 16
    rows = [next(row for row in rows if row["unequal"] > 0)]
print(json.dumps(list(rows)))
"""


@pytest.fixture
def rows(tmp_path: Path):
    """rows(argument) gives the rows of vllm_equality where only vLLM's kernels and its version exist."""
    (installed,) = find_spec("vllm").submodule_search_locations
    for name in (
        "_version.py",
        "model_executor/determinism",
        "v1/attention/ops/triton_unified_attention.py",
        "v1/attention/ops/triton_attention_helpers.py",
    ):
        link = tmp_path / "vllm" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(installed) / name)
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('read this file, do not run it')\n")

    def run(argument: str) -> list[dict]:
        root = Path(zerokl.__file__).parent
        (tmp_path / "zerokl").symlink_to(root)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}",
            "TRITON_F32_DEFAULT": "ieee",
        }
        command = [sys.executable, "-c", SCRIPT, argument]
        process = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr[-4000:]
        return json.loads(process.stdout.splitlines()[-1])

    return run


def test_our_kernels_have_the_bits_of_vllms_files(rows):
    compared = rows("")
    assert [row for row in compared if row.get("unequal") != 0] == []
    assert len(compared) == 3 + 3 + 1 + 3
    assert all(row["what"].startswith("vLLM ") for row in compared)


def test_control_other_tiles_are_found(rows):
    """Nothing is computed after the first row that shows it."""
    assert len(rows("control")) == 1
