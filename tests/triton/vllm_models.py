"""vLLM's own model classes on a CPU; every layer takes its path on CUDA in batch-invariant mode.

The Triton kernels are vLLM's, interpreted. vLLM's CUDA operations have no build here. The functions named
`emulated_` write out their arithmetic after csrc (libtorch_stable/activation_kernels.cu,
pos_encoding_kernels.cu, layernorm_kernels.cu). Attention is vLLM's unified_attention over pages, with the
arguments that vLLM's TritonAttentionImpl passes to it.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from zerokl.model.decoder import Decoder

from tests.triton.test_elementwise import fused_rope, written_out_silu_mul
from tests.triton.written_out import written_out_topk

PAGE = 16


class _Cuda:
    """The platform as a layer on a GPU sees it."""

    def __init__(self, real: Any):
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def is_cpu(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return True

    is_cuda_alike = is_cuda


def emulated_silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(written_out_silu_mul(x))


def emulated_rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox) -> None:
    assert is_neox
    cos, sin = (t[positions].float() for t in cos_sin_cache.chunk(2, dim=-1))
    for x in (query, key):
        x.copy_(fused_rope(x.reshape(len(x), -1, head_size), cos, sin).reshape(x.shape))


def emulated_fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """x and residual are both changed in place.

    Thread i sums the squares of columns i, i + threads, and so on. Then the lanes of a warp are added by
    halves, and the warps one after another.
    """
    tokens, D = x.shape
    threads = min(D, 1024 if tokens < 256 else 256)
    s = x + residual
    columns = np.zeros((tokens, -(-D // threads) * threads))
    columns[:, :D] = s.double().numpy()
    lanes = np.zeros((tokens, threads), np.float32)
    for part in np.split(columns, columns.shape[1] // threads, axis=1):
        # A fused multiply-add: the product of two fp32 numbers is exact in fp64.
        lanes = (part * part + lanes).astype(np.float32)
    warps = np.zeros((tokens, -(-threads // 32) * 32), np.float32)
    warps[:, :threads] = lanes
    warps = warps.reshape(tokens, -1, 32)
    for half in (16, 8, 4, 2, 1):
        warps = warps[..., :half] + warps[..., half : 2 * half]
    total = np.add.accumulate(warps[..., 0], axis=1, dtype=np.float32)[:, -1:]
    r = torch.from_numpy(np.float32(1.0) / np.sqrt(total / np.float32(D) + np.float32(eps), dtype=np.float32))
    residual.copy_(s)
    x.copy_((s.float() * r * weight.float()).to(x.dtype))


class Batch:
    """The sequences of one forward, on scattered pages.

    The queries of sequence i are the last `queries[i]` of its `lengths[i]` tokens.
    """

    def __init__(self, lengths: Sequence[int], queries: Sequence[int], longest: int):
        pages = -(-longest // PAGE)
        self.pages = pages * len(lengths)
        order = torch.randperm(self.pages, generator=torch.Generator().manual_seed(0))
        self.table = order.int().view(len(lengths), pages)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.starts = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32)
        self.longest_query = max(queries)
        spans = [(i, n - q, n) for i, (n, q) in enumerate(zip(lengths, queries, strict=True))]
        self.positions = torch.cat([torch.arange(a, b) for _, a, b in spans])
        slots = [self.table[i, p // PAGE] * PAGE + p % PAGE for i, a, b in spans for p in range(a, b)]
        self.slots = torch.stack(slots).long()


class PagedAttention(torch.nn.Module):
    """Takes the place of vLLM's Attention, and calls its kernel."""

    batch: Batch

    def __init__(self, attention: torch.nn.Module):
        super().__init__()
        self.heads, self.kv_heads = attention.num_heads, attention.num_kv_heads
        self.width, self.scale = attention.head_size, attention.impl.scale
        self.cache: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        b, (q, k, v) = self.batch, (x.reshape(len(x), -1, self.width) for x in (q, k, v))
        if self.cache is None:
            shape = (b.pages, PAGE, self.kv_heads, self.width)
            self.cache = tuple(torch.zeros(shape, dtype=q.dtype) for _ in "kv")
        for pages, x in zip(self.cache, (k, v), strict=True):
            pages.view(-1, self.kv_heads, self.width)[b.slots] = x
        out = torch.full_like(q, float("nan"))
        unified_attention(
            q,
            *self.cache,
            out,
            b.starts,
            b.longest_query,
            b.lengths,
            int(b.lengths.max()),
            self.scale,
            True,
            (-1, -1),
            b.table,
            0,
            None,
            None,
            None,
        )
        return out.reshape(len(q), -1)


