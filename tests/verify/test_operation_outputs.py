"""Two traces: how far their operations are apart, and which differs first."""

import math

import pytest
import torch
from zerokl.verify.operation_outputs import compare_traces, first_divergence


def _trace(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"embed": torch.ones(2, 3), "norm": torch.full((2, 3), 2.0), "logits": torch.zeros(2, 4)} | changes


def test_equal_traces_have_no_divergence():
    differences = compare_traces(_trace(), _trace())
    assert [d.op for d in differences] == ["embed", "norm", "logits"]
    assert first_divergence(_trace(), _trace()) is None


def test_the_first_operation_in_order_is_named_with_its_size():
    norm = torch.full((2, 3), 2.0)
    norm[1, 2] = torch.nextafter(torch.nextafter(norm[1, 2], torch.tensor(9.0)), torch.tensor(9.0))
    first = first_divergence(_trace(), _trace(norm=norm, logits=torch.ones(2, 4)))
    assert (first.op, first.elements, first.unequal, first.max_ulp) == ("norm", 6, 1, 2)
    assert first.max_abs == pytest.approx(2**-21, rel=1e-6)
    assert first.relative == pytest.approx(2**-22 / math.sqrt(6), rel=1e-6)


def test_signs_of_zero_differ_and_dtypes_are_compared_by_value():
    assert first_divergence(_trace(), _trace(logits=-torch.zeros(2, 4))).op == "logits"
    half = {name: x.bfloat16() for name, x in _trace().items()}
    assert first_divergence(_trace(), half) is None
    assert {d.max_ulp for d in compare_traces(_trace(), half)} == {None}


def test_operations_of_one_side_only_are_left_out():
    without_norm = _trace()
    del without_norm["norm"]
    assert [d.op for d in compare_traces(_trace(), without_norm)] == ["embed", "logits"]
    assert first_divergence(_trace(), without_norm) is None


def test_traces_without_common_operations_or_with_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"no operation in common \(embed, norm, logits, .* and x, \.\.\.\)"):
        compare_traces(_trace(), {"x": torch.ones(1)})
    with pytest.raises(ValueError, match=r"outputs of norm have shapes \(2, 3\) and \(3, 2\)"):
        compare_traces(_trace(), _trace(norm=torch.ones(3, 2)))
