"""The native sampler: continuous batching over our own key-value cache, in process.

Each turn of the loop is one forward over one token of each running sample, and a chunk of each prompt that is
being read. A prompt is read once, and its samples share its cache blocks. When a sample ends, the next sample
takes its place. None of this decides a bit: a token depends on its own sequence, the weights and its own key.

Shapes: n rows, one for each sample that draws a token; D hidden size; V vocabulary.
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
    """A prompt that is being read, or whose samples have not all started."""

    index: int
    ids: tuple[int, ...]
    blocks: list[int]
    read: int = 0  # tokens already in the cache
    last: torch.Tensor | None = (
        None  # [1, D], hidden state of the last prompt token: predicts the first token
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
        """Take a drawn token; set `finish` when it was the last token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in generation_params.stop_ids:
            self.finish = "stop"
        elif len(self.tokens) == generation_params.max_tokens:
            self.finish = "length"


def _blocks_for(tokens: int) -> int:
    return -(-tokens // KEY_TILE)


class NativeSampler:
    """Samples from a decoder, which may be the trainer's.

    max_concurrency: samples drawn at once.
    max_batch_tokens: tokens of one forward; longer prompts are read in chunks.
    cache_bytes: upper limit of the key-value cache. Where it cannot hold all samples, fewer run at once.
    workers: number of samplers that share these limits; this sampler is one of them and takes its part.
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
        self.max_concurrency = -(-max_concurrency // workers)
        self.max_batch_tokens = -(-max_batch_tokens // workers)
        self.cache_bytes, self.workers = cache_bytes, workers

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
        one sample.
        """
        check_prompts(
            prompts, generation_params, self.decoder.config.max_positions, self.decoder.config.vocab_size
        )
        with packed(self.decoder.matrices()):
            return _Generation(self, prompts, generation_params, rng_key).run()


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


class _Generation:
    """The state of one `generate` call."""

    def __init__(
        self,
        sampler: NativeSampler,
        prompts: Sequence[Sequence[int]],
        generation_params: GenerationParams,
        rng_key: RngKey,
    ):
        self.sampler, self.decoder = sampler, sampler.decoder
        self.generation_params, self.rng_key = generation_params, rng_key
        self.lm_head = sampler.decoder.logits_weight()
        self.prompts = [tuple(int(t) for t in ids) for ids in prompts]
        self.concurrency = self._make_cache(max((len(p) for p in self.prompts), default=0))
        self.next_prompt = 0
        # In canonical order: prompts that are being read, or that were read and have samples to start.
        self.open_prompts: list[_Prompt] = []
        self.running: list[_Sample] = []
        self.rollouts: dict[tuple[int, int], Rollout] = {}

    def _make_cache(self, longest: int) -> int:
        """Make the cache, for prompts of at most `longest` tokens. Returns how many samples run at once.

        That is the number that the cache can hold in the worst case, but at most max_concurrency.
        """
        params, config, dtype = self.generation_params, self.decoder.config, self.decoder.cache_dtype
        per_sample = _blocks_for(longest + params.max_tokens) + _blocks_for(longest)
        block_bytes = BlockCache.bytes_per_block(config, dtype)
        workers = self.sampler.workers
        fit = self.sampler.cache_bytes // workers // (block_bytes * per_sample)
        if fit < 1:
            for_each = f" for each of {workers} workers" if workers > 1 else ""
            raise ValueError(
                f"sampler: cache_bytes ({self.sampler.cache_bytes}) cannot hold one sample of "
                f"{longest + params.max_tokens} tokens ({block_bytes * per_sample} bytes){for_each}; "
                "raise it or lower max_tokens"
            )
        samples = max(1, len(self.prompts) * params.num_generations)
        concurrency = min(self.sampler.max_concurrency, fit, samples)
        self.cache = BlockCache(config, concurrency * per_sample, dtype, self.decoder.device)
        return concurrency

    def run(self) -> list[Rollout]:
        """Draw everything. Returns the rollouts in canonical order."""
        P, G, first = len(self.prompts), self.generation_params.num_generations, self.rng_key.first_prompt
        while len(self.rollouts) < P * G:
            self._start_prompts()
            decoding, ends_of_prompts = self._forward()
            self._draw(*self._start_samples(decoding, ends_of_prompts))
        return [self.rollouts[first + p, s] for p in range(P) for s in range(G)]

    def _start_prompts(self) -> None:
        """Start to read further prompts while there is room for their samples."""
        G = self.generation_params.num_generations
        room = self.concurrency - len(self.running) - sum(G - p.started for p in self.open_prompts)
        while room > 0 and self.next_prompt < len(self.prompts):
            index, ids = self.rng_key.first_prompt + self.next_prompt, self.prompts[self.next_prompt]
            self.open_prompts.append(_Prompt(index, ids, self.cache.allocate(_blocks_for(len(ids)))))
            self.next_prompt += 1
            room -= G

    def _forward(self) -> tuple[torch.Tensor | None, list[tuple[_Prompt, torch.Tensor]]]:
        """One forward over the last tokens of the running samples, and over chunks of the open prompts.

        Returns the hidden states of the running samples [n, D] (None without samples), and each prompt that
        is now wholly read with the hidden state of its last token [1, D].
        """
        lengths, contexts, blocks = [1] * len(self.running), [], []
        ids = [s.tokens[-1] for s in self.running]
        for s in self.running:
            contexts.append(len(s.prompt.ids) + len(s.tokens) - 1)
            blocks.append(s.blocks)
        budget, prompts = self.sampler.max_batch_tokens - len(ids), []
        for p in self.open_prompts:
            n = min(max(budget, 0 if ids else 1), len(p.ids) - p.read)
            if n > 0:
                prompts.append(p)
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
        ends_of_prompts = [
            (p, hidden[end - 1 : end]) for p, end in zip(prompts, ends, strict=True) if p.read == len(p.ids)
        ]
        return hidden[: len(self.running)] if self.running else None, ends_of_prompts

    def _start_samples(
        self, decoding: torch.Tensor | None, ends_of_prompts: list[tuple[_Prompt, torch.Tensor]]
    ) -> tuple[torch.Tensor, list[_Sample]]:
        """Start samples of prompts that are read. Returns the rows to draw from [n, D], and their samples.

        The arguments are the results of `_forward`.
        """
        for p, row in ends_of_prompts:
            p.last = row.clone()
        rows, samples = ([] if decoding is None else [decoding]), list(self.running)
        G = self.generation_params.num_generations
        for p in list(self.open_prompts):
            while p.last is not None and p.started < G and len(self.running) < self.concurrency:
                sample = _Sample(p, p.started, self._fork(p), Uniforms(self.rng_key, p.index, p.started))
                p.started += 1
                self.running.append(sample)
                samples.append(sample)
                rows.append(p.last)
            if p.started == G:
                self.cache.release(p.blocks)
                self.open_prompts.remove(p)
        return (torch.cat(rows) if rows else torch.empty(0)), samples

    def _fork(self, p: _Prompt) -> list[int]:
        """The cache blocks of a new sample, with room for max_tokens.

        The sample shares the prompt's full blocks. It gets a copy of the prompt's last block where that is
        only partly filled.
        """
        full = len(p.ids) // KEY_TILE
        new = self.cache.allocate(_blocks_for(len(p.ids) + self.generation_params.max_tokens) - full)
        if len(p.ids) % KEY_TILE:
            self.cache.copy(p.blocks[full], new[0])
        return self.cache.share(p.blocks[:full]) + new

    def _draw(self, hidden: torch.Tensor, samples: list[_Sample]) -> None:
        """Draw one token for each row of `hidden` [n, D], and end the samples that are complete."""
        if not samples:
            return
        rows = chunk_rows(self.decoder.config.vocab_size, self.decoder.device)
        for start in range(0, len(samples), rows):
            self._draw_chunk(hidden[start : start + rows], samples[start : start + rows])
        for s in [s for s in self.running if s.finish]:
            self._end(s)

    def _draw_chunk(self, hidden: torch.Tensor, samples: list[_Sample]) -> None:
        """Draw one token for each row. The logits of these rows exist at once."""
        params = self.generation_params
        z = scaled_logits(matmul(hidden.to(self.lm_head.dtype), self.lm_head), params.sampling_params)
        self._check_finite(z, samples)
        if params.logit_noise:
            places = [(s.prompt.index, s.index, len(s.tokens)) for s in samples]
            noise = logit_noise(self.rng_key.seed, self.rng_key.step, places, z.shape[1])
            z = z + noise.to(z.device) * params.logit_noise
        uniforms = [s.uniforms.at(len(s.tokens)) for s in samples]
        u = torch.tensor(uniforms, dtype=torch.float64, device=z.device)
        ids, logp = drawn_logprobs(z, u, greedy=params.sampling_params.temperature == 0.0)
        for s, token, token_logp in zip(samples, ids.tolist(), logp.tolist(), strict=True):
            s.append(token, token_logp, params)

    def _check_finite(self, z: torch.Tensor, samples: list[_Sample]) -> None:
        """Raise FloatingPointError where the logits z [n, V] of a row are no distribution."""
        bad = (~torch.isfinite(z.amax(dim=1))).nonzero()
        if len(bad):
            s = samples[int(bad[0])]
            raise FloatingPointError(
                f"sampler: the logits of prompt {s.prompt.index}, sample {s.index}, "
                f"position {len(s.tokens)} are not finite; the weights (version {self.sampler.version}) "
                f"are damaged or overflow in {self.decoder.dtype}"
            )

    def _end(self, s: _Sample) -> None:
        self.running.remove(s)
        self.cache.release(s.blocks)
        self.rollouts[s.prompt.index, s.index] = Rollout(
            s.prompt.index,
            s.index,
            s.prompt.ids,
            tuple(s.tokens),
            np.array(s.logprobs, np.float32),
            s.finish,
            self.sampler.version,
        )
