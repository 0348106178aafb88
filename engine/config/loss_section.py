"""The settings of the loss: a preset, and choices that differ from it. policy_loss.py has the equation."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .budget_cuts import Cuts
from .loss_presets import DEFAULTS, PRESETS
from .section import Section

Advantage = Literal["mean", "std", "leave_one_out", "batch", "pass_at_k", "dpo", "verifree", "gae", "brpo"]
Level = Literal["token", "sequence", "geometric"]
Bound = Literal["none", "clip", "truncate", "mask", "clip_weight"]
Correction = Literal["none", "full", "truncate", "mask"]
LossAggMode = Literal["constant", "tokens", "length", "pairs"]
Estimator = Literal["k1", "k2", "k3"]


class LossChoices(Section):
    """A preset, and choices that differ from it. docs/extend.md shows how to add a loss of your own."""

    preset: Literal[tuple(PRESETS)] = "pg"  # type: ignore[valid-type]
    """Row of the table (loss_presets.py) that fills every choice left open below. Given as a flag or in a
    grid, it takes the place of all that the file or --preset chose in this section.
    """
    surrogate: str | None = None
    """Your own surrogate as module:function, in place of a bound (losses/surrogates.py); empty is none."""
    advantage: Advantage | None = None
    """Advantage of a completion: mean, std, leave_one_out, batch or pass_at_k (losses/advantage.py).
    pass_at_k needs rewards that are 0 or 1. dpo is of a pair of given completions (losses/dpo.py),
    verifree of a reasoning with a given answer (losses/verifree.py). gae is of each token, from a critic
    (losses/gae.py). brpo is of each part of a reasoning that is cut at budgets, and of the answers after the
    cuts (losses/budget_relative.py).
    """
    k: int | None = Field(None, ge=1)
    """Completions of a subset (advantage pass_at_k), which is solved where one of them is; fewer than
    num_generations.
    """
    importance_sampling_level: Level | None = None
    """Level of the staleness ratio: token, sequence or geometric."""
    bound: Bound | None = None
    """Bound of the staleness ratio: none, clip, truncate, mask or clip_weight (losses/surrogates.py)."""
    clip_low: float | None = Field(None, ge=0, le=1)
    """The staleness ratio counts no lower than 1 - clip_low."""
    clip_high: float | None = Field(None, ge=0)
    """The staleness ratio counts no higher than 1 + clip_high."""
    correction: Correction | None = None
    """Correction of the mismatch: none, full, truncate or mask (losses/corrections.py)."""
    correction_level: Level | None = None
    """Level of the mismatch ratio: token, sequence or geometric."""
    correction_low: float | None = Field(None, ge=0)
    """A mismatch ratio below this is masked (correction mask)."""
    correction_high: float | None = Field(None, gt=0)
    """A mismatch ratio above this is truncated or masked."""
    loss_agg_mode: LossAggMode | None = None
    """What the sum over tokens is divided by: constant, tokens, length or pairs (losses/policy_loss.py)."""
    beta: float | None = Field(None, gt=0, le=1e6)
    """DPO's beta, per nat: how strongly the policy is held to the reference (advantage dpo)."""
    square: float | None = Field(None, ge=0)
    """Weight of the squared log-ratio of a sequence."""
    length_reward: float | None = Field(None, ge=0)
    """Weight of the length reward within a group (losses/reward_shaping.py); 0 is off."""
    overlong_share: float | None = Field(None, ge=0, le=1)
    """Last share of sampling.max_tokens, in which length is penalised (losses/reward_shaping.py). 0: off."""
    semantic_entropy: float | None = Field(None, ge=0, le=1)
    """Weight of a group's semantic entropy: by how much it lowers the group's advantages, at most
    (losses/semantic_entropy.py). task.equivalence says which completions mean the same; 0 is off.
    """
    router_aux_coef: float | None = Field(None, ge=0)
    """Weight of the load-balancing loss of a mixture of experts (losses/load_balance.py), a mean over the
    step's completions; 0 is off.
    """
    max_resamples: int | None = Field(None, ge=1)
    """Dynamic sampling: prompts are drawn up to this many times, until enough groups differ in their rewards;
    1 is off.
    """
    gamma: float | None = Field(None, ge=0, le=1)
    """Discount of a reward for each drawn token before it (advantage gae)."""
    gae_lambda: float | None = Field(None, ge=0, le=1)
    """Lambda of GAE: 1 counts what was rewarded, and 0 only what the critic expects next (advantage gae)."""
    whiten: bool | None = None
    """Whether advantages have mean 0 and variance 1 over the drawn tokens of a step (advantage gae)."""
    value_coef: float | None = Field(None, gt=0, le=1e6)
    """Weight of the critic's loss, 1/2 (v - target)^2 of each token (losses/critic.py)."""
    value_clip: float | None = Field(None, ge=0)
    """PPO's clip of values: how far a later update of a step may move a value from that of the rollout
    (losses/critic.py); 0 is off.
    """
    budgets: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Tokens after which a reasoning is cut and answered, ascending; the last is sampling.max_tokens
    (advantage brpo).
    """
    budget_weights: tuple[Annotated[float, Field(ge=0, le=1e6)], ...] | None = None
    """How much each budget counts for the reasonings; only the ratios matter. Empty is all alike (advantage
    brpo).
    """
    answers: int | None = Field(None, ge=1, le=10_000)
    """Answers after each cut (advantage brpo)."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the reference; 0 is off. It needs sampling.top_k = 0, top_p = 1 and
    min_p = 0.
    """
    kl: Estimator = "k3"
    """Estimator of the KL divergence."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL divergence counts: in each token's loss, with gradient; or summed over the completion, off
    its reward.
    """
    ref_model: str = ""
    """Model folder or hub name of the frozen reference; empty is the run's first model. The ledger chains the
    weights of the reference, not its place.
    """


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
        usual = {name: field.default for name, field in LossConfig.model_fields.items()} | DEFAULTS
        row, choices = usual | PRESETS[self.preset], []
        for name, value in self.model_dump(exclude={"preset"}).items():
            if value != usual[name] or value != row[name]:
                leaves_open = row[name] in ("", ())
                row_words = "" if value == row[name] or leaves_open else f" ({self.preset} has {row[name]})"
                choices.append(f"{name} {value}{row_words}")
        return f"loss {self.preset}: {', '.join(choices)}"
