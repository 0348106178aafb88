"""What a sampler is asked for and what it returns.

Prompts and completions are token ids from end to end. Nothing is detokenised in between.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...kernels.philox import Stream, philox, uniform, uniform_range
from ...kernels.sampling_params import SamplingParams


@dataclass(frozen=True)
class GenerationParams:
    """How completions are drawn."""

    sampling_params: SamplingParams
    num_generations: int  # completions of each prompt
    max_tokens: int  # completion tokens at most, the stop token included
    # A completion ends with the first of these tokens. That token is part of the completion and trained on.
    stop_ids: frozenset[int]
    # Standard deviation of the noise on each logit (see logit_noise below). Only the native sampler has it.
    logit_noise: float = 0.0


@dataclass(frozen=True)
class RngKey:
    """The key of the random numbers of one `generate` call, beside prompt, sample and position."""

    seed: int
    step: int
    stream: Stream = Stream.SAMPLE
    first_prompt: int = 0  # index in the step of the call's first prompt, where a call draws a part of a step

    def uniforms(
        self, prompts: Sequence[int], samples: Sequence[int], positions: Sequence[int]
    ) -> np.ndarray:
        """One uniform number for each (prompt, sample, position), [n] fp64."""
        counter = np.empty((len(prompts), 4), np.uint64)
        for column, values in enumerate((positions, samples, prompts, self.step)):
            counter[:, column] = values
        return uniform(counter, self.seed, self.stream)


# Positions whose numbers are computed at once.
_AHEAD = 64


class Uniforms:
    """The uniform numbers of one completion's positions, fp64."""

    def __init__(self, rng_key: RngKey, prompt: int, sample: int):
        self._rng_key, self._prompt, self._sample = rng_key, prompt, sample
        self._start, self._numbers = -_AHEAD, np.empty(0)

    def at(self, position: int) -> float:
        """The number that draws the token at `position`."""
        start = position - position % _AHEAD
        if start != self._start:
            self._numbers = self._rng_key.uniforms(
                [self._prompt] * _AHEAD, [self._sample] * _AHEAD, range(start, start + _AHEAD)
            )
            self._start = start
        return self._numbers[position - start]


@dataclass(frozen=True)
class Rollout:
    """One completion. prompt and sample are its indices in the step, [P, G]."""

    prompt: int
    sample: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]  # never empty; ends with a stop id, or was cut at max_tokens
    logprobs: np.ndarray  # [C] fp32, log-probability of each token under the distribution it was drawn from
    finish: str  # "stop" or "length"
    weight_version: int

    @property
    def pair(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(prompt_ids, completion_ids)."""
        return self.prompt_ids, self.completion_ids


# Bytes of a completion in memory: the object, and what each token adds: a Python integer and an fp32 number.
_ROLLOUT_BYTES, _TOKEN_BYTES = 370, 44


def check_room(completions: int, max_tokens: int) -> None:
    """Raise ValueError for more completions of max_tokens tokens than the machine's memory can hold."""
    needed = completions * (_ROLLOUT_BYTES + max_tokens * _TOKEN_BYTES)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ValueError(
            f"{completions:,} completions of up to {max_tokens:,} tokens can take {needed / 1e9:,.1f} GB of "
            f"memory, and this machine has {memory / 1e9:,.1f} GB; ask for fewer, or lower max_tokens"
        )


class Sampler(Protocol):
    """The interface of every sampler."""

    @property
    def samples_at_once(self) -> int | None:
        """Samples that ran at once at the beginning of the last call; None where the engine does not tell."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, rng_key: RngKey
    ) -> list[Rollout]:
        """P prompts x G samples, in canonical order: prompt by prompt, sample by sample. P may be 0."""
        ...

    def sync_weights(self, version: int) -> None:
        """Sample with the trainer's weights as they are now. From now on rollouts carry `version`."""
        ...

    def close(self) -> None:
        """End whatever runs outside this process."""
        ...


def logit_noise(seed: int, step: int, places: Sequence[tuple[int, int, int]], V: int) -> torch.Tensor:
    """Standard normal numbers [n, V] fp32, one row for each of n places (prompt, sample, position).

    They come from counter-based uniform numbers, by Box and Muller (1958).
    """
    counter = np.array(
        [(position, sample, prompt, step) for prompt, sample, position in places], np.uint64
    ).reshape(-1, 4)
    words = philox(counter, (seed, int(Stream.LOGIT_NOISE)))
    rows = []
    for high, low in words[:, :2].tolist():
        u = uniform_range(2 * V, seed, Stream.LOGIT_NOISE_TOKENS, (high << 32) | low)
        rows.append(np.sqrt(-2.0 * np.log(1.0 - u[:V])) * np.cos(2.0 * np.pi * u[V:]))
    return torch.from_numpy(np.stack(rows)).float()
