"""Long contexts and larger models: a trainer's steps, decoding after long prompts, passes beside sdpa.

Random weights in bf16. Each row says what it is compared with. prime-rl publishes, for one H100 and its
trainer alone, seconds and GiB of a step of two sequences with recomputed layers. vLLM 0.32 as it comes was
measured on an H200 on 2026-11-28, with the same requests. In each section what matters most comes first.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from zerokl.benchmarks.device.engines import Requests, keyed
from zerokl.benchmarks.device.price import gradient, plain_hidden
from zerokl.benchmarks.machine import SHAPES, Machine, Row, model_config
from zerokl.engine.config.training_sections import OptimizerConfig
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.train.master_weights import AdapterWeights, SlicedWeights
from zerokl.engine.train.optimizer import Optimizer
from zerokl.engine.train.parallel.gradient import ShardSum, TrainedAdapters
from zerokl.kernels.attention_rule import RULES
from zerokl.model.adapters import AdapterLayout, Adapters, adapted_layout, first_adapters
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import COMPUTE, Decoder
from zerokl.model.lora import Lora
from zerokl.model.offload import Offload, Place
from zerokl.model.scoring import pack
from zerokl.model.weights import Layout

_SHAPES = SHAPES | {"4B": (2560, 9728, 36, 32, 8, 128)}
_UNTIED = ("8B",)
_SEQUENCES = 2  # of a step, each a virtual shard
_CONTEXT = 1 << 17
_CACHE_BYTES = 24 << 30
_GIB = 1 << 30


class Step(NamedTuple):
    """A trainer's step, and what prime-rl publishes of it."""

    model: str
    tokens: int  # of a sequence
    rank: int  # of LoRA; 0 trains the model
    place: Place
    timed: int  # steps after the first
    published: dict[str, float] = {}  # noqa: RUF012 (nobody changes it)


STEPS = [
    Step("0.6B", 16384, 0, "none", 2, {"published_s": 1.99, "published_gib": 12.5}),
    Step("0.6B", 16384, 0, "host", 2),
    Step("4B", 16384, 16, "none", 2, {"published_s": 5.26, "published_gib": 23.0}),
    Step("0.6B", 65536, 0, "host", 1, {"published_s": 12.2, "published_gib": 19.6}),
    Step("8B", 8192, 0, "host", 1),
]


class Draw(NamedTuple):
    """A call of a sampler, and what vLLM drew in a second."""

    model: str
    prompts: int
    samples: int
    length: int  # of a prompt
    new: int
    attention: str
    vllm_tokens_per_s: float = 0.0
    goal_ratio: float = 1.5


DRAWS = [
    Draw("0.6B", 8, 8, 4096, 128, "vllm", 8484),
    Draw("0.6B", 2, 8, 16384, 128, "vllm", 2057),
    Draw("0.6B", 8, 8, 4096, 128, "chunked-512", 8484),
    Draw("0.6B", 2, 8, 16384, 128, "chunked-512", 2057),
    Draw("0.6B", 8, 8, 128, 256, "vllm", 18581, 2.5),
    Draw("0.6B", 8, 8, 128, 1024, "vllm", 17676, 2.5),
    Draw("0.6B", 32, 8, 128, 256, "vllm", 33736, 2.5),
    Draw("1.7B", 8, 8, 4096, 128, "vllm"),
    Draw("1.7B", 8, 8, 128, 256, "vllm"),
]
# Model, sequences, tokens of each: forward and backward, with all activations kept.
PASSES = [("0.6B", 1, 16384), ("0.6B", 4, 4096), ("0.6B", 16, 256), ("1.7B", 4, 4096), ("8B", 2, 4096)]


def steps(m: Machine) -> Iterator[Row]:
    """Forward, backward and optimizer. Memory beside the GPU leaves the same weights."""
    before: dict[tuple, torch.Tensor] = {}
    for step in STEPS:
        if m.small:
            step = step._replace(model="toy", tokens=48)
        run, flat, trained = _trainer(m, step)
        times = _seconds(m, run, step.timed)
        what = f"a step of {_SEQUENCES} x {step.tokens} tokens, {step.model}, "
        what += f"{f'LoRA {step.rank}' if step.rank else 'all weights'}, memory.offload {step.place}"
        row: Row = {"what": what, "step_s": statistics.median(times), "gib": _peak_gib(m)}
        bits, key = flat.cpu().view(torch.int16), (step.model, step.tokens, step.rank, step.timed)
        if step.place == "none":
            before[key] = bits
        elif key in before:
            row["unequal"] = int((before[key] != bits).sum())
        yield row | {"trained": trained} | ({} if m.small else step.published)
        del run, flat
        _give_back(m)


def _trainer(m: Machine, step: Step) -> tuple[Callable[[], object], torch.Tensor, int]:
    """What takes a step, the weights that it computes with, and how many are trained."""
    config, lora = _config(m, step.model), Lora(step.rank, 32.0)
    layout = adapted_layout(config, lora) if step.rank else Layout(config)
    first = _weights(m, layout)
    decoder = Decoder(config, first.clone(), layout, recompute=True, offload=Offload(step.place))
    trained = None
    if step.rank:
        own_layout = AdapterLayout(layout, lora)
        adapters = Adapters(own_layout, first_adapters(own_layout, 0), first, decoder, torch.bfloat16)
        masters, trained = AdapterWeights(adapters), TrainedAdapters(own_layout, adapters.flat)
    else:
        masters = SlicedWeights(decoder, first)
    del first
    shard_sum = ShardSum(decoder, _SEQUENCES, adapters=trained)
    optimizer, batches = Optimizer(masters, OptimizerConfig(), 100), _sequences(m, _SEQUENCES, step.tokens)

    def run() -> None:
        shard_sum.add(gradient, [pack([pair]) for pair in batches])
        optimizer.update(shard_sum.tree.take())

    return run, decoder.flat.detach(), masters.numel


