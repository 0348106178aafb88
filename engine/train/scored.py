"""What sequences of a micro-batch leave behind after their forward and backward.

Shapes: n sequences, C drawn tokens of all of them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch


@dataclass(frozen=True)
class Scored:
    """Of some sequences of one shard, or of a whole micro-batch."""

    logp: torch.Tensor  # [C], the trainer's
    losses: torch.Tensor  # [C], weighted
    entropies: torch.Tensor  # [C]
    # [C, L, k], the experts of the row that predicts each token (model/routing.py); None in a dense model
    experts: torch.Tensor | None = None
    values: torch.Tensor | None = None  # [C], the critic's; None without one
    load_balance: torch.Tensor | None = None  # [n] (losses/load_balance.py); None where it is off
    # Zeros in the watched gradients (underflow.py) of a whole call, in one part of it; empty in the others.
    underflow: dict[str, int] = field(default_factory=dict)

    def by_shard(self, shards: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, "Scored"]]:
        """The parts that belong to one shard each. shards, lengths [n]: of each sequence."""
        start = 0
        for shard, group in groupby(range(len(shards)), key=shards.__getitem__):
            members = list(group)
            end = start + sum(lengths[i] for i in members)
            tokens, sequences = slice(start, end), slice(members[0], members[-1] + 1)
            yield (
                shard,
                Scored(
                    self.logp[tokens].clone(),
                    self.losses[tokens].clone(),
                    self.entropies[tokens].clone(),
                    _copied(self.experts, tokens),
                    _copied(self.values, tokens),
                    _copied(self.load_balance, sequences),
                ),
            )
            start = end


def _copied(column: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    """A part of a column. A copy, because a part of a tensor is pickled with all of it."""
    return None if column is None else column[part].clone()


def joined_experts(parts: Sequence[Scored]) -> torch.Tensor | None:
    """The experts of the tokens of all parts, [C, L, k]; None in a dense model."""
    experts = [part.experts for part in parts if part.experts is not None]
    return torch.cat(experts) if experts else None


def step_losses(parts: Sequence[Scored]) -> dict[str, float]:
    """The loss, summed over the tokens of a step; the means of entropy and, where it is on, load balance.

    The loss is NaN where tokens that the trainer cuts add infinities of both signs.
    """
    losses = torch.cat([part.losses for part in parts]).tolist()
    entropies = torch.cat([part.entropies for part in parts]).tolist()
    opposite = math.inf in losses and -math.inf in losses  # math.fsum raises
    metrics = {"loss": math.nan if opposite else math.fsum(losses), "entropy": _mean(entropies)}
    balances = [part.load_balance for part in parts if part.load_balance is not None]
    return metrics | ({"router/load_balance": _mean(torch.cat(balances).tolist())} if balances else {})


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
