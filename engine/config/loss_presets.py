"""The rows of the loss table: each named algorithm as choices of policy_loss.py, with its formula and paper.

mu is the sampler, old the trainer at the weights that were sampled from, pi the trainer now. r = pi / old and
rho = old / mu; i is a sequence, t a token. Where a paper leaves a number open, the row says whose number it
has.
"""

_GRPO = dict(advantage="std", bound="clip", clip_low=0.2, clip_high=0.2, loss_agg_mode="length")

# Each row has the choices that are not the usual ones, which stand beside the fields of loss_section.py.
ROWS: dict[str, dict[str, object]] = {
    # Plain importance-sampled policy gradient, rho r A = (pi / mu) A. In an exact on-policy run both ratios
    # are 1, and this is REINFORCE with a group baseline.
    "pg": dict(advantage="mean", correction="full", loss_agg_mode="constant"),
    # Proximal policy optimisation, arXiv:1707.06347, equations 7 and 9, with a critic (critic.py) and the
    # advantages of GAE, arXiv:1506.02438 (gae.py): mean over tokens. gamma = lambda = 1 and the whitened
    # advantages are Open-Reasoner-Zero's, arXiv:2503.24290, section 2. 0.1 of half a square is TRL's weight
    # of the critic's loss.
    "ppo": dict(
        advantage="gae", bound="clip", clip_low=0.2, clip_high=0.2, loss_agg_mode="tokens", whiten=True
    ),
    # Group-relative policy optimisation, DeepSeekMath, arXiv:2402.03300, equation 3:
    # mean_i mean_t min(r A, clip(r, 0.8, 1.2) A), A = (R - mean_group) / std_group.
    # Its KL term: kl_coef = 0.04, kl = "k3".
    "grpo": _GRPO,
    # GRPO done right, arXiv:2503.20783: no division by the length, and none by the standard deviation.
    "dr_grpo": _GRPO | dict(advantage="mean", loss_agg_mode="constant"),
    # Clip-higher, token-level normalisation, dynamic sampling and soft overlong punishment, arXiv:2503.14476,
    # equations 8 to 13. The paper punishes the last 4096 of 20480 tokens. max_resamples is ours: the paper
    # has no limit.
    "dapo": _GRPO | dict(clip_high=0.28, loss_agg_mode="tokens", overlong_share=0.2, max_resamples=4),
    # Leave-one-out REINFORCE, arXiv:2402.14740: A = R - mean of the other samples. The only ratio is r, in
    # the later updates of a step.
    "rloo": dict(advantage="leave_one_out", loss_agg_mode="constant"),
    # REINFORCE++, arXiv:2501.03262: rewards whitened over the step, PPO's clip, mean over tokens. Its KL
    # term: kl_in = "reward", kl = "k1".
    "reinforce++": _GRPO | dict(advantage="batch", loss_agg_mode="tokens"),
    # Pass@k training, arXiv:2508.10751, section 2.4, in its analytical form (advantage.py). As the paper, it
    # has two parts of DAPO: clip-higher and the mean over tokens. k = 2 is ours, the least above pass@1.
    "pass_at_k": _GRPO | dict(advantage="pass_at_k", clip_high=0.28, loss_agg_mode="tokens"),
    # SEED-GRPO, arXiv:2505.12346: A = R - mean_group, scaled by the group's semantic entropy
    # (semantic_entropy.py). The weight 0.5 is ours.
    "seed_grpo": _GRPO | dict(advantage="mean", semantic_entropy=0.5),
    # Direct preference optimisation, arXiv:2305.18290, equation 7, over given pairs (dpo.py): mean over pairs
    # of -log sigmoid(m). beta = 0.1 is from the paper's appendix B.
    "dpo": dict(advantage="dpo", loss_agg_mode="pairs"),
    # VeriFree, arXiv:2505.21493, equation 5: the probability of the reference answer as the reward of a
    # reasoning, and as the weight of the answer's likelihood (verifree.py). The constant divisor is ours.
    "verifree": dict(advantage="verifree", loss_agg_mode="constant"),
    # Budget-relative policy optimisation, arXiv:2505.13438 (budget_relative.py): reasonings that are cut at
    # budgets, with PPO's clip, a constant divisor and 4 answers after each cut, as in the authors' code.
    "brpo": _GRPO | dict(advantage="brpo", loss_agg_mode="constant"),
    # Group sequence policy optimisation, arXiv:2507.18071, equation 5 and section 5.1:
    # mean_i min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A), s = (prod_t r)^(1 / len).
    "gspo": _GRPO | dict(importance_sampling_level="geometric", clip_low=3e-4, clip_high=4e-4),
    # Truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings you off-policy
    # RL training", 2025): GRPO times min(rho, C) of each token. C = 2 is from the authors' 32B runs and from
    # verl (rollout_is_threshold); TRL has 3.
    "tis": _GRPO | dict(correction="truncate", correction_high=2.0),
    # Masked importance sampling (Liu et al., "When speed kills stability", 2025; arXiv:2510.26788): GRPO
    # times the sequence's ratio prod_t rho where it is at most C, and times 0 beyond. C = 2 is from verl
    # (seq_mis). This correction is TRL's default, with C = 3. A masked sequence still counts in the average,
    # as in TRL; verl leaves it out.
    "mis": _GRPO | dict(correction="mask", correction_level="sequence", correction_high=2.0),
    # As "mis", with each token's own ratio (TRL's token_mask).
    "mis_token": _GRPO | dict(correction="mask", correction_high=2.0),
    # IcePop, Ring-1T, arXiv:2510.18855: GRPO times rho of the token where 0.5 <= rho <= 5, and times 0
    # outside. INTELLECT-3, arXiv:2512.16144, has these two bounds as well.
    "icepop": _GRPO | dict(correction="mask", correction_low=0.5, correction_high=5.0),
    # Clipped weights, MiniMax-M1, arXiv:2506.13585, equation 4: sum_it sg(min(r, 5)) A logp / tokens. The
    # paper has no lower bound, and names no number for the upper bound; 5 is from TRL and from ScaleRL
    # (arXiv:2510.13786).
    "cispo": _GRPO | dict(bound="clip_weight", clip_low=1.0, clip_high=4.0, loss_agg_mode="tokens"),
    # Policy mirror descent of Kimi k1.5, arXiv:2501.12599, equation 3:
    # (R - mean) sum_t logp - tau / 2 (sum_t log r)^2, and its length reward (section 2.3.3). The paper gives
    # neither tau nor the length reward's weight: both are ours.
    "kimi": dict(
        advantage="mean", bound="clip_weight", square=0.1, length_reward=0.1, loss_agg_mode="constant"
    ),
}
