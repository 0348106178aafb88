"""Triton kernels of logprob.py: log-softmax, gather and entropy in one kernel, and the gradient in place.

Forward: as vLLM 0.32's batch-invariant log_softmax (`_softmax_kernel`,
model_executor/determinism/batch_invariant.py; `_topk_log_softmax_kernel` of the V2 runner sums in the same
way). First the maximum of the row, then the sum of exp(z - max) over tiles of 1024 logits in ascending order,
then z - max - log(sum) at the token. The sum of the entropy runs beside it. The division by the temperature
is in the kernel and correctly rounded; z / 1.0 = z is left out.

`_logprob_fwd_16` does the same from 16-bit logits, converted as they are read. It reads several tiles at
once, sums each one as alone, and adds the sums one after another. `max_contiguous` gives a thread four
neighbours, which is the layout of fp32 logits. Without it Triton takes eight, and the sums of 154 of 1024
rows had other bits on an H100.

Backward: element by element, from the forward's maximum and log(sum). Each gradient overwrites its logit.
There is no sum, and no second [rows, V].

By leaves (leaves.py), `_leaf_sums` has a program for each leaf of a row, and the rest is torch's, element by
element. It reads 16-bit logits and fp32 ones in one layout.

`prefix_sums` adds integers. Integer sums are exact, and so the same in any order. This matters because
torch's cumsum on a GPU splits one row in another way than many rows.

Shapes: logits [rows, V] in fp32 or 16 bits; ids [rows]; logp, entropy, max,
log_sum [rows] in fp32.
Roundings: dlogits once.
Order: vLLM's tile and its four warps order the sums, so both are constants.
"""

import torch
import triton
import triton.language as tl

from .launch import ceil_div, dense, launch
from .leaves import WHOLE, Leaves
from .tiles import generation

# vLLM's tile and warps, which order the sums.
TILE, WARPS = 1024, 4
# Tiles that the forward from 16-bit logits reads at once, and columns at once for the maximum. They decide no
# bit.
TILES, MAX_TILE = 4, 4096
# Elements of one program of the backward. This decides no bit: no element depends on another.
BWD_TILE = 4096


@triton.jit
def over(z, temperature, DIVIDE: tl.constexpr):
    """z / temperature, correctly rounded."""
    return tl.div_rn(z, temperature) if DIVIDE else z


