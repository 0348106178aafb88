"""Log-probability of a token under the distribution it is drawn from. The sampler and the trainer both call this file.

    z = logits / temperature,  z_v = -inf outside the kept set (top-k, then top-p)
    logp = z_id - lse,  lse = log sum_v exp(z_v),  entropy = lse - sum_v p_v z_v,  p = exp(z - lse)    (all relative to max z)
    dz_v = dlogp (1[v = id] - p_v),   dlogits = dz / temperature;   dh = dlogits w,   dw = dlogits^T h

The kept set counts as constant in the gradient. Top-k keeps every logit not below the k-th largest; top-p keeps the
smallest set of largest probabilities whose sum reaches top_p, never fewer than one (vLLM's apply_top_k_top_p).
Greedy sampling (temperature 0) is reported under the distribution of temperature 1, as vLLM does.

h [T, D], w [V, D], ids [T]; logits [rows, V] exist for a chunk of rows only, forward and backward; logp, entropy [T].
Roundings: logits once to the dtype of h (fp32 sum); from there everything in fp32; dlogits and dh once to the dtype of h.
Triton: logprob_triton.py. The rest on a GPU is torch's: sorts, maxima, comparisons and elementwise operations, all exact or a row's own.
"""

from typing import NamedTuple

import torch

from .backend import on_triton
from .grad import accumulate_dtype, check_dtype, grad_buffer, returned_grad
from .order import Blocks, add_outer, matmul_rows, one_sequence, sum_row

# Bytes of one fp32 chunk of logits [rows, V]. Rows are free of each other, and a weight gradient's blocks keep their order whatever the
# chunks (order.add_outer), so this bounds memory and decides no bit. On a GPU a chunk must have so many rows that multiplying takes longer
# than reading the head again: 832 at V = 151,936, where 64 would read it thirteen times as often.
CHUNK_BYTES, GPU_CHUNK_BYTES = 1 << 25, 1 << 29


class Distribution(NamedTuple):
    """How logits become the distribution tokens are drawn from."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all

    def check(self) -> "Distribution":
        """Return self. Raises ValueError for a value out of range."""
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature ({self.temperature}) must be 0 (greedy) or positive and finite")
        if self.top_k < 0:
            raise ValueError(f"top_k ({self.top_k}) must be 0 (off) or positive")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p ({self.top_p}) must lie in (0, 1]")
        return self


def _keeps_all(dist: Distribution, V: int) -> bool:
    """Whether no token is ever outside the kept set. Greedy is reported under the whole distribution."""
    return dist.temperature == 0.0 or not (0 < dist.top_k < V or dist.top_p < 1.0)


def scaled_logits(logits: torch.Tensor, dist: Distribution) -> torch.Tensor:
    """z of the equations above, in fp32. logits [T, V] -> [T, V]."""
    z = logits.to(accumulate_dtype(logits.dtype))
    if dist.temperature not in (0.0, 1.0):
        z = z / z.new_tensor(dist.temperature)  # a true division: a Python scalar may become a product with its reciprocal
    if _keeps_all(dist, z.shape[1]):
        return z
    ascending, index = torch.sort(z, dim=1, stable=True)
    drop = torch.zeros_like(ascending, dtype=torch.bool)
    if 0 < dist.top_k < z.shape[1]:
        drop |= ascending < ascending[:, -dist.top_k].unsqueeze(1)
    if dist.top_p < 1.0:
        kept = ascending.masked_fill(drop, float("-inf"))
        below = _prefix_sums(torch.exp(kept - kept[:, -1:]))
        drop |= below <= (1.0 - dist.top_p) * below[:, -1:]
        drop[:, -1] = False
    return z.masked_fill(torch.zeros_like(drop).scatter_(1, index, drop), float("-inf"))


def _prefix_sums(e: torch.Tensor) -> torch.Tensor:
    """Prefix sums along each row, in fp64 (on Triton up to a common factor). A row's depend on itself only. [T, V] -> [T, V]."""
    if on_triton(e):
        from .logprob_triton import prefix_sums

        return prefix_sums(e)
    return torch.cumsum(e.double(), dim=1)  # along a row, one element after another


