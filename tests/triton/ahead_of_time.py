"""Prints what test_binaries.py judges, as JSON; given the targets to build every binary for.

Run without TRITON_INTERPRET.
"""

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from zerokl.engine.commands.verify_binaries import build, check
from zerokl.kernels.compiled_cases import configurations
from zerokl.kernels.launch import Launch
from zerokl.verify.binaries import TARGETS, Binary, compile_launch, faults, float_program, inspect

from tests.triton.vllm_kernels import batch_invariant_module

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def float_opcodes(ptx: str) -> list[str]:
    """As float_program, opcodes only."""
    return [line.split(" ", 1)[0] for line in float_program(ptx)]


def atomic_sum(x_ptr, y_ptr, N: tl.constexpr):
    tl.atomic_add(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N))))


@triton.jit
def squares(x_ptr, y_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(y_ptr, tl.sum(x * x + x))


@triton.jit
def plain_rope(x_ptr, cos_ptr, sin_ptr, y_ptr, D: tl.constexpr):
    at = tl.program_id(0) * 2 * D + tl.arange(0, D)
    x1, x2 = tl.load(x_ptr + at).to(tl.float32), tl.load(x_ptr + at + D).to(tl.float32)
    cos, sin = tl.load(cos_ptr + tl.arange(0, D)), tl.load(sin_ptr + tl.arange(0, D))
    tl.store(y_ptr + at, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty))
    tl.store(y_ptr + at + D, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty))


def ptx(launch: Launch, target: str = "sm_90") -> str:
    return compile_launch(*launch, target).asm["ptx"]


def layouts(launch: Launch) -> list[str]:
    """The first layout is the row's: what each thread sums."""
    return [
        line
        for line in compile_launch(*launch, "sm_90").asm["ttgir"].splitlines()
        if line.startswith("#blocked")
    ]


def differing(left: list[str], right: list[str]) -> int:
    return sum(x != y for x, y in zip(left, right, strict=False)) + abs(len(left) - len(right))


def unequal(a: Launch, b: Launch, target: str = "sm_90") -> int:
    """Lines in which the float programs of two launches differ."""
    return differing(float_program(ptx(a, target)), float_program(ptx(b, target)))


def vllm_rms_norm(theirs: Any, dtype: torch.dtype, D: int) -> Launch:
    x, w = torch.empty(4, D, dtype=dtype, device="meta"), torch.empty(D, dtype=dtype, device="meta")
    options = {"BLOCK_SIZE": 1024, "HAS_WEIGHT": True, "num_warps": 4, "enable_fp_fusion": True}
    return Launch(theirs._rms_norm_kernel, (x, w, x, D, D, D, 1e-6), options)


def without_the_sum_over_warps(opcodes: list[str]) -> list[str]:
    """Of vLLM's norm:

    less the sixth and seventh butterfly with their additions, which add the zeros of idle warps to a short
    row.
    """
    butterflies = [i for i, opcode in enumerate(opcodes) if opcode.startswith("shfl.")]
    assert len(butterflies) == 7, butterflies
    return opcodes[: butterflies[5]] + opcodes[butterflies[6] + 2 :]


def sum_of_exponentials(opcodes: list[str]) -> list[str]:
    """The additions and butterflies that follow the first eight exponentials of a row:

    a tile's sum and its addition to the row's.
    """
    start = [i for i, opcode in enumerate(opcodes) if opcode.startswith("ex2.")][7]
    return [opcode for opcode in opcodes[start:] if opcode.startswith(("add.", "shfl."))][: 7 + 2 * 7 + 1]


def beside_vllm() -> dict[str, int]:
    """How far the float instructions of our kernels are from vLLM's: 0 each."""
    theirs, ours = batch_invariant_module(), dict(configurations())
    found = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for target in ("sm_80", "sm_90", "sm_100"):
            norm = ours[f"rms_norm {name}: rms_norm_fwd"]
            found[f"rms_norm {name} {target}"] = unequal(norm, vllm_rms_norm(theirs, dtype, 1024), target)
        heads, wide = ours[f"qk_norm {name}: rms_norm_fwd"], vllm_rms_norm(theirs, dtype, 128)
        found[f"qk_norm {name}"] = differing(
            float_opcodes(ptx(heads)), without_the_sum_over_warps(float_opcodes(ptx(wide)))
        )
        found[f"qk_norm {name} columns of a thread"] = differing(
            *(line.split(",")[:1] for line in (layouts(heads)[0], layouts(wide)[0]))
        )
        x, row = torch.empty(64, 1024, dtype=dtype, device="meta"), torch.empty(512, device="meta")
        plain = Launch(plain_rope, (x, row, row, x), {"D": 512, "num_warps": 4, "enable_fp_fusion": True})
        found[f"rope {name}"] = differing(
            *(sorted(float_opcodes(ptx(one))) for one in (ours[f"rope {name} D=128: rope"], plain))
        )
    z = torch.empty(64, 4096, device="meta")
    options = {"BLOCK_SIZE": 1024, "LOG": True, "num_warps": 4, "enable_fp_fusion": True}
    logprob, log_softmax = (
        ours["logprob: logprob_fwd"],
        Launch(theirs._softmax_kernel, (z, z, 4096, 1, 4096, 4096), options),
    )
    a, b = (
        [op for op in float_opcodes(ptx(one)) if op != "div.rn.f32"] for one in (logprob, log_softmax)
    )  # z / 1.0 = z
    found["logprob layouts"] = differing(layouts(logprob), layouts(log_softmax))
    found["logprob maximum"] = differing(a[: a.index("sub.f32")], b[: b.index("sub.f32")])
    found["logprob sum"] = differing(sum_of_exponentials(a), sum_of_exponentials(b))
    other_tile = log_softmax._replace(options={**options, "BLOCK_SIZE": 2048})
    found["control: sum of another tile"] = differing(
        sum_of_exponentials(a), sum_of_exponentials(float_opcodes(ptx(other_tile)))
    )
    return found


def main() -> None:
    binaries = build(tuple(sys.argv[1:]))
    found, compared = check(binaries)
    x = torch.empty(1024, device="meta")
    options = {"N": 1024, "num_warps": 4, "enable_fp_fusion": True}
    base = Launch(squares, (x, x), options)
    binary = Binary("kernel", "sm_90", 32, 0, 0, 0)
    report = {
        "binaries": len(binaries),
        "faults": found,
        "compared": compared,
        "atomic": faults(
            (inspect("atomic", t, compile_launch(atomic_sum, (x, x), options, t)) for t in TARGETS), None
        ),
        "spill": faults([binary._replace(local_bytes=16)], None),
        "regression": faults([binary], {"kernel": {"sm_90": [31, 0]}}),
        "vllm": beside_vllm(),
        "silu": sorted(set(float_opcodes(ptx(dict(configurations())["silu_mul bfloat16: silu_mul_fwd"])))),
        "same": unequal(base, base._replace(options=dict(options))),
        "unfused": unequal(base, base._replace(options={**options, "enable_fp_fusion": False})),
        "warps": unequal(base, base._replace(options={**options, "num_warps": 8})),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
