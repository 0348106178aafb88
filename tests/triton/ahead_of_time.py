"""Prints, as JSON, what test_binaries.py judges.

The arguments are the targets to build every binary for. Run without TRITON_INTERPRET.
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
def atomic_sum(x_ptr, y_ptr, N: tl.constexpr):
    tl.atomic_add(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N))))


@triton.jit
def squares(x_ptr, y_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(y_ptr, tl.sum(x * x + x))


@triton.jit
def plain_rope(x_ptr, cos_ptr, sin_ptr, y_ptr, D: tl.constexpr):
    offset = tl.program_id(0) * 2 * D + tl.arange(0, D)
    x1, x2 = tl.load(x_ptr + offset).to(tl.float32), tl.load(x_ptr + offset + D).to(tl.float32)
    cos, sin = tl.load(cos_ptr + tl.arange(0, D)), tl.load(sin_ptr + tl.arange(0, D))
    tl.store(y_ptr + offset, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty))
    tl.store(y_ptr + offset + D, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty))


def ptx(launch: Launch, target: str = "sm_90") -> str:
    return compile_launch(*launch, target).asm["ptx"]


def float_opcodes(ptx: str) -> list[str]:
    """The opcodes of the float program, without operands."""
    return [line.split(" ", 1)[0] for line in float_program(ptx)]


def layouts(launch: Launch) -> list[str]:
    """The layouts on sm_90. The first one is the layout of a row: it decides what each thread sums."""
    lines = compile_launch(*launch, "sm_90").asm["ttgir"].splitlines()
    return [line for line in lines if line.startswith("#blocked")]


def differing(left: list[str], right: list[str]) -> int:
    return sum(x != y for x, y in zip(left, right, strict=False)) + abs(len(left) - len(right))


def unequal(a: Launch, b: Launch, target: str = "sm_90") -> int:
    """Lines in which the float programs of two launches differ."""
    return differing(float_program(ptx(a, target)), float_program(ptx(b, target)))


def vllm_rms_norm(module: Any, dtype: torch.dtype, D: int) -> Launch:
    x, w = torch.empty(4, D, dtype=dtype, device="meta"), torch.empty(D, dtype=dtype, device="meta")
    options = {"BLOCK_SIZE": 1024, "HAS_WEIGHT": True, "num_warps": 4, "enable_fp_fusion": True}
    return Launch(module._rms_norm_kernel, (x, w, x, D, D, D, 1e-6), options)


def without_the_sum_over_warps(opcodes: list[str]) -> list[str]:
    """The opcodes of vLLM's norm without the sixth and seventh butterfly and their additions.

    On a short row these two add the zeros of idle warps.
    """
    butterflies = [i for i, opcode in enumerate(opcodes) if opcode.startswith("shfl.")]
    assert len(butterflies) == 7, butterflies
    return opcodes[: butterflies[5]] + opcodes[butterflies[6] + 2 :]


def sum_of_exponentials(opcodes: list[str]) -> list[str]:
    """The additions and butterflies that follow the first eight exponentials of a row.

    They are the sum of a tile, and the addition of this sum to the sum of the row.
    """
    start = [i for i, opcode in enumerate(opcodes) if opcode.startswith("ex2.")][7]
    return [opcode for opcode in opcodes[start:] if opcode.startswith(("add.", "shfl."))][: 7 + 2 * 7 + 1]


def norms_beside_vllm(module: Any, ours: dict[str, Launch], dtype: torch.dtype) -> dict[str, int]:
    name = str(dtype).removeprefix("torch.")
    norm, vllm_norm = ours[f"rms_norm {name}: rms_norm_fwd"], vllm_rms_norm(module, dtype, 1024)
    heads, vllm_head = ours[f"qk_norm {name}: rms_norm_fwd"], vllm_rms_norm(module, dtype, 128)
    opcodes = float_opcodes(ptx(heads)), without_the_sum_over_warps(float_opcodes(ptx(vllm_head)))
    columns = (layouts(launch)[0].split(",")[:1] for launch in (heads, vllm_head))
    return {
        **{f"rms_norm {name} {t}": unequal(norm, vllm_norm, t) for t in ("sm_80", "sm_90", "sm_100")},
        f"qk_norm {name}": differing(*opcodes),
        f"qk_norm {name} columns of a thread": differing(*columns),
    }


def rope_beside_plain(ours: dict[str, Launch], dtype: torch.dtype) -> dict[str, int]:
    """Our rope beside one whose fusion the compiler chooses."""
    name = str(dtype).removeprefix("torch.")
    x, row = torch.empty(64, 1024, dtype=dtype, device="meta"), torch.empty(512, device="meta")
    plain = Launch(plain_rope, (x, row, row, x), {"D": 512, "num_warps": 4, "enable_fp_fusion": True})
    opcodes = (sorted(float_opcodes(ptx(launch))) for launch in (ours[f"rope {name} D=128: rope"], plain))
    return {f"rope {name}": differing(*opcodes)}


def logprob_beside_vllm(module: Any, ours: dict[str, Launch]) -> dict[str, int]:
    z = torch.empty(64, 4096, device="meta")
    options = {"BLOCK_SIZE": 1024, "LOG": True, "num_warps": 4, "enable_fp_fusion": True}
    logprob = ours["logprob of float32 logits: logprob_fwd"]
    log_softmax = Launch(module._softmax_kernel, (z, z, 4096, 1, 4096, 4096), options)
    other_tile = log_softmax._replace(options={**options, "BLOCK_SIZE": 2048})
    # The division is the entropy's.
    a, b = ([op for op in float_opcodes(ptx(x)) if op != "div.rn.f32"] for x in (logprob, log_softmax))
    other_sum = sum_of_exponentials(float_opcodes(ptx(other_tile)))
    return {
        "logprob layouts": differing(layouts(logprob), layouts(log_softmax)),
        "logprob maximum": differing(a[: a.index("sub.f32")], b[: b.index("sub.f32")]),
        "logprob sum": differing(sum_of_exponentials(a), sum_of_exponentials(b)),
        "control: sum of another tile": differing(sum_of_exponentials(a), other_sum),
    }


def beside_vllm() -> dict[str, int]:
    """In how many places the float instructions of our kernels and vLLM's differ; 0 but for the control."""
    module, ours = batch_invariant_module(), dict(configurations())
    counts = logprob_beside_vllm(module, ours)
    for dtype in DTYPES:
        counts |= norms_beside_vllm(module, ours, dtype) | rope_beside_plain(ours, dtype)
    return counts


def main() -> None:
    binaries = build(tuple(sys.argv[1:]))
    faults_found, compared = check(binaries)
    x = torch.empty(1024, device="meta")
    options = {"N": 1024, "num_warps": 4, "enable_fp_fusion": True}
    base = Launch(squares, (x, x), options)
    binary = Binary("kernel", "sm_90", 32, 0, 0, 0)
    atomic = (inspect("atomic", t, compile_launch(atomic_sum, (x, x), options, t)) for t in TARGETS)
    report = {
        "binaries": len(binaries),
        "faults": faults_found,
        "compared": compared,
        "atomic": faults(atomic, None),
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
