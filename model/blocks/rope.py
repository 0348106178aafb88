"""The rotary embedding: its variants in config.json, its frequencies, and its table of cos and sin.

A variant is plain, or scaled as that of Llama 3.
"""

from typing import Any

import torch
from pydantic import FiniteFloat

from ...files.reading import shown
from ...kernels.backend import on_triton
from ...kernels.grad import accumulate_dtype
from ...kernels.rope import llama3_frequencies, rope_frequencies, rope_table, rope_table_fp32
from ..config_file import ConfigFile, Fields
from ..sizes import Sizes
from .block import Rotation


class _RopeFields(Fields):
    """The fields of `rope_parameters` or `rope_scaling`."""

    rope_type: Any = None
    type: Any = None  # the older name of rope_type
    rope_theta: FiniteFloat | None = None
    partial_rotary_factor: Any = 1.0


class _Llama3Fields(Fields):
    """The fields of rope_type llama3."""

    factor: FiniteFloat
    low_freq_factor: FiniteFloat
    high_freq_factor: FiniteFloat
    original_max_position_embeddings: FiniteFloat


def read_rope(config: ConfigFile) -> tuple[float, dict[str, float] | None]:
    """RoPE theta, and the parameters of llama3 scaling where the model has it.

    transformers 5 writes `rope_parameters`; earlier versions write `rope_theta` and `rope_scaling`. Raises
    UnsupportedError.
    """
    scaling = config.fields.rope_scaling
    raw = config.fields.rope_parameters or scaling
    if raw | scaling != raw:
        config.wrong(
            f"rope_scaling ({shown(scaling)}) differs from rope_parameters, and libraries differ in which "
            "they read; keep one"
        )
    rope = config.read(_RopeFields, raw)
    kinds = [kind for kind in (rope.rope_type, rope.type) if kind is not None]
    kind = kinds[0] if kinds else "default"
    theta = config.fields.rope_theta if rope.rope_theta is None else rope.rope_theta
    if rope.partial_rotary_factor != 1.0:
        config.refuse("partial_rotary_factor", rope.partial_rotary_factor, "only 1.0 is")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        config.refuse("rope_type", kind, "supported are default and llama3")
    values = config.read(_Llama3Fields, raw).model_dump()
    if min(values.values()) <= 0.0 or values["low_freq_factor"] >= values["high_freq_factor"]:
        config.wrong(
            f"rope_type llama3: {', '.join(values)} must be positive, "
            "and low_freq_factor below high_freq_factor"
        )
    return theta, values


def frequencies(c: Sizes) -> list[float]:
    """Inverse frequencies, radians per position, [head_dim / 2]."""
    base = rope_frequencies(c.head_dim, c.rope_theta)
    if c.rope_llama3 is None:
        return base
    return llama3_frequencies(
        base,
        c.rope_llama3["factor"],
        c.rope_llama3["low_freq_factor"],
        c.rope_llama3["high_freq_factor"],
        int(c.rope_llama3["original_max_position_embeddings"]),
    )


def rotation_table(c: Sizes, like: torch.Tensor) -> Rotation:
    """cos and sin, [positions, head_dim / 2], rounded to the dtype of `like`, on its device.

    On Triton they are computed as vLLM's models compute them, otherwise in fp64.
    """
    if on_triton(like):
        table = rope_table_fp32(
            c.head_dim, c.rope_theta, c.rope_llama3, c.max_positions, like.dtype, like.device
        )
    else:
        table = rope_table(frequencies(c), c.max_positions, like.dtype)
    return tuple(t.to(like.device, accumulate_dtype(like.dtype)) for t in table)
