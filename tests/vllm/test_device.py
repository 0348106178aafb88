"""The parts of benchmarks/device.sh that need vLLM, with toy sizes on a CPU."""

import re

import pytest

from tests.benchmarks.test_device import SMALL, run_device

pytestmark = pytest.mark.vllm


@pytest.mark.full
def test_vllm_samples_beside_zerokl():
    process = run_device("vllm-runs", *SMALL)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    for dtype in ("bf16", "fp16", "fp32"):
        assert (
            f"sampler vllm-zerokl {dtype} eager: weights that are not the native sampler's" in process.stdout
        )
        assert re.search(rf"vLLM's own model {dtype}, weights 1: .* differ \d+", process.stdout)
    assert process.stdout.splitlines()[-1] == "vllm-runs: no result in 0 rows"


@pytest.mark.full
def test_vllms_operations_are_compared():
    process = run_device("vllm", *SMALL)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    for dtype in ("bf16", "fp16", "fp32"):
        assert f"vLLM's rotary_embedding {dtype} toy" in process.stdout
    assert process.stdout.splitlines()[-1] == "vllm: no result in 0 rows"


@pytest.mark.parametrize(
    ("part", "engines"),
    [
        ("decode", ["zerokl, native sampler", "zerokl inside vLLM"]),
        ("decode-vllm", ["vLLM as it comes, eager"]),
    ],
)
def test_vllm_decodes_beside_zerokl(part, engines):
    process = run_device(part, *SMALL)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    for engine in engines:
        assert re.search(rf"^decoding 16 x 8 tokens after 8, {engine} +tokens_per_s ", process.stdout, re.M)
