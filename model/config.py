"""The architecture of a checkpoint: its sizes, and the blocks that its family makes each layer of.

A field of config.json that asks for something unsupported is refused by name.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..files.reading import shown
from ..kernels.recurrent_state import StateShape
from .blocks.block import Block
from .blocks.delta_net import DeltaNet
from .blocks.embedding import Embedding, Head
from .blocks.experts import MixtureOfExperts
from .blocks.latent_attention import LatentAttention
from .blocks.residual import Layer, Residual, layer_operations
from .blocks.rope import Rope, frequencies, read_rope
from .config_file import ConfigFile, UnsupportedError
from .families import FAMILIES
from .family import Family
from .numerics import Numerics
from .operation import Operation
from .sizes import Experts, Sizes

# Of which each rank of tensor parallelism has an equal part.
_SHARED = ("heads", "kv_heads", "intermediate_size")


@dataclass(frozen=True)
class ModelConfig(Sizes):
    """What a decoder computes, beside its weights.

    blocks: of each layer. embedding, head: of what lies outside of them. From them follow the weights
    (weights.py), the operations (operations.py), and the forward (decoder.py).
    """

    blocks: tuple[Layer, ...]
    embedding: Embedding
    head: Head

    @classmethod
    def from_file(cls, folder: str | Path) -> "ModelConfig":
        """Read folder/config.json.

        Raises ValueError when the file is missing, is not JSON or names something unsupported.
        """
        return cls._from(ConfigFile.of_folder(folder))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "ModelConfig":
        """Build from the fields of config.json.

        Raises ValueError and names the field that is missing or unsupported.
        """
        return cls._from(ConfigFile(raw, "config"))

    @classmethod
    def _from(cls, file: ConfigFile) -> "ModelConfig":
        name, source = file.architecture, file.source
        if not isinstance(name, str) or name not in FAMILIES:
            raise ValueError(
                f"model: {source}: architecture {shown(name)} is not supported; "
                f"supported are {', '.join(FAMILIES)}"
            )
        family = FAMILIES[name]
        file = ConfigFile(file.raw, source, family.defaults)
        try:
            file.refuse_common(family.layer_types, family.dequantised)
            outside = {"embedding": family.embedding(file), "head": family.head(file)}
            config = cls(**_sizes(family, file), blocks=tuple(family.layers(file)), **outside)
            if file.fields.attention_bias and not config.values["qkv_bias"]:
                file.refuse("attention_bias", True, f"a {name} has no biases")
            file.refuse_unknown()
        except UnsupportedError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"model: {source} has a field of the wrong type ({error})") from None
        config.check(source)
        return config

    @property
    def frequencies(self) -> list[float]:
        """Inverse RoPE frequencies, radians per position, [head_dim / 2]."""
        return frequencies(self)

    @cached_property
    def local_rope_thetas(self) -> tuple[float | None, ...]:
        """Of each layer the base of its own rotary embedding; None where it has the model's."""
        return tuple(
            next((getattr(branch.block, "local_rope_theta", None) for branch in layer), None)
            for layer in self.blocks
        )

    @property
    def is_latent(self) -> bool:
        """Whether keys and values come of a latent (blocks/latent_attention.py)."""
        return any(isinstance(block, LatentAttention) for block in self.distinct_blocks)

    def refuse_on_triton(self) -> None:
        """Raise ValueError for what has no Triton kernels."""
        if self.is_latent:
            raise ValueError(
                f'device ("cuda"): the latent attention of a {self.architecture} is not computed on a GPU; '
                'set device = "cpu"'
            )

    def check_leaves(self, count: int) -> None:
        """Raise ValueError where sums of so many leaves are not built, or their parts are not equal."""
        if count == 1:
            return
        without = [type(block).__name__ for block in self.distinct_blocks if not block.has_leaves]
        if without:
            raise ValueError(
                f"precision.leaves ({count}): a {self.architecture} has a {without[0]}, whose sums have no "
                "leaves; set it to 1"
            )
        for name in ("kv_heads", "intermediate_size", "vocab_size"):
            if (size := self.values[name]) % count:
                raise ValueError(
                    f"precision.leaves ({count}) must divide {name} ({size}); choose a smaller one"
                )

    def of_rank(self, ranks: int) -> "ModelConfig":
        """The part of the model that one of `ranks` computes. check_leaves says with which it can be cut."""
        shared = {name: getattr(self, name) // ranks for name in _SHARED}
        return replace(self, ranks=self.ranks * ranks, **shared)

    def rotating(self, i: int) -> "ModelConfig":
        """The config with layer i's rotary embedding as the model's."""
        theta = self.local_rope_thetas[i]
        return self if theta is None else replace(self, rope_theta=theta, rope_scaling=None)

    @property
    def distinct_blocks(self) -> list[Block]:
        """The blocks of all layers, each once, in order."""
        return list(dict.fromkeys(branch.block for layer in self.blocks for branch in layer))

    @cached_property
    def mixture(self) -> MixtureOfExperts | None:
        """The block of the layers with experts; None where every layer has one MLP."""
        return next((block for block in self.distinct_blocks if isinstance(block, MixtureOfExperts)), None)

    @cached_property
    def states(self) -> dict[int, StateShape]:
        nets = ((i, branch.block) for i, layer in enumerate(self.blocks) for branch in layer)
        return {i: block.shape for i, block in nets if isinstance(block, DeltaNet)}

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts; None where every layer has one MLP."""
        return self.mixture and self.mixture.experts

    def dtypes(self, i: int, numerics: Numerics, compute: torch.dtype) -> dict[str, torch.dtype | None]:
        """The dtypes of layer i's weights that differ from the compute dtype, by name (Block.dtypes)."""
        blocks = (branch.block for branch in self.blocks[i])
        return {name: dtype for block in blocks for name, dtype in block.dtypes(numerics, compute).items()}

    @property
    def values(self) -> dict[str, Any]:
        """What decides the computation, by name, as JSON holds it: sizes, and the variants of the blocks."""
        sizes = {f.name: getattr(self, f.name) for f in fields(Sizes) if f.compare}
        sizes |= {name: sizes[name] * self.ranks for name in _SHARED}
        scaling, rotary_dim, _ = (sizes.pop(x) for x in ("rope_scaling", "rotary_dim", "norm_plus_one"))
        is_llama3 = scaling is not None and scaling["rope_type"] == "llama3"
        sizes["rope_llama3"] = {k: v for k, v in scaling.items() if k != "rope_type"} if is_llama3 else None
        if scaling is not None and not is_llama3:
            sizes["rope_scaling"] = scaling
        if rotary_dim != self.head_dim:
            sizes["rotary_dim"] = rotary_dim
        return sizes | self.embedding.values | self.head.values | self._variants

    @property
    def _variants(self) -> dict[str, Any]:
        """The variants of the blocks by name: a list, one entry a layer that has it, where layers differ."""
        by_layer: dict[str, list[Any]] = {}
        for layer in self.blocks:
            for name, value in {k: v for branch in layer for k, v in branch.values.items()}.items():
                by_layer.setdefault(name, []).append(value)
        return {name: x[0] if all(y == x[0] for y in x) else x for name, x in by_layer.items()}

    def stream(self, i: int) -> str:
        """The name in a trace of the residual stream before layer i; before layer 0 it is the embedding."""
        return f"layers.{i - 1}.{self.blocks[i - 1][-1].sum}" if i else Embedding.name

    def branches(self, i: int) -> Iterator[tuple[Residual, str]]:
        """The branches of layer i, each with the name in a trace of the sum that its norm reads."""
        summed = self.stream(i)
        for branch in self.blocks[i]:
            yield branch, summed
            summed = f"layers.{i}.{branch.sum}"

    @cached_property
    def outside_operations(self) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
        """The operations before the first layer, and after the last one, in the order of computation."""
        return self.embedding.operations(self), self.head.operations(self)

    @cached_property
    def layer_operations(self) -> tuple[tuple[Operation, ...], ...]:
        """The operations of each layer, in the order of computation."""
        rows = {layer: layer_operations(layer, self) for layer in set(self.blocks)}
        return tuple(rows[layer] for layer in self.blocks)


def _read_rope(family: Family, file: ConfigFile) -> Rope:
    return read_rope(file, family.rope_types, family.partial_rotary, family.rope_by_layer_type)


def _sizes(family: Family, file: ConfigFile) -> dict[str, Any]:
    """The fields of Sizes, converted but unchecked."""
    c = file.fields
    heads, rope = c.num_attention_heads, _read_rope(family, file)
    head_dim = c.head_dim or c.hidden_size // heads
    rotary_dim = int(head_dim * rope.share)
    if family.head_widths:
        head_dim, rotary_dim = family.head_widths(file)
    return {
        "architecture": family.architecture,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "layers": c.num_hidden_layers,
        "heads": heads,
        "kv_heads": heads if family.head_widths else c.num_key_value_heads or heads,
        "head_dim": head_dim,
        "max_positions": c.max_position_embeddings,
        "eps": c.rms_norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "rotary_dim": rotary_dim,
        "norm_plus_one": family.norm_plus_one,
        "tied": c.tie_word_embeddings,
        "raw": dict(file.raw),
    }
