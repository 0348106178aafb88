"""Exactness and rates on a GPU. device.sh runs it.

The sections run in order of importance. A section that would begin after LAST_START_S is left out. What is
left at END_S is left out, too. Both are named. Plain torch (cuBLAS, scaled_dot_product_attention) runs beside
each kernel. All inputs are random.

Exactness:

- the law, on a model with the widths of Qwen3-0.6B and two layers;
- 20 steps of policy gradient, in which every trainer logprob must be the sampler's bit for bit, twice with
  one fingerprint;
- vLLM's kernels, where its files are on the path;
- vLLM's own model with the trainer beside it, where vLLM is installed.

Rates:

- kernels at the shapes of three models;
- the attention's backward beside a backward with atomics;
- forward and backward of one layer and of the whole 0.6B model (the price of exactness);
- decoding;
- vLLM's kernels and Liger-Kernel's, where they can be imported.
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
    """Each kernel beside plain torch. Beside an elementwise kernel, plain is a copy of as many bytes."""
    for name, (D, inner, _, heads, kv_heads, head_dim) in m.shapes.items():
        yield from _linear_rates(m, name, D, 2 * inner, dtype)
        yield from _attention_rates(m, name, heads, kv_heads, head_dim, dtype)
        yield from _decode_rates(m, name, heads, kv_heads, head_dim, dtype)
        yield from _row_rates(m, name, D, inner, heads + kv_heads, head_dim, dtype)
        yield from _logprob_rates(m, name, D, dtype)


def _linear_rates(m: Machine, name: str, K: int, N: int, dtype: torch.dtype) -> Iterator[Row]:
    T, w = m.tokens, m.randn(N, K, dtype=dtype, scale=K**-0.5)
    x, dy = m.randn(T, K, dtype=dtype), m.randn(T, N, dtype=dtype)
    acc, blocks = torch.zeros(w.shape, device=m.device), order.token_blocks([T])
    few, flops = x[:16].clone(), 2.0 * w.numel()
    calls = {
        "linear, 16 rows": (16, lambda: matmul.matmul(few, w), lambda: F.linear(few, w)),
        f"linear, {T} rows": (T, lambda: matmul.matmul(x, w), lambda: F.linear(x, w)),
        "input gradient": (T, lambda: matmul.matmul(dy, w.t()), lambda: dy @ w),
        "weight gradient": (T, lambda: matmul.add_outer(acc, dy, x, blocks), lambda: dy.t() @ x),
    }
    for what, (rows, ours, plain) in calls.items():
        yield row(m, f"{name} {what}", flops * rows, "TFLOP/s", ours, plain)


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
    y, z = rms_norm(x, w, 1e-6), silu_mul(gu)
    dy, dz = m.randn(T, D, dtype=dtype), m.randn(T, inner, dtype=dtype)

    def norm_backward() -> object:
        return torch.autograd.grad(y, (x, w), dy, retain_graph=True)

    def silu_backward() -> object:
        return torch.autograd.grad(z, gu, dz, retain_graph=True)

    yield _beside_copy(m, f"{name} rms_norm backward", 3.0 * x.nbytes, norm_backward)
    yield _beside_copy(m, f"{name} silu_mul backward", 2.5 * gu.nbytes, silu_backward)


def _beside_copy(m: Machine, what: str, nbytes: float, run: Callable[[], object]) -> Row:
    """A kernel that reads and writes `nbytes`, beside a copy that reads and writes as many."""
    source = torch.zeros(int(nbytes) // 2, dtype=torch.uint8, device=m.device)
    target = torch.empty_like(source)
    return row(m, what, nbytes, "GB/s", run, lambda: target.copy_(source))


def _logprob_rates(m: Machine, name: str, D: int, dtype: torch.dtype) -> Iterator[Row]:
    """The lm_head with the log-softmax, forward and backward.

    It takes four products with the weight, as the backward computes the logits again.
    """
    T = m.tokens // 4
    h = m.randn(T, D, dtype=dtype).requires_grad_()
    w = m.randn(m.vocab, D, dtype=dtype, scale=D**-0.5).requires_grad_()
    ids = torch.arange(T, device=m.device) % m.vocab

    def ours() -> object:
        return torch.autograd.grad(linear_logprob(h, w, ids)[0].sum(), (h, w))

    def plain() -> object:
        loss = F.cross_entropy(F.linear(h, w).float(), ids, reduction="sum")
        return torch.autograd.grad(loss, (h, w))

    what = f"{name} logprobs of {T} rows of {m.vocab}, both ways"
    yield row(m, what, 8.0 * T * w.numel(), "TFLOP/s", ours, plain)


def _decode_rates(
    m: Machine, name: str, heads: int, kv_heads: int, D: int, dtype: torch.dtype
) -> Iterator[Row]:
    """One token of each of S sequences against their cache; the bytes are those of keys and values."""
    S, L = (4, 64) if m.dry else (64, 1024)
    blocks = S * L // KEY_TILE
    q = m.randn(S, heads, D, dtype=dtype)
    tiles = m.randn(blocks * kv_heads, 2, KEY_TILE, D, dtype=dtype)
    plan = AttentionPlan([1] * S, [L - 1] * S, np.arange(blocks).reshape(S, -1), heads, kv_heads)
    k, v = (m.randn(S, kv_heads, L, D, dtype=dtype) for _ in range(2))

    def ours() -> torch.Tensor:
        return attention_cached(q, tiles, plan, D**-0.5)

    def plain() -> torch.Tensor:
        return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)

    what = f"{name} attention of {S} decoding sequences of {L}"
    with torch.no_grad():
        yield row(m, what, float(tiles.nbytes), "GB/s", ours, plain)


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
    outputs = ours(), plain()
    backwards = [lambda o=o: torch.autograd.grad(o, (q, k, v), do, retain_graph=True) for o in outputs]
    yield row(m, f"{name} attention backward", 2.5 * flops, "TFLOP/s", *backwards)


def price(m: Machine, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """Forward and backward of one layer, and of the whole smallest model, exact beside plain.

    ours_ms / plain_ms is the price.
    """
    from zerokl.engine.parallel.gradient import ShardSum

    first = next(iter(m.shapes))
    for name, layers, vocab in [(n, 1, 256) for n in m.shapes] + [(first, m.shapes[first][2], m.vocab)]:
        decoder = m.decoder(name, layers, vocab, dtype)
        ids = torch.randint(min(vocab, 256), (m.tokens // m.length, m.length + 1))
        batch = pack([(x[:1], x[1:]) for x in ids.tolist()])
        ShardSum(decoder, 1)  # gives the weights their gradient buffers
        weights = {n: w.detach().clone().requires_grad_() for n, w in decoder.w.items()}
        on_device = ids.to(m.device)

        def ours(decoder: Decoder = decoder, batch=batch) -> None:
            logprobs(decoder, batch, SamplingParams())[0].sum().backward()

        def plain(decoder: Decoder = decoder, weights=weights, ids=on_device) -> None:
            logits = _plain_hidden(decoder.config, weights, ids[:, :-1]) @ weights["embed"].t()
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            torch.autograd.grad(loss, list(weights.values()))

        ours_ms, plain_ms = m.time_ms(ours), m.time_ms(plain)
        model = f"{name}, {layers} layer{'s' * (layers > 1)}, vocabulary {vocab}"
        yield {
            "what": f"{model}: forward and backward of {m.tokens} tokens",
            "ours_ms": ours_ms,
            "plain_ms": plain_ms,
            "price": ours_ms / plain_ms,
        }


def _plain_hidden(c: ModelConfig, w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
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


def decoding(m: Machine, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """Tokens a second of the native sampler, with the whole smallest model."""
    from zerokl.engine.rollout.native import NativeSampler
    from zerokl.engine.rollout.types import GenerationParams, RngKey

    first = next(iter(m.shapes))
    decoder = m.decoder(first, m.shapes[first][2], m.vocab, dtype)
    num_generations, length = (4, 8) if m.dry else (64, 128)
    sampler = NativeSampler(decoder, max_concurrency=num_generations)
    generation_params = GenerationParams(SamplingParams(), num_generations, length, frozenset())
    for _ in range(2):  # the first call compiles
        began = time.perf_counter()
        rollouts = sampler.generate([[1, 2, 3]], generation_params, RngKey(0, 0))
        seconds = time.perf_counter() - began
    yield {
        "what": f"{first} decoding, {num_generations} samples",
        "tokens_per_s": sum(len(r.completion_ids) for r in rollouts) / seconds,
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
    """The date, the commit and the environment of the measurement.

    The commit is git's answer, or the variable COMMIT where the files are without their history.
    """
    root = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    description = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    commit = description or os.environ.get("COMMIT", "unknown")
    return {
        "date": date.today().isoformat(),
        "commit": commit,
        "environment": environment(root, torch.device("cuda", 0), {}),
    }


def _write(about: dict[str, object], rows: list[Row], left_out: list[str], seconds: float) -> Path:
    """Write the results so far to their file. Returns its path."""
    gpu = torch.cuda.get_device_name().replace(" ", "-").lower()
    target = Path(__file__).parent / "results" / gpu / "device.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(
        json.dumps(about | {"seconds": seconds, "left_out": left_out, "rows": rows}, indent=1) + "\n"
    )
    return target


class OutOfTime(BaseException):
    """The table is due. It is no Exception, so that no `except` of a section catches it."""


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
    # vLLM reads them when it is imported; see engine/rollout/vllm/stock.py.
    os.environ |= {"VLLM_BATCH_INVARIANT": "1", "TRITON_F32_DEFAULT": "ieee"}
    m = Machine(args.dry_run)
    about = {} if m.dry else _about()
    rows, left_out = _run_sections(m, about)
    print("\n" + "\n".join(_line({k: v for k, v in row.items() if k != "section"}) for row in rows))
    broken = [row["what"] for row in rows if row.get("unequal")]
    seconds = m.elapsed_s()
    if args.dry_run:
        print(
            f"dry run on a CPU, toy sizes, {seconds:.0f} s: "
            "the times above say nothing about a GPU, and nothing was written"
        )
    else:
        path = _write(about, rows, left_out, seconds)
        print(f"wrote {path}; left out for time: {', '.join(left_out) or 'nothing'}")
    print(f"unequal bits in {len(broken)} rows{': ' + '; '.join(broken) if broken else ''}")
    return 1 if broken else 0


def _run_sections(m: Machine, about: dict[str, object]) -> tuple[list[Row], list[str]]:
    """Run the sections until the time is over. Returns their rows, and the names of what was left out."""
    rows: list[Row] = []
    left_out: list[str] = []
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(END_S)
    for section in SECTIONS:
        if m.elapsed_s() > LAST_START_S:
            left_out.append(section.__name__)
            continue
        try:
            for result in section(m):
                rows.append({"section": section.__name__} | result)
                print(f"{m.elapsed_s():6.1f} s  {result['what']}", flush=True)
        except OutOfTime:
            left_out.append(f"the rest of {section.__name__}")
        except Exception as error:  # it counts as unequal, and the figures of the other sections are kept
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append(
                {"section": section.__name__, "what": f"{section.__name__} failed: {reason}", "unequal": 1}
            )
        if not m.dry:
            _write(about, rows, left_out, m.elapsed_s())
    signal.alarm(0)
    return rows, left_out


if __name__ == "__main__":
    sys.exit(main())
