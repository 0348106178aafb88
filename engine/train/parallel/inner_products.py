"""Inner products of gradients, of the whole model and of each of its layers, in fp64.

Each block of the ledger (model/weights.py) is summed alone: along rows of FLAT_TILE in fp64, and then by a
correctly rounded sum (math.fsum). A layer is a correctly rounded sum of its blocks, and so is the whole. So
threads, workers and ranks decide no bit.

Shapes: m gradients and k others; n elements of this rank's part of a gradient.
"""

import math
import re
from collections.abc import Sequence

import numpy as np
import torch

from ....model.weights import FLAT_TILE
from .zero import Slices

# The name of the whole model among the layers.
WHOLE = "model"


def layer_of(name: str) -> str:
    """The layer of a tensor of a checkpoint, such as layers.3; outside of layers its module, as lm_head."""
    match = re.search(r"\blayers\.\d+\b", name)
    return match[0] if match else name.split(".")[-2]


@torch.no_grad()
def inner_products(
    gradients: Sequence[torch.Tensor], slices: Slices, others: Sequence[torch.Tensor] = ()
) -> dict[str, np.ndarray]:
    """The inner products of gradients with each other and with others, of the model (WHOLE) and each layer.

    -> layer -> [m, m + k] fp64. gradients [m][n], others [k][n]: fp32, on the CPU. With ranks each is this
    rank's part (Slices.sum_roots), and all ranks must call this together; every rank gets the products of the
    whole gradients. A product of gradients that are not finite is NaN.
    """
    all_gradients, m = [*gradients, *others], len(gradients)
    products_here = [
        (name, _of_block([g[start:stop] for g in all_gradients], m)) for name, start, stop in slices.blocks
    ]
    by_layer: dict[str, list[np.ndarray]] = {WHOLE: []}
    for rank_products in slices.ranks.gather(lambda: products_here):
        for name, products in rank_products:
            by_layer.setdefault(layer_of(name), []).append(products)
            by_layer[WHOLE].append(products)
    return {layer: _summed(blocks) for layer, blocks in by_layer.items()}


def _of_block(parts: Sequence[torch.Tensor], m: int) -> np.ndarray:
    """The inner products of the first m of m + k parts of equal length with all of them, [m, m + k]."""
    n = len(parts[0])
    x = torch.zeros(len(parts), n + -n % FLAT_TILE, dtype=torch.float64)
    for row, part in zip(x, parts, strict=True):
        row[:n] = part
    products = np.empty((m, len(x)))
    for i in range(m):
        rows = (x[i:] * x[i]).view(len(x) - i, -1, FLAT_TILE).sum(-1)
        products[i, i:] = [_sum(row) for row in rows.tolist()]
        products[i:, i] = products[i, i:m]
    return products


def _summed(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of the blocks' products, each correctly rounded. [m, m + k]"""
    columns = np.stack(blocks).reshape(len(blocks), -1).T.tolist()
    return np.array([_sum(column) for column in columns]).reshape(blocks[0].shape)


def _sum(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
