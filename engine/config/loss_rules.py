"""Which settings of a loss go together, and with which others: rows of compatibility.py's table."""

from ...kernels.sampling_params import SamplingParams
from .loss_presets import DEFAULTS, PRESETS
from .rule import Rule, Setting


def _pass_at_k_of_shaped_rewards(s: Setting) -> bool:
    return s.config.loss.advantage == "pass_at_k" and bool(
        s.config.loss.length_reward
        or s.config.loss.overlong_share
        or (s.config.loss.kl_coef and s.config.loss.kl_in == "reward")
    )


def _advantage_of_another_row(s: Setting) -> bool:
    """Whether a row has another advantage than its own, and choices that only its own advantage has."""
    preset, loss = s.config.loss.preset, s.config.loss
    own_choices = bool(_critics_only(s)) if preset == "ppo" else loss.loss_agg_mode == "pairs"
    return preset in ("ppo", "dpo") and loss.advantage != PRESETS[preset]["advantage"] and own_choices


def _dpo(s: Setting) -> bool:
    return s.config.loss.advantage == "dpo"


def _verifree(s: Setting) -> bool:
    return s.config.loss.advantage == "verifree"


def _given_and_other_weights(s: Setting) -> bool:
    c = s.config
    own_weights = c.max_staleness or c.perturb.any or c.precision.sampler_differs
    others = c.sampler != "native" or own_weights or c.updates_per_rollout > 1
    return bool(others) and s.given


def _given_and_cut(s: Setting) -> bool:
    params = s.config.sampling.sampling_params
    return _verifree(s) and bool(params.truncates or params.changes_logits)


def _dpo_of_other_probabilities(s: Setting) -> bool:
    return _dpo(s) and s.config.sampling.sampling_params != SamplingParams()


def _given_and_more(s: Setting) -> bool:
    loss = s.config.loss
    added = loss.kl_coef or loss.square or loss.length_reward or loss.overlong_share or loss.semantic_entropy
    return s.given and bool(added or loss.surrogate or loss.max_resamples > 1)


def _brpo(s: Setting) -> bool:
    return s.config.loss.draws_answers


def _brpos_only(s: Setting) -> list[str]:
    """The settings of budgets and answers that are not the default."""
    loss = s.config.loss
    names = [f"loss.{n}" for n in ("budgets", "budget_weights", "answers") if getattr(loss, n) != DEFAULTS[n]]
    return names + ["sampling.answer_max_tokens"] * bool(s.config.sampling.answer_max_tokens)


def _budgets_out_of_order(s: Setting) -> bool:
    budgets = s.config.loss.budgets
    in_order = list(budgets) == sorted(set(budgets)) and bool(budgets)
    return _brpo(s) and not (in_order and budgets[-1] == s.config.sampling.max_tokens)


def _other_weights_than_budgets(s: Setting) -> bool:
    loss = s.config.loss
    return (
        _brpo(s)
        and loss.budget_weights != ()
        and (len(loss.budget_weights) != len(loss.budgets) or not any(loss.budget_weights))
    )


def _brpo_of_shaped_rewards(s: Setting) -> bool:
    loss = s.config.loss
    shaped = loss.length_reward or loss.overlong_share or (loss.kl_coef and loss.kl_in == "reward")
    return _brpo(s) and bool(shaped or loss.semantic_entropy or loss.max_resamples > 1)


def _gae(s: Setting) -> bool:
    return s.config.loss.has_critic


def _critics_only(s: Setting) -> list[str]:
    """The settings of a critic that are not the default."""
    loss = s.config.loss
    names = ("gamma", "gae_lambda", "whiten", "value_coef", "value_clip")
    return [name for name in names if getattr(loss, name) != DEFAULTS[name]]