def _patch_vllm(patch: pytest.MonkeyPatch) -> None:
    """Put vLLM's layers on their path on CUDA."""
    from vllm import _custom_ops
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers import activation, linear, logits_processor, vocab_parallel_embedding

    for module in (custom_op, activation, linear, logits_processor, vocab_parallel_embedding):
        patch.setattr(module, "current_platform", _Cuda(module.current_platform))
    patch.setattr(_custom_ops, "rotary_embedding", emulated_rotary_embedding)
    patch.setattr(_custom_ops, "fused_add_rms_norm", emulated_fused_add_rms_norm)


def emulated_topk_softmax(w, ids, token_expert_indices, logits, renormalise, *_, is_padding) -> None:
    assert is_padding is None
    for out, x in zip((w, ids), written_out_topk(logits, w.shape[1], renormalise), strict=True):
        out.copy_(x)


def emulated_moe_align_block_size(ids, experts, block, slots, by_block, number, expert_map, scatter) -> None:
    """Slots by expert, each expert's padded to a block with a slot that is not there."""
    assert expert_map is scatter is None
    flat, filled, blocks = ids.flatten(), [], []
    for expert in range(experts):
        expert_slots = (flat == expert).nonzero()[:, 0].tolist()
        padded = -(-len(expert_slots) // block) * block
        filled += expert_slots + [len(flat)] * (padded - len(expert_slots))
        blocks += [expert] * (padded // block)
    slots.fill_(len(flat))[: len(filled)] = torch.tensor(filled, dtype=slots.dtype)
    by_block.zero_()[: len(blocks)] = torch.tensor(blocks, dtype=by_block.dtype)
    number.fill_(len(filled))


def emulated_moe_sum(x, out, *_) -> None:
    total = torch.zeros(out.shape)
    for slot in x.unbind(1):
        total += slot.float()
    out.copy_(total)


def _patch_experts(patch: pytest.MonkeyPatch) -> None:
    """Put vLLM's experts on their path on CUDA: its fused_moe_kernel between its compiled operations."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe import activation
    from vllm.model_executor.layers.fused_moe.experts import triton_moe
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.model_executor.layers.fused_moe.router import router_factory

    for module in (triton_moe, unquantized, router_factory):
        patch.setattr(module, "current_platform", _Cuda(module.current_platform))
    patch.setattr(_custom_ops, "topk_softmax", emulated_topk_softmax)
    patch.setattr(_custom_ops, "moe_align_block_size", emulated_moe_align_block_size)
    patch.setattr(_custom_ops, "moe_sum", emulated_moe_sum)
    patch.setattr(activation.torch.ops._C, "silu_and_mul", emulated_silu_and_mul, raising=False)


def _prepare_experts(runner: Any) -> None:
    """What vLLM does to experts after it has loaded them, and its forward without a forward context."""
    runner.routed_experts.quant_method.process_weights_after_loading(runner.routed_experts)
    runner._sequence_parallel_context = nullcontext
    runner._forward_entry = lambda x, logits, shared, ids, *_: runner._forward_impl(x, logits, shared, ids)


def vllm_model(decoder: Decoder, folder: Path, patch: pytest.MonkeyPatch) -> torch.nn.Module:
    """vLLM's model of the decoder's architecture with the decoder's weights.

    vLLM stays patched while `patch` lasts.
    """
    (folder / "config.json").write_text(json.dumps(decoder.config.raw))
    for name, value in {
        "VLLM_BATCH_INVARIANT": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        patch.setenv(name, value)
    import vllm.distributed as distributed
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry

    config = EngineArgs(
        model=str(folder),
        dtype=str(decoder.dtype).removeprefix("torch."),
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=decoder.config.max_positions,
    ).create_engine_config()
    _patch_vllm(patch)
    if decoder.config.experts:
        _patch_experts(patch)
    with set_current_vllm_config(config):
        if distributed.model_parallel_is_initialized():
            distributed.destroy_model_parallel()  # those of a dense model have no group for experts
        else:
            distributed.init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
        distributed.initialize_model_parallel(1, 1)
        model_class, _ = ModelRegistry.resolve_model_cls(decoder.config.architecture, config.model_config)
        before = torch.get_default_dtype()
        torch.set_default_dtype(decoder.dtype)
        try:
            model = model_class(vllm_config=config)
        finally:
            torch.set_default_dtype(before)
    model.load_weights(iter(decoder.layout.checkpoint_views(decoder.flat.detach()).items()))
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            _prepare_experts(layer.mlp.experts)
        else:
            layer.mlp.act_fn.op = emulated_silu_and_mul
        layer.self_attn.attn = PagedAttention(layer.self_attn.attn)
    return model


@torch.no_grad()
def logits_of(model: torch.nn.Module, ids: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The logits [T, V] of ids [T], which are the queries of `batch`; keys and values are kept."""
    PagedAttention.batch = batch
    return model.compute_logits(model(ids, batch.positions, None, None))
