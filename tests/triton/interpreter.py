"""Triton 3.9's interpreter, mended for tests: bf16 works, and matrix products could come from a GPU.

The interpreter keeps bf16 as raw uint16. Its casts truncate, and its arithmetic and its matrix products work
on these integers. Here casts round to nearest even, and arithmetic widens to fp32. Reductions of bf16 tensors
and fp8 are still wrong; the tests do not use them.

The interpreter multiplies with numpy's BLAS. There the bits of a row may depend on the place of the row in
the tile, as on a machine without AVX-512. With tensor cores, and with a GPU's fused multiply-adds, they do
not. Here each element is one dot product, of its row and its column.

The sum of a tile of 32 columns is the softmax's in attention. It has the order of mma.sync's layout with four
warps along the columns, as on the GPUs of all these kernels.
"""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle


def widen(x: np.ndarray) -> np.ndarray:
    """bf16 held in uint16 -> fp32."""
    return (x.astype(np.uint32) << 16).view(np.float32)


def narrow(x: np.ndarray) -> np.ndarray:
    """fp32 -> bf16 held in uint16, rounded to nearest even; every NaN becomes the same quiet NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a [M, K], b [K, N] -> [M, N] in fp32."""
    rows, columns = (np.ascontiguousarray(x, np.float32) for x in (a, b.T))
    return np.matmul(rows[:, None, None, :], columns[:, :, None])[:, :, 0, 0]


def mma_row_sum(p: np.ndarray) -> np.ndarray:
    """The sum of 32 columns, [M, 32] -> [M]: neighbours, lanes 2 and 1 apart, then warps 2 and 1 apart."""
    p = p.reshape(len(p), 2, 2, 2, 2, 2)  # warp (2 bits), lane (2 bits), column of the thread
    for axis in (5, 3, 3, 1, 1):
        p = p.take(0, axis) + p.take(1, axis)
    return p


def patch() -> None:
    """Mend the interpreter for the rest of the process."""
    cast, binary = InterpreterBuilder.cast_impl, InterpreterBuilder.binary_op
    unary, sum_of = InterpreterBuilder.unary_op, ReduceOps.sum

    def cast_impl(self, src, dst_type):
        if src.dtype.scalar == dst_type.scalar:
            return TensorHandle(src.data, dst_type.scalar)
        if src.dtype.scalar == tl.bfloat16:
            return cast_impl(self, TensorHandle(widen(src.data), tl.float32), dst_type)
        if dst_type.scalar == tl.bfloat16:
            return TensorHandle(narrow(src.data.astype(np.float32)), tl.bfloat16)
        return cast(self, src, dst_type)

    def binary_op(self, lhs, rhs, op):
        if lhs.dtype.scalar != tl.bfloat16:
            return binary(self, lhs, rhs, op)
        result = op(widen(lhs.data), widen(rhs.data))
        return TensorHandle(result if result.dtype == bool else narrow(result), tl.bfloat16)

    def unary_op(self, arg, op):
        if arg.dtype.scalar != tl.bfloat16:
            return unary(self, arg, op)
        return TensorHandle(narrow(op(widen(arg.data))), tl.bfloat16)

    def create_dot(self, a, b, d, *rest):
        assert d.dtype.scalar == tl.float32, d.dtype
        operands = (widen(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
        return TensorHandle(product(*operands) + d.data, tl.float32)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        return cast_impl(self, src, dst_type)

    def sum_reduce(self, input):
        x = input.handle.data
        if x.dtype != np.float32 or x.shape[1:] != (32,) or self.axis != 1 or self.keep_dims:
            return sum_of(self, input)
        return self.to_tensor(mma_row_sum(x), input.dtype)

    ReduceOps.sum = sum_reduce
    InterpreterBuilder.cast_impl, InterpreterBuilder.binary_op = cast_impl, binary_op
    InterpreterBuilder.unary_op, InterpreterBuilder.create_dot = unary_op, create_dot
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
