"""Log-probability of a token under the distribution it is drawn from, for the sampler and for the trainer.

    logits = h w^T, capped where the model has a cap of them (softcap.py)
    z = (logits + offset) / temperature,  z_v = -inf outside the kept set (truncation.py)
    logp = z_id - lse,  lse = log sum_v exp(z_v),  entropy = lse - sum_v p_v z_v,  p = exp(z - lse)
    (all relative to max z)
    dz_v = dlogp (1[v = id] - p_v),   dlogits = dz / temperature;   dh = dlogits w,   dw = dlogits^T h

The sampler and the trainer both call this file. The kept set counts as constant in the gradient. Greedy
sampling (temperature 0) is reported under the distribution of temperature 1, as vLLM does. A token that is
not kept has the logp -inf.

Shapes: h [T, D]; w [V, D]; offset [V]; ids, logp, entropy [T]. Logits [rows, V] exist only for a
chunk of rows, in the forward and in the backward.
Roundings: logits are rounded once to the dtype of h, from an fp32 sum. Everything after that is in fp32.
dlogits and dh are rounded once to the dtype of h. Capped logits are rounded once more; so are their dlogits.
GPU: the Triton kernels are in logprob_triton.py. The other operations on a GPU are torch's: sorts, maxima,
comparisons and elementwise operations. They are exact, or depend on their own row only.
"""

import torch

from .backend import on_triton
from .grad import accumulate_dtype, check_dtype
from .leaves import WHOLE, Leaves
from .linear import input_gradient
from .matmul import add_outer, matmul, matmul_cpu
from .passes import ONE_SEQUENCE, Pass
from .sampling_params import SamplingParams
from .shared_rows import SharedRows
from .softcap import softcap, softcap_slope
from .tile_tables import DEFAULT_TABLE, TileTable
from .truncation import logit_offset, scaled_logits, scaled_logits_ref

# Bytes of one fp32 chunk of logits [rows, V]. Rows do not depend on each other, and the blocks of a weight
# gradient keep their order in any chunks (matmul.add_outer). So this limit bounds memory and decides no bit.
# On a GPU a chunk needs so many rows that the product takes longer than reading the lm_head again: 832 rows
# at V = 151,936. Chunks of 64 rows would read the lm_head thirteen times as often.
CHUNK_BYTES, GPU_CHUNK_BYTES = 1 << 25, 1 << 29
# The same for 16-bit logits on a GPU that are only divided: they are the only copy. With 4,416 rows
# at V = 151,936 the gradient of h has tiles for every multiprocessor.
GPU_CHUNK_BYTES_16 = 5 << 28
Tensor = torch.Tensor


def head_logits(
    h: Tensor, w: Tensor, cap: float = 0.0, packed: Tensor | None = None, tiles: TileTable = DEFAULT_TABLE
) -> Tensor:
    """The logits that tokens are drawn from and scored by, [T, V]. h [T, D], w [V, D].

    cap: of the logits; 0.0 is none. packed, tiles: see matmul. It has no gradient.
    """
    logits = matmul(h, w, packed, tiles)
    return softcap(logits, cap) if cap else logits


def softmax_parts(z: Tensor, leaves: Leaves = WHOLE) -> tuple[Tensor, Tensor, Tensor]:
    """z - max [T, V], its exponential [T, V], and the sum of the exponentials along each row [T].

    leaves: of the sum; where ranks share them, z has this rank's columns, and maximum and sum are of all.
    """
    shifted = z - leaves.highest(z.amax(dim=1, keepdim=True))
    e = torch.exp(shifted)
    return shifted, e, leaves.sum_row(e)


def token_logprobs_ref(z: Tensor, ids: Tensor, leaves: Leaves = WHOLE) -> tuple[Tensor, Tensor]:
    """The reference of token_logprobs. leaves: see softmax_parts; the ids are of all columns."""
    shifted, e, total = softmax_parts(z, leaves)
    log_total = torch.log(total)
    logp = leaves.chosen(shifted, ids) - log_total
    mean = leaves.sum_row(torch.where(e > 0, e * shifted, 0.0)) / total
    return logp, log_total - mean


def token_logprobs(z: Tensor, ids: Tensor, leaves: Leaves = WHOLE) -> tuple[Tensor, Tensor]:
    """logp and entropy of each row. z [T, V] from `scaled_logits`, ids [T] -> [T], [T] in fp32."""
    if on_triton(z):
        from .logprob_triton import logprob_fwd

        return logprob_fwd(z, ids, leaves=leaves)[:2]
    return token_logprobs_ref(z, ids, leaves)


def log_distribution(z: Tensor) -> Tensor:
    """logp of every token. z [T, V] from `scaled_logits` -> [T, V] fp32; -inf outside the kept set.

    The value of a token has the bits that `token_logprobs` gives for it with one leaf.
    """
    if on_triton(z):
        from .logprob_triton import logprob_fwd

        _, _, highest, log_total = logprob_fwd(z, torch.zeros(len(z), dtype=torch.int64, device=z.device))
        return z - highest.unsqueeze(1) - log_total.unsqueeze(1)
    shifted, _, total = softmax_parts(z)
    return shifted - torch.log(total).unsqueeze(1)


