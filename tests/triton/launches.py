"""Prints, as JSON, the launches of model runs that kernels/configurations.py does not list; given targets. Run without TRITON_INTERPRET.

Models of the supported families at their real widths, two layers each, train, score and sample on CPU memory with the GPU's code; each
launch is recorded and none carried out, so the numbers are whatever the memory held. A launch is known by what Triton keys a binary with.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from zerokl.engine import native
from zerokl.engine.rollout import Keys, Sampling
from zerokl.kernels import backend
from zerokl.kernels.configurations import configurations
from zerokl.kernels.launch import Launch, recorded
from zerokl.kernels.logprob import Distribution
from zerokl.kernels.tiles import recording
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import COMPUTE, Decoder, Numerics
from zerokl.model.prompts import Prompts
from zerokl.model.scoring import logprobs, pack
from zerokl.model.weights import Layout
from zerokl.verify.binaries import binary_key

# Family, hidden, intermediate, query heads, key-value heads, head width, tied
MODELS = {
    "Qwen3-0.6B": ("Qwen3", 1024, 3072, 16, 8, 128, True),
    "Qwen3-1.7B": ("Qwen3", 2048, 6144, 16, 8, 128, True),
    "Qwen3-8B": ("Qwen3", 4096, 12288, 32, 8, 128, False),
    "Qwen2.5-0.5B": ("Qwen2", 896, 4864, 14, 2, 64, True),
    "Llama-3.2-1B": ("Llama", 2048, 8192, 32, 8, 64, True),
}
VOCABULARY = 4096  # short, to save memory
NARROW_CACHE, WIDE_HEAD = Numerics(cache=torch.bfloat16), Numerics(head=torch.float32)
SETTINGS = [(dtype, COMPUTE) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
SETTINGS += [(torch.bfloat16, WIDE_HEAD), (torch.float16, WIDE_HEAD), (torch.float32, NARROW_CACHE)]
DISTRIBUTIONS = (Distribution(), Distribution(0.7, 20, 0.9), Distribution(0.0))


def decoder(name: str, dtype: torch.dtype, numerics: Numerics) -> Decoder:
    family, D, inner, heads, kv_heads, head_dim, tied = MODELS[name]
    config = ModelConfig.from_dict({
        "architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), "vocab_size": VOCABULARY, "hidden_size": D,
        "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": tied,
        "hidden_act": "silu", "attention_bias": False,
    })  # fmt: skip
    layout = Layout(config)
    made = Decoder(config, torch.empty(layout.numel, dtype=dtype), layout, numerics)
    for w in (*made.w.values(), made.head):
        w.main_grad = torch.empty(w.shape)
    return made


def run(model: Decoder) -> None:
    """Training with prompts read once and without, scoring, and sampling with prefill, chunks and decoding."""
    prompts = [[3] * 40, [3] * 40, [5]]
    pairs = [(prompt, [7] * n) for prompt, n in zip(prompts, (200, 3, 1), strict=True)]
    for dist in DISTRIBUTIONS[:2]:
        for some in (pairs, pairs[2:]):
            read = Prompts(model, [prompt for prompt, _ in some])
            logprobs(model, pack(some, read.of), dist, prompts=read)[0].sum().backward()
            read.backward()
        logprobs(model, pack(pairs), dist)[0].sum().backward()
        with torch.no_grad():
            logprobs(model, pack(pairs), dist)
    for dist in DISTRIBUTIONS:
        native.NativeSampler(model, max_concurrency=4, max_batch_tokens=100).generate(
            [[3] * 150, [5]], Sampling(dist, 2, 3, frozenset()), Keys(0, 0)
        )


def launches(work: Callable[[], None]) -> Iterator[Launch]:
    """Those that `work` makes, one for each way in which Triton could see them: data types, alignments and numbers."""
    with recorded() as found:
        work()
    distinct = {}
    for launch in found:
        args = (((x.dtype, x.data_ptr() % 16) if isinstance(x, torch.Tensor) else x) for x in launch.args)
        distinct[launch.kernel.__name__, *args, *sorted(launch.options.items())] = launch
    yield from distinct.values()


def main() -> None:
    backend.INTERPRETED = True  # the GPU's code on a CPU's memory
    native._Generation._check_finite = lambda *_: None
    seen, missing, control = 0, {}, set()
    for target in sys.argv[1:]:
        listed = {binary_key(*launch, target): name for name, launch in configurations(target)}
        with recording(target):
            for name, (dtype, numerics) in product(MODELS, SETTINGS):
                for launch in launches(partial(run, decoder(name, dtype, numerics))):
                    seen, key = seen + 1, binary_key(*launch, target)
                    if key not in listed:
                        missing[key] = f"{launch.kernel.__name__} on {target}: {name} {dtype} {numerics} {launch.options}"
                    elif "attention backward" in listed[key]:
                        control.add(key)
    print(json.dumps({"launches": seen, "missing": list(missing.values()), "without the attention's backward": len(control)}))


if __name__ == "__main__":
    sys.exit(main())
