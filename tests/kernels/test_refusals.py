"""Bad shapes and dtypes are refused with the name, the value and the rule."""

import pytest
import torch
from zerokl.kernels.add_shared import add_shared
from zerokl.kernels.embedding import check_ids, embedding
from zerokl.kernels.gelu_mul import gelu_mul
from zerokl.kernels.linear import linear
from zerokl.kernels.logprob import linear_logprob
from zerokl.kernels.rms_norm import add_rms_norm, rms_norm
from zerokl.kernels.rope import rope
from zerokl.kernels.silu_mul import silu_mul
from zerokl.kernels.value_head import value_head


def _z(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


IDS = _z(5, dtype=torch.int64)
CASES = {
    "linear widths": (lambda: linear(_z(5, 7), _z(3, 8)), r"linear: x \(5, 7\).*w \(3, 8\)"),
    "linear bias": (lambda: linear(_z(5, 7), _z(3, 7), _z(4)), r"linear: b \(4,\) must be \[3\]"),
    "mixed dtypes": (
        lambda: linear(_z(5, 7), _z(3, 7).bfloat16()),
        r"w.dtype \(torch.bfloat16\) must equal x.dtype",
    ),
    "integer dtype": (
        lambda: silu_mul(_z(5, 8, dtype=torch.int32)),
        r"gu.dtype \(torch.int32\) must be float32",
    ),
    "rms_norm width": (
        lambda: rms_norm(_z(5, 7), _z(8), 1e-6),
        r"x.shape\[-1\] \(7\) must equal w.shape\[0\] \(8\)",
    ),
    "rms_norm dimensions": (
        lambda: rms_norm(_z(7), _z(7), 1e-6),
        r"x \(7,\) must be \[T, D\]",
    ),
    "rms_norm eps": (lambda: rms_norm(_z(5, 7), _z(7), 0.0), r"eps \(0.0\) must be positive"),
    "add_rms_norm residual": (
        lambda: add_rms_norm(_z(5, 7), _z(4, 7), _z(7), 1e-6),
        r"residual \(4, 7\).*must be like x \(5, 7\)",
    ),
    "value_head width": (lambda: value_head(_z(5, 7), _z(8)), r"h \(5, 7\) and w \(8,\) must be \[T, D\]"),
    "add_shared": (lambda: add_shared(_z(5, 7), _z(5, 7), _z(5, 7)), r"z \(5, 7\) \[T, 1\]"),
    "silu_mul odd": (lambda: silu_mul(_z(5, 7)), r"gu \(5, 7\) must be \[T, 2 I\]"),
    "gelu_mul odd": (lambda: gelu_mul(_z(5, 7)), r"gu \(5, 7\) must be \[T, 2 I\]"),
    "rope table": (lambda: rope(_z(5, 2, 8), _z(5, 8), _z(5, 4)), r"cos \(5, 8\)"),
    "embedding dtype": (
        lambda: embedding(_z(5), _z(3, 4)),
        r"one-dimensional int64 tensor, got torch.float32",
    ),
    "embedding above": (lambda: embedding(IDS + 3, _z(3, 4)), r"ids must lie in 0..2, got 3..3"),
    "embedding below": (lambda: embedding(IDS - 1, _z(3, 4)), r"ids must lie in 0..2, got -1..-1"),
    "logprob ids": (lambda: linear_logprob(_z(5, 7), _z(3, 7), IDS[:4]), r"ids \(4,\)"),
    "logprob width": (lambda: linear_logprob(_z(5, 7), _z(3, 8), IDS), r"w \(3, 8\)"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case):
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_ids_on_a_gpu_are_not_read_back():
    # A meta tensor stands for a GPU's: reading it would raise.
    check_ids(torch.empty(3, dtype=torch.int64, device="meta"), 2)