def chunk_rows(V: int, device: torch.device, dtype: torch.dtype = torch.float32) -> int:
    """The rows of logits that a device holds at once: whole tiles of the matrix products.

    dtype: that of the logits, if no other copy of them is made; fp32 otherwise.
    """
    if device.type != "cpu" and dtype.itemsize == 2:
        return max(64, GPU_CHUNK_BYTES_16 // (2 * V) // 64 * 64)
    chunk_bytes = CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES
    return max(64, chunk_bytes // (4 * V) // 64 * 64)


def logits_rows(V: int, device: torch.device, dtype: torch.dtype, params: SamplingParams) -> int:
    """The rows of logits [rows, V] in `dtype` that linear_logprob holds at once."""
    return chunk_rows(V, device, dtype if params.only_divides(V) else torch.float32)


def linear_logprob_ref(
    h: Tensor, w: Tensor, ids: Tensor, params: SamplingParams, cap: float = 0.0, leaves: Leaves = WHOLE
) -> tuple[Tensor, Tensor]:
    """Forward only: logp and entropy, [T] each. h [T, D], w [V, D], ids [T]. leaves: see linear_logprob."""
    rows = chunk_rows(w.shape[0], w.device)
    logp = h.new_empty(h.shape[0], dtype=accumulate_dtype(h.dtype))
    entropy = torch.empty_like(logp)
    for a in range(0, h.shape[0], rows):
        logits = matmul_cpu(h[a : a + rows], w)
        logits, shared = _of_rows(softcap(logits, cap) if cap else logits, params, leaves)
        z = scaled_logits_ref(logits, params)
        logp[a : a + rows], entropy[a : a + rows] = token_logprobs_ref(z, ids[a : a + rows], shared)
    return logp, entropy


def _of_rows(logits: Tensor, params: SamplingParams, leaves: Leaves) -> tuple[Tensor, Leaves]:
    """The logits that a distribution is made from, [T, V], and the leaves of its sums.

    They are this rank's columns where logits are only divided. A filter or a bias needs those of all ranks.
    """
    if leaves.ranks.size == 1 or params.only_divides(logits.shape[1] * leaves.ranks.size):
        return logits, leaves
    return leaves.whole_rows(logits), leaves.alone


def _forward(
    h: Tensor,
    w: Tensor,
    ids: Tensor,
    params: SamplingParams,
    tiles: TileTable,
    offset: Tensor | None,
    cap: float,
    leaves: Leaves,
) -> tuple[Tensor, ...]:
    """logp and entropy, [T] each. On Triton also each row's maximum and log of the sum, for the backward.

    offset: from logit_offset.
    """
    if not on_triton(h):
        return linear_logprob_ref(h, w, ids, params, cap, leaves)
    if not h.shape[0]:
        return tuple(torch.empty(0, dtype=torch.float32, device=h.device) for _ in range(4))
    if leaves.ranks.size > 1 and not params.only_divides(w.shape[0] * leaves.ranks.size):
        raise ValueError("linear_logprob: ranks that share a vocabulary filter tokens on a CPU only")
    from .logprob_triton import logprob_fwd

    rows, parts = logits_rows(w.shape[0], w.device, w.dtype, params), []
    for a in range(0, h.shape[0], rows):
        logits = head_logits(h[a : a + rows], w, cap, tiles=tiles)
        if params.only_divides(w.shape[0]):
            parts.append(logprob_fwd(logits, ids[a : a + rows], params.temperature or 1.0, leaves))
        else:
            parts.append(logprob_fwd(scaled_logits(logits, params, offset), ids[a : a + rows], 1.0, leaves))
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def _of_shares(shared: SharedRows, h: Tensor, w: Tensor, ids: Tensor, *rest) -> tuple[Tensor, ...]:
    """_forward of all rows, of which each rank computes a share."""
    mine = shared.shares(0, len(h))
    return tuple(shared.whole(x)[: len(h)] for x in _forward(h[mine], w, ids[mine], *rest))


def dlogits_ref(
    logits: Tensor, ids: Tensor, dlogp: Tensor, params: SamplingParams, leaves: Leaves = WHOLE
) -> Tensor:
    """The gradient of logits [rows, V], rounded once to their dtype. ids, dlogp [rows].

    leaves: see linear_logprob.
    """
    row_logits, shared = _of_rows(logits, params, leaves)
    _, e, total = softmax_parts(scaled_logits_ref(row_logits, params), shared)
    dz = e.div_(total.unsqueeze(1)).neg_()
    rows, columns = shared.owned(ids, dz.shape[1])
    dz[rows, columns] += 1.0  # only here: to add 0.0 in the other ranks would make a 0.0 of a -0.0
    dz *= dlogp.unsqueeze(1)
    if params.temperature not in (0.0, 1.0):
        dz /= dz.new_tensor(params.temperature)
    return (dz if shared is leaves else leaves.own_columns(dz)).to(logits.dtype)


def _dlogits(
    logits: Tensor,
    ids: Tensor,
    dlogp: Tensor,
    params: SamplingParams,
    offset: Tensor | None,
    stats: tuple[Tensor, ...],
    leaves: Leaves,
) -> Tensor:
    """The gradient of the logits, as dlogits_ref gives it. On Triton it overwrites the logits.

    `stats` are the maximum and the log of the sum of each row (Triton only).
    """
    if not on_triton(logits):
        return dlogits_ref(logits, ids, dlogp, params, leaves)
    from .logprob_triton import logprob_bwd

    temperature = params.temperature or 1.0
    if first := leaves.ranks.rank * logits.shape[1]:
        ids = ids - first  # of this rank's columns; the others' are none
    if params.only_divides(logits.shape[1]):
        logprob_bwd(logits, ids, dlogp, *stats, logits, temperature, temperature)
    else:
        logprob_bwd(scaled_logits(logits, params, offset), ids, dlogp, *stats, logits, 1.0, temperature)
    return logits


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, ids, params, in_pass, tiles, cap, leaves):
        offset = logit_offset(params, w.shape[0] * leaves.ranks.size, w.device)
        logp, entropy, *stats = _of_shares(in_pass.shared, h, w, ids, params, tiles, offset, cap, leaves)
        ctx.save_for_backward(h, ids, *stats)
        ctx.w, ctx.params, ctx.in_pass, ctx.tiles, ctx.offset = w, params, in_pass, tiles, offset
        ctx.cap, ctx.leaves = cap, leaves
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, dlogp, _):
        h, ids, *stats = ctx.saved_tensors
        w, params, in_pass = ctx.w, ctx.params, ctx.in_pass.over(dlogp)
        shared = in_pass.shared
        wants_dh, wants_dw = ctx.needs_input_grad[:2]
        dh = torch.empty_like(h) if wants_dh else None
        buffer = in_pass.buffer(w) if wants_dw else None
        rows = logits_rows(w.shape[0], w.device, w.dtype, params)
        for a, b, blocks in in_pass.blocks.chunks(rows * shared.size):
            mine = shared.shares(a, b)
            logits = head_logits(h[mine], w, ctx.cap, tiles=ctx.tiles)
            chunk_stats = tuple(s[mine] for s in stats)
            slope = softcap_slope(logits, ctx.cap) if ctx.cap else None  # Triton overwrites the logits
            dlogits = _dlogits(logits, ids[mine], dlogp[mine], params, ctx.offset, chunk_stats, ctx.leaves)
            if slope is not None:
                dlogits = slope.mul_(dlogits).to(logits.dtype)
            if wants_dh:
                part = input_gradient(dlogits, w, ctx.tiles, ctx.leaves.outputs(w.shape[0]))
                dh[a:b] = shared.whole(part)[: b - a]
            if wants_dw:
                add_outer(buffer, shared.columns(dlogits)[: b - a], h[a:b], blocks)
        return dh, in_pass.returned_grad(w, buffer) if wants_dw else None, *[None] * 6


