"""Which of an operation's two implementations runs: the device chooses, nobody else.

Triton on CUDA tensors, and on CPU tensors in a process started with TRITON_INTERPRET=1 (the tests: Triton's interpreter executes
the same kernels with numpy); the plain torch reference otherwise, and for fp64, the judge of accuracy, everywhere.
Triton is imported by the kernels' own modules (`*_triton.py`), and they only when a tensor asks for them: a CPU needs no Triton.
"""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def on_triton(x: torch.Tensor) -> bool:
    """Whether operations on x run their Triton kernels."""
    return (x.is_cuda or INTERPRETED) and x.dtype != torch.float64
