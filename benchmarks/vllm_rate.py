"""Tokens per second of vLLM with zerokl inside beside stock vLLM, same model, same requests, both in one run.

    .venv-vllm/bin/python benchmarks/vllm_rate.py [--model FOLDER]

64 requests x 64 new tokens, temperature 1, logprobs of the drawn tokens. Each engine is a process of its own; the two alternate, and
the ratio is taken round by round. Results go to benchmarks/results/cpu/vllm_rate.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PROMPTS, SAMPLES, NEW_TOKENS, PROMPT_TOKENS = 8, 8, 64, 16
MAX_SEQS, BATCH_TOKENS, CACHE_BYTES = 64, 2048, 1 << 29


def prompts() -> list[list[int]]:
    """Token ids that no two prompts share as a prefix."""
    return [[20 + (7 * i + 3 * j) % 90 for j in range(PROMPT_TOKENS)] for i in range(PROMPTS)]


def zerokl_calls(model: Path, dtype: str):
    """One call draws all tokens."""
    import torch
    from zerokl.engine.config import VllmConfig
    from zerokl.engine.rollout import Keys, Sampling
    from zerokl.engine.shared import SharedTensor
    from zerokl.engine.vllm.sampler import VllmSampler
    from zerokl.kernels.logprob import Distribution
    from zerokl.model.checkpoint import load_decoder

    decoder = load_decoder(model, getattr(torch, dtype))
    weights = SharedTensor(decoder.layout.numel, decoder.dtype)
    decoder.move_to(weights.tensor)
    cfg = VllmConfig(max_concurrency=MAX_SEQS, max_batch_tokens=BATCH_TOKENS, cache_bytes=CACHE_BYTES)
    sampler = VllmSampler(model, decoder.config, weights, cfg)
    sampling = Sampling(Distribution(), SAMPLES, NEW_TOKENS, frozenset())
    return lambda i: sum(len(r.completion_ids) for r in sampler.generate(prompts(), sampling, Keys(0, i)))


def stock_calls(model: Path, dtype: str):
    """The same of vLLM's own model, attention and sampler."""
    from zerokl.engine.vllm.sampler import prepare_vllm

    prepare_vllm(multiprocess=False)
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        model=str(model), dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, logprobs_mode="processed_logprobs",
        disable_log_stats=True, max_num_seqs=MAX_SEQS, max_num_batched_tokens=BATCH_TOKENS, kv_cache_memory_bytes=CACHE_BYTES,
    )  # fmt: skip
    params = SamplingParams(
        temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False, flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    ids = [{"prompt_token_ids": p} for p in prompts() for _ in range(SAMPLES)]
    return lambda i: sum(len(o.outputs[0].token_ids) for o in llm.generate(ids, params, use_tqdm=False))


SIDES = {"zerokl": zerokl_calls, "stock": stock_calls}


def rates(side: str, model: Path, dtype: str, calls: int) -> list[float]:
    """Tokens per second of each call, after two that are dropped."""
    call = SIDES[side](model, dtype)
    done = []
    for i in range(calls + 2):
        began = time.perf_counter()
        tokens = call(i)
        done.append(tokens / (time.perf_counter() - began))
        assert tokens == PROMPTS * SAMPLES * NEW_TOKENS
    return done[2:]


def main() -> None:
    """Alternate the sides and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder; the model of bench_step.py by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--out", default=str(HERE / "results" / "cpu" / "vllm_rate.json"))
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)  # this process is one side: SIDE DTYPE MODEL
    args = parser.parse_args()
    if args.side:
        side, dtype, model = args.side
        print("RATES", json.dumps(rates(side, Path(model), dtype, args.calls)), flush=True)
        os._exit(0)  # vLLM's own shutdown waits for seconds
    result = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or str(Path(scratch) / "model")
        if not args.model:
            from bench_step import make_model

            make_model(Path(model))
        for dtype in ("float32", "bfloat16"):
            rounds = [{side: statistics.median(run(side, dtype, model, args.calls)) for side in SIDES} for _ in range(args.rounds)]
            ratio = statistics.median(r["zerokl"] / r["stock"] for r in rounds)
            middle = {side: statistics.median(r[side] for r in rounds) for side in SIDES}
            result[dtype] = {"rounds": rounds, "ratio": ratio}
            print(f"{dtype}: zerokl {middle['zerokl']:.0f} tokens/s, stock vLLM {middle['stock']:.0f}, ratio {ratio:.2f}", flush=True)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


def run(side: str, dtype: str, model: str, calls: int) -> list[float]:
    """One side in a process of its own."""
    words = [sys.executable, __file__, "--calls", str(calls), "--side", side, dtype, model]
    out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return json.loads(next(line for line in out.splitlines() if line.startswith("RATES"))[6:])


if __name__ == "__main__":
    main()
