"""The memory that a run needs on its device, predicted before it begins; and the size of its passes."""

from typing import NamedTuple

import torch

from ...kernels.logprob import GPU_CHUNK_BYTES, GPU_CHUNK_BYTES_16
from ...model.cache import BlockCache
from ...model.checkpoint import DTYPES
from ...model.config import ModelConfig
from ...model.operations import layer_bytes_per_token
from ...model.weights import Layout
from ..config import Config

# Rows of a pass where the configuration names no micro_batch and the memory allows it: enough for a GPU.
PASS_TOKENS = 16384
# The sequences of a pass on a CPU, where the configuration names none.
CPU_MICRO_BATCH = 16
# Share of the free memory that the prediction may use: the rest is for the allocator's gaps and workspaces.
_USABLE = 0.92
# Share of the free memory for the gradient buffers of shards in flight.
_GRADIENT_SHARE = 0.25
_GIB = 1 << 30


class PassSizes(NamedTuple):
    """How much a pass of training takes. These sizes decide no bit."""

    micro_batch: int  # sequences
    shards_in_flight: int


class Footprint(NamedTuple):
    """Bytes at the peak of a step, by what they are for."""

    weights: int
    optimizer: int
    gradients: int
    activations: int
    logits: int
    cache: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {value / _GIB:.1f}" for name, value in self._asdict().items())


def activation_bytes(model: ModelConfig, dtype: torch.dtype, rows: int, recompute: bool) -> int:
    """What a pass of `rows` rows keeps for its backward, and the temporaries of one layer's backward.

    With recompute, a layer keeps its two inputs only, and one layer at a time is computed again.
    """
    layer = layer_bytes_per_token(model, dtype.itemsize)
    inputs = 2 * model.hidden_size * dtype.itemsize
    kept = model.layers * inputs + layer if recompute else model.layers * layer
    return rows * (kept + layer)


def footprint(
    config: Config, model: ModelConfig, micro_batch: int, in_flight: int, ranks: int, prompt_tokens: int
) -> Footprint:
    """The peak of a step with these sizes.

    The gradients are one buffer for each shard in flight (with tied embeddings, another one of lm_head), and
    the partial sums of the tree. prompt_tokens: of the longest prompt.
    """
    numel, dtype = Layout(model).numel, DTYPES[config.dtype]
    wide = dtype == torch.float32
    tied = model.vocab_size * model.hidden_size if model.tied else 0
    levels = max(1, config.virtual_shards // ranks).bit_length() - 1
    row_tokens = config.sampling.max_tokens + prompt_tokens
    samples = min(config.native.max_concurrency, -(-config.prompts // ranks) * config.num_generations)
    cache_dtype = dtype if config.precision.cache_dtype == "compute" else DTYPES[config.precision.cache_dtype]
    blocks = samples * BlockCache.blocks_for(row_tokens)
    cache = blocks * BlockCache.bytes_per_block(model, cache_dtype)
    return Footprint(
        weights=numel * dtype.itemsize,
        optimizer=numel * (8 if wide else 12) // ranks,
        gradients=4 * (in_flight * (numel + tied) + levels * numel),
        activations=activation_bytes(
            model, dtype, micro_batch * config.sampling.max_tokens, config.recompute == "layer"
        ),
        logits=max(3 * GPU_CHUNK_BYTES, GPU_CHUNK_BYTES_16),
        cache=min(cache, config.native.cache_bytes) if config.native.cache_bytes else cache,
    )


def fit(
    config: Config,
    model: ModelConfig,
    device: torch.device,
    shards: int,
    ranks: int = 1,
    prompt_tokens: int = 0,
) -> PassSizes:
    """The sizes that the configuration names. In place of 0, on a GPU, the largest that the memory allows.

    shards: that a process sums at a time.
    Raises ValueError, with the remedy, where a GPU cannot hold the run.
    """
    if device.type == "cpu":
        return PassSizes(config.micro_batch or CPU_MICRO_BATCH, min(config.shards_in_flight or 1, shards))
    return fit_into(config, model, torch.cuda.mem_get_info(device)[0], shards, ranks, prompt_tokens)


def fit_into(
    config: Config, model: ModelConfig, free_bytes: int, shards: int, ranks: int, prompt_tokens: int
) -> PassSizes:
    """See fit. free_bytes: of the GPU, before the run has put anything on it."""
    tied = model.vocab_size * model.hidden_size if model.tied else 0
    most = max(1, int(_GRADIENT_SHARE * free_bytes) // (4 * (Layout(model).numel + tied)))
    rounds = -(-shards // most)
    in_flight = min(config.shards_in_flight or -(-shards // rounds), shards)
    micro_batch = config.micro_batch or max(1, PASS_TOKENS // config.sampling.max_tokens)
    while True:
        needed = footprint(config, model, micro_batch, in_flight, ranks, prompt_tokens)
        if sum(needed) <= _USABLE * free_bytes:
            return PassSizes(micro_batch, in_flight)
        if not config.micro_batch and micro_batch > 1:
            micro_batch //= 2
        elif not config.shards_in_flight and in_flight > 1:
            in_flight = -(-in_flight // 2)
        else:
            raise ValueError(_does_not_fit(config, needed, free_bytes))


def _does_not_fit(config: Config, needed: Footprint, free_bytes: int) -> str:
    remedies = ['set recompute = "layer"'] if config.recompute == "none" else []
    if config.micro_batch > 1:
        remedies.append("lower micro_batch")
    if config.shards_in_flight > 1:
        remedies.append("lower shards_in_flight")
    remedies += ["limit native.cache_bytes", "lower sampling.max_tokens", "spread the run over more ranks"]
    return (
        f"memory: a step needs about {sum(needed) / _GIB:.1f} GiB ({needed}), and the GPU has "
        f"{free_bytes / _GIB:.1f} GiB free; {', or '.join(remedies)}"
    )