def softmax_parts(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """z - max [T, V], its exp [T, V], and the sum of that along the row [T]."""
    shifted = z - z.amax(dim=1, keepdim=True)
    e = torch.exp(shifted)
    return shifted, e, sum_row(e)


def token_logprobs(z: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logp and entropy of each row. z [T, V] from `scaled_logits`, ids [T] -> [T], [T] in fp32."""
    if on_triton(z):
        from .logprob_triton import logprob_fwd

        return logprob_fwd(z, ids)[:2]
    shifted, e, total = softmax_parts(z)
    log_total = torch.log(total)
    logp = shifted.gather(1, ids.unsqueeze(1)).squeeze(1) - log_total
    mean = sum_row(torch.where(e > 0, e * shifted, torch.zeros_like(e))) / total
    return logp, log_total - mean


def draw(z: torch.Tensor, u: torch.Tensor, greedy: bool = False) -> torch.Tensor:
    """One token a row by inverting the distribution function. z [T, V], u [T] fp64 in [0, 1) -> ids [T].

    A row's token depends on its own z and u: see _prefix_sums.
    """
    return z.argmax(dim=1) if greedy else _invert(torch.exp(z - z.amax(dim=1, keepdim=True)), u)


def drawn_logprobs(z: torch.Tensor, u: torch.Tensor, greedy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw`, and what `token_logprobs` says of the tokens drawn, with one exponential for both. -> ids [T], logp [T] in fp32."""
    if on_triton(z):
        ids = draw(z, u, greedy)
        return ids, token_logprobs(z, ids)[0]
    shifted, e, total = softmax_parts(z)
    ids = z.argmax(dim=1) if greedy else _invert(e, u)
    return ids, shifted.gather(1, ids.unsqueeze(1)).squeeze(1) - torch.log(total)


def _invert(e: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first token at which the distribution function of weights e [T, V] exceeds u [T]."""
    cdf = _prefix_sums(e)
    total = cdf[:, -1:]
    target = torch.minimum(u.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cdf, target, right=True).squeeze(1)
    return ids.clamp_(max=e.shape[1] - 1)  # logits that are NaN: found later, and not by reading out of bounds


def chunk_rows(V: int, device: torch.device) -> int:
    """Rows of logits held at once on a device: whole tiles of matrix products."""
    return max(64, (CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES) // (4 * V) // 64 * 64)


def linear_logprob_ref(h, w, ids, dist: Distribution) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward only: logp and entropy, [T] each."""
    rows = chunk_rows(w.shape[0], w.device)
    logp = h.new_empty(h.shape[0], dtype=accumulate_dtype(h.dtype))
    entropy = torch.empty_like(logp)
    for a in range(0, h.shape[0], rows):
        z = scaled_logits(matmul_rows(h[a : a + rows], w.t()), dist)
        logp[a : a + rows], entropy[a : a + rows] = token_logprobs(z, ids[a : a + rows])
    return logp, entropy


def _chunks_of_blocks(blocks: Blocks, rows: int) -> list[list[tuple[int, int]]]:
    """Consecutive blocks grouped into chunks of about `rows` rows."""
    chunks: list[list[tuple[int, int]]] = []
    for start, end in blocks:
        if chunks and end - chunks[-1][0][0] <= rows:
            chunks[-1].append((start, end))
        else:
            chunks.append([(start, end)])
    return chunks


def _linear_logprob_fwd(h, w, ids, dist: Distribution) -> tuple[torch.Tensor, ...]:
    """logp and entropy, [T] each; on Triton each row's maximum and log of the sum as well, for the backward."""
    if not on_triton(h) or not h.shape[0]:
        return linear_logprob_ref(h, w, ids, dist)
    from .logprob_triton import logprob_fwd

    rows, parts = chunk_rows(w.shape[0], w.device), []
    for a in range(0, h.shape[0], rows):
        logits = matmul_rows(h[a : a + rows], w.t())
        if _keeps_all(dist, w.shape[0]):
            parts.append(logprob_fwd(logits.float(), ids[a : a + rows], dist.temperature or 1.0))
        else:
            parts.append(logprob_fwd(scaled_logits(logits, dist), ids[a : a + rows]))
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def _dlogits(logits: torch.Tensor, ids, dlogp, dist: Distribution, stats: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The gradient of a chunk of logits, rounded to their dtype; on Triton in their place. `stats`: maximum and log of the sum."""
    if on_triton(logits):
        from .logprob_triton import logprob_bwd

        temperature = dist.temperature or 1.0
        if _keeps_all(dist, logits.shape[1]):
            logprob_bwd(logits, ids, dlogp, *stats, logits, temperature, temperature)
        else:
            logprob_bwd(scaled_logits(logits, dist), ids, dlogp, *stats, logits, 1.0, temperature)
        return logits
    _, e, total = softmax_parts(scaled_logits(logits, dist))
    dz = e.div_(total.unsqueeze(1)).neg_()
    dz.scatter_add_(1, ids.unsqueeze(1), torch.ones_like(dz[:, :1]))
    dz *= dlogp.unsqueeze(1)
    if dist.temperature not in (0.0, 1.0):
        dz /= dz.new_tensor(dist.temperature)
    return dz.to(logits.dtype)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, ids, dist, blocks):
        logp, entropy, *stats = _linear_logprob_fwd(h, w, ids, dist)
        ctx.save_for_backward(h, ids, *stats)
        ctx.w, ctx.dist, ctx.blocks = w, dist, blocks
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, dlogp, _):
        h, ids, *stats = ctx.saved_tensors
        w, dist = ctx.w, ctx.dist
        dh, acc = torch.empty_like(h), grad_buffer(w)
        for chunk in _chunks_of_blocks(ctx.blocks, chunk_rows(w.shape[0], w.device)):
            a, b = chunk[0][0], chunk[-1][1]
            dlogits = _dlogits(matmul_rows(h[a:b], w.t()), ids[a:b], dlogp[a:b], dist, tuple(s[a:b] for s in stats))
            dh[a:b] = matmul_rows(dlogits, w)
            add_outer(acc, dlogits, h[a:b], [(s - a, e - a) for s, e in chunk])
        return dh, returned_grad(w, acc), None, None, None


def linear_logprob(
    h: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, dist: Distribution | None = None, blocks: Blocks | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logp of ids under the logits h w^T, and the entropy (no gradient). h [T, D], w [V, D], ids [T] -> [T], [T] in fp32.

    `blocks`: token blocks in whose order dw is summed. Raises ValueError on a bad shape, dtype or distribution.
    """
    check_dtype("linear_logprob", h=h, w=w)
    dist = (dist or Distribution()).check()
    if h.dim() != 2 or w.dim() != 2 or h.shape[1] != w.shape[1] or ids.shape != h.shape[:1]:
        raise ValueError(f"linear_logprob: h {tuple(h.shape)}, w {tuple(w.shape)}, ids {tuple(ids.shape)} must be [T, D], [V, D], [T]")
    if not torch.is_grad_enabled():
        return _linear_logprob_fwd(h, w, ids, dist)[:2]
    return _LinearLogprob.apply(h, w, ids, dist, one_sequence(h, blocks))
