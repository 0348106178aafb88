"""Prints, as JSON, what test_binaries.py judges.

The arguments are the targets to build every binary for. Run without TRITON_INTERPRET.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from zerokl.engine.runs.checks import verify_binaries
from zerokl.engine.runs.checks.verify_binaries import build, check, read_tables
from zerokl.kernels.compiled_cases import configurations
from zerokl.kernels.launch import Launch
from zerokl.verify.binaries import TARGETS, Binary, compile_launch, faults, float_program, inspect

from tests.gpu.descriptors import broken_maps, descriptors
from tests.triton.compiling import some_configurations
from tests.triton.ptx_values import form, values, without_load
from tests.triton.vllm_kernels import batch_invariant_module

TABLE = Path(__file__).with_name("binaries.json")
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


def unfused(launch: Launch) -> Launch:
    return launch._replace(options=launch.options | {"enable_fp_fusion": False})


def vllm_rms_norm(module: Any, dtype: torch.dtype, D: int) -> Launch:
    x, w = torch.empty(4, D, dtype=dtype, device="meta"), torch.empty(D, dtype=dtype, device="meta")
    options = {"BLOCK_SIZE": 1024, "HAS_WEIGHT": True, "num_warps": 4, "enable_fp_fusion": True}
    return Launch(module._rms_norm_kernel, (x, w, x, D, D, D, 1e-6), options)


def heads_beside_vllm(ours: Launch, vllm: Launch, target: str) -> int:
    """How many results of a thread of qk_norm are not those of vLLM's norm of a row of one head.

    vLLM's tile has 1024 columns, and a head is the first 128. In 16 bits they lie in 16 lanes, so the
    butterfly of 16 adds zeros. In fp32 a thread's second load is past the head. The other warps add zeros.
    """
    mine, offsets = values(ptx(ours, target))
    vllm_forms, vllm_offsets = values(ptx(vllm, target))
    lanes = 16 if "round" in mine else 32
    thread_sum = without_load("1", next(x for x in vllm_forms["bfly"] if "bfly" not in x))
    total = thread_sum
    for offset in vllm_offsets[:5]:
        if int(offset) < lanes:
            total = f"add({','.join(sorted((total, f'bfly{offset}({total})')))})"
    r = f"div(0f3F800000,sqrt(add(%,div(add(0f00000000,{total}),%))))"
    results = [re.sub(r"%\w+", "%", x) for x in mine.get("round", mine["store"]) if x.startswith("mul")]
    elements = {x.split(".", 1)[1] for x in re.findall(r"\b0\.[\d.]+", thread_sum)}
    # Loads 0 and 1 are of x, 2 and 3 of the weights; the last one of a register is its name.
    expected = Counter(f"mul(3.{i},mul(1.{i},{r}))" for i in elements)
    counted = Counter(results)
    assert offsets == [x for x in vllm_offsets[:5] if int(x) < lanes], offsets
    return ((expected - counted) + (counted - expected)).total()


def results(launch: Launch, target: str, operation: str) -> set[str]:
    """The forms of the numbers of a thread that end with `operation`, and are stored."""
    forms, _ = values(ptx(launch, target))
    return {form(x) for x in forms.get("round", forms["store"]) if x.startswith(operation)}


def decoded_heads(ours: dict[str, Launch], dtype: torch.dtype, target: str) -> tuple[Launch, set[str]]:
    """The launch of qk_norm, rope and write, and the forms that the three launches give one after another."""
    name = str(dtype).removeprefix("torch.")
    fused = ours[f"heads with qk_norm {name} D=128, cache in {name}: heads_to_cache"]
    (norm,) = results(ours[f"qk_norm {name}, 16 heads: qk_norm_fwd"], target, "mul")
    x = norm if dtype == torch.float32 else f"round({norm})"
    rotated = {form(y) for y in ("fma(L,L,mul(L,neg(L)))", "fma(L,L,mul(L,L))")}
    assert results(ours[f"rope {name} D=128: rope"], target, "fma") == rotated
    first, second = sorted(["neg(L)", x]), sorted(["L", x])
    return fused, {f"fma({x},L,mul({','.join(pair)}))" for pair in (first, second)}


def heads_beside_three(ours: dict[str, Launch], dtype: torch.dtype) -> dict[str, int]:
    """In how many forms one launch for the heads of a decoding turn differs from three."""
    counts = {}
    for target in ("sm_80", "sm_90", "sm_100"):
        fused, expected = decoded_heads(ours, dtype, target)
        counts[f"heads of a turn {dtype} {target}"] = len(results(fused, target, "fma") ^ expected)
        if target == "sm_90":
            other = results(unfused(fused), target, "fma") ^ expected
            counts[f"control: unfused heads of a turn {dtype}"] = len(other)
    return counts


def sum_of_exponentials(opcodes: list[str]) -> list[str]:
    """The additions and butterflies that follow the first eight exponentials of a row.

    They are the sum of a tile, and the addition of this sum to the sum of the row.
    """
    start = [i for i, opcode in enumerate(opcodes) if opcode.startswith("ex2.")][7]
    return [opcode for opcode in opcodes[start:] if opcode.startswith(("add.", "shfl."))][: 7 + 2 * 7 + 1]


def norms_beside_vllm(module: Any, ours: dict[str, Launch], dtype: torch.dtype) -> dict[str, int]:
    name = str(dtype).removeprefix("torch.")
    norm, vllm_norm = ours[f"rms_norm {name} 1024: rms_norm_fwd"], vllm_rms_norm(module, dtype, 1024)
    heads, vllm_head = ours[f"qk_norm {name}, 16 heads: qk_norm_fwd"], vllm_rms_norm(module, dtype, 128)
    gpus = ("sm_80", "sm_90", "sm_100")
    return {
        **{f"rms_norm {name} {t}": unequal(norm, vllm_norm, t) for t in gpus},
        **{f"qk_norm {name} {t}": heads_beside_vllm(heads, vllm_head, t) for t in gpus},
        f"control: unfused qk_norm {name}": heads_beside_vllm(unfused(heads), vllm_head, "sm_90"),
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
        counts |= heads_beside_three(ours, dtype)
    return counts


def key_buffers(launch: Launch) -> int:
    """Tiles of keys that a kernel over pages has in shared memory on sm_90. Two or more hide the latency."""
    tiles = re.findall(r"memdesc<(\d+)x\d+x\d+x", compile_launch(*launch, "sm_90").asm["ttgir"])
    return min(map(int, tiles))


def buffers() -> dict[str, int]:
    """Of decode and of prompts in pages; and, as a control, of as many stages as packed keys have."""
    shape = "attention bfloat16 128, groups of 2"
    ours = {name: x for name, x in configurations("sm_90") if name.startswith(shape)}
    decode, prompts = (
        next(x for name, x in ours.items() if what in name) for what in (", paged", ", prompts in pages")
    )
    three = decode._replace(options=decode.options | {"num_stages": 3})
    return {"decode": key_buffers(decode), "prompts": key_buffers(prompts), "control": key_buffers(three)}


def tensor_maps() -> tuple[int, list[str]]:
    """How many tensor maps the binaries for Hopper are given, and the rules of TMA that their boxes break."""
    count, broken = 0, []
    for name, launch in some_configurations("sm_90"):
        if any(descriptors(launch)):
            maps = compile_launch(*launch, "sm_90").metadata.tensordesc_meta
            count += len(maps)
            broken += [f"{name}: {line}" for line in broken_maps(launch, maps)]
    return count, broken


def main() -> None:
    verify_binaries.configurations = some_configurations
    binaries = build(tuple(sys.argv[1:]))
    faults_found, compared = check(binaries, read_tables(TABLE))
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
        "tensor maps": tensor_maps(),
        "buffers": buffers(),
        "silu": sorted(set(float_opcodes(ptx(dict(configurations())["silu_mul bfloat16: silu_mul_fwd"])))),
        "same": unequal(base, base._replace(options=dict(options))),
        "unfused": unequal(base, unfused(base)),
        "warps": unequal(base, base._replace(options={**options, "num_warps": 8})),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
