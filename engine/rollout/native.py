"""The native sampler: continuous batching over our own key-value cache, in process.

Each turn of the loop is one forward over whatever there is to do: one token for each running sample and a
chunk of each prompt that is being read. A prompt is read once and its cache blocks are shared by its samples.
When a sample ends, the next one takes its place. None of this decides a bit: a token depends on its own
sequence, the weights and its own key.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...kernels.attention_plan import KEY_TILE
from ...kernels.logprob import chunk_rows, drawn_logprobs, scaled_logits
from ...kernels.matmul import matmul, packed
from ...model.cache import BlockCache, CachedContext
from ...model.decoder import Decoder
from .types import GenerationParams, RngKey, Rollout, Uniforms, logit_noise


@dataclass
class _Prompt:
    """A prompt that is being read or whose samples have not all started."""

    index: int
    ids: tuple[int, ...]
    blocks: list[int]
    read: int = 0  # tokens already in the cache
    last: torch.Tensor | None = (
        None  # hidden state of the last prompt token, [1, D]: predicts the first token
    )
    started: int = 0  # samples that have started


@dataclass
class _Sample:
    """A completion that is being drawn."""

    prompt: _Prompt
    index: int
    blocks: list[int]
    uniforms: Uniforms
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""

    def append(self, token: int, logprob: float, generation_params: GenerationParams) -> None:
        """Take a drawn token; sets `finish` when it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in generation_params.stop_ids:
            self.finish = "stop"
        elif len(self.tokens) == generation_params.max_tokens:
            self.finish = "length"


