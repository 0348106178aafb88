"""vLLM's compiled operations beside ours, in a process of its own.

On a GPU silu_and_mul and rotary_embedding must have our bits. fused_add_rms_norm need not: zerokl replaces it
(engine/rollout/vllm/norm.py). Its rows say where it differs: a call's first rows beside those of a shorter
call, and beside our two operations. On a CPU vLLM has other kernels, so no bit need be equal there.
"""

from collections.abc import Iterator

import torch
from zerokl.benchmarks.device.processes import serve
from zerokl.benchmarks.machine import Machine, Row, name_of
from zerokl.files.bitwise import count_unequal
from zerokl.kernels.rms_norm import add_rms_norm
from zerokl.kernels.rope import rope
from zerokl.kernels.silu_mul import silu_mul

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_THETA, _EPS = 1e6, 1e-6


def compiled_ops(m: Machine) -> Iterator[Row]:
    """Every comparison, in three dtypes."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    verdict = "unequal" if m.on_gpu else "differ"
    for dtype in _DTYPES:
        elements, unequal = _silu_mul(m, dtype)
        yield {"what": f"vLLM's silu_and_mul {name_of(dtype)}, {elements} elements", verdict: unequal}
        for name, (_, _, _, heads, kv_heads, head_dim) in m.shapes.items():
            elements, unequal = _rope(m, dtype, heads, kv_heads, head_dim)
            what = f"vLLM's rotary_embedding {name_of(dtype)} {name}, {elements} elements"
            yield {"what": what, verdict: unequal}
        for name, (D, *_) in m.shapes.items():
            yield from _add_norm(m, dtype, name, D)


def _silu_mul(m: Machine, dtype: torch.dtype) -> tuple[int, int]:
    """Every bit pattern of the gate in 16 bits, each with several u; random patterns in fp32."""
    D, rows = (256, 16) if m.small else (4096, 256)
    generator = torch.Generator().manual_seed(3)
    if dtype == torch.float32:
        patterns = torch.randint(-(1 << 31), 1 << 31, (rows, D), generator=generator).int()
    else:
        patterns = torch.arange(1 << 16).to(torch.int16)
        patterns = patterns.repeat(-(-rows * D // patterns.numel()))[: rows * D].view(rows, D)
    gate = patterns.contiguous().view(dtype)
    up = torch.randn(rows, D, generator=generator).to(dtype)
    x = torch.cat([gate, up], dim=1).to(m.device)
    vllm_rows = torch.empty(rows, D, dtype=dtype, device=m.device)
    torch.ops._C.silu_and_mul(vllm_rows, x)
    return rows * D, count_unequal(silu_mul(x), vllm_rows)


def _rope(m: Machine, dtype: torch.dtype, heads: int, kv_heads: int, D: int) -> tuple[int, int]:
    T, positions = (16, 64) if m.small else (4096, 4096)
    frequencies = _THETA ** (-torch.arange(0, D, 2, dtype=torch.float32) / D)
    angles = torch.arange(positions).float().unsqueeze(1) * frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(m.device, dtype)  # [positions, D]
    positions_T = torch.randperm(positions, generator=torch.Generator().manual_seed(4))[:T].to(m.device)
    x = m.randn(T, heads + kv_heads, D, dtype=dtype)
    q, k = (part.reshape(T, -1).clone() for part in x.split([heads, kv_heads], dim=1))
    torch.ops._C.rotary_embedding(positions_T, q, k, D, table, True)
    vllm_rows = torch.cat([q.view(T, heads, D), k.view(T, kv_heads, D)], dim=1)
    cos, sin = (part.contiguous() for part in table[positions_T].chunk(2, dim=1))
    return x.numel(), count_unequal(rope(x, cos, sin), vllm_rows)


def _add_norm(m: Machine, dtype: torch.dtype, name: str, D: int) -> Iterator[Row]:
    many, few = 300, 100
    x, residual, w = m.randn(many, D, dtype=dtype), m.randn(many, D, dtype=dtype), m.randn(D, dtype=dtype)

    def vllm_rows(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        y, r = x[:rows].clone(), residual[:rows].clone()
        torch.ops._C.fused_add_rms_norm(y, r, w, _EPS)
        return y, r

    what = f"vLLM's fused_add_rms_norm {name_of(dtype)} {name}"
    differ = sum(count_unequal(a[:few], b) for a, b in zip(vllm_rows(many), vllm_rows(few), strict=True))
    yield {"what": f"{what}: rows of a call of {many} beside one of {few}", "differ": differ}
    ours = add_rms_norm(x, residual, w, _EPS)[:2]
    differ = sum(count_unequal(a, b) for a, b in zip(ours, vllm_rows(many), strict=True))
    yield {"what": f"{what}: beside our addition and norm", "differ": differ}


if __name__ == "__main__":
    serve(compiled_ops)
