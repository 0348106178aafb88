"""The filters, together and alone, give the logits that vLLM's own sampler draws from, to the bit."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from zerokl.kernels.sampling_params import SamplingParams

from tests.vllm.forked import run_python

pytestmark = pytest.mark.vllm

BIAS = {3: 5.0, 40: -2.5, 41: 2.5, 900: 0.1}
# Every combination of six filters that are on or off, at two temperatures; and two greedy ones.
PARAMS = [
    SamplingParams.of(temperature, top_k, top_p, min_p, bias, allowed)
    for temperature, top_k, top_p, min_p, bias, allowed in product(
        (1.0, 0.7), (0, 50), (1.0, 0.9), (0.0, 0.03), ({}, BIAS), (None, range(0, 997, 3))
    )
] + [SamplingParams.of(0.0, logit_bias=BIAS), SamplingParams.of(0.0, allowed_token_ids=(5, 900))]


def unequal(vllm_params: list[SamplingParams], ours: list[SamplingParams]) -> list[int]:
    """Unequal elements for each of the parameters."""
    script = str(Path(__file__).with_name("filters_process.py"))
    process = run_python(script, stdin=json.dumps([vllm_params, ours]))
    lines = [line for line in process.stdout.splitlines() if line.startswith("REPORT")]
    assert lines, process.stderr[-3000:]
    report = json.loads(lines[0].removeprefix("REPORT"))
    assert report["shape"] == [8 * len(ours), 997]
    return report["unequal"]


def test_the_filtered_logits_have_the_bits_of_vllms_sampler():
    counts = unequal(PARAMS, PARAMS)
    assert len(counts) == 2**6 + 2
    assert [params for params, count in zip(PARAMS, counts, strict=True) if count] == []


def test_control_a_filter_that_is_left_out_is_found():
    """One filter at a time is left out of ours: all of the parameters that have it differ."""
    off: dict[str, Any] = {
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "logit_bias": (),
        "allowed_token_ids": None,
    }
    everything = SamplingParams.of(0.7, 50, 0.9, 0.03, BIAS, range(0, 997, 3))
    alone = [SamplingParams(0.7)._replace(**{name: getattr(everything, name)}) for name in off]
    assert all(count > 0 for count in unequal(alone, [SamplingParams(0.7)] * len(off)))
