"""quantise: against all codes of each format, decoded by the standard's definition, and fp64 distances."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.files.bitwise import count_unequal
from zerokl.kernels.quantise import LARGEST, clipped, quantise
from zerokl.model.quantisation import FORMATS, SCALES, Quantisation, is_quantised

from tests.helpers import property_settings, randn

# Bits of the exponent, its bias, and bits of the significand.
FLOATS = {"float8_e4m3fn": (4, 7, 3), "float8_e5m2": (5, 15, 2)}


def codes(format: str) -> list[float]:
    """The non-negative finite numbers of a format, in the order of their codes 0, 1, 2, ..., in fp64."""
    if format == "int8":
        return [float(i) for i in range(128)]
    exponent_bits, bias, bits = FLOATS[format]
    numbers = []
    for code in range(128):
        exponent, significand = code >> bits, code & ((1 << bits) - 1)
        last = exponent == (1 << exponent_bits) - 1
        if last and (format == "float8_e5m2" or significand == (1 << bits) - 1):
            continue  # infinities and NaNs; e4m3fn has one NaN and no infinity
        share = significand / (1 << bits)
        power = 2.0 ** (max(exponent, 1) - bias)
        numbers.append((share + (exponent > 0)) * power)
    return numbers


def nearest(x: np.ndarray, format: str) -> np.ndarray:
    """Each number rounded to the nearest of the format, to the even code in the middle of two."""
    table = np.array(codes(format))
    above = np.clip(np.searchsorted(table, np.abs(x)), 1, len(table) - 1)
    down, up = np.abs(x) - table[above - 1], table[above] - np.abs(x)
    takes_up = (up < down) | ((up == down) & (above % 2 == 0))
    return np.copysign(np.where(takes_up, table[above], table[above - 1]), x)


def parts(N: int, K: int, size: int) -> list[tuple[slice, slice]]:
    """The rows and columns of each part that has one scale."""
    if size == 0:
        return [(slice(0, N), slice(0, K))]
    if size == 1:
        return [(slice(i, i + 1), slice(0, K)) for i in range(N)]
    return [(slice(i, i + size), slice(j, j + size)) for i in range(0, N, size) for j in range(0, K, size)]


def by_definition(w: torch.Tensor, format: str, size: int, power_of_two: bool) -> torch.Tensor:
    """Part by part in numpy, whose operations on fp32 numbers round as the contract says."""
    numbers = w.float().numpy()
    out = np.empty_like(numbers)
    for part in parts(*numbers.shape, size):
        scale = np.abs(numbers[part]).max() / np.float32(codes(format)[-1])
        scale = max(scale, np.float32(2.0**-126))
        if power_of_two:
            scale = np.float32(next(2.0**e for e in range(-126, 128) if 2.0**e >= scale))
        rounded = nearest((numbers[part] / scale).astype(np.float64), format)
        out[part] = rounded.astype(np.float32) * scale
    return torch.from_numpy(out)


def test_the_largest_number_of_each_format():
    assert {format: codes(format)[-1] for format in FORMATS} == LARGEST


def middles(format: str) -> torch.Tensor:
    """All numbers of a format, the middles between neighbours, and the fp32 numbers beside the middles.

    One row, whose largest number is that of the format. So its scale is 1, and each number is rounded itself.
    """
    table = np.array(codes(format), np.float32)
    middle = (table[1:] + table[:-1]) / 2
    around = [np.nextafter(middle, np.float32(to)) for to in (0, np.inf)]
    numbers = np.concatenate([table, middle, *around])
    return torch.from_numpy(np.concatenate([numbers, -numbers])).unsqueeze(0)


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_and_every_middle_is_rounded_by_the_definition(format):
    w = middles(format)
    expected = nearest(w.double().numpy(), format)
    assert count_unequal(quantise(w, format, 0), torch.from_numpy(expected).float()) == 0
    assert set(np.abs(expected[0])) == set(codes(format)), "every code is met"
    half_up = np.copysign(np.floor(np.abs(w.numpy()) + 0.5), w.numpy())
    if format == "int8":
        assert count_unequal(quantise(w, format, 0), torch.from_numpy(half_up)) > 0, "control"


@property_settings(60)
@given(
    format=st.sampled_from(FORMATS),
    size=st.sampled_from([0, 1, 2, 5, 32, 128]),
    shape=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    power_of_two=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    magnitude=st.sampled_from([0.0, 1e-40, 1e-37, 0.02, 1.0, 1e30]),
    seed=st.integers(0, 1000),
)
def test_a_matrix_is_rounded_part_by_part(format, size, shape, power_of_two, dtype, magnitude, seed):
    """Shapes that no block divides, matrices smaller than a block, subnormal numbers, and zeros."""
    w = (randn(seed, *shape) * magnitude).clamp(-6e4, 6e4) if dtype == torch.float16 else None
    w = (randn(seed, *shape) * magnitude if w is None else w).to(dtype)
    got = quantise(w, format, size, power_of_two)
    assert got.dtype == torch.float32
    assert count_unequal(got, by_definition(w, format, size, power_of_two)) == 0


def test_control_another_size_of_block_gives_other_bits():
    w = randn(3, 64, 96)
    results = [quantise(w, "float8_e4m3fn", size) for size in (0, 1, 16, 32)]
    assert all(count_unequal(a, b) > 0 for i, a in enumerate(results) for b in results[:i])
    assert count_unequal(quantise(w, "int8", 32), quantise(w, "int8", 32, True)) > 0


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen_in_its_part_and_nowhere_else(format, bad, power_of_two):
    w = randn(0, 6, 6)
    w[3, 1] = bad
    got = quantise(w, format, 2, power_of_two)
    assert got[2:4, :2].isnan().all()
    got[2:4, :2] = 0.0
    assert got.isfinite().all()


def test_a_power_of_two_scales_the_result_and_changes_no_significand():
    w = randn(1, 40, 70)
    for format in FORMATS:
        a, b = (quantise(w * f, format, 32, True) for f in (1.0, 2.0**9))
        assert count_unequal(a * 2.0**9, b) == 0


@pytest.mark.parametrize(
    ("shape", "format", "size", "message"),
    [
        ((2, 2), "float8_e8m0fnu", 0, r"format \(float8_e8m0fnu\) must be one of float8_e4m3fn"),
        ((2, 2), "int8", -1, r"size \(-1\) at least 0"),
        ((4,), "int8", 0, r"w \(4,\) a matrix"),
    ],
)
def test_refusals(shape, format, size, message):
    with pytest.raises(ValueError, match=message):
        quantise(torch.zeros(shape), format, size)


def test_the_setting_in_words():
    read = {f"{f}/{s}": Quantisation(f, size) for f in FORMATS for s, size in SCALES.items()}
    for text, expected in read.items():
        assert Quantisation.parse(text) == expected
        assert Quantisation.parse(f"{text}/pow2") == expected._replace(power_of_two=True)


@pytest.mark.parametrize("text", ["int8", "int8/", "int8/rows", "float8/row", "int8/row/", "int8/row/pow3"])
def test_another_setting_is_refused(text):
    with pytest.raises(ValueError, match="must be FORMAT/SCALE or FORMAT/SCALE/pow2; FORMAT is one of"):
        Quantisation.parse(text)


def test_which_tensors_are_quantised():
    layer = "model.layers.3."
    yes = ["self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight"]
    no = ["self_attn.q_proj.bias", "self_attn.q_norm.weight", "input_layernorm.weight", "mlp.gate.weight"]
    assert all(is_quantised(layer + name) for name in [*yes, "mlp.experts.0.gate_proj.weight"])
    assert not any(map(is_quantised, [*(layer + name for name in no), "lm_head.weight"]))
    assert not is_quantised("model.embed_tokens.weight")


# The scale 1


@pytest.mark.parametrize("format", FLOATS)
def test_without_a_scale_what_is_out_of_range_is_the_largest_number(format):
    m = codes(format)[-1]
    beyond = torch.tensor([m * f for f in (1.01, 1.04, 1.2, 1e3)])
    x = torch.cat([middles(format)[0], beyond, -beyond])
    expected = torch.from_numpy(nearest(x.clamp(-m, m).double().numpy(), format)).float()
    assert count_unequal(clipped(x, format), expected) == 0
    assert count_unequal(clipped(x.view(2, -1), format).flatten(), expected) == 0


@pytest.mark.parametrize("format", FLOATS)
def test_without_a_scale_an_infinity_is_not_hidden(format):
    x = torch.tensor([np.inf, -np.inf, np.nan, 1.0])
    assert clipped(x, format).isnan().tolist() == [True, True, True, False]


def test_an_int8_needs_a_scale():
    with pytest.raises(ValueError, match=r"clipped: format \(int8\) must be one of float8_e4m3fn"):
        clipped(torch.zeros(3), "int8")
