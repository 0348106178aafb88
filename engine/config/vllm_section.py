"""The section `vllm` of the configuration (run_config.py)."""

from typing import Any

from pydantic import Field

from .section import PlannedRun, Section, free, rule


class VllmConfig(Section, head=free("limits of the sampler; by the law they decide no bit")):
    """vLLM as the sampler. These settings change no bit of the result."""

    multiprocess: bool = False
    """Run vLLM's engine in a process of its own."""

    @rule
    def _one_process_on_a_gpu(self, run: PlannedRun) -> str | None:
        if run.keyed_vllm and run.device == "cuda" and self.multiprocess:
            return (
                "vllm.multiprocess (true): on a GPU vLLM reads the trainer's own tensors, "
                "which are in this process; set it to false"
            )

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

    @rule
    def _graphs_are_of_a_gpu(self, run: PlannedRun) -> str | None:
        if self.cuda_graphs and run.config.sampler.startswith("vllm") and run.device == "cpu":
            return "vllm.cuda_graphs (true): a CPU has no CUDA graphs; set it to false"

    schedule_ahead: bool = False
    """Launch a forward before the last one's tokens are read (async_scheduling), so that the GPU has work
    while the host reads. On a GPU only; none has run it."""

    @rule
    def _a_cpu_is_not_ahead(self, run: PlannedRun) -> str | None:
        if self.schedule_ahead and run.config.sampler.startswith("vllm") and run.device == "cpu":
            return "vllm.schedule_ahead (true): vLLM does not do it on a CPU; set it to false"

    speculate: int = Field(0, ge=0, le=32)
    """Tokens that are guessed ahead in one forward of a sample, at most; 0 guesses none. A guess is compared
    with the token that its key draws.
    """

    @rule
    def _guesses_of_our_decoder(self, run: PlannedRun) -> str | None:
        if self.speculate and run.config.sampler != "vllm-zerokl":
            return (
                f'vllm.speculate ({self.speculate}) with sampler ("{run.config.sampler}"): beside guesses '
                "vLLM takes no draw but its own and that of zerokl's decoder; set it to 0, or sampler = "
                '"vllm-zerokl" (native has native.speculate)'
            )

    @rule
    def _guesses_follow_what_was_read(self, run: PlannedRun) -> str | None:
        if self.speculate and (self.schedule_ahead or self.cuda_graphs):
            return (
                f"vllm.speculate ({self.speculate}) with vllm.schedule_ahead or vllm.cuda_graphs (true): "
                "vLLM asks for guesses when a forward's tokens are read, and a graph has one row of each "
                "sample; set it to 0, or these to false"
            )

    @property
    def sample_tokens(self) -> int:
        """Tokens of one sample in one forward, at most."""
        others = map(self.engine.get, ("max_num_scheduled_tokens", "long_prefill_token_threshold"))
        return min([self.max_batch_tokens, *(n for n in others if isinstance(n, int) and n > 0)])

    @rule
    def _all_guesses_fit(self, run: PlannedRun) -> str | None:
        if self.speculate >= self.sample_tokens:
            return (
                f"vllm.speculate ({self.speculate}) must be below the tokens of a sample in one forward "
                f"({self.sample_tokens}): vLLM begins some samples with a row for each guess or not at all; "
                "set it lower, or vllm.max_batch_tokens (or a limit in vllm.engine) higher"
            )

    engine: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of vllm.LLM, by vLLM's names. Arguments that could break exactness are refused."""
