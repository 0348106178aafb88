"""The bytes that a run keeps beside its device, and whether it does so where memory.offload is auto."""

from dataclasses import replace
from typing import NamedTuple

import torch

from ...files.inputs import read_text
from ...kernels.launch import next_power_of_2
from ..rollout.cache_size import free_bytes
from .memory import PassSizes, RunShape, fit_into, layers_without_backward, levels, rows_of_a_pass

# Share of the host's free memory that may be pinned: the system, rewards and environments have the rest.
_HOST_SHARE = 0.8


class Beside(NamedTuple):
    """Bytes beside the device, by what they are for."""

    optimizer: int  # fp32 master weights, unless they are computed with, and moments
    gradients: int  # partial sums
    base: int  # that LoRA's adapters are merged into
    activations: int  # inputs of recomputed layers; torch pins a power of two of bytes for each


def beside(run: RunShape, sizes: PassSizes) -> Beside:
    """What lies on the host or on the disk with memory.offload = "host" or "disk"."""
    config, numel = run.config, run.trained_numel
    in_place = run.adapters or (run.dtype == torch.float32 and not config.precision.weights)
    rows, _ = rows_of_a_pass(run, sizes)
    layers = run.layout.config.layers - layers_without_backward(run.layout)
    inputs = 2 * next_power_of_2(rows * run.layout.config.hidden_size * run.dtype.itemsize)
    return Beside(
        optimizer=(run.moment_bytes + (0 if in_place else 4 * numel)) // run.ranks,
        gradients=4 * numel * levels(sizes.shards_at_once),
        base=run.layout.trained_numel * run.base.itemsize if run.adapters else 0,
        activations=layers * inputs if config.recompute == "layer" else 0,
    )


def placed(run: RunShape, device: torch.device) -> RunShape:
    """The run with memory.offload decided, where it is "auto"."""
    if run.config.memory.offload != "auto":
        return run
    if device.type == "cpu" or run.ranks > 1 or run.config.parallel.engine == "fsdp":
        return _with(run, "none")
    return placed_into(run, free_bytes(device), _host_bytes())


def placed_into(run: RunShape, free: int, host: int) -> RunShape:
    """The run on a GPU with the first place in which a step fits. free, host: bytes of the GPU and beside it.

    Where none fits, it is the disk, with which `fit` then says what is missing.
    """
    for place in ("none", "host"):
        candidate = _with(run, place)
        try:
            sizes = fit_into(candidate, free)
        except ValueError:
            continue
        if place == "none" or sum(beside(candidate, sizes)) <= _HOST_SHARE * host:
            return candidate
    return _with(run, "disk")


def told(run: RunShape, sizes: PassSizes) -> str:
    """What a run begins with where memory lies beside its GPU because a step does not fit there."""
    gib = sum(beside(run, sizes)) / (1 << 30)
    return (
        f"a step is predicted not to fit on the GPU alone, so {gib:.1f} GiB lie on the "
        f"{run.config.memory.offload} (memory.offload = auto)"
    )


def _with(run: RunShape, place: str) -> RunShape:
    memory = run.config.memory.model_copy(update={"offload": place})
    return replace(run, config=run.config.model_copy(update={"memory": memory}))


def _host_bytes() -> int:
    """Memory that the host has free, as Linux counts it."""
    lines = dict(line.split(":", 1) for line in read_text("/proc/meminfo").splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10
