"""Static loss scales and a gradient's bits: powers of two leave no trace in fp32 and bf16, but do in fp16.

fp16 has 30 exponents of normal numbers. The gradients of a step's activations span more. So at every scale
that does not overflow some of them lose bits, and at twice the scale others do.
"""

from pathlib import Path

import pytest
import torch

from benchmarks.fp16_scales import SCALES, Scale, Step, measure, table


@pytest.fixture(scope="module")
def counts(config, model):
    """counts(dtype, head): measure() of a step of 9 sequences, at every scale from 2^0 to 2^24."""

    def count(dtype: str, head: str = "compute") -> list[Scale]:
        return measure(config(dtype=dtype, precision__head_dtype=head), Path(model))[0]

    return count


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_scale_leaves_a_trace_where_the_exponents_suffice(counts, dtype):
    for k, s in zip(SCALES, counts(dtype), strict=True):
        assert (s.differ or 0, s.subnormal.total(), s.lost, s.overflow.total()) == (0, 0, 0, 0), k


@pytest.mark.full
@pytest.mark.parametrize("head", ["compute", "float32"])
def test_in_fp16_every_scale_without_overflow_loses_bits(counts, head):
    # Without the last scale, which has no next one to differ from.
    clean = [s for s in counts("float16", head)[:-1] if not s.overflow.total()]
    assert len(clean) >= 10, "most scales do not overflow: a test of overflows only would prove nothing"
    for s in clean:
        assert s.subnormal.total() > 0
        assert s.differ > 0
    assert clean[0].subnormal.total() > clean[-1].subnormal.total(), "a larger scale does help"


def test_control_a_scale_that_is_no_power_of_two_is_seen(config, model):
    step = Step(config(), Path(model))
    two, three = step.at(1), step.at(1.5849625007211562)  # scales 2 and 3
    assert (two.gradient != three.gradient).any()


def test_the_table_joins_equal_lines():
    scales = [Scale(torch.zeros(3), differ=differ) for differ in (2, 0, 0, None)]
    assert table(scales, 5, SCALES).splitlines()[-2:] == [
        "| 2^0 | 2 | 0 | 0 | 0 |",
        "| 2^1 to 2^3 | 0 | 0 | 0 | 0 |",
    ]
