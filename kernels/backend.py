"""Which of an operation's implementations runs. The device chooses, nobody else.

- Triton runs on CUDA tensors. In a process that was started with TRITON_INTERPRET=1 it runs on CPU tensors
  too: the tests use this, and Triton's interpreter executes the same kernels with numpy. Tensors of the meta
  device, which have no memory, take the same way: their launches can be recorded (launch.recorded_launches).
- The plain torch reference runs on all other tensors, and on every device for fp64, the judge of accuracy.
- Loops in C++ (cpp/) take the place of many references on a CPU. They have the references' bits, so it is no
  choice of bits whether they run.

Only the modules `*_triton.py` import Triton, and they are imported only when a tensor needs them. So a CPU
needs no Triton.
"""

import importlib.util
import os

import torch

from .cpp import library

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def on_triton(x: torch.Tensor) -> bool:
    """Whether operations on x run the Triton kernels."""
    return (x.is_cuda or x.is_meta or INTERPRETED) and x.dtype != torch.float64


def check_on_cpu(name: str, x: torch.Tensor) -> None:
    """Raise ValueError where an operation that has no Triton kernel is given a tensor of a GPU."""
    if on_triton(x):
        raise ValueError(f"{name}: it has no kernel for a GPU; give it tensors of a CPU")


def on_cpp(x: torch.Tensor) -> bool:
    """Whether operations on x may run the loops of cpp/ in place of the reference.

    fp64 is the judge's, and fp16 has no loops. They run on one thread. So a process that has several keeps
    torch's operations, which share the work.
    """
    return (
        not INTERPRETED
        and x.dtype not in (torch.float64, torch.float16)
        and x.device.type == "cpu"
        and torch.get_num_threads() == 1
        and library() is not None
    )


def find_device(name: str) -> torch.device:
    """The device called "cpu" or "cuda"; "auto" is CUDA where there is a GPU, and the CPU elsewhere.

    Raises ValueError for another name, or when the device cannot be used.
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
