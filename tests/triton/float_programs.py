"""Prints, as JSON, in how many places the float programs of vLLM's kernels and of our kernels differ.

The arguments are the targets. Run without TRITON_INTERPRET.

Both kernels are compiled ahead of time with the same options and tiles. A float program is the ordered list
of float instructions with their data flow. Tensor-core instructions are included (verify/binaries.py). vLLM
leaves the precision of fp32 products to Triton's default, which is tf32. Here TRITON_F32_DEFAULT is set as
exact training sets it (engine/rollout/vllm/exact.py).
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from zerokl.engine.rollout.vllm.exact import ENVIRONMENT
from zerokl.kernels import attention_split_triton, attention_triton, matmul_triton
from zerokl.kernels.attention_chunks_triton import walk_packed, walk_paged
from zerokl.kernels.attention_rule import RULES
from zerokl.kernels.attention_split_triton import no_chunks, split_paged
from zerokl.kernels.attention_tables import Spans
from zerokl.kernels.columns_triton import NORM_ROWS, add_all_partials, add_partials
from zerokl.kernels.expert_rows_triton import ExpertTables
from zerokl.kernels.grouped_linear_triton import grouped_matmul
from zerokl.kernels.launch import Launch, recorded_launches
from zerokl.kernels.order import token_blocks
from zerokl.kernels.partial_sums import PartialSums
from zerokl.kernels.tiles import tiles_of_target
from zerokl.verify.binaries import compile_launch, float_program

from tests.triton.vllm_kernels import batch_invariant_module

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The shapes that are compared besides groups of 2 and head_dim 128.
ATTENTIONS = {
    ", groups of 4": {"group": 4},
    ", groups of 8": {"group": 8},
    ", groups of 7, head_dim 64": {"D": 64, "group": 7},
}
Rows = dict[str, dict[str, int]]


def vllm_launch(module: Any, name: str, call: Callable[[], object]) -> Launch:
    """The launch that vLLM's wrapper makes of its kernel `name`, with the options that Triton defaults to."""
    kernel, launches = getattr(module, name), []

    class Recorder:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args, **options: launches.append((args, options))

    setattr(module, name, Recorder())
    call()
    setattr(module, name, kernel)
    ((args, options),) = launches
    return Launch(kernel, args, {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True} | options)


def our_launch(target: str, call: Callable[[], object]) -> Launch:
    with tiles_of_target(target), recorded_launches() as launches:
        call()
    return launches[0]


def program(launch: Launch, target: str) -> list[str]:
    return float_program(compile_launch(*launch, target).asm["ptx"])


def differ(a: list[str], b: list[str]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))


def opcodes(lines: list[str]) -> Counter[str]:
    """How often each instruction occurs.

    An instruction that does two operations at once counts as two. Shuffles that add nothing (idx) are left
    out.
    """
    counts: Counter[str] = Counter()
    for opcode in (line.split(" ", 1)[0] for line in lines):
        if not opcode.startswith("shfl.sync.idx"):
            counts[opcode.removesuffix("x2")] += 1 + opcode.endswith("f32x2")
    return counts


def expressions(lines: list[str]) -> Counter[int]:
    """Each instruction with the instructions that made its operands, and so on.

    So the order of instructions that do not depend on each other does not count. A value that is loaded, or
    comes from an earlier turn of a loop, is a leaf without a name.
    """
    values: dict[str, int] = {}
    counts: Counter[int] = Counter()
    for line in lines:
        opcode, operands = line.split(" ", 1)
        names = re.findall(r"%\d+|[^\s,{}|]+", operands)
        targets = operands.split("}")[0] if operands.startswith("{") else operands.split(",")[0]
        value = hash((opcode, *(values.get(x, "leaf") if x.startswith("%") else x for x in names)))
        counts[value] += 1
        values |= {x: hash((value, i)) for i, x in enumerate(re.findall(r"%\d+", targets))}
    return counts


def total_difference(a: Counter[Any], b: Counter[Any]) -> int:
    return ((a - b) + (b - a)).total()


def matmul_launches(
    module: Any, dtype: torch.dtype, target: str, K: int = 1024, bias: bool = False
) -> tuple[Launch, Launch]:
    """vLLM's launch, and our launch with vLLM's tiles."""
    x, w = (torch.empty(n, K, dtype=dtype, device="meta") for n in (256, 2048))
    b = torch.empty(2048, dtype=dtype, device="meta") if bias else None
    vllm = vllm_launch(module, "matmul_kernel_persistent", lambda: module.matmul_persistent(x, w.t(), b))
    tiles = {f"BLOCK_{a}": vllm.options[f"BLOCK_SIZE_{a}"] for a in "MNK"}
    tiles |= {name: vllm.options[name] for name in ("num_warps", "num_stages")}
    ours = our_launch(target, lambda: matmul_triton.matmul(x, w, b))
    return vllm, ours._replace(options=ours.options | tiles)


