"""Prints what test_binaries.py judges, as JSON. Run without TRITON_INTERPRET."""

import json
import sys

import torch
import triton
import triton.language as tl
from zerokl.engine.binaries import build, check
from zerokl.kernels.launch import Launch
from zerokl.verify.binaries import TARGETS, Binary, compile_launch, faults, float_program, inspect


@triton.jit
def atomic_sum(x_ptr, y_ptr, N: tl.constexpr):
    tl.atomic_add(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N))))


@triton.jit
def squares(x_ptr, y_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(y_ptr, tl.sum(x * x + x))


def unequal(a: Launch, b: Launch) -> int:
    """Lines in which the float programs of two launches differ."""
    left, right = (float_program(compile_launch(*launch, "sm_90").asm["ptx"]) for launch in (a, b))
    return sum(x != y for x, y in zip(left, right, strict=False)) + abs(len(left) - len(right))


def main() -> None:
    binaries = build(tuple(TARGETS))
    x = torch.empty(1024, device="meta")
    options = {"N": 1024, "num_warps": 4, "enable_fp_fusion": True}
    base = Launch(squares, (x, x), options)
    binary = Binary("kernel", "sm_90", 32, 0, 0, 0)
    report = {
        "binaries": len(binaries),
        "faults": check(binaries)[0],
        "atomic": faults((inspect("atomic", t, compile_launch(atomic_sum, (x, x), options, t)) for t in TARGETS), None),
        "spill": faults([binary._replace(local_bytes=16)], None),
        "regression": faults([binary], {"kernel": {"sm_90": [31, 0]}}),
        "same": unequal(base, base._replace(options=dict(options))),
        "unfused": unequal(base, base._replace(options={**options, "enable_fp_fusion": False})),
        "warps": unequal(base, base._replace(options={**options, "num_warps": 8})),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
