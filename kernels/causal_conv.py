"""A causal convolution of each channel along a sequence, and SiLU after it.

    p_t = sum_j w_j x_(t-3+j)   (j = 0..3, the oldest first),   y = silu(p) = p s,   s = 1 / (1 + exp(-p))
    dp = dy s (1 + p (1 - s)),   dx_t = sum_j w_j dp_(t+3-j),   dw_j = sum over tokens of dp_t x_(t-3+j)

Source: Gated DeltaNet (arXiv:2412.06464). Before a sequence's first token x is 0. A call that continues a
sequence finds the last inputs in its slot (recurrent_state.py), as they are, so nothing depends on the cut.

Shapes: x, y [T, C]; w [C, 1, 4], as in torch's Conv1d.
Roundings: y once, after SiLU (transformers rounds before it, too). dx once.
Order: four separate products, added from the oldest on. dw is summed block after block (columns.py).
"""

import torch

from .backend import check_on_cpu, on_triton
from .columns import add_columns_cpu
from .grad import accumulate_dtype, check_dtype
from .passes import ONE_SEQUENCE, Pass
from .recurrent_state import TAPS, AnySegments, RecurrentState, Segments


def _rows(x: torch.Tensor, segments: Segments, history: torch.Tensor | None) -> torch.Tensor:
    """The history of each sequence, [S, 3, C] or zeros, before the rows of x [T, C]."""
    before = len(segments.lengths) * (TAPS - 1)
    return torch.cat([x.new_zeros(before, x.shape[1]) if history is None else history.flatten(0, 1), x])


def _weighted_sum(rows: torch.Tensor, index: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """sum_j w_j rows[index_j] in the accumulator's dtype. rows [R, C], index [4, T], w [C, 1, 4]."""
    taps = w[:, 0].to(accumulate_dtype(w.dtype)).t().contiguous()
    total = rows[index[0]].to(taps.dtype) * taps[0]
    for j in range(1, TAPS):
        total += rows[index[j]].to(taps.dtype) * taps[j]
    return total


def causal_conv_ref(
    x: torch.Tensor, w: torch.Tensor, segments: Segments, history: torch.Tensor | None = None
) -> torch.Tensor:
    """Forward only."""
    p = _weighted_sum(_rows(x, segments, history), segments.taps, w)
    return (p / torch.exp(-p).add_(1.0)).to(x.dtype)


def _forward(
    x: torch.Tensor, w: torch.Tensor, segments: AnySegments, state: RecurrentState | None = None
) -> torch.Tensor:
    """y, computed where x lies. state: the slots of the sequences, which then hold their last inputs."""
    if on_triton(x):
        from .causal_conv_triton import causal_conv_fwd

        return causal_conv_fwd(x, w, segments.on(x.device), state)
    if state is None:
        return causal_conv_ref(x, w, segments)
    kept = state.tensors["conv"]
    history = kept[segments.slots]
    y = causal_conv_ref(x, w, segments, history)
    kept[segments.slots] = _rows(x, segments, history)[segments.last_rows]
    return y


class _CausalConv(torch.autograd.Function):
    """The convolution, and its last inputs [S, 3, C], after `history`; None after nothing."""

    @staticmethod
    def forward(ctx, x, w, history, segments, in_pass):
        ctx.save_for_backward(x, history)
        ctx.w, ctx.segments, ctx.in_pass = w, segments, in_pass
        if history is None:
            return _forward(x, w, segments), None
        y = causal_conv_ref(x, w, segments, history)
        return y, _rows(x, segments, history)[segments.last_rows]

    @staticmethod
    def backward(ctx, dy, dlast):
        (x, history), w, segments, in_pass = ctx.saved_tensors, ctx.w, ctx.segments, ctx.in_pass.over(dy)
        if on_triton(dy):
            from .causal_conv_triton import NORM_ROWS, causal_conv_bwd

            dx, partial = causal_conv_bwd(dy, x, w, segments.on(x.device), in_pass.blocks)
            if not ctx.needs_input_grad[1]:
                return dx, None, None, None, None
            buffer = in_pass.buffer(w)
            buffer.add_partials(partial, in_pass.blocks, NORM_ROWS)
            return dx, in_pass.returned_grad(w, buffer), None, None, None
        rows = _rows(x, segments, history)
        p = _weighted_sum(rows, segments.taps, w)
        s = torch.exp(-p).add_(1.0).reciprocal_()
        dp = dy.to(p.dtype) * (s * (1.0 + p * (1.0 - s)))
        readers = segments.readers
        if history is not None:
            readers = torch.cat([segments.history_readers, readers], 1)
        dx = _weighted_sum(torch.cat([dp, dp.new_zeros(1, dp.shape[1])]), readers, w)
        dhistory = None
        if history is not None:
            dx[segments.last_rows] += dlast.to(dx.dtype)  # no row occurs twice
            dhistory, dx = dx.split([len(dx) - len(x), len(x)])
            dhistory = dhistory.view(history.shape).to(x.dtype)
        dx = dx.to(x.dtype)
        if not ctx.needs_input_grad[1]:
            return dx, None, dhistory, None, None
        buffer = in_pass.buffer(w)
        sums = buffer.zeroed(in_pass.blocks.shards)
        for j in range(TAPS):
            add_columns_cpu(sums[:, :, 0, j], dp * rows[segments.taps[j]].to(dp.dtype), in_pass.blocks)
        return dx, in_pass.returned_grad(w, buffer), dhistory, None, None


def causal_conv_after(
    x: torch.Tensor, w: torch.Tensor, history: torch.Tensor, segments: Segments, in_pass: Pass = ONE_SEQUENCE
) -> tuple[torch.Tensor, torch.Tensor]:
    """causal_conv of sequences that go on after `history` [S, 3, C], and the last inputs that they leave.

    Raises ValueError on a GPU.
    """
    check_on_cpu("causal_conv_after", x)
    return _CausalConv.apply(x, w, history, segments, in_pass)


def causal_conv(
    x: torch.Tensor,
    w: torch.Tensor,
    segments: AnySegments,
    state: RecurrentState | None = None,
    in_pass: Pass = ONE_SEQUENCE,
) -> torch.Tensor:
    """silu(conv(x)) of each channel. x [T, C], w [C, 1, 4] -> [T, C].

    state: where the sequences of `segments` have their slots; it then holds their last inputs, and nothing
    has a gradient. Raises ValueError on a bad shape or dtype.
    """
    check_dtype("causal_conv", x=x, w=w)
    if x.dim() != 2 or w.shape != (x.shape[1], 1, TAPS) or len(x) != segments.count:
        raise ValueError(
            f"causal_conv: x {tuple(x.shape)} must be [T, C] for T = {segments.count} tokens, and w "
            f"{tuple(w.shape)} [C, 1, {TAPS}]"
        )
    if state is None and torch.is_grad_enabled():
        return _CausalConv.apply(x, w, None, segments, in_pass)[0]
    return _forward(x, w, segments, state)
