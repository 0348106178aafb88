"""What a GPU would run, checked without one: Triton kernels compiled ahead of time, and the binaries read.

A result that depends on nothing but its inputs needs binaries without atomics (their order is the
hardware's); a fast one needs no local-memory spills. Registers and shared memory are compared with a recorded
table, so that a change that costs occupancy is noticed. The float instructions of two kernels compiled with
the same options tell whether both do the same arithmetic.

Launches are given as (name, kernel, args, options): the jit function, the arguments of the launch (meta
tensors do) and its constants and options by name. Triton specialises them as in a real launch. The process
must not run Triton's interpreter.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

# Compute capability (or AMD architecture) and the width of a warp.
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}

_ATOMIC_PTX = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:atom|red)\.", re.MULTILINE)
# Not OR and AND: with those a Blackwell program takes and returns its tensor memory.
_ATOMIC_SASS = re.compile(r"\b(?:ATOM[GS]?|RED)\b(?!\.(?:OR|AND)\b)")
_ATOMIC_GCN = re.compile(
    r"\b(?:global|flat|buffer)_atomic|\bds_(?:add|sub|inc|dec|min|max|and|or|xor|cmpst|wrxchg)_"
)
_PTX = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_.:]*)\s+([^;]*);", re.MULTILINE)
_FLOAT = re.compile(r"\.(?:f16|bf16|f32|f64|tf32|f16x2|bf16x2|f32x2)\b")
_MOVES = ("ld.", "st.", "mov.", "selp.", "setp.")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class Binary(NamedTuple):
    """One kernel, compiled for one target."""

    name: str
    target: str
    registers: int  # of a thread (vector registers on AMD)
    shared_bytes: int
    local_bytes: int  # stack and spills of a thread
    atomics: int  # instructions


def compile_launch(kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any], target: str) -> Any:
    """The compiled kernel of one launch, as Triton would build it on a machine with that target."""
    import triton

    source, parsed, gpu = specialised(kernel, args, options, target)
    return triton.compile(source, target=gpu, options=parsed.__dict__)


def specialised(
    kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any], target: str
) -> tuple[Any, Any, Any]:
    """Triton's source of one launch with all that it is specialised on, its parsed options, and the GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    gpu = GPUTarget(*TARGETS[target])
    backend = make_backend(gpu)
    bound, specialization, rest = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *args, **options
    )
    parsed, signature, constexprs, attrs = kernel._pack_args(
        backend, dict(options), bound, specialization, rest
    )
    return ASTSource(kernel, signature, constexprs, attrs), parsed, gpu


def inspect(name: str, target: str, compiled: Any) -> Binary:
    """Read registers, shared and local memory, and atomics from a compiled kernel."""
    asm = compiled.asm
    if "amdgcn" in asm:
        text = asm["amdgcn"]
        local = _gcn_number(text, "private_segment_fixed_size") + 4 * _gcn_number(text, "vgpr_spill_count")
        atomics = len(_ATOMIC_GCN.findall(text))
        return Binary(name, target, _gcn_number(text, "vgpr_count"), compiled.metadata.shared, local, atomics)
    registers, stack, _, local = (
        int(n) for n in _USAGE.search(_cuobjdump(asm["cubin"], "-res-usage")).groups()
    )
    atomics = len(_ATOMIC_PTX.findall(asm["ptx"])) + len(
        _ATOMIC_SASS.findall(_cuobjdump(asm["cubin"], "-sass"))
    )
    return Binary(name, target, registers, compiled.metadata.shared, stack + local, atomics)


def _gcn_number(text: str, key: str) -> int:
    return int(re.search(rf"\.{key}:\s+(\d+)", text)[1])


def _cuobjdump(cubin: bytes, what: str) -> str:
    """What the cuobjdump that comes with Triton says about a binary."""
    import triton.knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def faults(binaries: Iterable[Binary], table: Mapping[str, Mapping[str, list[int]]] | None) -> list[str]:
    """One line for each binary that breaks a rule.

    `table`: name -> target -> [registers, shared_bytes]; None compares nothing.
    """
    found = []
    for b in binaries:
        at = f"{b.name} on {b.target}"
        if b.atomics:
            found.append(f"{at}: {b.atomics} atomic instructions; the order of their sums is not fixed")
        if b.local_bytes:
            found.append(f"{at}: {b.local_bytes} bytes of local memory a thread; registers spill")
        if table is None:
            continue
        recorded = table.get(b.name, {}).get(b.target)
        if recorded is None:
            found.append(f"{at}: not in the table; record it")
        elif b.registers > recorded[0] or b.shared_bytes > recorded[1]:
            found.append(
                f"{at}: {b.registers} registers, {b.shared_bytes} bytes shared; recorded {recorded[0]}, {recorded[1]}"
            )
    return found


def as_table(binaries: Iterable[Binary]) -> dict[str, dict[str, list[int]]]:
    """name -> target -> [registers, shared_bytes]."""
    table: dict[str, dict[str, list[int]]] = {}
    for b in binaries:
        table.setdefault(b.name, {})[b.target] = [b.registers, b.shared_bytes]
    return table


def float_program(ptx: str) -> list[str]:
    """The float instructions of a PTX text in order, with the shuffles between them, their constants and
    their data flow.

    Registers are numbered by their first appearance in this list, so that two kernels that differ in
    addressing only are equal.
    """
    numbers: dict[str, str] = {}
    lines = []
    for opcode, operands in _PTX.findall(ptx):
        if opcode.startswith("shfl.") or (_FLOAT.search(opcode) and not opcode.startswith(_MOVES)):
            renamed = re.sub(r"%\w+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), operands)
            lines.append(f"{opcode} {' '.join(renamed.split())}")
    return lines
