"""What a sampler is asked for and what it returns.

A sampler continues ids: it is given requests, and gives the completion of each. A trajectory (Rollout) is
made of completions, with ids between them that nobody drew. A prompt with one completion is the case of one
turn.

Prompts and completions are token ids from end to end. Nothing is detokenised in between.

Shapes: T tokens of a trajectory; C of them were drawn.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from ...kernels.philox import Stream, philox, uniform, uniform_range
from ...kernels.sampling_params import SamplingParams


@dataclass(frozen=True)
class RngKey:
    """The key of a trajectory's random numbers. Its n-th drawn token takes the number with counter n.

    prompt, sample: indices in the step. A key of several prompts has the indices of the first trajectory.
    """

    seed: int
    step: int
    stream: Stream = Stream.SAMPLE
    prompt: int = 0
    sample: int = 0

    def uniforms(self, counters: Sequence[int]) -> np.ndarray:
        """One uniform number for each counter, [n] fp64."""
        counter = np.empty((len(counters), 4), np.uint64)
        for column, values in enumerate((counters, self.sample, self.prompt, self.step)):
            counter[:, column] = values
        return uniform(counter, self.seed, self.stream)


# Tokens whose numbers are computed at once.
_AHEAD = 64


class Uniforms:
    """The uniform numbers of one trajectory's tokens, fp64."""

    def __init__(self, rng_key: RngKey):
        self._rng_key, self._start, self._numbers = rng_key, -_AHEAD, np.empty(0)

    def at(self, counter: int) -> float:
        """The number that draws the token which has `counter` drawn tokens before it."""
        start = counter - counter % _AHEAD
        if start != self._start:
            self._numbers = self._rng_key.uniforms(range(start, start + _AHEAD))
            self._start = start
        return self._numbers[counter - start]


class DrawParams(NamedTuple):
    """The distribution that tokens are drawn from, and the tokens that end a completion."""

    sampling_params: SamplingParams
    # A completion ends with the first of these tokens. That token is part of the completion and trained on.
    stop_ids: frozenset[int]
    # Standard deviation of the noise on each logit (see logit_noise below). hf and vllm cannot have it.
    logit_noise: float = 0.0
    # Whether completions name the experts of a mixture that computed their rows.
    experts: bool = False


@dataclass(frozen=True)
class Request:
    """Ids to continue, with all that decides a bit of the continuation except the weights.

    So whoever serves a request, beside which others, gives the same bits. Where requests side by side have
    equal `ids`, a sampler may read them once.
    """

    ids: tuple[int, ...]  # all tokens of the trajectory so far
    rng_key: RngKey
    draw_params: DrawParams
    max_tokens: int  # tokens to draw at most, the stop token included
    drawn: int = 0  # tokens of the trajectory that were drawn before; random numbers count on from here
    # The most tokens that the trajectory may have at its end, where turns may follow this one; 0 where none
    # follows. It decides no bit. A sampler may keep what it has read and drawn, so that the next turn reads
    # its new tokens only. Whoever sets it calls Sampler.end_turns when all trajectories have ended.
    trajectory_tokens: int = 0


@dataclass(frozen=True)
class Completion:
    """What a sampler has drawn for one request."""

    ids: tuple[int, ...]  # never empty; ends with a stop id, or was cut at max_tokens
    logprobs: np.ndarray  # [C] fp32, log-probability of each token under the distribution it was drawn from
    finish: str  # "stop" or "length"
    weight_version: int
    # [R, L, k], the experts (model/routing.py) of each id of the request and of the completion but the last,
    # where they were asked for: R = len(request.ids) + C - 1
    experts: np.ndarray | None = None


@dataclass(frozen=True)
class GenerationParams:
    """How completions of prompts are drawn, each prompt num_generations times."""

    sampling_params: SamplingParams
    num_generations: int
    max_tokens: int  # completion tokens at most, the stop token included
    stop_ids: frozenset[int]
    experts: bool = False  # see DrawParams

    def requests(self, prompts: Iterable[Sequence[int]], rng_key: RngKey) -> list[Request]:
        """P prompts x G requests, prompt by prompt.

        rng_key: of the first prompt; those after it count on. Raises ValueError for more completions than the
        machine's memory can hold.
        """
        prompts = [tuple(map(int, ids)) for ids in prompts]
        if self.max_tokens < 1 or self.num_generations < 1:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) and num_generations ({self.num_generations}) "
                "must be at least 1"
            )
        check_room(len(prompts) * self.num_generations, self.max_tokens)
        draw_params = DrawParams(self.sampling_params, self.stop_ids, experts=self.experts)
        return [
            Request(ids, replace(rng_key, prompt=rng_key.prompt + p, sample=s), draw_params, self.max_tokens)
            for p, ids in enumerate(prompts)
            for s in range(self.num_generations)
        ]


