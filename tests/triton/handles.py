"""Prints, as JSON, whether `launch` hands every binary over as Triton itself would.

No GPU takes part: benchmarks/host_cost.py has a driver that launches nothing. Run without TRITON_INTERPRET.
"""

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from zerokl.benchmarks.host_cost import Driver, Forgetful, one_pass, pretend
from zerokl.kernels import launch
from zerokl.kernels.launch import Launch, recorded_launches
from zerokl.kernels.tiles import tiles_of_target
from zerokl.verify.binaries import compile_launch

# Few of each, so that kinds of launches recur.
DTYPES = (torch.bfloat16, torch.int64)
NUMBERS = (1, 2, 16, 2**31)
LAUNCHES = 1000
Call = tuple[Any, ...]


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["z_ptr"])
def scaled(x_ptr, y_ptr, z_ptr, n, m, scale, FLAG: tl.constexpr, TILE: tl.constexpr):
    cols = tl.arange(0, TILE)
    x = tl.load(x_ptr + cols * m, mask=cols < n)
    y = tl.load(y_ptr + cols, mask=cols < n)
    tl.store(z_ptr + cols, x * scale + y if FLAG else x * scale, mask=cols < n)


def drawn(draw: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and options of a launch of `scaled`."""

    dtype = draw.choice(DTYPES)
    tensors = [torch.zeros(2000, dtype=dtype)[draw.randint(0, 1) :] for _ in range(2)]
    args = (*tensors, torch.zeros(2000), draw.choice((16, 17)), draw.choice(NUMBERS), draw.random())
    return args, {"FLAG": draw.random() < 0.5, "TILE": 1024, "num_warps": draw.choice((1, 4))}


def call_of(driver: Driver, run: Callable[[], object]) -> Call:
    """What the one launch of `run` hands over: grid, stream, binary, its metadata, and all arguments.

    A tensor is given by its address. What hooks would get is left out.
    """
    driver.calls.clear()
    run()
    (call,) = driver.calls
    plain = (x for x in call if type(x).__name__ not in ("LazyDict", "HookChain"))
    return tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in plain)


def unequal_launches(driver: Driver, n: int) -> int:
    """How many of n random launches are other ones through `launch` than through Triton."""
    draw, unequal = random.Random(0), 0
    launch._handles = {}
    for _ in range(n):
        grid = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3)))
        args, options = drawn(draw)
        ours = call_of(driver, lambda g=grid, a=args, o=options: launch.launch(scaled, g, *a, **o))
        pinned = options | {"enable_fp_fusion": True}
        by_triton = call_of(driver, lambda g=grid, a=args, o=pinned: scaled[g](*a, **o))
        unequal += ours != by_triton
    return unequal


def binaries_of(driver: Driver, run: Callable[[], object], handles: dict) -> list[Call]:
    """Grid and binary of each launch of `run`, in order."""
    launch._handles = handles
    driver.calls.clear()
    run()
    return [call[:5] for call in driver.calls]


def other_keys(launches: list[Launch], **changed: int) -> int:
    """How many launches have another key in Triton's cache than the same launch that is compiled ahead.

    changed: options of the latter.
    """
    pairs = (
        (kernel[(1,)](*args, **options), compile_launch(kernel, args, options | changed, "sm_90"))
        for kernel, args, options in launches
    )
    return sum(run.hash != ahead.hash for run, ahead in pairs)


def main() -> None:
    driver, report = pretend(keep_calls=True), {}
    report["unequal"] = unequal_launches(driver, LAUNCHES)
    report["kinds"] = len(launch._handles)
    whole, specialised = one_pass(2, [([3] * 8, [7] * 8)] * 8), launch._specialised
    with tiles_of_target("sm_90"):
        by_triton = binaries_of(driver, whole, Forgetful())
        kept: dict = {}
        first, second = (binaries_of(driver, whole, kept) for _ in range(2))
    report |= {"launches": len(second), "kept": len(kept), "same binaries": by_triton == first == second}
    with tiles_of_target("sm_90"), recorded_launches(and_run=True) as launches:
        whole()
    report["other keys"] = other_keys(launches)
    report["control: eight warps"] = other_keys(launches[:1], num_warps=8)
    launch._specialised = lambda x: x.dtype if isinstance(x, torch.Tensor) else specialised(x)
    report["control: alignment left out"] = unequal_launches(driver, LAUNCHES)
    launch._specialised = lambda x: None if type(x) is int else specialised(x)
    report["control: numbers left out"] = unequal_launches(driver, LAUNCHES)
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
