"""The sizes of a decoder, as its config.json gives them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ..kernels.recurrent_state import StateShape

# Upper limit of a size. A larger one is a mistake, and the mistake would take all time or memory before
# anybody sees it.
_LARGEST = 1 << 24
# With a base below 1 the frequencies would rise, and fp32 does not hold those of a larger one.
_ROPE_THETA = (1.0, 1e15)
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "heads",
    "kv_heads",
    "head_dim",
    "max_positions",
)


@dataclass(frozen=True)
class GroupedRouter:
    """A router that chooses experts of some of their groups, and whose logits are in fp32."""

    groups: int = 1
    top_groups: int = 1  # the groups that a token's experts come from
    scale: float = 1.0  # of the routing weights


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a sparse layer."""

    number: int
    per_token: int
    size: int  # intermediate size of one expert
    renormalise: bool  # whether the routing weights of a token are divided by their sum
    layers: frozenset[int]  # the sparse layers; the others have one MLP
    shared: int = 0  # intermediate size of the expert that every token has beside the chosen ones; 0 is none
    shared_gate: bool = False  # whether a sigmoid of each token multiplies what the shared expert gives
    # One that scores each expert alone; a bias corrects its choice (kernels/sigmoid_router.py).
    sigmoid: GroupedRouter | None = None
    softmax: GroupedRouter | None = None  # a softmax over all experts; without both fields, a plain one

    @property
    def grouped(self) -> GroupedRouter | None:
        """The router, where it is no plain softmax."""
        return self.sigmoid or self.softmax

    def as_json(self) -> dict[str, Any]:
        """The fields by name, as JSON holds them, without what a mixture does not have."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for kind in ("sigmoid", "softmax"):
            if values[kind] is not None:
                values[kind] = vars(values[kind])
        missing = {f.name for f in fields(self) if f.default is not MISSING and values[f.name] == f.default}
        return {n: x for n, x in values.items() if n not in missing} | {"layers": sorted(self.layers)}


@dataclass(frozen=True)
class Sizes:
    """Static dimensions of a decoder. Widths in elements, positions in tokens."""

    architecture: str  # the name of its family in config.json
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # kernels/rope_scaling.py
    rotary_dim: int  # elements of a head that are rotated, its first ones
    norm_plus_one: bool  # a norm multiplies by 1 + its weight
    tied: bool  # lm_head shares the embedding's weight
    raw: dict[str, Any] = dataclasses.field(repr=False, compare=False)  # config.json as read
    # That share the weights. heads, kv_heads and intermediate_size are then a rank's, and so are the rows of
    # embed and lm_head.
    ranks: int = dataclasses.field(default=1, compare=False, kw_only=True)
    # That share the experts of each layer. The experts' weights are then a rank's.
    expert_ranks: int = dataclasses.field(default=1, compare=False, kw_only=True)

    @property
    def states(self) -> Mapping[int, StateShape]:
        """The layers that keep a state of each sequence in place of keys and values, and its sizes."""
        return {}

    def check(self, source: str) -> None:
        """Raise ValueError for a number that no model can have, or that the kernels cannot take.

        source: what the message calls config.json.
        """
        for field in _COUNTS:
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"model: {source}: {field} ({value}) must be positive")
            if value > _LARGEST:
                raise ValueError(
                    f"model: {source}: {field} ({value}) is larger than zerokl takes ({_LARGEST})"
                )
        low, high = _ROPE_THETA
        if not low <= self.rope_theta <= high:
            raise ValueError(
                f"model: {source}: rope_theta ({self.rope_theta}) must lie in {low:g} to {high:g}"
            )
        if not self.eps >= 0.0:
            raise ValueError(f"model: {source}: rms_norm_eps ({self.eps}) must not be negative")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model: {source}: num_attention_heads ({self.heads}) "
                f"must be a multiple of num_key_value_heads ({self.kv_heads})"
            )
        if self.head_dim % 16:
            raise ValueError(f"model: {source}: head_dim ({self.head_dim}) must be a multiple of 16")
        if self.rotary_dim % 2 or self.rotary_dim < 2:
            raise ValueError(
                f"model: {source}: the rotated part of a head ({self.rotary_dim}) must be 2 or more, and even"
            )
        short = self.rope_scaling.get("short_factor") if self.rope_scaling else None
        if short is not None and len(short) != self.rotary_dim // 2:
            raise ValueError(
                f"model: {source}: longrope: short_factor has {len(short)} numbers, and "
                f"{self.rotary_dim // 2} frequencies are rotated"
            )
