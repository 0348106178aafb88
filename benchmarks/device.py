"""Exactness and rates on a GPU; run by device.sh. Sections in order of importance; one that would begin after LAST_START_S is left out,
and named. Plain torch (cuBLAS, scaled_dot_product_attention) runs beside each kernel; weights and inputs are random.

Exactness: the law on a model of Qwen3-0.6B's widths with two layers, 20 steps of policy gradient in which every trainer logprob must
be its sampler logprob bit for bit, twice with one fingerprint, vLLM's kernels where its files are importable, and vLLM's own model with
the trainer beside it where vLLM is installed.
Rates: kernels at three models' shapes, the attention's backward beside the same one with atomics, forward and backward of one layer and
of the whole 0.6B model (the price of exactness), decoding; vLLM's kernels and Liger-Kernel's where they can be imported.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from zerokl.benchmarks.machine import Machine, Row, name_of, row
from zerokl.benchmarks.peers import atomic_rates, liger_rates, vllm_equality, vllm_rates
from zerokl.benchmarks.stock_exact import stock_equality
from zerokl.kernels import order
from zerokl.kernels.attention import attention, varlen_plan
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.kernels.logprob import Distribution
from zerokl.kernels.rms_norm import rms_norm
from zerokl.kernels.silu_mul import silu_mul
from zerokl.model.cache import BlockCache, CachedContext
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import Decoder, PackedContext
from zerokl.model.scoring import logprobs, pack
from zerokl.model.weights import fingerprint
from zerokl.verify.bitwise import count_unequal
from zerokl.verify.environment import environment

LAST_START_S = 400


def exactness(m: Machine) -> Iterator[Row]:
    """The law: alone, in a batch, in chunks, token by token; the gradient by micro-batches."""
    from zerokl.engine.gradient import ShardSum

    first = next(iter(m.shapes))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        decoder = m.decoder(first, 2, min(m.vocab, 4096), dtype)
        generator = torch.Generator().manual_seed(1)
        ids = [torch.randint(100, (n,), generator=generator).tolist() for n in ((9, 40, 5) if m.dry else (9, 300, 33, 130, 5, 64, 257))]
        pairs = [(x[:2], x[2:]) for x in ids]
        unequal = _forward_ways(decoder, ids)
        gradients = []
        for size in (len(pairs), 1):
            shard = ShardSum(decoder, 1)
            cut = [pairs[i : i + size] for i in range(0, len(pairs), size)]
            shard.add(lambda d, parts: [logprobs(d, pack(p), Distribution())[0].sum().backward() for p in parts], cut)
            gradients.append(shard.tree.take().clone())
        unequal["gradient by micro-batches"] = count_unequal(*gradients)
        for way, n in unequal.items():
            yield {"what": f"law {name_of(dtype)}: {way}", "unequal": n}


@torch.no_grad()
def _forward_ways(decoder: Decoder, sequences: list[list[int]]) -> dict[str, int]:
    """Elements of the hidden states whose bits differ from the packed batch's, by the other way of computing them."""
    lengths = [len(x) for x in sequences]
    packed = torch.tensor([token for x in sequences for token in x])
    together = decoder.hidden(packed, PackedContext(lengths, decoder.config)).split(lengths)
    unequal = {"alone": 0, "chunks of 32": 0, "token by token": 0}
    for x, expected in zip(sequences, together, strict=True):
        alone = decoder.hidden(torch.tensor(x), PackedContext([len(x)], decoder.config))
        unequal["alone"] += count_unequal(alone, expected)
        unequal["chunks of 32"] += count_unequal(_cached(decoder, x, 32), expected)
        if len(x) <= 70:
            unequal["token by token"] += count_unequal(_cached(decoder, x, 1), expected)
    return unequal


