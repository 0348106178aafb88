"""The section `vllm` of the configuration (run_config.py)."""

from typing import Any

from pydantic import Field

from .section import Section


class VllmConfig(Section):
    """vLLM as the sampler. These settings change no bit of the result."""

    multiprocess: bool = False
    """Run vLLM's engine in a process of its own."""
    context: int = Field(0, ge=0)
    """Tokens of the longest sequence; 0 is the model's context, but at most 4096."""
    max_concurrency: int = Field(64, ge=1)
    """Samples drawn at once (max_num_seqs)."""
    max_batch_tokens: int = Field(2048, ge=1)
    """Tokens of one forward (max_num_batched_tokens)."""
    chunked_prefill: bool = True
    """Read long prompts in chunks."""
    prefix_caching: bool = True
    """Sequences with equal beginnings share this part of the cache."""
    block_tokens: int = Field(32, ge=32, multiple_of=32)
    """Positions of a cache block (block_size)."""
    cache_bytes: int = Field(1 << 30, ge=1)
    """Size of the key-value cache, bytes (kv_cache_memory_bytes)."""
    cuda_graphs: bool = False
    """Replay each decoding forward as a CUDA graph. vLLM then keeps a copy of the weights. On a GPU only; an
    H200 has run it in bf16, exactly, and drew three times as fast."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of vllm.LLM, by vLLM's names. Arguments that could break exactness are refused."""
