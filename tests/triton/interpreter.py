"""Triton 3.9's interpreter, mended for tests: bf16 that works, and matrix products that a GPU could have
made.

It keeps bf16 as raw uint16: its casts truncate, and its arithmetic and its matrix products work on those
integers. Here casts round to nearest even and arithmetic widens to fp32. Still wrong, and not used by the
tests: reductions of bf16 tensors, and fp8. It multiplies with numpy's BLAS, whose bits for a row may depend
on where in the tile the row lies (so where there is no AVX-512). Tensor cores, and a GPU's fused
multiply-adds, know no such place: here each element is one dot product, of its row and its column.
"""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def widen(x: np.ndarray) -> np.ndarray:
    """bf16 held in uint16 -> fp32."""
    return (x.astype(np.uint32) << 16).view(np.float32)


def narrow(x: np.ndarray) -> np.ndarray:
    """fp32 -> bf16 held in uint16, to nearest even; every NaN becomes one quiet NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a [M, K], b [K, N] -> [M, N] in fp32."""
    rows, columns = (np.ascontiguousarray(x, np.float32) for x in (a, b.T))
    return np.matmul(rows[:, None, None, :], columns[:, :, None])[:, :, 0, 0]


def patch() -> None:
    """For the rest of the process."""
    cast, binary, unary = (
        InterpreterBuilder.cast_impl,
        InterpreterBuilder.binary_op,
        InterpreterBuilder.unary_op,
    )

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
        return (
            TensorHandle(narrow(op(widen(arg.data))), tl.bfloat16)
            if arg.dtype.scalar == tl.bfloat16
            else unary(self, arg, op)
        )

    def create_dot(self, a, b, d, *rest):
        assert d.dtype.scalar == tl.float32, d.dtype
        return TensorHandle(
            product(*(widen(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))) + d.data,
            tl.float32,
        )

    InterpreterBuilder.cast_impl, InterpreterBuilder.binary_op = cast_impl, binary_op
    InterpreterBuilder.unary_op, InterpreterBuilder.create_dot = unary_op, create_dot
    InterpreterBuilder.create_fp_to_fp = lambda self, src, dst_type, rounding_mode: cast_impl(
        self, src, dst_type
    )
