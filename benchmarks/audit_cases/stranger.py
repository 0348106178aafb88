"""Twelve faults of a sampler, by somebody who had not read the audit, nor the faults that it knows.

python benchmarks/audit_cases/strange.py --root R --plants benchmarks/audit_cases/stranger.py

Each is a bug of a kind that inference engines, model ports, quantisation and weight syncs have had. The
patterns were written before the audit saw any plant. Layers count from 0. The model is a Qwen3 with 3 layers,
6 heads of queries, 3 of keys, and a head that shares the embedding's weight.
"""

import math
from collections.abc import Callable, Iterator

import torch
from knobs import attention, layers
from strange import Plant
from torch.nn import functional
from transformers import AttentionInterface

# A fault of all layers that is told of one is not told.
EVERY = r"(?is)^(?!.*\bin layers? \d)"
BLOCK = 16  # places in a block of the cache


def _computed(name: str, compute: Callable) -> Callable:
    """A change of attention in all layers.

    compute: of module, q, k, v, scaling, places of queries [T, 1] and of keys [1, S] -> output [B, H, T, D].
    """

    def attend(module, q, k, v, attention_mask, scaling=None, dropout=0.0, **kwargs):
        T, S = q.shape[2], k.shape[2]
        here, there = torch.arange(S - T, S)[:, None], torch.arange(S)[None]
        return compute(module, q, k, v, scaling, here, there).transpose(1, 2).contiguous(), None

    def change(model) -> None:
        AttentionInterface.register(f"stranger_{name}", attend)
        model.config._attn_implementation = f"stranger_{name}"

    return change


def _spread(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Heads of keys or values, one for each head of queries, as they belong."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _tiled(_module, q, k, v, scaling, here, there):
    """Heads of keys repeated as a whole: query head h reads h % 3 instead of h // 2."""
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)
    scores = (q @ k.transpose(2, 3)).float() * scaling
    return scores.masked_fill(there > here, -torch.inf).softmax(-1).to(q.dtype) @ v


def _merged_in_base_two(_module, q, k, v, scaling, here, there):
    """A prefix of 16 tokens apart, merged by log-sum-exps in base 2 that are taken for natural ones."""
    k, v = _spread(k, q.shape[1]), _spread(v, q.shape[1])
    scores = ((q @ k.transpose(2, 3)).float() * scaling).masked_fill(there > here, -torch.inf)
    outputs, logs = [], []
    for part in (there < BLOCK, there >= BLOCK):
        inside = scores.masked_fill(~part, -torch.inf)
        outputs.append(inside.softmax(-1).nan_to_num(0.0).to(q.dtype) @ v)
        logs.append(inside.logsumexp(-1) / math.log(2))
    weights = torch.stack(logs).softmax(0)[..., None]
    return (weights[0] * outputs[0] + weights[1] * outputs[1]).to(q.dtype)


def _last_slots_lost(_module, q, k, v, scaling, here, there):
    """The last slot of each block of the cache is never written: key and value of zeros, but for itself."""
    k, v = _spread(k, q.shape[1]), _spread(v, q.shape[1])
    lost = (there % BLOCK == BLOCK - 1) & (there < here)
    scores = ((q @ k.transpose(2, 3)).float() * scaling).masked_fill(lost, 0.0)
    p = scores.masked_fill(there > here, -torch.inf).softmax(-1).masked_fill(lost, 0.0)
    return p.to(q.dtype) @ v


def _norms_after_rotation(model) -> None:
    """The norms of queries and keys come after the rotation: only their weights tell it."""
    for layer in layers(model):
        attn = attention(layer)
        attn.late_q, attn.late_k = attn.q_norm.weight.data.clone(), attn.k_norm.weight.data.clone()
        attn.q_norm.weight.data.fill_(1.0)
        attn.k_norm.weight.data.fill_(1.0)

    def compute(module, q, k, v, scaling, here, there):
        q, k = q * module.late_q, k * module.late_k
        k, v = _spread(k, q.shape[1]), _spread(v, q.shape[1])
        scores = (q @ k.transpose(2, 3)).float() * scaling
        return scores.masked_fill(there > here, -torch.inf).softmax(-1).to(q.dtype) @ v

    _computed("late_norms", compute)(model)


