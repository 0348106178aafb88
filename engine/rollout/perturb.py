"""Mismatch on demand: a sampler that differs from the trainer in controlled ways, for tests of corrections.

    weights       w' = w + gain (q(w) - w), rounded once to the sampler's compute dtype; q rounds each weight
                  to a dtype, or quantises matrices with scales (model/sampler_weights.py)
    delay         the weights are those of `delay` steps ago, but the rollouts name the current version
    logits        z' = z + logit_noise n, with standard normal numbers n from the run's keys:
                  (seed, step, prompt, generation, position, token)
    temperature, top_k, top_p, min_p
                  tokens are drawn, and their logprobs are reported, from the distribution of these
                  settings (kernels/truncation.py)
    kv            keys and values are quantised (model/kv_rounding.py)

As with any engine, a rollout carries the logprobs with which its tokens were drawn. The trainer's logprobs
differ from them. Everything is reproducible to the bit. The audit names what is planted here: a file of
audit/faults/ says by which settings (Fault.perturb).
"""

from collections import deque

import torch

from ...model.checkpoint import DTYPES
from ...model.compute_weights import compute_weights
from ...model.quantisation import Quantisation
from ...model.sampler_weights import quantised_weights, rounded_weights
from ...model.weights import Layout
from ..config.perturb_section import PerturbConfig
from ..config.run_config import Config


def sampled_weights(config: Config, layout: Layout, master: torch.Tensor) -> torch.Tensor:
    """The weights that the sampler draws with, [numel] fp32: what rounding to its compute dtype keeps.

    master: the trainer's master weights, [numel] fp32. Where nothing changes them, they are returned.
    """
    precision, perturb = config.precision, config.perturb
    dtype = DTYPES[precision.sampler_dtype or config.dtype]
    if perturb.round_weights:
        return _moved(perturb, master, rounded_weights(layout, master, perturb.round_weights))
    if perturb.weights:
        source = master if perturb.weights_of == "masters" else master.to(dtype).float()
        how = Quantisation.parse(perturb.weights)
        return _moved(perturb, source, quantised_weights(layout, source, how))
    if precision.quantisation:
        return compute_weights(layout, master, dtype, precision.quantisation).float()
    return master


def _moved(perturb: PerturbConfig, weights: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """The weights with their rounding's difference times the gain."""
    return rounded if perturb.gain == 1.0 else weights + (rounded - weights) * perturb.gain


def trained_weights(config: Config, layout: Layout, master: torch.Tensor) -> torch.Tensor:
    """The weights that the trainer computes with, [numel] in its compute dtype: a tensor of its own.

    master: as in sampled_weights.
    """
    return compute_weights(layout, master, DTYPES[config.dtype], config.precision.quantisation)


class Delayed:
    """The weights of `delay` steps ago, or the first weights where there are none so old."""

    def __init__(self, delay: int):
        self._kept: deque[torch.Tensor] = deque(maxlen=delay + 1)

    def push(self, weights: torch.Tensor) -> torch.Tensor:
        """Add the newest weights [numel]. Returns the weights to sample from."""
        self._kept.append(weights.clone())
        return self._kept[0]
