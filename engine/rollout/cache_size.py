"""How large the native sampler's key-value cache is: what its samples want, and what the device allows."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from ...kernels.attention_plan import KEY_TILE
from ...model.cache import BlockCache
from .types import Request

# Upper limit of the cache where none is named: on a GPU a share of its free memory.
_CPU_CACHE_BYTES, GPU_CACHE_SHARE = 4 << 30, 0.3


def completion_blocks(prefix_tokens: int, max_tokens: int) -> int:
    """Cache blocks of a sample, without the prefix's full blocks, which it shares.

    The last token that it draws has no keys in the cache.
    """
    return BlockCache.blocks_for(prefix_tokens + max_tokens - 1) - prefix_tokens // KEY_TILE


def wanted_blocks(sizes: Collection[tuple[int, int]], prefixes: int, samples: int) -> int:
    """Cache blocks with which `samples` samples of so many prefixes run at once.

    sizes: the tokens of a prefix, and the most that are drawn after it; the largest ones count. A prefix's
    blocks are there once for all its samples. At most `samples` prefixes have samples that run.
    """
    prefix_blocks = max(BlockCache.blocks_for(n) for n, _ in sizes)
    new_blocks = max(completion_blocks(n, max_tokens) for n, max_tokens in sizes)
    return min(samples, prefixes) * prefix_blocks + samples * new_blocks


class CacheNeed(NamedTuple):
    """What a call needs of a memory."""

    rows: int  # for samples that run at once
    pages: int  # of a sample
    wanted_blocks: int  # with which as many samples as may run at once do, and all that may go on are kept
    one_sample: int  # blocks without which nothing runs
    longest_tokens: int  # of the longest sample of the call


def cache_need(
    requests: Sequence[Request], prefixes: int, max_concurrency: int, max_positions: int
) -> CacheNeed:
    """What a call of these requests needs. prefixes: how many of them are read.

    A request that turns may follow counts as if it drew the whole trajectory. One block more is there for a
    later turn's copy of a partial block, and there are rows for trajectories that come from other workers. So
    the memory of the first turn is large enough for the others.
    """
    sizes = {(len(r.ids), r.max_tokens) for r in requests}
    whole = {
        (n, max(max_tokens, min(total, max_positions) - n))
        for n, max_tokens, total in {(len(r.ids), r.max_tokens, r.trajectory_tokens) for r in requests}
    }
    samples = min(max_concurrency, len(requests))
    going_on = sum(r.trajectory_tokens > 0 for r in requests)
    wanted = wanted_blocks(whole, prefixes, min(len(requests), samples + going_on)) + (going_on > 0)
    return CacheNeed(
        max_concurrency if going_on else samples,
        BlockCache.blocks_for(max(map(sum, whole)) - 1),
        wanted,
        max(wanted_blocks([size], 1, 1) for size in sizes),
        max(map(sum, sizes)),
    )


def cache_limit(cache_bytes: int, device: torch.device) -> int:
    """Upper limit of the cache in bytes, all workers together. cache_bytes: the setting; 0 is automatic."""
    if cache_bytes:
        return cache_bytes
    return int(GPU_CACHE_SHARE * free_bytes(device)) if device.type == "cuda" else _CPU_CACHE_BYTES


def free_bytes(device: torch.device) -> int:
    """Bytes that torch can still allocate on a GPU: what nobody has, and what torch has and does not use.

    torch's allocator keeps what tensors have given back. The driver counts this memory as taken.
    """
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept
