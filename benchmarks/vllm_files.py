"""vLLM's Triton kernels, from its Python files alone.

vLLM need not be installed, and nothing that it needs but torch and triton. The files of the kernels are
vLLM's, unchanged. They import other parts of vLLM (the platform, the logger, the environment). This file puts
stand-ins for those parts into sys.modules. So this process cannot use an installed vLLM afterwards.
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
    """Modules of vLLM, and its version."""

    batch_invariant: Any
    unified_attention: Any
    version: str


class _Capability(NamedTuple):
    major: int
    minor: int


class _KVQuantMode(enum.IntEnum):
    """The part of vllm/v1/kv_cache_interface.py that the attention imports."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


@cache
def vllm_kernels(device: torch.device) -> VllmKernels | None:
    """vLLM's kernels; None where no folder vllm/ is on the path.

    Where there is such a folder, every error is raised: files that are missing are not equal.
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
    """Make a package importable without running its __init__.py."""
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(folder)]


def _stand_ins(device: torch.device) -> dict[str, dict[str, Any]]:
    """Module name -> content, for each part of vLLM that the kernels import."""
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
