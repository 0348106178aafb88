"""Prints, as JSON, in how many places the float programs of vLLM's kernels and of ours differ; given targets.
Run without TRITON_INTERPRET.

Both are compiled ahead of time with the same options and tiles; a float program is the ordered list of float
instructions with their data flow, tensor-core instructions included (verify/binaries.py). vLLM leaves the
precision of fp32 products to Triton's default: tf32, but TRITON_F32_DEFAULT is set here as exact training
sets it (engine/rollout/vllm/stock.py).
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from zerokl.engine.rollout.vllm.stock import ENVIRONMENT
from zerokl.kernels import attention_triton, matmul_triton
from zerokl.kernels.attention_plan import Spans
from zerokl.kernels.launch import Launch, recorded
from zerokl.kernels.tiles import recording
from zerokl.verify.binaries import compile_launch, float_program

from tests.triton.vllm_kernels import batch_invariant_module

# Besides groups of 2 and head_dim 128.
ATTENTIONS = {", groups of 4": {"group": 4}, ", groups of 7, head_dim 64": {"D": 64, "group": 7}}


def theirs(module: Any, name: str, call: Callable[[], object]) -> Launch:
    """The launch that vLLM's wrapper makes of its kernel `name`, with the options that Triton defaults to."""
    kernel, found = getattr(module, name), []

    class Recorder:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args, **options: found.append((args, options))

    setattr(module, name, Recorder())
    call()
    setattr(module, name, kernel)
    ((args, options),) = found
    return Launch(kernel, args, {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True} | options)


def ours(target: str, call: Callable[[], object]) -> Launch:
    with recording(target), recorded() as launches:
        call()
    return launches[0]


def program(launch: Launch, target: str) -> list[str]:
    return float_program(compile_launch(*launch, target).asm["ptx"])


def differ(a: list[str], b: list[str]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))


def opcodes(lines: list[str]) -> Counter[str]:
    """How often each instruction occurs, one that does two at once as two; shuffles that add nothing (idx)
    are left out.
    """
    found: Counter[str] = Counter()
    for opcode in (line.split(" ", 1)[0] for line in lines):
        if not opcode.startswith("shfl.sync.idx"):
            found[opcode.removesuffix("x2")] += 1 + opcode.endswith("f32x2")
    return found


def expressions(lines: list[str]) -> Counter[int]:
    """Each instruction with the instructions that made its operands, and so on: the program whatever the
    compiler's order of what does not depend on each other. What is loaded, or comes from an earlier turn of a
    loop, is a leaf without a name.
    """
    made: dict[str, int] = {}
    found: Counter[int] = Counter()
    for line in lines:
        opcode, operands = line.split(" ", 1)
        names = re.findall(r"%\d+|[^\s,{}|]+", operands)
        results = re.findall(
            r"%\d+", operands.split("}")[0] if operands.startswith("{") else operands.split(",")[0]
        )
        value = hash((opcode, *(made.get(x, "leaf") if x.startswith("%") else x for x in names)))
        found[value] += 1
        made |= {x: hash((value, i)) for i, x in enumerate(results)}
    return found


def apart(a: Counter[Any], b: Counter[Any]) -> int:
    return ((a - b) + (b - a)).total()


def matmul_launches(
    module: Any, dtype: torch.dtype, target: str, K: int = 1024, bias: bool = False
) -> tuple[Launch, Launch]:
    x, w = (torch.empty(n, K, dtype=dtype, device="meta") for n in (256, 2048))
    b = torch.empty(2048, dtype=dtype, device="meta") if bias else None
    their = theirs(module, "matmul_kernel_persistent", lambda: module.matmul_persistent(x, w.t(), b))
    tiles = {f"BLOCK_{a}": their.options[f"BLOCK_SIZE_{a}"] for a in "MNK"} | {
        k: their.options[k] for k in ("num_warps", "num_stages")
    }
    our = ours(target, lambda: matmul_triton.matmul(x, w.t(), b))
    return their, our._replace(options=our.options | tiles)