def _blocks_for(tokens: int) -> int:
    return -(-tokens // KEY_TILE)


class NativeSampler:
    """Samples from a decoder that it shares with the trainer, or that it owns.

    max_concurrency: samples drawn at once. max_batch_tokens: tokens of one forward; longer prompts are read
    in chunks. cache_bytes: upper limit of the key-value cache; fewer samples run at once where it would not
    hold them all. Of each limit, this sampler uses the part of one of `workers`.
    """

    def __init__(
        self,
        decoder: Decoder,
        max_concurrency: int = 64,
        max_batch_tokens: int = 1024,
        cache_bytes: int = 4 << 30,
        version: int = 0,
        workers: int = 1,
    ):
        for name, value in (("max_concurrency", max_concurrency), ("max_batch_tokens", max_batch_tokens)):
            if value < 1:
                raise ValueError(f"sampler: {name} ({value}) must be at least 1")
        self.decoder, self.version = decoder, version
        self.max_concurrency, self.max_batch_tokens = (
            -(-max_concurrency // workers),
            -(-max_batch_tokens // workers),
        )
        self.cache_bytes, self.workers = cache_bytes, workers

    def sync_weights(self, version: int) -> None:
        """See Sampler. The decoder's weights are the trainer's own, or were changed by who owns them."""
        self.version = version

    def close(self) -> None:
        """Nothing runs outside this process."""

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, rng_key: RngKey
    ) -> list[Rollout]:
        """See Sampler.

        Raises ValueError for an empty prompt, one that is too long, or a cache that holds no sample.
        """
        check_prompts(
            prompts, generation_params, self.decoder.config.max_positions, self.decoder.config.vocab_size
        )
        with packed(self.decoder.matrices()):
            return _Generation(self, prompts, generation_params, rng_key).run()


def check_prompts(
    prompts: Sequence[Sequence[int]], generation_params: GenerationParams, limit: int, vocab: int
) -> None:
    """Raise ValueError for what no sampler can draw from; `limit` is the context in tokens."""
    generation_params.sampling_params.check()
    for i, ids in enumerate(prompts):
        if not len(ids):
            raise ValueError(f"prompt {i} is empty; a completion needs at least one token before it")
        if len(ids) + generation_params.max_tokens > limit:
            raise ValueError(
                f"prompt {i} has {len(ids)} tokens, with max_tokens ({generation_params.max_tokens}) more than the context ({limit}); "
                "shorten it or lower max_tokens"
            )
        wrong = next((t for t in ids if not 0 <= t < vocab), None)
        if wrong is not None:
            raise ValueError(f"prompt {i} has token id {wrong}, outside the model's vocabulary of {vocab}")
    if generation_params.max_tokens < 1 or generation_params.num_generations < 1:
        raise ValueError(
            f"max_tokens ({generation_params.max_tokens}) and num_generations ({generation_params.num_generations}) "
            "must be at least 1"
        )


class _Generation:
    """The state of one `generate` call."""

    def __init__(
        self,
        sampler: NativeSampler,
        prompts: Sequence[Sequence[int]],
        generation_params: GenerationParams,
        rng_key: RngKey,
    ):
        self.sampler, self.decoder, self.sampling, self.rng_key = (
            sampler,
            sampler.decoder,
            generation_params,
            rng_key,
        )
        self.lm_head = sampler.decoder.logits_weight()
        self.prompts = [tuple(int(t) for t in ids) for ids in prompts]
        self.concurrency = self._fit(max((len(p) for p in self.prompts), default=0))
        self.next_prompt = 0
        self.open: list[_Prompt] = []  # in order; being read, or read and with samples to start
        self.running: list[_Sample] = []
        self.done: dict[tuple[int, int], Rollout] = {}

    def _fit(self, longest: int) -> int:
        """Samples at once that the cache can hold in the worst case, at most max_concurrency; makes the
        cache.
        """
        s, config, dtype = self.sampling, self.decoder.config, self.decoder.cache_dtype
        per_sample = _blocks_for(longest + s.max_tokens) + _blocks_for(longest)
        block_bytes = BlockCache.bytes_per_block(config, dtype)
        workers = self.sampler.workers
        each = f" for each of {workers} workers" if workers > 1 else ""
        fit = self.sampler.cache_bytes // workers // (block_bytes * per_sample)
        if fit < 1:
            raise ValueError(
                f"sampler: cache_bytes ({self.sampler.cache_bytes}) cannot hold one sample of {longest + s.max_tokens} tokens "
                f"({block_bytes * per_sample} bytes){each}; raise it or lower max_tokens"
            )
        concurrency = min(self.sampler.max_concurrency, fit, max(1, len(self.prompts) * s.num_generations))
        self.cache = BlockCache(config, concurrency * per_sample, dtype, self.decoder.device)
        return concurrency

    def run(self) -> list[Rollout]:
        """Draw everything; rollouts in canonical order."""
        total = len(self.prompts) * self.sampling.num_generations
        while len(self.done) < total:
            self._open_prompts()
            decoding, reading = self._forward()
            self._draw(*self._start_samples(decoding, reading))
        first = self.rng_key.first_prompt
        return [
            self.done[first + p, s]
            for p in range(len(self.prompts))
            for s in range(self.sampling.num_generations)
        ]

    def _open_prompts(self) -> None:
        """Begin to read prompts as far as their samples will find a place."""
        G = self.sampling.num_generations
        places = self.concurrency - len(self.running) - sum(G - p.started for p in self.open)
        while places > 0 and self.next_prompt < len(self.prompts):
            ids = self.prompts[self.next_prompt]
            self.open.append(
                _Prompt(
                    self.rng_key.first_prompt + self.next_prompt,
                    ids,
                    self.cache.allocate(_blocks_for(len(ids))),
                )
            )
            self.next_prompt += 1
            places -= G

    def _forward(self) -> tuple[torch.Tensor | None, list[tuple[_Prompt, torch.Tensor]]]:
        """One forward over the running samples' last tokens and prompt chunks.

        Returns the hidden states of the running samples [n, D], and the prompts now wholly read with their
        last row.
        """
        lengths, contexts, blocks = [1] * len(self.running), [], []
        ids = [s.tokens[-1] for s in self.running]
        for s in self.running:
            contexts.append(len(s.prompt.ids) + len(s.tokens) - 1)
            blocks.append(s.blocks)
        budget, chunks = self.sampler.max_batch_tokens - len(ids), []
        for p in self.open:
            n = min(max(budget, 0 if ids else 1), len(p.ids) - p.read)
            if n > 0:
                chunks.append(p)
                lengths.append(n)
                contexts.append(p.read)
                blocks.append(p.blocks)
                ids += p.ids[p.read : p.read + n]
                p.read += n
                budget -= n
        if not ids:
            return None, []
        hidden = self.decoder.hidden(torch.tensor(ids), CachedContext(self.cache, lengths, contexts, blocks))
        ends = np.cumsum(lengths)[len(self.running) :]
        read = [
            (p, hidden[end - 1 : end]) for p, end in zip(chunks, ends, strict=True) if p.read == len(p.ids)
        ]
        return hidden[: len(self.running)] if self.running else None, read

    def _start_samples(self, decoding, reading) -> tuple[torch.Tensor, list[_Sample]]:
        """Start samples of prompts that are read. Returns the hidden rows to draw from and their samples."""
        for p, row in reading:
            p.last = row.clone()
        rows, samples = ([] if decoding is None else [decoding]), list(self.running)
        for p in list(self.open):
            while (
                p.last is not None
                and p.started < self.sampling.num_generations
                and len(self.running) < self.concurrency
            ):
                sample = _Sample(p, p.started, self._fork(p), Uniforms(self.rng_key, p.index, p.started))
                p.started += 1
                self.running.append(sample)
                samples.append(sample)
                rows.append(p.last)
            if p.started == self.sampling.num_generations:
                self.cache.release(p.blocks)
                self.open.remove(p)
        return (torch.cat(rows) if rows else torch.empty(0)), samples

    def _fork(self, p: _Prompt) -> list[int]:
        """A sample's blocks:

        the prompt's full ones shared, its last partial one copied, and room for max_tokens.
        """
        full = len(p.ids) // KEY_TILE
        own = self.cache.allocate(_blocks_for(len(p.ids) + self.sampling.max_tokens) - full)
        if len(p.ids) % KEY_TILE:
            self.cache.copy(p.blocks[full], own[0])
        return self.cache.share(p.blocks[:full]) + own

    def _draw(self, hidden: torch.Tensor, samples: list[_Sample]) -> None:
        """Draw one token for each row and end the samples that are complete."""
        if not samples:
            return
        sampling_params = self.sampling.sampling_params
        rows = chunk_rows(self.decoder.config.vocab_size, self.decoder.device)
        for a in range(0, len(samples), rows):
            some = samples[a : a + rows]
            z = scaled_logits(
                matmul(hidden[a : a + rows].to(self.lm_head.dtype), self.lm_head), sampling_params
            )
            self._check_finite(z, some)
            if self.sampling.logit_noise:
                places = [(s.prompt.index, s.index, len(s.tokens)) for s in some]
                noise = logit_noise(self.rng_key.seed, self.rng_key.step, places, z.shape[1])
                z = z + noise.to(z.device) * self.sampling.logit_noise
            u = torch.tensor(
                [s.uniforms.at(len(s.tokens)) for s in some], dtype=torch.float64, device=z.device
            )
            ids, logp = drawn_logprobs(z, u, greedy=sampling_params.temperature == 0.0)
            for s, token, lp in zip(some, ids.tolist(), logp.tolist(), strict=True):
                s.append(token, lp, self.sampling)
        for s in [s for s in self.running if s.finish]:
            self._end(s)

    def _check_finite(self, z: torch.Tensor, samples: list[_Sample]) -> None:
        """Raise FloatingPointError where a row has no distribution to draw from."""
        bad = (~torch.isfinite(z.amax(dim=1))).nonzero()
        if len(bad):
            s = samples[int(bad[0])]
            raise FloatingPointError(
                f"sampler: the logits of prompt {s.prompt.index}, sample {s.index}, position {len(s.tokens)} are not finite; "
                f"the weights (version {self.sampler.version}) are damaged or overflow in {self.decoder.dtype}"
            )

    def _end(self, s: _Sample) -> None:
        self.running.remove(s)
        self.cache.release(s.blocks)
        self.done[s.prompt.index, s.index] = Rollout(
            s.prompt.index,
            s.index,
            s.prompt.ids,
            tuple(s.tokens),
            np.array(s.logprobs, np.float32),
            s.finish,
            self.sampler.version,
        )
