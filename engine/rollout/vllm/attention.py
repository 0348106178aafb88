"""Our attention over vLLM's paged cache (interface: vllm/v1/attention/backend.py).

A block of vLLM's cache holds `block_size` positions of one sequence over all key-value heads. We read it as
block_size / KEY_TILE blocks of our own, [Hkv, 2, KEY_TILE, D] each, so that kernels/attention.py runs on it
unchanged. The backend decides what lies inside a block: vLLM only moves, zeroes and shares whole blocks.

On a GPU the metadata are tensors at fixed addresses, made without a wait for the GPU. So vLLM can replay a
forward of one token for each request as a CUDA graph (vllm.cuda_graphs). A graph has padding rows. They have
no request, and they write into vLLM's block 0, which holds nobody's keys.

Shapes: T new tokens of all requests, Hq query heads and Hkv key-value heads of width D.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from ....kernels.attention import attention_cached
from ....kernels.attention_plan import KEY_TILE, AttentionPlan
from ....kernels.attention_rule import WALK, AttentionRule
from ....kernels.attention_sinks import sink_rows
from ....kernels.attention_tables import SharedChunks, Spans, shared_chunks
from ....kernels.backend import on_triton
from .plugin import ATTENTION


class ZeroklAttentionBackend(AttentionBackend):
    """The backend that our model gives to each of vLLM's `Attention` layers."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """CUSTOM: vLLM wants a name of its own list, and this name is for backends from outside."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Blocks of whole key tiles."""
        return [MultipleOf(KEY_TILE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """One contiguous tensor for each layer, block by block."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Yes: a row's bits do not depend on the other rows (kernels/attention.py)."""
        return True

    @staticmethod
    def get_impl_cls() -> type["ZeroklAttentionImpl"]:
        return ZeroklAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["ZeroklMetadataBuilder"]:
        return ZeroklMetadataBuilder


@dataclass
class ZeroklMetadata:
    """What attention needs to know of one forward. All layers share it."""

    plan: AttentionPlan | Spans
    block: torch.Tensor  # [T], our block for the key and value of each new token
    offset: torch.Tensor  # [T], their position in that block


class ZeroklMetadataBuilder(AttentionMetadataBuilder[ZeroklMetadata]):
    """Turns vLLM's block tables into our attention plan."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._tiles = kv_cache_spec.block_size // KEY_TILE  # our blocks in one of vLLM's blocks
        self._heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self._kv_heads = kv_cache_spec.num_kv_heads
        scheduler = vllm_config.scheduler_config
        tokens = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        self._block, self._offset = (torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(2))
        self._max_requests, self._table = scheduler.max_num_seqs, None
        hf_config = vllm_config.model_config.hf_config
        self._chunk = AttentionRule(*getattr(hf_config, ATTENTION, WALK)).chunk
        self._shared: SharedChunks | None = None
        if self._chunk and on_triton(self._block):
            from ....kernels.attention_split_triton import no_chunks

            sizes = self._max_requests, self._heads, self._kv_heads
            self._shared = no_chunks(*sizes, vllm_config.model_config.dtype, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ZeroklMetadata:
        cm = common_attn_metadata
        T = cm.num_actual_tokens
        slots = cm.slot_mapping[:T].clamp(min=0)  # a padding row has -1
        torch.div(slots, KEY_TILE, rounding_mode="floor", out=self._block[:T])
        torch.remainder(slots, KEY_TILE, out=self._offset[:T])
        for places in (self._block, self._offset):
            places[T:] = 0  # a graph may have more rows than this forward has tokens
        plan = self._spans(cm) if on_triton(cm.slot_mapping) else self._plan(cm)
        return ZeroklMetadata(plan, self._block[:T], self._offset[:T])

    def _plan(self, cm: CommonAttentionMetadata) -> AttentionPlan:
        """The reference's plan, from numbers on the host."""
        n = cm.num_reqs
        lengths = np.diff(cm.query_start_loc_cpu[: n + 1].numpy())
        contexts = cm.seq_lens[:n].cpu().numpy() - lengths
        columns = -(-int(cm.max_seq_len) // (self._tiles * KEY_TILE))
        blocks = cm.block_table_tensor[:n, :columns].cpu().numpy().astype(np.int64)
        tables = (blocks[:, :, None] * self._tiles + np.arange(self._tiles)).reshape(n, -1)
        return AttentionPlan(lengths, contexts, tables, self._heads, self._kv_heads)

    def _spans(self, cm: CommonAttentionMetadata) -> Spans:
        """The plan of the Triton kernels: vLLM's own buffers, and our tables at fixed addresses.

        Where each request has one token, requests with the same blocks share their chunks. vLLM gives a block
        to several requests when it is full, and so it stays as it is.
        """
        n, blocks = cm.num_reqs, cm.block_table_tensor
        if self._table is None:
            shape = self._max_requests, blocks.shape[1], self._tiles
            self._table = torch.zeros(shape, dtype=torch.int32, device=blocks.device)
        ours = torch.arange(self._tiles, dtype=torch.int32, device=blocks.device)
        torch.add(blocks[:n, :, None] * self._tiles, ours, out=self._table[:n])
        table, lengths, shared = self._table[:n].flatten(1), cm.seq_lens[:n], None
        if self._shared is not None and cm.num_actual_tokens == n:
            shared = self._shared.of_rows(n)
            shared_chunks(table, lengths, self._chunk // KEY_TILE, KEY_TILE, shared)
        return Spans(cm.query_start_loc[: n + 1], lengths, table, self._kv_heads, shared=shared)


class ZeroklAttentionImpl(AttentionImpl[ZeroklMetadata]):
    """attention_cached over vLLM's cache. rule: of the layer, with its window and its cap.

    current_sinks: gives the layer's weight [Hq], as it is now; None where it has none. vLLM is told of none
    of these (sampler.py), so it keeps all keys, in one kind of cache for all layers.
    Raises ValueError for kinds of attention that zerokl does not have.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        rule: AttentionRule = WALK,
        current_sinks: Callable[[], torch.Tensor] | None = None,
        **extra: Any,
    ):
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            **extra,
        }
        for name, value in unsupported.items():
            if value is not None:
                raise ValueError(f"zerokl's attention has no {name} ({value})")
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"zerokl's attention has no attn_type {attn_type}, only {AttentionType.DECODER}")
        self.num_heads, self.head_size, self.scale, self.rule = num_heads, head_size, scale, rule
        self._current_sinks = current_sinks
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: ZeroklMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query, output [T, Hq, D], key, value [T, Hkv, D], kv_cache [blocks, Hkv, block_size, 2 D]."""
        assert output_scale is output_block_scale is None, (
            "a quantised model is refused at start (model/config.py and arguments.py)"
        )
        if attn_metadata is None:  # vLLM measures its memory with a forward without requests
            return output.zero_()
        T = len(attn_metadata.block)
        blocks = kv_cache.view(-1, self.num_kv_heads, 2, KEY_TILE, self.head_size)
        by_token = blocks.permute(0, 3, 2, 1, 4)  # [block, offset, 2, Hkv, D]
        by_token.index_put_(
            (attn_metadata.block, attn_metadata.offset), torch.stack([key[:T], value[:T]], dim=1)
        )
        tiles = blocks.view(-1, 2, KEY_TILE, self.head_size)
        sinks = None if self._current_sinks is None else sink_rows(self._current_sinks(), T)
        output[:T] = attention_cached(query[:T], tiles, attn_metadata.plan, self.scale, self.rule, sinks)
        return output
