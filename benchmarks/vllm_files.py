"""vLLM's Triton kernels from its Python files alone: no installation, and nothing that a vLLM needs beside
torch and triton.

The files of the kernels are vLLM's, unchanged. What they import of the rest of vLLM (the platform, the
logger, the environment) is stood in for, in sys.modules of this process: a vLLM that is installed cannot be
used in it afterwards.
"""

import enum
import logging
import re
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch


class VllmKernels(NamedTuple):
    """Modules of vLLM, and the version they are of."""

    batch_invariant: Any
    unified_attention: Any
    version: str


class _Capability(NamedTuple):
    major: int
    minor: int


class _KVQuantMode(enum.IntEnum):
    """Of vllm/v1/kv_cache_interface.py, what the attention asks for."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


@cache
def vllm_kernels(device: torch.device) -> VllmKernels | None:
    """None where there is no folder vllm/ on the path.

    Raises what goes wrong where there is one: missing files are not equal files.
    """
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0])
    version = re.search(r"__version__ = (?:version = )?['\"]([^'\"]+)", (folder / "_version.py").read_text())
    if version is None:
        raise ValueError(f"vllm: {folder / '_version.py'} names no version")
    for name in (
        "",
        "model_executor",
        "model_executor.determinism",
        "v1",
        "v1.attention",
        "v1.attention.ops",
    ):
        _package(".".join(filter(None, ("vllm", name))), folder.joinpath(*name.split(".")))
    for name, content in _stand_ins(device).items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    modules = (
        "vllm.model_executor.determinism.batch_invariant",
        "vllm.v1.attention.ops.triton_unified_attention",
    )
    return VllmKernels(*map(import_module, modules), version[1])


def _package(name: str, folder: Path) -> None:
    """A package whose __init__.py is not run."""
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(folder)]


def _stand_ins(device: torch.device) -> dict[str, dict[str, Any]]:
    import triton
    import triton.language as tl

    gpu = device.type == "cuda"
    capability = _Capability(*torch.cuda.get_device_capability()) if gpu else _Capability(9, 0)
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        is_cuda_alike=lambda: True,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        dispatch_key="CUDA",
        fp8_dtype=lambda: torch.float8_e4m3fn,
        get_device_capability=lambda: capability,
        is_device_capability_family=lambda family: capability.major == family // 10,
    )
    units = torch.cuda.get_device_properties(0).multi_processor_count if gpu else 132
    return {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": True},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform, "__path__": []},
        "vllm.platforms.interface": {"DeviceCapability": _Capability},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils": {"__path__": []},
        "vllm.utils.mem_utils": {"get_max_shared_memory_bytes": lambda *_: 228 << 10},
        "vllm.utils.nccl": {"pin_nccl_env": lambda *_, **__: None},
        "vllm.utils.platform_utils": {"num_compute_units": lambda *_: units},
        "vllm.utils.torch_utils": {"is_torch_equal_or_newer": lambda *_: True},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": _KVQuantMode},
    }
