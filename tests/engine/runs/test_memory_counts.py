"""The prediction of memory beside counts of what a run has: caches, copies of weights, gradients, passes."""

import gc
from contextlib import closing
from itertools import product
from math import log2

import pytest
import torch
from zerokl.engine.config.lora_section import LoraConfig
from zerokl.engine.config.run_config import Config
from zerokl.engine.rollout import decode, native
from zerokl.engine.rollout.generation import make_prefixes
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey
from zerokl.engine.runs import memory
from zerokl.engine.runs.memory import PassSizes, RunShape, activation_bytes, fit, fit_into, footprint
from zerokl.engine.runs.setup import make_state
from zerokl.engine.runs.trained import adapter_layout, model_layout
from zerokl.engine.tasks.loading import load_task
from zerokl.engine.tasks.rewards import Reward
from zerokl.engine.train.parallel.gradient import ShardSum
from zerokl.engine.train.step import train_step
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import Decoder
from zerokl.model.prompts import Prompts
from zerokl.model.scoring import logprobs, pack
from zerokl.model.weights import Layout

from tests.engine.runs.test_memory import GIB, LARGE, SMALL

SIZES = PassSizes(1, 1, 1)
NO_EVALUATION = {"every": 0}


def _made_bytes(decoder: Decoder, config: Config, calls: list[tuple[int, int]], tokens: int) -> int:
    """The cache that a sampler has after these calls: so many prompts of `tokens` tokens, and samples."""
    sampler, made = NativeSampler(decoder, **config.native.model_dump()), []
    for prompts, group in calls:
        params = GenerationParams(SamplingParams(), group, config.sampling.max_tokens, frozenset({1}))
        requests = params.requests([[3 + i] * tokens for i in range(prompts)], RngKey(0, 0))
        prefixes = make_prefixes(enumerate(requests))
        sampler._memory = sampler._make_memory(prefixes)
        made.append(sampler._memory.cache.data.nbytes)
    return made[-1]


