"""The settings of the loss: a preset, and choices that differ from it. policy_loss.py has the equation."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...kernels.sampling_params import SamplingParams
from .budget_cuts import Cuts
from .loss_presets import ROWS
from .section import WHERE_SET, PlannedRun, Section, Setting, choice, free, rule, setting, settings_of

Advantage = Literal["mean", "std", "leave_one_out", "batch", "pass_at_k", "dpo", "verifree", "gae", "brpo"]
Level = Literal["token", "sequence", "geometric"]
Bound = Literal["none", "clip", "truncate", "mask", "clip_weight"]
Correction = Literal["none", "full", "truncate", "mask"]
LossAggMode = Literal["constant", "tokens", "length", "pairs"]
Estimator = Literal["k1", "k2", "k3"]

# Whose a choice is that only one advantage has, and what to do instead of setting it for another.
_OF_OTHERS = {
    "dpo": ("DPO's", ". The weight of a KL term is loss.kl_coef"),
    "gae": ("a critic's", ', or set loss.preset = "ppo"'),
    "brpo": ("of reasonings that are cut at budgets", ', or set loss.preset = "brpo"'),
}


class LossChoices(Section):
    """A preset, and choices that differ from it. docs/extend.md shows how to add a loss of your own."""

    preset: Literal[tuple(ROWS)] = setting(  # type: ignore[valid-type]
        "pg",
        head=free("a name for the choices of the loss; each choice is chained instead"),
        common=True,
        also_called="loss_type adv_estimator advantage_estimator algorithm",
        replaces="loss.",
        replaces_same=True,
    )
    """Row of the table (loss_presets.py) that fills every choice left open below. Given as a flag or in a
    grid, it takes the place of all that the file or --preset chose in this section.
    """

    @rule
    def _advantage_of_another_row(self, run: PlannedRun) -> str | None:
        chosen = self.choices_of_others or self.loss_agg_mode == "pairs"
        advantage = PRESETS[self.preset]["advantage"]
        if self.preset in ("ppo", "dpo") and self.advantage != advantage and chosen:
            return (
                f'loss.advantage ("{self.advantage}") with loss.preset ("{self.preset}"): the '
                f"row's other choices are made for its advantage, {advantage}; "
                "leave loss.advantage out, or choose another loss.preset"
            )

    surrogate: str | None = choice("")
    """Your own surrogate as module:function, in place of a bound (losses/surrogates.py); empty is none."""
    advantage: Advantage | None = choice(
        "mean", common=True, also_called="scale_rewards norm_adv_by_std_in_grpo"
    )
    """Advantage of a completion: mean, std, leave_one_out, batch or pass_at_k (losses/advantage.py).
    pass_at_k needs rewards that are 0 or 1. dpo is of a pair of given completions (losses/dpo.py),
    verifree of a reasoning with a given answer (losses/verifree.py). gae is of each token, from a critic
    (losses/gae.py). brpo is of each part of a reasoning that is cut at budgets, and of the answers after the
    cuts (losses/budget_relative.py).
    """

    @rule
    def _dpo(self, run: PlannedRun) -> str | None:
        if (self.advantage == "dpo") != (run.config.task.name == "pairs"):
            return (
                f'loss.advantage ("{self.advantage}") with task.name ("{run.config.task.name}"): DPO trains '
                'on given pairs, and only DPO does; set both loss.preset = "dpo" and task.name = "pairs", or '
                "neither"
            )
        if self.advantage == "dpo" and run.config.num_generations != 2:
            return (
                f"num_generations ({run.config.num_generations}) must be 2 with DPO: a pair has a chosen and "
                "a rejected completion"
            )
        if self.advantage == "dpo" and run.config.sampling.sampling_params != SamplingParams():
            return (
                "sampling.temperature, top_k, top_p, min_p, logit_bias and allowed_token_ids: nothing is "
                "drawn in DPO, and its log-probabilities are the model's own; leave them out"
            )

    @rule
    def _given_tokens(self, run: PlannedRun) -> str | None:
        prefix = run.config.task.answer_prefix
        if (self.advantage in ("verifree", "brpo")) != bool(prefix):
            return (
                f'loss.advantage ("{self.advantage}") with task.answer_prefix ("{prefix}"): verifree scores '
                "the answer that follows this text, brpo draws one, and no other advantage has answers; set "
                "both (the text before an answer, such as </think>), or neither"
            )
        several = run.config.max_staleness or run.config.updates_per_rollout > 1
        if self.trains_given and (run.config.sampler != "native" or several or run.config.sampler_differs):
            return (
                f"updates_per_rollout ({run.config.updates_per_rollout}), max_staleness, sampler "
                f'("{run.config.sampler}"), perturb.* and precision.sampler_*: the given tokens of dpo and '
                "verifree are scored with the weights of each update; set updates_per_rollout = 1, sampler = "
                '"native" and leave out the others'
            )
        params = run.config.sampling.sampling_params
        if self.advantage == "verifree" and (params.truncates or params.changes_logits):
            return (
                "sampling.top_k, top_p, min_p, logit_bias and allowed_token_ids: with verifree they could "
                "leave out a token of the given answer, whose probability would then be 0; leave them out"
            )
        shaped = self.length_reward or self.overlong_share or self.semantic_entropy
        if self.trains_given and (
            self.kl_coef or self.square or shaped or self.surrogate or self.max_resamples > 1
        ):
            return (
                "loss.kl_coef, square, length_reward, overlong_share, semantic_entropy, surrogate and "
                "max_resamples: dpo and verifree have advantages of their own, which these would change; "
                "leave them out"
            )

    @rule
    def _choices_of_others(self, run: PlannedRun) -> str | None:
        if self.choices_of_others:
            first = self.choices_of_others[0]
            whose, remedy = _OF_OTHERS[first.facts.only_with]
            value = json.dumps(first.value(self))
            return f"loss.{first.key} ({value}) is {whose}, and this loss has none; leave it out{remedy}"

    @rule
    def _critic(self, run: PlannedRun) -> str | None:
        if self.has_critic and run.config.lora.rank:
            return (
                f'loss.advantage ("gae") with lora.rank ({run.config.lora.rank}): the adapters have no '
                "critic's head; leave lora out, or choose another advantage"
            )
        if self.has_critic and run.config.max_staleness:
            return (
                f'loss.advantage ("gae") with max_staleness ({run.config.max_staleness}): values are scored '
                "with the weights that were sampled from, which must be the trainer's; set max_staleness = 0"
            )
        if self.has_critic and (self.max_resamples > 1 or self.semantic_entropy):
            return (
                "loss.max_resamples and semantic_entropy: they compare the rewards of a group, and the "
                'advantage "gae" does not; leave them out'
            )

    @rule
    def _rewards(self, run: PlannedRun) -> str | None:
        if self.advantage == "pass_at_k" and self.shapes_rewards:
            return (
                'loss.advantage ("pass_at_k") needs rewards that are 0 or 1, and this loss adds to them; '
                'set loss.length_reward = 0, loss.overlong_share = 0, and loss.kl_in = "loss"'
            )
        compares = self.semantic_entropy or self.max_resamples > 1
        if self.draws_answers and (self.shapes_rewards or compares):
            return (
                'loss.length_reward, overlong_share, kl_in = "reward", semantic_entropy and max_resamples: '
                "brpo has rewards at several budgets, and these are of one completion; leave them out"
            )

    k: int | None = choice(2, ge=1, head=WHERE_SET)
    """Completions of a subset (advantage pass_at_k), which is solved where one of them is; fewer than
    num_generations.
    """

    @rule
    def _fewer_than_the_group(self, run: PlannedRun) -> str | None:
        if self.advantage == "pass_at_k" and self.k >= run.config.num_generations:
            return (
                f"loss.k ({self.k}) must be less than num_generations ({run.config.num_generations}): the "
                "advantage pass_at_k compares subsets of k completions"
            )

    importance_sampling_level: Level | None = choice("token")
    """Level of the staleness ratio: token, sequence or geometric."""
    bound: Bound | None = choice("none")
    """Bound of the staleness ratio: none, clip, truncate, mask or clip_weight (losses/surrogates.py)."""
    clip_low: float | None = choice(0.0, ge=0, le=1, also_called="clip_ratio_low")
    """The staleness ratio counts no lower than 1 - clip_low."""
    clip_high: float | None = choice(
        0.0,
        ge=0,
        common=True,
        also_called="epsilon clip_ratio cliprange eps_clip epsilon_high clip_ratio_high eps_clip_high",
    )
    """The staleness ratio counts no higher than 1 + clip_high."""
    correction: Correction | None = choice(
        "none", also_called="vllm_importance_sampling_correction rollout_is"
    )
    """Correction of the mismatch: none, full, truncate or mask (losses/corrections.py)."""
    correction_level: Level | None = choice("token")
    """Level of the mismatch ratio: token, sequence or geometric."""
    correction_low: float | None = choice(0.0, ge=0)
    """A mismatch ratio below this is masked (correction mask)."""
    correction_high: float | None = choice(
        1e30, gt=0, also_called="vllm_importance_sampling_cap rollout_is_threshold"
    )
    """A mismatch ratio above this is truncated or masked."""

    @rule
    def _bounds_in_order(self, run: PlannedRun) -> str | None:
        if self.correction_low > self.correction_high:
            return (
                f"loss.correction_low ({self.correction_low}) must not exceed "
                f"loss.correction_high ({self.correction_high})"
            )

    loss_agg_mode: LossAggMode | None = choice("constant")
    """What the sum over tokens is divided by: constant, tokens, length or pairs (losses/policy_loss.py)."""

    @rule
    def _mean_over_pairs(self, run: PlannedRun) -> str | None:
        if (self.advantage == "dpo") != (self.loss_agg_mode == "pairs"):
            return (
                f'loss.loss_agg_mode ("{self.loss_agg_mode}"): DPO is the mean over pairs, and no other loss '
                'has pairs; set it to "pairs" with DPO, and to another mode without'
            )

    beta: float | None = choice(0.1, gt=0, le=1e6, head=WHERE_SET, only_with="dpo")
    """DPO's beta, per nat: how strongly the policy is held to the reference (advantage dpo)."""
    square: float | None = choice(0.0, ge=0)
    """Weight of the squared log-ratio of a sequence."""
    length_reward: float | None = choice(0.0, ge=0)
    """Weight of the length reward within a group (losses/reward_shaping.py); 0 is off."""
    overlong_share: float | None = choice(0.0, ge=0, le=1)
    """Last share of sampling.max_tokens, in which length is penalised (losses/reward_shaping.py). 0: off."""
    semantic_entropy: float | None = choice(0.0, ge=0, le=1, head=WHERE_SET)
    """Weight of a group's semantic entropy: by how much it lowers the group's advantages, at most
    (losses/semantic_entropy.py). task.equivalence says which completions mean the same; 0 is off.
    """
    router_aux_coef: float | None = choice(0.0, ge=0, head=WHERE_SET, needs_experts=True)
    """Weight of the load-balancing loss of a mixture of experts (losses/load_balance.py), a mean over the
    step's completions; 0 is off.
    """
    max_resamples: int | None = choice(1, ge=1)
    """Dynamic sampling: prompts are drawn up to this many times, until enough groups differ in their rewards;
    1 is off.
    """
    gamma: float | None = choice(1.0, ge=0, le=1, head=WHERE_SET, only_with="gae")
    """Discount of a reward for each drawn token before it (advantage gae)."""
    gae_lambda: float | None = choice(1.0, ge=0, le=1, head=WHERE_SET, only_with="gae")
    """Lambda of GAE: 1 counts what was rewarded, and 0 only what the critic expects next (advantage gae)."""
    whiten: bool | None = choice(False, head=WHERE_SET, only_with="gae")
    """Whether advantages have mean 0 and variance 1 over the drawn tokens of a step (advantage gae)."""
    value_coef: float | None = choice(0.1, gt=0, le=1e6, head=WHERE_SET, only_with="gae")
    """Weight of the critic's loss, 1/2 (v - target)^2 of each token (losses/critic.py)."""
    value_clip: float | None = choice(0.0, ge=0, head=WHERE_SET, only_with="gae")
    """PPO's clip of values: how far a later update of a step may move a value from that of the rollout
    (losses/critic.py); 0 is off.
    """
    budgets: tuple[Annotated[int, Field(ge=1)], ...] | None = choice((), head=WHERE_SET, only_with="brpo")
    """Tokens after which a reasoning is cut and answered, ascending; the last is sampling.max_tokens
    (advantage brpo).
    """
    budget_weights: tuple[Annotated[float, Field(ge=0, le=1e6)], ...] | None = choice(
        (), head=WHERE_SET, only_with="brpo"
    )
    """How much each budget counts for the reasonings; only the ratios matter. Empty is all alike (advantage
    brpo).
    """
    answers: int | None = choice(4, ge=1, le=10_000, head=WHERE_SET, only_with="brpo")
    """Answers after each cut (advantage brpo)."""

    @rule
    def _cuts(self, run: PlannedRun) -> str | None:
        last = run.config.sampling.max_tokens
        ascend = list(self.budgets) == sorted(set(self.budgets)) and self.budgets[-1:] == (last,)
        if self.draws_answers and not ascend:
            return (
                f"loss.budgets ({list(self.budgets)}) must ascend and end with sampling.max_tokens ({last}): "
                "a token after the last budget would earn nothing; change one of them"
            )
        fit = len(self.budget_weights) == len(self.budgets) and any(self.budget_weights)
        if self.draws_answers and self.budget_weights != () and not fit:
            return (
                f"loss.budget_weights ({list(self.budget_weights)}) must be a number for each of the "
                f"{len(self.budgets)} loss.budgets, one of them above 0; leave it out to weigh all alike"
            )
        if self.draws_answers and self.answers == 1:
            return (
                "loss.answers (1) must be at least 2: the advantage of an answer compares those after one cut"
            )

    kl_coef: float = setting(
        0.0, ge=0, common=True, also_called="kl_loss_coef init_kl_coef kl_coeff kl_penalty_coef"
    )
    """Weight of the KL divergence to the reference; 0 is off. It needs sampling.top_k = 0, top_p = 1 and
    min_p = 0.
    """

    @rule
    def _kl_of_whole_distributions(self, run: PlannedRun) -> str | None:
        if self.kl_coef > 0 and run.config.sampling.sampling_params.truncates:
            return (
                f"loss.kl_coef ({self.kl_coef}) with sampling.top_k, top_p or min_p: the KL divergence is "
                "infinite where the reference's cut leaves a drawn token out; "
                "set top_k = 0, top_p = 1 and min_p = 0, or kl_coef = 0"
            )

    kl: Estimator = setting("k3", also_called="kl_loss_type kl_estimator kl_penalty")
    """Estimator of the KL divergence."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL divergence counts: in each token's loss, with gradient; or summed over the completion, off
    its reward.
    """
    ref_model: str = setting(
        "",
        head=free("a place; the weights found there are chained instead"),
        also_called="ref_model_path reference_model ref_load",
    )
    """Model folder or hub name of the frozen reference; empty is the run's first model. The ledger chains the
    weights of the reference, not its place.
    """