def attention_launches(
    module: Any, dtype: torch.dtype, target: str, D: int = 128, group: int = 2
) -> tuple[Launch, Launch, Launch]:
    """vLLM's launch, our launch against pages, and our launch against packed keys with lse.

    Few tokens over pages: for many, programs on Hopper have more rows (tests/triton/test_attention.py).
    """
    q, pages = (torch.empty(*n, D, dtype=dtype, device="meta") for n in ((64, 8 * group), (40, 32, 8)))
    starts, lengths, table = (
        torch.empty(*n, dtype=torch.int32, device="meta") for n in ((3,), (2,), (2, 16))
    )
    spans, o, scale = Spans(starts, lengths, table, 8, starts), torch.empty_like(q), D**-0.5
    rest = (starts, 64, lengths, 64, scale, True, (-1, -1), table, 0, None, None, None)

    def call_vllm() -> None:
        module.unified_attention(q, pages, pages, o, *rest)

    def call_packed() -> None:
        attention_triton.attention_packed(q, q[:, :8], q[:, :8], spans, scale, want_lse=True)

    vllm = vllm_launch(module, "kernel_unified_attention", call_vllm)
    paged = our_launch(target, lambda: attention_triton.attention_paged(q[:2], pages, pages, spans, scale))
    return vllm, paged, our_launch(target, call_packed)


def expert_launches(module: Any, dtype: torch.dtype, target: str) -> tuple[Launch, Launch]:
    """vLLM's product of experts in batch-invariant mode, and ours with its tiles along M and N."""
    T, k, E, N, K = 64, 8, 128, 2048, 1000
    shapes = (T * k, K), (E, N, K), (T * k, 1, N)
    x, w, y = (torch.empty(*shape, dtype=dtype, device="meta") for shape in shapes)
    q = torch.empty(T, k, device="meta")
    rows = ExpertTables.empty(torch.empty(T, k, dtype=torch.int64, device="meta"), E)
    config = module.get_default_config(T, E, N, K, k, None)
    number = torch.empty(1, dtype=torch.int32, device="meta")
    tables = rows.slots, rows.tiles[:, 0].contiguous(), number
    flags = dict.fromkeys(("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16"), False)
    vllm = vllm_launch(
        module,
        "fused_moe_kernel",
        lambda: module.invoke_fused_moe_triton_kernel(
            *(x, w, y, None, None, q, *tables, True, 1, config),
            getattr(module.tl, str(dtype).removeprefix("torch.")),
            **flags,
            per_channel_quant=False,
        ),
    )
    ours = our_launch(target, lambda: grouped_matmul(x, w, rows, x_of_tokens=False, q_Tk=q))
    tiles = {f"BLOCK_{a}": vllm.options[f"BLOCK_SIZE_{a}"] for a in "MN"}
    tiles |= {name: vllm.options[name] for name in ("num_warps", "num_stages")}
    return vllm, ours._replace(options=ours.options | tiles)


def expert_rows(module: Any, target: str) -> Rows:
    """The second product of the experts, with the routing weight, and a width that no tile divides.

    The compiler reads the weights at other places in the two programs, so their order is left out.
    """
    rows = {}
    for dtype in DTYPES:
        vllm, ours = (program(x, target) for x in expert_launches(module, dtype, target))
        places = total_difference(expressions(vllm), expressions(ours))
        rows[f"experts {target} {dtype}"] = row(vllm, places)
    return rows


def expert_controls(module: Any) -> dict[str, int]:
    vllm, ours = expert_launches(module, torch.bfloat16, "sm_90")
    counts, expected = {}, expressions(program(vllm, "sm_90"))
    for change in ({"BLOCK_K": 64}, {"HAS_WEIGHT": False}):
        changed = ours._replace(options=ours.options | change)
        counts[f"experts {change}"] = total_difference(expected, expressions(program(changed, "sm_90")))
    return counts


def controls(batch_invariant: Any, unified: Any) -> dict[str, int]:
    """The same comparison on sm_90 with one thing changed in our launch."""
    matmuls = matmul_launches(batch_invariant, torch.bfloat16, "sm_90")
    attentions = attention_launches(unified, torch.bfloat16, "sm_90")[:2]
    changes_of_attention = ({"enable_fp_fusion": False}, {"num_warps": 8}, {"TILE": 64})
    counts = {}
    for what, (vllm, ours), changes in (
        ("matmul", matmuls, ({"BLOCK_K": 32},)),
        ("attention", attentions, changes_of_attention),
    ):
        expected = program(vllm, "sm_90")
        for change in changes:
            changed = ours._replace(options=ours.options | change)
            counts[f"{what} {change}"] = differ(expected, program(changed, "sm_90"))
    vllm, ours = matmul_launches(batch_invariant, torch.bfloat16, "sm_90", bias=True)
    unfused = ours._replace(options=ours.options | {"enable_fp_fusion": False})
    both = (expressions(program(x, "sm_90")) for x in (vllm, unfused))
    counts["matmul with a bias, unfused"] = total_difference(*both)
    return counts


