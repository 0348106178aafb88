"""What ranks that share layers (kernels/leaves.py) or rows (shared_rows.py) send, counted by that code."""

from typing import NamedTuple

import torch
from zerokl.kernels.leaves import Leaves
from zerokl.kernels.shared_rows import SharedRows
from zerokl.pages.markdown import table


class Widths(NamedTuple):
    """Those of a model's layers, in elements."""

    layers: int
    hidden: int
    queries: int
    keys: int  # and values
    intermediate: int
    head: int


# Of Qwen3.
MODELS = {"0.6B": Widths(28, 1024, 2048, 1024, 3072, 128), "8B": Widths(36, 4096, 4096, 1024, 12288, 128)}
ROWS = 16384
# Two joins in the forward of a layer (o, down), and two in its backward (qkv, gate_up).
JOINS = 4
# Bytes a second that an H200 sends over NVLink, from the vendor's data sheet (900 GB/s, both ways).
NVLINK = 450e9


class CountingRank:
    """Rank 0 of several, which counts the bytes that it sends and waits for nobody."""

    rank, sent = 0, 0

    def __init__(self, size: int):
        self.size = size

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.sent += x.nbytes * (self.size - 1)
        return [x.clone() for _ in range(self.size)]

    def exchange(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return self.all_gather(parts[0])


def sent_by_a_join(ranks: int, rows: int, width: int) -> int:
    """The bytes that a rank sends for one sum [rows, width] of eight leaves."""
    rank = CountingRank(ranks)
    leaves = Leaves(8, rank)
    leaves.join([torch.empty(rows, width, device="meta") for _ in range(leaves.mine)])
    return rank.sent


def sent_by_a_layer(ranks: int, rows: int, w: Widths, dtype: torch.dtype = torch.bfloat16) -> int:
    """The bytes that a rank sends in one layer of shared rows, forward and backward."""
    rank, qkv = CountingRank(ranks), w.queries + 2 * w.keys
    shared = SharedRows(rank)

    def part(width: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(rows // ranks, width, dtype=dtype, device="meta")

    # Heads and back in the forward and the backward; dy of qkv, o, gate_up and down.
    columns = [qkv, w.queries, w.queries, qkv, qkv, w.hidden, 2 * w.intermediate, w.hidden]
    for width in columns:
        shared.columns(part(width))
    for width in (w.hidden, w.hidden, w.head, w.head):  # the norms' products
        shared.columns(part(width, torch.float32))
    for width in (w.hidden, w.queries, w.hidden, w.intermediate):  # x of qkv, o, gate_up and down
        shared.whole(part(width))
    return rank.sent


def wire() -> str:
    """For each model and number of ranks in a row: bytes of a layer and of a pass, and the predicted time."""
    lines = []
    for name, w in MODELS.items():
        for ranks in (2, 4, 8):
            both = JOINS * sent_by_a_join(ranks, ROWS, w.hidden), sent_by_a_layer(ranks, ROWS, w)
            cells = [
                [f"{layer / 1e6:,.0f}", f"{w.layers * layer / 1e9:.1f}", f"{w.layers * layer / NVLINK:.3f}"]
                for layer in both
            ]
            lines.append([name, str(ranks), *cells[0], *cells[1]])
    columns = ("a layer, MB", "all layers, GB", "predicted, s")
    head = ["model", "ranks of a row", *(f"{kind}: {x}" for kind in ("layers", "rows") for x in columns)]
    return table(head, lines)
