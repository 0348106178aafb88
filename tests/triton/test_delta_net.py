"""A gated delta net on Triton, interpreted: one result for any cut, its gradients, and its accuracy.

It has no bits of the reference's: products and sums along a row have another order.
"""

import pytest
import torch
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.launch import recorded_launches
from zerokl.kernels.recurrent_state import RecurrentState, Segments, StateShape

from tests.helpers import assert_at_most_twice_the_error, randn, total_unequal
from tests.kernels import test_delta_rule as rule

SHAPE = StateShape(key_heads=1, heads=2, K=16, V=16)
WIDTHS = SHAPE.channels, SHAPE.heads * SHAPE.V, SHAPE.heads, SHAPE.heads
FORWARD = ["_causal_conv_fwd", "_delta_rows", "_delta_pairs", "_delta_walk", "_gated_norm_fwd"]
CONTINUED = ["_causal_conv_fwd", "_keep_inputs", *FORWARD[1:4], "_keep_rows", "_gated_norm_fwd"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The nets of the reference's tests, with fewer heads and columns: the interpreter is slow."""
    monkeypatch.setattr(rule, "SHAPE", SHAPE)
    monkeypatch.setattr(rule, "WIDTHS", WIDTHS)


def kernels(launches) -> list[str]:
    return [launch.kernel.__name__ for launch in launches]


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=str
)
def test_cuts_and_batches_change_no_bit(dtype):
    """The open chunk of the first sequence is left, entered again within a tile, and closed."""
    lengths, cuts = (83, 18), [[50, 1, 14, 18], [16, 1, 1]]
    xs, w = rule.inputs(sum(lengths), dtype), rule.weights(dtype)
    sequences = rule.pieces(xs, lengths)
    with recorded_launches(and_run=True) as launches:
        packed = rule.whole(xs, w, lengths)
    assert kernels(launches) == FORWARD
    alone = [rule.whole(s, w, [n]) for s, n in zip(sequences, lengths, strict=True)]
    assert total_unequal(packed.split(lengths), alone) == 0
    with recorded_launches(and_run=True) as launches:
        in_cuts = rule.in_cuts(sequences, w, cuts)
    assert kernels(launches) == 4 * CONTINUED
    assert total_unequal(in_cuts, alone) == 0


def rounded(state: RecurrentState) -> None:
    state.tensors["start"].copy_(state.tensors["start"].bfloat16())


@pytest.mark.parametrize(
    ("cut", "fault"), [((64, 2), {"between": rounded}), ((6, 10), {"forgets": True})], ids=["state", "chunks"]
)
def test_control_a_state_in_16_bits_and_chunks_that_begin_with_a_call_are_seen(cut, fault):
    xs, w = rule.inputs(sum(cut), torch.float32), rule.weights(torch.float32)
    assert total_unequal(rule.in_cuts([xs], w, [cut], **fault), [rule.whole(xs, w, [sum(cut)])]) > 0


@torch.no_grad()
def test_a_slot_of_an_earlier_sequence_shows_only_where_it_was_not_zeroed():
    xs, w = rule.inputs(20, torch.float32), rule.weights(torch.float32)
    state = RecurrentState(SHAPE, 3, torch.float32)
    rule.net(xs, w, Segments([20], [0], [1]), state)
    state.copy([1], [2])
    parts = [rule.net(xs, w, Segments([20], [20], [slot]), state) for slot in (1, 2)]
    assert total_unequal(parts[:1], parts[1:]) == 0
    state.zero(2)
    again = [rule.net(xs, w, Segments([20], [0], [slot]), state) for slot in (2, 1)]
    expected = rule.whole(xs, w, [20])
    assert total_unequal(again[:1], [expected]) == 0
    assert total_unequal(again[1:], [expected]) > 0, "control"


@pytest.mark.full
def test_packing_and_micro_batches_change_no_bit_of_a_gradient():
    lengths, dtype = (67, 3), torch.bfloat16
    xs, w = rule.inputs(sum(lengths), dtype), rule.weights(dtype)
    dy = randn(9, sum(lengths), WIDTHS[1], dtype=dtype)
    together, apart = ([GradBuffer.like(x) for x in w] for _ in range(2))
    packed = rule.gradients(xs, w, lengths, dy, together)
    parts = zip(rule.pieces(xs, lengths), lengths, dy.split(lengths), strict=True)
    alone = [rule.gradients(x, w, [n], d, apart) for x, n, d in parts]
    assert total_unequal(packed, [torch.cat(x) for x in zip(*alone, strict=True)]) == 0
    assert total_unequal([b.sums for b in together], [b.sums for b in apart]) == 0
    other = rule.gradients(xs, w, [sum(lengths)], dy, [GradBuffer.like(x) for x in w])
    assert total_unequal(packed, other) > 0, "control: one sequence"


@pytest.mark.full
def test_errors_are_at_most_twice_those_of_plain_torch():
    """In 16 bits the roundings are the reference's."""
    seeds, tokens, dtype = (100, 200), 70, torch.float32
    exact = rule.judged(torch.float64, rule.recurrent, seeds, tokens)
    ours = rule.judged(dtype, lambda xs, w: rule.net(xs, w, Segments([tokens])), seeds, tokens)
    plain = rule.judged(dtype, rule.recurrent, seeds, tokens)
    names = "y", "dx", "dz", "da", "db", "dconv", "dA_log", "ddt_bias", "dnorm"
    for name, *results in zip(names, ours, plain, exact, strict=True):
        assert_at_most_twice_the_error(*results, name)


def test_small_gates_have_their_digits():
    """log(1 + e^x) where e^x is small, and a decay that leaves nothing."""
    w = rule.weights(torch.float32)
    xs = rule.inputs(6, torch.float32)
    xs[2] = torch.tensor([-30.0, -17.0, -16.0, -9.0, 20.0, 90.0])[:, None].expand(6, 2).contiguous()
    exact = [[x.double() for x in tensors] for tensors in (xs, w)]
    y, judge = rule.whole(xs, w, [6]), rule.recurrent(*exact)
    assert torch.isfinite(y).all()
    assert_at_most_twice_the_error(y, rule.recurrent(xs, w), judge, "y")
