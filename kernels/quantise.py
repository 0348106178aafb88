"""A matrix through an 8-bit format and back: q(w) = s Q(w / s), with one scale s for a part of the matrix.

    s = max |w| / m over the part, or the least power of two that is not below this quotient
    Q rounds to the nearest number of the format, to the even code where two are as near

m is the largest number of the format: 448 of float8_e4m3fn, 57344 of float8_e5m2 (Micikevicius et al.,
arXiv:2209.05433), and 127 of int8. A part is the matrix, a row (an output channel), or a block of size x size
elements. The last blocks of a row or a column may be smaller. s is never below 2^-126, the least normal fp32
number, so that a part of zeros stays zero.

`clipped` has s = 1 everywhere. A finite number outside the format's range becomes its largest, -m or m. It is
of float8_e4m3fn and float8_e5m2: an int8 without a scale would be a whole number.

Gradient: none here. Whoever trains through it counts it as the identity (straight-through: Bengio et al.,
arXiv:1308.3432).

Shapes: w [N, K]; the result [N, K] in fp32. x of `clipped` has any shape.
Roundings: the quotient max |w| / m, the quotient w / s, Q, and the product with s. With a power of two both
the second and the last are exact, as long as their results are normal numbers. `clipped` has Q alone.
Order: no sums. So torch computes the same bits on every device, and no Triton kernel is needed for what runs
once in an update.
A part with an infinity or a NaN is NaN everywhere, and `clipped` makes an infinity NaN: nothing hides it.
"""

import torch

# The largest number of each format.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
_FLOATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
_LEAST_SCALE = torch.finfo(torch.float32).tiny
# The bits of an fp32 number's significand.
_SIGNIFICAND = (1 << 23) - 1


def quantise(w: torch.Tensor, format: str, size: int, power_of_two: bool = False) -> torch.Tensor:
    """q(w) [N, K] fp32 of w [N, K] in any dtype.

    format: a key of LARGEST. size: of a block with one scale; 0 is the matrix, 1 a row.

    Raises ValueError for another format, a negative size, and what is no matrix.
    """
    if format not in LARGEST or size < 0 or w.ndim != 2:
        raise ValueError(
            f"quantise: format ({format}) must be one of {', '.join(LARGEST)}, size ({size}) at least 0, and "
            f"w {tuple(w.shape)} a matrix"
        )
    w = w.float()
    scale = _largest_of_parts(w, size).div_(LARGEST[format]).clamp_(min=_LEAST_SCALE)
    if power_of_two:
        scale = _next_power_of_two(scale)
    scale = _of_elements(scale, w.shape, size)
    # No element leaves the format's range: w / s exceeds m by less than half a unit in its last place.
    return _rounded(w / scale, format).mul_(scale)


def clipped(x: torch.Tensor, format: str) -> torch.Tensor:
    """x of any shape and dtype, clipped to the numbers of an 8-bit float and rounded, as fp32.

    Raises ValueError for another format.
    """
    if format not in _FLOATS:
        raise ValueError(f"clipped: format ({format}) must be one of {', '.join(_FLOATS)}")
    m = LARGEST[format]
    # torch's own conversion saturates in some versions only, and then hides infinities as well.
    finite = x.float().masked_fill(x.isinf(), float("nan"))
    return _rounded(finite.clamp(-m, m), format)


def _largest_of_parts(w: torch.Tensor, size: int) -> torch.Tensor:
    """max |w| of each part: [1, 1] of the matrix, [N, 1] of rows, or one for each block."""
    if size < 2:
        return w.abs().amax(1 if size else (0, 1), keepdim=True)
    N, K = w.shape
    padded = torch.nn.functional.pad(w.abs(), (0, -K % size, 0, -N % size))  # 0 is no maximum, or the same
    return padded.unflatten(0, (-1, size)).unflatten(2, (-1, size)).amax((1, 3))


def _of_elements(scale: torch.Tensor, shape: torch.Size, size: int) -> torch.Tensor:
    """The scales as they multiply w: one for each element of [N, K], or a shape that broadcasts to it."""
    if size < 2:
        return scale
    N, K = shape
    return scale.repeat_interleave(size, 0)[:N].repeat_interleave(size, 1)[:, :K]


def _next_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below each positive normal number, by the bits of fp32.

    Infinity and NaN stay what they are. The sum of a NaN's bits would be those of a zero.
    """
    power = ((scale.view(torch.int32) + _SIGNIFICAND) & ~_SIGNIFICAND).view(torch.float32)
    return torch.where(scale.isnan(), scale, power)


def _rounded(x: torch.Tensor, format: str) -> torch.Tensor:
    """x rounded to the format, as fp32."""
    return x.round_() if format == "int8" else x.to(_FLOATS[format]).float()