@dataclass(frozen=True)
class Rollout:
    """A trajectory: ids, and which of them were drawn. prompt and sample are its indices in the step, [P, G].

    The first ids are the prompt. Drawn tokens follow, and between two turns ids that nobody drew may stand,
    such as the result of a tool. The last token is a drawn one. Where an environment ended a trajectory
    before its first turn, nothing was drawn, and there may be no id.
    """

    prompt: int
    sample: int
    ids: tuple[int, ...]  # [T]
    drawn: np.ndarray  # [T] bool
    logprobs: np.ndarray  # [C] fp32, of the drawn tokens (see Completion)
    turn_starts: tuple[int, ...]  # for each turn the place of its first drawn token in ids
    # "stop" or "length"; in an environment how the trajectory ended (tasks/environment.py)
    finish: str
    weight_version: int
    # [T - 1, L, k], the experts that the sampler computed each id but the last with; see Completion
    experts: np.ndarray | None = None

    @classmethod
    def of_one_turn(
        cls,
        prompt: int,
        sample: int,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        logprobs: np.ndarray,
        finish: str,
        weight_version: int,
        experts: np.ndarray | None = None,
    ) -> "Rollout":
        """A prompt with one completion."""
        p, ids = len(prompt_ids), (*prompt_ids, *completion_ids)
        drawn = np.arange(len(ids)) >= p
        return cls(prompt, sample, ids, drawn, logprobs, (p,), finish, weight_version, experts)

    def with_turn(self, between: Sequence[int], completion: Completion) -> "Rollout":
        """This trajectory with one more turn. between: ids that stand before the turn and were not drawn."""
        start = len(self.ids) + len(between)
        ids = (*self.ids, *between, *completion.ids)
        return replace(
            self,
            ids=ids,
            drawn=np.concatenate([self.drawn, np.arange(len(self.ids), len(ids)) >= start]),
            logprobs=np.concatenate([self.logprobs, completion.logprobs]),
            turn_starts=(*self.turn_starts, start),
            finish=completion.finish,
            weight_version=completion.weight_version,
            experts=self._experts_with(completion.experts),
        )

    def _experts_with(self, experts: np.ndarray | None) -> np.ndarray | None:
        """Those of this trajectory with one more turn, of all of whose rows `experts` are.

        Rows that were drawn keep the experts that they were drawn with. Where tokens follow that nobody drew
        with this sampler, none are named.
        """
        if experts is None or (self.experts is None and self.turns):
            return None
        return (
            experts if self.experts is None else np.concatenate([self.experts, experts[len(self.experts) :]])
        )

    def check(self) -> "Rollout":
        """Return this rollout. Raises ValueError where its parts contradict each other."""
        T, starts = len(self.ids), list(self.turn_starts)
        if len(self.drawn) != T or int(self.drawn.sum()) != len(self.logprobs):
            raise ValueError(
                f"has {T} ids, a mask of {len(self.drawn)} with {int(self.drawn.sum())} drawn tokens, and "
                f"{len(self.logprobs)} logprobs"
            )
        if T < 2 or self.drawn[0] or not self.drawn[-1]:
            raise ValueError("must begin with an id of the prompt, and end with a drawn token")
        resumed = (np.flatnonzero(self.drawn[1:] & ~self.drawn[:-1]) + 1).tolist()
        in_order = starts == sorted(set(starts)) and all(0 < i < T and self.drawn[i] for i in starts)
        if not in_order or not set(resumed) <= set(starts):
            raise ValueError(
                f"turn_starts ({starts}) must ascend, lie on drawn tokens, and hold each drawn token that "
                f"follows one that was not drawn ({resumed})"
            )
        return self

    @property
    def turns(self) -> int:
        """The number of turns; 0 where nothing was drawn."""
        return len(self.turn_starts)

    @property
    def _prompt_end(self) -> int:
        return self.turn_starts[0] if self.turn_starts else len(self.ids)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The ids before the first drawn token."""
        return self.ids[: self._prompt_end]

    @property
    def completion_ids(self) -> tuple[int, ...]:
        """The ids after the prompt. With several turns, tokens that nobody drew are among them."""
        return self.ids[self._prompt_end :]

    @property
    def mask(self) -> np.ndarray:
        """Which of completion_ids were drawn, bool."""
        return self.drawn[self._prompt_end :]

    @property
    def drawn_ids(self) -> tuple[int, ...]:
        """The drawn tokens, [C]."""
        if len(self.logprobs) == len(self.completion_ids):
            return self.completion_ids
        return tuple(np.array(self.ids)[self.drawn].tolist())

    @property
    def drawn_experts(self) -> np.ndarray:
        """The experts of the row before each drawn token, which predicts it: [C, L, k]."""
        return self.experts[self.drawn[1:]]

    @property
    def pair(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(prompt_ids, completion_ids)."""
        return self.prompt_ids, self.completion_ids


# Bytes of a completion in memory: its request and the objects, and what each token adds: a Python integer and
# an fp32 number.
_COMPLETION_BYTES, _TOKEN_BYTES = 700, 44


def check_room(completions: int, max_tokens: int) -> None:
    """Raise ValueError for more completions of max_tokens tokens than the machine's memory can hold."""
    needed = completions * (_COMPLETION_BYTES + max_tokens * _TOKEN_BYTES)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ValueError(
            f"{completions:,} completions of up to {max_tokens:,} tokens can take {needed / 1e9:,.1f} GB of "
            f"memory, and this machine has {memory / 1e9:,.1f} GB; ask for fewer prompts or generations, or "
            "lower max_tokens"
        )


