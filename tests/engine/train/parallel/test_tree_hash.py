"""The hash tree of flat tensors: the same whoever hashes a block, and another one for any other bit."""

import hashlib
import struct
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.train.parallel import tree_hash
from zerokl.engine.train.parallel.tree_hash import Hashing, hash_tree
from zerokl.kernels.block_digest import block_digests
from zerokl.model.weights import Block
from zerokl.verify.ledger import tree_of

from tests.helpers import property_settings, randn


def _blocks(sizes: list[int], length: int = 512) -> list[Block]:
    """Blocks of weights of these sizes, which lie one after another."""
    blocks, start = [], 0
    for i, n in enumerate(sizes):
        blocks += [Block(f"w{i}", a, min(a + length, start + n)) for a in range(start, start + n, length)]
        start += n
    return blocks


@pytest.mark.parametrize("helpers", [0, 1, 5])
def test_a_tree_is_the_same_however_many_threads_hash_it(helpers, monkeypatch):
    sizes = [1000 * i % 7001 + 1 for i in range(40)]
    blocks, parts = _blocks(sizes), [randn(k, sum(sizes)) for k in (0, 1)]
    expected = hash_tree(blocks, *parts)
    monkeypatch.setattr(tree_hash, "_HELPERS", helpers)
    assert hash_tree(blocks, *parts) == expected
    parts[1][sum(sizes[:20])] = 9.0  # control
    changed = hash_tree(blocks, *parts)
    assert [a == b for a, b in zip(changed.leaves, expected.leaves, strict=True)].count(False) == 1
    assert changed.leaves[20] != expected.leaves[20]


@pytest.mark.parametrize("together", [1, 3, 128])
def test_blocks_beside_a_gpu_have_the_same_digests_however_many_come_together(together, monkeypatch):
    """Nobody asks whose device it is: the CPU stands for the GPU here."""
    sizes = [1000 * i % 7001 + 1 for i in range(10)]
    bounds, x = torch.tensor([(b.start, b.stop) for b in _blocks(sizes)]), randn(0, sum(sizes))
    monkeypatch.setattr(tree_hash, "SLICE", together * tree_hash.BLOCK)
    digests = tree_hash._brought_digests(x, bounds, x.device)
    assert torch.equal(digests, block_digests(x, bounds))
    assert not torch.equal(digests, block_digests(x.flip(0), bounds)), "control"


@property_settings(40)
@given(st.lists(st.integers(1, 2500), min_size=1, max_size=6), st.integers(0, 2**32), st.integers(1, 4))
def test_a_tree_is_the_same_whoever_hashes_a_block(sizes, seed, ranks):
    """As the ranks do it: each hashes the blocks of its slice, which are neighbours."""
    blocks, x = _blocks(sizes), randn(seed, sum(sizes))
    cuts = sorted(np.random.default_rng(seed).integers(0, len(blocks) + 1, ranks - 1))
    parts = [blocks[a:b] for a, b in pairwise([0, *cuts, len(blocks)])]
    gathered = [leaf for part in parts for leaf in Hashing(part, x).leaves()]
    assert tree_of(gathered) == hash_tree(blocks, x)
    if len(gathered) > 1:
        assert tree_of(gathered[1:] + gathered[:1]) != hash_tree(blocks, x), "control: another order"


@property_settings(40)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=5), st.data())
def test_a_flipped_bit_of_any_block_is_found_at_its_weight(sizes, data):
    blocks, parts = _blocks(sizes, 256), [randn(k, sum(sizes)) for k in (0, 1)]
    before = hash_tree(blocks, *parts)
    part, element = data.draw(st.integers(0, 1)), data.draw(st.integers(0, sum(sizes) - 1))
    parts[part].view(torch.int32)[element] ^= 1 << data.draw(st.integers(0, 31))
    after = hash_tree(blocks, *parts)
    weight = int(np.searchsorted(np.cumsum(sizes), element, side="right"))
    assert [a == b for a, b in zip(before.leaves, after.leaves, strict=True)] == [
        i != weight for i in range(len(sizes))
    ]
    assert after.root != before.root


def test_a_leaf_is_the_hash_of_dtype_length_and_digest_of_its_blocks():
    """For each block, the parts of all tensors side by side: a step of the ledger is chained over it."""
    sizes = [700, 512, 5, 1300]
    blocks, parts = _blocks(sizes), [randn(0, sum(sizes)), randn(1, sum(sizes)).bfloat16()]
    texts = dict.fromkeys((block.name for block in blocks), b"")
    for name, start, stop in blocks:
        for x in parts:
            digest = block_digests(x, torch.tensor([[start, stop]]))[0].tolist()
            texts[name] += f"{x.dtype} {stop - start} ".encode() + struct.pack("<2q", *digest)
    leaves = [hashlib.sha256(text).hexdigest()[:32] for text in texts.values()]
    assert hash_tree(blocks, *parts).leaves == leaves
    assert hash_tree(blocks, *parts[::-1]).leaves != leaves, "control: the other order of the tensors"


def test_dtype_length_and_number_of_tensors_are_hashed():
    x = torch.zeros(8, dtype=torch.int16)
    kinds = [
        hash_tree([Block("w", 0, 8)], x.view(torch.bfloat16)),
        hash_tree([Block("w", 0, 8)], x.view(torch.float16)),
        hash_tree([Block("w", 0, 7)], x.view(torch.float16)),
        hash_tree([Block("w", 0, 4)], x.view(torch.float32)),
        hash_tree([Block("w", 0, 8)], x.view(torch.float16), x.view(torch.float16)),
        hash_tree([Block("w", 0, 4), Block("w", 4, 8)], x.view(torch.float16)),
    ]
    assert len({tree.root for tree in kinds}) == len(kinds)


def test_a_tree_does_not_wait_for_threads_that_are_busy():
    free = threading.Event()
    busy = [tree_hash._pool().submit(free.wait) for _ in range(64)]
    blocks, x = _blocks([3000, 2]), randn(0, 3002)
    leaves = Hashing(blocks, x).leaves()
    assert tree_of(leaves) == tree_of(leaf for block in blocks for leaf in Hashing([block], x).leaves())
    free.set()
    assert all(task.result() for task in busy)
