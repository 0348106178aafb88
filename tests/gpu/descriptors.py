"""TMA's rules, for each descriptor that a launch hands over. No GPU and no Triton take part.

A descriptor becomes a tensor map when its kernel is launched on a GPU. A map that breaks a rule is refused
there, and this ends the run. The rules are those of cuTensorMapEncodeTiled in the CUDA driver API, section
"Tensor Map Object Management", as Triton calls it (triton/backends/nvidia/driver.c: no interleave, element
strides of 1; dimensions in reversed order):

    rank       1 to 5 dimensions, and as many strides and sides of a block
    address    a multiple of 16 bytes
    shape      each dimension 1 to 2^32
    strides    in bytes a multiple of 16 and below 2^40. The last dimension has no stride: its elements lie
               side by side
    block      each side 1 to 256; along the last dimension a multiple of 16 bytes, and no more bytes than
               the swizzle of the map spans: 32, 64 or 128

TensorDescriptor asserts a part of these (3.6.0 and 3.7.1): the rank, the address, the multiples of 16 bytes,
positive shapes, the last stride. The rest is found by the driver alone. Two rules here are narrower than the
driver's. A stride is positive: no row of a matrix lies on another row. A block has sides of at most 256, and
its rows fill whole spans of 128 bytes where they are longer. Triton would cut a longer side into several
boxes, and the kernels of this package are written for one. The compiler chooses the box and the swizzle of
a map; `broken_maps` has the box that it chose.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from zerokl.kernels.launch import Launch

_UNIT_BYTES = 16
_MAX_RANK = 5
_MAX_SHAPE, _MAX_STRIDE_BYTES = 2**32, 2**40
_MAX_SIDE = 256
# CUtensorMapSwizzle -> bytes of a row of a box at most. Without a swizzle only the side's limit is left.
_SPAN_BYTES = {0: None, 1: 32, 2: 64, 3: 128}
_WIDEST_SPAN_BYTES = 128


def descriptors(launch: Launch) -> Iterator[tuple[str, Any]]:
    """The descriptors of a launch, each with the name of its argument."""
    names = inspect.signature(getattr(launch.kernel, "fn", launch.kernel)).parameters
    yield from ((name, x) for name, x in zip(names, launch.args, strict=False) if hasattr(x, "block_shape"))


def broken_rules(launches: Iterable[Launch]) -> list[str]:
    """`kernel, argument: rule` for each rule that a descriptor of these launches breaks."""
    return [
        f"{launch.kernel.__name__}, {name}: {rule}"
        for launch in launches
        for name, x in descriptors(launch)
        for rule in (*_of_tensor(x), *_of_block(x))
    ]


def broken_maps(launch: Launch, maps: Sequence[Mapping[str, Any]]) -> list[str]:
    """As `broken_rules`, for the boxes that the compiler chose.

    maps: what the binary of the launch says of its descriptors, in their order (metadata.tensordesc_meta).
    """
    return [
        f"{launch.kernel.__name__}, {name}: {rule}"
        for (name, x), made in zip(descriptors(launch), maps, strict=True)
        for rule in _of_box(x, made["block_size"], made["swizzle"])
    ]


def _of_tensor(x: Any) -> Iterator[str]:
    """The rules of rank, address, shape and strides that a descriptor breaks."""
    rank, size = len(x.shape), x.base.element_size()
    if not 1 <= rank <= _MAX_RANK or not rank == len(x.strides) == len(x.block_shape):
        lengths = rank, len(x.strides), len(x.block_shape)
        yield f"shape, strides and block have {lengths} numbers, which must be equal and 1 to {_MAX_RANK}"
    if x.base.data_ptr() % _UNIT_BYTES:
        yield f"the address ({x.base.data_ptr():#x}) must be a multiple of {_UNIT_BYTES} bytes"
    for i, length in enumerate(x.shape):
        if not 1 <= length <= _MAX_SHAPE:
            yield f"shape[{i}] ({length}) must be 1 to 2^32"
    for i, stride in enumerate(x.strides[:-1]):
        if stride <= 0:
            yield f"strides[{i}] ({stride}) must be positive"
        elif stride * size % _UNIT_BYTES:
            yield f"strides[{i}] ({stride * size} bytes) must be a multiple of {_UNIT_BYTES} bytes"
        elif stride * size >= _MAX_STRIDE_BYTES:
            yield f"strides[{i}] ({stride * size} bytes) must be below 2^40"
    if x.strides[-1] != 1:
        yield f"strides[{rank - 1}] ({x.strides[-1]}) must be 1: elements of a row lie side by side"


def _of_block(x: Any) -> Iterator[str]:
    """The rules that a descriptor's block breaks."""
    yield from _of_sides(x, x.block_shape)
    row_bytes = x.block_shape[-1] * x.base.element_size()
    if row_bytes > _WIDEST_SPAN_BYTES and row_bytes % _WIDEST_SPAN_BYTES:
        yield f"a row of the block ({row_bytes} bytes) must fill spans of {_WIDEST_SPAN_BYTES} bytes"


def _of_box(x: Any, box: Sequence[int], swizzle: int) -> Iterator[str]:
    """The rules that the box of a tensor map breaks."""
    yield from _of_sides(x, box)
    row_bytes, span = box[-1] * x.base.element_size(), _SPAN_BYTES[swizzle]
    if span is not None and row_bytes > span:
        yield f"a row of the block ({row_bytes} bytes) must fit the swizzle's {span} bytes"
    for i, (side, whole) in enumerate(zip(box, x.block_shape, strict=True)):
        if whole % side:
            yield f"block[{i}] ({whole}) must be a multiple of the box's side ({side})"


def _of_sides(x: Any, sides: Sequence[int]) -> Iterator[str]:
    for i, side in enumerate(sides):
        if not 1 <= side <= _MAX_SIDE:
            yield f"block[{i}] ({side}) must be 1 to {_MAX_SIDE}"
    row_bytes = sides[-1] * x.base.element_size()
    if not row_bytes or row_bytes % _UNIT_BYTES:
        yield f"a row of the block ({row_bytes} bytes) must be a multiple of {_UNIT_BYTES} bytes"
