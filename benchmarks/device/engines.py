"""Engines that decode: each is a function that draws all tokens of call i and returns their number.

native, vllm-zerokl and vllm-exact are zerokl's samplers; the latter two also exist with vllm.cuda_graphs, and
vllm-zerokl then also with vllm.schedule_ahead. The others are vLLM as it comes (vllm), with decode graphs and
no compiler (vllm-graphs), without either (vllm-eager), and in batch-invariant mode with its own draw, without
and with graphs.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from zerokl.files.dtypes import dtype_name

Call = Callable[[int], int]


@dataclass(frozen=True)
class Requests:
    """What a call draws: `samples` completions of `new_tokens` tokens of each prompt."""

    prompts: Sequence[Sequence[int]]
    samples: int
    new_tokens: int
    context: int = 512
    cache_bytes: int = 4 << 30
    batch_tokens: int = 2048

    @property
    def sequences(self) -> int:
        """Completions of a call."""
        return len(self.prompts) * self.samples


def native(model: Path, dtype: torch.dtype, device: torch.device, requests: Requests) -> Call:
    """zerokl's own sampler."""
    from zerokl.engine.rollout.native import NativeSampler
    from zerokl.model.checkpoint import load_decoder

    sampler = NativeSampler(
        load_decoder(model, dtype, device),
        max_concurrency=requests.sequences,
        cache_bytes=requests.cache_bytes,
    )
    return keyed(sampler, requests)


def vllm_zerokl(
    model: Path,
    dtype: torch.dtype,
    device: torch.device,
    requests: Requests,
    graphs: bool = False,
    ahead: bool = False,
) -> Call:
    """vLLM with zerokl's decoder, attention and draw."""
    from zerokl.engine.processes.shared_tensor import SharedTensor
    from zerokl.engine.rollout.vllm.sampler import VllmZeroklSampler
    from zerokl.model.checkpoint import load_decoder

    decoder = load_decoder(model, dtype, device)
    weights: object = decoder.flat.detach()
    if device.type == "cpu":  # vLLM's process maps the trainer's memory
        weights = SharedTensor(decoder.layout.numel, dtype)
        decoder.move_to(weights.tensor)
    cfg = _vllm_config(requests, graphs, ahead)
    return keyed(VllmZeroklSampler(model, decoder.config, weights, cfg), requests)


def vllm_exact(
    model: Path, dtype: torch.dtype, device: torch.device, requests: Requests, graphs: bool = False
) -> Call:
    """vLLM's own model in the mode that zerokl's trainer matches."""
    from zerokl.engine.rollout.vllm.exact import VllmExactSampler
    from zerokl.model.checkpoint import load_decoder

    decoder = load_decoder(model, dtype, device)
    flat = decoder.flat.detach()
    sampler = VllmExactSampler(model, decoder.config, decoder.layout, flat, _vllm_config(requests, graphs))
    return keyed(sampler, requests)


def _vllm_config(requests: Requests, graphs: bool, ahead: bool = False):
    from zerokl.engine.config.vllm_section import VllmConfig

    return VllmConfig(
        context=requests.context,
        max_concurrency=requests.sequences,
        max_batch_tokens=requests.batch_tokens,
        cache_bytes=requests.cache_bytes,
        cuda_graphs=graphs,
        schedule_ahead=ahead,
    )


def keyed(sampler, requests: Requests) -> Call:
    """Calls of a sampler of zerokl's."""
    from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
    from zerokl.kernels.sampling_params import SamplingParams

    params = GenerationParams(SamplingParams(), requests.samples, requests.new_tokens, frozenset())
    return lambda i: sum(
        len(r.completion_ids) for r in complete(sampler, requests.prompts, params, RngKey(0, i))
    )


def vllm_as_it_comes(model: Path, dtype: torch.dtype, requests: Requests, **arguments: object) -> Call:
    """vLLM's own model, attention and sampler. arguments: further ones of vllm.LLM."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        model=str(model),
        dtype=dtype_name(dtype),
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        max_model_len=requests.context,
        max_num_seqs=requests.sequences,
        max_num_batched_tokens=requests.batch_tokens,
        kv_cache_memory_bytes=requests.cache_bytes,
        **arguments,
    )
    params = SamplingParams(
        temperature=1.0,
        max_tokens=requests.new_tokens,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    ids = [{"prompt_token_ids": list(p)} for p in requests.prompts for _ in range(requests.samples)]
    return lambda i: sum(len(o.outputs[0].token_ids) for o in llm.generate(ids, params, use_tqdm=False))


# Without the compiler (mode 0), and with one graph for each number of decoding samples.
DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def make(name: str, model: Path, dtype: torch.dtype, device: torch.device, requests: Requests) -> Call:
    """The engine `name`."""
    ours = {
        "native": native,
        "vllm-zerokl": vllm_zerokl,
        "vllm-zerokl-graphs": partial(vllm_zerokl, graphs=True),
        "vllm-zerokl-ahead": partial(vllm_zerokl, graphs=True, ahead=True),
        "vllm-exact": vllm_exact,
        "vllm-exact-graphs": partial(vllm_exact, graphs=True),
    }
    if name in ours:
        return ours[name](model, dtype, device, requests)
    arguments: dict[str, object] = {
        "vllm": {},
        "vllm-graphs": {"compilation_config": DECODE_GRAPHS},
        "vllm-eager": {"enforce_eager": True},
        "batch-invariant": {"enforce_eager": True, "attention_backend": "TRITON_ATTN"},
        "batch-invariant-graphs": {"compilation_config": DECODE_GRAPHS, "attention_backend": "TRITON_ATTN"},
    }[name]
    if name.startswith("batch-invariant"):
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    return vllm_as_it_comes(model, dtype, requests, **arguments)
