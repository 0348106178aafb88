"""A guard of this process's state, for code of the user's that has to run beside the trainer.

Such code may change what the trainer computes with: torch's default dtype, its grad mode, the threads. The
guard puts back what was changed, and names it.
"""

import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .users_code import call_user

T = TypeVar("T")


@dataclass(frozen=True)
class _State:
    """One piece of state: what it is called, how it is read and how it is put back."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], Any]
    random: bool = False  # a generator's


def guarded(what: str, function: Callable[..., T], /, *args: Any, may_draw: bool = False) -> T:
    """function(*args), with this process's state put back to what it was.

    what: the function, as the error names it. may_draw: a generator's state is put back without a word, as
    nothing here reads it. Raises ValueError for every exception (see call_user), and for a change.
    """
    states = [*_PYTHON, *_torch_states()]
    before = [state.read() for state in states]
    try:
        result = call_user(what, "", function, *args)
    finally:
        changed = _put_back(states, before)
    named = [text for state, text in changed if not (state.random and may_draw)]
    if named:
        raise ValueError(
            f"{what} changed {', '.join(named)}; the run depends on it: put it back before returning"
        )
    return result


def _put_back(states: list[_State], before: list[Any]) -> list[tuple[_State, str]]:
    """Restore what was changed. Returns each changed state, with words for it."""
    changed = []
    for state, value in zip(states, before, strict=True):
        if not _equal(now := state.read(), value):
            state.restore(value)
            changed.append((state, state.name if state.random else f"{state.name} ({value} -> {now})"))
    return changed


def _equal(a: Any, b: Any) -> bool:
    if hasattr(a, "numel"):  # a generator's state as a tensor
        return bool((a == b).all())
    if isinstance(a, tuple) and len(a) == len(b):
        return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def _signal_handler() -> Any:
    return signal.getsignal(signal.SIGINT)


def _handle_interrupt(handler: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def _collect_garbage(on: bool) -> None:
    gc.enable() if on else gc.disable()


def _open_stdout(_: bool) -> None:
    sys.stdout = open(os.devnull, "w")  # what was closed cannot be opened again


_PYTHON = [
    _State("the current directory", os.getcwd, os.chdir),
    _State("the handler of Ctrl-C", _signal_handler, _handle_interrupt),
    _State("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    _State("whether garbage is collected", gc.isenabled, _collect_garbage),
    _State("whether stdout is open", lambda: not sys.stdout.closed, _open_stdout),
    _State("stdout", lambda: sys.stdout, lambda stream: setattr(sys, "stdout", stream)),
    _State("stderr", lambda: sys.stderr, lambda stream: setattr(sys, "stderr", stream)),
    _State("NumPy's handling of errors", np.geterr, lambda errors: np.seterr(**errors)),
    _State("Python's random numbers", random.getstate, random.setstate, random=True),
    _State("NumPy's random numbers", np.random.get_state, np.random.set_state, random=True),
]


def _torch_states() -> list[_State]:
    """The state of torch; none where this process has not loaded it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []

    def set_default_device(device: Any) -> None:
        torch.set_default_device(None if device.type == "cpu" else device)

    def keeps_subnormals() -> bool:
        return bool(torch.tensor(1e-40, dtype=torch.float32, device="cpu") * 1.0 != 0.0)

    def keep_subnormals(keep: bool) -> None:
        torch.set_flush_denormal(not keep)

    def deterministic() -> tuple[bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    def set_deterministic(mode: tuple[bool, bool]) -> None:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])

    precision = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    matmul = torch.backends.cuda.matmul
    states = [
        # A function cannot leave inference mode on, unless it keeps the context; then nothing puts it back.
        _State("torch's inference mode", torch.is_inference_mode_enabled, lambda _: None),
        _State("torch's grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        _State("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
        _State("torch's default device", torch.get_default_device, set_default_device),
        _State("torch's threads", torch.get_num_threads, torch.set_num_threads),
        _State("torch's deterministic algorithms", deterministic, set_deterministic),
        _State("torch's precision of fp32 products", *precision),
        _State("whether torch keeps subnormal numbers", keeps_subnormals, keep_subnormals),
        _attribute("torch.backends.mkldnn", torch.backends.mkldnn, "enabled"),
        _attribute("torch.backends.cuda.matmul", matmul, "allow_bf16_reduced_precision_reduction"),
        _attribute("torch.backends.cuda.matmul", matmul, "allow_fp16_reduced_precision_reduction"),
        *(_autocast(torch, device) for device in ("cpu", "cuda")),
        _State("torch's random numbers", torch.get_rng_state, torch.set_rng_state, random=True),
    ]
    return states + (_cuda_states(torch) if torch.cuda.is_initialized() else [])


def _attribute(where: str, thing: Any, name: str) -> _State:
    return _State(f"{where}.{name}", lambda: getattr(thing, name), lambda value: setattr(thing, name, value))


def _autocast(torch: Any, device: str) -> _State:
    def set_enabled(enabled: bool) -> None:
        torch.set_autocast_enabled(device, enabled)

    return _State(f"torch's autocast on {device}", lambda: torch.is_autocast_enabled(device), set_enabled)


def _cuda_states(torch: Any) -> list[_State]:
    """The device, its stream and its generator."""
    cuda = torch.cuda
    return [
        _State("torch's current GPU", cuda.current_device, cuda.set_device),
        _State("torch's current stream", cuda.current_stream, cuda.set_stream),
        _State("the GPU's random numbers", cuda.get_rng_state, cuda.set_rng_state, random=True),
    ]