def rounded_operands(batch_invariant: Any) -> dict[str, int]:
    """fp32 with vLLM's products as Triton makes them by default."""
    del os.environ["TRITON_F32_DEFAULT"]
    vllm, ours = matmul_launches(batch_invariant, torch.float32, "sm_90")
    return {"matmul in fp32 by Triton's default": differ(program(vllm, "sm_90"), program(ours, "sm_90"))}


def outer_lines(dtype: torch.dtype, empty: bool) -> list[str]:
    """The float program of a weight gradient on sm_90, without the shuffles of a warp's number."""
    dy, x = (torch.empty(256, n, dtype=dtype, device="meta") for n in (4096, 1024))
    acc = torch.empty(1, 4096, 1024, device="meta")
    launch = our_launch("sm_90", lambda: matmul_triton.add_outer(acc, dy, x, token_blocks([256]), empty))
    return [line for line in program(launch, "sm_90") if not line.startswith("shfl.sync.idx")]


def empty_buffer_rows() -> Rows:
    """A weight gradient that is written over an empty buffer, beside one that is added to what it holds.

    The control is a product that drops its accumulator instead of adding to it.
    """
    rows = {}
    for dtype in (torch.bfloat16, torch.float16):
        adding, written = (outer_lines(dtype, empty) for empty in (False, True))
        dropping = [line.replace(", 1, 1, 1, 1", ", 0, 1, 1, 1") for line in written]
        expected = expressions(adding)
        rows[str(dtype)] = {
            "instructions": expected.total(),
            "differ": total_difference(expected, expressions(written)),
            "control": total_difference(expected, expressions(dropping)),
        }
    return rows


def chunk_launches(dtype: torch.dtype, target: str) -> dict[str, Launch]:
    """Attention over chunks of 512 keys, of contexts up to 4,096: the launches of all its forms, by name."""

    def int32(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32, device="meta")

    q, pages = (torch.empty(*n, 128, dtype=dtype, device="meta") for n in ((64, 16), (4000, 64, 8)))
    spans, rule, scale = Spans(int32(65), int32(64), int32(64, 64), 8, int32(65)), RULES["chunked-512"], 0.1
    with tiles_of_target(target), recorded_launches() as launches:
        shared = no_chunks(64, 16, 8, dtype, q.device)
        walk_packed(q, q[:, :8], q[:, :8], spans, scale, rule, True, 4096)
        walk_paged(q, pages, pages, spans, scale, rule)
        split_paged(q, pages, pages, spans, scale, rule)
        split_paged(q, pages, pages, spans._replace(shared=shared), scale, rule)
    return dict(zip(("packed", "paged", "split", "merge", "shared"), launches, strict=False))


def sums(lines: list[str]) -> Counter[int]:
    """The expressions of a program, but for shuffles of what nobody has computed yet: they move it."""
    return expressions(lines) - expressions([line for line in lines if line.startswith("shfl")])


def not_of_joins(lines: list[str], others: list[str]) -> int:
    """Instructions of a program beyond `others` that joins of chunks and quotients do not have.

    A join has for each maximum two differences and two powers, and adds by fma only. A quotient adds 0.0.
    """
    counts = opcodes(lines) - opcodes(others)
    high, quotients = counts["max.f32"], counts["div.full.f32"]
    expected = Counter({"sub.f32": 2 * high, "ex2.approx.ftz.f32": 2 * high, "add.f32": quotients})
    free = ("max.", "mul.f32", "fma.rn.f32", "div.", "cvt.rn.", "shfl.")
    rest = Counter({x: n for x, n in counts.items() if not x.startswith(free)})
    return total_difference(rest, expected)


def chunk_rows(target: str) -> Rows:
    """Attention over chunks: each form has the sums of the walk, and what its joins have."""
    rows = {}
    for dtype in DTYPES:
        launches = chunk_launches(dtype, target)
        walk = launches["paged"]
        launches["one chunk"] = walk._replace(options=walk.options | {"SINGLE": True})
        lines = {name: program(launch, target) for name, launch in launches.items()}
        pairs = [("shared", "split"), ("split", "shared"), ("paged", "packed")]
        if target != "sm_100":  # whose instructions for two numbers pair other ones in the two programs
            pairs.append(("split", "paged"))
        for part, whole in pairs:
            expected = sums(lines[part])
            rows[f"{part} in {whole}, {target} {dtype}"] = {
                "instructions": expected.total(),
                "differ": (expected - sums(lines[whole])).total(),
            }
        for what, others in (("merge", []), ("paged", lines["one chunk"])):
            differ = not_of_joins(lines[what], others)
            rows[f"joins of {what}, {target} {dtype}"] = row(lines[what], differ)
    return rows