@triton.jit
def _logprob_fwd(
    logits_ptr,
    ids_ptr,
    logp_ptr,
    entropy_ptr,
    max_ptr,
    log_sum_ptr,
    stride,
    V,
    temperature,
    DIVIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride
    largest = -float("inf")
    for start in range(0, V, TILE):
        cols = start + tl.arange(0, TILE)
        z = over(tl.load(logits + cols, mask=cols < V, other=-float("inf")), temperature, DIVIDE)
        largest = tl.max(tl.maximum(z, largest))
    total = 0.0
    weighted = 0.0
    for start in range(0, V, TILE):
        cols = start + tl.arange(0, TILE)
        mask = cols < V
        shifted = over(tl.load(logits + cols, mask=mask, other=0.0), temperature, DIVIDE) - largest
        e = tl.exp(shifted)
        total += tl.sum(tl.where(mask, e, 0.0))
        weighted += tl.sum(tl.where(mask & (e > 0.0), e * shifted, 0.0))
    log_sum = tl.log(total)
    z = over(tl.load(logits + tl.load(ids_ptr + row)), temperature, DIVIDE)
    tl.store(logp_ptr + row, z - largest - log_sum)
    tl.store(entropy_ptr + row, log_sum - tl.div_rn(weighted, total))
    tl.store(max_ptr + row, largest)
    tl.store(log_sum_ptr + row, log_sum)


@triton.jit
def _logprob_fwd_16(
    logits_ptr,
    ids_ptr,
    logp_ptr,
    entropy_ptr,
    max_ptr,
    log_sum_ptr,
    stride,
    V,
    temperature,
    DIVIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    MAX_TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride
    most = tl.full([MAX_TILE], float("-inf"), tl.float32)
    for start in range(0, V, MAX_TILE):
        cols = start + tl.arange(0, MAX_TILE)
        z = tl.load(logits + cols, mask=cols < V, other=float("-inf"))
        most = tl.maximum(most, z.to(tl.float32))
    largest = over(tl.max(most), temperature, DIVIDE)  # the division keeps the order of the logits
    total, weighted = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    tiles = tl.arange(0, TILES)
    for start in range(0, V, TILE * TILES):
        cols = start + tiles[:, None] * TILE + tl.max_contiguous(tl.arange(0, TILE), 4)[None, :]
        mask = cols < V
        z = tl.load(logits + cols, mask=mask, other=0.0).to(tl.float32)
        shifted = over(z, temperature, DIVIDE) - largest
        e = tl.exp(shifted)
        sums = tl.sum(tl.where(mask, e, 0.0), axis=1)
        weighted_sums = tl.sum(tl.where(mask & (e > 0.0), e * shifted, 0.0), axis=1)
        for i in tl.static_range(TILES):  # picks one sum: the other terms are zeros
            total += tl.sum(tl.where(tiles == i, sums, 0.0), axis=0)
            weighted += tl.sum(tl.where(tiles == i, weighted_sums, 0.0), axis=0)
    one = tl.arange(0, 1)
    log_sum = tl.log(total)
    z = over(tl.load(logits + tl.load(ids_ptr + row)).to(tl.float32), temperature, DIVIDE)
    tl.store(logp_ptr + row + one, z - largest - log_sum)
    tl.store(entropy_ptr + row + one, log_sum - tl.div_rn(weighted, total))
    tl.store(max_ptr + row, largest)
    tl.store(log_sum_ptr + row + one, log_sum)


@triton.jit
def _leaf_sums(
    logits_ptr,
    max_ptr,
    total_ptr,
    weighted_ptr,
    stride,
    width,
    temperature,
    DIVIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    row, leaf = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits = logits_ptr + row * stride + leaf * width
    largest = tl.load(max_ptr + row)
    total = 0.0
    weighted = 0.0
    for start in range(0, width, TILE):
        cols = start + tl.max_contiguous(tl.arange(0, TILE), 4)
        mask = cols < width
        z = tl.load(logits + cols, mask=mask, other=0.0).to(tl.float32)
        shifted = over(z, temperature, DIVIDE) - largest
        e = tl.exp(shifted)
        total += tl.sum(tl.where(mask, e, 0.0))
        weighted += tl.sum(tl.where(mask & (e > 0.0), e * shifted, 0.0))
    tl.store(total_ptr + leaf * tl.num_programs(0) + row, total)
    tl.store(weighted_ptr + leaf * tl.num_programs(0) + row, weighted)


# These pointers are slices of whole columns, and may begin at any address.
@triton.jit(do_not_specialize_on_alignment=["ids_ptr", "dlogp_ptr", "max_ptr", "log_sum_ptr"])
def _logprob_bwd(
    logits_ptr,
    ids_ptr,
    dlogp_ptr,
    max_ptr,
    log_sum_ptr,
    dlogits_ptr,
    V,
    temperature,
    divisor,
    DIVIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = cols < V
    z = tl.load(logits_ptr + row * V + cols, mask=mask, other=-float("inf")).to(tl.float32)
    z = over(z, temperature, DIVIDE)
    p = tl.exp(z - tl.load(max_ptr + row) - tl.load(log_sum_ptr + row))
    chosen = tl.where(cols == tl.load(ids_ptr + row), 1.0, 0.0)
    dz = over((chosen - p) * tl.load(dlogp_ptr + row), divisor, DIVIDE)
    tl.store(dlogits_ptr + row * V + cols, dz.to(dlogits_ptr.dtype.element_ty), mask=mask)


def logprob_fwd(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0, leaves: Leaves = WHOLE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """logp, entropy, max and log_sum, [rows] each, of logits [rows, V] divided by the temperature."""
    logits, (rows, V) = dense(logits), logits.shape
    if leaves.count > 1:
        return _by_leaves(logits, ids, temperature, leaves)
    logp, entropy, largest, log_sum = (
        torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(4)
    )
    narrow, options = logits.dtype.itemsize == 2, {}
    if narrow:
        options = {"TILES": TILES, "MAX_TILE": MAX_TILE}
        if generation(logits.device) == "ampere":
            options["maxnreg"] = 128  # Triton 3.6 stops at 48 registers there, and spills 8 bytes
    launch(
        _logprob_fwd_16 if narrow else _logprob_fwd,
        (rows,),
        logits,
        ids,
        logp,
        entropy,
        largest,
        log_sum,
        V,
        V,
        float(temperature),
        DIVIDE=temperature != 1.0,
        TILE=TILE,
        **options,
        num_warps=WARPS,
    )
    return logp, entropy, largest, log_sum


def _by_leaves(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float, leaves: Leaves
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """logprob_fwd by leaves of the vocabulary, each summed in tiles from its beginning.

    Where ranks share it, the logits are this rank's, and the ids count those of all.
    """
    rows, V = logits.shape
    z, largest = leaves.chosen(logits, ids).float(), leaves.highest(logits.amax(1).float())
    if temperature != 1.0:
        divisor = z.new_full((), temperature)
        z, largest = z / divisor, largest / divisor
    total, weighted = (z.new_empty(leaves.mine, rows) for _ in range(2))
    launch(
        _leaf_sums,
        (rows, leaves.mine),
        logits,
        largest,
        total,
        weighted,
        V,
        V // leaves.mine,
        float(temperature),
        DIVIDE=temperature != 1.0,
        TILE=TILE,
        num_warps=WARPS,
    )
    total, weighted = (leaves.join(list(sums)) for sums in (total, weighted))
    log_sum = torch.log(total)
    return z - largest - log_sum, log_sum - weighted / total, largest, log_sum


def logprob_bwd(
    logits: torch.Tensor,
    ids: torch.Tensor,
    dlogp: torch.Tensor,
    largest: torch.Tensor,
    log_sum: torch.Tensor,
    out: torch.Tensor,
    temperature: float = 1.0,
    divisor: float = 1.0,
) -> None:
    """out [rows, V] = (1[v = id] - p_v) dlogp / divisor, with p from logits / temperature.

    `out` may be the same tensor as `logits`. Both are dense.
    """
    rows, V = logits.shape
    assert logits.is_contiguous()
    assert out.is_contiguous()
    launch(
        _logprob_bwd,
        (rows, ceil_div(V, BWD_TILE)),
        logits,
        ids,
        dlogp.contiguous(),
        largest,
        log_sum,
        out,
        V,
        float(temperature),
        float(divisor),
        DIVIDE=not temperature == divisor == 1.0,
        TILE=BWD_TILE,
        num_warps=WARPS,
    )


def prefix_sums(e: torch.Tensor) -> torch.Tensor:
    """Prefix sums along each row of e [rows, V], times a factor that depends on V only; fp64, ascending.

    0 <= e <= 1. e is counted in integer units that keep the sum of a whole row below 2^62: a unit is 2^-44 at
    a vocabulary of 2^18.
    """
    units = 2.0 ** (62 - (e.shape[1] - 1).bit_length())
    return torch.cumsum((e.double() * units).to(torch.int64), dim=1).double()
