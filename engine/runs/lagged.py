"""Samplers that draw step t with the weights that step t - lag began with.

LaggedSampler draws in the trainer's processes before the step trains. PooledSampler has actors draw, while
the trainer trains. Both draw the same bits: a step's weights, keys and settings are the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from ...model.checkpoint import DTYPES
from ...model.config import ModelConfig
from ..config.perturb_section import PerturbConfig
from ..config.run_config import Config
from ..rollout.older_weights import OlderWeights, Snapshot
from ..rollout.perturb import sampled_weights, trained_weights
from ..rollout.pool.actor import identify, weight_bytes
from ..rollout.pool.dispatch import Dispatcher
from ..rollout.pool.pinned_sampler import PinnedSampler, Published
from ..rollout.types import Completion, Request, Sampler
from ..train.master_weights import SlicedWeights
from ..train.parallel.workers import Workers


def perturbed(perturb: PerturbConfig, request: Request) -> Request:
    """A request as a perturbed sampler draws it."""
    params = request.draw_params
    changes = perturb.sampling_changes
    if not params.sampling_params.temperature:  # a greedy evaluation stays greedy
        changes.pop("temperature", None)
    sampling_params = params.sampling_params._replace(**changes)
    params = params._replace(sampling_params=sampling_params, logit_noise=perturb.logit_noise)
    return replace(request, draw_params=params)


class Drawing(NamedTuple):
    """A sampler, and the weights of its own [numel] that it takes when it syncs.

    workers: those whose decoder has these weights; None where no decoder of ours has them.
    """

    flat: torch.Tensor
    sampler: Sampler
    workers: Workers | None = None

    def close(self) -> None:
        """End the sampler and the workers."""
        self.sampler.close()
        if self.workers is not None:
            self.workers.close()


class DrawingSampler:
    """What samplers over weights of their own have in common. Each has its way to sync. See Sampler."""

    def __init__(self, drawing: Drawing, perturb: PerturbConfig):
        self._drawing, self._perturb = drawing, perturb

    @property
    def samples_at_once(self) -> int | None:
        return self._drawing.sampler.samples_at_once

    def end_turns(self) -> None:
        self._drawing.sampler.end_turns()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self._drawing.sampler.generate([perturbed(self._perturb, request) for request in requests])

    def close(self) -> None:
        """End the sampler."""
        self._drawing.close()


class _Lagged:
    """The snapshots of the last steps, and the weights of the scorer.

    differs: whether the sampler's weights are not the trainer's. scoring: workers that need the trainer's
    weights of `lag` steps before; None without a lag.
    """

    def __init__(
        self,
        config: Config,
        weights: SlicedWeights,
        older: OlderWeights,
        scoring: Workers | None,
        differs: bool,
    ):
        self._config, self._weights, self.older = config, weights, older
        self._scoring, self._differs = scoring, differs
        older.push(self._snapshot(0))

    def _snapshot(self, version: int) -> Snapshot:
        """Copies of the weights as they are now. Without a lag nobody scores."""
        config, master = self._config, self._weights.whole_model()
        dtype = DTYPES[config.precision.sampler_dtype or config.dtype]
        layout = self._weights.decoder.layout
        sampled = sampled_weights(config, layout, master).to(dtype, copy=True)
        if not self._differs or not self.older.lag:
            return Snapshot(version, sampled, sampled)
        return Snapshot(version, sampled, trained_weights(config, layout, master))

    @torch.no_grad()
    def _push(self, version: int) -> None:
        self.older.push(self._snapshot(version))
        if self._scoring is not None:
            self._scoring.host.decoder.flat.copy_(self.older.due().scored)


class LaggedSampler(_Lagged, DrawingSampler):
    """A sampler over the weights that the step `lag` steps before began with. See Sampler.

    scoring: the workers of `drawing`, or others where the sampler's weights differ.
    """

    def __init__(
        self, config: Config, weights: SlicedWeights, older: OlderWeights, drawing: Drawing, scoring: Workers
    ):
        _Lagged.__init__(self, config, weights, older, scoring, scoring is not drawing.workers)
        DrawingSampler.__init__(self, drawing, config.perturb)

    @torch.no_grad()
    def sync_weights(self, version: int) -> None:
        """It is called once for each step."""
        self._push(version)
        due = self.older.due()
        self._drawing.flat.copy_(due.sampled)
        self._drawing.sampler.sync_weights(due.version)


class PooledSampler(_Lagged, Sampler):
    """Actors draw with the weights that the step `lag` steps before began with.

    open_pool: starts the actors. scoring: see _Lagged; it is not None with a lag.
    """

    def __init__(
        self,
        config: Config,
        weights: SlicedWeights,
        older: OlderWeights,
        scoring: Workers | None,
        differs: bool,
        model_config: ModelConfig,
        open_pool: Callable[[], Dispatcher],
    ):
        super().__init__(config, weights, older, scoring, differs)
        self.lag, self._model_config = older.lag, model_config
        self._published: dict[int, Published] = {}  # by version
        self._pool = open_pool()
        self._before = replace(self._pool.counts)

    def sync_weights(self, version: int) -> None:
        """It is called once for each step."""
        self._push(version)
        kept = self.older.versions
        self._published = {v: published for v, published in self._published.items() if v in kept}

    def pinned(self, ahead: int = 0) -> PinnedSampler:
        due, pool = self.older.due(ahead), self._config.pool
        if due.version not in self._published:
            sent = self._pool.cluster.publish(weight_bytes(due.sampled))
            self._published[due.version] = Published(identify(due.version, due.sampled), sent)
        return PinnedSampler(
            self._pool,
            self._published[due.version],
            self._model_config,
            partial(perturbed, self._config.perturb),
            pool.batch,
            self._config.native.max_concurrency,
        )

    def metrics(self, step_s: float) -> dict[str, float]:
        before, self._before = self._before, replace(self._pool.counts)
        busy_s, tokens = self._before.busy_s - before.busy_s, self._before.tokens - before.tokens
        return {
            "pool/actors_idle": max(0.0, 1.0 - busy_s / (step_s * self._pool.n)),
            "pool/tokens_per_s": tokens / step_s,
            "pool/replaced": float(self._before.replaced),
        }

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self.pinned().generate(requests)

    def close(self) -> None:
        """End the actors."""
        self._pool.close()
