"""The learner's GradientTree adds shards in the order of an explicit recursive pairwise sum."""

import math

import pytest
import torch
from zerokl.engine.learner import GradientTree

from tests.helpers import randn, total_unequal

Leaf = torch.Tensor | None


def pairwise(leaves: list[Leaf]) -> Leaf:
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    left, right = pairwise(leaves[:half]), pairwise(leaves[half:])
    if left is None or right is None:
        return right if left is None else left
    return left + right


def tree_sum(tree: GradientTree, leaves: list[Leaf]) -> torch.Tensor:
    """Every leaf is pushed from the same buffer, as the learner does."""
    buffer = torch.empty(tree.numel)
    for leaf in leaves:
        tree.push(None if leaf is None else buffer.copy_(leaf))
    return tree.take()


def _leaves(shards: int, empty: float, seed: int) -> list[Leaf]:
    present = torch.rand(shards, generator=torch.Generator().manual_seed(seed)) >= empty
    return [randn(seed + i, 999) * 10.0 ** (i % 5) if there else None for i, there in enumerate(present)]


@pytest.mark.parametrize("empty", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("shards", [1, 2, 4, 8, 16])
def test_shape_of_the_tree(shards, empty):
    tree = GradientTree(shards, 999)
    for seed in range(12):  # one tree, used for many steps: no buffer of an earlier step shows through
        leaves = _leaves(shards, empty, 100 * seed)
        expected = pairwise(leaves)
        expected = torch.zeros(999) if expected is None else expected
        assert total_unequal([tree_sum(tree, leaves)], [expected]) == 0


def test_no_shards_with_sequences_sum_to_zero():
    tree = GradientTree(4, 5)
    assert tree_sum(tree, [None] * 4).tolist() == [0.0] * 5


def test_it_holds_log2_of_the_shards_partial_sums():
    tree = GradientTree(16, 5)
    for _ in range(16):
        tree.push(torch.ones(5))
        assert len(tree._levels) <= math.log2(16)
    assert tree.take().tolist() == [16.0] * 5


def test_root_is_refused_before_every_shard_was_pushed():
    tree = GradientTree(4, 5)
    tree.push(torch.ones(5))
    with pytest.raises(AssertionError, match="1 of 4 shards"):
        tree.take()


def test_control_a_sum_from_left_to_right_is_found():
    leaves = _leaves(8, 0.0, 0)
    left_to_right = leaves[0]
    for leaf in leaves[1:]:
        left_to_right = left_to_right + leaf
    assert total_unequal([tree_sum(GradientTree(8, 999), leaves)], [left_to_right]) > 0
