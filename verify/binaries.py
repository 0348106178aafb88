"""Binaries for a GPU, checked without a GPU.

The Triton kernels are compiled ahead of time, and their code is read. A binary must have no atomics: the
hardware chooses the order of atomics, and a result must depend on its inputs alone. A fast binary has no
local-memory spills. Registers and shared memory are compared with a recorded table, so that a change that
costs occupancy is noticed. Two kernels do the same arithmetic if they have the same float instructions after
compilation with the same options.

A launch is given as kernel, args and options: the jit function, the arguments of the launch (meta tensors are
enough), and its constants and options by name. Triton specialises them as in a real launch. The process must
not run Triton's interpreter.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

# Backend, compute capability (or AMD architecture) and width of a warp.
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}

_ATOMIC_PTX = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:atom|red)\.", re.MULTILINE)
# OR and AND are not counted: a Blackwell program takes and returns its tensor memory with them.
_ATOMIC_SASS = re.compile(r"\b(?:ATOM[GS]?|RED)\b(?!\.(?:OR|AND)\b)")
_ATOMIC_GCN = re.compile(
    r"\b(?:global|flat|buffer)_atomic|\bds_(?:add|sub|inc|dec|min|max|and|or|xor|cmpst|wrxchg)_"
)
_PTX = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_.:]*)\s+([^;]*);", re.MULTILINE)
_FLOAT = re.compile(r"\.(?:f16|bf16|f32|f64|tf32|f16x2|bf16x2|f32x2)\b")
_MOVES = ("ld.", "st.", "mov.", "selp.", "setp.")
_WGMMA_REGISTERS = re.compile(r"\bwgmma\.mma_async[^;{]*\{[^}]*\}\s*,\s*\{[^;]*;")
_WGMMA_WAIT = re.compile(r"\bwgmma\.wait_group\S*\s+(\d+);")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class Binary(NamedTuple):
    """One kernel, compiled for one target."""

    name: str
    target: str
    registers: int  # of a thread (vector registers on AMD)
    shared_bytes: int
    local_bytes: int  # stack and spills of a thread
    atomics: int  # instructions
    pending_register_products: int = 0  # see the function of this name; on Hopper only


def compile_launch(kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any], target: str) -> Any:
    """The compiled kernel of one launch, as Triton would build it on a machine with that target."""
    import triton

    source, parsed, gpu = specialised(kernel, args, options, target)
    return triton.compile(source, target=gpu, options=parsed.__dict__)


def specialised(
    kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any], target: str
) -> tuple[Any, Any, Any]:
    """Triton's source of one launch with all its specialisations, its parsed options, and the GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    gpu = GPUTarget(*TARGETS.get(target) or ("cuda", int(target.removeprefix("sm_")), 32))
    backend = make_backend(gpu)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(*args, **options)
    parsed, signature, constexprs, attrs = kernel._pack_args(
        backend, dict(options), bound, specialization, rest
    )
    return ASTSource(kernel, signature, constexprs, attrs), parsed, gpu


def inspect(name: str, target: str, compiled: Any) -> Binary:
    """Registers, shared and local memory, and atomics of a compiled kernel."""
    asm = compiled.asm
    if "amdgcn" in asm:
        gcn = asm["amdgcn"]
        local = _gcn_number(gcn, "private_segment_fixed_size") + 4 * _gcn_number(gcn, "vgpr_spill_count")
        atomics = len(_ATOMIC_GCN.findall(gcn))
        return Binary(name, target, _gcn_number(gcn, "vgpr_count"), compiled.metadata.shared, local, atomics)
    usage = _USAGE.search(_cuobjdump(asm["cubin"], "-res-usage"))
    registers, stack, _, local = (int(n) for n in usage.groups())
    sass = _cuobjdump(asm["cubin"], "-sass")
    atomics = len(_ATOMIC_PTX.findall(asm["ptx"])) + len(_ATOMIC_SASS.findall(sass))
    pending = pending_register_products(asm["ptx"])
    return Binary(name, target, registers, compiled.metadata.shared, stack + local, atomics, pending)


def inspect_all(
    launches: Iterable[tuple[str, tuple[Any, ...]]], target: str, threads: int
) -> Iterator[Binary]:
    """The binaries of launches, each with its name, in their order. So many threads compile and read at once.

    LLVM, ptxas and cuobjdump hold no lock of Python's.
    """
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(lambda x: inspect(x[0], target, compile_launch(*x[1], target)), launches)


def pending_register_products(ptx: str) -> int:
    """Tensor products of Hopper (wgmma) whose first operand is in registers, where some are left pending.

    Their registers may then be written before the product has read them: by Triton (its issue 9433), or by a
    ptxas before 13.3. A program that waits for all of them, wait_group 0, is safe.
    """
    from_registers = len(_WGMMA_REGISTERS.findall(ptx))
    pending = any(int(n) for n in _WGMMA_WAIT.findall(ptx))
    return from_registers if pending else 0


def _gcn_number(gcn: str, key: str) -> int:
    return int(re.search(rf"\.{key}:\s+(\d+)", gcn)[1])


def _cuobjdump(cubin: bytes, option: str) -> str:
    """The output of Triton's own cuobjdump for a binary."""
    import triton.knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def faults(
    binaries: Iterable[Binary], table: Mapping[str, Mapping[str, tuple[int, int]]] | None
) -> list[str]:
    """One line for each rule that a binary breaks.

    `table`: name -> target -> registers, shared_bytes. With None, no binary is compared with a table.
    """
    lines = []
    for b in binaries:
        place = f"{b.name} on {b.target}"
        if b.atomics:
            lines.append(f"{place}: {b.atomics} atomic instructions; the order of their sums is not fixed")
        if b.local_bytes:
            lines.append(f"{place}: {b.local_bytes} bytes of local memory a thread; registers spill")
        if b.pending_register_products:
            lines.append(
                f"{place}: {b.pending_register_products} products read registers while they are pending"
            )
        if table is None:
            continue
        recorded = table.get(b.name, {}).get(b.target)
        if recorded is None:
            lines.append(f"{place}: not in the table; record it")
        elif b.registers > recorded[0] or b.shared_bytes > recorded[1]:
            lines.append(
                f"{place}: {b.registers} registers, {b.shared_bytes} bytes shared; "
                f"recorded {recorded[0]}, {recorded[1]}"
            )
    return lines


def as_table(binaries: Iterable[Binary]) -> dict[str, dict[str, tuple[int, int]]]:
    """The table of the binaries: name -> target -> registers, shared_bytes."""
    table: dict[str, dict[str, tuple[int, int]]] = {}
    for b in binaries:
        table.setdefault(b.name, {})[b.target] = b.registers, b.shared_bytes
    return table


def float_program(ptx: str) -> list[str]:
    """The float instructions and shuffles of a PTX text, in order, with their constants and their data flow.

    Registers are numbered by their first appearance in this list. So two kernels that differ in addressing
    only are equal.
    """
    numbers: dict[str, str] = {}
    lines = []
    for opcode, operands in _PTX.findall(ptx):
        if opcode.startswith("shfl.") or (_FLOAT.search(opcode) and not opcode.startswith(_MOVES)):
            renamed = re.sub(r"%\w+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), operands)
            lines.append(f"{opcode} {' '.join(renamed.split())}")
    return lines
