"""The environment of a run: it may explain that the same run gives other bits elsewhere.

The environment is recorded and compared, and never chained.
"""

import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from ..files.inputs import read_bytes, read_text
from ..files.installed import installed_version

# The folder of the package zerokl, the parent of verify/.
PACKAGE_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("numpy", "safetensors", "transformers", "tokenizers", "triton", "vllm")
# Keys that decide no bit, by the law. Where only these keys differ, a difference in bits is a fault of zerokl
# or of the machine.
LAWFUL = ("process.",)
# Keys that decide bits by more than the settings, of any process that computes.
DECIDES = ("code", "torch", "triton", "cpu", "cpu capability", "mkl", "onednn", "gpu", "cuda")


def code_hash(root: Path) -> str:
    """SHA-256 over the name and the content of every source file of the package, in Python and C++.

    Tests, and environments that lie beside the package, do not count.
    """
    h = hashlib.sha256()
    for folder in (root, *(root / name for name in ("kernels", "verify", "model", "engine", "cli"))):
        files = folder.glob("*") if folder == root else folder.rglob("*")
        for file in sorted(f for f in files if f.suffix in (".py", ".cpp", ".h")):
            h.update(f"{file.relative_to(root)}\n".encode() + read_bytes(file) + b"\0")
    return h.hexdigest()


def environment(root: Path, device: torch.device, process: dict[str, Any]) -> dict[str, Any]:
    """The environment as a flat dictionary, ready for JSON.

    `root` is the package's folder. `process` tells how this process is set up (threads, workers, ranks).
    """
    values: dict[str, Any] = {
        "code": code_hash(root),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: installed_version(name) for name in _PACKAGES},
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
        "device": str(device),
    }
    if device.type == "cuda":
        values |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "driver": _driver()}
    for name in sorted(os.environ):
        if name.startswith(("OMP_", "MKL_", "ONEDNN_", "ATEN_", "CUBLAS_", "NVIDIA_TF32", "TRITON_", "KMP_")):
            values[f"variable {name}"] = os.environ[name]
    return values | {f"process.{name}": value for name, value in process.items()}


def cpu_name() -> str:
    """The name of the CPU."""
    try:
        lines = read_text("/proc/cpuinfo").splitlines()
    except OSError:
        return f"{platform.processor()} {sys.platform}"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _driver() -> str | None:
    try:
        return read_text("/proc/driver/nvidia/version").splitlines()[0]
    except (OSError, IndexError):
        return None
