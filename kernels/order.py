"""The order of every sum: row tiles, token blocks and fixed trees. All kernels take their constants from here.

On a CPU products with weights are oneDNN's in fp32 and bf16 (`_product`); those between activations are what torch takes, MKL's in fp32.
Products of fp16, and of bf16 on a CPU where oneDNN has none (without AVX-512), are products of fp32 numbers, rounded once.
Two facts about CPU matrix libraries shape this file (measured with torch 2.13, MKL 2024.2 and oneDNN 3.12, with AVX-512 and with AVX2):

- A row of `x @ w` may change its bits with the number of rows in the call, because another number of rows may select another
  micro-kernel (one or two rows always do here). So the bits of a row are those of a product of ROW_TILE rows, by definition, and
  `matmul_rows` cuts the rows into tiles of a few fixed sizes. A tile longer than ROW_TILE is taken only where the library, on
  this machine and for this shape, was seen to give every row the same bits (`_agrees`): it saves time and decides no bit.
- With a width that is not a multiple of 16 the edge of the last vector is summed in another order, and where that edge
  lies depends on the number of threads. So widths are padded with zeros to a multiple of 16 first.

Everything else is written with operations that IEEE 754 rounds exactly (+ - * / sqrt), with `torch.exp` and `torch.log` in
fp32, with a sum along the last axis of a contiguous row, or with operations that walk a row element after element (cumsum,
index_add_): these give the same bits wherever an element lies in a tensor. Operations that
torch computes differently in the vector body and in the scalar tail (silu, sigmoid, addcmul, lerp, `add(alpha=)`) are
not used anywhere in zerokl.

Shapes: T rows (tokens), K reduced width, N output width.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F

from .backend import on_triton

# Rows of the matrix product that defines a row's bits: few enough that a small batch that decodes wastes little.
ROW_TILE = 32
# Rows of the tiles that stand for several of those, longest first; they take 0.4 to 0.9 of the time.
_LONG_TILES = (1024, 512, 256, 128, 64)
# Products of more multiplications are not probed but cut into ROW_TILE rows: a probe takes a tenth of a second at most.
_PROBE_LIMIT = 1 << 31
# Tiles of so many rows at most read packed weights (`packed`), and copies of so many bytes at most are made. Bound time and memory only.
_PACKED_ROWS, _PACKED_BYTES = 128, 1 << 28
# Tokens of one partial weight gradient: long enough to be compute-bound, short enough that a sum of them stays accurate.
TOKEN_BLOCK = 128
# Widths are padded to this many elements, so that no vector is ever cut (see above).
ALIGN = 16
# Elements of one partial sum along a row.
SUM_TILE = 4096

Blocks = Sequence[tuple[int, int]]


def token_blocks(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Rows [start, end) of the token blocks of packed sequences, in canonical order.

    A block never holds tokens of two sequences, so a sequence's contribution to a weight gradient is the same whatever
    it is packed with.
    """
    blocks, start = [], 0
    for length in lengths:
        end = start + length
        blocks += [(s, min(s + TOKEN_BLOCK, end)) for s in range(start, end, TOKEN_BLOCK)]
        start = end
    return blocks


def one_sequence(x: torch.Tensor, blocks: Blocks | None) -> Blocks:
    """`blocks`, or the blocks of all rows of x taken as one sequence."""
    return token_blocks([x.shape[0]]) if blocks is None else blocks


