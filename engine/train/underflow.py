"""Gradients that a compute dtype cannot hold: counted where the backward pass begins and where it ends.

What is counted: elements that are exactly zero in the gradient of the final norm's output (`norm`, the first
gradient of an activation that is rounded to the compute dtype) and of the embedding's (`embed`, the last), in
rows that a token with a gradient depends on. In exact arithmetic such an element is zero by coincidence only,
so it was lost to rounding: fp16 has nothing below 2^-24.

Shapes: T packed input tokens, C completion tokens, D hidden size.
"""

import numpy as np
import torch

from ...model.prompts import Prompts
from ...model.scoring import PackedBatch

WATCHED = ("norm", "embed")


class PromptUnderflow:
    """Counts prompts that were read for several samples (model/prompts.py):

    give `hook` to their forward and `watch` what it made.
    """

    def __init__(self) -> None:
        self.reached: set[int] = set()  # prompts that a token with a gradient follows
        self.zeros = dict.fromkeys(WATCHED, 0)  # `norm` stays 0: their forward ends before

    def hook(self, name: str, x: torch.Tensor) -> None:
        """See Decoder.hidden. x [B + padding, D]."""
        if name == "embed" and x.requires_grad:
            x.register_hook(self._count)

    def watch(self, prompts: Prompts) -> None:
        """The prompts of that forward."""
        self._prompt_of_row = torch.from_numpy(np.repeat(np.arange(len(prompts.lengths)), prompts.lengths))

    def _count(self, dx: torch.Tensor) -> None:
        rows = torch.isin(self._prompt_of_row, torch.tensor(sorted(self.reached), dtype=torch.int64))
        self.zeros["embed"] += _zeros(dx, rows)


class Underflow:
    """Counts one micro-batch:

    give `hook` to the forward and `watch` its logp. `zeros` holds the counts after the backward.
    """

    def __init__(self, batch: PackedBatch, prompts: PromptUnderflow | None = None):
        """prompts: of a batch whose prompts were read before, the counter that is to know which of them a
        gradient reaches.
        """
        self._batch, self._prompts = batch, prompts
        self._read = torch.zeros(
            0, dtype=torch.bool
        )  # [T] rows from which a token with a gradient is predicted
        self._reached = self._read  # [T] rows that one of those depends on
        self.zeros = dict.fromkeys(WATCHED, 0)

    def hook(self, name: str, x: torch.Tensor) -> None:
        """See Decoder.hidden. x [T + padding, D]."""
        if name in WATCHED and x.requires_grad:
            x.register_hook(lambda dx: self._count(name, dx))

    def watch(self, logp: torch.Tensor) -> None:
        """logp [C] of the forward; its gradient, which comes first, says which tokens have one."""
        logp.register_hook(self._find_rows)

    def _find_rows(self, dlogp: torch.Tensor) -> None:
        read = np.zeros(len(self._batch.ids), bool)
        read[self._batch.rows.numpy()[(dlogp != 0).cpu().numpy()]] = True
        reached = [
            np.flip(np.logical_or.accumulate(np.flip(x)))
            for x in np.split(read, np.cumsum(self._batch.lengths)[:-1])
        ]
        if self._prompts:
            self._prompts.reached |= {
                prompt for prompt, rows in zip(self._batch.after or (), reached, strict=True) if rows[0]
            }
        self._read, self._reached = torch.from_numpy(read), torch.from_numpy(np.concatenate(reached))

    def _count(self, name: str, dx: torch.Tensor) -> None:
        rows = self._read if name == "norm" else self._reached
        self.zeros[name] += _zeros(dx, rows)


def _zeros(dx: torch.Tensor, rows: torch.Tensor) -> int:
    """Zeros of dx [T + padding, D] in the rows [T] that are true."""
    return int((dx[: len(rows)][rows.to(dx.device)] == 0).sum())
