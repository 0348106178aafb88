"""With our guesses inside vLLM every token, logprob and finish is the native sampler's, whoever guesses."""

import json
from pathlib import Path

import pytest
import torch

from tests.vllm.forked import run_python
from tests.vllm.test_exact import SAMPLING_PARAMS, _prompts

pytestmark = pytest.mark.vllm

GUESSERS = ["texts", "right", "wrong", "mostly right", "hostile", "unfiltered"]
FILTERS = SAMPLING_PARAMS["every filter"]
CASES = [
    *({"guesser": guesser} for guesser in GUESSERS),
    {"guesser": "mostly right", "sampling_params": FILTERS},
    {"guesser": "mostly right", "play": "noise"},
    {"guesser": "texts", "play": "three turns"},
    {"guesser": "mostly right", "play": "three turns"},
]


def _report(model: Path, dtype: str, vllm: dict, cases: list[dict], plant: str = "") -> dict:
    """The report of guesses_process.py; each result beside its case."""
    vllm = vllm | {"engine": {"disable_log_stats": False}}
    request = {"model": str(model), "dtype": dtype, "vllm": vllm, "cases": cases, "plant": plant}
    # The last one has a block that others have too, and one more token.
    request["prompts"] = [*_prompts(7), _prompts(7)[-1][:33]]
    process = run_python(str(Path(__file__).with_name("guesses_process.py")), stdin=json.dumps(request))
    lines = [line for line in process.stdout.splitlines() if line.startswith("REPORT")]
    assert lines, process.stderr[-3000:]
    return json.loads(lines[0].removeprefix("REPORT"))


def _check(cases: list[dict], report: dict) -> None:
    for case, (compared, differ, guesses, drawn) in zip(cases, report["results"], strict=True):
        assert (compared, differ) == (16, 0), case
        assert guesses > 100, case
        if case["guesser"] in ("right", "unfiltered"):
            assert drawn > 0.6 * guesses, case
        if case["guesser"] == "wrong":
            assert drawn == 0


TIGHT = {"speculate": 5, "max_batch_tokens": 24, "max_concurrency": 6, "context": 160}
DTYPES = ["bfloat16", *(pytest.param(dtype, marks=pytest.mark.full) for dtype in ("float32", "float16"))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_guesser_changes_a_bit(model, dtype):
    """Prompts are read in parts, beginnings come from the cache, and requests are stopped and begun again."""
    # Of 9 blocks: layers, key-value heads, keys and values, positions, width.
    cache_bytes = 9 * 4 * 1 * 2 * 32 * 32 * getattr(torch, dtype).itemsize
    report = _report(model, dtype, TIGHT | {"cache_bytes": cache_bytes}, CASES)
    _check(CASES, report)
    metrics = report["metrics"]
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["vllm:prefix_cache_hits"] > 100
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 500


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_prompts_read_whole_without_a_cache_of_prefixes_too(model, dtype):
    vllm = {"speculate": 3, "chunked_prefill": False, "prefix_caching": False, "block_tokens": 128}
    _check(CASES, _report(model, dtype, vllm, CASES))


def test_experts_of_refused_guesses_are_not_named(moe):
    cases = [
        {"guesser": guesser, "play": play, "experts": True}
        for guesser in ("mostly right", "hostile")
        for play in ("one turn", "three turns")
    ]
    _check(cases, _report(moe, "float32", TIGHT, cases))


@pytest.mark.parametrize("plant", ["one number", "accept all"])
def test_control_a_fault_is_seen(model, plant):
    """A token that is taken and was not drawn has no log-probability, and ends the call."""
    request = model, "float32", TIGHT, [{"guesser": "mostly right"}], plant
    if plant == "one number":
        ((compared, differ, *_),) = _report(*request)["results"]
        assert differ > compared / 2
    else:
        with pytest.raises(AssertionError, match=r"FloatingPointError: .* set vllm\.speculate = 0"):
            _report(*request)
