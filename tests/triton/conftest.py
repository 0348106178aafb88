"""Triton's kernels on a CPU.

`make test-triton` sets TRITON_INTERPRET=1. It must be in the environment before Triton is imported.
"""

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from zerokl.kernels.backend import INTERPRETED
from zerokl.kernels.launch import Launch, launch

from tests.gpu.descriptors import broken_rules

FOLDER = Path(__file__).parent
# Without the interpreter (`make test`) these tests are not even collected.
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


if INTERPRETED:
    from tests.triton import interpreter

    interpreter.patch()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With --quick the interpreter leaves out fp16, whose kernels are those of bf16 but for the rounding."""
    for item in items:
        params = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if item.path.is_relative_to(FOLDER) and any(value is torch.float16 for value in params):
            item.add_marker("full")


@pytest.fixture(autouse=INTERPRETED)
def descriptors_that_tma_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch of a test hands over descriptors that TMA on a GPU would take."""
    from tests.triton.launchers import LAUNCHERS

    def checked(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        broken = broken_rules([Launch(kernel, args, options)])
        assert not broken, broken
        launch(kernel, grid, *args, **options)

    for module in LAUNCHERS:
        monkeypatch.setattr(module, "launch", checked)


@pytest.fixture(scope="session")
def batch_invariant() -> types.ModuleType:
    """vLLM's own module of batch-invariant Triton kernels, interpreted."""
    from tests.triton.vllm_kernels import batch_invariant_module

    return batch_invariant_module()
