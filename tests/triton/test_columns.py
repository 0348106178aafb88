"""Column sums that wait for each other have the bits of sums that do not wait."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import columns_triton
from zerokl.kernels.grad import GradBuffer, PendingSums
from zerokl.kernels.launch import recorded_launches
from zerokl.kernels.order import TOKEN_BLOCK, TokenBlocks, token_blocks

from tests.helpers import property_settings, randn, total_unequal

ROWS = columns_triton.NORM_ROWS


def partials(n: int, D: int, blocks: TokenBlocks) -> list[torch.Tensor]:
    return [randn(i, len(blocks.rows) * TOKEN_BLOCK // ROWS, D) for i in range(n)]


def sums(n: int, D: int, shards: int, pending: PendingSums | None) -> list[GradBuffer]:
    """Buffers over one memory, as in engine/train/parallel/gradient.py."""
    memory = torch.zeros(shards, n * D)
    return [GradBuffer(memory[:, i * D : (i + 1) * D], pending=pending) for i in range(n)]


def added(n: int, D: int, lengths: list[int], rounds: int, pending: PendingSums | None) -> list[torch.Tensor]:
    """What n weights have after `rounds` backward passes."""
    blocks = token_blocks(lengths, range(len(lengths)))
    buffers = sums(n, D, len(lengths), pending)
    for _ in range(rounds):
        for buffer, partial in zip(buffers, partials(n, D, blocks), strict=True):
            buffer.add_partials(partial, blocks, ROWS)
    return [buffer.sums for buffer in buffers]


@property_settings(8)
@given(
    n=st.integers(1, 2 * columns_triton.WEIGHTS + 1),
    D=st.sampled_from([1, 32, 70]),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    rounds=st.integers(1, 2),
)
def test_sums_that_wait_have_the_bits_of_sums_at_once(n, D, lengths, rounds):
    expected = added(n, D, lengths, rounds, None)
    assert total_unequal(added(n, D, lengths, rounds, PendingSums()), expected) == 0
    assert all(x.abs().sum() > 0 for x in expected)


def test_one_launch_adds_those_that_wait_and_a_weight_that_comes_again_is_added_before():
    blocks, pending = token_blocks([200]), PendingSums()
    buffers, weight_partials = sums(3, 40, 1, pending), partials(3, 40, blocks)
    with recorded_launches(and_run=True) as launches:
        for _ in range(2):
            for buffer, partial in zip(buffers, weight_partials, strict=True):
                buffer.add_partials(partial, blocks, ROWS)
        assert len(launches) == 1
        assert buffers[0].sums.abs().sum() > 0
        assert len(launches) == 2


def test_control_a_launch_that_picks_another_weight_has_other_bits(monkeypatch):
    expected = added(5, 40, [200], 1, None)
    launch = columns_triton.launch

    def shifted(kernel, grid, accs, all_partials, *args, **options):
        launch(kernel, grid, accs, all_partials[1:] + all_partials[:1], *args, **options)

    monkeypatch.setattr(columns_triton, "launch", shifted)
    assert total_unequal(added(5, 40, [200], 1, PendingSums()), expected) > 0


def test_control_a_weight_that_comes_again_and_does_not_wait_its_turn_loses_a_sum():
    blocks = token_blocks([200])
    first, second = partials(2, 40, blocks)

    def twice(pending: PendingSums, forget: bool) -> torch.Tensor:
        (buffer,) = sums(1, 40, 1, pending)
        buffer.add_partials(first, blocks, ROWS)
        if forget:
            pending._waiting.clear()
        buffer.add_partials(second, blocks, ROWS)
        return buffer.sums

    expected = twice(PendingSums(), forget=False)
    assert total_unequal([twice(PendingSums(), forget=True)], [expected]) > 0


@pytest.mark.parametrize("shards", [[0], [1], [0, 1]])
def test_an_empty_shard_is_zeroed_before_the_sum_waits(shards):
    memory = torch.full((2, 40), float("nan"))
    buffer = GradBuffer(memory, empty=[0, 1], pending=PendingSums())
    blocks = token_blocks([100] * len(shards), shards)
    buffer.add_partials(partials(1, 40, blocks)[0], blocks, ROWS)
    assert buffer.sums[shards].isfinite().all()
