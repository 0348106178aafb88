"""Adapters on Triton, interpreted: gradients beside fp64, the parts of a weight, and unmerged products."""

import pytest
import torch
from zerokl.kernels.launch import recorded_launches

from tests.kernels.test_low_rank import (
    check_accuracy,
    check_parts,
    check_unmerged_accuracy,
    check_unmerged_rows,
)


@pytest.mark.parametrize("rank", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_is_that_of_autograd_in_fp64(dtype, rank):
    with recorded_launches(and_run=True) as launches:
        check_accuracy(rank, dtype)
    assert [launch.kernel.__name__ for launch in launches].count("_outer") == 2


def test_a_part_has_the_gradient_of_its_own_matrix():
    check_parts(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unmerged_products_are_accurate_and_know_one_row(dtype):
    with recorded_launches(and_run=True) as launches:
        check_unmerged_accuracy(5, dtype)
        check_unmerged_rows(dtype)
    assert {launch.kernel.__name__ for launch in launches} == {"_matmul"}
