"""Static loss scales and the bits of a gradient: in fp32 and bf16 no power of two leaves a trace, in fp16
every one does.

fp16 has 30 exponents of normal numbers, and the gradients of a step's activations fill more: at every scale
that does not overflow some of them have lost bits, and other ones at twice the scale.
"""

from pathlib import Path

import pytest
import torch

from benchmarks.fp16_scales import SCALES, Scale, Step, measure, table


@pytest.fixture(scope="module")
def counts(config, model):
    """measure() of a dtype's step of 9 sequences, at every scale from 2^0 to 2^24."""
    return lambda dtype, head="compute": measure(
        config(dtype=dtype, precision__head_dtype=head), Path(model)
    )[0]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_scale_leaves_a_trace_where_the_exponents_suffice(counts, dtype):
    for k, s in zip(SCALES, counts(dtype), strict=True):
        assert (s.differ or 0, s.subnormal.total(), s.lost, s.overflow.total()) == (0, 0, 0, 0), k


@pytest.mark.full
@pytest.mark.parametrize("head", ["compute", "float32"])
def test_in_fp16_every_scale_without_overflow_loses_bits(counts, head):
    done = counts("float16", head)
    clean = [s for s in done[:-1] if not s.overflow.total()]
    assert len(clean) >= 10, "most scales do not overflow: a test of overflows only would prove nothing"
    for s in clean:
        assert s.subnormal.total() > 0
        assert s.differ > 0
    assert clean[0].subnormal.total() > clean[-1].subnormal.total(), "a larger scale does help"


def test_control_a_scale_that_is_no_power_of_two_is_seen(config, model):
    step = Step(config(), Path(model))
    two, three = step.at(1), step.at(1.5849625007211562)  # 2^k = 3
    assert (two.gradient != three.gradient).any()


def test_the_table_joins_equal_lines():
    done = [Scale(torch.zeros(3), differ=differ) for differ in (2, 0, 0, None)]
    assert table(done, 5, SCALES).splitlines()[-2:] == [
        "| 2^0 | 2 | 0 | 0 | 0 |",
        "| 2^1 to 2^3 | 0 | 0 | 0 | 0 |",
    ]
