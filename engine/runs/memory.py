"""The memory that a run needs on its device, predicted before it begins; and the size of its passes."""

from typing import NamedTuple

import torch

from ...kernels.logprob import GPU_CHUNK_BYTES, GPU_CHUNK_BYTES_16
from ...model.cache import BlockCache
from ...model.checkpoint import DTYPES
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


def activation_bytes(layout: Layout, dtype: torch.dtype, rows: int, recompute: bool) -> int:
    """What a pass of `rows` rows keeps for its backward, and the temporaries of one layer's backward.

    The layers before the first weight that is trained have no backward, and keep nothing. With recompute, a
    layer keeps its two inputs only, and one layer at a time is computed again.
    """
    model = layout.config
    layer = layer_bytes_per_token(model, dtype.itemsize)
    inputs = 2 * model.hidden_size * dtype.itemsize
    layers = model.layers - _layers_without_backward(layout)
    kept = layers * inputs + layer if recompute else layers * layer
    return rows * (kept + layer)


def _layers_without_backward(layout: Layout) -> int:
    """How many of the first layers have frozen weights only, with a frozen embedding before them."""
    first_trained = layout.trained[0].name
    if first_trained.startswith("layers."):
        return int(first_trained.split(".")[1])
    return 0 if first_trained == "embed" else layout.config.layers


def _lm_head_elements(layout: Layout) -> int:
    """The elements of the gradient buffer that lm_head has beside the embedding's, where both are one."""
    model = layout.config
    return model.vocab_size * model.hidden_size if model.tied and "embed" not in layout.frozen else 0


def footprint(
    config: Config, layout: Layout, micro_batch: int, in_flight: int, ranks: int, prompt_tokens: int
) -> Footprint:
    """The peak of a step with these sizes.

    Optimizer state and gradients are of the trained weights. The gradients are one buffer for each shard in
    flight (with tied embeddings, another one of lm_head), and the partial sums of the tree. prompt_tokens: of
    the longest prompt.
    """
    model, trained, dtype = layout.config, layout.trained_numel, DTYPES[config.dtype]
    wide = dtype == torch.float32
    levels = max(1, config.virtual_shards // ranks).bit_length() - 1
    row_tokens = config.sampling.max_tokens + prompt_tokens
    samples = min(config.native.max_concurrency, -(-config.prompts // ranks) * config.num_generations)
    cache_dtype = dtype if config.precision.cache_dtype == "compute" else DTYPES[config.precision.cache_dtype]
    blocks = samples * BlockCache.blocks_for(row_tokens)
    cache = blocks * BlockCache.bytes_per_block(model, cache_dtype)
    return Footprint(
        weights=layout.numel * dtype.itemsize,
        optimizer=trained * (8 if wide else 12) // ranks,
        gradients=4 * (in_flight * (trained + _lm_head_elements(layout)) + levels * trained),
        activations=activation_bytes(
            layout, dtype, micro_batch * config.sampling.max_tokens, config.recompute == "layer"
        ),
        logits=max(3 * GPU_CHUNK_BYTES, GPU_CHUNK_BYTES_16),
        cache=min(cache, config.native.cache_bytes) if config.native.cache_bytes else cache,
    )


def fit(
    config: Config,
    layout: Layout,
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
    return fit_into(config, layout, torch.cuda.mem_get_info(device)[0], shards, ranks, prompt_tokens)


def fit_into(
    config: Config, layout: Layout, free_bytes: int, shards: int, ranks: int, prompt_tokens: int
) -> PassSizes:
    """See fit. free_bytes: of the GPU, before the run has put anything on it."""
    buffer_bytes = 4 * (layout.trained_numel + _lm_head_elements(layout))
    most = max(1, int(_GRADIENT_SHARE * free_bytes) // buffer_bytes)
    rounds = -(-shards // most)
    in_flight = min(config.shards_in_flight or -(-shards // rounds), shards)
    micro_batch = config.micro_batch or max(1, PASS_TOKENS // config.sampling.max_tokens)
    while True:
        needed = footprint(config, layout, micro_batch, in_flight, ranks, prompt_tokens)
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
