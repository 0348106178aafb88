"""One pass of the native sampler over requests that share what graphs are made for: a queue, and what runs.

Ids that several requests continue are read once, and their samples share the cache blocks. The beginning of
the ids may be in the prefix cache; then the reading begins after it. The last row draws the first tokens.
Then each turn draws one token for each running sample (decode.py), or several where tokens are guessed
(speculation.py). When samples end, the next ones take their places. New requests may come while others run:
those of the next turns of trajectories.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, compress, groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch

from ...kernels.attention_plan import KEY_TILE
from ...model.cache import BlockCache, CachedContext
from ...model.routing import FREE
from .cache_size import completion_blocks
from .decode import DecodeRows, DrawnToken, Look, Row
from .speculation import SampleGuesses, Speculation
from .stopwatch import Stopwatch
from .types import Completion, Request, RequestSource


class PassLimits(NamedTuple):
    """The most that one worker of a NativeSampler computes together: samples, and prompt tokens of a pass."""

    max_concurrency: int
    max_batch_tokens: int


@dataclass(eq=False)  # two may have equal ids
class Prefix:
    """Ids that are read, or about to be read, once for several requests."""

    ids: tuple[int, ...]
    waiting: deque[tuple[int, Request]]  # those that have not started, each with its place
    blocks: list[int] = field(default_factory=list)  # of the cache, once the reading begins
    slot: int = 0  # of the cache, from then on, where a layer has a state
    start: int = 0  # where the reading begins: the tokens before it are in the cache
    # [1, D], hidden state of the last token: predicts the first token of each sample
    last: torch.Tensor | None = None
    # The experts of its tokens, where they are asked for: of kept blocks, and of each chunk that was read. A
    # chunk is some rows of its pass.
    kept_experts: list[np.ndarray] = field(default_factory=list)
    read_experts: list[tuple[Look, slice]] = field(default_factory=list)

    @cached_property
    def experts(self) -> np.ndarray:
        """The experts of its tokens, [n, L, k], once it is read."""
        chunks = [look.arrays()[0][rows] for look, rows in self.read_experts]
        return np.concatenate([*self.kept_experts, *chunks])


@dataclass(eq=False)
class Sample:
    """A completion that is being drawn."""

    prefix: Prefix
    place: int  # of the request
    request: Request
    blocks: list[int]
    slot: int  # of the cache, where a layer has a state
    is_last: bool  # of its prefix
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # [L, k] of each token that was read, which are all but the last, where they are asked for
    experts: list[np.ndarray] = field(default_factory=list)
    finish: str = ""
    guesses: SampleGuesses | None = None  # where tokens are guessed

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
    def written(self) -> tuple[int, ...]:
        """The ids whose keys and values are in its blocks, at its end.

        The last token's are not. Where other rows went on (decode.py), theirs stand in place of those of the
        token before it.
        """
        return (*self.prefix.ids, *self.tokens)[:-2]

    def rows(self, guess: Sequence[int]) -> list[Row]:
        """Its row, and a row for each guessed token after it."""
        row = self.row
        return [row] + [
            row._replace(token=token, position=row.position + i, drawn=row.drawn + i)
            for i, token in enumerate(guess, 1)
        ]

    @property
    def row(self) -> Row:
        """What decode.py needs of this sample."""
        ids, tokens, request = self.prefix.ids, self.tokens, self.request
        token, place = tokens[-1] if tokens else ids[-1], len(ids) + len(tokens) - 1
        last = request.drawn + request.max_tokens
        return Row(token, place, self.drawn, last, request.rng_key, self.blocks, self.slot)


class Generation:
    """The state of one pass over requests of one kind.

    prefixes: to begin with. source: where more requests come from, and completions go to. fits: whether a
    request can be one of this pass. speculation: guesses tokens; None where nobody does.
    tokens_read, tokens_cached: tokens of prefixes that it read, and that it found in the prefix cache.
    """

    def __init__(
        self,
        decoding: DecodeRows,
        prefixes: Sequence[Prefix],
        source: RequestSource,
        fits: Callable[[Request], bool],
        limits: PassLimits,
        version: int,
        stopwatch: Stopwatch,
        speculation: Speculation | None = None,
    ):
        self.speculation = speculation
        self.decoding, self.limits, self.version, self.stopwatch = decoding, limits, version, stopwatch
        self.cache, self.prefix_cache = decoding.memory.cache, decoding.memory.prefix_cache
        self.source, self.fits = source, fits
        # What is kept is used before others need its room.
        self.waiting = sorted(prefixes, key=lambda p: len(self._kept(p)), reverse=True)[::-1]
        self.open: Prefix | None = None  # the prefix whose samples start next
        self.running: list[Sample] = []
        self.arrived: list[tuple[int, Request]] = []  # while others were drawn
        self.set_aside: list[tuple[int, Request]] = []  # requests that do not fit
        self.samples_at_once = self.tokens_read = self.tokens_cached = 0

    def run(self) -> list[tuple[int, Request]]:
        """Draw everything, until no more comes. Returns what came and did not fit."""
        while True:
            idle = not (self.running or self.waiting or self.open)
            arrived, self.arrived = self.arrived + self.source.ready(int(idle)), []
            if idle and not arrived:
                return self.set_aside
            self._admit(arrived)
            started = self._start_samples()
            if not self.running:
                # All samples may have ended with their first token.
                assert started or not (self.waiting or self.open), "an empty cache has room for a sample"
                continue
            with self.stopwatch.station("time/decode_s"):
                self._draw()

    def _admit(self, arrived: Sequence[tuple[int, Request]]) -> None:
        """Queue what has come, before all that waits: what its trajectory has read may be in the cache."""
        fit = [self.fits(request) for _, request in arrived]
        self.set_aside += compress(arrived, (not fits for fits in fit))
        self.waiting += make_prefixes(compress(arrived, fit))[::-1]

    def _draw(self) -> None:
        """Turns of the running samples; one turn where a token is guessed."""
        n = len(self.running)
        guesses = [sample.guesses.next(n) if sample.guesses else [] for sample in self.running]
        if any(guesses):
            self._draw_guessed(guesses)
        else:
            self.decoding.load([sample.row for sample in self.running])
            self._draw_until_one_ends()

    def _draw_guessed(self, guesses: Sequence[Sequence[int]]) -> None:
        """A turn with a row for each guess.

        What refused guesses have written becomes what stands there without guesses: 0.
        """
        samples, ends = list(self.running), [0, *accumulate(len(guess) + 1 for guess in guesses)]
        parts = [slice(*part) for part in pairwise(ends)]
        rows = [row for sample, guess in zip(samples, guesses, strict=True) for row in sample.rows(guess)]
        self.decoding.load(rows)
        drawn = [tokens[0] for tokens in self.decoding.run(1).read().by_row()]
        stand = [
            sample.guesses.stand(guess, drawn[part])
            for sample, guess, part in zip(samples, guesses, parts, strict=True)
        ]
        refused = [row for part, n in zip(parts, stand, strict=True) for row in rows[part][max(n, 1) :]]
        self.cache.clear([(row.pages[row.position // KEY_TILE], row.position % KEY_TILE) for row in refused])
        self.stopwatch.counts["guesses"] += ends[-1] - len(samples)
        self.stopwatch.counts["guesses_drawn"] += sum(max(n, 1) - 1 for n in stand)
        self._take(samples, [drawn[part][:n] for part, n in zip(parts, stand, strict=True)])

    def _draw_until_one_ends(self) -> None:
        """Turns of the running samples, until one ends, or a request has come and there is a row for it.

        The next turns are launched before the last ones are read.
        """
        samples, in_flight = list(self.running), deque()
        left, ended = max(sample.tokens_left for sample in samples), False
        has_room = len(samples) < self.limits.max_concurrency
        while in_flight or not ended:
            while not ended and left and len(in_flight) <= self.decoding.looks_ahead:
                turns = min(left, self.decoding.look_every)
                in_flight.append(self.decoding.run(turns))
                left -= turns
            ended |= self._take(samples, in_flight.popleft().read().by_row())
            ended |= self.speculation is not None  # the next tokens may be guessed now
            if has_room and not ended:
                self.arrived += self.source.ready(0)
                ended = bool(self.arrived)

    def _start_samples(self) -> bool:
        """Start samples in the order of `waiting` while there is room; returns whether any started."""
        prefixes, samples = [], []
        while len(self.running) + len(samples) < self.limits.max_concurrency:
            if self.open is None:
                if not self._open_next():
                    break
                prefixes.append(self.open)
            elif self.prefix_cache.free_beside([]) < _next_blocks(self.open):
                break
            samples.append(self._start_sample(self.open))
            if not self.open.waiting:
                self.open = None
        if not samples:
            return False
        self.cache.zero_taken()
        with self.stopwatch.station("time/prompts_s"):
            self._read(prefixes)
        self._copy_partial_blocks(samples)
        self.running += samples
        self.samples_at_once = self.samples_at_once or len(self.running)
        hidden = torch.cat([sample.prefix.last for sample in samples])
        self._take(samples, self.decoding.first([sample.row for sample in samples], hidden).by_row())
        return True

    def _open_next(self) -> bool:
        """Give the next prefix its blocks, where the cache has room for them and for its first sample.

        With an empty `running` there is room: all other blocks are free, or kept and unused.
        """
        if not self.waiting:
            return False
        prefix = self.waiting[-1]
        kept = self._kept(prefix)
        new_blocks = BlockCache.blocks_for(len(prefix.ids)) - len(kept)
        if self.prefix_cache.free_beside(kept) < new_blocks + _next_blocks(prefix):
            return False
        prefix.blocks = self.prefix_cache.take(kept) + self.prefix_cache.take_new(new_blocks)
        prefix.start, prefix.slot = len(kept) * KEY_TILE, self.cache.take_slot()
        if self.decoding.names_experts:
            prefix.kept_experts = self.prefix_cache.experts(kept)
        self.tokens_cached += prefix.start
        self.open = self.waiting.pop()
        return True

    def _kept(self, prefix: Prefix) -> list[int]:
        """The kept blocks that the reading of a prefix can begin after."""
        return self.prefix_cache.find(prefix.ids, self.decoding.names_experts)

    def _start_sample(self, prefix: Prefix) -> Sample:
        """The next sample, with blocks for all its tokens. It shares the prefix's full blocks."""
        place, request = prefix.waiting.popleft()
        new_blocks = self.prefix_cache.take_new(completion_blocks(len(prefix.ids), request.max_tokens))
        blocks = self.cache.share(prefix.blocks[: len(prefix.ids) // KEY_TILE]) + new_blocks
        is_last = not prefix.waiting
        # The last sample goes on with the prefix's own slot.
        slot = prefix.slot if is_last else self.cache.take_slot()
        sample = Sample(prefix, place, request, blocks, slot, is_last)
        if self.speculation is not None:
            sample.guesses = self.speculation.begin(request, sample.tokens)
        return sample

    def _copy_partial_blocks(self, samples: Sequence[Sample]) -> None:
        """Give each new sample its copy of its prefix's last block, where that is only partly filled.

        And a copy of its prefix's slot. The prefix of a last sample is released: nobody reads it again.
        """
        partial = [
            (s, len(s.prefix.ids) // KEY_TILE)
            for s in samples
            if len(s.prefix.ids) % KEY_TILE and s.request.max_tokens > 1
        ]
        if partial:
            self.cache.copy([s.prefix.blocks[i] for s, i in partial], [s.blocks[i] for s, i in partial])
        others = [sample for sample in samples if not sample.is_last]
        self.cache.copy_slots([s.prefix.slot for s in others], [s.slot for s in others])
        for sample in samples:
            if sample.is_last:
                self.prefix_cache.release(sample.prefix.blocks)

    def _read(self, prefixes: Sequence[Prefix]) -> None:
        """Read prefixes in passes of at most max_batch_tokens; a longer one is read in chunks."""
        limit = self.limits.max_batch_tokens
        chunks = deque(
            (p, start, min(len(p.ids), start + limit))
            for p in prefixes
            for start in range(p.start, len(p.ids), limit)
        )
        while chunks:
            batch, tokens = [], 0
            while chunks and tokens + chunks[0][2] - chunks[0][1] <= limit:
                batch.append(chunks.popleft())
                tokens += batch[-1][2] - batch[-1][1]
            lengths = [end - start for _, start, end in batch]
            routing = self.decoding.routing()
            context = CachedContext(
                self.cache,
                lengths,
                [start for _, start, _ in batch],
                [p.blocks for p, _, _ in batch],
                self.decoding.packed,
                routing or FREE,
                [p.slot for p, _, _ in batch],
            )
            ids = torch.tensor([token for p, start, end in batch for token in p.ids[start:end]])
            self.tokens_read += len(ids)
            rows = self.decoding.decoder.hidden(ids, context).split(lengths)
            for (p, _, _), chunk in zip(batch, rows, strict=True):
                p.last = chunk[-1:].clone()  # the whole pass must not stay in memory
            if routing:
                look, ends = Look(routing.taken()), [0, *accumulate(lengths)]
                for (p, _, _), chunk_rows in zip(batch, pairwise(ends), strict=True):
                    p.read_experts.append((look, slice(*chunk_rows)))

    def _take(self, samples: Sequence[Sample], drawn: Sequence[Sequence[DrawnToken]]) -> bool:
        """Give each sample the tokens that it drew; returns whether any sample ended with them."""
        ended = []
        for sample, tokens in zip(samples, drawn, strict=True):
            if sample.finish:
                continue  # it ended in an earlier look
            for token in tokens:
                if sample.finish:
                    break  # what it drew past its end is dropped
                if not math.isfinite(token.logprob):
                    self._refuse(sample)
                sample.append(token.id, token.logprob)
                if token.experts is not None:
                    sample.experts.append(token.experts)
            if sample.finish:
                ended.append(sample)
        for sample in ended:
            self._end(sample)
        return bool(ended)

    def _refuse(self, sample: Sample) -> None:
        key = sample.request.rng_key
        raise FloatingPointError(
            f"sampler: the logits of prompt {key.prompt}, sample {key.sample}, "
            f"position {sample.drawn} are not finite; the weights (version {self.version}) "
            f"are damaged or overflow in {self.decoding.decoder.dtype}"
        )

    def _end(self, sample: Sample) -> None:
        self.running.remove(sample)
        if sample.guesses:
            sample.guesses.ended()
            self.stopwatch.counts["tokens"] += len(sample.tokens)
        experts = None
        if self.decoding.names_experts:
            experts = np.concatenate([sample.prefix.experts, *(x[np.newaxis] for x in sample.experts)])
        if sample.request.trajectory_tokens and not self.cache.states:
            self.prefix_cache.keep(sample.written, sample.blocks, experts)
        self.prefix_cache.release(sample.blocks)
        self.cache.release_slot(sample.slot)
        logprobs = np.array(sample.logprobs, np.float32)
        completion = Completion(tuple(sample.tokens), logprobs, sample.finish, self.version, experts)
        self.source.completed(sample.place, completion)


def make_prefixes(requests: Iterable[tuple[int, Request]]) -> list[Prefix]:
    """Requests, each with its place; those side by side with equal ids together."""
    return [Prefix(ids, deque(group)) for ids, group in groupby(requests, key=lambda pair: pair[1].ids)]


def _next_blocks(prefix: Prefix) -> int:
    """The blocks that the next sample of a prefix needs, without those that it shares."""
    return completion_blocks(len(prefix.ids), prefix.waiting[0][1].max_tokens)
