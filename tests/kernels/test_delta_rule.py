"""A gated delta net: its bits over cuts, batches and caches, its gradients, and its accuracy."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels.causal_conv import causal_conv
from zerokl.kernels.delta_rule import delta_rule
from zerokl.kernels.gated_norm import gated_norm
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import ONE_SEQUENCE, Pass
from zerokl.kernels.recurrent_state import CHUNK, RecurrentState, Segments, StateShape
from zerokl.kernels.sigmoid_mul import sigmoid_mul

from tests.helpers import (
    DTYPES,
    assert_at_most_twice_the_error,
    property_settings,
    randn,
    threads,
    total_unequal,
)

SHAPE = StateShape(key_heads=2, heads=4, K=16, V=32)
WIDTHS = SHAPE.channels, SHAPE.heads * SHAPE.V, SHAPE.heads, SHAPE.heads
LENGTHS = (130, 1, 64, 97, 17)
Tensors = Sequence[torch.Tensor]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])


def inputs(tokens: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """The inputs of the convolution and of the norm's gate, a and b."""
    return [randn(seed + i, tokens, n, dtype=dtype) for i, n in enumerate(WIDTHS)]


def weights(dtype: torch.dtype, seed: int = 50) -> list[torch.Tensor]:
    """Of the convolution, A_log, dt_bias, and of the norm."""
    A = torch.rand(SHAPE.heads, generator=torch.Generator().manual_seed(seed)) * 16 + 0.01
    conv, bias = randn(seed, SHAPE.channels, 1, 4, scale=0.5), randn(seed + 1, SHAPE.heads)
    return [x.to(dtype) for x in (conv, A.log(), bias, 1 + 0.1 * randn(seed + 2, SHAPE.V))]


def net(
    xs: Tensors,
    w: Tensors,
    segments: Segments,
    state: RecurrentState | None = None,
    in_pass: Pass = ONE_SEQUENCE,
) -> torch.Tensor:
    """All between the projections, [T, H V]."""
    x, z, a, b = xs
    qkv = causal_conv(x, w[0], segments, state, in_pass)
    o = delta_rule(qkv, a, b, w[1], w[2], segments, SHAPE, state, in_pass)
    return gated_norm(o, z.view(o.shape), w[3], 1e-6, in_pass).flatten(1)


def pieces(xs: Tensors, lengths: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(x.split(list(lengths)) for x in xs), strict=True))


def whole(xs: Tensors, w: Tensors, lengths: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return net(xs, w, Segments(lengths))


@torch.no_grad()
def in_cuts(
    sequences: Sequence[Tensors],
    w: Tensors,
    cuts: Sequence[Sequence[int]],
    between: Callable[[RecurrentState], None] = lambda state: None,
    forgets: bool = False,
) -> list[torch.Tensor]:
    """Each call reads the next piece of every sequence that has one, in another order each time.

    between: is given the slots before each call. forgets: whether a call takes its first token for the
    sequence's first.
    """
    n = len(sequences)
    state = RecurrentState(SHAPE, n, sequences[0][0].dtype)
    cuts, places, rows = [list(c) for c in cuts], [0] * n, [[] for _ in range(n)]
    turn = 0
    while members := [i for i in range(n) if cuts[i]]:
        members, turn = members[turn % len(members) :] + members[: turn % len(members)], turn + 1
        sizes, before = [cuts[i].pop(0) for i in members], [places[i] for i in members]
        packed = [
            torch.cat(
                [sequences[i][j][p : p + size] for i, p, size in zip(members, before, sizes, strict=True)]
            )
            for j in range(len(WIDTHS))
        ]
        between(state)
        y = net(packed, w, Segments(sizes, [0] * len(members) if forgets else before, members), state)
        for i, part, size in zip(members, y.split(sizes), sizes, strict=True):
            rows[i].append(part)
            places[i] += size
    return [torch.cat(r) for r in rows]


@dtypes
@property_settings(10)
@given(data=st.data(), lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4))
def test_cuts_and_batches_change_no_bit(dtype, data, lengths):
    xs, w = inputs(sum(lengths), dtype), weights(dtype)
    sequences = pieces(xs, lengths)
    alone = [whole(s, w, [n]) for s, n in zip(sequences, lengths, strict=True)]
    assert total_unequal(whole(xs, w, lengths).split(lengths), alone) == 0
    cuts = []
    for n in lengths:
        ends = sorted(data.draw(st.sets(st.integers(1, n), max_size=6)) | {n})
        cuts.append([b - a for a, b in zip([0, *ends], ends, strict=False)])
    assert total_unequal(in_cuts(sequences, w, cuts), alone) == 0