@pytest.mark.parametrize("tokens", [5, 64, 70])
@pytest.mark.parametrize(
    "limits", [{}, {"max_concurrency": 5}, {"cache_bytes": 200_000}, {"cache_bytes": 10**9}], ids=str
)
@pytest.mark.parametrize("evaluation", [NO_EVALUATION, {"every": 1, "problems": 30}], ids=str)
def test_the_predicted_cache_is_the_one_that_a_sampler_makes(model, monkeypatch, tokens, limits, evaluation):
    """With a graph's padding rows, as on a GPU. The free memory binds where no limit is named."""
    for module in (native, decode):
        monkeypatch.setattr(module, "on_triton", lambda x: True)
    decoder, free = load_decoder(model, torch.bfloat16), 10_000_000
    config = Config(
        prompts=4,
        num_generations=3,
        sampling={"max_tokens": 40},
        dtype="bfloat16",
        native=limits,
        evaluation=evaluation,
    )
    layout = Layout(decoder.config)
    predicted = footprint(RunShape(config, layout, 1, tokens), SIZES, free)
    left = free - predicted.weights - predicted.optimizer
    monkeypatch.setattr(native, "cache_limit", lambda named, device: named or int(0.3 * left))
    calls = [(4, 3), (30, 1)] if evaluation["every"] else [(4, 3)]
    assert predicted.cache == _made_bytes(decoder, config, calls, tokens)
    ranks = footprint(RunShape(config, layout, 2, tokens), SIZES, free)
    assert ranks.cache == _made_bytes(decoder, config, [(p // 2, group) for p, group in calls], tokens)


def _weight_bytes(numel: int) -> int:
    """Bytes of the tensors of `numel` elements that this process has, each memory once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.numel() == numel]
    return sum({x.untyped_storage().data_ptr(): x.nbytes for x in tensors}.values())


COPIES = [
    {},
    {"loss__kl_coef": 0.1},
    {"max_staleness": 2},
    {"max_staleness": 2, "precision__sampler_dtype": "float32", "exact": False},
    {"perturb__delay": 3, "exact": False},
    {"perturb__logit_noise": 0.5, "exact": False},
    {"max_staleness": 1, "loss__kl_coef": 0.1, "dtype": "float32"},
    {"max_staleness": 2, "staleness_schedule": "lagged"},
    {
        "max_staleness": 1,
        "staleness_schedule": "lagged",
        "precision__sampler_dtype": "float32",
        "exact": False,
    },
]


@pytest.mark.full
@pytest.mark.parametrize("settings", COPIES, ids=str)
def test_the_predicted_weights_are_those_that_a_run_holds(config, model, settings):
    cfg = config(**{"dtype": "bfloat16", **settings})
    layout = Layout(load_decoder(model, torch.float32).config)
    run = RunShape(cfg, layout, 1, 8, layout.numel if cfg.loss.kl_coef else 0)
    predicted, before = footprint(run, SIZES, 10**9), _weight_bytes(layout.numel)
    task = load_task(cfg.task.name, cfg.task.options)
    with closing(make_state(cfg, model, task, Reward(task.reward))) as state:
        if (
            cfg.perturb.delay or cfg.staleness_schedule == "lagged"
        ):  # the older weights come one after another
            for version in range(1, 5):
                state.sampler.sync_weights(version)
        held = _weight_bytes(layout.numel) - before
    assert held == predicted.weights + predicted.other_weights + predicted.optimizer


@pytest.mark.full
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_the_predicted_adapters_are_those_that_a_run_holds(config, model, dtype):
    """The base, A and B, their moments and their gradient. Nothing else has the size of the weights."""
    cfg = config(dtype=dtype, model=model).model_copy(update={"lora": LoraConfig(rank=5)})
    layout = model_layout(cfg, ModelConfig.from_file(model))
    adapters, base = adapter_layout(cfg, layout, model)
    assert base == torch.float32
    plain, run = RunShape(cfg, layout), RunShape(cfg, layout, adapters=adapters, base=base)
    sizes = fit(run, torch.device("cpu"))
    predicted, without = footprint(run, sizes, 10**9), footprint(plain, sizes, 10**9)
    task = load_task(cfg.task.name, cfg.task.options)
    numels = layout.trained_numel, adapters.numel
    assert len({*numels, layout.numel}) == 3, "each size names one kind of tensor"
    before = [_weight_bytes(numel) for numel in numels]
    with closing(make_state(cfg, model, task, Reward(task.reward))) as state:
        train_step(state)
        base_bytes, own_bytes = (_weight_bytes(n) - b for n, b in zip(numels, before, strict=True))
    assert predicted.weights == without.weights
    assert predicted.other_weights - without.other_weights == base_bytes
    assert predicted.gradients == (1 + log2(cfg.virtual_shards)) * 4 * adapters.numel
    assert predicted.optimizer + predicted.gradients == own_bytes
    ranks = footprint(RunShape(cfg, layout, 2, adapters=adapters, base=base), SIZES, 10**9)
    assert ranks.optimizer == 8 * adapters.numel, "A and B are whole in each rank, the moments are not"


@pytest.mark.parametrize(("shards", "in_flight"), [(1, 1), (4, 1), (8, 2), (8, 8)])
def test_the_predicted_gradients_are_the_buffers_of_a_sum_of_shards(decoder, shards, in_flight):
    work = ShardSum(decoder, shards, in_flight)

    def fill(decoder, together, buffers):
        for buffer in buffers.values():
            buffer.zeroed(range(in_flight))
        return together

    work.add(fill, list(range(shards)))
    kept = [*work.tree._levels.values(), *work.tree._spare]
    tied = 0 if work._tied is None else work._tied.nbytes
    tree_bytes = 0 if shards == 1 else sum(x.nbytes for x in kept)
    run = RunShape(Config(virtual_shards=shards), decoder.layout)
    predicted = footprint(run, PassSizes(1, in_flight, shards), 10**9).gradients
    assert predicted == work._leaves.nbytes + tied + tree_bytes
    assert tree_bytes == int(log2(shards)) * 4 * decoder.layout.trained_numel


def _kept_bytes(decoder: Decoder, prompts: list[list[int]], drawn: int) -> int:
    """Bytes that prompts and their samples of `drawn` tokens keep for their backward, weights left out."""
    storages: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        read = Prompts(decoder, prompts)
        batch = pack([(ids, [5] * drawn) for ids in prompts], read.prompt_of_sample)
        logp, _ = logprobs(decoder, batch, SamplingParams(), prompts=read)
    assert logp.requires_grad
    weights = decoder.flat.untyped_storage().data_ptr()
    return sum(n for address, n in storages.items() if address != weights)


@pytest.mark.parametrize(("tokens", "drawn", "samples"), [(200, 20, 4), (60, 60, 3), (20, 150, 2)])
def test_prompts_count_among_the_predicted_activations(decoder, tokens, drawn, samples):
    rows, copied = samples * drawn + tokens, samples * tokens
    predicted = activation_bytes(decoder.layout, decoder.dtype, rows, recompute=False, copied_rows=copied)
    layers = decoder.config.layers
    kept = predicted * layers / (layers + 1)  # the rest is for one layer's backward
    measured = _kept_bytes(decoder, [[9] * tokens] * samples, drawn)
    assert 0.8 < measured / kept < 1.25, (measured, kept)


def _passes(layout: Layout, gib: int, max_tokens: int, ranks: int) -> tuple[int, int]:
    """The sequences of a pass that `fit_into` finds, and the most of any sizes that fit."""
    config = Config(
        prompts=8, num_generations=8, sampling={"max_tokens": max_tokens}, dtype="bfloat16", recompute="layer"
    )
    run, free = RunShape(config, layout, ranks, 128), gib * GIB
    try:
        fitted = fit_into(run, free)
    except ValueError:
        fitted = PassSizes(0, 0, 0)
    most = max(1, int(0.25 * free) // (4 * (layout.trained_numel + run.lm_head_elements)))
    numbers = [1, 2, 4, 8, 16, 32, 64]
    fitting = [
        min(sizes[0], sizes[1] * 8)
        for sizes in map(PassSizes._make, product(numbers, [1, 2, 4, 8], [1, 2, 4, 8]))
        if sizes.micro_batch * max_tokens <= 16384
        and sizes.shards_in_flight <= min(most, sizes.shards_at_once)
        and sizes.shards_at_once <= 8 // ranks
        and (ranks > 1 or sizes.shards_at_once == 8)
        and sum(footprint(run, sizes, free)) <= 0.92 * free
    ]
    return min(fitted[0], fitted[1] * 8), max(fitting, default=0)


# Weights, GiB, tokens of a sample, ranks, and the sequences of the pass.
PASSES = [
    (SMALL, 79, 8192, 1, 2),
    (SMALL, 40, 1024, 1, 16),
    (LARGE, 79, 2048, 1, 8),
    (LARGE, 79, 1024, 2, 16),
]
PASSES += [(SMALL, 24, 1024, 4, 16), (LARGE, 40, 1024, 4, 8), (LARGE, 16, 1024, 1, 0)]


@pytest.mark.parametrize(("layout", "gib", "max_tokens", "ranks", "sequences"), PASSES)
def test_no_pass_is_shorter_than_the_memory_asks_for(layout, gib, max_tokens, ranks, sequences):
    assert _passes(layout, gib, max_tokens, ranks) == (sequences, sequences)


def test_control_passes_that_become_shorter_first_are_too_short(monkeypatch):
    def shorter_first(run: RunShape, sizes: PassSizes) -> PassSizes | None:
        if sizes.micro_batch > 1:
            return sizes._replace(micro_batch=sizes.micro_batch // 2)
        fewer = sizes.shards_in_flight // 2
        return sizes._replace(shards_in_flight=fewer) if fewer else None

    monkeypatch.setattr(memory, "_smaller", shorter_first)
    assert any(fitted < most for fitted, most in (_passes(*case[:4]) for case in PASSES))


def test_long_samples_are_not_refused_for_a_cache_that_the_sampler_never_makes():
    config = Config(
        prompts=8, num_generations=8, sampling={"max_tokens": 8192}, dtype="bfloat16", recompute="layer"
    )
    run, free = RunShape(config, SMALL, 1, 200), int(79.1 * GIB)
    assert footprint(run, fit_into(run, free), free).cache < 0.3 * free
    unlimited = config.model_copy(
        update={"native": config.native.model_copy(update={"cache_bytes": 1 << 40})}
    )
    with pytest.raises(ValueError, match=r"cache 5\d\.\d\), and the GPU has 79\.1 GiB free"):
        fit_into(RunShape(unlimited, SMALL, 1, 200), free)


@pytest.mark.parametrize(
    ("settings", "cache", "weights"),
    [
        ({"sampler": "vllm-exact", "vllm": {"cache_bytes": 7 << 30}}, 7 * GIB, 2),
        ({"sampler": "vllm-zerokl", "vllm": {"cache_bytes": 7 << 30}}, 7 * GIB, 0),
        ({"sampler": "vllm-zerokl", "vllm": {"cuda_graphs": True}}, GIB, 2),
        ({"sampler": "vllm", "exact": False, "evaluation": NO_EVALUATION}, GIB, 2),
    ],
    ids=str,
)
def test_vllm_has_its_own_cache_and_mostly_its_own_weights(settings, cache, weights):
    config = Config(prompts=8, num_generations=8, dtype="bfloat16", **settings)
    predicted = footprint(RunShape(config, SMALL, 1, 128), SIZES, 79 * GIB)
    assert (predicted.cache, predicted.other_weights) == (cache, weights * SMALL.numel)
