"""vLLM's tokens and logprobs against the native sampler's and the trainer's: every token, every bit.

The random tiny Qwen3 of `zerokl init`'s preset, 64 prompts x 64 tokens a call. The references are computed in
this process, the engine runs in another, so that a fault planted there cannot hide in both.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, Rollout
from zerokl.kernels.philox import Stream, uniform_range
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.scoring import logprobs, pack

pytestmark = pytest.mark.vllm

STOP = 1
DISTRIBUTIONS = {
    "T=1": (1.0, 0, 1.0),
    "T=0.7": (0.7, 0, 1.0),
    "greedy": (0.0, 0, 1.0),
    "top-p 0.9": (1.0, 0, 0.9),
    "top-k 20": (0.9, 20, 1.0),
}
CACHES = {
    "prefix cache, chunked": {"chunked_prefill": True, "max_batch_tokens": 96, "prefix_caching": True},
    "prefix cache, whole": {"chunked_prefill": False, "prefix_caching": True},
    "no prefix cache, chunked": {"chunked_prefill": True, "max_batch_tokens": 96, "prefix_caching": False},
    "no prefix cache, blocks of 128": {
        "chunked_prefill": False,
        "prefix_caching": False,
        "block_tokens": 128,
    },
}


def _prompts(n: int = 64) -> list[list[int]]:
    """Of 3 to 80 tokens; all begin alike, so that a prefix cache has something to share."""
    rows = (uniform_range(n * 80, 5, Stream.VERIFY) * 50).astype(int).reshape(n, 80) + 5
    rows[:, :40] = rows[0, :40]
    return [row[: 3 + 77 * i // (n - 1)].tolist() for i, row in enumerate(rows)]


def _engine(
    model: Path, dtype: str, vllm: dict, calls: list[dict], prompts: list[list[int]], **request: object
) -> dict:
    text = json.dumps(
        {"model": str(model), "dtype": dtype, "vllm": vllm, "calls": calls, "prompts": prompts, **request}
    )
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_process.py"))],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("DRAWN")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0][5:])


def _call(sampling_params: tuple, updates: int = 0) -> dict:
    return {
        "distribution": sampling_params,
        "samples": 1,
        "max_tokens": 64,
        "stop_ids": [STOP],
        "key": [3, 4],
        "updates": updates,
    }


def _native(
    model: Path, dtype: str, call: dict, prompts: list[list[int]], updates: int
) -> tuple[list[Rollout], list[np.ndarray]]:
    """The native sampler's rollouts after `updates` updates of the weights, and the trainer's logprobs of
    them as integers.
    """
    decoder = load_decoder(model, getattr(torch, dtype))
    for _ in range(updates):
        decoder.flat.mul_(1.01)
    sampling_params = SamplingParams(*call["distribution"])
    rollouts = NativeSampler(decoder).generate(
        prompts, GenerationParams(sampling_params, 1, 64, frozenset({STOP})), RngKey(3, 4)
    )
    with torch.no_grad():
        packed = pack([r.pair for r in rollouts])
        scored = logprobs(decoder, packed, sampling_params)[0].split(packed.completion_lengths)
    return rollouts, [s.numpy().view(np.int32) for s in scored]


def _compare(drawn: list, expected: tuple[list[Rollout], list[np.ndarray]], version: int) -> tuple[int, int]:
    """Tokens compared and tokens that differ, in their id or in a bit of their logprob, from either
    reference.
    """
    compared = unequal = 0
    for (ids, bits, finish, of), rollout, trainer in zip(drawn, *expected, strict=True):
        assert of == version
        compared += max(len(ids), len(rollout.completion_ids))
        if tuple(ids) != rollout.completion_ids or finish != rollout.finish:
            unequal += max(len(ids), len(rollout.completion_ids))
            continue
        bits = np.array(bits, np.int32)
        unequal += int(((bits != rollout.logprobs.view(np.int32)) | (bits != trainer)).sum())
    return compared, unequal


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_token_and_logprob_is_the_trainers(model, dtype, cache):
    prompts = _prompts()
    calls = [_call(d) for d in DISTRIBUTIONS.values()]
    got = _engine(model, dtype, cache, calls, prompts)["drawn"]
    for name, call, drawn in zip(DISTRIBUTIONS, calls, got, strict=True):
        compared, unequal = _compare(drawn, _native(model, dtype, call, prompts, 0), version=0)
        assert compared > 1000, name
        assert unequal == 0, f"{name}: {unequal} of {compared} tokens differ"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_preempted_requests_too(model, dtype):
    """The cache holds about a fifth of what 64 completions need:

    vLLM stops requests and computes them again later.
    """
    prompts, call = _prompts(), _call(DISTRIBUTIONS["T=1"])
    block_bytes = (
        4 * 1 * 2 * 32 * 32 * getattr(torch, dtype).itemsize
    )  # layers, key-value heads, keys and values, positions, width
    vllm = {"cache_bytes": 60 * block_bytes, "context": 160, "engine": {"disable_log_stats": False}}
    got = _engine(model, dtype, vllm, [call], prompts, metrics=True)
    assert got["preemptions"] > 0
    compared, unequal = _compare(got["drawn"][0], _native(model, dtype, call, prompts, 0), version=0)
    assert (compared > 1000, unequal) == (True, 0)


@pytest.mark.parametrize(
    ("dtype", "multiprocess"), [("float32", False), ("bfloat16", True), ("float16", False)]
)
def test_after_twenty_weight_updates(model, dtype, multiprocess):
    prompts, call = _prompts(), _call(DISTRIBUTIONS["T=0.7"], updates=20)
    got = _engine(model, dtype, {"multiprocess": multiprocess}, [call], prompts)
    compared, unequal = _compare(got["drawn"][0], _native(model, dtype, call, prompts, 20), version=20)
    assert (compared > 1000, unequal) == (True, 0)


def test_control_a_cache_that_outlives_an_update_is_found(model):
    prompts, call = _prompts(), _call(DISTRIBUTIONS["T=1"], updates=1)
    before = _call(DISTRIBUTIONS["T=1"])
    got = _engine(model, "float32", CACHES["prefix cache, whole"], [before, call], prompts, plant="stale")
    assert _compare(got["drawn"][0], _native(model, "float32", before, prompts, 0), version=0)[1] == 0
    assert _compare(got["drawn"][1], _native(model, "float32", call, prompts, 1), version=1)[1] > 0


def test_control_another_silu_on_one_side_is_found(model):
    prompts, call = _prompts(), _call(DISTRIBUTIONS["T=1"])
    got = _engine(model, "float32", {}, [call], prompts, plant="silu")
    assert _compare(got["drawn"][0], _native(model, "float32", call, prompts, 0), version=0)[1] > 0