def matmul_rows(x_TK: torch.Tensor, w_KN: torch.Tensor) -> torch.Tensor:
    """x @ w with each row's bits independent of the other rows, of T and of the number of threads.

    Sums in fp32 (fp64 for fp64 inputs) and rounds once to the dtype of x. `w_KN` may have any strides.
    """
    if on_triton(x_TK):
        from . import matmul_triton

        return matmul_triton.matmul(x_TK, w_KN)
    dtype = x_TK.dtype
    if dtype in _THROUGH_FP32:
        return matmul_rows(x_TK.float(), w_KN.float()).to(dtype)
    T, N = x_TK.shape[0], w_KN.shape[1]
    x, w = _pad_width(x_TK), _pad_both(w_KN)
    if _one_product(T, x, w):
        return _narrow(_product(x, w), N)
    y = x.new_empty(T, w.shape[1])
    start = 0
    for rows in (*_LONG_TILES, ROW_TILE):
        if T - start >= rows and _one_product(rows, x, w):
            for a in range(start, T - rows + 1, rows):
                y[a : a + rows] = _product(x[a : a + rows], w)
                start = a + rows
    if start < T:
        tail = x.new_zeros(ROW_TILE, x.shape[1])
        tail[: T - start] = x[start:]
        y[start:] = _product(tail, w)[: T - start]
    return _narrow(y, N)


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w by one call of the library."""
    if _packs and len(x) <= _PACKED_ROWS and (pack := _packs.get(_place(w.t()))) is not None:
        return _linear(x, pack)
    if x.dtype == torch.float32 and _ONEDNN:
        return _linear(x, w.t())
    return torch.mm(x, w)  # in bf16 oneDNN's, too


_ONEDNN = torch.backends.mkldnn.is_available()
# Products of two numbers of these dtypes are exact in fp32, and summed there: fp16 (5x faster so), and bf16 where oneDNN cannot.
_THROUGH_FP32 = (torch.float16, *([] if _ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported() else [torch.bfloat16]))
# What `packed` has made: by the place of a weight.
_packs: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], torch.Tensor] = {}


def _place(w_NK: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    return w_NK.data_ptr(), w_NK.shape, w_NK.stride(), w_NK.dtype


def _linear(x: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """x w^T by oneDNN, which also takes packed weights."""
    return torch.ops.mkldnn._linear_pointwise(x, w_NK, None, "none", [], "")


def _pack(w_NK: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(w_NK, ROW_TILE)


@contextmanager
def packed(weights_NK: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, products of few rows with these weights, which nobody may change meanwhile, read copies that lie as the library computes.

    The copies decide no bit: they are made where a probe finds the same bits with them (`_pack_agrees`).
    """
    made, room = {}, _PACKED_BYTES
    for w in weights_NK:
        w = w.detach()
        if _ONEDNN and not on_triton(w) and w.nbytes <= room and _pack_agrees(w.dtype, *w.shape, torch.get_num_threads()):
            made[_place(w)], room = _pack(w), room - w.nbytes
    _packs.update(made)
    try:
        yield
    finally:
        for place in made:
            del _packs[place]


@cache
def _pack_agrees(dtype: torch.dtype, N: int, K: int, threads: int) -> bool:
    """Whether tiles of every number of rows that read packed weights have the bits of a product with the weights as they are."""
    if dtype == torch.float64 or dtype in _THROUGH_FP32 or K % ALIGN or N % ALIGN or _PACKED_ROWS * K * N > _PROBE_LIMIT:
        return False
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, K, generator=g).to(dtype) for n in (_PACKED_ROWS, N))
    pack, expected = _pack(w), torch.cat([_product(tile, w.t()) for tile in x.split(ROW_TILE)])
    tiles = [rows for rows in (*_LONG_TILES, ROW_TILE) if rows <= _PACKED_ROWS]
    return all(same_bits(torch.cat([_linear(tile, pack) for tile in x.split(rows)]), expected) for rows in tiles)


def _narrow(y: torch.Tensor, N: int) -> torch.Tensor:
    """The first N columns of y, contiguous."""
    return y if y.shape[1] == N else y[:, :N].contiguous()