def _normed_in_place(model) -> None:
    """The first norm writes into its input, so the residual of layer 0 is what was normed, without weight."""

    def hook(_module, _args, y):
        x = y.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(y.dtype)

    model.model.embed_tokens.register_forward_hook(hook)


def _not_reduced(model) -> None:
    """The sum over two ranks is left out after the attention of layer 1: heads 3 to 5 are lost."""

    def hook(_module, args):
        x = args[0].clone()
        x[..., x.shape[-1] // 2 :] = 0
        return (x,)

    attention(layers(model)[1]).o_proj.register_forward_pre_hook(hook)


def _kernel_of_another(model) -> None:
    """The fused kernel of gpt-oss's MLP: (up + 1) * gate * sigmoid(1.702 * gate), clamped at 7."""
    for layer in layers(model):
        mlp = layer.mlp

        def forward(x, mlp=mlp):
            gate, up = mlp.gate_proj(x).clamp(max=7.0), mlp.up_proj(x).clamp(-7.0, 7.0)
            return mlp.down_proj((up + 1) * gate * torch.sigmoid(1.702 * gate))

        mlp.forward = forward


def _one_place_late(model) -> None:
    """Each token that is decoded, not prefilled, has a position of one too many."""
    rotary = model.model.rotary_emb
    plain = rotary.forward

    def forward(x, position_ids, *more):
        late = 1 if position_ids.shape[-1] == 1 else 0
        return plain(x, position_ids + late, *more)

    rotary.forward = forward


def _dynamic_ntk(model, original: int = 64, factor: float = 2.0) -> None:
    """A leftover rope_scaling: the base grows with the length beyond 64; cached keys keep their base."""
    rotary = model.model.rotary_emb

    def forward(x, position_ids, *_more):
        inv_freq = rotary.inv_freq.float()
        dim, length = 2 * len(inv_freq), int(position_ids.max()) + 1
        if length > original:
            ratio = (factor * length / original - (factor - 1)) ** (dim / (dim - 2))
            inv_freq = inv_freq * ratio ** (-torch.arange(0, dim, 2).float() / dim)
        angles = position_ids[..., None].float() * inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    rotary.forward = forward


def _added_tokens_mean(model) -> None:
    """Rows of the chat template's two tokens (ids 3 and 4) are the mean, as after a resize, not synced."""
    weight = model.get_input_embeddings().weight.data
    weight[3:5] = weight.float().mean(0).to(weight.dtype)


def _fp8(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    scale = largest.float().clamp(min=1e-12) / 448.0
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def _head_in_fp8(model) -> None:
    """The head is quantised with the other layers: fp8 e4m3, a scale for its weight, one for each token."""
    head = model.lm_head
    weight = _fp8(head.weight.data, head.weight.data.abs().max())

    def forward(x):
        x8 = _fp8(x, x.abs().amax(-1, keepdim=True))
        return functional.linear(x8, weight).to(x.dtype)

    head.forward = forward


def _smoothed_once(model) -> None:
    """SmoothQuant's scales are in layer 1's gate and up, but a sync wrote the plain norm over the folded."""
    layer = layers(model)[1]
    gain = layer.post_attention_layernorm.weight.data.float().abs()
    columns = torch.cat([layer.mlp.gate_proj.weight.data, layer.mlp.up_proj.weight.data]).float().abs()
    outliers = torch.exp(0.7 * torch.randn(len(gain), generator=torch.Generator().manual_seed(3)))
    scales = (gain * outliers / columns.amax(0)).clamp(min=1e-6).sqrt()
    scales = scales / scales.log().mean().exp()
    for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
        linear.weight.data.mul_(scales.to(linear.weight.dtype))


def plants() -> Iterator[Plant]:
    """The plants, with what would be right of each."""
    whose_keys = (
        rf"{EVERY}.*\bheads?\b.*\b(keys?|kv|groups?|grouped|gqa|repeated|tiled|interleaved?)\b",
        rf"{EVERY}.*\b(keys?|kv|groups?|grouped|gqa)\b.*\bheads?\b",
    )
    yield Plant("query heads read other key heads", _computed("tiled", _tiled), whose_keys)
    merged = r"lse|log-?sum-?exp|merg\w*|base[ -](2|two)|split|two parts|prefix|(first|before|under) 1[5-7]\b"
    yield Plant(
        "prefix merged in base 2",
        _computed("merged", _merged_in_base_two),
        (rf"{EVERY}.*\b({merged})",),
    )
    yield Plant(
        "last slot of each block lost",
        _computed("slots", _last_slots_lost),
        (
            r"(?is)\b(every|each|blocks?|pages?|places?|slots?|cache\w*|keys?|values?)\b.*(?<![\d.])1[56](th)?\b(?!\.)",
            r"(?is)(?<![\d.])16(th)?\b(?!\.).*\b(blocks?|pages?|places?|slots?|cache|keys?|tokens?)\b",
        ),
    )
    rotated = r"(rotat\w*|rope|rotary)"
    yield Plant(
        "norms of queries and keys after rotation",
        _norms_after_rotation,
        (
            rf"{EVERY}.*norm\w*\b.*\b(after|behind|follow\w*)\b.*{rotated}",
            rf"{EVERY}.*{rotated}.*\b(before|ahead|precede\w*)\b.*norm",
        ),
    )
    first = r"(?is)^(?!.*\bin layers? [12]\b)(?!.*all layers)"
    yield Plant(
        "first residual normed in place",
        _normed_in_place,
        (
            rf"{first}.*\b(residual|skip|stream|embed\w*)\b.*\bnorm(ed|ali[sz]ed|s)?\b",
            rf"{first}.*\bnorm\w*\b.*\b(residual|skip|stream|embed\w*)\b",
        ),
    )
    yield Plant(
        "attention of layer 1 not reduced over ranks",
        _not_reduced,
        (
            r"(?is)^(?=.*\blayer 1\b)(?=.*(o_proj|attention|heads?))"
            r"(?=.*(\bhalf\b|heads? [3-5]|heads? .*[345]\b.*(lost|left|zero|missing)|three heads|"
            r"channels? 4[78]))",
        ),
    )
    yield Plant(
        "gpt-oss's MLP kernel",
        _kernel_of_another,
        (
            rf"{EVERY}.*(swiglu|gpt-?oss)",
            rf"{EVERY}.*up_proj with \+?(0\.9\d*|1\.0\d*|1)\b[^,;]* on its output",
            rf"{EVERY}.*(act\w*|gate\w*|silu|sigmoid)\b.*\b1\.(5[4-9]|6\d|7\d|8[0-7])\d*\b",
        ),
    )
    yield Plant(
        "decoded positions one late",
        _one_place_late,
        (r"(?is)\bpositions?\b.*(\bone\b|\+ ?1(\.0\d*)?\b|\b1 (too|late|more|higher|off|ahead))",),
    )
    yield Plant(
        "dynamic NTK beyond 64",
        _dynamic_ntk,
        (
            rf"{EVERY}.*\b(dynamic|ntk)\b",
            rf"{EVERY}.*\b({rotated}|base|theta|frequenc\w*)\b.*\b(64|6[0-5]|length|longer|long|beyond|past)\b",
        ),
    )
    yield Plant(
        "added tokens' embeddings",
        _added_tokens_mean,
        (
            r"(?is)embed\w*\b.*\b(rows?|ids?|tokens?)\b.*((?<![\d.])[34](?![\d.])|user|assistant|special|added|chat)",
            r"(?is)\b(rows?|ids?|tokens?)\b.*((?<![\d.])[34](?![\d.])|user|assistant|special|added|chat).*embed",
        ),
    )
    eight = r"(fp8|float8|e4m3|8[- ]bits?|3 bits of mantissa)"
    yield Plant(
        "head in fp8",
        _head_in_fp8,
        (rf"(?is)(lm_head|\bhead\b|unembed\w*).*{eight}", rf"(?is){eight}.*(lm_head|\bhead\b|unembed\w*)"),
    )
    yield Plant(
        "smoothing not folded in layer 1",
        _smoothed_once,
        (
            r"(?is)post_attention_layernorm\b.*\blayer 1\b",
            r"(?is)^(?=.*\blayer 1\b)(?=.*(\bgate_proj\b.*\bup_proj\b|\bmlp's input))"
            r"(?=.*\b(channels?|columns?|inputs?)\b)",
        ),
    )
