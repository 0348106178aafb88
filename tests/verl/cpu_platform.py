"""A platform for verl on machines without an accelerator; verl has CUDA's, ROCm's and Ascend's.

VERL_PLATFORM=testcpu and VERL_USE_EXTERNAL_MODULES=tests.verl.cpu_platform choose it. verl imports this
module in each of its processes, so what gloo lacks is added here.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

MODULE = SimpleNamespace(
    empty_cache=lambda: None,
    synchronize=lambda *_: None,
    is_available=lambda: True,
    max_memory_allocated=lambda: 0,
    max_memory_reserved=lambda: 0,
    memory_allocated=lambda: 0,
    memory_reserved=lambda: 0,
    current_device=lambda: "cpu",
    get_device_name=lambda *_: "CPU",
    set_device=lambda *_: None,
    mem_get_info=lambda: (0, 0),
)


@PlatformRegistry.register(platform="testcpu")
class CPUPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "testcpu"
    device_module = MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "TESTCPU_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "testcpu"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def use_gloo() -> None:
    """Let verl average over ranks by gloo, which only adds, and name it once as the backend of a CPU."""
    all_reduce, init_process_group = dist.all_reduce, dist.init_process_group

    def averaging(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **others: Any) -> Any:
        if op != dist.ReduceOp.AVG:
            return all_reduce(tensor, op, group, **others)
        all_reduce(tensor, dist.ReduceOp.SUM, group)
        tensor /= dist.get_world_size(group)
        return None

    def init(backend: str | None = None, **others: Any) -> None:
        init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **others)

    dist.all_reduce, dist.init_process_group = averaging, init


use_gloo()
