"""The native sampler: continuous batching over our own key-value cache, in process.

A prompt is read once, and its samples share its cache blocks. Its last row draws their first tokens. Then
each turn draws one token for each running sample (decode.py). When samples end, the next ones take their
places. None of this decides a bit: a token depends on its own sequence, the weights and its own key.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...kernels.attention_plan import KEY_TILE
from ...kernels.backend import on_triton
from ...kernels.matmul import pack_weights
from ...kernels.philox import Stream
from ...model.cache import BlockCache, CachedContext
from ...model.decoder import Decoder
from ..stopwatch import Stopwatch
from .decode import DecodeMemory, DecodeRows, Drawn, Row
from .types import GenerationParams, RngKey, Rollout, check_room

# Tokens of one forward where none are named. A GPU is kept busy by a few large passes.
_BATCH_TOKENS, _GPU_BATCH_TOKENS = 1024, 16384
# Upper limit of the cache where none is named: on a GPU a share of its free memory.
_CACHE_BYTES, _GPU_CACHE_SHARE = 4 << 30, 0.3


@dataclass
class _Prompt:
    """A prompt that is read, or about to be read."""

    index: int
    ids: tuple[int, ...]
    blocks: list[int]
    started: int = 0  # samples that have started
    # [1, D], hidden state of the last token: predicts the first token of each sample
    last: torch.Tensor | None = None


@dataclass
class _Sample:
    """A completion that is being drawn."""

    prompt: _Prompt
    index: int
    blocks: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""

    def append(self, token: int, logprob: float, generation_params: GenerationParams) -> None:
        """Take a drawn token; set `finish` when it was the last token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in generation_params.stop_ids:
            self.finish = "stop"
        elif len(self.tokens) == generation_params.max_tokens:
            self.finish = "length"

    @property
    def row(self) -> Row:
        """What decode.py needs of this sample."""
        ids, tokens = self.prompt.ids, self.tokens
        last = tokens[-1] if tokens else ids[-1]
        place = len(ids) + len(tokens) - 1
        return Row(last, place, len(tokens), self.prompt.index, self.index, self.blocks)


def completion_blocks(prompt_tokens: int, max_tokens: int) -> int:
    """Cache blocks of a sample, without the prompt's full blocks, which it shares.

    The last token that it draws has no keys in the cache.
    """
    return BlockCache.blocks_for(prompt_tokens + max_tokens - 1) - prompt_tokens // KEY_TILE


