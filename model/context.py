"""How the tokens of one forward belong together; whole sequences, packed, as the simplest case."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch

from ..kernels.attention import attention, varlen_plan
from ..kernels.attention_rule import AttentionRule
from ..kernels.grad import GradBuffer
from ..kernels.low_rank import LowRankBuffers
from ..kernels.order import token_blocks
from ..kernels.passes import Pass
from ..kernels.recurrent_state import AnySegments, Left, RecurrentState, Segments
from ..kernels.upload import Tables
from .routing import FREE, Routing
from .sizes import Sizes

# Called with the name and the output of each operation (names: operations.py). The decoder computes some
# operations as one; these have the names in Operation.fused.
Hook = Callable[[str, torch.Tensor], None]
Buffers = Mapping[torch.Tensor, GradBuffer | LowRankBuffers]  # of the gradients, by weight
NO_BUFFERS: Buffers = MappingProxyType({})


def no_hook(name: str, x: torch.Tensor) -> None:
    """The hook that does nothing."""


class Context(Protocol):
    """How the tokens of one forward belong together: positions [T], attention, and the operations' pass.

    `routing` knows the experts of the rows (routing.py).
    `in_pass` has the token blocks, the buffers of the weights' gradients, and the packed weights.
    `tables` is what the forward and its backward read on a device, beside the ids, and what may lie on the
    host yet. It goes to the device together with the ids (kernels/upload.py), at the latest in the forward.
    """

    positions: torch.Tensor
    in_pass: Pass
    routing: Routing
    tables: Sequence[Tables]

    @property
    def segments(self) -> AnySegments:
        """How the rows lie in sequences, for layers with a state."""
        ...

    def state(self, layer: int) -> RecurrentState | None:
        """Where such a layer has what the sequences left before; None where these are whole."""
        ...

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        rule: AttentionRule,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of q [T, Hq, D] over the keys of this context.

        k and v [T, Hkv, D] are the keys and values of the new tokens. rule: the order of the sums. sinks
        [T, Hq]: see kernels/attention_sinks.py.
        """
        ...


class KeepingContext(Context, Protocol):
    """A context that keeps keys and values."""

    def keep(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take the last layer's k and v [T, Hkv, D]. `attend` takes those of all other layers."""
        ...


class WholeSequences:
    """A context of sequences from their first token on."""

    def state(self, layer: int) -> None:
        return None


class CarryingContext(ABC):
    """A Context of training in which samples go on from what their prompts left in layers with a state."""

    @abstractmethod
    def before(self, layer: int) -> Left | None:
        """What the sequences go on from; None where all of them are whole, and nobody goes on from them."""

    @abstractmethod
    def leave(self, layer: int, left: Left) -> None:
        """Take what the sequences leave."""


class PackedContext(WholeSequences):
    """Whole sequences, packed one after another. lengths [S] in tokens, summing to T.

    `padding` rows may follow, which nobody reads. They are one more sequence for attention. They are in no
    token block, and no gradient reaches them.
    shards [S]: the virtual shard of each sequence, in ascending order; None where all are of shard 0.
    buffers: where the weights' gradients are summed (kernels/passes.py). routing: of the rows.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        config: Sizes,
        padding: int = 0,
        shards: Sequence[int] | None = None,
        buffers: Buffers = NO_BUFFERS,
        routing: Routing = FREE,
    ):
        self.routing = routing
        all_lengths = self._lengths = [*lengths, padding] if padding else list(lengths)
        self.positions = torch.from_numpy(
            np.concatenate([*map(np.arange, lengths), np.zeros(padding, np.int64)])
        )
        self.in_pass = Pass(token_blocks(lengths, shards), buffers)
        self._plan = varlen_plan(all_lengths, config.heads, config.kv_heads)
        self._has_states = bool(config.states)

    @cached_property
    def segments(self) -> Segments:
        return Segments(self._lengths)

    @property
    def tables(self) -> list[Tables]:
        segments = [self.segments] if self._has_states else []
        return [self.in_pass.blocks, self._plan, *segments, self]

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        return [self.positions]

    def arrived(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        (self.positions,) = tensors

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        rule: AttentionRule,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return attention(q, k, v, self._plan, scale, rule, sinks)


class NarrowingContext(ABC):
    """A Context of which nobody reads some rows after the attention of the last layer (one_pass.py)."""

    narrowed: Context  # of the rows that are left

    @abstractmethod
    def narrow(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of x [T, D] that are left."""