def linear_logprob(
    h: Tensor,
    w: Tensor,
    ids: Tensor,
    params: SamplingParams | None = None,
    in_pass: Pass = ONE_SEQUENCE,
    tiles: TileTable = DEFAULT_TABLE,
    cap: float = 0.0,
    leaves: Leaves = WHOLE,
) -> tuple[Tensor, Tensor]:
    """logp of the ids under the logits h w^T, and the entropy, which has no gradient.

    h [T, D], w [V, D], ids [T] -> [T], [T] in fp32. dw is summed in the order of the pass's token blocks,
    which the host must know. tiles: see matmul. cap: of the logits; 0.0 is none. leaves: of the sums over V;
    where ranks share them, w has this rank's rows, and the ids count those of all.
    Where ranks share the pass's rows, each has all of h and computes a part of the logits.
    Raises ValueError on a bad shape, dtype or sampling parameter.
    """
    check_dtype("linear_logprob", h=h, w=w)
    params = params or SamplingParams()
    if h.dim() != 2 or w.dim() != 2 or h.shape[1] != w.shape[1] or ids.shape != h.shape[:1]:
        raise ValueError(
            f"linear_logprob: h {tuple(h.shape)}, w {tuple(w.shape)}, ids {tuple(ids.shape)} must be "
            "[T, D], [V, D], [T]"
        )
    V = w.shape[0] * leaves.ranks.size
    params.check(V)
    if not torch.is_grad_enabled():
        offset = logit_offset(params, V, w.device)
        return _of_shares(in_pass.shared, h, w, ids, params, tiles, offset, cap, leaves)[:2]
    return _LinearLogprob.apply(h, w, ids, params, in_pass, tiles, cap, leaves)
