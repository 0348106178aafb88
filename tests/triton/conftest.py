"""Triton's kernels on a CPU.

`make test-triton` sets TRITON_INTERPRET=1. It must be in the environment before Triton is imported.
"""

import types

import pytest
from zerokl.kernels.backend import INTERPRETED

# Without the interpreter (`make test`) these tests are not even collected.
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


if INTERPRETED:
    from tests.triton import interpreter

    interpreter.patch()


@pytest.fixture(scope="session")
def batch_invariant() -> types.ModuleType:
    """vLLM's own module of batch-invariant Triton kernels, interpreted."""
    from tests.triton.vllm_kernels import batch_invariant_module

    return batch_invariant_module()
