"""vLLM in the trainer's process over the trainer's tensors, as on a GPU: our model, and vLLM's own model.

On a CPU vLLM's own model has other kernels. So this test shows the draw, the weights and the versions.
tests/triton/test_vllm_model.py shows the bits that vLLM's own model has on a GPU.
"""

from pathlib import Path

import pytest
from zerokl.model.adapters import adapted_layout
from zerokl.model.config import ModelConfig
from zerokl.model.lora import Lora

from tests.vllm.forked import run_python

pytestmark = pytest.mark.vllm

# They lie after the trained weights in the trainer's memory.
FROZEN = ("embed", "layers.0.qkv")
HEAD = """
if __name__ == "__main__":
    import sys
    from pathlib import Path

    import torch
    from zerokl.engine.config.vllm_section import VllmConfig
    from zerokl.engine.rollout.native import NativeSampler
    from zerokl.engine.rollout.types import RngKey, GenerationParams, complete
    from zerokl.engine.rollout.vllm import exact
    from zerokl.engine.rollout.vllm.sampler import VllmZeroklSampler
    from zerokl.kernels.sampling_params import SamplingParams
    from zerokl.model.checkpoint import load_decoder
    from zerokl.model.decoder import Decoder
    from zerokl.model.weights import Layout

    folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
    prompts, sampling = [[3, 4, 5], [11, 2]], GenerationParams(SamplingParams(0.8), 3, 12, frozenset({1}))
    cfg = VllmConfig(context=64, cache_bytes=1 << 26)
    plain = load_decoder(folder, dtype)
    layout = Layout(plain.config, sys.argv[3:])
    flat = torch.zeros(layout.numel, dtype=dtype)
    for name, view in layout.views(flat).items():
        view.copy_(plain.w[name].detach())
    decoder = Decoder(plain.config, flat, layout)
"""
OURS = """
    vllm = VllmZeroklSampler(folder, decoder.config, flat, cfg, frozen=layout.frozen)
    native = NativeSampler(decoder)
    drawn = [None]
    for version in range(3):
        if version:
            flat += 0.02 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(version)).to(dtype)
            vllm.sync_weights(version)
        key = RngKey(5, version)
        a, b = complete(vllm, prompts, sampling, key), complete(native, prompts, sampling, key)
        equal = all(
            x.completion_ids == y.completion_ids and (x.logprobs == y.logprobs).all() for x, y in zip(a, b)
        )
        print("RESULT", int(equal), {x.weight_version for x in a} == {version})
"""
# As with CUDA graphs, of which a CPU has none: vLLM's model has weights of its own.
COPIED = (
    """
    cfg = cfg.model_copy(update={"cuda_graphs": True})
"""
    + OURS
    + """
    address, = vllm.llm.apply_model(lambda m: m.decoder.flat.data_ptr())
    assert address != flat.data_ptr()
"""
)
# Adapters beside the weights, of which vLLM's model has a copy until the next update.
ADAPTED = """
    from zerokl.model.adapters import AdapterLayout, first_adapters, low_rank_by_weight
    from zerokl.model.lora import Lora

    cfg = cfg.model_copy(update={"cuda_graphs": True})
    lora = Lora(4, 64.0, merge=False)
    adapted = AdapterLayout(layout, lora)
    adapters = first_adapters(adapted, 0)
    decoder.adapt(low_rank_by_weight(adapted, adapters))
    given = {"frozen": layout.frozen, "adapters": (lora, adapters)}
    vllm = VllmZeroklSampler(folder, decoder.config, flat, cfg, **given)
    native = NativeSampler(decoder)

    def equal(key):
        a, b = (complete(sampler, prompts, sampling, key) for sampler in (vllm, native))
        return all(
            x.completion_ids == y.completion_ids and (x.logprobs == y.logprobs).all() for x, y in zip(a, b)
        )

    for version in (1, 2):
        adapters += 0.02 * torch.randn(adapters.shape, generator=torch.Generator().manual_seed(version))
        print("RESULT", int(equal(RngKey(5, version))))
        vllm.sync_weights(version)
        print("RESULT", int(equal(RngKey(5, version))))
"""
# vLLM schedules ahead as on a GPU; its build for CPUs never does. "d" is a draw that was launched, and "r"
# tokens that the host waited for and read.
AHEAD = (
    """
    from contextlib import nullcontext
    from types import SimpleNamespace

    from zerokl.engine.rollout.vllm.sampler import prepare_vllm

    cfg = cfg.model_copy(update={"schedule_ahead": AHEAD, "max_batch_tokens": 8, "max_concurrency": 4})
    prepare_vllm(False)
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import cpu_model_runner, gpu_model_runner
    from zerokl.engine.rollout.vllm.draw import KeyedDraw

    def nothing(*_, **__):
        names = ("record", "synchronize", "wait_stream")
        return SimpleNamespace(**dict.fromkeys(names, lambda *_: None))

    def as_on_a_gpu(config, plain=CpuPlatform.check_and_update_config):
        asked = config.scheduler_config.async_scheduling
        plain(config)
        config.scheduler_config.async_scheduling = asked

    def noted(owner, name, letter):
        plain = getattr(owner, name)

        def noting(*args):
            order.append(letter)
            return plain(*args)

        setattr(owner, name, noting)

    order = []
    CpuPlatform.check_and_update_config = staticmethod(as_on_a_gpu)
    torch.cuda.Event = torch.cuda.Stream = torch.cuda.current_stream = nothing
    torch.cuda.stream = lambda _: nullcontext()
    noted(KeyedDraw, "apply", "d")
    noted(gpu_model_runner.AsyncGPUModelRunnerOutput, "get_output", "r")
    noted(cpu_model_runner.CPUModelRunner, "_to_list", "r")
"""
    + OURS
    + """
    print("RESULT", "".join(order))
"""
)
THEIRS = """
    exact.ENVIRONMENT, exact.ARGUMENTS = {}, {}  # they are for GPUs
    vllm = exact.VllmExactSampler(folder, decoder.config, decoder.layout, flat, cfg)
    native = NativeSampler(decoder)
    print("NORM", vllm.llm.apply_model(lambda m: type(m.model.norm).__name__)[0])
    for version in range(3):
        old = flat.clone()
        if version:
            flat += 0.02 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(version)).to(dtype)
            vllm.sync_weights(version)
        key = RngKey(5, version)
        a, b = complete(vllm, prompts, sampling, key), complete(native, prompts, sampling, key)
        same = [(x, y) for x, y in zip(a, b) if x.completion_ids == y.completion_ids]
        difference = max(abs(x.logprobs - y.logprobs).max() for x, y in same)
        new = flat.clone()
        flat.copy_(old)
        stale = complete(native, prompts, sampling, key)
        flat.copy_(new)
        n = [min(len(x.logprobs), len(y.logprobs)) for x, y in zip(a, stale)]
        from_stale = max(abs(x.logprobs[:k] - y.logprobs[:k]).max() for x, y, k in zip(a, stale, n))
        print("RESULT", len(same), difference, from_stale, {x.weight_version for x in a} == {version})
"""
# The same prompt three times, the last time after an update; by vLLM's own counter what came from its cache.
CACHED = """
    exact.ENVIRONMENT, exact.ARGUMENTS = {}, {}  # they are for GPUs
    cfg = cfg.model_copy(update={"engine": {"disable_log_stats": False}, "block_tokens": 32})
    vllm = exact.VllmExactSampler(folder, decoder.config, decoder.layout, flat, cfg)
    prompt, hits = [[3 + i % 40 for i in range(45)]], 0
    one = GenerationParams(SamplingParams(), 1, 9, frozenset())
    for version in (0, 0, 1):
        if version != vllm.version:
            vllm.sync_weights(version)
        complete(vllm, prompt, one, RngKey(5, version))
        (now,) = [m.value for m in vllm.llm.get_metrics() if m.name == "vllm:prefix_cache_hits"]
        print("RESULT", int(now - hits))
        hits = now
"""


