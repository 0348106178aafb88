"""What a family of models is. Each family is one file of families/."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .blocks.embedding import Embedding, Head
from .blocks.residual import Layer
from .config_file import ConfigFile

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Family:
    """A family of models. Its file has the name of its model_type in config.json.

    architecture: the name of its class in config.json.
    layers: the blocks of each layer, from config.json. Raises UnsupportedError (ConfigFile.refuse) for a
        value of a field that asks for what no block computes.
    defaults: what transformers takes where config.json lacks a field, by its name there, where that is not
        the default of CommonFields (config_file.py) or of the family's own fields.
    rope_types: other names that the family has for a type of rotary embedding.
    partial_rotary: whether partial_rotary_factor may be below 1.
    head_widths: the width of a head's keys, and of the rotated part, where head_dim does not say it.
    layer_types: of config.json, those that `layers` reads (windows: blocks/attention.py::read_windows).
    rope_by_layer_type: whether layers of sliding_attention have a rotary embedding of their own.
    norm_plus_one: whether a norm multiplies by 1 + its weight.
    embedding, head: what lies outside of layers, from config.json.
    dequantised: quant_method in config.json of quantised weights that are read, as numbers (mxfp4.py).
    vllm_exact: whether vLLM's own model of it was compared with ours, in batch-invariant mode.
    small: fields of config.json of the small model of `zerokl init --preset MODEL_TYPE`, beside its sizes.
    """

    architecture: str
    layers: Callable[[ConfigFile], Sequence[Layer]]
    defaults: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    rope_types: Mapping[str, str] = field(default_factory=lambda: _NONE)
    partial_rotary: bool = False
    head_widths: Callable[[ConfigFile], tuple[int, int]] | None = None
    layer_types: frozenset[str] = frozenset({"full_attention"})
    rope_by_layer_type: bool = False
    norm_plus_one: bool = False
    embedding: Callable[[ConfigFile], Embedding] = lambda config: Embedding()
    head: Callable[[ConfigFile], Head] = lambda config: Head()
    vllm_exact: bool = False
    dequantised: str = ""
    small: Mapping[str, Any] = field(default_factory=lambda: _NONE)
