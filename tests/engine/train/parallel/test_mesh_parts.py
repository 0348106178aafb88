"""Ranks that share layers and rows at once have the scores and the gradient of one rank with their leaves."""

import threading
from dataclasses import replace

import pytest
import torch
from zerokl.engine.train.parallel.process_group import Ranks
from zerokl.engine.train.parallel.spread import Cutting
from zerokl.engine.train.parallel.tensor import TensorParts
from zerokl.engine.train.parallel.ulysses import ContextParts
from zerokl.kernels.leaves import Leaves
from zerokl.kernels.order import join_pairs
from zerokl.kernels.shared_rows import SharedRows
from zerokl.model.checkpoint import load_decoder
from zerokl.model.decoder import Decoder
from zerokl.model.numerics import COMPUTE

from tests.engine.train.parallel.test_shared_rows import LONG, WORK, alone, four  # noqa: F401, a fixture
from tests.engine.train.parallel.test_tensor_parts import ranks_of
from tests.engine.train.test_shards_in_flight import flat, step_of
from tests.helpers import total_unequal
from tests.kernels.test_shared_sums import ThreadRank

LEAVES = 4


def on_grid(context: int, tensor: int, work) -> list:
    """What work(c, t, leaves, shared) returns in each rank of a row."""

    def groups(n: int, size: int):
        made = [(threading.Barrier(size), [None] * size) for _ in range(n)]
        return [[ThreadRank(i, *group) for i in range(size)] for group in made]

    layers, rows = groups(context, tensor), groups(tensor, context)
    results, errors = [None] * (context * tensor), []

    def run(c: int, t: int) -> None:
        try:
            leaves, shared = Leaves(LEAVES, layers[c][t]), SharedRows(rows[t][c])
            results[c * tensor + t] = work(c, t, leaves, shared)
        except Exception as error:
            errors.append(error)
            layers[c][t]._barrier.abort()
            rows[t][c]._barrier.abort()

    threads = [threading.Thread(target=run, args=(c, t)) for c in range(context) for t in range(tensor)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def cut_on(layout, context: int, tensor: int, c: int, t: int) -> tuple[TensorParts, ContextParts]:
    names = {"dp": (0, 1), "cp": (c, context), "tp": (t, tensor), "replicas": (c, context)}
    grid = {name: ranks_of(*place) for name, place in names.items()}
    ranks = Ranks(ranks_of(c * tensor + t, context * tensor).mesh, grid)
    parts = TensorParts(layout, ranks)
    return parts, ContextParts(parts.part.config, parts.cutting, ranks)


def with_leaves(decoder: Decoder, leaves: Leaves, layout=None, weights=None) -> Decoder:
    layout, weights = layout or decoder.layout, decoder.flat.detach() if weights is None else weights
    return Decoder(layout.config, weights, layout, COMPUTE._replace(leaves=leaves))


def unequal(decoder: Decoder, context: int = 2, tensor: int = 2) -> tuple[int, int]:
    """Unequal scores and gradients of a grid, beside one rank with as many leaves."""
    step, layout = step_of(LONG), decoder.layout
    expected, gradient = alone(with_leaves(decoder, Leaves(LEAVES)), step, WORK)

    def of_rank(c, t, leaves, shared):
        parts, summed = cut_on(layout, context, tensor, c, t)
        mine = with_leaves(decoder, leaves, parts.part, parts.cut(decoder.flat.detach()))
        scored, root = alone(mine, step, replace(WORK, shared=shared), summed.part)
        return scored, summed, summed.vector(root)

    whole, scores = torch.zeros(layout.trained_numel), 0
    for scored, summed, vector in on_grid(context, tensor, of_rank):
        scores += total_unequal([flat(scored)[0]], [flat(expected)[0]])
        for (a, b), x in zip(summed.ranges, vector.split([b - a for a, b in summed.ranges]), strict=True):
            whole[a:b] = x
    assert whole.count_nonzero() > len(whole) // 2
    return scores, total_unequal([whole], [gradient])


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(x, marks=pytest.mark.full) for x in (torch.float32, torch.float16))],
    ids=str,
)
def test_a_grid_has_the_bits_of_one(four, dtype):  # noqa: F811
    assert unequal(load_decoder(four, dtype)) == (0, 0)


def test_control_pieces_of_a_sum_in_another_order_are_seen(four, monkeypatch):  # noqa: F811
    def turned(leaves, pieces):
        first, *roots = leaves.ranks.all_gather(join_pairs(pieces))
        return join_pairs([*roots, first])

    monkeypatch.setattr(Leaves, "join", turned)
    assert min(unequal(load_decoder(four, torch.float32), 1, 4)) > 0


def test_control_parts_of_a_gradient_in_another_order_are_seen(four, monkeypatch):  # noqa: F811
    then = Cutting.then

    def swapped(cutting, other):
        cut = then(cutting, other)
        first, second, third, fourth = cut.ranges_of
        return Cutting(cut.layout, cut.part, [first, third, second, fourth])

    monkeypatch.setattr(Cutting, "then", swapped)
    scores, gradients = unequal(load_decoder(four, torch.float32))
    assert (scores, gradients > 0) == (0, True)


def test_a_part_among_zeros_adds_nothing_to_the_others():
    part = torch.tensor([[0.0, -0.0], [1.5, float("inf")]])
    placed = [SharedRows(ranks_of(rank, 2)).among_zeros(part) for rank in range(2)]
    assert total_unequal([placed[0] + placed[1]], [torch.cat([part, part])]) == 0
    plain = [torch.where(x == 0, 0.0, x) for x in placed]  # control: 0.0 takes the sign of a -0.0
    assert total_unequal([plain[0] + plain[1]], [torch.cat([part, part])]) > 0