@dtypes
def test_decoded_tokens_have_the_bits_of_whole_sequences(dtype):
    xs, w = inputs(sum(LENGTHS), dtype), weights(dtype)
    decoded = in_cuts(pieces(xs, LENGTHS), w, [[1] * n for n in LENGTHS])
    expected = whole(xs, w, LENGTHS)
    assert torch.isfinite(expected).all()
    assert expected.abs().amax(1).min() > 0
    assert total_unequal(decoded, expected.split(LENGTHS)) == 0
    with threads(3):
        assert total_unequal([whole(xs, w, LENGTHS)], [expected]) == 0


def test_control_a_state_in_16_bits_is_seen():
    def rounded(state: RecurrentState) -> None:
        start = state.tensors["start"]
        start.copy_(start.bfloat16())

    xs, w = inputs(100, torch.float32), weights(torch.float32)
    expected = whole(xs, w, [100])
    assert total_unequal(in_cuts([xs], w, [[80, 20]]), [expected]) == 0
    assert total_unequal(in_cuts([xs], w, [[80, 20]], rounded), [expected]) > 0


def test_control_chunks_that_count_from_the_calls_first_token_are_seen():
    xs, w = inputs(100, torch.float32), weights(torch.float32)
    assert total_unequal(in_cuts([xs], w, [[CHUNK, 36]], forgets=True), [whole(xs, w, [100])]) == 0
    assert total_unequal(in_cuts([xs], w, [[30, 70]], forgets=True), [whole(xs, w, [100])]) > 0


@torch.no_grad()
def test_samples_of_a_prompt_copy_its_slot_and_a_new_sequence_begins_with_zeros():
    dtype, w = torch.bfloat16, weights(torch.bfloat16)
    prompt, tails = inputs(77, dtype), [inputs(60, dtype, seed) for seed in (10, 20)]
    state = RecurrentState(SHAPE, 3, dtype)
    net(prompt, w, Segments([77], [0], [0]), state)
    state.copy([0, 0], [2, 1])
    joined = [[torch.cat(x) for x in zip(prompt, tail, strict=True)] for tail in tails]
    expected = [whole(xs, w, [137])[77:] for xs in joined]
    rows = []
    for t in range(60):
        both = [torch.cat([x[t : t + 1], y[t : t + 1]]) for x, y in zip(*tails, strict=True)]
        rows.append(net(both, w, Segments([1, 1], [77 + t] * 2, [2, 1]), state))
    assert total_unequal(torch.stack(rows).unbind(1), expected) == 0
    state.zero(0)
    again = net(tails[0], w, Segments([60], [0], [0]), state)
    assert total_unequal([again], [whole(tails[0], w, [60])]) == 0
    dirty = net(tails[0], w, Segments([60], [0], [2]), state)
    assert total_unequal([dirty], [again]) > 0, "control: a slot that was not zeroed"


def gradients(
    xs: Tensors, w: Tensors, lengths: Sequence[int], dy: torch.Tensor, buffers: Sequence[GradBuffer]
) -> tuple[torch.Tensor, ...]:
    """Those of xs, [T, ...]. Those of the weights are added to the buffers."""
    xs, w = ([x.detach().requires_grad_() for x in tensors] for tensors in (xs, w))
    in_pass = Pass(token_blocks(lengths), dict(zip(w, buffers, strict=True)))
    y = net(xs, w, Segments(lengths), in_pass=in_pass)
    return torch.autograd.grad(y, xs, dy)


@dtypes
def test_packing_and_micro_batches_change_no_bit_of_a_gradient(dtype):
    xs, w = inputs(sum(LENGTHS), dtype), weights(dtype)
    dy = randn(9, sum(LENGTHS), WIDTHS[1], dtype=dtype)
    together, apart, as_one = ([GradBuffer.like(x) for x in w] for _ in range(3))
    packed = gradients(xs, w, LENGTHS, dy, together)
    alone = [
        gradients(x, w, [n], d, apart)
        for x, n, d in zip(pieces(xs, LENGTHS), LENGTHS, dy.split(LENGTHS), strict=True)
    ]
    assert total_unequal(packed, [torch.cat(x) for x in zip(*alone, strict=True)]) == 0
    assert total_unequal([b.sums for b in together], [b.sums for b in apart]) == 0
    gradients(xs, w, [sum(LENGTHS)], dy, as_one)
    assert total_unequal([b.sums for b in together], [b.sums for b in as_one]) > 0, "control: one sequence"


