"""Samplers over engines that are not ours: hf and vllm as they come."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from ...kernels.philox import philox
from ...model.checkpoint import DTYPES
from ...model.config import ModelConfig
from ...model.weights import Layout
from ..config.run_config import Config
from ..rollout.hf import HfGenerator
from ..rollout.types import (
    Completion,
    DrawParams,
    GenerationParams,
    Request,
    Rollout,
    Sampler,
    check_requests,
)
from ..rollout.vllm.generator import VllmGenerator


class _Engine(Protocol):
    def draw(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, seeds: Sequence[int]
    ) -> list[Rollout]: ...

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None: ...


class ExternalSampler(Sampler):
    """A sampler over an engine that is not ours.

    The engine draws tokens with its own random numbers. The seed of each request is made from its rng_key.

    layout: of the weights. weights: gives those that the engine loads, [layout.numel]; it rounds them to its
    dtype.
    """

    def __init__(
        self, engine: _Engine, config: ModelConfig, layout: Layout, weights: Callable[[], torch.Tensor]
    ):
        self._engine, self._config, self._layout, self._weights = engine, config, layout, weights
        self.version = 0
        self._load()

    def _load(self) -> None:
        self._engine.load_weights(self._layout.stored_tensors(self._weights()))

    def sync_weights(self, version: int) -> None:
        self._load()
        self.version = version

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        check_requests(requests, self._config.max_positions, self._config.vocab_size)
        if not requests:
            return []
        # An engine that is not ours has one setting for all that it draws together.
        kinds: dict[tuple[DrawParams, int], list[int]] = {}
        for i, request in enumerate(requests):
            kinds.setdefault((request.draw_params, request.max_tokens), []).append(i)
        completions: dict[int, Completion] = {}
        for (draw_params, max_tokens), places in kinds.items():
            drawn = self._draw([requests[i] for i in places], draw_params, max_tokens)
            completions |= dict(zip(places, drawn, strict=True))
        return [completions[i] for i in range(len(requests))]

    def _draw(
        self, requests: Sequence[Request], draw_params: DrawParams, max_tokens: int
    ) -> list[Completion]:
        """The completions of requests of one kind."""
        params = GenerationParams(
            draw_params.sampling_params, 1, max_tokens, draw_params.stop_ids, draw_params.experts
        )
        ids, seeds = [request.ids for request in requests], [_seed(request) for request in requests]
        rollouts = self._engine.draw(ids, params, seeds)
        return [Completion(r.completion_ids, r.logprobs, r.finish, self.version, r.experts) for r in rollouts]


def _seed(request: Request) -> int:
    """A number below 2^52 that only depends on the key of the request and the tokens drawn before."""
    key = request.rng_key
    counter = [(key.prompt, key.step, key.sample, request.drawn)]
    high, low = map(int, philox(counter, (key.seed, int(key.stream)))[0, :2])
    return (high << 20) | (low >> 12)


def make_engine(config: Config, model: Path, model_config: ModelConfig, device: torch.device) -> _Engine:
    """The engine of an external sampler. Raises ValueError where it is not installed."""
    dtype = DTYPES[config.precision.sampler_dtype or config.dtype]
    if config.sampler == "hf":
        return HfGenerator(model, dtype, device=device)
    context = config.vllm.context or model_config.max_positions
    return VllmGenerator(model, dtype, context, experts=model_config.experts)
