"""Exactness and rates on a GPU; run by device.sh. Sections in order of importance; one that would begin after
LAST_START_S, and what is left at END_S, is left out and named. Plain torch (cuBLAS,
scaled_dot_product_attention) runs beside each kernel; all is random.

Exactness: the law on a model of Qwen3-0.6B's widths with two layers, 20 steps of policy gradient in which
every trainer logprob must be its sampler logprob bit for bit, twice with one fingerprint, vLLM's kernels
where its files are on the path, and vLLM's own model with the trainer beside it where vLLM is installed.
Rates: kernels at three models' shapes, the attention's backward beside the same one with atomics, forward and
backward of one layer and of the whole 0.6B model (the price of exactness), decoding; vLLM's kernels and
Liger-Kernel's where they can be imported.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from zerokl.benchmarks.exactness import exactness, reinforcement
from zerokl.benchmarks.machine import END_S, Machine, Row, row
from zerokl.benchmarks.peers import atomic_rates, liger_rates, vllm_equality, vllm_rates
from zerokl.benchmarks.stock_exact import stock_equality
from zerokl.kernels import matmul, order
from zerokl.kernels.attention import attention, attention_cached, varlen_plan
from zerokl.kernels.attention_plan import KEY_TILE, AttentionPlan
from zerokl.kernels.logprob import linear_logprob
from zerokl.kernels.rms_norm import add_rms_norm, rms_norm
from zerokl.kernels.rope import rope
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.silu_mul import silu_mul
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import Decoder
from zerokl.model.scoring import logprobs, pack
from zerokl.verify.environment import environment

LAST_START_S = 400


def kernel_rates(m: Machine, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """Each kernel beside plain torch; for the elementwise ones plain is a copy of as many bytes."""
    for name, (D, inner, _, heads, kv_heads, head_dim) in m.shapes.items():
        yield from _linear_rates(m, name, D, 2 * inner, dtype)
        yield from _attention_rates(m, name, heads, kv_heads, head_dim, dtype)
        yield from _decode_rates(m, name, heads, kv_heads, head_dim, dtype)
        yield from _row_rates(m, name, D, inner, heads + kv_heads, head_dim, dtype)
        yield from _logprob_rates(m, name, D, dtype)


def _linear_rates(m: Machine, name: str, K: int, N: int, dtype: torch.dtype) -> Iterator[Row]:
    T, w = m.tokens, m.randn(N, K, dtype=dtype, scale=K**-0.5)
    x, dy, acc, blocks = (
        m.randn(T, K, dtype=dtype),
        m.randn(T, N, dtype=dtype),
        torch.zeros(w.shape, device=m.device),
        order.token_blocks([T]),
    )
    few, flops = x[:16].clone(), 2.0 * w.numel()
    yield row(
        m,
        f"{name} linear, 16 rows",
        flops * 16,
        "TFLOP/s",
        lambda: matmul.matmul(few, w),
        lambda: F.linear(few, w),
    )
    yield row(
        m,
        f"{name} linear, {T} rows",
        flops * T,
        "TFLOP/s",
        lambda: matmul.matmul(x, w),
        lambda: F.linear(x, w),
    )
    yield row(
        m, f"{name} input gradient", flops * T, "TFLOP/s", lambda: matmul.matmul(dy, w.t()), lambda: dy @ w
    )
    yield row(
        m,
        f"{name} weight gradient",
        flops * T,
        "TFLOP/s",
        lambda: matmul.add_outer(acc, dy, x, blocks),
        lambda: dy.t() @ x,
    )


def _row_rates(
    m: Machine, name: str, D: int, inner: int, heads: int, head_dim: int, dtype: torch.dtype
) -> Iterator[Row]:
    T = m.tokens
    x, gu, w = (m.randn(*n, dtype=dtype).requires_grad_() for n in ((T, D), (T, 2 * inner), (D,)))
    qk, angle = m.randn(T, heads, head_dim, dtype=dtype), m.randn(T, head_dim // 2, dtype=torch.float32)
    residual, cos, sin = m.randn(T, D, dtype=dtype), angle.cos(), angle.sin()
    with torch.no_grad():
        yield _beside_copy(m, f"{name} rms_norm", 2.0 * x.nbytes, lambda: rms_norm(x, w, 1e-6))
        yield _beside_copy(
            m, f"{name} add_rms_norm", 4.0 * x.nbytes, lambda: add_rms_norm(x, residual, w, 1e-6)
        )
        yield _beside_copy(m, f"{name} silu_mul", 1.5 * gu.nbytes, lambda: silu_mul(gu))
        yield _beside_copy(m, f"{name} rope", 2.0 * qk.nbytes, lambda: rope(qk, cos, sin))
    y, dy, z, dz = (
        rms_norm(x, w, 1e-6),
        m.randn(T, D, dtype=dtype),
        silu_mul(gu),
        m.randn(T, inner, dtype=dtype),
    )
    yield _beside_copy(
        m,
        f"{name} rms_norm backward",
        3.0 * x.nbytes,
        lambda: torch.autograd.grad(y, (x, w), dy, retain_graph=True),
    )
    yield _beside_copy(
        m,
        f"{name} silu_mul backward",
        2.5 * gu.nbytes,
        lambda: torch.autograd.grad(z, gu, dz, retain_graph=True),
    )


def _beside_copy(m: Machine, what: str, nbytes: float, run: Callable[[], object]) -> Row:
    """A kernel that reads and writes `nbytes`, beside a copy that does."""
    source = torch.zeros(int(nbytes) // 2, dtype=torch.uint8, device=m.device)
    target = torch.empty_like(source)
    return row(m, what, nbytes, "GB/s", run, lambda: target.copy_(source))


def _logprob_rates(m: Machine, name: str, D: int, dtype: torch.dtype) -> Iterator[Row]:
    """The head with the log-softmax: four products with it, as the backward computes the logits again."""
    T = m.tokens // 4
    h, w = (
        m.randn(T, D, dtype=dtype).requires_grad_(),
        m.randn(m.vocab, D, dtype=dtype, scale=D**-0.5).requires_grad_(),
    )
    ids = torch.arange(T, device=m.device) % m.vocab
    ours = lambda: torch.autograd.grad(linear_logprob(h, w, ids)[0].sum(), (h, w))
    plain = lambda: torch.autograd.grad(F.cross_entropy(F.linear(h, w).float(), ids, reduction="sum"), (h, w))
    yield row(
        m, f"{name} logprobs of {T} rows of {m.vocab}, both ways", 8.0 * T * w.numel(), "TFLOP/s", ours, plain
    )


def _decode_rates(
    m: Machine, name: str, heads: int, kv_heads: int, D: int, dtype: torch.dtype
) -> Iterator[Row]:
    """One token of each of some sequences against their cache; bytes are those of keys and values."""
    S, L = (4, 64) if m.dry else (64, 1024)
    q, tiles = (
        m.randn(S, heads, D, dtype=dtype),
        m.randn(S * L // KEY_TILE * kv_heads, 2, KEY_TILE, D, dtype=dtype),
    )
    plan = AttentionPlan([1] * S, [L - 1] * S, np.arange(S * L // KEY_TILE).reshape(S, -1), heads, kv_heads)
    k, v = (m.randn(S, kv_heads, L, D, dtype=dtype) for _ in range(2))
    plain = lambda: F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)
    with torch.no_grad():
        ours = lambda: attention_cached(q, tiles, plan, D**-0.5)
        yield row(
            m, f"{name} attention of {S} decoding sequences of {L}", float(tiles.nbytes), "GB/s", ours, plain
        )


def _attention_rates(
    m: Machine, name: str, heads: int, kv_heads: int, D: int, dtype: torch.dtype
) -> Iterator[Row]:
    T, L = m.tokens, m.length
    plan = varlen_plan([L] * (T // L), heads, kv_heads)
    q, k, v = (m.randn(T, h, D, dtype=dtype).requires_grad_() for h in (heads, kv_heads, kv_heads))
    do, flops = m.randn(T, heads, D, dtype=dtype), 2.0 * T * L * heads * D  # half of the scores are hidden

    def plain() -> torch.Tensor:
        batched = (x.view(T // L, L, -1, D).transpose(1, 2) for x in (q, k, v))
        return (
            F.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .reshape(T, heads, D)
        )

    def ours() -> torch.Tensor:
        return attention(q, k, v, plan, D**-0.5)

    with torch.no_grad():
        yield row(m, f"{name} attention", flops, "TFLOP/s", ours, plain)
    for_grad = [f() for f in (ours, plain)]
    back = [lambda o=o: torch.autograd.grad(o, (q, k, v), do, retain_graph=True) for o in for_grad]
    yield row(m, f"{name} attention backward", 2.5 * flops, "TFLOP/s", *back)


def price(m: Machine, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """Forward and backward of one layer and of the whole smallest model, exact beside plain:

    ours_ms / plain_ms is the price.
    """
    from zerokl.engine.parallel.gradient import ShardSum

    first = next(iter(m.shapes))
    for name, layers, vocab in [(n, 1, 256) for n in m.shapes] + [(first, m.shapes[first][2], m.vocab)]:
        decoder = m.decoder(name, layers, vocab, dtype)
        ids = torch.randint(min(vocab, 256), (m.tokens // m.length, m.length + 1))
        batch, shard = pack([(x[:1], x[1:]) for x in ids.tolist()]), ShardSum(decoder, 1)
        weights = {n: w.detach().clone().requires_grad_() for n, w in decoder.w.items()}

        on_device = ids.to(m.device)

        def ours(decoder: Decoder = decoder, batch=batch) -> None:
            logprobs(decoder, batch, SamplingParams())[0].sum().backward()

        def plain(decoder: Decoder = decoder, weights=weights, ids=on_device) -> None:
            logits = _plain_hidden(decoder.config, weights, ids[:, :-1]) @ weights["embed"].t()
            torch.autograd.grad(
                F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()), list(weights.values())
            )

        a, b = m.time_ms(ours), m.time_ms(plain)
        what = f"{name}, {layers} layer{'s' * (layers > 1)}, vocabulary {vocab}: forward and backward of {m.tokens} tokens"
        yield {"what": what, "ours_ms": a, "plain_ms": b, "price": a / b}
        del shard


def _plain_hidden(c: ModelConfig, w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """The same model in plain torch. ids [B, L] -> [B, L, D]."""
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
    from zerokl.engine.rollout.native import NativeSampler
    from zerokl.engine.rollout.types import GenerationParams, RngKey

    first = next(iter(m.shapes))
    sampler = NativeSampler(
        m.decoder(first, m.shapes[first][2], m.vocab, dtype), max_concurrency=4 if m.dry else 64
    )
    num_generations, length = (4, 8) if m.dry else (64, 128)
    for _ in range(2):  # the first compiles
        began = time.perf_counter()
        done = sampler.generate(
            [[1, 2, 3]],
            GenerationParams(SamplingParams(), num_generations, length, frozenset()),
            RngKey(0, 0),
        )
        seconds = time.perf_counter() - began
    yield {
        "what": f"{first} decoding, {num_generations} samples",
        "tokens_per_s": sum(len(r.completion_ids) for r in done) / seconds,
    }


SECTIONS = (
    exactness,
    reinforcement,
    vllm_equality,
    kernel_rates,
    atomic_rates,
    price,
    stock_equality,
    vllm_rates,
    liger_rates,
    decoding,
)


def _line(row: Row) -> str:
    cells = [f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "what"]
    return f"{row['what']:<72} {'  '.join(cells)}"


def _about() -> dict[str, object]:
    """When and with what it was measured.

    The commit is what git says, or COMMIT where the files travelled without their history.
    """
    root = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    commit = told or os.environ.get("COMMIT", "unknown")
    return {
        "date": date.today().isoformat(),
        "commit": commit,
        "environment": environment(root, torch.device("cuda", 0), {}),
    }


def _write(about: dict[str, object], rows: list[Row], left_out: list[str], seconds: float) -> Path:
    """The results so far, in their file."""
    gpu = torch.cuda.get_device_name().replace(" ", "-").lower()
    target = Path(__file__).parent / "results" / gpu / "device.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(
        json.dumps(about | {"seconds": seconds, "left_out": left_out, "rows": rows}, indent=1) + "\n"
    )
    return target


class OutOfTime(BaseException):
    """The table is due. No Exception: what a section excepts does not catch it."""


def _out_of_time(*_: object) -> None:
    raise OutOfTime


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="toy sizes on the CPU; checks this script, measures nothing"
    )
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        print("device: torch finds no CUDA GPU here; --dry-run checks this script on a CPU", file=sys.stderr)
        return 2
    os.environ |= {
        "VLLM_BATCH_INVARIANT": "1",
        "TRITON_F32_DEFAULT": "ieee",
    }  # read as vLLM is imported; see engine/rollout/vllm/stock.py
    m, rows, left_out = Machine(args.dry_run), [], []
    about = {} if m.dry else _about()
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(END_S)
    for section in SECTIONS:
        if m.elapsed_s() > LAST_START_S:
            left_out.append(section.__name__)
            continue
        try:
            for found in section(m):
                rows.append({"section": section.__name__} | found)
                print(f"{m.elapsed_s():6.1f} s  {found['what']}", flush=True)
        except OutOfTime:
            left_out.append(f"the rest of {section.__name__}")
        except (
            Exception
        ) as error:  # it counts as unequal, and does not take the other sections' figures with it
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append(
                {"section": section.__name__, "what": f"{section.__name__} failed: {reason}", "unequal": 1}
            )
        if not args.dry_run:
            _write(about, rows, left_out, m.elapsed_s())
    signal.alarm(0)
    print("\n" + "\n".join(_line({k: v for k, v in row.items() if k != "section"}) for row in rows))
    broken = [row["what"] for row in rows if row.get("unequal")]
    seconds = m.elapsed_s()
    if args.dry_run:
        print(
            f"dry run on a CPU, toy sizes, {seconds:.0f} s: the times above say nothing about a GPU, and nothing was written"
        )
    else:
        print(
            f"wrote {_write(about, rows, left_out, seconds)}; left out for time: {', '.join(left_out) or 'nothing'}"
        )
    print(f"unequal bits in {len(broken)} rows{': ' + '; '.join(broken) if broken else ''}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
