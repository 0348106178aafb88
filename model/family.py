"""What a family of models is. Each family is one file of families/."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .blocks.residual import Layer
from .config_file import ConfigFile


@dataclass(frozen=True)
class Family:
    """A family of models.

    architecture: the name of its class in config.json.
    layers: the blocks of each layer, from config.json. Raises UnsupportedError (ConfigFile.refuse) for a
        value of a field that asks for what no block computes.
    head_dim: the width of a head where config.json has none; None is hidden_size / num_attention_heads.
    """

    architecture: str
    layers: Callable[[ConfigFile], Sequence[Layer]]
    head_dim: int | None = None
