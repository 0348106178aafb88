"""The rotary embedding: its variants in config.json, its frequencies, and its table of cos and sin.

A variant is plain, or scaled (kernels/rope_scaling.py). It rotates whole heads, or their first elements.
"""

import math
from typing import Any, NamedTuple

import torch
from pydantic import FiniteFloat, PositiveInt

from ...files.reading import shown
from ...kernels.backend import on_triton
from ...kernels.grad import accumulate_dtype
from ...kernels.rope import rope_frequencies, rope_table, rope_table_fp32
from ...kernels.rope_scaling import attention_factor, scaled_frequencies
from ..config_file import ConfigFile, Fields
from ..sizes import Sizes
from .block import Rotation

# As in transformers, beside the rotary embedding it comes before the field in it.
_ORIGINAL = "original_max_position_embeddings"


class Rope(NamedTuple):
    """The rotary embedding of a config.json. scaling: rope_type and its parameters; None is plain."""

    theta: float
    scaling: dict[str, Any] | None
    share: float  # of a head's elements, that which is rotated


class _RopeFields(Fields):
    """The fields of `rope_parameters` or `rope_scaling`, whatever their type."""

    rope_type: Any = None
    type: Any = None  # the older name of rope_type
    rope_theta: FiniteFloat | None = None
    partial_rotary_factor: FiniteFloat | None = None
    # Of models that see images, too. A text's token has three equal positions, so these decide nothing.
    mrope_section: Any = None
    mrope_interleaved: Any = None


class _LocalFields(Fields):
    """The older name of rope_theta in layers of sliding_attention."""

    rope_local_base_freq: FiniteFloat | None = None


class _LinearFields(Fields):
    """The fields of rope_type linear, and of dynamic."""

    factor: FiniteFloat


class _Llama3Fields(Fields):
    """The fields of rope_type llama3."""

    factor: FiniteFloat
    low_freq_factor: FiniteFloat
    high_freq_factor: FiniteFloat
    original_max_position_embeddings: FiniteFloat


class _YarnFields(Fields):
    """The fields of rope_type yarn."""

    factor: FiniteFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None
    attention_factor: FiniteFloat | None = None
    beta_fast: FiniteFloat = 32.0
    beta_slow: FiniteFloat = 1.0
    mscale: FiniteFloat | None = None
    mscale_all_dim: FiniteFloat | None = None
    truncate: bool = True


class _LongRopeFields(Fields):
    """The fields of rope_type longrope."""

    short_factor: list[FiniteFloat]
    long_factor: list[FiniteFloat]
    factor: FiniteFloat | None = None
    attention_factor: FiniteFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None


def read_rope(config: ConfigFile, types: dict[str, str], partial: bool, by_layer_type: bool = False) -> Rope:
    """The rotary embedding of a model; of its layers of full_attention, where it goes by the layer's type.

    types: other names that the family has for a type. partial: whether the family rotates a part of a head
    where config.json says so. transformers 5 writes `rope_parameters`; earlier versions write `rope_theta`
    and `rope_scaling`. Raises UnsupportedError.
    """
    common = config.fields
    raw = common.rope_parameters or common.rope_scaling
    if common.rope_scaling and common.rope_scaling != raw:
        config.wrong(
            f"rope_scaling ({shown(common.rope_scaling)}) differs from rope_parameters, and libraries differ "
            "in which they read; keep one"
        )
    place = "rope_parameters" if common.rope_parameters else "rope_scaling"
    if by_layer_type and common.rope_parameters:
        raw, place = _of_layer_type(config, "full_attention"), f"{place}.full_attention"
    nested = ConfigFile(raw, f"{config.source}: {place}")
    rope = nested.read(_RopeFields)
    kind = next((kind for kind in (rope.rope_type, rope.type) if kind is not None), "default")
    kind = types.get(kind, kind) if isinstance(kind, str) else kind
    theta = common.rope_theta if rope.rope_theta is None else rope.rope_theta
    shares = (rope.partial_rotary_factor, common.partial_rotary_factor, 1.0)
    share = next(x for x in shares if x is not None)
    if share != 1.0 and not partial:
        config.refuse("partial_rotary_factor", share, "only 1.0 is")
    if not 0.0 < share <= 1.0:
        config.wrong(f"partial_rotary_factor ({share}) must be above 0 and at most 1")
    readers = {"linear": _read_linear, "dynamic": _read_dynamic, "llama3": _read_llama3, "yarn": _read_yarn}
    readers |= {"longrope": _read_longrope, "default": lambda nested, config: None}
    if not isinstance(kind, str) or kind not in readers:
        config.refuse("rope_type", kind, f"supported are {', '.join(readers)}")
    config.value(_ORIGINAL)  # the other types read it, and it computes nothing without them
    scaling = readers[kind](nested, config)
    nested.refuse_unknown()
    if kind == "yarn" and not theta > 1.0:
        config.wrong(f"rope_theta ({theta}) must be above 1 with rope_type yarn")
    return Rope(theta, scaling, share)


def _of_layer_type(config: ConfigFile, layer_type: str) -> dict[str, Any]:
    """The object for layers of this type in rope_parameters."""
    raw, types = config.fields.rope_parameters, ("full_attention", "sliding_attention")
    if set(raw) - set(types) or not all(isinstance(raw.get(name) or {}, dict) for name in types):
        config.refuse("rope_parameters", raw, f"it must have an object each for {' and '.join(types)}")
    return raw.get(layer_type) or {}