def check_requests(requests: Sequence[Request], limit: int, vocab: int) -> None:
    """Raise ValueError for a request that no sampler can serve.

    limit: the context, in tokens. vocab: the model's token ids are below it.
    """
    checked: set[tuple[int, ...]] = set()
    for draw_params in {request.draw_params for request in requests}:
        draw_params.sampling_params.check(vocab)
    for request in requests:
        name, ids = f"prompt {request.rng_key.prompt}", request.ids
        if not ids:
            raise ValueError(f"{name} is empty; a completion needs at least one token before it")
        if request.max_tokens < 1:
            raise ValueError(f"{name}: max_tokens ({request.max_tokens}) must be at least 1")
        if len(ids) + request.max_tokens > limit:
            raise ValueError(
                f"{name} has {len(ids)} tokens, with max_tokens ({request.max_tokens}) "
                f"more than the context ({limit}); shorten it or lower max_tokens"
            )
        if ids in checked:
            continue
        checked.add(ids)
        wrong = next((t for t in ids if not 0 <= t < vocab), None)
        if wrong is not None:
            raise ValueError(f"{name} has token id {wrong}, outside the model's vocabulary of {vocab}")


class Sampler(Protocol):
    """The interface of every sampler.

    samples_at_once: samples that ran at once at the beginning of the last call; None where the engine does
    not tell.
    """

    samples_at_once: int | None = None

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The completion of each request, in their order. There may be no request."""
        ...

    def sync_weights(self, version: int) -> None:
        """Sample with the trainer's weights as they are now. From now on completions carry `version`.

        Nothing that was kept for later turns outlives it.
        """
        ...

    def end_turns(self) -> None:
        """Give back what was kept for later turns (Request.trajectory_tokens).

        Whoever asks for turns calls it when all trajectories have ended, before the weights change. A sampler
        over the trainer's own weights may not hear of each change, and its memory is then free while the
        trainer runs. A request that continues a trajectory all the same is read as a whole. Whoever keeps
        nothing has nothing to do.
        """

    def close(self) -> None:
        """End whatever runs outside this process, if anything does."""


class RequestSource(Protocol):
    """Requests that come one after another, as those of the turns of many trajectories do.

    A place stands for a trajectory. It has one open request at most, and its next one follows from the
    completion.
    """

    def ready(self, at_least: float) -> list[tuple[int, Request]]:
        """Requests that can be served, each with its place. Nobody is given one twice.

        Waits until there are so many, or until no other can come before one of these is completed.
        """
        ...

    def completed(self, place: int, completion: Completion) -> None:
        """The completion of the request at this place."""
        ...


@runtime_checkable
class ContinuousSampler(Sampler, Protocol):
    """A sampler that takes new requests while others are being drawn."""

    def serve(self, source: RequestSource) -> None:
        """Complete requests until no more come. Which ones run together decides no bit."""
        ...


def serve_in_waves(sampler: Sampler, source: RequestSource) -> None:
    """As ContinuousSampler.serve, with all requests that can be ready in one call, and then the next ones."""
    while arrived := source.ready(math.inf):
        places, requests = zip(*arrived, strict=True)
        for place, completion in zip(places, sampler.generate(requests), strict=True):
            source.completed(place, completion)


def complete(
    sampler: Sampler,
    prompts: Iterable[Sequence[int]],
    generation_params: GenerationParams,
    rng_key: RngKey,
) -> list[Rollout]:
    """Trajectories of one turn: P prompts x G completions in canonical order, prompt by prompt.

    rng_key: see GenerationParams.requests. Raises ValueError for prompts that no sampler can continue.
    """
    return draw(sampler, generation_params.requests(prompts, rng_key))


def draw(sampler: Sampler, requests: Sequence[Request]) -> list[Rollout]:
    """The trajectory of one turn that each request becomes."""
    return [
        Rollout.of_one_turn(
            request.rng_key.prompt,
            request.rng_key.sample,
            request.ids,
            completion.ids,
            completion.logprobs,
            completion.finish,
            completion.weight_version,
            completion.experts,
        )
        for request, completion in zip(requests, sampler.generate(requests), strict=True)
    ]


def logit_noise(seed: int, counters: np.ndarray, V: int) -> torch.Tensor:
    """Standard normal numbers [n, V] fp32, one row for each of n counters.

    counters [n, 4]: tokens drawn before, sample, prompt, step. The numbers come from counter-based uniform
    numbers, by Box and Muller (1958).
    """
    words = philox(counters.astype(np.uint64), (seed, int(Stream.LOGIT_NOISE)))
    rows = []
    for high, low in words[:, :2].tolist():
        u = uniform_range(2 * V, seed, Stream.LOGIT_NOISE_TOKENS, (high << 32) | low)
        rows.append(np.sqrt(-2.0 * np.log(1.0 - u[:V])) * np.cos(2.0 * np.pi * u[V:]))
    return torch.from_numpy(np.stack(rows)).float()
