"""vLLM's penalties on logits (v1/sample/ops/penalties.py).

The repetition penalty divides positive logits of tokens that prompt or completion hold, and multiplies
negative ones; presence and frequency count the completion alone.

Shapes: C completion tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch

from .scorable_lines import Line


def seen_counts(ids: Sequence[int], V: int) -> torch.Tensor:
    """How often each token was drawn before each place, [C, V] fp32."""
    counts = torch.zeros(len(ids), V)
    counts[torch.arange(1, len(ids)), torch.tensor(ids[:-1], dtype=torch.long)] = 1.0
    return counts.cumsum(0)


def repetition(z: torch.Tensor, line: Line, x: float) -> torch.Tensor:
    """The repetition penalty."""
    V = z.shape[1]
    read = torch.bincount(torch.tensor(line.prompt_ids, dtype=torch.long), minlength=V) > 0
    known = (seen_counts(line.completion_ids, V) > 0) | read
    return torch.where(known, torch.where(z > 0, z / x, z * x), z)


def presence(z: torch.Tensor, line: Line, x: float) -> torch.Tensor:
    """The presence penalty."""
    return z - x * (seen_counts(line.completion_ids, z.shape[1]) > 0)


def frequency(z: torch.Tensor, line: Line, x: float) -> torch.Tensor:
    """The frequency penalty."""
    return z - x * seen_counts(line.completion_ids, z.shape[1])