class NativeSampler:
    """Samples from a decoder, which may be the trainer's.

    max_concurrency: samples drawn at once.
    max_batch_tokens: tokens of one forward that reads prompts; longer prompts are read in chunks. 0 is 1,024
        on a CPU and 16,384 on a GPU.
    cache_bytes: upper limit of the key-value cache. Where it cannot hold all samples, fewer run at once. 0 is
        4 GiB on a CPU, and on a GPU 0.3 of the memory that is free when the cache is made.
    workers: number of samplers that share these limits; this sampler is one of them and takes its part.
    stopwatch: measures the stations of a call; None is one of its own.

    samples_at_once: the number of samples that ran at once at the beginning of the last call.
    """

    def __init__(
        self,
        decoder: Decoder,
        max_concurrency: int = 64,
        max_batch_tokens: int = 0,
        cache_bytes: int = 0,
        version: int = 0,
        workers: int = 1,
        stopwatch: Stopwatch | None = None,
    ):
        if max_concurrency < 1:
            raise ValueError(f"sampler: max_concurrency ({max_concurrency}) must be at least 1")
        for name, value in (("max_batch_tokens", max_batch_tokens), ("cache_bytes", cache_bytes)):
            if value < 0:
                raise ValueError(f"sampler: {name} ({value}) must not be negative")
        self.decoder, self.version = decoder, version
        self.max_concurrency = -(-max_concurrency // workers)
        default = _GPU_BATCH_TOKENS if decoder.device.type == "cuda" else _BATCH_TOKENS
        self.max_batch_tokens = -(-(max_batch_tokens or default) // workers)
        self.workers, self.samples_at_once = workers, 0
        self.stopwatch = stopwatch or Stopwatch(decoder.device)
        self._cache_bytes = cache_bytes
        # On a GPU they outlive a call, because graphs read them where they lie.
        self._memory: DecodeMemory | None = None
        self._decoding: dict[tuple[GenerationParams, int, Stream], DecodeRows] = {}

    def sync_weights(self, version: int) -> None:
        """See Sampler. The decoder's weights are the trainer's, or their owner has changed them already."""
        self.version = version

    def close(self) -> None:
        """Nothing runs outside this process."""

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, rng_key: RngKey
    ) -> list[Rollout]:
        """See Sampler.

        Raises ValueError for an empty prompt, for a prompt that is too long, or where the cache cannot hold
        one sample. Raises FloatingPointError where logits are not finite.
        """
        check_prompts(
            prompts, generation_params, self.decoder.config.max_positions, self.decoder.config.vocab_size
        )
        if not prompts:  # a rank without a share: its times are zeros, as the trainer's are
            with self.stopwatch.station("time/prompts_s"), self.stopwatch.station("time/decode_s"):
                return []
        memory = self._make_memory(prompts, generation_params)
        decoding = self._decoding_of(memory, generation_params, rng_key)
        self._memory = None  # a call that fails leaves blocks that nobody releases
        generation = _Generation(self, decoding, prompts, rng_key)
        rollouts = generation.run()
        decoding.stop()
        self.samples_at_once = generation.samples_at_once
        if self.decoder.device.type == "cuda":
            self._memory = memory
        return rollouts

    def _make_memory(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams
    ) -> DecodeMemory:
        """Memory for these prompts, within the limit of the cache; the last call's where it is large enough.

        Raises ValueError where the limit is too low for one sample.
        """
        lengths, max_tokens = sorted(set(map(len, prompts))), generation_params.max_tokens
        samples = min(self.max_concurrency, len(prompts) * generation_params.num_generations)
        pages = BlockCache.blocks_for(lengths[-1] + max_tokens - 1)
        # A prompt's blocks are there once for all its samples. At most `samples` prompts have samples.
        new_blocks = max(completion_blocks(n, max_tokens) for n in lengths)
        wanted = min(samples, len(prompts)) * BlockCache.blocks_for(lengths[-1]) + samples * new_blocks
        one = max(BlockCache.blocks_for(n) + completion_blocks(n, max_tokens) for n in lengths)
        if self._memory is not None and self._memory.holds(samples, pages, wanted):
            return self._memory
        block_bytes = BlockCache.bytes_per_block(self.decoder.config, self.decoder.cache_dtype)
        self._memory = None
        self._decoding.clear()
        limit = self._cache_limit() // self.workers
        padding = on_triton(self.decoder.flat)  # the page of the rows that pad a graph
        fit = limit // block_bytes - padding
        if fit < one:
            for_each = f" for each of {self.workers} workers" if self.workers > 1 else ""
            raise ValueError(
                f"sampler: cache_bytes ({limit * self.workers}) cannot hold one sample of "
                f"{lengths[-1] + max_tokens} tokens ({block_bytes * (one + padding)} bytes)"
                f"{for_each}; raise it or lower max_tokens"
            )
        return DecodeMemory(self.decoder, samples, pages, min(fit, wanted))

    def _cache_limit(self) -> int:
        """Upper limit of the cache in bytes, all workers together."""
        if self._cache_bytes:
            return self._cache_bytes
        if self.decoder.device.type == "cuda":
            return int(_GPU_CACHE_SHARE * torch.cuda.mem_get_info(self.decoder.device)[0])
        return _CACHE_BYTES

    def _decoding_of(
        self, memory: DecodeMemory, generation_params: GenerationParams, rng_key: RngKey
    ) -> DecodeRows:
        """The turns of this kind of generation, with the graphs of earlier calls."""
        key = (generation_params, rng_key.seed, rng_key.stream)
        decoding = self._decoding.get(key)
        if decoding is None or decoding.memory is not memory:
            decoding = self._decoding[key] = DecodeRows(
                self.decoder, memory, generation_params, rng_key.seed, rng_key.stream
            )
        decoding.start(rng_key.step, pack_weights(self.decoder.matrices()))
        return decoding


def check_prompts(
    prompts: Sequence[Sequence[int]], generation_params: GenerationParams, limit: int, vocab: int
) -> None:
    """Raise ValueError for prompts or settings that no sampler can draw from.

    limit: the context, in tokens.
    """
    generation_params.sampling_params.check()
    for i, ids in enumerate(prompts):
        if not len(ids):
            raise ValueError(f"prompt {i} is empty; a completion needs at least one token before it")
        if len(ids) + generation_params.max_tokens > limit:
            raise ValueError(
                f"prompt {i} has {len(ids)} tokens, with max_tokens ({generation_params.max_tokens}) "
                f"more than the context ({limit}); shorten it or lower max_tokens"
            )
        wrong = next((t for t in ids if not 0 <= t < vocab), None)
        if wrong is not None:
            raise ValueError(f"prompt {i} has token id {wrong}, outside the model's vocabulary of {vocab}")
    if generation_params.max_tokens < 1 or generation_params.num_generations < 1:
        raise ValueError(
            f"max_tokens ({generation_params.max_tokens}) and "
            f"num_generations ({generation_params.num_generations}) must be at least 1"
        )
    check_room(len(prompts) * generation_params.num_generations, generation_params.max_tokens)


class _Generation:
    """The state of one `generate` call."""

    def __init__(
        self,
        sampler: NativeSampler,
        decoding: DecodeRows,
        prompts: Sequence[Sequence[int]],
        rng_key: RngKey,
    ):
        self.sampler, self.decoding, self.cache = sampler, decoding, decoding.memory.cache
        self.generation_params = decoding.generation_params
        first = rng_key.first_prompt
        self.waiting = [(first + i, tuple(int(t) for t in ids)) for i, ids in enumerate(prompts)][::-1]
        self.open: _Prompt | None = None  # the prompt whose samples start next
        self.running: list[_Sample] = []
        self.ended: dict[tuple[int, int], Rollout] = {}
        self.samples_at_once = 0

    def run(self) -> list[Rollout]:
        """Draw everything. Returns the rollouts in canonical order: prompt by prompt, sample by sample."""
        changed = False
        while True:
            started = self._start_samples()
            if not self.running:
                if not self.waiting and self.open is None:
                    return [self.ended[place] for place in sorted(self.ended)]
                assert started, "an empty cache has room for a sample"
                continue  # all samples ended with their first token
            changed |= started
            left = self.generation_params.max_tokens - min(len(sample.tokens) for sample in self.running)
            with self.sampler.stopwatch.station("time/decode_s"):
                if changed:
                    self.decoding.load([sample.row for sample in self.running])
                drawn = self.decoding.run(min(left, self.decoding.look_every))
            changed = self._take(self.running, drawn)

    def _start_samples(self) -> bool:
        """Start samples in canonical order while there is room; returns whether any started."""
        prompts, samples = [], []
        while len(self.running) + len(samples) < self.sampler.max_concurrency:
            if self.open is None:
                if not self.waiting or not self._has_room(self.waiting[-1][1], is_new=True):
                    break
                index, ids = self.waiting.pop()
                self.open = _Prompt(index, ids, self.cache.allocate(BlockCache.blocks_for(len(ids))))
                prompts.append(self.open)
            elif not self._has_room(self.open.ids, is_new=False):
                break
            samples.append(self._start_sample(self.open))
            if self.open.started == self.generation_params.num_generations:
                self.open = None
        if not samples:
            return False
        with self.sampler.stopwatch.station("time/prompts_s"):
            self._read(prompts)
        self._copy_partial_blocks(samples)
        self.running += samples
        self.samples_at_once = self.samples_at_once or len(self.running)
        hidden = torch.cat([sample.prompt.last for sample in samples])
        self._take(samples, self.decoding.first([sample.row for sample in samples], hidden))
        return True

    def _has_room(self, ids: Sequence[int], is_new: bool) -> bool:
        """Whether the cache has room for a sample of the prompt `ids`, and for the prompt where it is new."""
        needed = completion_blocks(len(ids), self.generation_params.max_tokens)
        return self.cache.free >= needed + (BlockCache.blocks_for(len(ids)) if is_new else 0)

    def _start_sample(self, prompt: _Prompt) -> _Sample:
        """A new sample with blocks for max_tokens. It shares the prompt's full blocks."""
        new_blocks = self.cache.allocate(
            completion_blocks(len(prompt.ids), self.generation_params.max_tokens)
        )
        blocks = self.cache.share(prompt.blocks[: len(prompt.ids) // KEY_TILE]) + new_blocks
        prompt.started += 1
        return _Sample(prompt, prompt.started - 1, blocks)

    def _copy_partial_blocks(self, samples: Sequence[_Sample]) -> None:
        """Give each new sample its copy of its prompt's last block, where that is only partly filled.

        The prompt of a last sample is released: nobody reads it again.
        """
        partial = [(s, len(s.prompt.ids) // KEY_TILE) for s in samples if len(s.prompt.ids) % KEY_TILE]
        if partial and self.generation_params.max_tokens > 1:
            self.cache.copy([s.prompt.blocks[i] for s, i in partial], [s.blocks[i] for s, i in partial])
        for sample in samples:
            if sample.index + 1 == self.generation_params.num_generations:
                self.cache.release(sample.prompt.blocks)

    def _read(self, prompts: Sequence[_Prompt]) -> None:
        """Read prompts in passes of at most max_batch_tokens; a longer prompt is read in chunks."""
        limit = self.sampler.max_batch_tokens
        chunks = deque(
            (p, start, min(len(p.ids), start + limit))
            for p in prompts
            for start in range(0, len(p.ids), limit)
        )
        while chunks:
            batch, tokens = [], 0
            while chunks and tokens + chunks[0][2] - chunks[0][1] <= limit:
                batch.append(chunks.popleft())
                tokens += batch[-1][2] - batch[-1][1]
            lengths = [end - start for _, start, end in batch]
            context = CachedContext(
                self.cache,
                lengths,
                [start for _, start, _ in batch],
                [p.blocks for p, _, _ in batch],
                self.decoding.packed,
            )
            ids = torch.tensor([token for p, start, end in batch for token in p.ids[start:end]])
            rows = self.sampler.decoder.hidden(ids, context).split(lengths)
            for (p, _, _), chunk in zip(batch, rows, strict=True):
                p.last = chunk[-1:].clone()  # the whole pass must not stay in memory

    def _take(self, samples: Sequence[_Sample], drawn: Drawn) -> bool:
        """Give each sample the tokens that it drew; returns whether any sample has ended."""
        for i, sample in enumerate(samples):
            for ids, logprobs in zip(*drawn, strict=True):
                if sample.finish:
                    break  # what it drew past its end is dropped
                if not np.isfinite(logprobs[i]):
                    self._refuse(sample)
                sample.append(int(ids[i]), float(logprobs[i]), self.generation_params)
        ended = [sample for sample in samples if sample.finish]
        for sample in ended:
            self._end(sample)
        return bool(ended)

    def _refuse(self, sample: _Sample) -> None:
        raise FloatingPointError(
            f"sampler: the logits of prompt {sample.prompt.index}, sample {sample.index}, "
            f"position {len(sample.tokens)} are not finite; the weights (version {self.sampler.version}) "
            f"are damaged or overflow in {self.sampler.decoder.dtype}"
        )

    def _end(self, sample: _Sample) -> None:
        self.running.remove(sample)
        self.cache.release(sample.blocks)
        self.ended[sample.prompt.index, sample.index] = Rollout(
            sample.prompt.index,
            sample.index,
            sample.prompt.ids,
            tuple(sample.tokens),
            np.array(sample.logprobs, np.float32),
            sample.finish,
            self.sampler.version,
        )
