"""Triton's kernels on a CPU.

`make test-triton` sets TRITON_INTERPRET=1. It must be in the environment before Triton is imported.
"""

import types
from typing import Any

import pytest
from zerokl.kernels.backend import INTERPRETED
from zerokl.kernels.launch import Launch, launch

from tests.gpu.descriptors import broken_rules

# Without the interpreter (`make test`) these tests are not even collected.
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


if INTERPRETED:
    from tests.triton import interpreter

    interpreter.patch()


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
