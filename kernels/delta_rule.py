"""The gated delta rule of linear attention, in tiles: one arithmetic for training, prefill and decode.

    q, k = unit(q) / sqrt(K), unit(k),   unit(x) = x / sqrt(sum x^2 + 1e-6)
    g = -exp(A_log) softplus(a + dt_bias),   beta = sigmoid(b)
    S_t = e^g S_(t-1) + k_t u_t^T,   u_t = beta (v_t - e^g S_(t-1)^T k_t),   o_t = S_t^T q_t

Source: Gated DeltaNet (arXiv:2412.06464), and its form in chunks (arXiv:2406.06484). With G the sum of g from
a chunk's start, S the state there, D_tj = e^(G_t - G_j), A = beta (k k^T) D below the diagonal and
M = (q k^T) D on and below it:

    r = beta (v - e^G k S);   u_I = (1 + A_II)^-1 (r_I - sum over tiles J < I of A_IJ u_J)
    o = e^G q S + M u;   the next chunk's S = e^G_end S + (e^(G_end - G) k)^T u

    du = M^T do + (e^(G_end - G) k) dS;   dr = (1 + A)^-T du;   dA = -dr u^T;   dM = do u^T
    dv = beta dr;   dbeta = dr . (v - e^G k S) + rows of dA A / beta
    dq = e^G do S^T + (dM D) k;   dk = -beta e^G dr S^T + (dM D)^T q + (beta dA D) k + (beta dA D)^T k
                                       + e^(G_end - G) u dS^T
    c_j = e^(G_end - G_j) k_j . u_j dS^T
    dG = rows - columns of (dM M + dA A) + e^G q S . do - beta e^G k S . dr - c
    dG_end += sum c + e^G_end <S, dS>;   dg = dG summed from the chunk's end
    dS <- e^G_end dS + (e^G q)^T do - (beta e^G k)^T dr

A row is computed from the state at its chunk's start and the rows of the chunk up to it, always in whole
tiles. So a call that continues a sequence computes the open tiles again, and has the bits of the whole
sequence. The reference is delta_rule_ref.py; slots are in recurrent_state.py. In training the samples
of a prompt may go on from what it left (delta_rule_after). They send back the gradients of that: of the state
at its open chunk's start, and of the rows there.

Shapes: qkv [T, 2 Hk K + H V]; a, b [T, H]; A_log, dt_bias [H]; o [T, H, V]. Value head h reads the key head
h // (H / Hk).
Roundings: o once; the state never. The gradients of qkv, a and b once each.
Order: dA_log and ddt_bias are summed block after block (columns.py), the gradients of a key head over its
value heads in a tree, on a GPU in ascending order.
"""

from collections.abc import Iterator, Sequence

import torch

from .backend import check_on_cpu, on_triton
from .columns import add_columns
from .delta_rule_ref import DeltaRows, walk, walk_after_bwd, walk_bwd
from .grad import accumulate_dtype, check_dtype
from .order import sum_last, tree_sum
from .passes import ONE_SEQUENCE, Pass
from .recurrent_state import CHUNK, TILE, AnySegments, Left, RecurrentState, Segments, StateShape

_EPS = 1e-6  # of unit vectors


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-x).add_(1.0).reciprocal_()


def _softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x), also where e^x is small: with y = fl(1 + e), log(1 + e) = log(y) e / (y - 1)."""
    e = torch.exp(-x.abs())
    y = e + 1.0
    lost = y == 1.0
    return x.clamp(min=0.0) + torch.where(lost, e, torch.log(y) * (e / (y - 1.0).masked_fill_(lost, 1.0)))


def _gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """g, beta and the argument of softplus, [T, H] each in the accumulator's dtype."""
    acc = accumulate_dtype(a.dtype)
    x = a.to(acc) + dt_bias.to(acc)
    return _softplus(x).mul_(torch.exp(A_log.to(acc))).neg_(), _sigmoid(b.to(acc)), x


