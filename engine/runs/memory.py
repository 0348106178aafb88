"""The memory that a run needs on its device, predicted before it begins; and the size of its passes."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...kernels.logprob import GPU_CHUNK_BYTES, GPU_CHUNK_BYTES_16
from ...model.adapters import AdapterLayout
from ...model.cache import BlockCache
from ...model.checkpoint import DTYPES
from ...model.offload import SLICE
from ...model.operations import layer_bytes_per_token
from ...model.prompts import PASS_TOKENS as PROMPT_TOKENS
from ...model.weights import Layout
from ..config.run_config import Config
from ..config.sampler_names import EXTERNAL
from ..rollout.cache_size import GPU_CACHE_SHARE, free_bytes, wanted_blocks
from ..rollout.decode import bucket
from ..rollout.vllm.generator import CACHE_BYTES
from ..train.moments import CHUNK
from ..train.muon import Matrix, matrices
from .samplers import copied_weight_bytes, is_separate, numerics_of

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
    """How much a pass of training takes, and a rank between two exchanges. These sizes decide no bit."""

    micro_batch: int  # sequences
    shards_in_flight: int
    shards_at_once: int  # that a rank adds up before the ranks exchange the sums


@dataclass(frozen=True)
class RunShape:
    """What the memory of a run depends on, beside the sizes of its passes.

    prompt_tokens: of the longest prompt. trajectory_tokens: of the longest trajectory of many turns, its
    prompt included; 0 where the run has completions. ref_numel: the weights of the reference, 0 without one.
    layout: see layout_of_a_rank. ranks: that have other virtual shards.
    adapters: the layout of LoRA's adapters, which are trained in place of the weights of `layout`. base: the
    dtype of the weights that they are merged into.
    """

    config: Config
    layout: Layout
    ranks: int = 1
    prompt_tokens: int = 0
    ref_numel: int = 0
    trajectory_tokens: int = 0
    adapters: AdapterLayout | None = None
    base: torch.dtype = torch.float32

    @property
    def max_tokens(self) -> int:
        """Of a completion, or of a trajectory."""
        sampling = self.config.sampling
        return self.trajectory_tokens or max(sampling.max_tokens, sampling.answer_max_tokens)

    @property
    def dtype(self) -> torch.dtype:
        """That is computed in."""
        return DTYPES[self.config.dtype]

    @property
    def moment_bytes(self) -> int:
        """Of the moments of all that is trained, over all ranks. Muon's matrices have one moment."""
        optimizer = self.config.optimizer
        elements = 2 * self.trained_numel - sum(matrix.rows * matrix.columns for matrix in self._muon)
        if optimizer.moments == "int8":
            return elements + 4 * -(-elements // CHUNK)
        return elements * DTYPES[optimizer.moments].itemsize

    @property
    def wide_moment_bytes(self) -> int:
        """Of a rank's fp32 copies of what the ledger hashes: moments in fewer bits, and Muon's second one."""
        optimizer = self.config.optimizer
        copies = 2 if optimizer.moments != "float32" else int(optimizer.name == "muon")
        return 0 if self.is_away else 4 * copies * self.trained_numel // self.ranks

    @property
    def polar_bytes(self) -> int:
        """What Muon needs for one polar factor: the matrix, its gram and temporaries of both, in fp32."""
        return 24 * max((matrix.rows * matrix.columns for matrix in self._muon), default=0)

    @property
    def _muon(self) -> list[Matrix]:
        return list(matrices(self.layout)) if self.config.optimizer.name == "muon" else []

    @property
    def is_away(self) -> bool:
        """Whether memory lies beside the device (`offloading.placed` has decided it)."""
        return self.config.memory.offload in ("host", "disk")

    @property
    def shards_of_a_rank(self) -> int:
        return max(1, self.config.virtual_shards // self.ranks)

    @property
    def sequences_of_a_shard(self) -> int:
        """The most sequences of a virtual shard."""
        return -(-self.config.prompts * self.config.rollouts_per_prompt // self.config.virtual_shards)

    @property
    def group(self) -> int:
        """Sequences of a prompt. Where reasonings are cut, each cut is the prompt of its answers."""
        cuts = self.config.loss.cuts(self.config.num_generations)
        return min(cuts.answers, cuts.reasonings) if cuts else self.config.num_generations

    @property
    def prompts_of_a_shard(self) -> int:
        """The most prompts that a virtual shard has sequences of."""
        n, group = self.sequences_of_a_shard, self.group
        return -(-n // group) + (n % group != 0 and group % n != 0)

    @property
    def trained_numel(self) -> int:
        """Elements of the gradient: of A and B where adapters are trained."""
        return (self.adapters or self.layout).trained_numel

    @property
    def lm_head_elements(self) -> int:
        """Of the gradient buffer that lm_head has beside the embedding's, where both are one."""
        model = self.layout.config
        return model.vocab_size * model.hidden_size if model.tied and "embed" not in self.layout.frozen else 0


def layout_of_a_rank(config: Config, layout: Layout) -> Layout:
    """Of the weights that a rank computes with, where ranks share experts; otherwise `layout`."""
    n = config.parallel.expert
    return layout.of_expert_rank(n) if n > 1 else layout


class Footprint(NamedTuple):
    """Bytes at the peak of a step, by what they are for."""

    weights: int
    other_weights: int  # the reference's, a base with adapters, and the copies of a sampler or a scorer
    optimizer: int  # with LoRA: the adapters and their moments
    gradients: int
    activations: int
    logits: int
    cache: int  # of all samplers

    def __str__(self) -> str:
        return ", ".join(
            f"{name.replace('_', ' ')} {value / _GIB:.1f}" for name, value in self._asdict().items()
        )


def activation_bytes(
    layout: Layout,
    dtype: torch.dtype,
    rows: int,
    recompute: bool,
    copied_rows: int = 0,
    is_away: bool = False,
) -> int:
    """What a pass of `rows` rows keeps for its backward, and the temporaries of one layer's backward.

    The layers before the first weight that is trained have no backward, and keep nothing. With recompute, a
    layer keeps its two inputs only, and one layer at a time is computed again. is_away: the inputs lie beside
    the device, where those of three layers are left: of the one before, of this one, and on their way.
    copied_rows: of prompts, whose keys and values the attention of each sample keeps a copy of.
    """
    model = layout.config
    layer = layer_bytes_per_token(model, dtype.itemsize)
    inputs = 2 * model.hidden_size * dtype.itemsize
    keys = 2 * model.kv_heads * model.head_dim * dtype.itemsize
    layers = model.layers - layers_without_backward(layout)
    if recompute:
        layers = min(layers, 3) if is_away else layers
        return rows * (layers * inputs + 2 * layer) + 2 * copied_rows * keys
    return (layers + 1) * (rows * layer + copied_rows * keys)


def layers_without_backward(layout: Layout) -> int:
    """How many of the first layers have frozen weights only, with a frozen embedding before them."""
    first_trained = layout.trained[0].name
    if first_trained.startswith("layers."):
        return int(first_trained.split(".")[1])
    return 0 if first_trained == "embed" else layout.config.layers


def footprint(run: RunShape, sizes: PassSizes, free: int) -> Footprint:
    """The peak of a step with these sizes. free: bytes of the GPU before the run has put anything on it.

    What lies beside the GPU (offloading.py) has slices there: of weights, two moments and the gradient.
    """
    config, layout = run.config, run.layout
    weights = layout.numel * run.dtype.itemsize
    other_weights = run.ref_numel * run.dtype.itemsize + layout.numel * copied_weight_bytes(config)
    in_place = run.dtype == torch.float32 and not config.precision.weights  # the master weights
    optimizer = (run.moment_bytes + (0 if in_place else 4 * layout.trained_numel)) // run.ranks
    if run.adapters:
        other_weights += 0 if run.is_away else layout.trained_numel * run.base.itemsize
        optimizer = 4 * run.adapters.numel + run.moment_bytes // run.ranks
    if run.is_away:
        # A slice of narrow moments has a copy in fp32 beside it, and codes need temporaries.
        narrow = {"float32": 0, "bfloat16": 4, "int8": 24}[config.optimizer.moments]
        optimizer = (4 * 4 + narrow) * min(SLICE, run.trained_numel) + (
            4 * run.adapters.numel if run.adapters else 0
        )
    if config.parallel.engine == "fsdp":
        sharded = sharded_bytes(run)
        weights, other_weights = max(sharded.drawing, sharded.computing), 0
        optimizer = sharded.persistent
    return Footprint(
        weights=weights,
        other_weights=other_weights,
        optimizer=optimizer + run.polar_bytes,
        gradients=_gradient_bytes(run, sizes),
        # The ledger hashes once the activations are gone.
        activations=max(_activation_bytes(run, sizes), run.wide_moment_bytes),
        logits=max(3 * GPU_CHUNK_BYTES, GPU_CHUNK_BYTES_16),
        cache=_cache_bytes(run, free - weights - other_weights - optimizer),
    )


def _gradient_bytes(run: RunShape, sizes: PassSizes) -> int:
    """One buffer for each shard in flight (with tied embeddings, another one of lm_head), and partial sums.

    Those of the shards that a rank adds up are whole gradients. Those over the ranks are of a rank's slice.
    """
    if run.config.parallel.engine == "fsdp":
        # A leaf, the tree over the rounds, the rank's slice, and the slice on its way back to the pieces.
        rank_elements = (3 + levels(run.shards_of_a_rank)) * run.trained_numel // run.ranks
        return 4 * (rank_elements + (run.trained_numel if run.adapters else 0))
    trained, rounds = run.trained_numel, run.shards_of_a_rank // sizes.shards_at_once
    in_flight = min(sizes.shards_in_flight, sizes.shards_at_once)
    whole = in_flight * (trained + run.lm_head_elements)
    whole += 0 if run.is_away else levels(sizes.shards_at_once) * trained
    slice_elements = (1 + levels(rounds)) * trained // run.ranks if run.ranks > 1 else 0
    return 4 * (whole + slice_elements)


class ShardedBytes(NamedTuple):
    """Bytes of a rank whose weights FSDP shards, without activations, the cache and the gradient's tree.

    persistent: a rank's part of the master weights, of the moments of what is trained, and of the reference.
    With LoRA: of the base, of the merged weights if there are any, and the adapters with their moments.
    drawing: the whole copy of whoever draws or scores. computing: the weights and gradients that are whole
    while a layer, or what lies outside of layers, computes. Of the two there is one at a time.
    """

    persistent: int
    drawing: int
    computing: int


def sharded_bytes(run: RunShape) -> ShardedBytes:
    """The bytes of a run. A gradient is whole four times: summed, handed over, sent and received.

    Beside a layer the next one is gathered, and a layer's fused weights are copies of their parts.
    """
    layout, size = run.layout, run.dtype.itemsize
    layer = max(_numel(layout, f"layers.{i}.") for i in range(layout.config.layers))
    outside = sum(entry.numel for name, entry in layout.entries.items() if not name.startswith("layers."))
    computing = size * (outside + 3 * layer)
    spread = 4 * layout.numel + size * run.ref_numel
    if run.adapters:
        adapter_bytes = 4 * run.adapters.numel + run.moment_bytes // run.ranks
        base = run.base.itemsize * layout.trained_numel if run.adapters.lora.merge else 0
        persistent = (spread + base) // run.ranks + adapter_bytes
    else:
        persistent = (spread + run.moment_bytes) // run.ranks
        computing += 16 * max(layer, outside)
    return ShardedBytes(persistent, size * max(layout.numel, run.ref_numel), computing)


def _numel(layout: Layout, prefix: str) -> int:
    return sum(entry.numel for name, entry in layout.entries.items() if name.startswith(prefix))


def levels(leaves: int) -> int:
    """The partial sums that a tree of so many leaves keeps (gradient.GradientTree)."""
    return leaves.bit_length() - 1


def _activation_bytes(run: RunShape, sizes: PassSizes) -> int:
    rows, copied_rows = rows_of_a_pass(run, sizes)
    recompute = run.config.recompute == "layer"
    kept = activation_bytes(run.layout, run.dtype, rows, recompute, copied_rows, run.is_away)
    # One layer has its backward at a time.
    shapes = run.layout.config.states.values()
    delta = max((shape.backward_bytes(rows, sizes.micro_batch) for shape in shapes), default=0)
    return kept + rows * _adapter_row_bytes(run) + delta


def rows_of_a_pass(run: RunShape, sizes: PassSizes) -> tuple[int, int]:
    """Rows of the sequences of a pass, and of their prompts, which all shards in flight keep until its end.

    And rows of prompts that attention copies for each sample.
    """
    tokens = run.prompt_tokens
    sequences = min(sizes.micro_batch, sizes.shards_in_flight * run.sequences_of_a_shard)
    prompt_rows = min(max(PROMPT_TOKENS, tokens), run.prompts_of_a_shard * tokens)
    rows = sequences * run.max_tokens + sizes.shards_in_flight * prompt_rows
    return rows, sequences * tokens


def _adapter_row_bytes(run: RunShape) -> int:
    """Of each row, what the gradients of one adapter are computed from, in fp32 (kernels/low_rank.py).

    It is the longest of all adapters': x, dy, x a^T and dy b.
    """
    adapters = run.adapters.adapters if run.adapters else []
    return max((4 * (x.a.shape[1] + x.b.shape[0] + 2 * x.a.shape[0]) for x in adapters), default=0)


def _cache_bytes(run: RunShape, free: int) -> int:
    """The key-value caches of all samplers. free: bytes of the GPU when the first cache is made."""
    config, evaluation = run.config, run.config.evaluation
    training = config.prompts * (config.rollouts_per_prompt // run.group), run.group
    held_out = [(evaluation.problems, evaluation.num_generations)] if evaluation.every else []
    if config.sampler in ("vllm-zerokl", "vllm-exact"):
        cache = config.vllm.cache_bytes
        if not is_separate(config):  # it draws the evaluation as well
            return cache
        return cache + _native_cache_bytes(run, held_out, free - cache, sampler=False)
    if config.sampler in EXTERNAL:
        external = CACHE_BYTES if config.sampler == "vllm" else _hf_bytes(run)
        return external + _native_cache_bytes(run, held_out, free - external, sampler=False)
    if not is_separate(config):
        return _native_cache_bytes(run, [training, *held_out], free, sampler=False)
    separate = _native_cache_bytes(run, [training], free, sampler=True)
    return separate + _native_cache_bytes(run, held_out, free - separate, sampler=False)


def _native_cache_bytes(run: RunShape, calls: list[tuple[int, int]], free: int, sampler: bool) -> int:
    """Of one native sampler. calls: prompts of a call over all ranks, and samples of each.

    sampler: it has the numerics of the setting `precision.sampler_...`.
    """
    if not calls:
        return 0
    config, numerics = run.config, numerics_of(run.config, sampler)
    compute = DTYPES[(sampler and config.precision.sampler_dtype) or config.dtype]
    dtype = min(compute, numerics.cache or compute, key=lambda x: x.itemsize)
    size, most = (max(1, run.prompt_tokens), run.max_tokens), config.native.max_concurrency
    prompts = [(-(-n // run.ranks), group) for n, group in calls]
    # The trajectories of many turns that wait for their environment are kept beside those that are drawn.
    at_once = [n * group if run.trajectory_tokens else min(most, n * group) for n, group in prompts]
    wanted = max(wanted_blocks([size], n, m) for (n, _), m in zip(prompts, at_once, strict=True))
    limit = config.native.cache_bytes or int(GPU_CACHE_SHARE * free)
    block_bytes = BlockCache.bytes_per_block(run.layout.config, dtype)
    # The sampler refuses to run with less than one sample. One block is of the rows that pad a graph.
    one = wanted_blocks([size], 1, 1) + 1
    c, at_once = run.layout.config, min(most, max(at_once))
    slots = BlockCache.bytes_per_slot(c, compute) * (bucket(at_once) + 2)
    states = slots + numerics.attention.state_bytes(at_once, c.heads, c.head_dim, sum(size))
    return states + block_bytes * max(one, min(wanted + 1, limit // block_bytes))


def _hf_bytes(run: RunShape) -> int:
    """Keys, values and logits of transformers' `generate`, which draws all samples of a rank together."""
    config, model = run.config, run.layout.config
    dtype = DTYPES[config.precision.sampler_dtype or config.dtype]
    samples = -(-config.prompts // run.ranks) * config.rollouts_per_prompt
    keys = 2 * model.layers * model.kv_heads * model.head_dim * dtype.itemsize
    tokens = run.max_tokens
    return samples * ((run.prompt_tokens + tokens) * keys + tokens * model.vocab_size * 4)


def fit(run: RunShape, device: torch.device) -> PassSizes:
    """The sizes that the configuration names. In place of 0, on a GPU, the largest that the memory allows.

    Raises ValueError, with the remedy, where a GPU cannot hold the run.
    """
    if device.type == "cpu":
        config, shards = run.config, run.shards_of_a_rank
        in_flight = min(config.shards_in_flight or 1, shards)
        return PassSizes(config.micro_batch or CPU_MICRO_BATCH, in_flight, shards)
    return fit_into(run, free_bytes(device))


def fit_into(run: RunShape, free: int) -> PassSizes:
    """The sizes of `fit` on a GPU. free: its bytes, before the run has put anything on it."""
    config, shards = run.config, run.shards_of_a_rank
    buffer_bytes = 4 * (run.trained_numel + run.lm_head_elements)
    most = max(1, int(_GRADIENT_SHARE * free) // buffer_bytes)
    in_flight = min(config.shards_in_flight or -(-shards // -(-shards // most)), shards)
    useful = min(PASS_TOKENS // run.max_tokens, in_flight * run.sequences_of_a_shard)
    sizes: PassSizes | None = PassSizes(config.micro_batch or max(1, useful), in_flight, shards)
    while sizes is not None:
        needed = footprint(run, sizes, free)
        if sum(needed) <= _USABLE * free:
            return sizes
        sizes = _smaller(run, sizes)
    raise ValueError(_does_not_fit(config, needed, free))


def _smaller(run: RunShape, sizes: PassSizes) -> PassSizes | None:
    """The next sizes to try; None where every size is as small as the configuration allows.

    The shards in flight that a pass does not fill come first, as they cost a buffer each and no time. Then
    ranks exchange their sums more often. A pass becomes shorter last.
    """
    micro_batch, in_flight, at_once = sizes
    fewer = -(-in_flight // 2)
    can_shorten = not run.config.micro_batch and micro_batch > 1
    can_lower = not run.config.shards_in_flight and in_flight > 1
    if can_lower and micro_batch <= fewer * run.sequences_of_a_shard:
        return sizes._replace(shards_in_flight=fewer)
    if run.ranks > 1 and at_once >= 2 * in_flight:
        return sizes._replace(shards_at_once=at_once // 2)
    if can_shorten:
        return sizes._replace(micro_batch=micro_batch // 2)
    return sizes._replace(shards_in_flight=fewer) if can_lower else None


def _does_not_fit(config: Config, needed: Footprint, free: int) -> str:
    remedies = ['set recompute = "layer"'] if config.recompute == "none" else []
    if config.memory.offload == "none" and config.parallel.engine == "replicated":
        remedies.append('set memory.offload = "auto"')
    if config.micro_batch > 1:
        remedies.append("lower micro_batch")
    if config.shards_in_flight > 1:
        remedies.append("lower shards_in_flight")
    cache = "vllm" if config.sampler in ("vllm-zerokl", "vllm-exact") else "native"
    remedies += [f"limit {cache}.cache_bytes", "lower sampling.max_tokens", "spread the run over more ranks"]
    return (
        f"memory: a step needs about {sum(needed) / _GIB:.1f} GiB ({needed}), and the GPU has "
        f"{free / _GIB:.1f} GiB free; {', or '.join(remedies)}"
    )