def _results(code: str, model: Path, dtype: str, folder: Path, *frozen: str) -> list[list[str]]:
    """The results that the code prints, in a process of its own.

    frozen: weights of the layout. vLLM keeps its threads and settings for good.
    """
    (folder / "code.py").write_text(HEAD + code)
    process = run_python(str(folder / "code.py"), str(model), dtype, *frozen)
    assert process.returncode == 0, process.stderr[-3000:]
    return [line.split() for line in process.stdout.splitlines() if line.startswith(("RESULT", "NORM"))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("frozen", [(), FROZEN], ids=["all trained", "frozen"])
def test_our_model_over_the_trainers_tensor_draws_the_native_tokens(model, tmp_path, dtype, frozen):
    assert _results(OURS, model, dtype, tmp_path, *frozen) == [["RESULT", "1", "True"]] * 3


@pytest.mark.parametrize("frozen", [(), FROZEN], ids=["all trained", "frozen"])
def test_our_model_over_a_copy_draws_the_native_tokens(model, tmp_path, frozen):
    assert _results(COPIED, model, "bfloat16", tmp_path, *frozen) == [["RESULT", "1", "True"]] * 3


def test_adapters_that_are_not_merged_travel_with_an_update(model, tmp_path):
    """And the control: before it, vLLM's model has the old ones, and draws other tokens or logprobs."""
    frozen = sorted(adapted_layout(ModelConfig.from_file(model), Lora(4, 64.0)).frozen)
    results = _results(ADAPTED, model, "bfloat16", tmp_path, *frozen)
    assert results == [["RESULT", "0"], ["RESULT", "1"]] * 2


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "control"])
def test_the_host_waits_for_tokens_after_it_has_launched_the_next_ones(model, tmp_path, ahead):
    """The bits are those of the native sampler, with prompts in parts, and over updates of the weights."""
    code = AHEAD.replace("AHEAD", str(ahead))
    *results, (_, order) = _results(code, model, "bfloat16", tmp_path)
    assert results == [["RESULT", "1", "True"]] * 3
    draws = order.count("d")
    assert draws == order.count("r") > 30
    waiting = [order[:i].count("d") - order[:i].count("r") for i, x in enumerate(order) if x == "r"]
    if ahead:
        assert waiting.count(2) > 0.8 * draws, order
    else:
        assert waiting == [1] * draws, order


def test_vllms_own_model_draws_with_our_keys_from_its_given_weights(model, tmp_path):
    norm, *results = _results(THEIRS, model, "float32", tmp_path)
    assert norm == ["NORM", "OneOrderRMSNorm"]
    assert len(results) == 3
    for version, (_, same, difference, from_stale, right_version) in enumerate(results):
        assert right_version == "True"
        assert int(same) == 6, "two fp32 engines differ by rounding, which changes none of these draws"
        assert float(difference) < 1e-3
        assert version == 0 or float(from_stale) > 1e-2, "control: older weights are seen"


def test_vllms_own_model_keeps_no_block_over_an_update(model, tmp_path):
    assert _results(CACHED, model, "float32", tmp_path) == [
        ["RESULT", "0"],
        ["RESULT", "32"],
        ["RESULT", "0"],
    ]