def _unit(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x / |x| along the last axis, and 1 / |x|. torch's rsqrt is not correctly rounded."""
    r = sum_last(x * x).add_(_EPS).sqrt_().reciprocal_()
    return x * r, r


def _unit_bwd(d: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return (d - y * sum_last(d * y)) * r


def _heads_first(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[S, R, H or Hk, ...] -> [S H, R, ...]. A key head is repeated for its value heads."""
    x = x.repeat_interleave(heads // x.shape[2], 2) if x.shape[2] != heads else x
    return x.transpose(1, 2).reshape(x.shape[0] * heads, x.shape[1], *x.shape[3:])


def _tokens_first(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[S H, R, ...] -> [S, R, H, ...]."""
    return x.view(-1, heads, *x.shape[1:]).transpose(1, 2)


def _split(qkv: torch.Tensor, shape: StateShape) -> list[torch.Tensor]:
    """q, k [..., Hk, K] and v [..., H, V] in the accumulator's dtype."""
    parts = qkv.to(accumulate_dtype(qkv.dtype)).split(shape.widths, -1)
    return [x.unflatten(-1, size) for x, size in zip(parts, _head_sizes(shape), strict=True)]


def _head_sizes(s: StateShape) -> tuple[tuple[int, int], ...]:
    return (s.key_heads, s.K), (s.key_heads, s.K), (s.heads, s.V)


def _delta_rows(grid: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, shape: StateShape) -> DeltaRows:
    """grid [S, R, channels], g and beta [S, R, H], with zeros where there is no token."""
    q, k, v = _split(grid, shape)
    q, k = _unit(q)[0] * shape.K**-0.5, _unit(k)[0]
    return DeltaRows(*(_heads_first(x, shape.heads) for x in (q, k, v, g, beta)))


def _whole(
    qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, segments: Segments, shape: StateShape
) -> torch.Tensor:
    """o of whole sequences, [T, H, V]."""
    x = _delta_rows(*map(segments.on_grid, (qkv, g, beta)), shape)
    N, V = len(x.v), shape.V
    first, end = segments.tiles
    o = walk(x, x.v.new_zeros(N, shape.K, V), x.v.new_zeros(N, CHUNK, V), first, end).o
    return segments.from_grid(_tokens_first(o, shape.heads)).to(qkv.dtype)


def _grids(
    rows: Sequence[torch.Tensor], open_rows: Sequence[torch.Tensor], segments: Segments
) -> Iterator[torch.Tensor]:
    """The grids of qkv, g and beta. open_rows: those that were read before, without queries, which are 0."""
    (qkv, *gates), (kv, *open_gates) = rows, open_rows
    queries = kv.new_zeros(*kv.shape[:2], qkv.shape[1] - kv.shape[2])
    yield segments.on_grid(qkv, torch.cat([queries, kv], -1))
    yield from map(segments.on_grid, gates, open_gates)


def _continued(
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    segments: Segments,
    shape: StateShape,
    state: RecurrentState,
) -> torch.Tensor:
    """o of the new tokens, [T, H, V]; the slots then hold what comes after them."""
    H, (first, end) = shape.heads, segments.tiles
    old = {name: x[segments.slots] for name, x in state.tensors.items() if name != "conv"}
    queries = shape.widths[0]
    grid, *gates = _grids((qkv, g, beta), [old[name] for name in ("kv", "g", "beta")], segments)
    x = _delta_rows(grid, *gates, shape)
    before = _heads_first(old["u"], H)
    before[:, first * TILE :] = 0
    done = walk(x, old["start"].flatten(0, 1), before, first, end)
    u = torch.cat([before[:, : first * TILE], done.u], 1)
    u = torch.cat([u, u.new_zeros(len(u), grid.shape[1] - u.shape[1], shape.V)], 1)
    rows = {"kv": grid[..., queries:], "g": gates[0], "beta": gates[1], "u": _tokens_first(u, H)}
    chunk, _ = segments.ends
    sequences = torch.arange(len(chunk))
    starts = done.starts.view(len(chunk), H, -1, shape.K, shape.V)
    state.tensors["start"][segments.slots] = starts[sequences, :, chunk]
    for name, x_rows in rows.items():
        state.tensors[name][segments.slots] = segments.open_rows(x_rows)
    o = _tokens_first(done.o, H)
    return segments.from_grid(o, first * TILE).to(qkv.dtype)


def _channels_bwd(
    qkv: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, s: StateShape
) -> torch.Tensor:
    """The gradient of qkv [T, channels] in the accumulator's dtype. dq and dk [T, H, K], dv [T, H, V]."""
    q, k, _ = _split(qkv, s)
    (qy, qr), (ky, kr) = _unit(q), _unit(k)
    to_keys = [tree_sum(y.unflatten(1, (s.key_heads, -1)), 2) for y in (dq, dk)]
    dq, dk = _unit_bwd(to_keys[0] * s.K**-0.5, qy, qr), _unit_bwd(to_keys[1], ky, kr)
    return torch.cat([y.flatten(1) for y in (dq, dk, dv)], 1)


def _forward(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    segments: AnySegments,
    shape: StateShape,
    state: RecurrentState | None = None,
) -> torch.Tensor:
    """o [T, H, V] of whole sequences, or of sequences that have their slots in `state`."""
    if on_triton(qkv):
        from .delta_rule_triton import delta_continued, delta_whole

        inputs = qkv, a, b, A_log, dt_bias
        if state is None:
            return delta_whole(inputs, segments, shape)
        return delta_continued(inputs, segments, shape, state)
    g, beta, _ = _gates(a, b, A_log, dt_bias)
    if state is None:
        return _whole(qkv, g, beta, segments, shape)
    return _continued(qkv, g, beta, segments, shape, state)


def _gates_bwd(ctx, a, b, grads, gates, in_pass):
    """What backward returns for a, b, A_log and dt_bias. grads: dg and dbeta, [T, H]; gates: of _gates."""
    (dg, dbeta), (g, beta, x), (A_log, _) = grads, gates, ctx.weights
    dx = dg * -torch.exp(A_log.to(accumulate_dtype(a.dtype))) * _sigmoid(x)
    db = dbeta * beta * (1.0 - beta)
    return dx.to(a.dtype), db.to(b.dtype), *_weight_grads(ctx, (dg * g, dx), in_pass)


def _weight_grads(ctx, contributions, in_pass):
    """What backward returns for A_log and dt_bias. contributions: each token's, [T, H] of each."""
    returned = []
    for w, y, wanted in zip(ctx.weights, contributions, ctx.needs_input_grad[3:5], strict=True):
        buffer = in_pass.buffer(w) if wanted else None
        if wanted:
            add_columns(buffer, y, in_pass.blocks)
        returned.append(in_pass.returned_grad(w, buffer) if wanted else None)
    return returned


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, a, b, A_log, dt_bias, segments, shape, in_pass):
        ctx.save_for_backward(qkv, a, b)
        ctx.weights, ctx.segments, ctx.shape, ctx.in_pass = (A_log, dt_bias), segments, shape, in_pass
        return _forward(qkv, a, b, A_log, dt_bias, segments, shape)

    @staticmethod
    def backward(ctx, do):
        (qkv, a, b), segments, s = ctx.saved_tensors, ctx.segments, ctx.shape
        in_pass = ctx.in_pass.over(do)
        if on_triton(do):
            from .delta_rule_triton import delta_whole_bwd

            *grads, dA_log, dx = delta_whole_bwd(do, (qkv, a, b, *ctx.weights), segments, s)
            return *grads, *_weight_grads(ctx, (dA_log, dx), in_pass), None, None, None
        acc = accumulate_dtype(qkv.dtype)
        g, beta, x = _gates(a, b, *ctx.weights)
        grid = segments.on_grid(qkv)
        rows = _delta_rows(grid, segments.on_grid(g), segments.on_grid(beta), s)
        grads = walk_bwd(rows, _heads_first(segments.on_grid(do.to(acc)), s.heads))
        dq, dk, dv, dg, dbeta = (
            segments.from_grid(_tokens_first(y, s.heads).contiguous()) for y in vars(grads).values()
        )
        dqkv = _channels_bwd(qkv, dq, dk, dv, s).to(qkv.dtype)
        return dqkv, *_gates_bwd(ctx, a, b, (dg, dbeta), (g, beta, x), in_pass), None, None, None


class _DeltaRuleAfter(torch.autograd.Function):
    """As _DeltaRule, of sequences that go on from a Left; o, and what they leave beside `conv`."""

    @staticmethod
    def forward(ctx, qkv, a, b, A_log, dt_bias, kv, g_open, beta_open, start, segments, shape, in_pass):
        ctx.save_for_backward(qkv, a, b, kv, g_open, beta_open, start)
        ctx.weights, ctx.segments, ctx.shape, ctx.in_pass = (A_log, dt_bias), segments, shape, in_pass
        g, beta, _ = _gates(a, b, A_log, dt_bias)
        grids = [*_grids((qkv, g, beta), (kv, g_open, beta_open), segments)]
        x, H, (chunk, _) = _delta_rows(*grids, shape), shape.heads, segments.ends
        no_rows = x.v.new_zeros(len(x.v), CHUNK, shape.V)
        done = walk(x, start.flatten(0, 1), no_rows, 0, segments.tiles[1])
        o = segments.from_grid(_tokens_first(done.o, H)).to(qkv.dtype)
        starts = done.starts.view(len(chunk), H, -1, shape.K, shape.V)
        end = starts[torch.arange(len(chunk)), :, chunk]
        kv, g, beta = map(segments.open_rows, (grids[0][..., shape.widths[0] :], *grids[1:]))
        return o, kv, g, beta, end

    @staticmethod
    def backward(ctx, do, *dleft):
        (qkv, a, b, *before), segments, s = ctx.saved_tensors, ctx.segments, ctx.shape
        acc, in_pass = accumulate_dtype(qkv.dtype), ctx.in_pass.over(do)
        g, beta, x = _gates(a, b, *ctx.weights)
        grids = [*_grids((qkv, g, beta), before[:3], segments)]
        rows, dend = _delta_rows(*grids, s), dleft[3].flatten(0, 1)
        ends = segments.ends[0].repeat_interleave(s.heads)
        do = _heads_first(segments.on_grid(do.to(acc)), s.heads)
        grads, dstart = walk_after_bwd(rows, do, before[3].flatten(0, 1), ends, dend)
        dq, dk, dv, dg, dbeta = (_tokens_first(y, s.heads) for y in vars(grads).values())
        channels = (y.flatten(0, 1) for y in (grids[0], dq, dk, dv))
        dqkv, queries = _channels_bwd(*channels, s).view(grids[0].shape), s.widths[0]
        dgrids = dqkv[..., queries:], dg, dbeta
        dgrids = [y + segments.from_open_rows(left.to(acc)) for y, left in zip(dgrids, dleft, strict=False)]
        dkv, dg, dbeta = dgrids
        dqkv = segments.from_grid(torch.cat([dqkv[..., :queries], dkv], -1)).to(qkv.dtype)
        # The first rows of the grids are those of `before`, as many as there are.
        is_before = torch.arange(CHUNK) < segments.opened.unsqueeze(1)
        dbefore = [y[:, :CHUNK] * is_before.view(*is_before.shape, *[1] * (y.dim() - 2)) for y in dgrids]
        dg, dbeta = segments.from_grid(dg), segments.from_grid(dbeta)
        dbefore = dbefore[0].to(qkv.dtype), *dbefore[1:], dstart.view(before[3].shape)
        return dqkv, *_gates_bwd(ctx, a, b, (dg, dbeta), (g, beta, x), in_pass), *dbefore, None, None, None


def delta_rule(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    segments: AnySegments,
    shape: StateShape,
    state: RecurrentState | None = None,
    in_pass: Pass = ONE_SEQUENCE,
) -> torch.Tensor:
    """o [T, H, V] of qkv [T, 2 Hk K + H V], a and b [T, H], A_log and dt_bias [H].

    state: where the sequences of `segments` have their slots; it then holds what they leave, and nothing
    has a gradient. Raises ValueError on a bad shape or dtype.
    """
    check_dtype("delta_rule", qkv=qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    T, H = segments.count, shape.heads
    have_heads = a.shape == b.shape == (T, H) and A_log.shape == dt_bias.shape == (H,)
    if qkv.shape != (T, shape.channels) or not have_heads:
        raise ValueError(
            f"delta_rule: qkv {tuple(qkv.shape)} must be [{T}, {shape.channels}], a {tuple(a.shape)} and b "
            f"{tuple(b.shape)} [{T}, {H}], A_log {tuple(A_log.shape)} and dt_bias {tuple(dt_bias.shape)} "
            f"[{H}]"
        )
    if state is None and torch.is_grad_enabled():
        return _DeltaRule.apply(qkv, a, b, A_log, dt_bias, segments, shape, in_pass)
    return _forward(qkv, a, b, A_log, dt_bias, segments, shape, state)


def delta_rule_after(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    before: Left,
    segments: Segments,
    shape: StateShape,
    in_pass: Pass = ONE_SEQUENCE,
) -> tuple[torch.Tensor, ...]:
    """delta_rule of sequences that go on from `before`: o, and what they leave: kv, g, beta and start.

    All have gradients: of what is left it goes to the rows before, and through `before` to what was read
    earlier. A row has the bits of its whole sequence. Raises ValueError on other numbers of rows or
    sequences, and on a GPU.
    """
    check_on_cpu("delta_rule_after", qkv)
    T = len(segments.within)
    if len(qkv) != T or len(before.start) != len(segments.lengths):
        raise ValueError(
            f"delta_rule_after: qkv must have {T} rows, and before {len(segments.lengths)} sequences; they "
            f"have {len(qkv)} and {len(before.start)}"
        )
    return _DeltaRuleAfter.apply(qkv, a, b, A_log, dt_bias, *before[1:], segments, shape, in_pass)
