"""Frequencies of a rotary embedding whose positions are scaled, and the factor on its cos and sin.

    linear      f / factor                                       (positions are divided by `factor`)
    llama3      long wavelengths are divided by `factor`, short ones kept, interpolated in between
    yarn        f (m + (1 - m) / factor), where m falls from 1 to 0 over the dimensions   (arXiv:2309.00071)
    longrope    f / short_factor, one number for each frequency  (arXiv:2402.13753)

`scaling` holds the parameters by their names in config.json, and rope_type. The scores of attention are
products of two rotated heads: a factor on cos and sin (yarn, longrope) counts twice in them.

The reference computes in fp64 with Python's numbers. The fp32 form is that of vLLM's models, operation by
operation (vllm/model_executor/layers/rotary_embedding/).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """What cos and sin are multiplied by."""
    return float(scaling.get("attention_factor", 1.0)) if scaling else 1.0


def scaled_frequencies(
    frequencies: list[float], theta: float, scaling: Mapping[str, Any] | None
) -> list[float]:
    """The frequencies [D/2] of rope_frequencies, scaled. In radians per position, fp64."""
    if scaling is None:
        return frequencies
    match scaling["rope_type"]:
        case "linear":
            return [f / scaling["factor"] for f in frequencies]
        case "yarn":
            low, high = _yarn_range(2 * len(frequencies), theta, scaling)
            ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(frequencies))]
            return [f / scaling["factor"] * r + f * (1.0 - r) for f, r in zip(frequencies, ramp, strict=True)]
        case "longrope":
            return [f / s for f, s in zip(frequencies, scaling["short_factor"], strict=True)]
    return llama3_frequencies(
        frequencies,
        scaling["factor"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        int(scaling["original_max_position_embeddings"]),
    )


def llama3_frequencies(
    frequencies: list[float],
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_positions: int,
) -> list[float]:
    """Llama 3.1's frequency scaling (meta-llama `apply_scaling`; transformers `_compute_llama3_parameters`).

    A wavelength longer than original_positions / low_freq_factor is stretched by `factor`. A wavelength
    shorter than original_positions / high_freq_factor is kept. Between these two, the frequency is
    interpolated linearly.
    """
    scaled = []
    for f in frequencies:
        wavelength = 2.0 * math.pi / f
        if wavelength > original_positions / low_freq_factor:
            scaled.append(f / factor)
        elif wavelength < original_positions / high_freq_factor:
            scaled.append(f)
        else:
            width = high_freq_factor - low_freq_factor
            smooth = (original_positions / wavelength - low_freq_factor) / width
            scaled.append((1.0 - smooth) * f / factor + smooth * f)
    return scaled


def scaled_frequencies_fp32(
    dim: int, theta: float, scaling: Mapping[str, Any] | None, device: torch.device
) -> torch.Tensor:
    """The frequencies of vLLM's models, [dim / 2] fp32. With linear, vLLM scales the positions instead."""
    powers = torch.pow(theta, torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    f = 1.0 / powers
    match scaling["rope_type"] if scaling else None:
        case "llama3":
            return _llama3_fp32(f, scaling)
        case "longrope":
            short = torch.tensor(scaling["short_factor"], dtype=torch.float32, device=device)
            return 1.0 / (short * powers)
        case "yarn":
            low, high = _yarn_range(dim, theta, scaling)
            ramp = torch.arange(dim // 2, dtype=torch.float32, device=device).sub(low).div(high - low)
            mask = 1 - torch.clamp(ramp, 0, 1)
            return 1.0 / (scaling["factor"] * powers) * (1 - mask) + f * mask
    return f


def _llama3_fp32(f: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / f
    smooth = (original / wavelength - low) / (high - low) if low != high else 0.0
    stretched = f / scaling["factor"]
    between = (1 - smooth) * f / scaling["factor"] + smooth * f
    return torch.where(
        wavelength < original / high, f, torch.where(wavelength > original / low, stretched, between)
    )


def _yarn_range(dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[float, float]:
    """Where yarn's ramp begins and ends, as indices of frequencies."""
    original = scaling["original_max_position_embeddings"]

    def place(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(scaling["beta_fast"]), place(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high
