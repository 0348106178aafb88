"""Counts gradients that the compute dtype cannot hold, where the backward pass begins and where it ends.

Elements that are exactly zero are counted in two gradients:

    norm     of the final norm's output: the first gradient of an activation that is rounded to the compute
             dtype
    embed    of the embedding's output: the last such gradient

Only rows count on which a token with a gradient depends. In exact arithmetic an element of such a row is zero
only by coincidence. So a zero is an element that was lost to rounding: fp16 has nothing below 2^-24.

Shapes: T packed input tokens, B prompt tokens (model/prompts.py), C completion tokens, D hidden size.
"""

import numpy as np
import torch

from ...model.prompts import Prompts
from ...model.scoring import PackedBatch

WATCHED = ("norm", "embed")


class PromptUnderflow:
    """Counts in prompts that are read once for several samples (model/prompts.py).

    Give `hook` to their forward, and the Prompts that it makes to `watch`.
    """

    def __init__(self) -> None:
        self.reached: set[int] = set()  # prompts that are followed by a token with a gradient
        self.zeros = dict.fromkeys(WATCHED, 0)  # `norm` stays 0: the prompts' forward ends before the norm

    def hook(self, name: str, x: torch.Tensor) -> None:
        """See Decoder.hidden. x [B + padding, D]."""
        if name == "embed" and x.requires_grad:
            x.register_hook(self._count)

    def watch(self, prompts: Prompts) -> None:
        """Take the Prompts whose forward got `hook`."""
        self._prompt_of_row = torch.from_numpy(np.repeat(np.arange(len(prompts.lengths)), prompts.lengths))

    def _count(self, dx: torch.Tensor) -> None:
        rows = torch.isin(self._prompt_of_row, torch.tensor(sorted(self.reached), dtype=torch.int64))
        self.zeros["embed"] += _zeros(dx, rows)


class Underflow:
    """Counts in one micro-batch.

    Give `hook` to the forward, and its logp to `watch`. `zeros` holds the counts after the backward.
    """

    def __init__(self, batch: PackedBatch, prompts: PromptUnderflow | None = None):
        """prompts: the counter of the batch's prompts, where they were read before the batch.

        It is told which prompts a gradient reaches.
        """
        self._batch, self._prompts = batch, prompts
        # [T]: rows from which a token with a gradient is predicted.
        self._predicting = torch.zeros(0, dtype=torch.bool)
        # [T]: rows on which such a row depends.
        self._reached = self._predicting
        self.zeros = dict.fromkeys(WATCHED, 0)

    def hook(self, name: str, x: torch.Tensor) -> None:
        """See Decoder.hidden. x [T + padding, D]."""
        if name in WATCHED and x.requires_grad:
            x.register_hook(lambda dx: self._count(name, dx))

    def watch(self, logp: torch.Tensor) -> None:
        """Take logp [C] of the forward. Its gradient is computed first, and shows which tokens have one."""
        logp.register_hook(self._find_rows)

    def _find_rows(self, dlogp: torch.Tensor) -> None:
        predicting = np.zeros(len(self._batch.ids), bool)
        predicting[self._batch.rows.numpy()[(dlogp != 0).cpu().numpy()]] = True
        reached = [
            np.flip(np.logical_or.accumulate(np.flip(rows)))
            for rows in np.split(predicting, np.cumsum(self._batch.lengths)[:-1])
        ]
        if self._prompts:
            self._prompts.reached.update(
                prompt for prompt, rows in zip(self._batch.after or (), reached, strict=True) if rows[0]
            )
        self._predicting = torch.from_numpy(predicting)
        self._reached = torch.from_numpy(np.concatenate(reached))

    def _count(self, name: str, dx: torch.Tensor) -> None:
        rows = self._predicting if name == "norm" else self._reached
        self.zeros[name] += _zeros(dx, rows)


def _zeros(dx: torch.Tensor, rows: torch.Tensor) -> int:
    """The number of zeros in dx [T + padding, D], in those of its rows where rows [T] is true."""
    return int(((dx[: len(rows)] == 0) & rows.to(dx.device).unsqueeze(1)).sum())
