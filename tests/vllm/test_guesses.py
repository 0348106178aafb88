"""With our guesses inside vLLM every token, logprob and finish is the native sampler's, whoever guesses."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers import write_letters_reward
from tests.vllm.forked import run_python
from tests.vllm.test_exact import SAMPLING_PARAMS, _prompts
from tests.vllm.test_train import _ends

pytestmark = pytest.mark.vllm

GUESSERS = ["texts", "right", "wrong", "mostly right", "hostile"]
FILTERS = SAMPLING_PARAMS["every filter"]
CASES = [
    *({"guesser": guesser} for guesser in GUESSERS),
    {"guesser": "right, and on", "patches": ["no filter"]},
    {"guesser": "mostly right", "sampling_params": FILTERS},
    {"guesser": "mostly right", "play": "noise"},
    {"guesser": "texts", "play": "three turns"},
    {"guesser": "mostly right", "play": "three turns"},
]


def _report(model: Path, dtype: str, vllm: dict, cases: list[dict]) -> dict:
    """The report of guesses_process.py."""
    # The last prompt has a block that others have too, and one more token.
    prompts = [*_prompts(7), _prompts(7)[-1][:33]]
    vllm = vllm | {"engine": {"disable_log_stats": False}}
    request = {"model": str(model), "dtype": dtype, "vllm": vllm, "cases": cases, "prompts": prompts}
    process = run_python(str(Path(__file__).with_name("guesses_process.py")), stdin=json.dumps(request))
    lines = [line for line in process.stdout.splitlines() if line.startswith("REPORT")]
    assert lines, process.stderr[-3000:]
    return json.loads(lines[0].removeprefix("REPORT"))


def _check(cases: list[dict], results: list[list[int]]) -> None:
    for case, (compared, differ, guesses, drawn) in zip(cases, results, strict=True):
        assert (compared, differ) == (16, 0), case
        assert guesses > 100, case
        if case["guesser"] in ("right", "right, and on"):
            assert drawn > 0.6 * guesses, case
        if case["guesser"] == "wrong":
            assert drawn == 0


TIGHT = {"speculate": 5, "max_batch_tokens": 24, "max_concurrency": 6, "context": 160}
DTYPES = ["bfloat16", *(pytest.param(dtype, marks=pytest.mark.full) for dtype in ("float32", "float16"))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_guesser_changes_a_bit_and_control_faults_are_seen(model, dtype):
    """Prompts are read in parts, beginnings come from the cache, and requests are stopped and begun again.

    A token that is taken and was not drawn has no log-probability, and ends the call.
    """
    # Of 9 blocks: layers, key-value heads, keys and values, positions, width.
    cache_bytes = 9 * 4 * 1 * 2 * 32 * 32 * getattr(torch, dtype).itemsize
    faults = [{"guesser": "mostly right", "patches": [fault]} for fault in ("one number", "all accepted")]
    report = _report(model, dtype, TIGHT | {"cache_bytes": cache_bytes}, CASES + faults)
    *results, (_, differ, *_), refused = report["results"]
    _check(CASES, results)
    assert differ > 8
    assert refused.endswith("are not finite, which a guess may have caused: set vllm.speculate = 0")
    metrics = report["metrics"]
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["vllm:prefix_cache_hits"] > 100
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 500


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_prompts_read_whole_without_a_cache_of_prefixes_too(model, dtype):
    vllm = {"speculate": 3, "chunked_prefill": False, "prefix_caching": False, "block_tokens": 128}
    _check(CASES, _report(model, dtype, vllm, CASES)["results"])


def test_experts_of_refused_guesses_are_not_named(moe):
    cases = [
        {"guesser": guesser, "play": play, "experts": True}
        for guesser in ("mostly right", "hostile")
        for play in ("one turn", "three turns")
    ]
    _check(cases, _report(moe, "float32", TIGHT, cases)["results"])


@pytest.mark.full
def test_a_run_in_two_processes_has_the_native_fingerprint(model, tmp_path):
    """And its metrics say what became of the guesses. Each prompt comes back after two steps."""
    write_letters_reward(tmp_path)
    words = [
        *("--model", str(model), "--task.name", "add", "--task.reward", "letters_reward:reward"),
        *("--task.directory", str(tmp_path), "--task.options", "{ max_value = 3, train = 8, held_out = 4 }"),
        *("--steps", "3", "--prompts", "4", "--num_generations", "4", "--optimizer.lr", "1e-3"),
        *("--sampling.max_tokens", "24", "--sampling.temperature", "0.3", "--evaluation.every", "0"),
    ]
    guessing = ("--sampler", "vllm-zerokl", "--vllm.speculate", "4", "--vllm.multiprocess", "true")
    assert _ends(tmp_path / "vllm", *words, *guessing) == _ends(tmp_path / "native", *words)
    *_, last = (tmp_path / "vllm" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(last)
    assert metrics["perf/tokens_per_turn"] > 1
    assert 0 < metrics["perf/guesses_drawn"] <= 1
