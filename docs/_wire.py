"""What ranks that share layers send, counted by the code that sends it (kernels/leaves.py)."""

import torch
from zerokl.kernels.leaves import Leaves
from zerokl.pages.markdown import table

# Layers and hidden size of Qwen3.
MODELS = {"0.6B": (28, 1024), "8B": (36, 4096)}
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


def wire() -> str:
    """For each model and number of ranks in a row: bytes of a layer and of a pass, and the predicted time."""
    lines = []
    for name, (layers, width) in MODELS.items():
        for ranks in (1, 2, 4, 8):
            layer = JOINS * sent_by_a_join(ranks, ROWS, width)
            seconds = layers * layer / NVLINK
            lines.append(
                [name, str(ranks), f"{layer / 1e6:,.0f}", f"{layers * layer / 1e9:.1f}", f"{seconds:.3f}"]
            )
    head = ["model", "ranks of a row", "a layer, MB", "all layers, GB", "predicted, s"]
    return table(head, lines)