def recurrent(xs: Tensors, w: Tensors) -> torch.Tensor:
    """Plain torch's form of one sequence, token by token. As in transformers, the rule is in fp32."""
    (x, z, a, b), (conv, A_log, dt_bias, norm), (Hk, H, K, V) = xs, w, SHAPE
    mixed = F.silu(F.conv1d(F.pad(x.t(), (3, 0)), conv, groups=len(conv))).t()
    wide = torch.promote_types(x.dtype, torch.float32)
    q, k, v = mixed.to(wide).split(SHAPE.widths, -1)
    q, k = (
        (y / (y.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(H // Hk, 1)
        for y in (q.reshape(-1, Hk, K), k.reshape(-1, Hk, K))
    )
    g, beta = -A_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias), b.sigmoid().to(wide)
    S, rows, v = v.new_zeros(H, K, V), [], v.reshape(-1, H, V)
    for t in range(len(x)):
        S = S * g[t].exp()[:, None, None]
        u = (v[t] - (S * k[t].unsqueeze(-1)).sum(1)) * beta[t].unsqueeze(-1)
        S = S + k[t].unsqueeze(-1) * u.unsqueeze(1)
        rows.append((S * q[t].unsqueeze(-1)).sum(1) * K**-0.5)
    o = torch.stack(rows).to(x.dtype).to(wide)
    o = o / (o.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm * F.silu(z.to(wide).view(o.shape))
    return o.flatten(1).to(x.dtype)


def judged(dtype: torch.dtype, form: Callable, seeds: Sequence[int], tokens: int) -> list[torch.Tensor]:
    """The output and the gradients of xs and w, those of all seeds in one tensor each."""
    results = []
    for seed in seeds:
        given = [x.to(dtype) for x in (*inputs(tokens, torch.bfloat16, seed), *weights(torch.bfloat16, seed))]
        leaves = [x.requires_grad_() for x in given]
        y = form(leaves[:4], leaves[4:])
        dy = randn(seed, *y.shape, dtype=torch.bfloat16).to(dtype)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    return [torch.stack(x) for x in zip(*results, strict=True)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=["float32", "bfloat16", "float16", "float64"])
def test_errors_are_at_most_twice_those_of_plain_torch(dtype):
    """In fp64 both are one function: there only the rounding of fp64 is left."""
    seeds, tokens = range(100, 500, 100), 90
    exact = judged(torch.float64, recurrent, seeds, tokens)
    ours = judged(dtype, lambda xs, w: net(xs, w, Segments([tokens])), seeds, tokens)
    names = "y", "dx", "dz", "da", "db", "dconv", "dA_log", "ddt_bias", "dnorm"
    if dtype == torch.float64:
        for name, a, b in zip(names, ours, exact, strict=True):
            assert (a - b).norm() <= 2.0**-40 * b.norm(), name
        return
    for name, *results in zip(names, ours, judged(dtype, recurrent, seeds, tokens), exact, strict=True):
        assert_at_most_twice_the_error(*results, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
def test_the_gate_of_attention_is_as_accurate_as_plain_torchs(dtype):
    def results(form: Callable, kind: torch.dtype) -> list[torch.Tensor]:
        x, z, dy = (randn(i, 60, 48, dtype=torch.bfloat16).to(kind) for i in range(3))
        y = form(x.requires_grad_(), z.requires_grad_())
        return [y.detach(), *torch.autograd.grad(y, (x, z), dy)]

    def plain(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x * z.sigmoid()

    for ours, torchs, exact in zip(
        results(sigmoid_mul, dtype), results(plain, dtype), results(plain, torch.float64), strict=True
    ):
        assert_at_most_twice_the_error(ours, torchs, exact, "gate")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: causal_conv(x[0][:, 1:], w[0], Segments([5])), r"causal_conv: x \(5, "),
        (lambda x, w: causal_conv(x[0], w[0], Segments([4])), "T = 4 tokens"),
        (lambda x, w: net([x[0], x[1], x[2][:, 1:], x[3]], w, Segments([5])), "delta_rule: "),
        (lambda x, w: gated_norm(x[1], x[1], w[3], 1e-6), "gated_norm: o "),
        (lambda x, w: sigmoid_mul(x[2], x[1]), "sigmoid_mul: x "),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(inputs(5, torch.float32), weights(torch.float32))
