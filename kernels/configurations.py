"""Every Triton kernel with every configuration that is launched at the shapes of the supported models, for ahead-of-time checks.

Each `*_triton.py` has CASES: name -> a function that calls its launchers with meta tensors. Recording them (launch.recorded) gives
the very launches, constants and options of a real run, so this list cannot drift from the code that launches. One case for each
binary is enough: Triton compiles once for all integers that are multiples of 16, say. Every launch of all cases has its own name.
A new module of kernels adds its name to MODULES.
"""

from collections.abc import Iterator
from importlib import import_module

from .launch import Launch, recorded
from .tiles import recording

MODULES = (
    "columns_triton", "rms_norm_triton", "matmul_triton", "attention_triton", "attention_bwd_triton", "silu_mul_triton", "rope_triton",
    "embedding_triton", "logprob_triton",
)  # fmt: skip


def configurations(target: str) -> Iterator[tuple[str, Launch]]:
    """Name and launch of each on a target. The name is the case's, then the kernel's. Triton is imported here."""
    for module in MODULES:
        for case, run in import_module(f".{module}", __package__).CASES.items():
            with recording(target), recorded() as launches:
                run()
            assert launches, f"{module}: case {case!r} launched nothing"
            for launch in launches:
                yield f"{case.replace('torch.', '')}: {launch.kernel.__name__.lstrip('_')}", launch
