"""GradientTree adds virtual shards in the order of an explicit recursive pairwise sum."""

import math

import pytest
import torch
from zerokl.engine.train.parallel.gradient import GradientTree, add_roots

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


def tree_sum(tree: GradientTree, leaves: list[Leaf]) -> Leaf:
    """The root of the tree; every leaf is pushed from the same buffer, as ShardSum does it."""
    buffer = torch.empty(999)
    for leaf in leaves:
        tree.push(None if leaf is None else buffer.copy_(leaf))
    return tree.take()


def _leaves(shards: int, empty: float, seed: int) -> list[Leaf]:
    present = torch.rand(shards, generator=torch.Generator().manual_seed(seed)) >= empty
    return [randn(seed + i, 999) * 10.0 ** (i % 5) if leaf else None for i, leaf in enumerate(present)]


@pytest.mark.parametrize("empty", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("shards", [1, 2, 4, 8, 16])
def test_shape_of_the_tree(shards, empty):
    # One tree takes many steps: no buffer of an earlier step shows through.
    tree = GradientTree(shards)
    for seed in range(12):
        leaves = _leaves(shards, empty, 100 * seed)
        expected, root = pairwise(leaves), tree_sum(tree, leaves)
        assert root is expected is None or total_unequal([root], [expected]) == 0


@pytest.mark.parametrize("empty", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_subtrees_of_several_workers_have_the_root_of_one_tree(parts, empty):
    leaves = _leaves(8, empty, 7)
    shards = 8 // parts
    roots = [tree_sum(GradientTree(shards), leaves[i : i + shards]) for i in range(0, 8, shards)]
    root, expected = add_roots(roots), pairwise(leaves)
    assert root is expected is None or total_unequal([root], [expected]) == 0


@pytest.mark.parametrize("empty", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rounds_of_neighbours_have_the_root_of_one_tree(ranks, empty):
    """As ranks do it: each has one shard in a round. The sum of a round is a leaf of the tree of rounds."""
    for seed in range(6):
        leaves, rounds = _leaves(8, empty, 100 * seed), GradientTree(8 // ranks)
        for first in range(0, 8, ranks):
            shards = leaves[first : first + ranks]
            rounds.push(add_roots([None if leaf is None else leaf.clone() for leaf in shards]))
        root, expected = rounds.take(), pairwise(leaves)
        assert root is expected is None or total_unequal([root], [expected]) == 0


def test_the_root_of_one_shard_is_its_gradient_and_takes_no_memory():
    tree, leaf = GradientTree(1), randn(0, 999)
    for _ in range(2):
        tree.push(leaf)
        assert tree.take() is leaf
    tree.push(None)
    assert tree.take() is None
    assert not tree._spare


def test_no_shards_with_sequences_have_no_sum():
    assert tree_sum(GradientTree(4), [None] * 4) is None


def test_it_holds_log2_of_the_shards_partial_sums():
    tree = GradientTree(16)
    for _ in range(16):
        tree.push(torch.ones(5))
        assert len(tree._levels) <= math.log2(16)
    assert tree.take().tolist() == [16.0] * 5


def test_root_is_refused_before_every_shard_was_pushed():
    tree = GradientTree(4)
    tree.push(torch.ones(5))
    with pytest.raises(AssertionError, match="1 of 4 shards"):
        tree.take()


def test_control_a_sum_from_left_to_right_is_found():
    leaves = _leaves(8, 0.0, 0)
    left_to_right = leaves[0]
    for leaf in leaves[1:]:
        left_to_right = left_to_right + leaf
    assert total_unequal([tree_sum(GradientTree(8), leaves)], [left_to_right]) > 0