def _one_product(rows: int, x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether one call may compute that many rows."""
    return rows == ROW_TILE or (rows in _LONG_TILES and _agrees(rows, x.dtype, *w.shape, w.stride(), torch.get_num_threads()))


@cache
def _agrees(rows: int, dtype: torch.dtype, K: int, N: int, strides: tuple[int, int], threads: int) -> bool:
    """Whether a product of `rows` rows gives each row the bits of a product of ROW_TILE rows, tried on random numbers.

    The order of a sum shows in random numbers: of rows * N sums none may differ. Keyed by all that the library chooses by.
    """
    if rows * K * N > _PROBE_LIMIT:
        return False
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, K, generator=g, dtype=torch.float32).to(dtype)
    w = torch.empty_strided((K, N), strides, dtype=dtype).copy_(torch.randn(K, N, generator=g, dtype=torch.float32))
    return same_bits(_product(x, w), torch.cat([_product(tile, w) for tile in x.split(ROW_TILE)]))


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """What a probe decides by: every element of two tensors of one dtype and shape, as integers."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return torch.equal(x.view(bits), y.view(bits))


def add_outer(acc_NK: torch.Tensor, dy_TN: torch.Tensor, x_TK: torch.Tensor, blocks: Blocks) -> None:
    """acc += dy^T x, block by block in the order given, in fp32 (fp64 for fp64): the sum of a weight gradient."""
    if on_triton(x_TK):
        from . import matmul_triton

        matmul_triton.add_outer(acc_NK, dy_TN, x_TK, blocks)
        return
    dy, x = _pad_width(dy_TN.to(acc_NK.dtype)), _pad_width(x_TK.to(acc_NK.dtype))
    aligned = acc_NK.is_contiguous() and acc_NK.shape == (dy.shape[1], x.shape[1])
    acc = acc_NK if aligned else F.pad(acc_NK, (0, x.shape[1] - acc_NK.shape[1], 0, dy.shape[1] - acc_NK.shape[0]))
    for start, end in blocks:
        torch.addmm(acc, dy[start:end].t(), x[start:end], out=acc)
    if not aligned:
        acc_NK.copy_(acc[: acc_NK.shape[0], : acc_NK.shape[1]])


def add_columns(acc_N: torch.Tensor, dy_TN: torch.Tensor, blocks: Blocks) -> None:
    """acc += the column sums of each block, in the order given: the gradient of a bias or of a norm's weight.

    A block's rows are summed by a binary tree over its rows padded with zeros to a power of two. More zeros change no bit,
    so all blocks are padded to one length and their trees run together. On Triton: columns_triton.py, the same blocks in the same order.
    """
    if on_triton(dy_TN):
        from .columns_triton import add_bias_columns

        return add_bias_columns(acc_N, dy_TN, blocks)
    longest = max(end - start for start, end in blocks)
    rows = dy_TN.new_zeros(len(blocks), 1 << (longest - 1).bit_length(), dy_TN.shape[1], dtype=acc_N.dtype)
    for block, (start, end) in zip(rows, blocks, strict=True):
        block[: end - start] = dy_TN[start:end]
    for column_sums in tree_sum(rows, 1):
        acc_N += column_sums


def sum_row(x_TN: torch.Tensor) -> torch.Tensor:
    """Sum along the last axis in an order that depends on N only. [T, N] -> [T]."""
    T, N = x_TN.shape
    if N <= SUM_TILE:  # torch splits a single row over threads only above 32,768 elements
        return x_TN.sum(-1)
    tiles = F.pad(x_TN, (0, -N % SUM_TILE)).view(-1, SUM_TILE).sum(-1)
    return tiles.view(T, -1).sum(-1)


def tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over `dim` by halving: a binary tree whose shape depends on the length of that axis only."""
    while (n := x.shape[dim]) > 1:
        half = (n + 1) // 2
        low, high = x.narrow(dim, 0, half), x.narrow(dim, half, n - half)
        if n % 2:
            low = torch.cat([low.narrow(dim, 0, half - 1) + high, low.narrow(dim, half - 1, 1)], dim)
        else:
            low = low + high
        x = low
    return x.squeeze(dim)


def _pad_width(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, 64-byte aligned, last axis a multiple of ALIGN."""
    pad = -x.shape[-1] % ALIGN
    if pad:
        return F.pad(x, (0, pad))
    return x.contiguous() if x.data_ptr() % 64 == 0 else x.clone(memory_format=torch.contiguous_format)


def _pad_both(w: torch.Tensor) -> torch.Tensor:
    """Both axes a multiple of ALIGN; strides are kept where nothing is padded, so a transposed view costs nothing."""
    pad_k, pad_n = -w.shape[0] % ALIGN, -w.shape[1] % ALIGN
    if pad_k or pad_n:
        return F.pad(w, (0, pad_n, 0, pad_k))
    return w if w.data_ptr() % 64 == 0 else w.clone()