def decoding(m: Machine) -> Iterator[Row]:
    """Tokens a second of the native sampler, the prompts read included."""
    for draw in DRAWS:
        if m.small:
            draw = draw._replace(model="toy", prompts=2, samples=2, length=70, new=8)
        numerics = COMPUTE._replace(attention=RULES[draw.attention])
        decoder = m.random_decoder(_config(m, draw.model), torch.bfloat16, numerics)
        prompts = [
            [20 + (7 * i + 3 * j + i * j) % 90 for j in range(draw.length)] for i in range(draw.prompts)
        ]
        requests = Requests(prompts, draw.samples, draw.new)
        sampler = NativeSampler(decoder, requests.sequences, cache_bytes=1 << 26 if m.small else _CACHE_BYTES)
        call, tokens = keyed(sampler, requests), requests.sequences * draw.new
        numbers = iter(range(9))
        rates = [tokens / s for s in _seconds(m, lambda call=call: call(next(numbers)), 2)]  # noqa: B023
        what = f"{draw.prompts} x {draw.samples} samples of {draw.new} tokens after {draw.length}, "
        row: Row = {"what": f"{what}{draw.model}, native, attention {draw.attention}"}
        row |= {"tokens_per_s": statistics.median(rates), "gib": _peak_gib(m)}
        if draw.vllm_tokens_per_s and not m.small:
            ratio = row["tokens_per_s"] / draw.vllm_tokens_per_s
            row |= {
                "vllm_tokens_per_s": draw.vllm_tokens_per_s,
                "ratio": ratio,
                "goal_ratio": draw.goal_ratio,
            }
        yield row
        del sampler, decoder, call
        _give_back(m)


def passes(m: Machine) -> Iterator[Row]:
    """Forward and backward beside plain torch with its sdpa, which takes one sequence at a time."""
    for name, sequences, tokens in PASSES:
        if m.small:
            name, tokens = "toy", 24
        config = _config(m, name)
        decoder = m.random_decoder(config, torch.bfloat16)
        pairs = _sequences(m, sequences, tokens)
        batch, shard_sum = pack(pairs), ShardSum(decoder, 1)
        ids = torch.tensor([[*x, *y] for x, y in pairs], device=m.device)
        weights = {n: w.detach().clone().requires_grad_() for n, w in decoder.w.items()}
        ours_s = _seconds(m, lambda s=shard_sum, b=batch: s.add(gradient, [b]), 3)
        gib = _peak_gib(m)
        plain_s = _seconds(m, lambda c=config, w=weights, x=ids: _plain(c, w, x), 3)
        yield {
            "what": f"forward and backward of {sequences} x {tokens} tokens, {name}",
            "ours_ms": 1e3 * statistics.median(ours_s),
            "plain_ms": 1e3 * statistics.median(plain_s),
            "price": statistics.median(ours_s) / statistics.median(plain_s),
            "gib": gib,
        }
        del decoder, shard_sum, weights
        _give_back(m)


def _plain(config: ModelConfig, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> None:
    for part in ids.split(1) if ids.shape[1] > 2048 else [ids]:
        logits = F.linear(
            plain_hidden(config, weights, part[:, :-1]), weights.get("lm_head", weights["embed"])
        )
        loss = F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())
        torch.autograd.grad(loss, list(weights.values()))


def _config(m: Machine, name: str) -> ModelConfig:
    D, inner, layers, *heads = m.shapes[name] if m.small else _SHAPES[name]
    return model_config(
        "Qwen3", D, inner, *heads, layers=layers, vocab=m.vocab, context=_CONTEXT, tied=name not in _UNTIED
    )


def _weights(m: Machine, layout: Layout) -> torch.Tensor:
    """Random weights in bf16, [layout.numel]; those of norms are 1."""
    torch.manual_seed(0)
    flat = torch.empty(layout.numel, dtype=torch.bfloat16, device=m.device)
    flat.normal_(0.0, layout.config.hidden_size**-0.5)
    for view in layout.views(flat).values():
        if view.dim() == 1:
            view.fill_(1.0)
    return flat


def _sequences(m: Machine, n: int, tokens: int) -> list[tuple[list[int], list[int]]]:
    """Pairs of a prompt of one token and the rest, of `tokens` rows."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(min(m.vocab, 256), (n, tokens + 1), generator=generator).tolist()
    return [(x[:1], x[1:]) for x in ids]


def _seconds(m: Machine, run: Callable[[], object], timed: int) -> list[float]:
    """Seconds by the clock of `timed` runs, after one that compiles. The peak of memory is of all."""
    if m.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(1 + timed):
        began_s = time.perf_counter()
        run()
        if m.on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
    return seconds[1:]


def _peak_gib(m: Machine) -> float:
    return torch.cuda.max_memory_allocated() / _GIB if m.on_gpu else 0.0


def _give_back(m: Machine) -> None:
    gc.collect()
    if m.on_gpu:
        torch.cuda.empty_cache()


SECTIONS = (steps, decoding, passes)
