"""The price of exactness: forward and backward beside eager plain torch. ours_ms / plain_ms is the price."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from zerokl.benchmarks.machine import Machine, Row
from zerokl.engine.train.parallel.gradient import ShardSum
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.config import ModelConfig
from zerokl.model.context import Buffers
from zerokl.model.decoder import Decoder
from zerokl.model.scoring import PackedBatch, logprobs, pack

# Forward and backward of 4,096 tokens of the 0.6B on an H100. A CUDA graph of prototypes took 38 to 39 ms.
_GOAL_MS = 45.0


def price(m: Machine, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """Forward and backward of one layer, and of the whole smallest model, exact beside plain."""
    first = m.first_shape
    whole = (first, m.shapes[first][2], m.vocab)
    for name, layers, vocab in [*((n, 1, 256) for n in m.shapes), whole]:
        decoder = m.decoder(name, layers, vocab, dtype)
        ids = torch.randint(min(vocab, 256), (m.tokens // m.length, m.length + 1))
        batch = pack([(x[:1], x[1:]) for x in ids.tolist()])
        shard_sum = ShardSum(decoder, 1)
        weights = {n: w.detach().clone().requires_grad_() for n, w in decoder.w.items()}
        on_device = ids.to(m.device)

        def ours(shard_sum: ShardSum = shard_sum, batch=batch) -> None:
            shard_sum.add(gradient, [batch])

        def plain(decoder: Decoder = decoder, weights=weights, ids=on_device) -> None:
            logits = plain_hidden(decoder.config, weights, ids[:, :-1]) @ weights["embed"].t()
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            torch.autograd.grad(loss, list(weights.values()))

        ours_ms, plain_ms = m.time_ms(ours), m.time_ms(plain)
        model = f"{name}, {layers} layer{'s' * (layers > 1)}, vocabulary {vocab}"
        yield {
            "what": f"{model}: forward and backward of {m.tokens} tokens",
            "ours_ms": ours_ms,
            "plain_ms": plain_ms,
            "price": ours_ms / plain_ms,
        } | ({"goal_ms": _GOAL_MS} if (name, layers, vocab) == whole and not m.small else {})


def gradient(decoder: Decoder, batches: list[PackedBatch], buffers: Buffers) -> list[None]:
    """Add the gradient of a shard, which is one packed batch."""
    for batch in batches:
        logprobs(decoder, batch, SamplingParams(), buffers=buffers)[0].sum().backward()
    return [None]


def plain_hidden(c: ModelConfig, w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """The hidden states of the model, in plain torch. ids [B, L] -> [B, L, D]."""
    B, L = ids.shape
    angle = torch.arange(L, device=ids.device).unsqueeze(1) * torch.tensor(
        c.frequencies, device=ids.device, dtype=torch.float32
    )
    cos, sin = (torch.cat([t, t], -1).to(w["embed"].dtype) for t in (angle.cos(), angle.sin()))

    def rotated(x: torch.Tensor) -> torch.Tensor:  # [B, H, L, D]
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], w[name], c.eps)

    x = F.embedding(ids, w["embed"])
    for i in range(c.layers):
        prefix = f"layers.{i}."
        qkv = F.linear(norm(x, prefix + "input_norm"), w[prefix + "qkv"]).view(B, L, -1, c.head_dim)
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], 2)
        q, k = (rotated(norm(t, prefix + n).transpose(1, 2)) for t, n in ((q, "q_norm"), (k, "k_norm")))
        o = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        x = x + F.linear(o.transpose(1, 2).reshape(B, L, -1), w[prefix + "o"])
        gate, up = F.linear(norm(x, prefix + "post_norm"), w[prefix + "gate_up"]).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, w[prefix + "down"])
    return norm(x, "norm")