def attention_launches(
    module: Any, dtype: torch.dtype, target: str, D: int = 128, group: int = 2
) -> tuple[Launch, Launch, Launch]:
    """vLLM's, ours against pages, and ours against packed keys with lse."""
    q, pages = (torch.empty(*n, D, dtype=dtype, device="meta") for n in ((64, 8 * group), (40, 32, 8)))
    starts, lengths, table = (
        torch.empty(*n, dtype=torch.int32, device="meta") for n in ((3,), (2,), (2, 16))
    )
    spans, o, scale = Spans(starts, lengths, table, 8, starts), torch.empty_like(q), D**-0.5
    rest = (starts, 64, lengths, 64, scale, True, (-1, -1), table, 0, None, None, None)
    their = theirs(
        module, "kernel_unified_attention", lambda: module.unified_attention(q, pages, pages, o, *rest)
    )
    paged = ours(target, lambda: attention_triton.attention_paged(q, pages, pages, spans, scale))
    packed = ours(
        target, lambda: attention_triton.attention_packed(q, q[:, :8], q[:, :8], spans, scale, want_lse=True)
    )
    return their, paged, packed


def controls(batch_invariant: Any, unified: Any) -> dict[str, int]:
    """The same comparison on sm_90 with one thing changed in ours."""
    found = {}
    for what, (their, our), changes in (
        ("matmul", matmul_launches(batch_invariant, torch.bfloat16, "sm_90"), ({"BLOCK_K": 32},)),
        (
            "attention",
            attention_launches(unified, torch.bfloat16, "sm_90")[:2],
            ({"enable_fp_fusion": False}, {"num_warps": 8}, {"TILE": 64}),
        ),
    ):
        expected = program(their, "sm_90")
        for change in changes:
            found[f"{what} {change}"] = differ(
                expected, program(our._replace(options=our.options | change), "sm_90")
            )
    their, our = matmul_launches(batch_invariant, torch.bfloat16, "sm_90", bias=True)
    unfused = our._replace(options=our.options | {"enable_fp_fusion": False})
    found["matmul with a bias, unfused"] = apart(
        *(expressions(program(x, "sm_90")) for x in (their, unfused))
    )
    return found


def rounded_operands(batch_invariant: Any) -> dict[str, int]:
    """fp32 with vLLM's products as Triton makes them by default."""
    del os.environ["TRITON_F32_DEFAULT"]
    their, our = matmul_launches(batch_invariant, torch.float32, "sm_90")
    return {"matmul in fp32 by Triton's default": differ(program(their, "sm_90"), program(our, "sm_90"))}


def main() -> None:
    os.environ.update(ENVIRONMENT)
    batch_invariant = batch_invariant_module()  # before any other module of vLLM
    from vllm.v1.attention.ops import triton_unified_attention as unified

    report = {}
    for target in sys.argv[1:]:
        logarithm: Counter[str] = Counter()
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            at = f"{target} {dtype}"
            their, our = matmul_launches(batch_invariant, dtype, target)
            programs = [program(x, target) for x in (their, our)]
            report[f"matmul {at}"] = {"instructions": len(programs[0]), "differ": differ(*programs)}
            for what, K in (
                ("", 1024),
                (", uneven", 1000),
            ):  # the compiler reads the bias earlier in one than in the other
                programs = [
                    program(x, target) for x in matmul_launches(batch_invariant, dtype, target, K, bias=True)
                ]
                report[f"matmul with a bias{what} {at}"] = {
                    "instructions": len(programs[0]),
                    "differ": apart(*map(expressions, programs)),
                }
            for what, shape in ATTENTIONS.items() if dtype == torch.bfloat16 else ():
                programs = [
                    program(x, target) for x in attention_launches(unified, dtype, target, **shape)[:2]
                ]
                report[f"attention{what} {at}"] = {
                    "instructions": len(programs[0]),
                    "differ": differ(*programs),
                }
            programs = [program(x, target) for x in attention_launches(unified, dtype, target)]
            length = len(programs[0])
            report[f"attention paged {at}"] = {"instructions": length, "differ": differ(*programs[:2])}
            # After the same program comes the logarithm of lse.
            if (
                dtype == torch.float32
            ):  # on sm_90 the compiler exchanges two subtractions of which neither needs the other
                found = (expressions(programs[0]) - expressions(programs[2])).total()
                found += apart(opcodes(programs[2]), opcodes(programs[0]) + logarithm)
            else:
                found, logarithm = differ(programs[0], programs[2][:length]), opcodes(programs[2][length:])
            report[f"attention packed {at}"] = {"instructions": length, "differ": found}
    report["control"] = controls(batch_invariant, unified) | rounded_operands(batch_invariant)
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
