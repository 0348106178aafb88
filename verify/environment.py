"""The environment of a run:

what may explain that the same run gives other bits elsewhere. Recorded, compared, never chained.
"""

import hashlib
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

# The folder of the package zerokl: the parent of this floor.
PACKAGE_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("numpy", "safetensors", "transformers", "tokenizers", "triton", "vllm")
# What the law says decides no bit: where only these differ, a difference is a fault of zerokl or of the
# machine.
LAWFUL = ("process.",)


def code_hash(root: Path) -> str:
    """SHA-256 over name and content of every .py file of the package; those of tests and of environments
    beside it are none.
    """
    h = hashlib.sha256()
    for folder in (root, *(root / name for name in ("kernels", "verify", "model", "engine"))):
        for file in sorted(folder.glob("*.py") if folder == root else folder.rglob("*.py")):
            h.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes() + b"\0")
    return h.hexdigest()


def environment(root: Path, device: torch.device, process: dict[str, Any]) -> dict[str, Any]:
    """Flat and ready for JSON.

    `root` is the package's folder; `process` how this process is set up (threads, workers, ranks).
    """
    found: dict[str, Any] = {
        "code": code_hash(root),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in _PACKAGES},
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
        "device": str(device),
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "driver": _driver()}
    for name in sorted(os.environ):
        if name.startswith(("OMP_", "MKL_", "ONEDNN_", "ATEN_", "CUBLAS_", "NVIDIA_TF32", "TRITON_", "KMP_")):
            found[f"variable {name}"] = os.environ[name]
    return found | {f"process.{name}": value for name, value in process.items()}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.processor()} {sys.platform}"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _driver() -> str | None:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
