"""The native sampler: continuous batching over our own key-value cache, in process.

Ids that several requests continue are read once, and their samples share the cache blocks. The last row
draws their first tokens. Then each turn draws one token for each running sample (decode.py). When samples
end, the next ones take their places. None of this decides a bit: a token depends on its own sequence, the
weights and its own key.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from ...kernels.attention_plan import KEY_TILE
from ...kernels.backend import on_triton
from ...kernels.matmul import pack_weights
from ...kernels.philox import Stream
from ...model.cache import BlockCache, CachedContext
from ...model.decoder import Decoder
from ..stopwatch import Stopwatch
from .cache_size import cache_limit, completion_blocks, wanted_blocks
from .decode import DecodeMemory, DecodeRows, Drawn, Row
from .types import Completion, DrawParams, Request, check_requests

# Tokens of one forward where none are named. A GPU is kept busy by a few large passes.
_BATCH_TOKENS, _GPU_BATCH_TOKENS = 1024, 16384


class _Kind(NamedTuple):
    """What the requests of one pass share. Graphs are made for it."""

    draw_params: DrawParams
    seed: int
    stream: Stream


@dataclass
class _Prefix:
    """Ids that are read, or about to be read, once for several requests."""

    ids: tuple[int, ...]
    waiting: deque[tuple[int, Request]]  # those that have not started, each with its index in the call
    blocks: list[int] = field(default_factory=list)  # of the cache, once the reading begins
    # [1, D], hidden state of the last token: predicts the first token of each sample
    last: torch.Tensor | None = None


@dataclass
class _Sample:
    """A completion that is being drawn."""

    prefix: _Prefix
    index: int  # of the request in the call
    request: Request
    blocks: list[int]
    is_last: bool  # of its prefix
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""

    def append(self, token: int, logprob: float) -> None:
        """Take a drawn token; set `finish` when it was the last token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.request.draw_params.stop_ids:
            self.finish = "stop"
        elif not self.tokens_left:
            self.finish = "length"

    @property
    def tokens_left(self) -> int:
        """Tokens that it may still draw."""
        return self.request.max_tokens - len(self.tokens)

    @property
    def drawn(self) -> int:
        """Tokens of the trajectory that were drawn so far."""
        return self.request.drawn + len(self.tokens)

    @property
    def row(self) -> Row:
        """What decode.py needs of this sample."""
        ids, tokens, request = self.prefix.ids, self.tokens, self.request
        token, place = tokens[-1] if tokens else ids[-1], len(ids) + len(tokens) - 1
        last = request.drawn + request.max_tokens
        return Row(token, place, self.drawn, last, request.rng_key, self.blocks)


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
        self._fit = 0  # blocks that the cache's limit allowed when _memory was made
        self._decoding: dict[_Kind, DecodeRows] = {}

    def sync_weights(self, version: int) -> None:
        """See Sampler. The decoder's weights are the trainer's, or their owner has changed them already."""
        self.version = version

    def close(self) -> None:
        """Nothing runs outside this process."""

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See Sampler.

        Requests of one kind run together, one kind after another. Raises ValueError for an empty prompt, for
        a prompt that is too long, or where the cache cannot hold one sample. Raises FloatingPointError where
        logits are not finite.
        """
        check_requests(requests, self.decoder.config.max_positions, self.decoder.config.vocab_size)
        if not requests:  # a rank without a share: its times are zeros, as the trainer's are
            with self.stopwatch.station("time/prompts_s"), self.stopwatch.station("time/decode_s"):
                return []
        kinds: dict[_Kind, list[int]] = {}
        for i, request in enumerate(requests):
            key = request.rng_key
            kinds.setdefault(_Kind(request.draw_params, key.seed, key.stream), []).append(i)
        completions: dict[int, Completion] = {}
        self.samples_at_once = 0
        for kind, indices in kinds.items():
            completions |= self._generate_kind(kind, _prefixes(requests, indices))
        return [completions[i] for i in range(len(requests))]

    def _generate_kind(self, kind: _Kind, prefixes: Sequence[_Prefix]) -> dict[int, Completion]:
        """The completions by the index of their request."""
        memory = self._make_memory(prefixes)
        decoding = self._decoding_of(memory, kind)
        self._memory = None  # a call that fails leaves blocks that nobody releases
        generation = _Generation(self, decoding, prefixes)
        completions = generation.run()
        decoding.stop()
        self.samples_at_once = self.samples_at_once or generation.samples_at_once
        if self.decoder.device.type == "cuda":
            self._memory = memory
        return completions

    def _make_memory(self, prefixes: Sequence[_Prefix]) -> DecodeMemory:
        """Memory for these prefixes, within the limit of the cache; the last call's where it is large enough.

        Raises ValueError where the limit is too low for one sample.
        """
        sizes = {(len(p.ids), request.max_tokens) for p in prefixes for _, request in p.waiting}
        longest = max(n + max_tokens for n, max_tokens in sizes)
        samples = min(self.max_concurrency, sum(len(p.waiting) for p in prefixes))
        pages = BlockCache.blocks_for(longest - 1)
        wanted = wanted_blocks(sizes, len(prefixes), samples)
        one = max(wanted_blocks([size], 1, 1) for size in sizes)
        # What the limit allowed decides as long as there is a memory. It would change with every tensor else.
        if self._memory is not None and self._memory.holds(samples, pages, max(one, min(self._fit, wanted))):
            return self._memory
        if (
            self._memory is not None
        ):  # calls of two shapes by turns, as training and evaluation, then share it
            samples, pages, wanted = self._memory.grown(samples, pages, wanted)
        self._memory = None
        self._decoding.clear()
        self._fit = self._fitting_blocks(one, longest)
        return DecodeMemory(self.decoder, samples, pages, min(self._fit, wanted))

    def _fitting_blocks(self, one: int, longest: int) -> int:
        """The blocks that the limit of the cache allows now.

        Raises ValueError where they are fewer than `one`, which a sample of `longest` tokens needs.
        """
        block_bytes = BlockCache.bytes_per_block(self.decoder.config, self.decoder.cache_dtype)
        limit = cache_limit(self._cache_bytes, self.decoder.device) // self.workers
        padding = on_triton(self.decoder.flat)  # the page of the rows that pad a graph
        fit = limit // block_bytes - padding
        if fit < one:
            for_each = f" for each of {self.workers} workers" if self.workers > 1 else ""
            raise ValueError(
                f"sampler: cache_bytes ({limit * self.workers}) cannot hold one sample of "
                f"{longest} tokens ({block_bytes * (one + padding)} bytes)"
                f"{for_each}; raise it or lower max_tokens"
            )
        return fit

    def _decoding_of(self, memory: DecodeMemory, kind: _Kind) -> DecodeRows:
        """The turns of this kind of request, with the graphs of earlier calls."""
        decoding = self._decoding.get(kind)
        if decoding is None or decoding.memory is not memory:
            decoding = self._decoding[kind] = DecodeRows(self.decoder, memory, *kind)
        decoding.start(pack_weights(self.decoder.matrices()))
        return decoding


def _prefixes(requests: Sequence[Request], indices: Iterable[int]) -> list[_Prefix]:
    """The requests at these indices, those side by side with equal ids together."""
    return [
        _Prefix(ids, deque((i, requests[i]) for i in group))
        for ids, group in groupby(indices, key=lambda i: requests[i].ids)
    ]


class _Generation:
    """The state of one pass over requests of one kind."""

    def __init__(self, sampler: NativeSampler, decoding: DecodeRows, prefixes: Sequence[_Prefix]):
        self.sampler, self.decoding, self.cache = sampler, decoding, decoding.memory.cache
        self.waiting = list(prefixes)[::-1]
        self.open: _Prefix | None = None  # the prefix whose samples start next
        self.running: list[_Sample] = []
        self.ended: dict[int, Completion] = {}
        self.samples_at_once = 0

    def run(self) -> dict[int, Completion]:
        """Draw everything. Returns the completions by the index of their request."""
        while True:
            started = self._start_samples()
            if not self.running:
                if not self.waiting and self.open is None:
                    return self.ended
                assert started, "an empty cache has room for a sample"
                continue  # all samples ended with their first token
            with self.sampler.stopwatch.station("time/decode_s"):
                self.decoding.load([sample.row for sample in self.running])
                self._draw_until_one_ends()

    def _draw_until_one_ends(self) -> None:
        """Turns of the running samples. The next ones are launched before the last ones are read."""
        samples, in_flight = list(self.running), deque()
        left, ended = max(sample.tokens_left for sample in samples), False
        while in_flight or not ended:
            while not ended and left and len(in_flight) <= self.decoding.looks_ahead:
                turns = min(left, self.decoding.look_every)
                in_flight.append(self.decoding.run(turns))
                left -= turns
            ended |= self._take(samples, in_flight.popleft().read())

    def _start_samples(self) -> bool:
        """Start samples in the order of the requests while there is room; returns whether any started."""
        prefixes, samples = [], []
        while len(self.running) + len(samples) < self.sampler.max_concurrency:
            if self.open is None:
                if not self.waiting or not self._has_room(self.waiting[-1], is_new=True):
                    break
                self.open = self.waiting.pop()
                self.open.blocks = self.cache.take(BlockCache.blocks_for(len(self.open.ids)))
                prefixes.append(self.open)
            elif not self._has_room(self.open, is_new=False):
                break
            samples.append(self._start_sample(self.open))
            if not self.open.waiting:
                self.open = None
        if not samples:
            return False
        self.cache.zero_taken()
        with self.sampler.stopwatch.station("time/prompts_s"):
            self._read(prefixes)
        self._copy_partial_blocks(samples)
        self.running += samples
        self.samples_at_once = self.samples_at_once or len(self.running)
        hidden = torch.cat([sample.prefix.last for sample in samples])
        self._take(samples, self.decoding.first([sample.row for sample in samples], hidden))
        return True

    def _has_room(self, prefix: _Prefix, is_new: bool) -> bool:
        """Whether the cache has room for the next sample of a prefix, and for the prefix where it is new."""
        needed = completion_blocks(len(prefix.ids), prefix.waiting[0][1].max_tokens)
        return self.cache.free >= needed + (BlockCache.blocks_for(len(prefix.ids)) if is_new else 0)

    def _start_sample(self, prefix: _Prefix) -> _Sample:
        """The next sample, with blocks for all its tokens. It shares the prefix's full blocks."""
        index, request = prefix.waiting.popleft()
        new_blocks = self.cache.take(completion_blocks(len(prefix.ids), request.max_tokens))
        blocks = self.cache.share(prefix.blocks[: len(prefix.ids) // KEY_TILE]) + new_blocks
        return _Sample(prefix, index, request, blocks, is_last=not prefix.waiting)

    def _copy_partial_blocks(self, samples: Sequence[_Sample]) -> None:
        """Give each new sample its copy of its prefix's last block, where that is only partly filled.

        The prefix of a last sample is released: nobody reads it again.
        """
        partial = [
            (s, len(s.prefix.ids) // KEY_TILE)
            for s in samples
            if len(s.prefix.ids) % KEY_TILE and s.request.max_tokens > 1
        ]
        if partial:
            self.cache.copy([s.prefix.blocks[i] for s, i in partial], [s.blocks[i] for s, i in partial])
        for sample in samples:
            if sample.is_last:
                self.cache.release(sample.prefix.blocks)

    def _read(self, prefixes: Sequence[_Prefix]) -> None:
        """Read prefixes in passes of at most max_batch_tokens; a longer one is read in chunks."""
        limit = self.sampler.max_batch_tokens
        chunks = deque(
            (p, start, min(len(p.ids), start + limit))
            for p in prefixes
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
        """Give each sample the tokens that it drew; returns whether any sample ended with them."""
        ended = []
        for i, sample in enumerate(samples):
            if sample.finish:
                continue  # it ended in an earlier look
            for ids, logprobs in zip(*drawn, strict=True):
                if sample.finish:
                    break  # what it drew past its end is dropped
                if not np.isfinite(logprobs[i]):
                    self._refuse(sample)
                sample.append(int(ids[i]), float(logprobs[i]))
            if sample.finish:
                ended.append(sample)
        for sample in ended:
            self._end(sample)
        return bool(ended)

    def _refuse(self, sample: _Sample) -> None:
        key = sample.request.rng_key
        raise FloatingPointError(
            f"sampler: the logits of prompt {key.prompt}, sample {key.sample}, "
            f"position {sample.drawn} are not finite; the weights (version {self.sampler.version}) "
            f"are damaged or overflow in {self.sampler.decoder.dtype}"
        )

    def _end(self, sample: _Sample) -> None:
        self.running.remove(sample)
        self.cache.release(sample.blocks)
        self.ended[sample.index] = Completion(
            tuple(sample.tokens),
            np.array(sample.logprobs, np.float32),
            sample.finish,
            self.sampler.version,
        )
