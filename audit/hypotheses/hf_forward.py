"""transformers' forward in place of our decoder: a family that zerokl has no decoder of.

Hypotheses that need a forward and no more are tried with it. Its rows are logits.

Shapes: C completion tokens, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...engine.rollout.hf import load_model
from ...kernels.sampling_params import SamplingParams
from ...kernels.truncation import scaled_logits
from ..engines.audited_model import AuditedModel
from ..engines.engine import TOGETHER, Pair


@dataclass(frozen=True)
class HfForward:
    """A causal language model of transformers. config: its sizes."""

    model: torch.nn.Module
    config: AuditedModel

    @classmethod
    def load(
        cls, folder: Path, dtype: torch.dtype, device: torch.device, config: AuditedModel
    ) -> "HfForward":
        """Read a folder in a dtype. The sizes are those of `config`."""
        return cls(load_model(folder, dtype).to(device), config)

    @property
    def takes_positions(self) -> bool:
        """Whether the forward has an argument for positions: one that recurs has none."""
        return "position_ids" in inspect.signature(self.model.forward).parameters

    @torch.no_grad()
    def logits(
        self, pairs: Sequence[Pair], positions: Sequence[np.ndarray] | None = None
    ) -> list[torch.Tensor]:
        """The logits [C, V] fp32 of each completion, on the CPU. positions: see scores.hidden_rows."""
        rows = []
        for start in range(0, len(pairs), TOGETHER):
            batch = pairs[start : start + TOGETHER]
            inputs = [[*prompt, *completion[:-1]] for prompt, completion in batch]
            given = {"attention_mask": _padded([[1] * len(x) for x in inputs])}
            if positions is not None:
                given["position_ids"] = _padded([x.tolist() for x in positions[start : start + TOGETHER]])
            given = {name: x.to(self.model.device) for name, x in given.items()}
            ids = _padded(inputs).to(self.model.device)
            logits = self.model(ids, use_cache=False, **given).logits
            for z, x, (prompt, _) in zip(logits, inputs, batch, strict=True):
                rows.append(z[len(prompt) - 1 : len(x)].float().cpu())
        return rows

    @staticmethod
    def read(logits: torch.Tensor, completion: Sequence[int], params: SamplingParams) -> np.ndarray:
        """logits [C, V] -> logp [C] fp32 of a completion."""
        logp = torch.log_softmax(scaled_logits(logits, params), -1)
        return logp.gather(1, torch.tensor(list(completion)).unsqueeze(1)).squeeze(1).numpy()


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rows of one length, with 0 on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
