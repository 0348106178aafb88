"""Prints, as JSON, the launches of model runs that kernels/compiled_cases.py does not list.

And which of their descriptors TMA would refuse.

The arguments are the targets. Run without TRITON_INTERPRET.

The models are of the supported families, at their real widths, with two layers each. They train, score and
sample on CPU memory with the GPU's code. Each launch is recorded and none is carried out, so the numbers are
whatever the memory held. A launch is identified by Triton's key of its binary.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor
from zerokl.benchmarks.host_cost import gpu_code_on_cpu
from zerokl.benchmarks.machine import model_config
from zerokl.engine.rollout import generation, native
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.engine.train.parallel.gradient import ShardSum, TrainedAdapters
from zerokl.kernels.compiled_cases import configurations
from zerokl.kernels.grad import GradBuffer, PendingSums
from zerokl.kernels.launch import Launch, recorded_launches
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.tiles import tiles_of_target
from zerokl.model.adapters import AdapterLayout, adapted_layout
from zerokl.model.decoder import COMPUTE, Decoder, Numerics
from zerokl.model.lora import Lora
from zerokl.model.prompts import Prompts
from zerokl.model.routing import ReplayedRouting
from zerokl.model.scoring import ScoringInputs, logprobs, pack
from zerokl.model.sizes import Experts
from zerokl.model.weights import Layout
from zerokl.verify.binaries import specialised

from tests.gpu.descriptors import broken_rules, descriptors
from tests.helpers import with_experts
from tests.triton.compiling import ONE_IN

# Family, hidden width, intermediate width, query heads, key-value heads, head width, tied embeddings
MODELS = {
    "Qwen3-0.6B": ("Qwen3", 1024, 3072, 16, 8, 128, True),
    "Qwen3-1.7B": ("Qwen3", 2048, 6144, 16, 8, 128, True),
    "Qwen3-8B": ("Qwen3", 4096, 12288, 32, 8, 128, False),
    "Qwen2.5-0.5B": ("Qwen2", 896, 4864, 14, 2, 64, True),
    "Llama-3.2-1B": ("Llama", 2048, 8192, 32, 8, 64, True),
    "SmolLM2-135M": ("Llama", 576, 1536, 9, 3, 64, True),
    "sparse": ("Qwen3", 2048, 768, 32, 4, 128, False),
}
# Qwen3-30B-A3B's, in the second layer of two.
EXPERTS = {"sparse": Experts(number=128, per_token=8, size=768, renormalise=True, layers=frozenset({1}))}
VOCABULARY = 4096  # short, to save memory
NARROW_CACHE, WIDE_HEAD = Numerics(cache=torch.bfloat16), Numerics(lm_head=torch.float32)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SETTINGS = [(dtype, COMPUTE) for dtype in DTYPES]
SETTINGS += [(torch.bfloat16, WIDE_HEAD), (torch.float16, WIDE_HEAD), (torch.float32, NARROW_CACHE)]
SAMPLING_PARAMS = (SamplingParams(), SamplingParams(0.7, 20, 0.9), SamplingParams(0.0))


def binary_key(kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any], target: str) -> str:
    """The key of a launch's binary, as in Triton's cache: two launches with one key run the same binary."""
    source, parsed, _ = specialised(kernel, args, options, target)
    return f"{source.hash()} {parsed.hash()}"


def decoder(name: str, dtype: torch.dtype, numerics: Numerics) -> Decoder:
    family, D, inner, heads, kv_heads, head_dim, tied = MODELS[name]
    config = model_config(
        family, D, inner, heads, kv_heads, head_dim, layers=2, vocab=VOCABULARY, tied=tied, context=1024
    )
    config = with_experts(config, EXPERTS[name]) if name in EXPERTS else config
    layout = Layout(config)
    model = Decoder(config, torch.empty(layout.numel, dtype=dtype), layout, numerics)
    return model


def run(model: Decoder) -> None:
    """Train with prompts that are read once, and with whole sequences; score; sample.

    Sampling has a prefill, chunks and decode steps.
    """
    prompt_ids = [[3] * 40, [3] * 40, [5]]
    pairs = [(prompt, [7] * n) for prompt, n in zip(prompt_ids, (200, 3, 1), strict=True)]
    pending = PendingSums()
    buffers = {
        w: GradBuffer(torch.empty(1, *w.shape), pending=pending if w.dim() == 1 else None)
        for w in (*model.w.values(), model.lm_head)
    }
    for sampling_params in SAMPLING_PARAMS[:2]:
        for batch in (pairs, pairs[2:]):
            prompts = Prompts(model, [prompt for prompt, _ in batch], buffers=buffers)
            packed = pack(batch, prompts.prompt_of_sample)
            logprobs(model, packed, sampling_params, prompts=prompts)[0].sum().backward()
            prompts.backward()
        logprobs(model, pack(pairs), sampling_params, buffers=buffers)[0].sum().backward()
        pending.finish()
        with torch.no_grad():
            logprobs(model, pack(pairs), sampling_params)
    for sampling_params in SAMPLING_PARAMS:
        complete(
            native.NativeSampler(model, max_concurrency=4, max_batch_tokens=100),
            [[3] * 150, [5]],
            GenerationParams(sampling_params, 2, 3, frozenset()),
            RngKey(0, 0),
        )


def run_replayed(name: str, dtype: torch.dtype) -> None:
    """Train with experts that are given."""
    model = decoder(name, dtype, COMPUTE)
    packed = pack([([3] * 40, [7] * 20)])
    experts, rows = model.config.experts, len(packed.ids)
    given = torch.zeros(rows, len(experts.layers), experts.per_token, dtype=torch.uint8)
    inputs = ScoringInputs(model, packed, SamplingParams(), routing=ReplayedRouting(experts, given))
    inputs.forward(model).logp.sum().backward()


def run_adapters(name: str, dtype: torch.dtype, rank: int) -> None:
    """Train adapters in place of the weights."""
    lora, config = Lora(rank, 16.0), decoder(name, dtype, COMPUTE).config
    layout = AdapterLayout(adapted_layout(config, lora), lora)
    model = Decoder(config, torch.empty(layout.model.numel, dtype=dtype), layout.model)
    sums = ShardSum(model, 1, adapters=TrainedAdapters(layout, torch.empty(layout.numel)))
    pairs = [([3] * 40, [7] * 200), ([5], [7])]
    for batch in (pairs, pairs[1:]):
        logprobs(model, pack(batch), SamplingParams(), buffers=sums.buffers)[0].sum().backward()


def runs() -> Iterator[tuple[str, Callable[..., None], tuple]]:
    """All runs, each with its name and its arguments, the first two of which are a model and a dtype.

    With ONE_BINARY_IN each model has one of the dtypes.
    """
    for name, (dtype, numerics) in product(MODELS, SETTINGS):
        if ONE_IN == 1 or dtype is DTYPES[list(MODELS).index(name) % len(DTYPES)]:
            yield f"{name} {dtype} {numerics}", lambda *args: run(decoder(*args)), (name, dtype, numerics)
    for dtype in DTYPES:
        yield f"replayed {dtype}", run_replayed, ("sparse", dtype)
    for name, rank in product(("Qwen3-0.6B", "sparse"), (1, 8, 16)):
        yield f"{name} with adapters of rank {rank}", run_adapters, (name, torch.bfloat16, rank)


def launches(work: Callable[[], None]) -> Iterator[Launch]:
    """The distinct launches that `work` makes.

    Two launches are distinct if Triton could see a difference: data types, alignments or numbers. A tensor
    map also holds shape and strides of a descriptor.
    """
    with recorded_launches() as all_launches:
        work()
    distinct = {}
    for launch in all_launches:
        args = map(_seen_by_triton, launch.args)
        distinct[launch.kernel.__name__, *args, *sorted(launch.options.items())] = launch
    yield from distinct.values()


def _seen_by_triton(x: Any) -> Any:
    if isinstance(x, TensorDescriptor):
        address = x.base.data_ptr() % 16
        return x.base.dtype, address, tuple(x.block_shape), tuple(x.shape), tuple(x.strides)
    return (x.dtype, x.data_ptr() % 16) if isinstance(x, torch.Tensor) else x


def main() -> None:
    gpu_code_on_cpu()
    generation.Generation._refuse = lambda *_: None
    seen, missing, control, broken, described, heads = 0, {}, set(), set(), 0, set()
    for target in sys.argv[1:]:
        listed = {binary_key(*launch, target): name for name, launch in configurations(target)}
        with tiles_of_target(target):
            for setting, work, args in runs():
                _, _, _, query_heads, kv_heads, head_dim, _ = MODELS[args[0]]
                heads.add((target, args[1], query_heads // kv_heads, head_dim))
                for launch in launches(partial(work, *args)):
                    seen, key = seen + 1, binary_key(*launch, target)
                    broken.update(broken_rules([launch]))
                    described += len(list(descriptors(launch)))
                    if key not in listed:
                        missing[key] = f"{launch.kernel.__name__} on {target}: {setting} {launch.options}"
                    elif "attention backward" in listed[key]:
                        control.add(key)
    report = {
        "launches": seen,
        "missing": list(missing.values()),
        "heads": len(heads),
        "without the attention's backward": len(control),
        "descriptors": described,
        "broken": sorted(broken),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
