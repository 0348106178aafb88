"""A context whose rows ranks share outside of attention, and whose heads they share inside it.

kernels/shared_rows.py says how, and why no bit depends on it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from ..kernels.attention_rule import AttentionRule
from ..kernels.backend import on_triton
from ..kernels.order import ROW_TILE
from ..kernels.shared_rows import SharedRows, all_rows, heads_of_rank, rows_of_rank, rows_of_this
from ..kernels.upload import Tables
from .config import ModelConfig
from .context import KeepingContext, NarrowingContext, WholeSequences
from .weights import Entry


def check_shared_rows(config: ModelConfig, trained: Sequence[Entry], ranks: int) -> None:
    """Raise ValueError for a model whose layers cannot share their rows among so many ranks.

    trained: what has a gradient, of which each rank sums an equal part.
    """
    name = config.architecture
    rows = [row for rows in config.layer_operations for row in rows]
    for has, what in (
        (config.experts, "experts"),
        (config.states, "gated delta nets"),
        (config.is_latent, "latent attention"),
        (any(row.sinks for row in rows), "attention sinks"),
    ):
        if has:
            raise ValueError(
                f"parallel.context ({ranks}): a {name} has {what}, which are not built with shared rows; "
                "set it to 1"
            )
    heads = "kv_heads" if config.ranks == 1 else "the kv_heads of a rank of parallel.tensor"
    sizes = {heads: config.kv_heads}
    sizes |= {f"the rows of {entry.name}": entry.shape[0] for entry in trained}
    for what, n in sizes.items():
        if n % ranks:
            raise ValueError(f"parallel.context ({ranks}) must divide {what} ({n}); choose a smaller one")


def sizes_of_rank(config: ModelConfig, shared: SharedRows) -> ModelConfig:
    """The config with the heads that a rank has inside of attention."""
    return config if shared.size == 1 else config.of_rank(shared.size)


class SharedContext(WholeSequences):
    """This rank's rows of a context `whole`, which was made for all rows and for this rank's heads.

    The rows are an equal part of `whole`'s, padding among them, so the ranks must divide these.
    """

    tables: Sequence[Tables] = ()  # those of `whole`: its rows are cut once they have arrived

    def __init__(self, whole: KeepingContext, shared: SharedRows):
        self._whole, self._shared, self.routing = whole, shared, whole.routing
        self.positions = shared.mine(whole.positions)
        self.in_pass = replace(whole.in_pass, shared=shared)

    def keep(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._whole.keep(*heads_of_rank(self._shared, k, v))

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
        q, k, v = heads_of_rank(self._shared, q, k, v)
        o = self._whole.attend(layer, q, k, v, scale, rule, sinks)
        return rows_of_rank(self._shared, _padded(o, self._shared.size))


def _padded(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Rows that fill the tiles of all ranks (decoder.with_padding). x [T, ...]. Filled ones stay."""
    padding = -len(x) % (ranks * (1 if on_triton(x) else ROW_TILE))
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, padding)) if padding else x


class SharedNarrowingContext(SharedContext, NarrowingContext):
    """This rank's rows of a context that leaves rows out in the last layer (one_pass.py).

    The rows that are left are cut anew among the ranks, with padding of their own.
    """

    def __init__(self, whole: NarrowingContext, shared: SharedRows):
        super().__init__(whole, shared)
        narrowed = whole.narrowed
        self.narrowed = narrowed._replace(in_pass=replace(narrowed.in_pass, shared=shared))

    def narrow(self, x: torch.Tensor) -> torch.Tensor:
        rows = self._whole.narrow(all_rows(x, self._shared))
        return rows_of_this(_padded(rows, self._shared.size), self._shared)