def chunk_controls() -> dict[str, int]:
    """Attention over chunks on sm_90 with other tiles, and with joins that are not fused."""

    @triton.jit
    def unfused(M, L, A, m, l, acc):
        high = tl.maximum(M, m)
        a, b = tl.exp2(M - high), tl.exp2(m - high)
        return high, l * b + L * a, acc * b[:, None] + A * a[:, None]

    walk, split = (chunk_launches(torch.float32, "sm_90")[name] for name in ("paged", "split"))
    other = split._replace(options=split.options | {"TILE": 64})
    counts = {"tile": (sums(program(other, "sm_90")) - sums(program(walk, "sm_90"))).total()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_split_triton, "join", unfused)
        merge = chunk_launches(torch.float32, "sm_90")["merge"]
        merge = merge._replace(options=merge.options | {"enable_fp_fusion": False})
        counts["join"] = not_of_joins(program(merge, "sm_90"), [])
    return counts


def column_sum_rows() -> Rows:
    """The end of a norm's gradient, of several weights by one launch, beside one launch for one weight.

    The control has runs of half as many rows.
    """
    acc, partial = (torch.empty(n, 1024, device="meta") for n in (1, 64))
    blocks = token_blocks([1024])
    one = our_launch("sm_90", lambda: add_partials(acc, partial, blocks, NORM_ROWS))
    waiting = [PartialSums(acc, partial, blocks, NORM_ROWS)] * 2
    several = our_launch("sm_90", lambda: add_all_partials(waiting))
    half = one._replace(options=one.options | {"RUNS": one.options["RUNS"] // 2})
    expected, joint, other = (expressions(program(x, "sm_90")) for x in (one, several, half))
    return {
        "norms": {
            "instructions": expected.total(),
            "differ": total_difference(expected, joint),
            "control": total_difference(expected, other),
        }
    }


def row(vllm_program: list[str], places: int) -> dict[str, int]:
    return {"instructions": len(vllm_program), "differ": places}


def matmul_rows(batch_invariant: Any, target: str) -> Rows:
    rows = {}
    for dtype in DTYPES:
        vllm, ours = (program(x, target) for x in matmul_launches(batch_invariant, dtype, target))
        rows[f"matmul {target} {dtype}"] = row(vllm, differ(vllm, ours))
        # The compiler reads the bias earlier in one of the two, so their order is left out.
        for what, K in (("", 1024), (", uneven", 1000)):
            launches = matmul_launches(batch_invariant, dtype, target, K, bias=True)
            vllm, ours = (program(x, target) for x in launches)
            places = total_difference(expressions(vllm), expressions(ours))
            rows[f"matmul with a bias{what} {target} {dtype}"] = row(vllm, places)
    return rows


def attention_rows(unified: Any, target: str) -> Rows:
    rows, logarithm = {}, Counter()
    for what, shape in ATTENTIONS.items():
        launches = attention_launches(unified, torch.bfloat16, target, **shape)[:2]
        vllm, paged = (program(x, target) for x in launches)
        rows[f"attention{what} {target} {torch.bfloat16}"] = row(vllm, differ(vllm, paged))
    for dtype in DTYPES:
        vllm, paged, packed = (program(x, target) for x in attention_launches(unified, dtype, target))
        rows[f"attention paged {target} {dtype}"] = row(vllm, differ(vllm, paged))
        # Ours against packed keys is the same program, followed by the logarithm of lse.
        if dtype == torch.float32:
            # On sm_90 the compiler exchanges two subtractions that do not depend on each other.
            places = (expressions(vllm) - expressions(packed)).total()
            places += total_difference(opcodes(packed), opcodes(vllm) + logarithm)
        else:
            places, logarithm = differ(vllm, packed[: len(vllm)]), opcodes(packed[len(vllm) :])
        rows[f"attention packed {target} {dtype}"] = row(vllm, places)
    return rows


def main() -> None:
    os.environ.update(ENVIRONMENT)
    batch_invariant = batch_invariant_module()  # before any other module of vLLM
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.v1.attention.ops import triton_unified_attention as unified

    report: dict[str, Any] = {}
    for target in sys.argv[1:]:
        report |= matmul_rows(batch_invariant, target) | attention_rows(unified, target)
        report |= expert_rows(fused_moe, target)
        report["chunks"] = report.get("chunks", {}) | chunk_rows(target)
    report["empty buffers"], report["column sums"] = empty_buffer_rows(), column_sum_rows()
    report["control"] = controls(batch_invariant, unified) | expert_controls(fused_moe)
    report["control of chunks"] = chunk_controls()
    report["control"] |= rounded_operands(batch_invariant)
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
