"""The native sampler: continuous batching over our own key-value cache, in process.

A call's requests of one kind are one pass (generation.py) over one memory (decode.py). None of this decides
a bit: a token depends on its own sequence, the weights and its own key.

What outlives a call: on a GPU the memory, because graphs read it where it lies; on a CPU only a memory that
keeps blocks for later turns (prefix_cache.py). Blocks are kept for requests that turns may follow, and for
no others. So a call of one turn costs nothing more, and its memory is free while the trainer runs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from ...kernels.backend import on_triton
from ...kernels.matmul import pack_weights
from ...kernels.philox import Stream
from ...kernels.sampling_params import SamplingParams
from ...model.cache import BlockCache
from ...model.decoder import Decoder
from .cache_size import CacheNeed, cache_limit, cache_need
from .decode import DecodeMemory, DecodeRows, bucket
from .generation import Generation, PassLimits, Prefix, make_prefixes
from .guesser import Guesser, TextGuesser
from .scoring_sampler import score_rollouts
from .speculation import Speculation
from .stopwatch import Stopwatch
from .types import Completion, DrawParams, Request, RequestSource, Rollout, check_requests

# Sequences of one forward of a score. It decides no bit.
_SCORED_AT_ONCE = 16

# Tokens of one forward where none are named. A GPU is kept busy by a few large passes.
_BATCH_TOKENS, _GPU_BATCH_TOKENS = 1024, 16384


class _Kind(NamedTuple):
    """What the requests of one pass share. Graphs are made for it."""

    draw_params: DrawParams
    seed: int
    stream: Stream


class NativeSampler:
    """Samples from a decoder, which may be the trainer's.

    max_concurrency: samples drawn at once.
    max_batch_tokens: tokens of one forward that reads prompts; longer prompts are read in chunks. 0 is 1,024
        on a CPU and 16,384 on a GPU.
    cache_bytes: upper limit of the key-value cache. Where it cannot hold all samples, fewer run at once. 0 is
        4 GiB on a CPU, and on a GPU 0.3 of the memory that is free when the cache is made.
    speculate: tokens that are guessed ahead in a turn of a sample, at most; 0 guesses none (speculation.py).
    guesser: whoever guesses them; None is a TextGuesser.
    workers: number of samplers that share these limits; this sampler is one of them and takes its part.
    stopwatch: measures the stations of a call; None is one of its own.

    samples_at_once: the number of samples that ran at once at the beginning of the last call.
    tokens_read, tokens_cached: of the ids of the last call's requests, what was read and what the cache had.
    """

    def __init__(
        self,
        decoder: Decoder,
        max_concurrency: int = 64,
        max_batch_tokens: int = 0,
        cache_bytes: int = 0,
        speculate: int = 0,
        version: int = 0,
        workers: int = 1,
        stopwatch: Stopwatch | None = None,
        guesser: Guesser | None = None,
    ):
        if max_concurrency < 1:
            raise ValueError(f"sampler: max_concurrency ({max_concurrency}) must be at least 1")
        sizes = {"max_batch_tokens": max_batch_tokens, "cache_bytes": cache_bytes, "speculate": speculate}
        for name, value in sizes.items():
            if value < 0:
                raise ValueError(f"sampler: {name} ({value}) must not be negative")
        self.decoder, self.version = decoder, version
        default = _BATCH_TOKENS if decoder.device.type == "cpu" else _GPU_BATCH_TOKENS
        self.limits = PassLimits(-(-max_concurrency // workers), -(-(max_batch_tokens or default) // workers))
        self.workers = workers
        self.samples_at_once = self.tokens_read = self.tokens_cached = 0
        self.stopwatch = stopwatch or Stopwatch(decoder.device)
        self._cache_bytes = cache_bytes
        self._speculation: Speculation | None = None
        if speculate and decoder.config.states:
            raise ValueError(
                f"sampler: speculate ({speculate}) must be 0 for a {decoder.config.architecture}: a refused "
                "guess would stay in the states of its gated delta nets"
            )
        if speculate:
            vocab, device = decoder.config.vocab_size, decoder.device
            self._speculation = Speculation(guesser or TextGuesser(), speculate, vocab, device)
        self._memory: DecodeMemory | None = None
        self._fit = 0  # blocks that the cache's limit allowed when _memory was made
        self._decoding: dict[_Kind, DecodeRows] = {}

    def sync_weights(self, version: int) -> None:
        """Name the new version: the decoder's weights are those of the trainer, or are changed already."""
        self.end_turns()
        self.version = version

    def end_turns(self) -> None:
        if self._memory is None:
            return
        self._memory.prefix_cache.clear()
        if self.decoder.device.type == "cpu":
            self._memory, self._decoding = None, {}

    def close(self) -> None:
        """Nothing runs outside this process."""

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete the requests: those of one kind run together, one kind after another.

        Raises ValueError for an empty prompt, for a prompt that is too long, or where the cache cannot hold
        one sample. Raises FloatingPointError where logits are not finite.
        """
        self.tokens_read = self.tokens_cached = 0
        if not requests:  # a rank without a share: its times are zeros, as the trainer's are
            with self.stopwatch.station("time/prompts_s"), self.stopwatch.station("time/decode_s"):
                return []
        self.samples_at_once = 0
        completions = _Completions()
        self._run(list(enumerate(requests)), completions)
        return [completions.by_place[i] for i in range(len(requests))]

    def score(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams) -> list[np.ndarray]:
        return score_rollouts(self.decoder, rollouts, sampling_params, _SCORED_AT_ONCE)

    @torch.no_grad()
    def serve(self, source: RequestSource) -> None:
        """The first requests are all that can be ready, so that they share memory.

        Raises as `generate` does.
        """
        self.tokens_read = self.tokens_cached = self.samples_at_once = 0
        self._run(source.ready(math.inf), source)

    def _run(self, requests: list[tuple[int, Request]], source: RequestSource) -> None:
        """Draw these requests and all that come, one kind after another."""
        while requests:
            self._check(request for _, request in requests)
            kind = _kind(requests[0][1])
            others = [pair for pair in requests if _kind(pair[1]) != kind]
            prefixes = make_prefixes(pair for pair in requests if _kind(pair[1]) == kind)
            requests = others + self._run_kind(kind, prefixes, source)

    def _check(self, requests: Iterable[Request]) -> None:
        config = self.decoder.config
        check_requests(list(requests), config.max_positions, config.vocab_size)

    def _run_kind(
        self, kind: _Kind, prefixes: Sequence[Prefix], source: RequestSource
    ) -> list[tuple[int, Request]]:
        """Draw requests of one kind. Returns what came, and is of another kind or needs a larger memory."""
        memory = self._make_memory(prefixes)
        decoding = self._decoding_of(memory, kind)

        def fits(request: Request) -> bool:
            self._check([request])
            alone = [replace(request, trajectory_tokens=0)]
            need = cache_need(alone, 1, 1, self.decoder.config.max_positions)
            return _kind(request) == kind and memory.holds(need.rows, need.pages, need.one_sample)

        # A call that fails leaves no memory: nobody would release its blocks.
        decoding_by_kind, self._memory, self._decoding = self._decoding, None, {}
        generation = Generation(
            decoding, prefixes, source, fits, self.limits, self.version, self.stopwatch, self._speculation
        )
        set_aside = generation.run()
        decoding.stop()
        self.samples_at_once = self.samples_at_once or generation.samples_at_once
        self.tokens_read += generation.tokens_read
        self.tokens_cached += generation.tokens_cached
        if self.decoder.device.type == "cuda" or len(memory.prefix_cache):
            self._memory, self._decoding = memory, decoding_by_kind
        return set_aside

    def _make_memory(self, prefixes: Sequence[Prefix]) -> DecodeMemory:
        """Memory for these prefixes, within the limit of the cache; the last call's where it is large enough.

        Raises ValueError where the limit is too low for one sample.
        """
        requests = [request for prefix in prefixes for _, request in prefix.waiting]
        need = cache_need(
            requests, len(prefixes), self.limits.max_concurrency, self.decoder.config.max_positions
        )
        rows, pages, wanted = need.rows, need.pages, need.wanted_blocks
        if self._speculation is not None:
            rows *= 1 + self._speculation.k
        if self._memory is not None and self._memory.holds(rows, pages, self._blocks_enough(need)):
            return self._memory
        if self._memory is not None:
            # Calls of two shapes by turns, as training and evaluation, then share it.
            rows, pages, wanted = self._memory.grown(rows, pages, wanted)
        self._memory = None
        self._decoding.clear()
        self._fit = self._fitting_blocks(need)
        return DecodeMemory(self.decoder, rows, pages, min(self._fit, wanted))

    def _blocks_enough(self, need: CacheNeed) -> int:
        """The blocks with which the last call's memory is large enough for this one.

        What the limit allowed decides as long as there is a memory. It would change with every tensor else.
        Where blocks are kept for later turns, room for one sample is enough: another memory has none of them.
        """
        kept = self._memory is not None and len(self._memory.prefix_cache)
        return need.one_sample if kept else max(need.one_sample, min(self._fit, need.wanted_blocks))

    def _fitting_blocks(self, need: CacheNeed) -> int:
        """The blocks that the limit of the cache allows now.

        Raises ValueError where they are fewer than one sample needs.
        """
        block_bytes = BlockCache.bytes_per_block(self.decoder.config, self.decoder.cache_dtype)
        limit = cache_limit(self._cache_bytes, self.decoder.device) // self.workers
        padding = on_triton(self.decoder.flat)  # the page and the slot of the rows that pad a graph
        rows = bucket(need.rows) + 1 if padding else need.rows
        slots = BlockCache.bytes_per_slot(self.decoder.config, self.decoder.dtype) * (rows + 1)
        fit = (limit - slots) // block_bytes - padding
        if fit < need.one_sample:
            for_each = f" for each of {self.workers} workers" if self.workers > 1 else ""
            states = f" beside the states of {rows + 1} samples ({slots} bytes)" if slots else ""
            fewer = " or max_concurrency" if slots else ""
            raise ValueError(
                f"sampler: cache_bytes ({limit * self.workers}) cannot hold one sample of "
                f"{need.longest_tokens} tokens ({block_bytes * (need.one_sample + padding)} bytes)"
                f"{states}{for_each}; raise it or lower max_tokens{fewer}"
            )
        return fit

    def _decoding_of(self, memory: DecodeMemory, kind: _Kind) -> DecodeRows:
        """The turns of this kind of request, with the graphs of earlier calls."""
        decoding = self._decoding.get(kind)
        if decoding is None or decoding.memory is not memory:
            decoding = self._decoding[kind] = DecodeRows(self.decoder, memory, *kind)
        decoding.start(pack_weights(self.decoder.packable(), self.decoder.leaves_of_products()))
        return decoding


def _kind(request: Request) -> _Kind:
    return _Kind(request.draw_params, request.rng_key.seed, request.rng_key.stream)


class _Completions:
    """The completions of a call to which no request is added. See RequestSource."""

    def __init__(self) -> None:
        self.by_place: dict[int, Completion] = {}

    def ready(self, at_least: float) -> list[tuple[int, Request]]:
        return []

    def completed(self, place: int, completion: Completion) -> None:
        self.by_place[place] = completion