def read_local_theta(config: ConfigFile, default: float) -> float:
    """The base of the plain rotary embedding in layers of sliding_attention.

    default: of a file that does not name it. Raises UnsupportedError for one that is scaled.
    """
    raw = _of_layer_type(config, "sliding_attention")
    nested = ConfigFile(raw, f"{config.source}: rope_parameters.sliding_attention")
    rope, older = nested.read(_RopeFields), config.read(_LocalFields).rope_local_base_freq
    if rope.rope_type not in (None, "default"):
        nested.refuse("rope_type", rope.rope_type, "layers of sliding_attention have a plain one")
    if rope.partial_rotary_factor not in (None, 1.0):
        nested.refuse("partial_rotary_factor", rope.partial_rotary_factor, "only 1.0 is")
    nested.refuse_unknown()
    theta = next((x for x in (rope.rope_theta, older) if x is not None), default)
    if not theta >= 1.0:
        nested.wrong(f"rope_theta ({theta}) must be at least 1")
    return theta


def _read_linear(nested: ConfigFile, config: ConfigFile) -> dict[str, Any]:
    factor = nested.read(_LinearFields).factor
    _check_positive("linear", nested, factor=factor)
    return {"rope_type": "linear", "factor": factor}


def _read_dynamic(nested: ConfigFile, config: ConfigFile) -> None:
    """Plain: only sequences beyond max_position_embeddings have another base, and these are refused."""
    _check_positive("dynamic", nested, factor=nested.read(_LinearFields).factor)


def _read_llama3(nested: ConfigFile, config: ConfigFile) -> dict[str, Any]:
    values = nested.read(_Llama3Fields).model_dump()
    values[_ORIGINAL] = config.value(_ORIGINAL) or values[_ORIGINAL]
    _check_positive("llama3", nested, **values)
    if values["low_freq_factor"] >= values["high_freq_factor"]:
        nested.wrong("rope_type llama3: low_freq_factor must be below high_freq_factor")
    return {"rope_type": "llama3", **values}


def _read_yarn(nested: ConfigFile, config: ConfigFile) -> dict[str, Any]:
    """Its attention factor as in transformers: it falls out of `factor` where none is given."""
    values, positions = nested.read(_YarnFields), config.fields.max_position_embeddings
    original = config.value(_ORIGINAL) or values.original_max_position_embeddings or positions
    factor = positions / original if values.factor is None else values.factor
    both = values.mscale and values.mscale_all_dim
    inferred = _mscale(factor, values.mscale if both else 1.0)
    inferred /= _mscale(factor, values.mscale_all_dim) if both else 1.0
    numbers = {
        "factor": factor,
        "attention_factor": inferred if values.attention_factor is None else values.attention_factor,
        "beta_fast": values.beta_fast,
        "beta_slow": values.beta_slow,
        "original_max_position_embeddings": original,
    }
    _check_positive("yarn", nested, **numbers)
    # transformers takes a null as false.
    truncate = values.truncate and nested.raw.get("truncate", True) is not None
    return {"rope_type": "yarn", **numbers, "truncate": truncate}


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _read_longrope(nested: ConfigFile, config: ConfigFile) -> dict[str, Any]:
    """The short factors. Above the original context the frequencies would depend on a sequence's length."""
    values, positions = nested.read(_LongRopeFields), config.fields.max_position_embeddings
    original = config.value(_ORIGINAL) or values.original_max_position_embeddings or positions
    factor = positions / original if values.factor is None else values.factor
    if positions > original:
        config.refuse(
            "rope_type",
            "longrope",
            f"with max_position_embeddings ({positions}) above {_ORIGINAL} ({original}) the frequencies of a "
            f"token change when its sequence grows beyond {original}; for shorter sequences, with the short "
            f"factors, set max_position_embeddings to {original} and the scaling's factor to {factor:g} "
            "(vLLM's own model does not read that factor, so it then computes another rotation)",
        )
    inferred = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    attention = inferred if values.attention_factor is None else values.attention_factor
    for short in values.short_factor:
        _check_positive("longrope", nested, short_factor=short)
    _check_positive("longrope", nested, attention_factor=attention, factor=factor)
    return {"rope_type": "longrope", "short_factor": values.short_factor, "attention_factor": attention}


def _check_positive(kind: str, nested: ConfigFile, **values: float) -> None:
    for name, value in values.items():
        if not value > 0.0:
            nested.wrong(f"rope_type {kind}: {name} ({shown(value)}) must be positive")


def frequencies(c: Sizes) -> list[float]:
    """Inverse frequencies, radians per position, [rotary_dim / 2]."""
    return scaled_frequencies(rope_frequencies(c.rotary_dim, c.rope_theta), c.rope_theta, c.rope_scaling)


def rotation_table(c: Sizes, like: torch.Tensor) -> Rotation:
    """cos and sin, [positions, rotary_dim / 2], rounded to the dtype of `like`, on its device.

    On Triton they are computed as vLLM's models compute them, otherwise in fp64.
    """
    if on_triton(like):
        table = rope_table_fp32(
            c.rotary_dim, c.rope_theta, c.rope_scaling, c.max_positions, like.dtype, like.device
        )
    else:
        factor = attention_factor(c.rope_scaling)
        table = rope_table(frequencies(c), c.max_positions, like.dtype, factor)
    return tuple(t.to(like.device, accumulate_dtype(like.dtype)) for t in table)
