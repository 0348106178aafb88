"""A sampler actor: the native sampler in a process of its own, over weights that it is sent.

An actor keeps no state that decides a bit: each batch names its weights. Weights are compared by their hash
when they arrive, as they then lie in the decoder's memory. So an actor that kept older weights draws nothing.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ....model.decoder import Decoder, Numerics
from ....model.weights import Layout
from ....verify.run_environment import DECIDES, PACKAGE_ROOT, environment
from ...config.run_config import NativeConfig
from ..native import NativeSampler
from ..types import Completion, Request


class StaleWeightsError(RuntimeError):
    """An actor's weights are not those that it was sent."""


class WeightsId(NamedTuple):
    """Which weights: their version, and the SHA-256 of their bytes."""

    version: int
    sha256: str


@dataclass(frozen=True)
class Blueprint:
    """What an actor is made from. dtype: of its weights. threads: CPU threads of an actor."""

    layout: Layout
    dtype: torch.dtype
    numerics: Numerics
    native: NativeConfig
    device: str  # "cpu" or "cuda"
    threads: int


@dataclass(frozen=True)
class Answer:
    """What an actor has drawn for a batch."""

    completions: list[Completion]
    weights: WeightsId
    seconds: float  # that the actor was busy with it


def weight_bytes(flat: torch.Tensor) -> np.ndarray:
    """The bytes of weights [numel], uint8; on a CPU in the same memory."""
    return flat.detach().cpu().view(torch.uint8).numpy()


def identify(version: int, flat: torch.Tensor) -> WeightsId:
    """The identity of weights [numel]."""
    return WeightsId(version, hashlib.sha256(weight_bytes(flat)).hexdigest())


def bits_environment(device: torch.device) -> dict[str, Any]:
    """What of this process's environment decides bits. Actors must have the trainer's."""
    values = environment(PACKAGE_ROOT, device, {})
    return {name: values.get(name) for name in DECIDES}


class SamplerActor:
    """Draws batches of requests, each with the weights that it names."""

    def __init__(self, blueprint: Blueprint):
        torch.set_num_threads(blueprint.threads)
        layout, self._device = blueprint.layout, torch.device(blueprint.device)
        self._host = torch.zeros(layout.numel, dtype=blueprint.dtype)  # on a CPU the decoder's own memory
        flat = self._host.to(self._device)
        self._decoder = Decoder(layout.config, flat, layout, blueprint.numerics)
        self._sampler = NativeSampler(self._decoder, **blueprint.native.model_dump())
        self._weights: WeightsId | None = None

    def greet(self) -> dict[str, Any]:
        """What of the actor's environment decides bits."""
        return bits_environment(self._device)

    def generate(self, sent: np.ndarray, weights: WeightsId, requests: Sequence[Request]) -> Answer:
        """The completions of requests, drawn with the weights `weights`, whose bytes are `sent`.

        Raises StaleWeightsError where the weights have another hash, and what NativeSampler.generate raises.
        """
        began_s = time.perf_counter()
        if weights != self._weights:
            self._load(sent, weights)
        completions = self._sampler.generate(requests)
        return Answer(completions, self._weights, time.perf_counter() - began_s)

    @torch.no_grad()
    def _load(self, sent: np.ndarray, weights: WeightsId) -> None:
        self._weights = None
        self._copy(sent)
        held = identify(weights.version, self._decoder.flat)
        if held != weights:
            raise StaleWeightsError(
                f"pool: an actor's weights of version {weights.version} have the hash {held.sha256[:16]}, "
                f"and the trainer's {weights.sha256[:16]}; they were damaged on their way, or are older ones"
            )
        self._sampler.sync_weights(weights.version)
        self._weights = weights

    def _copy(self, sent: np.ndarray) -> None:
        """Copy bytes into the decoder's memory."""
        self._host.view(torch.uint8).numpy()[:] = sent
        if self._device.type != "cpu":
            self._decoder.flat.copy_(self._host)
