"""Which of an operation's two implementations runs: the device chooses, nobody else.

Triton on CUDA tensors, and on CPU tensors in a process started with TRITON_INTERPRET=1 (the tests: Triton's
interpreter executes the same kernels with numpy); the plain torch reference otherwise, and for fp64, the
judge of accuracy, everywhere. Triton is imported by the kernels' own modules (`*_triton.py`), and they only
when a tensor asks for them: a CPU needs no Triton.
"""

import importlib.util
import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def on_triton(x: torch.Tensor) -> bool:
    """Whether operations on x run their Triton kernels."""
    return (x.is_cuda or INTERPRETED) and x.dtype != torch.float64


def find_device(name: str) -> torch.device:
    """The device called "cpu" or "cuda"; "auto" is CUDA where there is a GPU.

    Raises ValueError when it cannot be used.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f'device ("{name}") must be auto, cpu or cuda')
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f'device ("{name}"): torch finds no CUDA GPU here; set device = "cpu" or "auto"')
    if not importlib.util.find_spec("triton"):
        raise ValueError(f'device ("{name}"): a GPU needs Triton; pip install triton, or set device = "cpu"')
    return torch.device("cuda", torch.cuda.current_device())