# What each choice is in most rows.
USUAL = {name: s.facts.usual for name, s in settings_of(LossChoices).items() if s.facts.usual is not None}
# The rows of the table, each with all choices.
PRESETS: dict[str, dict[str, Any]] = {name: USUAL | row for name, row in ROWS.items()}


class LossConfig(LossChoices):
    """A preset, and choices that differ from it: what is left open is that of the preset's row."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        chosen = {key: value for key, value in values.items() if value is not None}
        preset = chosen.get("preset", LossChoices.model_fields["preset"].default)
        return PRESETS.get(preset, {}) | chosen if isinstance(preset, str) else chosen

    @property
    def choices_of_others(self) -> list[Setting]:
        """The choices that are set, and that only another advantage has."""
        choices = settings_of(LossChoices).values()
        return [s for s in choices if s.facts.only_with not in ("", self.advantage) and s.is_set(self)]

    @property
    def shapes_rewards(self) -> bool:
        """Whether something is added to the rewards of completions."""
        return bool(self.length_reward or self.overlong_share or (self.kl_coef and self.kl_in == "reward"))

    @property
    def trains_given(self) -> bool:
        """Whether the loss trains on tokens that nobody drew."""
        return self.advantage in ("dpo", "verifree")

    @property
    def has_reference(self) -> bool:
        """Whether there is a frozen reference: for a KL term, or for DPO."""
        return bool(self.kl_coef) or self.advantage == "dpo"

    @property
    def has_critic(self) -> bool:
        """Whether a critic's head is trained beside the model."""
        return self.advantage == "gae"

    @property
    def draws_answers(self) -> bool:
        """Whether reasonings are cut, and answered after each cut."""
        return self.advantage == "brpo"

    def cuts(self, reasonings: int) -> Cuts | None:
        """How that many reasonings of a prompt are cut and answered; None for an advantage without cuts."""
        if not self.draws_answers:
            return None
        return Cuts(reasonings, self.budgets, self.budget_weights or (1.0,) * len(self.budgets), self.answers)

    @property
    def line(self) -> str:
        """The loss in one line: its row, each choice that does something, and the row's if it is another."""
        usual = {name: s.usual for name, s in settings_of(LossConfig).items()}
        row, choices = usual | PRESETS[self.preset], []
        for name, value in self.model_dump(exclude={"preset"}).items():
            if value != usual[name] or value != row[name]:
                leaves_open = row[name] in ("", ())
                row_words = "" if value == row[name] or leaves_open else f" ({self.preset} has {row[name]})"
                choices.append(f"{name} {value}{row_words}")
        return f"loss {self.preset}: {', '.join(choices)}"
