"""Matrix products with weights: rows times a weight, and the sum of a weight's gradient.

    y = x w^T          acc += sum over token blocks of dy_b^T x_b

This file is the reference, for CPUs. The GPU has matmul_triton.py.

Shapes: x [T, K]; w [N, K]; y, dy [T, N]; acc [N, K] in fp32 (fp64 for fp64). T rows (tokens), K reduced
width, N output width.
Roundings: y is rounded once to the dtype of x, from an fp32 sum (fp64 for fp64). acc is not rounded.

oneDNN computes the products in fp32 and bf16. Products of fp16 are computed from fp32 numbers and rounded
once. So are products of bf16 where oneDNN has none (without AVX-512). Four facts about CPU matrix libraries
shape this file. They were measured with torch 2.13, MKL 2024.2 and oneDNN 3.12, with AVX-512 and with AVX2:

- The bits of a row may change with the number of rows in the call, because another number of rows may select
  another micro-kernel (one or two rows always do here). So, by definition, the bits of a row are those of a
  product of ROW_TILE rows, and rows are cut into tiles of a few fixed sizes. A tile of another size than
  ROW_TILE is taken only where a probe found that the library gives every row the same bits, on this machine
  and for this shape (`_agrees`). The other tile saves time and decides no bit.
- A sum of oneDNN is one chain of fused multiply-adds, up to a width of 1,024. So the loops of cpp/ compute it
  as well, for any number of rows, where a probe finds the same bits (`_cpp_agrees`).
- A call of oneDNN takes 40 microseconds before it computes anything; torch.mm, which is MKL in fp32, a few.
  So mm computes small products where a probe found that it gives the bits of oneDNN (`_mm_agrees`).
- With a width that is not a multiple of 16, the library sums the edge of the last vector in another order,
  and the place of that edge depends on the number of threads. So widths are first padded with zeros to a
  multiple of 16.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from types import MappingProxyType

import torch
import torch.nn.functional as F

from ..files.bitwise import equal
from . import matmul_cpp
from .backend import on_cpp, on_triton
from .grad import GradBuffer, accumulate_dtype
from .order import ALIGN, ROW_TILE, TokenBlocks, join_pairs
from .tile_tables import DEFAULT_TABLE, TileTable

# Rows of the tiles that replace several tiles of ROW_TILE rows, longest first. They take 0.4 to 0.9 of the
# time.
LONG_TILES = (1024, 512, 256, 128, 64)
# Rows of the tile that holds the last rows, where they are fewer than the shortest of these. It takes 0.5 to
# 0.9 of the time.
_TAIL_TILES = (8, 16, 24, 40, 48, 56)
# Products of more multiplications than this are not probed, but cut into tiles of ROW_TILE rows. So a probe
# takes a tenth of a second at most.
_PROBE_LIMIT = 1 << 31
# Products of as many multiplications or more go to oneDNN without a probe: there the cost of a call is small.
_MM_LIMIT = 1 << 22
# Tiles of at most so many rows read packed weights, and the packed copies have at most so many bytes. The
# limits bound time and memory.
_PACKED_ROWS, _PACKED_BYTES = 128, 1 << 28
PackedWeights = Mapping[torch.Tensor, torch.Tensor]  # by weight, its packed copy
UNPACKED: PackedWeights = MappingProxyType({})
NO_LEAVES: Mapping[torch.Tensor, int] = MappingProxyType({})  # by weight; every product is one sum
_ONEDNN = torch.backends.mkldnn.is_available()
_ONEDNN_BF16 = _ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()
# With AMX, oneDNN cuts some sums of bf16 products among its threads: 64 x 4096 has other bits with 4 threads.
_FIXED_ORDER_BF16 = _ONEDNN_BF16 and not torch.cpu._is_amx_tile_supported()
# The product of two numbers of these dtypes is exact in fp32, and it is summed in fp32: fp16 (five times
# faster in this way), and bf16 where oneDNN has no bf16 products whose order is fixed.
THROUGH_FP32 = (torch.float16,) if _FIXED_ORDER_BF16 else (torch.float16, torch.bfloat16)


def matmul_ref(x_TK: torch.Tensor, w_NK: torch.Tensor, pack: torch.Tensor | None = None) -> torch.Tensor:
    """The reference of matmul: x w^T on a CPU. pack: the packed copy of w (`pack_weights`)."""
    dtype = x_TK.dtype
    if dtype in THROUGH_FP32:
        return matmul_ref(x_TK.float(), w_NK.float()).to(dtype)
    T, N = x_TK.shape[0], w_NK.shape[0]
    x, w = pad_width(x_TK), _pad_both(w_NK.t())
    tiles = _tiles(x, w)
    if tiles == [T]:
        return narrow(_product(x, w, pack), N)
    y = x.new_empty(T, w.shape[1])
    for start, end in pairwise(accumulate(tiles, initial=0)):
        if end <= T:
            y[start:end] = _product(x[start:end], w, pack)
        else:
            tail = x.new_zeros(end - start, x.shape[1])
            tail[: T - start] = x[start:]
            y[start:] = _product(tail, w, pack)[: T - start]
    return narrow(y, N)


def matmul_cpu(x_TK: torch.Tensor, w_NK: torch.Tensor, pack: torch.Tensor | None = None) -> torch.Tensor:
    """x w^T on a CPU, by the loops of cpp/ where they have the bits of the reference."""
    is_panels = _is_panels(pack)  # they were made because the loops agree
    if is_panels and x_TK.dtype == torch.float32 and x_TK.shape[1] == w_NK.shape[1]:
        return matmul_cpp.product(x_TK.contiguous(), w_NK, pack)
    if x_TK.dtype in THROUGH_FP32:
        return matmul_cpu(x_TK.float(), w_NK.float()).to(x_TK.dtype)
    if not _runs_on_cpp(x_TK, w_NK):
        return matmul_ref(x_TK, w_NK, None if is_panels else pack)
    return matmul_cpp.product(x_TK.contiguous(), w_NK)


def add_outer_ref(
    acc_NK: torch.Tensor, dy_TN: torch.Tensor, x_TK: torch.Tensor, blocks: Sequence[tuple[int, int]]
) -> None:
    """acc += dy^T x of one shard on a CPU, block by block."""
    dy, x = pad_width(dy_TN.to(acc_NK.dtype)), pad_width(x_TK.to(acc_NK.dtype))
    aligned = acc_NK.is_contiguous() and acc_NK.shape == (dy.shape[1], x.shape[1])
    padding = (0, x.shape[1] - acc_NK.shape[1], 0, dy.shape[1] - acc_NK.shape[0])
    acc = acc_NK if aligned else F.pad(acc_NK, padding)
    for start, end in blocks:
        torch.addmm(acc, dy[start:end].t(), x[start:end], out=acc)
    if not aligned:
        acc_NK.copy_(acc[: acc_NK.shape[0], : acc_NK.shape[1]])


def matmul(
    x_TK: torch.Tensor,
    w_NK: torch.Tensor,
    pack: torch.Tensor | None = None,
    tiles: TileTable = DEFAULT_TABLE,
    whole: tuple[int, int] | None = None,
) -> torch.Tensor:
    """x w^T. -> [T, N]. The bits of a row do not depend on the other rows, on T or on the number of threads.

    `w_NK` may have any strides: a transposed view gives x w. pack: the packed copy of w (`pack_weights`).
    tiles: the table of a GPU's tiles along K, which order the sum. whole: N and K of the matrix of which w is
    a rank's part, by which the table is asked; None where w is all of it.
    """
    if on_triton(x_TK):
        from . import matmul_triton

        return matmul_triton.matmul(x_TK, w_NK, tiles=tiles, whole=whole)
    return matmul_cpu(x_TK, w_NK, pack)


def matmul_unrounded(
    x_TK: torch.Tensor, w_NK: torch.Tensor, tiles: TileTable = DEFAULT_TABLE
) -> torch.Tensor:
    """As matmul, with the fp32 sums (fp64 for fp64) as they are. On a CPU it multiplies fp32 copies."""
    if on_triton(x_TK):
        from . import matmul_triton

        return matmul_triton.matmul(x_TK, w_NK, tiles=tiles, rounded=False)
    dtype = accumulate_dtype(x_TK.dtype)
    return matmul_cpu(x_TK.to(dtype), w_NK.to(dtype))


def matmul_leaves(
    x_TK: torch.Tensor,
    w_NK: torch.Tensor,
    leaves: int,
    widths: tuple[int, ...],
    pack: torch.Tensor | None = None,
    tiles: TileTable = DEFAULT_TABLE,
    ranks: int = 1,
) -> torch.Tensor:
    """x w^T in fp32 (fp64 for fp64), -> [T, N]: K in `leaves` parts, whose products are added pairwise.

    widths: of the parts of K, of each of which a leaf has a piece (leaves.py). pack: of the whole w. ranks:
    that share w along K. The other arguments are those of matmul. On a CPU the bits of a library's product
    depend on the distance of w's rows, which is another one where ranks share w. So a part of w is read from
    a copy whose rows lie side by side, unless its columns do.
    """
    if on_triton(x_TK):
        from . import matmul_leaves_triton

        return matmul_leaves_triton.matmul_leaves(x_TK, w_NK, leaves, widths, tiles, ranks)
    dtype, N, K = accumulate_dtype(x_TK.dtype), len(w_NK), w_NK.shape[1] // leaves
    x, columns, panels = x_TK.to(dtype), w_NK.stride(0) == 1, pack if _is_panels(pack) else None
    if leaves == 1:
        return matmul(x, w_NK.to(dtype), pack if w_NK.dtype == dtype else panels, tiles)
    if 1 in w_NK.stride() and _loops_agree(x, N, K, (1, N) if columns else (K, 1)):
        panels = matmul_cpp.pack_panels(w_NK.to(dtype)) if panels is None else panels
        return matmul_cpp.product(x.contiguous(), w_NK, panels, leaves, widths)
    w = w_NK.to(dtype)
    if len(widths) > 1:
        # One copy of each operand puts the pieces of a leaf side by side; w's rows lie along N here.
        x = torch.cat([part.unflatten(1, (leaves, -1)) for part in x.split(widths, 1)], 2).flatten(1)
        parts = w.t().split(widths)
        w = torch.cat([part.unflatten(0, (leaves, -1)) for part in parts], 1).flatten(0, 1).t()
    ws = w.chunk(leaves, 1) if columns else [part.contiguous() for part in w.chunk(leaves, 1)]
    return join_pairs([matmul(*part, tiles=tiles) for part in zip(x.chunk(leaves, 1), ws, strict=True)])


def add_outer(buffer: GradBuffer, dy_TN: torch.Tensor, x_TK: torch.Tensor, blocks: TokenBlocks) -> None:
    """buffer [shards, N, K] += dy^T x, block by block in the order of `blocks`: a weight's gradient."""
    if not blocks.shards:
        return
    if on_triton(x_TK):
        from . import matmul_triton

        matmul_triton.add_outer(buffer.sums, dy_TN, x_TK, blocks, buffer.begin(blocks))
    else:
        sums = buffer.zeroed(blocks.shards)
        for shard, shard_blocks in blocks.parts:
            add_outer_ref(sums[shard], dy_TN, x_TK, shard_blocks)


