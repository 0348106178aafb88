"""The monitor compares the trainer's and the sampler's logprob of every training token, bit for bit."""

from collections.abc import Sequence

import numpy as np
import torch

from ...files.bitwise import ulp_distance, unequal
from ...verify.mismatch import mismatch_metrics
from ..rollout.types import Rollout
from .scored import Scored
from .shard import Shard


class MismatchError(RuntimeError):
    """A logprob of the trainer is not the sampler's.

    `report` holds the place, both values and the rollouts that were compared.
    """

    def __init__(self, report: dict):
        self.report = report
        super().__init__(
            "mismatch at step {step}, prompt {prompt}, sample {sample}, position {position} (token {token}): "
            "trainer logprob {trainer!r} ({trainer_bits}), sampler logprob {sampler!r} ({sampler_bits}), "
            "{ulp} ulp apart; {unequal} of {compared} tokens of this step are unequal".format(**report)
        )


def check_values(scored: Sequence[Scored], step: Shard) -> None:
    """Compare the critic's values in a step's first update with those that its targets are made of.

    scored: what the micro-batches of the update left behind, in order. Both are of the same weights, so any
    unequal bit is an error of zerokl. Raises RuntimeError for it, and FloatingPointError for a NaN. Does
    nothing without a critic.
    """
    if step.old_values is None:
        return
    values = torch.cat([part.values for part in scored if part.values is not None])
    before = torch.from_numpy(np.concatenate(step.old_values))
    differs = unequal(values, before) | torch.isnan(values)
    if not differs.any():
        return
    index = int(differs.nonzero()[0])
    rollout, position = _place(index, step.rollouts)
    place = f"prompt {rollout.prompt}, sample {rollout.sample}, position {position}"
    if torch.isnan(values[index]):
        raise FloatingPointError(f"the critic's value at {place} is NaN: its hidden state overflows")
    raise RuntimeError(
        f"the critic's value at {place} is {float(values[index])!r} in the first update, and was "
        f"{float(before[index])!r} when the targets were made; {int(differs.sum())} of {len(differs)} are "
        "unequal"
    )


def _place(index: int, rollouts: Sequence[Rollout]) -> tuple[Rollout, int]:
    """The rollout of a token, and its place among the drawn ones. index: among those of all rollouts."""
    ends = np.cumsum([len(r.logprobs) for r in rollouts])
    i = int(np.searchsorted(ends, index, side="right"))
    return rollouts[i], index - int(ends[i - 1] if i else 0)


class Monitor:
    """Compares the logprobs of one step, in canonical order, and gives the metrics of the whole step.

    version: of the trainer's weights. Rollouts may be drawn with weights up to `max_staleness` updates older.
    """

    def __init__(self, step: int, exact: bool, version: int, max_staleness: int = 0):
        self.step, self.exact, self.version, self.max_staleness = step, exact, version, max_staleness
        self._trainer: list[np.ndarray] = []
        self._sampler: list[np.ndarray] = []
        self._lengths: list[int] = []

    def compare(self, logp: torch.Tensor, rollouts: Sequence[Rollout]) -> None:
        """Compare the trainer's logprobs of the tokens of `rollouts` with the sampler's.

        logp [C]: the trainer's, of all tokens in order, with the weights that the rollouts were sampled from.

        Raises MismatchError at the first unequal bit if exact, FloatingPointError for a NaN, ValueError for
        rollouts of other weights.
        """
        for r in rollouts:
            if not self.version - self.max_staleness <= r.weight_version <= self.version:
                raise ValueError(
                    f"rollout of prompt {r.prompt}, sample {r.sample} has weight version {r.weight_version}; "
                    f"the trainer is at {self.version}"
                    + (f", max_staleness is {self.max_staleness}" if self.max_staleness else "")
                )
        sampler = np.concatenate([r.logprobs for r in rollouts])
        trainer = logp.detach().cpu()
        differs = unequal(trainer, torch.from_numpy(sampler))
        if self.exact and differs.any():
            raise MismatchError(self._report(trainer, torch.from_numpy(sampler), differs, rollouts))
        if (lost := torch.isnan(trainer).nonzero()).numel():
            report = self._report(trainer, torch.from_numpy(sampler), torch.isnan(trainer), rollouts)
            place = "step {step}, prompt {prompt}, sample {sample}, position {position}".format(**report)
            raise FloatingPointError(
                f"the trainer's logprob at {place} is NaN, and {len(lost) - 1} others are: "
                "its logits overflow"
            )
        self._trainer.append(trainer.numpy())
        self._sampler.append(sampler)
        self._lengths += [len(r.logprobs) for r in rollouts]

    def compare_experts(self, experts: torch.Tensor, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The share of (token, layer) pairs that the trainer and the sampler computed with other experts.

        experts [C, L, k]: the trainer's, of the tokens of `rollouts`, whose own were asked for. Two lists of
        a token's experts are equal if they hold the same experts, in any order.
        """
        sampler = np.concatenate([r.drawn_experts for r in rollouts])
        differ = (np.sort(experts.numpy(), axis=2) != np.sort(sampler, axis=2)).any(axis=2)
        return {"mismatch/other_experts": float(differ.mean())}

    def _report(
        self, trainer: torch.Tensor, sampler: torch.Tensor, differs: torch.Tensor, rollouts: Sequence[Rollout]
    ) -> dict:
        """The first place where differs [C] is true, both values there, and all that was compared."""
        index = int(differs.nonzero()[0])
        ends = np.cumsum([len(r.logprobs) for r in rollouts])
        rollout, position = _place(index, rollouts)
        hexadecimal = [f"0x{int(x[index].view(torch.int32)) & 0xFFFFFFFF:08x}" for x in (trainer, sampler)]
        return {
            "step": self.step,
            "prompt": rollout.prompt,
            "sample": rollout.sample,
            "position": position,
            "token": rollout.drawn_ids[position],
            "trainer": float(trainer[index]),
            "sampler": float(sampler[index]),
            "trainer_bits": hexadecimal[0],
            "sampler_bits": hexadecimal[1],
            "ulp": int(ulp_distance(trainer, sampler)[index]),
            "unequal": int(differs.sum()),
            "compared": len(differs),
            "weight_version": rollout.weight_version,
            "rollouts": [
                {
                    "prompt": r.prompt,
                    "sample": r.sample,
                    "prompt_ids": list(r.prompt_ids),
                    "completion_ids": list(r.completion_ids),
                    "mask": r.mask.astype(int).tolist(),
                    "sampling_logprobs": [float(x) for x in r.logprobs],
                    "trainer_logprobs": [float(x) for x in trainer_logprobs],
                }
                for r, trainer_logprobs in zip(rollouts, np.split(trainer.numpy(), ends[:-1]), strict=True)
            ],
        }

    @property
    def tokens(self) -> int:
        """Tokens compared so far."""
        return sum(self._lengths)

    def metrics(self) -> dict[str, float]:
        """The step's mismatch metrics."""
        return mismatch_metrics(np.concatenate(self._trainer), np.concatenate(self._sampler), self._lengths)

    def staleness(self, logp: torch.Tensor) -> dict[str, float]:
        """The mismatch metrics of newer trainer logprobs [C] against the first ones.

        logp: after later updates on the same rollouts.
        """
        newer = logp.detach().cpu().numpy()
        return mismatch_metrics(newer, np.concatenate(self._trainer), self._lengths, prefix="staleness/")