def _cached(decoder: Decoder, ids: list[int], chunk: int) -> torch.Tensor:
    cache = BlockCache(decoder.config, len(ids) // KEY_TILE + 1, decoder.cache_dtype, decoder.device)
    blocks = cache.allocate(cache.blocks)
    parts = [(a, ids[a : a + chunk]) for a in range(0, len(ids), chunk)]
    return torch.cat([decoder.hidden(torch.tensor(p), CachedContext(cache, [len(p)], [a], [blocks])) for a, p in parts])


def reinforcement(m: Machine) -> Iterator[Row]:
    """20 steps (dry: 2) of policy gradient with the native sampler, every logprob compared, run twice."""
    for dtype in (torch.bfloat16, torch.float16):
        runs = [_train(m, dtype) for _ in range(2)]
        yield {
            "what": f"policy gradient {name_of(dtype)}: {runs[0][1]} tokens, trainer against sampler",
            "unequal": sum(unequal for _, _, unequal in runs),
        }
        yield {"what": f"policy gradient {name_of(dtype)}: two runs, fingerprints that differ", "unequal": int(runs[0][0] != runs[1][0])}


def _train(m: Machine, dtype: torch.dtype) -> tuple[str, int, int]:
    """Fingerprint of the weights, tokens compared, and tokens whose two logprobs differ."""
    from zerokl.engine.gradient import ShardSum
    from zerokl.engine.learner import Learner
    from zerokl.engine.native import NativeSampler
    from zerokl.engine.rollout import Keys, Sampling

    source = m.decoder(next(iter(m.shapes)), 2, 128, torch.float32)
    master = source.flat.detach()
    decoder = Decoder(source.config, master.to(dtype), source.layout)
    cfg = SimpleNamespace(
        lr=1e-4, schedule="constant", warmup_steps=0, min_lr_ratio=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0
    )
    learner, shards = Learner(decoder, master, cfg, 20), ShardSum(decoder, 1)
    sampler = NativeSampler(decoder, max_concurrency=16)
    tokens = unequal = 0
    for step in range(2 if m.dry else 20):
        prompts = [[3 + p, 7, 11 + step % 5] for p in range(4)]
        rollouts = sampler.generate(prompts, Sampling(Distribution(), 4, 8 if m.dry else 48, frozenset({0})), Keys(0, step))
        rewards = torch.tensor([r.completion_ids.count(5) / len(r.completion_ids) for r in rollouts]).view(4, 4)
        A = (rewards - rewards.mean(1, keepdim=True)).flatten()
        lengths = torch.tensor([len(r.completion_ids) for r in rollouts])

        def work(decoder: Decoder, rollouts: list, A: torch.Tensor = A, lengths: torch.Tensor = lengths) -> torch.Tensor:
            logp = logprobs(decoder, pack([r.pair for r in rollouts]), Distribution())[0].cpu()
            (-logp * A.repeat_interleave(lengths) / len(logp)).sum().backward()
            return logp.detach()

        logp = shards.add(work, rollouts)
        sampled = torch.cat([torch.from_numpy(r.logprobs) for r in rollouts])
        tokens, unequal = tokens + len(logp), unequal + count_unequal(logp, sampled)
        learner.update(shards.tree.take())
    return fingerprint(decoder.layout, master), tokens, unequal


def kernel_rates(m: Machine, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """Each kernel beside plain torch; for the elementwise ones plain is a copy of as many bytes."""
    for name, (D, inner, _, heads, kv_heads, head_dim) in m.shapes.items():
        yield from _linear_rates(m, name, D, 2 * inner, dtype)
        yield from _attention_rates(m, name, heads, kv_heads, head_dim, dtype)
        yield from _row_rates(m, name, D, inner, dtype)


def _linear_rates(m: Machine, name: str, K: int, N: int, dtype: torch.dtype) -> Iterator[Row]:
    T, w = m.tokens, m.randn(N, K, dtype=dtype, scale=K**-0.5)
    x, dy, acc, blocks = (
        m.randn(T, K, dtype=dtype),
        m.randn(T, N, dtype=dtype),
        torch.zeros(w.shape, device=m.device),
        order.token_blocks([T]),
    )
    few, flops = x[:16].clone(), 2.0 * w.numel()
    yield row(m, f"{name} linear, 16 rows", flops * 16, "TFLOP/s", lambda: order.matmul_rows(few, w.t()), lambda: F.linear(few, w))
    yield row(m, f"{name} linear, {T} rows", flops * T, "TFLOP/s", lambda: order.matmul_rows(x, w.t()), lambda: F.linear(x, w))
    yield row(m, f"{name} input gradient", flops * T, "TFLOP/s", lambda: order.matmul_rows(dy, w), lambda: dy @ w)
    yield row(m, f"{name} weight gradient", flops * T, "TFLOP/s", lambda: order.add_outer(acc, dy, x, blocks), lambda: dy.t() @ x)


def _row_rates(m: Machine, name: str, D: int, inner: int, dtype: torch.dtype) -> Iterator[Row]:
    x, gu, weight = m.randn(m.tokens, D, dtype=dtype), m.randn(m.tokens, 2 * inner, dtype=dtype), m.randn(D, dtype=dtype)
    three_halves = m.randn(m.tokens, 3 * inner // 2, dtype=dtype)
    copies = torch.empty_like(x), torch.empty_like(three_halves)
    with torch.no_grad():
        yield row(m, f"{name} rms_norm", 2.0 * x.nbytes, "GB/s", lambda: rms_norm(x, weight, 1e-6), lambda: copies[0].copy_(x))
        yield row(m, f"{name} silu_mul", 1.5 * gu.nbytes, "GB/s", lambda: silu_mul(gu), lambda: copies[1].copy_(three_halves))


def _attention_rates(m: Machine, name: str, heads: int, kv_heads: int, D: int, dtype: torch.dtype) -> Iterator[Row]:
    T, L = m.tokens, m.length
    plan = varlen_plan([L] * (T // L), heads, kv_heads)
    q, k, v = (m.randn(T, h, D, dtype=dtype).requires_grad_() for h in (heads, kv_heads, kv_heads))
    do, flops = m.randn(T, heads, D, dtype=dtype), 2.0 * T * L * heads * D  # half of the scores are hidden

    def plain() -> torch.Tensor:
        batched = (x.view(T // L, L, -1, D).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(T, heads, D)

    def ours() -> torch.Tensor:
        return attention(q, k, v, plan, D**-0.5)

    with torch.no_grad():
        yield row(m, f"{name} attention", flops, "TFLOP/s", ours, plain)
    for_grad = [f() for f in (ours, plain)]
    back = [lambda o=o: torch.autograd.grad(o, (q, k, v), do, retain_graph=True) for o in for_grad]
    yield row(m, f"{name} attention backward", 2.5 * flops, "TFLOP/s", *back)


def price(m: Machine, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """Forward and backward of one layer and of the whole smallest model, exact beside plain: ours_ms / plain_ms is the price."""
    from zerokl.engine.gradient import ShardSum

    first = next(iter(m.shapes))
    for name, layers, vocab in [(n, 1, 256) for n in m.shapes] + [(first, m.shapes[first][2], m.vocab)]:
        decoder = m.decoder(name, layers, vocab, dtype)
        ids = torch.randint(min(vocab, 256), (m.tokens // m.length, m.length + 1))
        batch, shard = pack([(x[:1], x[1:]) for x in ids.tolist()]), ShardSum(decoder, 1)
        weights = {n: w.detach().clone().requires_grad_() for n, w in decoder.w.items()}

        on_device = ids.to(m.device)

        def ours(decoder: Decoder = decoder, batch=batch) -> None:
            logprobs(decoder, batch, Distribution())[0].sum().backward()

        def plain(decoder: Decoder = decoder, weights=weights, ids=on_device) -> None:
            logits = _plain_hidden(decoder.config, weights, ids[:, :-1]) @ weights["embed"].t()
            torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()), list(weights.values()))

        a, b = m.time_ms(ours), m.time_ms(plain)
        what = f"{name}, {layers} layer{'s' * (layers > 1)}, vocabulary {vocab}: forward and backward of {m.tokens} tokens"
        yield {"what": what, "ours_ms": a, "plain_ms": b, "price": a / b}
        del shard


def _plain_hidden(c: ModelConfig, w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """The same model in plain torch. ids [B, L] -> [B, L, D]."""
    B, L = ids.shape
    angle = torch.arange(L, device=ids.device).unsqueeze(1) * torch.tensor(c.frequencies, device=ids.device, dtype=torch.float32)
    cos, sin = (torch.cat([t, t], -1).to(w["embed"].dtype) for t in (angle.cos(), angle.sin()))

    def rotated(x: torch.Tensor) -> torch.Tensor:  # [B, H, L, D]
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], w[name], c.eps)

    x = F.embedding(ids, w["embed"])
    for i in range(c.layers):
        at = f"layers.{i}."
        qkv = F.linear(norm(x, at + "input_norm"), w[at + "qkv"]).view(B, L, -1, c.head_dim)
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], 2)
        q, k = (rotated(norm(t, at + n).transpose(1, 2)) for t, n in ((q, "q_norm"), (k, "k_norm")))
        o = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        x = x + F.linear(o.transpose(1, 2).reshape(B, L, -1), w[at + "o"])
        gate, up = F.linear(norm(x, at + "post_norm"), w[at + "gate_up"]).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, w[at + "down"])
    return norm(x, "norm")


def decoding(m: Machine, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """Tokens per second of the native sampler with the whole smallest model."""
    from zerokl.engine.native import NativeSampler
    from zerokl.engine.rollout import Keys, Sampling

    first = next(iter(m.shapes))
    sampler = NativeSampler(m.decoder(first, m.shapes[first][2], m.vocab, dtype), max_concurrency=4 if m.dry else 64)
    samples, length = (4, 8) if m.dry else (64, 128)
    for _ in range(2):  # the first compiles
        began = time.perf_counter()
        done = sampler.generate([[1, 2, 3]], Sampling(Distribution(), samples, length, frozenset()), Keys(0, 0))
        seconds = time.perf_counter() - began
    yield {"what": f"{first} decoding, {samples} samples", "tokens_per_s": sum(len(r.completion_ids) for r in done) / seconds}


SECTIONS = (exactness, reinforcement, vllm_equality, kernel_rates, atomic_rates, price, stock_equality, vllm_rates, liger_rates, decoding)


def _line(row: Row) -> str:
    cells = [f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "what"]
    return f"{row['what']:<72} {'  '.join(cells)}"


def _write(rows: list[Row], left_out: list[str], seconds: float) -> Path:
    """The results so far, in their file."""
    gpu = torch.cuda.get_device_name().replace(" ", "-").lower()
    target = Path(__file__).parent / "results" / gpu / "device.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parents[1]
    head = {"date": date.today().isoformat(), "commit": _commit(root), "seconds": seconds, "left_out": left_out}
    head["environment"] = environment(root, torch.device("cuda", 0), {})
    target.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    return target


def _commit(root: Path) -> str:
    """What git says it is, or COMMIT where the files travelled without their history."""
    told = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or os.environ.get("COMMIT", "unknown")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU; checks this script, measures nothing")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        print("device: torch finds no CUDA GPU here; --dry-run checks this script on a CPU", file=sys.stderr)
        return 2
    os.environ |= {"VLLM_BATCH_INVARIANT": "1", "TRITON_F32_DEFAULT": "ieee"}  # read as vLLM is imported; see engine/vllm/stock.py
    m, began, rows, left_out = Machine(args.dry_run), time.perf_counter(), [], []
    for section in SECTIONS:
        if time.perf_counter() - began > LAST_START_S:
            left_out.append(section.__name__)
            continue
        try:
            for found in section(m):
                rows.append({"section": section.__name__} | found)
                print(f"{time.perf_counter() - began:6.1f} s  {found['what']}", flush=True)
        except Exception as error:  # it counts as unequal, and does not take the other sections' figures with it
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append({"section": section.__name__, "what": f"{section.__name__} failed: {reason}", "unequal": 1})
        if not args.dry_run:
            _write(rows, left_out, time.perf_counter() - began)
    print("\n" + "\n".join(_line({k: v for k, v in row.items() if k != "section"}) for row in rows))
    broken = [row["what"] for row in rows if row.get("unequal")]
    seconds = time.perf_counter() - began
    if args.dry_run:
        print(f"dry run on a CPU, toy sizes, {seconds:.0f} s: the times above say nothing about a GPU, and nothing was written")
    else:
        print(f"wrote {_write(rows, left_out, seconds)}; left out for time: {', '.join(left_out) or 'nothing'}")
    print(f"unequal bits in {len(broken)} rows{': ' + '; '.join(broken) if broken else ''}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