def pack_weights(
    weights_NK: Iterable[torch.Tensor], leaves: Mapping[torch.Tensor, int] = NO_LEAVES
) -> dict[torch.Tensor, torch.Tensor]:
    """By weight, a copy in the layout of the library, as far as there is memory for copies.

    leaves: of the weights whose products have several. Products of few rows read the copy that they are
    given. So nobody may change the weights while the copies are in use. They decide no bit: a copy is made
    only where a probe finds the same bits with it (`_pack_helps`).
    """
    packs, bytes_left = {}, _PACKED_BYTES
    for w in weights_NK:
        (N, K), n = w.shape, leaves.get(w, 1)
        x = w.detach() if n == 1 else w.detach().to(accumulate_dtype(w.dtype))
        fits = x.nbytes <= bytes_left and not on_triton(w)
        if fits and (_runs_on_cpp(x, x) if n == 1 else _loops_agree(x, N, K // n, (K // n, 1))):
            packs[w] = matmul_cpp.pack_panels(x)
        elif n == 1 and _ONEDNN and fits and _pack_helps(w.dtype, N, K, torch.get_num_threads()):
            packs[w] = _pack(x)
        bytes_left -= x.nbytes if w in packs else 0
    return packs


def _is_panels(pack: torch.Tensor | None) -> bool:
    """Whether a packed copy is that of the loops of cpp/."""
    return pack is not None and not pack.is_mkldnn


def _runs_on_cpp(x: torch.Tensor, w_NK: torch.Tensor) -> bool:
    """Whether the loops of cpp/ compute products of x with w."""
    readable = x.dtype == w_NK.dtype and x.shape[-1] == w_NK.shape[1] and 1 in w_NK.stride()
    return readable and _loops_agree(x, *w_NK.shape, w_NK.stride())


def _loops_agree(x: torch.Tensor, N: int, K: int, strides: tuple[int, int]) -> bool:
    """Whether the loops of cpp/ compute products of x's dtype with a weight [N, K] of these strides."""
    aligned = not (N % ALIGN or K % ALIGN) and 0 < ROW_TILE * N * K <= _PROBE_LIMIT
    return aligned and x.dtype == torch.float32 and on_cpp(x) and _cpp_agrees(N, K, strides)


@cache
def _cpp_agrees(N: int, K: int, strides: tuple[int, int]) -> bool:
    """Whether the loops of cpp/ have the bits of the product of ROW_TILE rows that defines them.

    The probe is that of `_mm_agrees`.
    """
    x, w = _probe(ROW_TILE, K, N, strides[::-1])
    return equal(matmul_cpp.product(x, w.t()), _product(x, w))


def _product(x: torch.Tensor, w_KN: torch.Tensor, pack: torch.Tensor | None = None) -> torch.Tensor:
    """x w by one call of a library."""
    if x.dtype == torch.float32 and _mm_agrees(len(x), *w_KN.shape, w_KN.stride(), torch.get_num_threads()):
        return torch.mm(x, w_KN)
    if pack is not None and len(x) <= _PACKED_ROWS:
        return _linear(x, pack)
    if x.dtype == torch.float32 and _ONEDNN:
        return _linear(x, w_KN.t())
    return torch.mm(x, w_KN)  # in bf16 this is a product of oneDNN, too


def _linear(x: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """x w^T by oneDNN, which also takes packed weights."""
    return torch.ops.mkldnn._linear_pointwise(x, w_NK, None, "none", [], "")


def _pack(w_NK: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(w_NK, ROW_TILE)


@cache
def _pack_helps(dtype: torch.dtype, N: int, K: int, threads: int) -> bool:
    """Whether a packed copy is read, and all tiles that read it have the bits of plain weights."""
    unpackable = dtype == torch.float64 or dtype in THROUGH_FP32 or K % ALIGN or N % ALIGN
    if unpackable or _PACKED_ROWS * K * N > _PROBE_LIMIT:
        return False
    tiles = [rows for rows in (*LONG_TILES, ROW_TILE, *_TAIL_TILES) if rows <= _PACKED_ROWS]
    if dtype == torch.float32 and all(_mm_agrees(rows, K, N, (1, K), threads) for rows in tiles):
        return False  # nothing reads it
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, K, generator=g).to(dtype) for n in (_PACKED_ROWS, N))
    pack, expected = _pack(w), torch.cat([_product(tile, w.t()) for tile in x.split(ROW_TILE)])
    return all(equal(torch.cat([_linear(tile, pack) for tile in x.split(rows)]), expected) for rows in tiles)


@cache
def _mm_agrees(rows: int, K: int, N: int, strides: tuple[int, int], threads: int) -> bool:
    """Whether torch.mm has the bits of oneDNN in a small fp32 product of `rows` rows, or there is no oneDNN.

    In a small product the sign of a sum that underflows may differ, as in MKL's.
    """
    if not _ONEDNN or rows * K * N >= _MM_LIMIT:
        return not _ONEDNN
    x, w = _probe(rows, K, N, strides)
    return equal(torch.mm(x, w), _linear(x, w.t()))


def _probe(rows: int, K: int, N: int, strides: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random x [rows, K], with rows of zeros and of the smallest numbers, and w with a negative column.

    The sign of a sum that is zero, or underflows, depends on what the sum begins with.
    """
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, K, generator=g, dtype=torch.float32)
    w = torch.empty_strided((K, N), strides, dtype=torch.float32)
    w.copy_(torch.randn(K, N, generator=g, dtype=torch.float32))
    x[0], x[1::2], w[:, 0] = 0.0, x[1::2] * 1e-45, -1.0
    return x, w


def _tiles(x: torch.Tensor, w_KN: torch.Tensor) -> list[int]:
    """The rows of each tile of x. The last tile may have more rows than are left."""
    shape = (x.dtype, *w_KN.shape, w_KN.stride(), torch.get_num_threads())
    tiles, left = [], len(x)
    for rows in LONG_TILES:
        if left >= rows and _agrees(rows, *shape):
            tiles += [rows] * (left // rows)
            left %= rows
    tail = left + -left % _TAIL_TILES[0]
    if tail in _TAIL_TILES and _agrees(tail, *shape):
        return [*tiles, tail]
    return tiles + [ROW_TILE] * -(-left // ROW_TILE)


@cache
def _agrees(rows: int, dtype: torch.dtype, K: int, N: int, strides: tuple[int, int], threads: int) -> bool:
    """Whether a product of `rows` rows gives each row the bits of a product of ROW_TILE rows.

    The probe uses random numbers, which show the order of a sum: none of the rows * N sums may differ. The
    cache is keyed by everything that the library chooses by.
    """
    if rows * K * N > _PROBE_LIMIT:
        return False
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, K, generator=g, dtype=torch.float32).to(dtype)
    w = torch.empty_strided((K, N), strides, dtype=dtype)
    w.copy_(torch.randn(K, N, generator=g, dtype=torch.float32))
    padded = F.pad(x, (0, 0, 0, -rows % ROW_TILE))
    return equal(_product(x, w), torch.cat([_product(tile, w) for tile in padded.split(ROW_TILE)])[:rows])


def narrow(y: torch.Tensor, N: int) -> torch.Tensor:
    """The first N columns of y, contiguous."""
    return y if y.shape[1] == N else y[:, :N].contiguous()


def pad_width(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous and 64-byte aligned, with the last axis padded to a multiple of ALIGN."""
    pad = -x.shape[-1] % ALIGN
    if pad:
        return F.pad(x, (0, pad))
    return x.contiguous() if x.data_ptr() % 64 == 0 else x.clone(memory_format=torch.contiguous_format)


def _pad_both(w_KN: torch.Tensor) -> torch.Tensor:
    """w with both axes padded to a multiple of ALIGN.

    The strides are kept where nothing is padded, so a transposed view costs nothing.
    """
    pad_k, pad_n = -w_KN.shape[0] % ALIGN, -w_KN.shape[1] % ALIGN
    if pad_k or pad_n:
        return F.pad(w_KN, (0, pad_n, 0, pad_k))
    return w_KN if w_KN.data_ptr() % 64 == 0 else w_KN.clone()
