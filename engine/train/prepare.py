"""What the loss of a step needs, before any forward of the trainer's current weights.

Shapes: P prompts, G generations of each; n rollouts that are trained on; C drawn tokens of a rollout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config.loss_section import LossConfig
from ..rollout.episodes import Episodes
from ..rollout.given_answers import answer_length
from ..rollout.types import Rollout
from .collect import RolloutBatch
from .losses.advantage import StepAdvantages, advantages
from .losses.budget_relative import cut_advantages
from .losses.critic import Critic, critic_metrics, critic_of, token_rewards
from .losses.dpo import dpo_metrics, margins, pair_advantages
from .losses.policy_loss import sequence_weights
from .losses.reward_shaping import completion_kl, shaped_rewards
from .losses.semantic_entropy import scaled_by_entropy
from .losses.verifree import answer_advantages, answer_metrics
from .metrics import loss_metrics
from .shard import Shard
from .state import TrainState


@dataclass(frozen=True)
class Prepared:
    """What the loss needs, except the trainer's logprobs; the step's advantages; and metrics of both."""

    shard: Shard
    advantages: StepAdvantages
    metrics: dict[str, float]


def prepare(state: TrainState, batch: RolloutBatch) -> Prepared:
    """What the loss of a step needs.

    All of it is known before any forward of the trainer's current weights.
    """
    cfg, loss_cfg = state.config, state.config.loss
    params, trained = cfg.sampling.sampling_params, batch.trained
    rollouts = [r for r, is_kept in zip(batch.rollouts, trained.flat, strict=True) if is_kept]  # [n]
    sampling_logprobs, ref_logprobs = [rollout.logprobs for rollout in rollouts], None
    kl_PG: np.ndarray | None = None
    if state.ref_policy:
        ref_logprobs = state.ref_policy.score(rollouts, params)
        if loss_cfg.kl_in == "reward":
            kl_PG = batch.placed(completion_kl(sampling_logprobs, ref_logprobs, loss_cfg))
    shaped = shaped_rewards(batch.rewards, batch.lengths, loss_cfg, state.max_tokens, trained, kl_PG)
    metrics = loss_metrics(loss_cfg, batch, shaped, sampling_logprobs, ref_logprobs)
    critic = _critic(state, batch, rollouts, shaped) if state.critic else None
    if critic is not None:
        A_step = StepAdvantages(_of_all(batch, critic.advantages))
        metrics |= critic_metrics(critic)
    else:
        A_step, more = _advantages(loss_cfg, batch, shaped, sampling_logprobs, ref_logprobs)
        metrics |= more
    lengths = batch.lengths[trained].tolist()
    weights = sequence_weights(lengths, loss_cfg.loss_agg_mode, state.max_tokens, trained.size)
    # The number of updates by which the weights that were sampled from are older than the trainer's.
    staleness = state.version - rollouts[0].weight_version
    old_logprobs = state.old_policy.score(rollouts, params) if staleness else None
    if cfg.max_staleness:
        metrics["staleness/versions"] = staleness
    rows = zip(A_step.of_tokens(batch.lengths.reshape(-1).tolist()), trained.flat, strict=True)
    shard = Shard(
        rollouts,
        [A for A, is_kept in rows if is_kept],
        np.array(weights),
        old_logprobs,
        ref_logprobs if loss_cfg.kl_coef else None,
        critic and critic.values,
        critic and critic.targets,
    )
    return Prepared(shard, A_step, metrics)


def _critic(
    state: TrainState, batch: RolloutBatch, rollouts: Sequence[Rollout], shaped: np.ndarray
) -> Critic:
    """Values, targets and advantages of the rollouts that are trained on. shaped [P, G]: rewards."""
    places, R = np.flatnonzero(batch.trained).tolist(), shaped.reshape(-1).tolist()
    turn_rewards = batch.turn_rewards or [None] * len(batch.rollouts)
    rewards = [
        token_rewards(r.drawn, r.turn_starts, turn_rewards[i], R[i])
        for r, i in zip(rollouts, places, strict=True)
    ]
    return critic_of(rewards, state.critic.values(rollouts), state.config.loss)


def _of_all(batch: RolloutBatch, A: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Advantages [n][C] of the rollouts that are trained on, in their places of [P G]; 0 elsewhere."""
    values, places = iter(A), zip(batch.trained.flat, batch.lengths.flat, strict=True)
    return [next(values) if is_kept else np.zeros(C) for is_kept, C in places]


def _advantages(
    loss: LossConfig,
    batch: RolloutBatch,
    shaped: np.ndarray,
    logprobs: Sequence[np.ndarray],
    ref_logprobs: Sequence[np.ndarray] | None,
) -> tuple[StepAdvantages, dict[str, float]]:
    """The advantages of a step, and the metrics that some losses have of them.

    loss: resolved. shaped [P, G]: rewards. logprobs, ref_logprobs: [C] of each rollout that is trained on;
    where tokens are given, all are.
    """
    if loss.advantage == "dpo":
        m = margins(logprobs, ref_logprobs, loss.beta)
        return StepAdvantages.of_samples(pair_advantages(m, loss.beta)), dpo_metrics(m)
    if loss.advantage == "verifree":
        answers = [answer_length(rollout) for rollout in batch.rollouts]
        lengths = [len(logp) for logp in logprobs]
        A = StepAdvantages(answer_advantages(shaped, lengths, answers))
        return A, answer_metrics(logprobs, answers)
    A = reward_advantages(loss, batch, shaped)
    if batch.classes is not None:
        scaled = scaled_by_entropy(A.values, batch.classes, loss.semantic_entropy)
        A = StepAdvantages.of_samples(scaled)
    return A, {}


def reward_advantages(loss: LossConfig, episodes: Episodes, shaped: np.ndarray) -> StepAdvantages:
    """The advantages of a step that follow from its rewards alone. loss: resolved. shaped [P, G]: rewards."""
    if episodes.cuts is not None:
        return StepAdvantages(cut_advantages(shaped, episodes.lengths, episodes.cuts))
    return StepAdvantages.of_samples(advantages(shaped, loss.advantage, episodes.trained, loss.k))
