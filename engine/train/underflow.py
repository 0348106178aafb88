"""Counts gradients that the compute dtype cannot hold, where the backward pass begins and where it ends.

Elements that are exactly zero are counted in two gradients:

    norm     of the final norm's output: the first gradient of an activation that is rounded to the compute
             dtype
    embed    of the embedding's output: the last such gradient

Only rows count on which a token with a gradient depends. In exact arithmetic an element of such a row is zero
only by coincidence. So a zero is an element that was lost to rounding: fp16 has nothing below 2^-24.

Shapes: T packed input tokens, B prompt tokens (model/prompts.py), C completion tokens, D hidden size.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ...kernels.shared_rows import ALL_ROWS, SharedRows
from ...kernels.upload import upload
from ...model.one_pass import OnePassContext
from ...model.prompts import PromptLayout
from ...model.scoring import PackedBatch

WATCHED = ("norm", "embed")


class ZeroCounts:
    """The zeros of several gradients. Each is counted where it lies, and all counts are read together."""

    def __init__(self, shared: SharedRows = ALL_ROWS) -> None:
        """shared: the ranks that share the rows of each gradient."""
        self.shared = shared
        self._counts: list[tuple[str, torch.Tensor]] = []

    def add(self, name: str, dx: torch.Tensor, rows: torch.Tensor) -> None:
        """Count in dx [T + padding, D], in those of its rows where rows [T] is true, for a watched name."""
        self._counts.append((name, ((dx[: len(rows)] == 0) & rows.unsqueeze(1)).sum()))

    def read(self) -> dict[str, int]:
        """The sum for each watched name. It waits for the gradients, once."""
        zeros = dict.fromkeys(WATCHED, 0)
        if self._counts:
            names, counts = zip(*self._counts, strict=True)
            for name, n in zip(names, torch.stack(counts).cpu().tolist(), strict=True):
                zeros[name] += n
        return zeros


class PromptUnderflow:
    """Counts in prompts that are read once for several samples (model/prompts.py), for `embed` only.

    The prompts' forward ends before the norm. Give `hook` to it.
    """

    def __init__(self, layout: PromptLayout, counts: ZeroCounts):
        self.reached: set[int] = set()  # prompts that are followed by a token with a gradient
        self._counts = counts
        self._prompt_of_row = torch.from_numpy(np.repeat(np.arange(len(layout.lengths)), layout.lengths))

    def hook(self, name: str, x: torch.Tensor) -> None:
        """The hook of Decoder.hidden. x [B + padding, D]."""
        if name == "embed" and x.requires_grad:
            x.register_hook(lambda dx: self.count(self._counts.shared.whole(dx)))

    def count(self, dx: torch.Tensor) -> None:
        """Count in the gradient of the embedding's output, dx [B + padding, D]."""
        rows = torch.isin(self._prompt_of_row, torch.tensor(sorted(self.reached), dtype=torch.int64))
        self._counts.add("embed", dx, *upload(dx.device, rows))


class Underflow:
    """Counts in one micro-batch.

    Give `hook` to the forward, and its logp to `watch`. The backward adds to `counts`. On a device it reads
    this object's tables, which go there together with the gradient of logp (kernels/to_host.py).
    """

    def __init__(self, batch: PackedBatch, counts: ZeroCounts, prompts: PromptUnderflow | None = None):
        """prompts: the counter of the batch's prompts, where they were read before the batch.

        It is told which prompts a gradient reaches.
        """
        self._batch, self._counts, self._prompts = batch, counts, prompts
        # [T]: rows from which a token with a gradient is predicted.
        self._predicting = torch.zeros(0, dtype=torch.bool)
        # [T]: rows on which such a row depends.
        self._reached = self._predicting

    def hook(self, name: str, x: torch.Tensor) -> None:
        """The hook of Decoder.hidden. x [T + padding, D]."""
        if name in WATCHED and x.requires_grad:
            x.register_hook(lambda dx: self._count(name, self._counts.shared.whole(dx)))

    def watch(self, logp: torch.Tensor) -> None:
        """Take logp [C] of the forward, on the host.

        Its gradient is computed first, and shows which tokens have one.
        """
        logp.register_hook(self._find_rows)

    def _find_rows(self, dlogp: torch.Tensor) -> None:
        predicting = np.zeros(len(self._batch.ids), bool)
        predicting[self._batch.rows.numpy()[(dlogp != 0).numpy()]] = True
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

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        return [self._predicting, self._reached]

    def arrived(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self._predicting, self._reached = tensors

    def _count(self, name: str, dx: torch.Tensor) -> None:
        self._counts.add(name, dx, self._predicting if name == "norm" else self._reached)


class OnePassUnderflow(Underflow):
    """Counts in one forward of samples and their prompts (model/one_pass.py)."""

    def __init__(self, batch: PackedBatch, counts: ZeroCounts, layout: PromptLayout, context: OnePassContext):
        self._of_prompts = PromptUnderflow(layout, counts)
        super().__init__(batch, counts, self._of_prompts)
        self._context = context

    def _count(self, name: str, dx: torch.Tensor) -> None:
        if name == "norm":  # only the samples have rows there
            super()._count(name, dx)
            return
        sample_rows, prompt_rows, _ = self._context.by_kind(dx)
        super()._count(name, sample_rows)
        self._of_prompts.count(prompt_rows)
