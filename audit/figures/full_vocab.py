"""`zerokl audit --full_vocab`: the log-probabilities of the whole vocabulary, not of the drawn token only.

At each place of a completion the sampler has the distribution p, the trainer q, over V tokens:

    KL(p || q) = sum_v p_v (log p_v - log q_v) - p_v + q_v      total variation = 1/2 sum_v |p_v - q_v|
    mass = sum_v p_v

The mass should be 1, and is not where a log-softmax rounds its sum. The last two terms of the KL are 0 for
masses of 1. With them no addend is negative, so an error of the mass does not count as a KL.

A token with p_v = q_v = 0 adds nothing to the KL. Where p_v > 0 and q_v = 0 the KL is infinite; such places
are counted, and the mean is over the rest. The sums are in fp64. The rank of a token is the number of tokens
that are more likely.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...engine.rollout.types import Rollout
from ...files.bitwise import unequal
from ...kernels.sampling_params import SamplingParams
from ...verify.mismatch import mean, standard_error
from ..engines.engine import Engine
from ..sections import FullVocab
from .measure import Estimate, kept_lengths

# How many of the likeliest tokens are compared as a set.
_TOP = 10


def compare_full_vocab(
    sampler: Engine, trainer: Engine, rollouts: Sequence[tuple[Rollout, SamplingParams]]
) -> FullVocab:
    """Compare p and q at every place of every completion.

    max_abs is the largest difference of a log-probability of the tokens that both sides can draw; sequence,
    position and token say where it is.
    """
    parts: dict[str, list[np.ndarray]] = {}
    worst = _Worst()
    for sequence, (rollout, params) in enumerate(rollouts):
        position = 0
        chunks = zip(
            sampler.distributions(rollout.pair, params),
            trainer.distributions(rollout.pair, params),
            strict=True,
        )
        for s, t in chunks:
            drawn = torch.tensor(rollout.completion_ids[position : position + len(s)])
            for name, values in _of_places(s, t, drawn).items():
                parts.setdefault(name, []).append(values.numpy())
            worst = max(worst, _worst(s, t, sequence, position), key=lambda w: w.max_abs)
            position += len(s)
        vocabulary = s.shape[1]
    lengths = [len(rollout.completion_ids) for rollout, _ in rollouts]
    places = {name: np.concatenate(values) for name, values in parts.items()}
    return _report(places, lengths, vocabulary, worst)


def _of_places(s: torch.Tensor, t: torch.Tensor, drawn: torch.Tensor) -> dict[str, torch.Tensor]:
    """Figures of each place. s, t [C, V] fp32: logp of the sampler and the trainer; drawn [C] -> [C] each."""
    p, q = s.double().exp(), t.double().exp()
    top = [x.topk(min(_TOP, x.shape[1])).indices for x in (s, t)]
    same_set = (top[0].sort().values == top[1].sort().values).all(dim=1)
    ranks = [_rank(x, drawn) for x in (s, t)]
    return {
        "equal": (~unequal(s, t)).sum(dim=1),
        "kl_sampler_trainer": _kl(p, q, s, t),
        "kl_trainer_sampler": _kl(q, p, t, s),
        "mass_sampler": p.sum(dim=1) - 1.0,
        "mass_trainer": q.sum(dim=1) - 1.0,
        "total_variation": (p - q).abs().sum(dim=1) / 2,
        "same_first": top[0][:, 0] == top[1][:, 0],
        "same_top": same_set,
        "other_kept_set": (s.isneginf() != t.isneginf()).any(dim=1),
        "rank_sampler": ranks[0],
        "rank_trainer": ranks[1],
    }


def _kl(p: torch.Tensor, q: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of each place, [C]. All are [C, V]; p and q in fp64."""
    return (torch.where(p > 0, p * (log_p.double() - log_q.double()), 0.0) - p + q).sum(dim=1)


def _rank(logp: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """How many tokens are more likely than the drawn one, [C]."""
    return (logp > logp.gather(1, drawn.unsqueeze(1))).sum(dim=1)


@dataclass(frozen=True)
class _Worst:
    """The token with the largest difference, of those that both sides can draw."""

    max_abs: float = 0.0
    sequence: int | None = None
    position: int | None = None
    token: int | None = None


def _worst(s: torch.Tensor, t: torch.Tensor, sequence: int, position: int) -> _Worst:
    """The worst token of a chunk. s, t [C, V]; position: of the chunk's first row."""
    gaps = torch.where(s.isneginf() | t.isneginf(), 0.0, (s.double() - t.double()).abs())
    row, token = divmod(int(gaps.argmax()), gaps.shape[1])
    return _Worst(float(gaps[row, token]), sequence, position + row, token)


def _report(
    places: dict[str, np.ndarray], lengths: Sequence[int], vocabulary: int, worst: _Worst
) -> FullVocab:
    n = len(places["equal"])
    known = {name: np.isfinite(places[name]) for name in places if name.startswith("kl_")}
    finite = {name: places[name][which] for name, which in known.items()}
    rank_change = np.abs(places["rank_sampler"] - places["rank_trainer"])
    return FullVocab(
        places=n,
        vocabulary=vocabulary,
        frac_places_equal=float((places["equal"] == vocabulary).mean()),
        frac_values_equal=float(places["equal"].sum() / (n * vocabulary)),
        **{
            name: Estimate(mean(x), standard_error(x, kept_lengths(known[name], lengths)))
            for name, x in finite.items()
        },
        **{name: mean(places[name]) for name in ("mass_sampler", "mass_trainer")},
        infinite_kl=int(n - min(map(len, finite.values()))),
        other_kept_set=int(places["other_kept_set"].sum()),
        total_variation=float(places["total_variation"].mean()),
        total_variation_max=float(places["total_variation"].max()),
        same_first=float(places["same_first"].mean()),
        same_top=float(places["same_top"].mean()),
        top=min(_TOP, vocabulary),
        rank_sampler=float(np.median(places["rank_sampler"])),
        rank_trainer=float(np.median(places["rank_trainer"])),
        same_rank=float((rank_change == 0).mean()),
        rank_change_max=int(rank_change.max()),
        **vars(worst),
    )