# The rows of losses with given tokens come first, so that their own reasons are the ones that are given.
LOSS_RULES: tuple[Rule, ...] = (
    Rule(
        _advantage_of_another_row,
        lambda s: (
            f'loss.advantage ("{s.config.loss.advantage}") with loss.preset ("{s.config.loss.preset}"): the '
            f"row's other choices are made for its advantage, {PRESETS[s.config.loss.preset]['advantage']}; "
            "leave loss.advantage out, or choose another loss.preset"
        ),
    ),
    Rule(
        lambda s: _dpo(s) != (s.config.task.name == "pairs"),
        lambda s: (
            f'loss.advantage ("{s.config.loss.advantage}") with task.name '
            f'("{s.config.task.name}"): DPO trains on given pairs, and only DPO does; set both '
            'loss.preset = "dpo" and task.name = "pairs", or neither'
        ),
    ),
    Rule(
        lambda s: _dpo(s) and s.config.num_generations != 2,
        lambda s: (
            f"num_generations ({s.config.num_generations}) must be 2 with DPO: a pair has a chosen and a "
            "rejected completion"
        ),
    ),
    Rule(
        lambda s: _dpo(s) != (s.config.loss.loss_agg_mode == "pairs"),
        lambda s: (
            f'loss.loss_agg_mode ("{s.config.loss.loss_agg_mode}"): DPO is the mean over pairs, '
            'and no other loss has pairs; set it to "pairs" with DPO, and to another mode without'
        ),
    ),
    Rule(
        lambda s: not _dpo(s) and s.config.loss.beta != DEFAULTS["beta"],
        lambda s: (
            f"loss.beta ({s.config.loss.beta}) is DPO's, and this loss has none; leave it out. The weight of "
            "a KL term is loss.kl_coef"
        ),
    ),
    Rule(
        lambda s: (_verifree(s) or _brpo(s)) != bool(s.config.task.answer_prefix),
        lambda s: (
            f'loss.advantage ("{s.config.loss.advantage}") with task.answer_prefix '
            f'("{s.config.task.answer_prefix}"): verifree scores the answer that follows this text, brpo '
            "draws one, and no other advantage has answers; set both (the text before an answer, such as "
            "</think>), or neither"
        ),
    ),
    Rule(
        _budgets_out_of_order,
        lambda s: (
            f"loss.budgets ({list(s.config.loss.budgets)}) must ascend and end with "
            f"sampling.max_tokens ({s.config.sampling.max_tokens}): a token after the last budget would earn "
            "nothing; change one of them"
        ),
    ),
    Rule(
        _other_weights_than_budgets,
        lambda s: (
            f"loss.budget_weights ({list(s.config.loss.budget_weights)}) must be a number for each of the "
            f"{len(s.config.loss.budgets)} loss.budgets, one of them above 0; leave it out to weigh all alike"
        ),
    ),
    Rule(
        lambda s: _brpo(s) and s.config.loss.answers == 1,
        lambda s: (
            "loss.answers (1) must be at least 2: the advantage of an answer compares those after one cut"
        ),
    ),
    Rule(
        _brpo_of_shaped_rewards,
        lambda s: (
            'loss.length_reward, overlong_share, kl_in = "reward", semantic_entropy and max_resamples: brpo '
            "has rewards at several budgets, and these are of one completion; leave them out"
        ),
    ),
    Rule(
        lambda s: not _brpo(s) and bool(_brpos_only(s)),
        lambda s: (
            f"{_brpos_only(s)[0]} is of reasonings that are cut at budgets, and this loss has none; leave it "
            'out, or set loss.preset = "brpo"'
        ),
    ),
    Rule(
        _given_and_other_weights,
        lambda s: (
            f"updates_per_rollout ({s.config.updates_per_rollout}), max_staleness, sampler "
            f'("{s.config.sampler}"), perturb.* and precision.sampler_*: the given tokens of dpo and '
            "verifree are scored with the weights of each update; set updates_per_rollout = 1, sampler = "
            '"native" and leave out the others'
        ),
    ),
    Rule(
        _given_and_cut,
        lambda s: (
            "sampling.top_k, top_p, min_p, logit_bias and allowed_token_ids: with verifree they could leave "
            "out a token of the given answer, whose probability would then be 0; leave them out"
        ),
    ),
    Rule(
        _dpo_of_other_probabilities,
        lambda s: (
            "sampling.temperature, top_k, top_p, min_p, logit_bias and allowed_token_ids: nothing is drawn "
            "in DPO, and its log-probabilities are the model's own; leave them out"
        ),
    ),
    Rule(
        _given_and_more,
        lambda s: (
            "loss.kl_coef, square, length_reward, overlong_share, semantic_entropy, surrogate and "
            "max_resamples: dpo and verifree have advantages of their own, which these would change; leave "
            "them out"
        ),
    ),
    Rule(
        lambda s: not _gae(s) and bool(_critics_only(s)),
        lambda s: (
            f"loss.{_critics_only(s)[0]} is a critic's, and this loss has none; leave it out, or set "
            'loss.preset = "ppo"'
        ),
    ),
    Rule(
        lambda s: _gae(s) and bool(s.config.lora.rank),
        lambda s: (
            f'loss.advantage ("gae") with lora.rank ({s.config.lora.rank}): the adapters have no critic\'s '
            "head; leave lora out, or choose another advantage"
        ),
    ),
    Rule(
        lambda s: _gae(s) and bool(s.config.max_staleness),
        lambda s: (
            f'loss.advantage ("gae") with max_staleness ({s.config.max_staleness}): values are scored with '
            "the weights that were sampled from, which must be the trainer's; set max_staleness = 0"
        ),
    ),
    Rule(
        lambda s: _gae(s) and bool(s.config.loss.max_resamples > 1 or s.config.loss.semantic_entropy),
        lambda s: (
            "loss.max_resamples and semantic_entropy: they compare the rewards of a group, and the advantage "
            '"gae" does not; leave them out'
        ),
    ),
    Rule(
        lambda s: s.config.num_generations == 1 and s.config.loss.advantage not in ("batch", "gae"),
        lambda s: (
            "num_generations (1) must be at least 2: the advantage compares completions of one prompt "
            '(or set loss.advantage = "batch", or "gae")'
        ),
    ),
    Rule(
        lambda s: s.config.prompts * s.config.num_generations < 2,
        lambda s: "prompts x num_generations must be at least 2",
    ),
    Rule(
        lambda s: s.config.loss.advantage == "pass_at_k" and s.config.loss.k >= s.config.num_generations,
        lambda s: (
            f"loss.k ({s.config.loss.k}) must be less than num_generations "
            f"({s.config.num_generations}): the advantage pass_at_k compares subsets of k completions"
        ),
    ),
    Rule(
        _pass_at_k_of_shaped_rewards,
        lambda s: (
            'loss.advantage ("pass_at_k") needs rewards that are 0 or 1, and this loss adds to them; '
            'set loss.length_reward = 0, loss.overlong_share = 0, and loss.kl_in = "loss"'
        ),
    ),
    Rule(
        lambda s: s.config.loss.correction_low > s.config.loss.correction_high,
        lambda s: (
            f"loss.correction_low ({s.config.loss.correction_low}) must not exceed "
            f"loss.correction_high ({s.config.loss.correction_high})"
        ),
    ),
    Rule(
        lambda s: s.config.loss.kl_coef > 0 and s.config.sampling.sampling_params.truncates,
        lambda s: (
            f"loss.kl_coef ({s.config.loss.kl_coef}) with sampling.top_k, top_p or min_p: the KL "
            "divergence is infinite where the reference's cut leaves a drawn token out; "
            "set top_k = 0, top_p = 1 and min_p = 0, or kl_coef = 0"
        ),
    ),
)
