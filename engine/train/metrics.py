"""The metrics of a step, except those of the monitor (monitor.py) and of the update (loss_scaling.py).

Sums are correctly rounded (math.fsum), so their order decides no bit. docs/metrics.md explains every metric.

Shapes: P prompts, G generations of each, C drawn tokens.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ...verify.mismatch import mismatch_metrics
from ..rollout.episodes import Episodes
from ..tasks.environment import CONTEXT, DONE, ERROR, TIME_LIMIT, TOKENS, TURNS
from .collect import RolloutBatch
from .losses.advantage import all_equal
from .losses.policy_loss import LossConfig
from .losses.semantic_entropy import semantic_entropy

# How a rollout ends whose last turn has no stop token, or no room for another one.
CUT = ("length", TOKENS, CONTEXT)
_ENDS = {
    DONE: "ends/done",
    TURNS: "ends/turns",
    TOKENS: "ends/tokens",
    CONTEXT: "ends/context",
    TIME_LIMIT: "ends/time_limit",
    ERROR: "ends/error",
}


def rollout_metrics(batch: Episodes) -> dict[str, float]:
    """Rewards and lengths of a step, and how many groups and completions are special cases.

    Rewards and groups are of the rollouts that are trained on.
    """
    # Of reasonings and answers, the reasonings are the episodes.
    n = batch.rewards.shape[1] if batch.cuts is None else batch.cuts.reasonings
    lengths, trained = batch.lengths[:, :n].reshape(-1).tolist(), batch.trained
    rewards = batch.rewards[:, :n][trained[:, :n]].tolist()
    mean = math.fsum(rewards) / len(rewards)
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)),
        "response_len/mean": sum(lengths) / len(lengths),
        "response_len/max": max(lengths),
        # The advantages of such a group are 0 (or all equal), so no gradient comes from it.
        "groups/all_equal": sum(
            all_equal(group[members].tolist()) for group, members in zip(batch.rewards, trained, strict=True)
        ),
        # Only the stop token. Such a completion is trained on like any other.
        "completions/empty": sum(not text for group in batch.texts for text in group),
        # No stop token. Such a completion is scored and trained on as it is.
        "completions/cut": sum(rollout.finish in CUT for rollout in batch.rollouts),
        **_trajectory_metrics(batch),
        **_cut_metrics(batch),
    }


def _cut_metrics(batch: Episodes) -> dict[str, float]:
    """The answers' rewards after each budget, and their length; nothing where no reasoning was cut."""
    if batch.cuts is None:
        return {}
    lengths = batch.lengths[:, batch.cuts.reasonings :].reshape(-1).tolist()
    at_budgets = {f"brpo/reward_at_{b}": mean for b, mean in batch.reward_at_budgets.items()}
    return at_budgets | {"brpo/answer_len": sum(lengths) / len(lengths)}


def _trajectory_metrics(batch: Episodes) -> dict[str, float]:
    """How many turns trajectories had, and how they ended; nothing where no environment was played."""
    if batch.turn_rewards is None:
        return {}
    turns = [rollout.turns for rollout in batch.rollouts]
    ends = Counter(rollout.finish for rollout in batch.rollouts)
    counts = {metric: ends[end] for end, metric in _ENDS.items()}
    return {"turns/mean": sum(turns) / len(turns), "turns/max": max(turns), **counts}


def loss_metrics(
    cfg: LossConfig,
    batch: RolloutBatch,
    shaped: np.ndarray,
    sampling_logprobs: Sequence[np.ndarray],
    ref_logprobs: Sequence[np.ndarray] | None,
) -> dict[str, float]:
    """Metrics of the parts of the loss that not every run has.

    cfg: resolved. shaped [P, G]: the rewards after shaping. sampling_logprobs, ref_logprobs: [C] of each
    rollout that is trained on.
    """
    metrics: dict[str, float] = {}
    if cfg.max_resamples > 1:
        metrics["groups/drawn"] = batch.groups_drawn
    if batch.classes is not None:
        entropies = [semantic_entropy(classes) for classes in batch.classes]
        metrics["groups/semantic_entropy"] = math.fsum(entropies) / len(entropies)
    if (shaped != batch.rewards).any():
        metrics["reward/shaped_mean"] = math.fsum(shaped.reshape(-1).tolist()) / shaped.size
    if ref_logprobs is not None:
        lengths = [len(logprobs) for logprobs in ref_logprobs]
        columns = np.concatenate(ref_logprobs), np.concatenate(sampling_logprobs)
        metrics |= mismatch_metrics(*columns, lengths, prefix="ref/")
    return metrics
