"""vLLM's tokens and logprobs are those of the native sampler and the trainer: every token, every bit.

The model is the random tiny Qwen3 of `zerokl init`'s preset. A call has 40 or 64 prompts and 64 tokens each.
The references are computed in this process, and the engine runs in another. So a fault that is planted in
the engine cannot hide in both.
"""

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, Rollout, complete
from zerokl.kernels.philox import Stream, uniform_range
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.scoring import logprobs, pack

from tests.trajectories import in_three_turns
from tests.vllm.forked import run_python

pytestmark = pytest.mark.vllm

STOP, BLOCK_TOKENS = 1, 32
# Temperature, top_k and top_p, and for all filters min_p, the bias and the allowed tokens.
SAMPLING_PARAMS = {
    "T=1": (1.0, 0, 1.0),
    "T=0.7": (0.7, 0, 1.0),
    "greedy": (0.0, 0, 1.0),
    "top-p 0.9": (1.0, 0, 0.9),
    "top-k 20": (0.9, 20, 1.0),
    "every filter": (0.9, 30, 0.97, 0.02, ((9, 2.0), (20, -1.5)), tuple(range(1, 60, 2))),
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
    """Prompts of 3 to 80 tokens. All begin alike, so that a prefix cache has something to share."""
    rows = (uniform_range(n * 80, 5, Stream.VERIFY) * 50).astype(int).reshape(n, 80) + 5
    rows[:, :40] = rows[0, :40]
    return [row[: 3 + 77 * i // (n - 1)].tolist() for i, row in enumerate(rows)]


def _engine(
    model: Path, dtype: str, vllm: dict, calls: list[dict], prompts: list[list[int]], **request: object
) -> dict:
    """The report of engine_process.py for this request."""
    request |= {"model": str(model), "dtype": dtype, "vllm": vllm, "calls": calls, "prompts": prompts}
    process = run_python(str(Path(__file__).with_name("engine_process.py")), stdin=json.dumps(request))
    lines = [line for line in process.stdout.splitlines() if line.startswith("REPORT")]
    assert lines, process.stderr[-3000:]
    return json.loads(lines[0].removeprefix("REPORT"))


def _call(sampling_params: tuple, updates: int = 0) -> dict:
    return {
        "sampling_params": sampling_params,
        "num_generations": 1,
        "max_tokens": 64,
        "stop_ids": [STOP],
        "key": [3, 4],
        "updates": updates,
    }


def _native(
    model: Path, dtype: str, call: dict, prompts: list[list[int]], updates: int
) -> tuple[list[Rollout], list[np.ndarray]]:
    """The native sampler's rollouts after `updates` updates of the weights, and the trainer's logprobs.

    The logprobs are those of the rollouts' tokens, as integers.
    """
    decoder = load_decoder(model, getattr(torch, dtype))
    for _ in range(updates):
        decoder.flat.mul_(1.01)
    sampling_params = SamplingParams.of(*call["sampling_params"])
    generation_params = GenerationParams(
        sampling_params, 1, call["max_tokens"], frozenset({STOP}), experts=call.get("experts", False)
    )
    draw = in_three_turns if call.get("turns") else complete
    rollouts = draw(NativeSampler(decoder), prompts, generation_params, RngKey(3, 4))
    with torch.no_grad():
        packed = pack([r.pair for r in rollouts], masks=[r.mask for r in rollouts])
        scored = logprobs(decoder, packed, sampling_params)[0].split(packed.drawn_lengths)
    return rollouts, [s.numpy().view(np.int32) for s in scored]


@cache
def _native_of_40(model: Path, dtype: str, name: str) -> tuple[list[Rollout], list[np.ndarray]]:
    """That of 40 prompts with one of SAMPLING_PARAMS; every cache of vLLM is compared with it."""
    return _native(model, dtype, _call(SAMPLING_PARAMS[name]), _prompts(40), 0)


def _compare(drawn: list, expected: tuple[list[Rollout], list[np.ndarray]], version: int) -> tuple[int, int]:
    """The number of tokens compared, and the number of unequal tokens.

    A token is unequal if its id, or a bit of its logprob, differs from either reference.
    """
    compared = unequal = 0
    for (ids, bits, finish, weight_version), rollout, trainer in zip(drawn, *expected, strict=True):
        assert weight_version == version
        tokens = max(len(ids), len(rollout.drawn_ids))
        compared += tokens
        if tuple(ids) != rollout.drawn_ids or finish != rollout.finish:
            unequal += tokens
            continue
        bits = np.array(bits, np.int32)
        unequal += int(((bits != rollout.logprobs.view(np.int32)) | (bits != trainer)).sum())
    return compared, unequal


DTYPES = [pytest.param("float32", marks=pytest.mark.full), "bfloat16", "float16"]


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_token_and_logprob_is_the_trainers(model, dtype, cache):
    calls = [_call(sampling_params) for sampling_params in SAMPLING_PARAMS.values()]
    report = _engine(model, dtype, cache, calls, _prompts(40))
    for name, drawn in zip(SAMPLING_PARAMS, report["drawn"], strict=True):
        compared, unequal = _compare(drawn, _native_of_40(model, dtype, name), version=0)
        assert compared > 1000, name
        assert unequal == 0, f"{name}: {unequal} of {compared} tokens differ"


@pytest.mark.parametrize("cache", ["prefix cache, chunked", "no prefix cache, chunked"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_three_turns_too(model, dtype, cache):
    """A turn goes on from what vLLM has cached of the turns before, or reads it again."""
    prompts, call = _prompts(), _call(SAMPLING_PARAMS["T=0.7"]) | {"max_tokens": 20}
    calls = [call | {"turns": when} for when in ("together", "at any time")]
    report = _engine(model, dtype, CACHES[cache], calls, prompts)
    expected = _native(model, dtype, calls[0], prompts, 0)
    for drawn in report["drawn"]:
        compared, unequal = _compare(drawn, expected, version=0)
        assert (compared > 1000, unequal) == (True, 0)


@pytest.mark.parametrize(
    ("dtype", "multiprocess"),
    [("bfloat16", True), *(pytest.param(x, False, marks=pytest.mark.full) for x in ("float32", "float16"))],
)
def test_a_mixture_of_experts_too(moe, dtype, multiprocess):
    """Before and after updates of its weights, and the experts of every row: also of rows that were cached,
    and of requests that vLLM stopped and computed again.
    """
    prompts = _prompts()
    calls = [
        _call(SAMPLING_PARAMS["T=1"]),
        _call(SAMPLING_PARAMS["top-p 0.9"], updates=2) | {"experts": True},
        _call(SAMPLING_PARAMS["T=1"]) | {"experts": True, "turns": "at any time", "max_tokens": 20},
    ]
    # Layers, key-value heads, keys and values, positions, width.
    block_bytes = 2 * 2 * 2 * 32 * 32 * getattr(torch, dtype).itemsize
    small = {"cache_bytes": 90 * block_bytes, "context": 200} if multiprocess else {}
    vllm = CACHES["prefix cache, chunked"] | {"multiprocess": multiprocess} | small
    report = _engine(moe, dtype, vllm, calls, prompts)
    for version, call, drawn in zip((0, 2, 2), calls, report["drawn"], strict=True):
        rollouts, scores = _native(moe, dtype, call, prompts, version)
        experts = [rest for *_, rest in drawn if call.get("experts")]
        compared, unequal = _compare([row[:4] for row in drawn], (rollouts, scores), version)
        assert (compared > 1000, unequal) == (True, 0)
        assert experts == [r.experts.tolist() for r in rollouts if call.get("experts")]


def test_control_another_rule_for_ties_of_experts_is_found(moe, tmp_path):
    """Of experts whose routers are equal, vLLM's side chooses the later one."""
    tied = shutil.copytree(moe, tmp_path / "tied")
    weights = load_file(tied / "model.safetensors")
    router = weights["model.layers.1.mlp.gate.weight"]
    router.copy_(router[[0, 0, 0, 3, 3, 3]])
    save_file(weights, tied / "model.safetensors", metadata={"format": "pt"})
    prompts, call = _prompts(), _call(SAMPLING_PARAMS["T=1"])
    unequal = []
    for plant in (None, "ties"):
        (drawn,) = _engine(tied, "float32", {}, [call], prompts, plant=plant)["drawn"]
        unequal.append(_compare(drawn, _native(tied, "float32", call, prompts, 0), version=0)[1])
    assert (unequal[0], unequal[1] > 0) == (0, True)


def _full(tokens: int) -> int:
    """Of so many tokens, those in full blocks."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("caching", [True, False])
def test_a_turn_goes_on_from_vllms_cache_and_no_block_outlives_an_update(model, caching):
    """By vLLM's own counter: all full blocks of the turns before, and none of older weights.

    An update draws 4 tokens for two prompts (engine_process.py), so these are cached with the new weights.
    """
    prompts = [[5 + i, *ids[1:]] for i, ids in enumerate(_prompts(24))]  # no two begin alike
    calls = [
        _call(SAMPLING_PARAMS["T=0.7"], updates) | {"turns": "together", "max_tokens": 20}
        for updates in (0, 1)
    ]
    vllm = {"prefix_caching": caching, "block_tokens": BLOCK_TOKENS, "engine": {"disable_log_stats": False}}
    report = _engine(model, "float32", vllm, calls, prompts, metrics=True)
    hits = [0, *(metrics["vllm:prefix_cache_hits"] for metrics in report["metrics"])]
    for updates, (call, drawn) in enumerate(zip(calls, report["drawn"], strict=True)):
        expected = _native(model, "float32", call, prompts, updates)
        assert _compare(drawn, expected, version=updates)[1] == 0
        # The keys of the last token of a turn are not there.
        before = [
            start - n - 1 for r in expected[0] for start, n in zip(r.turn_starts[1:], (3, 1), strict=True)
        ]
        again = sum(_full(len(ids) - 1) for ids in prompts[:2]) if updates else 0
        assert hits[updates + 1] - hits[updates] == (sum(map(_full, before)) + again if caching else 0)


@pytest.mark.parametrize(
    "dtype", ["float16", *(pytest.param(x, marks=pytest.mark.full) for x in ("float32", "bfloat16"))]
)
def test_preempted_requests_too(model, dtype):
    """The cache holds about a fifth of what 64 completions need.

    So vLLM stops requests, and computes them again later.
    """
    prompts, call = _prompts(), _call(SAMPLING_PARAMS["T=1"])
    # Layers, key-value heads, keys and values, positions, width.
    block_bytes = 4 * 1 * 2 * 32 * 32 * getattr(torch, dtype).itemsize
    vllm = {"cache_bytes": 60 * block_bytes, "context": 160, "engine": {"disable_log_stats": False}}
    report = _engine(model, dtype, vllm, [call], prompts, metrics=True)
    assert report["metrics"][0]["vllm:num_preemptions"] > 0
    compared, unequal = _compare(report["drawn"][0], _native(model, dtype, call, prompts, 0), version=0)
    assert (compared > 1000, unequal) == (True, 0)


@pytest.mark.parametrize(
    ("dtype", "multiprocess"),
    [("bfloat16", True), *(pytest.param(x, False, marks=pytest.mark.full) for x in ("float32", "float16"))],
)
def test_after_twenty_weight_updates(model, dtype, multiprocess):
    prompts, call = _prompts(), _call(SAMPLING_PARAMS["T=0.7"], updates=20)
    report = _engine(model, dtype, {"multiprocess": multiprocess}, [call], prompts)
    compared, unequal = _compare(report["drawn"][0], _native(model, dtype, call, prompts, 20), version=20)
    assert (compared > 1000, unequal) == (True, 0)


def test_control_a_cache_that_outlives_an_update_is_found(model):
    prompts, call = _prompts(), _call(SAMPLING_PARAMS["T=1"], updates=1)
    before = _call(SAMPLING_PARAMS["T=1"])
    cache = CACHES["prefix cache, whole"]
    first, second = _engine(model, "float32", cache, [before, call], prompts, plant="stale")["drawn"]
    assert _compare(first, _native(model, "float32", before, prompts, 0), version=0)[1] == 0
    assert _compare(second, _native(model, "float32", call, prompts, 1), version=1)[1] > 0


def test_control_another_silu_on_one_side_is_found(model):
    prompts, call = _prompts(), _call(SAMPLING_PARAMS["T=1"])
    (drawn,) = _engine(model, "float32", {}, [call], prompts, plant="silu")["drawn"]
    assert _compare(drawn, _native(model, "float32", call, prompts, 0), version=0)[1] > 0
