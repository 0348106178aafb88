"""The kernels that have weights, and their weight gradients after any split into micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from zerokl.kernels.embedding import embedding
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.linear import linear
from zerokl.kernels.logprob import linear_logprob
from zerokl.kernels.low_rank import AdapterBuffers, LowRankBuffers
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import Pass
from zerokl.kernels.qk_norm import qk_norm
from zerokl.kernels.rms_norm import add_rms_norm, rms_norm
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.value_head import value_head

from tests.helpers import randint, randn, sums_of, zero_buffers
from tests.law import experts

VOCAB = 71


class Op(NamedTuple):
    """An operation with weights.

    weights(width, dtype) makes the weights.
    run(x [T, width], ids [T], weights, in_pass) gives the output from which the gradient comes.
    out_shape(width) is the shape of one row of the output.
    out_dtype is the dtype of the output; None is the dtype of x.
    """

    weights: Callable[[int, torch.dtype], list[torch.Tensor]]
    run: Callable[[torch.Tensor, torch.Tensor, list[torch.Tensor], Pass], torch.Tensor]
    out_shape: Callable[[int], tuple[int, ...]] = lambda width: (width,)
    out_dtype: torch.dtype | None = None


def _vector(D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [randn(100, D, dtype=dtype)]


def _vocabulary(D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [randn(101, VOCAB, D, dtype=dtype, scale=D**-0.5)]


def _adapters(D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """b and a of two adapters, of the first D and the last 5 rows of a weight [D + 9, D]."""
    return [randn(105 + i, *shape) for i, shape in enumerate([(D, 3), (3, D), (5, 3), (3, D)])]


def _adapted(x: torch.Tensor, weights: list[torch.Tensor], in_pass: Pass) -> torch.Tensor:
    """linear with a weight whose adapters are trained in its place."""
    D = x.shape[1]
    w = randn(109, D + 9, D, dtype=x.dtype).requires_grad_()
    adapters = zip((slice(0, D), slice(D + 4, D + 9)), weights[::2], weights[1::2], strict=True)
    buffers = LowRankBuffers(
        tuple(
            AdapterBuffers(rows, b.detach(), a.detach(), 5 / 3, in_pass.buffers[b], in_pass.buffers[a])
            for rows, b, a in adapters
        )
    )
    return linear(x, w, None, replace(in_pass, buffers={w: buffers}))


OPS = {
    "linear": Op(
        lambda D, dtype: [randn(102, D + 5, D, dtype=dtype), randn(103, D + 5, dtype=dtype)],
        lambda x, ids, w, in_pass: linear(x, w[0], w[1], in_pass),
        lambda width: (width + 5,),
    ),
    "adapters": Op(_adapters, lambda x, ids, w, in_pass: _adapted(x, w, in_pass), lambda width: (width + 9,)),
    "rms_norm": Op(_vector, lambda x, ids, w, in_pass: rms_norm(x, w[0], 1e-6, in_pass)),
    "add_rms_norm": Op(_vector, lambda x, ids, w, in_pass: add_rms_norm(x, -2 * x, w[0], 1e-6, in_pass)[0]),
    "qk_norm": Op(
        lambda D, dtype: [randn(100 + i, D, dtype=dtype) for i in (0, 1)],
        lambda x, ids, w, in_pass: qk_norm(torch.stack([x, 2 * x, -x], 1), *w, 2, 1e-6, in_pass),
        lambda width: (3, width),
    ),
    "value_head": Op(
        _vector,
        lambda x, ids, w, in_pass: value_head(x, w[0], in_pass)[0],
        lambda width: (),
        torch.float32,
    ),
    "embedding": Op(_vocabulary, lambda x, ids, w, in_pass: embedding(ids, w[0], in_pass)),
    "linear_logprob": Op(
        _vocabulary,
        lambda x, ids, w, in_pass: linear_logprob(x, w[0], ids, SamplingParams(0.8, 30, 0.9), in_pass)[0],
        lambda width: (),
        torch.float32,
    ),
    "experts": Op(
        lambda D, dtype: experts.weights(D, dtype, 104),
        lambda x, ids, w, in_pass: experts.mixture(x, *w, in_pass)[0],
    ),
}


def summed_grads(
    op: Op, dtype: torch.dtype, width: int, lengths: Sequence[int], micro_batches: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The sums in the fp32 gradient buffers after a backward pass of each micro-batch.

    A micro-batch is given as the indices of its sequences.
    """
    T, out_shape, out_dtype = sum(lengths), op.out_shape(width), op.out_dtype or dtype
    data = randn(0, T, width, dtype=dtype), randint(1, VOCAB, T), randn(2, T, *out_shape, dtype=out_dtype)
    x, ids, dy = (t.split(list(lengths)) for t in data)
    weights = [w.requires_grad_() for w in op.weights(width, dtype)]
    buffers = zero_buffers(weights)
    for batch in micro_batches:
        if batch:
            in_pass = Pass(token_blocks([lengths[s] for s in batch]), buffers)
            x_batch, ids_batch, dy_batch = (torch.cat([t[s] for s in batch]) for t in (x, ids, dy))
            op.run(x_batch, ids_batch, weights, in_pass).backward(dy_batch)
    # No gradient in the weight's own dtype beside the buffer.
    assert all(w.grad is None for w in weights)
    return sums_of(buffers)


def shard_grads(
    op: Op, dtype: torch.dtype, width: int, shards: Sequence[Sequence[int]], together: bool
) -> list[torch.Tensor]:
    """The sums in the fp32 gradient buffers, [shards, ...], of one pass over several virtual shards.

    shards: the lengths of each shard's sequences. Without `together`, each shard has a pass of its own.
    """
    T, out_shape, out_dtype = sum(map(sum, shards)), op.out_shape(width), op.out_dtype or dtype
    x, ids = randn(0, T, width, dtype=dtype), randint(1, VOCAB, T)
    dy = randn(2, T, *out_shape, dtype=out_dtype)
    weights = [w.requires_grad_() for w in op.weights(width, dtype)]
    buffers = {w: GradBuffer(torch.zeros(len(shards), *w.shape)) for w in weights}
    if together:
        lengths = [length for shard in shards for length in shard]
        shard_of = [i for i, shard in enumerate(shards) for _ in shard]
        passes = [(slice(0, T), token_blocks(lengths, shard_of))]
    else:
        ends = [0, *accumulate(map(sum, shards))]
        passes = [
            (slice(*rows), token_blocks(shard, [i] * len(shard)))
            for i, (rows, shard) in enumerate(zip(pairwise(ends), shards, strict=True))
        ]
    for rows, blocks in passes:
        op.run(x[rows], ids[rows], weights, Pass(blocks, buffers)).backward(dy[rows])
    return [buffer.sums for buffer in buffers.values()]
