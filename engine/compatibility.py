"""Which settings go together: a table with one reason in each row.

A row says which combination is refused, and with which message. A row that asks for the device or for vLLM's
version refuses nothing until this is known. So one table serves when a configuration is read, when a run
starts, and in the docs. The allowed arguments of vLLM's engine are in rollout/vllm/arguments.py.
"""

from collections.abc import Callable
from typing import NamedTuple

from ..kernels.sampling_params import SamplingParams
from ..kernels.tile_tables import minor_version
from .config import Config
from .loss.presets import DEFAULTS


class Setting(NamedTuple):
    """What the rows of the table look at."""

    config: Config
    device: str | None = None  # "cpu" or "cuda"; None: not known yet
    # The version of vLLM; it ends with "+cpu" for a build for CPUs. None: not known yet, or not installed.
    vllm: str | None = None
    ranks: int = 1

    @property
    def vllm_exact(self) -> bool:
        """Whether vLLM samples with its own model in batch-invariant mode."""
        return self.config.sampler == "vllm-exact"

    @property
    def uses_vllm(self) -> bool:
        """Whether vLLM samples: as it comes, batch-invariant, or with our decoder."""
        return self.config.sampler.startswith("vllm")

    @property
    def keyed_vllm(self) -> bool:
        """Whether vLLM draws with zerokl's keys, over the trainer's own weights."""
        return self.config.sampler in ("vllm-exact", "vllm-zerokl")

    @property
    def vllm_on_cpu(self) -> bool:
        """Whether the installed vLLM computes on CPUs only."""
        return self.vllm is not None and self.vllm.endswith("+cpu")

    @property
    def separate(self) -> bool:
        """Whether the settings ask for a sampler with weights or numerics of its own."""
        c = self.config
        return bool(c.max_staleness or c.perturb.any or c.precision.of_sampler != c.precision)

    def _not_sharded(self) -> dict[str, bool]:
        """What FSDP does not go with here, by the name of the setting; whether it is set."""
        c = self.config
        return {
            "lora.rank": bool(c.lora.rank),
            "frozen": bool(c.frozen),
            'loss.advantage ("gae")': c.loss.has_critic,
            "loss.kl_coef, which needs a reference": c.loss.has_reference,
            f'sampler ("{c.sampler}")': c.sampler != "native",
            "max_staleness": bool(c.max_staleness),
            "perturb.* and precision.sampler_*": self.separate or c.precision.sampler_differs,
            f"workers ({c.workers})": c.workers > 1,
            f"shards_in_flight ({c.shards_in_flight})": c.shards_in_flight > 1,
        }

    @property
    def not_sharded(self) -> str:
        """The first setting that FSDP does not go with; empty where it is not asked for, or goes."""
        if self.config.parallel.engine != "fsdp":
            return ""
        return next((name for name, is_set in self._not_sharded().items() if is_set), "")


class Rule(NamedTuple):
    """One row. `refused`: whether a Setting is refused. `message`: why, and what to do instead."""

    refused: Callable[[Setting], bool]
    message: Callable[[Setting], str]


def _other_tiles(s: Setting) -> bool:
    return (
        s.vllm_exact
        and s.vllm is not None
        and minor_version(s.vllm) != minor_version(s.config.precision.tiles)
    )


def _pass_at_k_of_shaped_rewards(s: Setting) -> bool:
    return s.config.loss.resolve().advantage == "pass_at_k" and bool(
        s.config.loss.resolve().length_reward
        or s.config.loss.resolve().overlong_share
        or (s.config.loss.kl_coef and s.config.loss.kl_in == "reward")
    )


def _dpo(s: Setting) -> bool:
    return s.config.loss.resolve().advantage == "dpo"


def _verifree(s: Setting) -> bool:
    return s.config.loss.resolve().advantage == "verifree"


def _given_and_other_weights(s: Setting) -> bool:
    c = s.config
    own_weights = c.max_staleness or c.perturb.any or c.precision.sampler_differs
    others = c.sampler != "native" or own_weights or c.updates_per_rollout > 1
    return bool(others) and (_dpo(s) or _verifree(s))


def _given_and_cut(s: Setting) -> bool:
    params = s.config.sampling.sampling_params
    return _verifree(s) and bool(params.truncates or params.changes_logits)


def _dpo_of_other_probabilities(s: Setting) -> bool:
    return _dpo(s) and s.config.sampling.sampling_params != SamplingParams()


def _given_and_more(s: Setting) -> bool:
    loss = s.config.loss.resolve()
    added = loss.kl_coef or loss.square or loss.length_reward or loss.overlong_share or loss.semantic_entropy
    return (_dpo(s) or _verifree(s)) and bool(added or loss.surrogate or loss.max_resamples > 1)


def _gae(s: Setting) -> bool:
    return s.config.loss.has_critic


def _critics_only(s: Setting) -> list[str]:
    """The settings of a critic that are not the default."""
    loss = s.config.loss.resolve()
    names = ("gamma", "gae_lambda", "whiten", "value_coef", "value_clip")
    return [name for name in names if getattr(loss, name) != DEFAULTS[name]]


# The rows of losses with given tokens come first, so that their own reasons are the ones that are given.
RULES: tuple[Rule, ...] = (
    Rule(
        lambda s: _dpo(s) != (s.config.task.name == "pairs"),
        lambda s: (
            f'loss.advantage ("{s.config.loss.resolve().advantage}") with task.name '
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
        lambda s: _dpo(s) != (s.config.loss.resolve().loss_agg_mode == "pairs"),
        lambda s: (
            f'loss.loss_agg_mode ("{s.config.loss.resolve().loss_agg_mode}"): DPO is the mean over pairs, '
            'and no other loss has pairs; set it to "pairs" with DPO, and to another mode without'
        ),
    ),
    Rule(
        lambda s: not _dpo(s) and s.config.loss.resolve().beta != DEFAULTS["beta"],
        lambda s: (
            f"loss.beta ({s.config.loss.beta}) is DPO's, and this loss has none; leave it out. The weight of "
            "a KL term is loss.kl_coef"
        ),
    ),
    Rule(
        lambda s: _verifree(s) != bool(s.config.task.answer_prefix),
        lambda s: (
            f'loss.advantage ("{s.config.loss.resolve().advantage}") with task.answer_prefix '
            f'("{s.config.task.answer_prefix}"): verifree scores the answer that follows this text, and no '
            "other advantage does; set both, or neither"
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
        lambda s: (
            _gae(s)
            and bool(s.config.loss.resolve().max_resamples > 1 or s.config.loss.resolve().semantic_entropy)
        ),
        lambda s: (
            "loss.max_resamples and semantic_entropy: they compare the rewards of a group, and the advantage "
            '"gae" does not; leave them out'
        ),
    ),
    Rule(
        lambda s: s.config.num_generations == 1 and s.config.loss.resolve().advantage not in ("batch", "gae"),
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
        lambda s: (
            s.config.loss.resolve().advantage == "pass_at_k"
            and s.config.loss.resolve().k >= s.config.num_generations
        ),
        lambda s: (
            f"loss.k ({s.config.loss.resolve().k}) must be less than num_generations "
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
        lambda s: s.config.loss.resolve().correction_low > s.config.loss.resolve().correction_high,
        lambda s: (
            f"loss.correction_low ({s.config.loss.resolve().correction_low}) must not exceed "
            f"loss.correction_high ({s.config.loss.resolve().correction_high})"
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
    Rule(
        lambda s: (
            s.config.precision.scaling in ("auto", "dynamic")
            and not s.config.precision.minimum <= s.config.precision.scale <= s.config.precision.maximum
        ),
        lambda s: (
            f"precision.scale ({s.config.precision.scale}) must lie between precision.minimum "
            f"({s.config.precision.minimum}) and precision.maximum ({s.config.precision.maximum})"
        ),
    ),
    Rule(
        lambda s: bool(s.config.lora.rank and s.config.frozen),
        lambda s: (
            f"frozen with lora.rank ({s.config.lora.rank}): with LoRA only the adapters are trained, and all "
            "weights are frozen; leave frozen out, or choose lora.targets"
        ),
    ),
    Rule(
        lambda s: s.config.exact and s.config.sampler == "vllm",
        lambda s: (
            'sampler ("vllm") with exact = true: vllm is vLLM as it comes now, and no trainer has its bits; '
            'set exact = false, or sampler = "vllm-zerokl", which is zerokl\'s decoder inside vLLM, '
            'or, on a GPU, "vllm-exact"'
        ),
    ),
    Rule(
        lambda s: s.config.exact and s.config.sampler == "hf",
        lambda s: (
            'sampler ("hf") with exact = true: hf is transformers as it comes, and no trainer has its bits; '
            'set exact = false, or sampler = "native"'
        ),
    ),
    Rule(
        lambda s: (
            s.config.sampler == "hf"
            and bool(s.config.sampling.min_p or s.config.sampling.sampling_params.changes_logits)
        ),
        lambda s: (
            'sampler ("hf") with sampling.min_p, logit_bias or allowed_token_ids: transformers applies min_p '
            "after top_p, and has the other two in another form; leave them out, or set another sampler"
        ),
    ),
    Rule(
        lambda s: s.config.exact and (s.config.precision.sampler_differs or s.config.perturb.any),
        lambda s: "precision.sampler_* and perturb.* make sampler and trainer differ; set exact = false",
    ),
    Rule(
        lambda s: (
            s.vllm_exact
            and (s.config.precision.head_dtype, s.config.precision.cache_dtype) != ("compute", "compute")
        ),
        lambda s: (
            "precision.head_dtype and cache_dtype: vLLM's own model has other kernels for them; "
            'set both to "compute"'
        ),
    ),
    Rule(
        lambda s: s.keyed_vllm and s.config.precision.router_dtype != "compute",
        lambda s: (
            f'precision.router_dtype ("{s.config.precision.router_dtype}"): inside vLLM routers compute in '
            'the compute dtype; set it to "compute", or sampler = "native"'
        ),
    ),
    Rule(
        lambda s: (
            s.config.perturb.routing == "replayed"
            and (s.config.sampler != "native" or _dpo(s) or _verifree(s))
        ),
        lambda s: (
            'perturb.routing ("replayed") needs sampler = "native", which names the experts of the tokens '
            'that it draws, and a loss of drawn tokens; set it to "free", or leave out the other'
        ),
    ),
    Rule(
        lambda s: s.config.sampler != "native" and s.separate,
        lambda s: (
            'max_staleness, perturb.* and precision.sampler_*_dtype need sampler = "native", '
            f"not {s.config.sampler}: only it keeps weights of its own"
        ),
    ),
    Rule(
        lambda s: s.keyed_vllm and s.config.precision.sampler_dtype not in ("", s.config.dtype),
        lambda s: (
            f'precision.sampler_dtype ("{s.config.precision.sampler_dtype}"): sampler '
            f'"{s.config.sampler}" computes with the trainer\'s own weights; leave it empty, or set '
            'sampler = "native"'
        ),
    ),
    Rule(
        lambda s: s.config.sampler == "vllm-zerokl" and s.config.precision.cache_dtype != "compute",
        lambda s: (
            "precision.cache_dtype: vLLM's cache holds the compute dtype; "
            'set it to "compute", or sampler = "native"'
        ),
    ),
    Rule(
        lambda s: s.vllm_exact and s.device == "cpu",
        lambda s: (
            'sampler ("vllm-exact") needs a GPU: vLLM\'s kernels for CPUs are not batch-invariant; '
            'set sampler = "vllm-zerokl"'
        ),
    ),
    Rule(
        lambda s: s.uses_vllm and s.device == "cuda" and s.vllm_on_cpu,
        lambda s: (
            f'sampler ("{s.config.sampler}"): the vLLM installed here computes on CPUs only; '
            'set device = "cpu"'
        ),
    ),
    Rule(
        lambda s: s.keyed_vllm and s.device == "cuda" and s.config.vllm.multiprocess,
        lambda s: (
            "vllm.multiprocess (true): on a GPU vLLM reads the trainer's own tensors, "
            "which are in this process; set it to false"
        ),
    ),
    Rule(
        lambda s: s.config.vllm.cuda_graphs and s.uses_vllm and s.device == "cpu",
        lambda s: "vllm.cuda_graphs (true): a CPU has no CUDA graphs; set it to false",
    ),
    Rule(
        _other_tiles,
        lambda s: (
            f'precision.tiles ("{s.config.precision.tiles}"): vLLM {s.vllm} is installed, '
            "and has other tiles; set it to that version"
        ),
    ),
    Rule(
        lambda s: s.device == "cuda" and s.config.workers > 1,
        lambda s: f"workers ({s.config.workers}) must be 0 or 1 on a GPU, which one process keeps busy",
    ),
    Rule(
        lambda s: bool(s.ranks & (s.ranks - 1)) or s.ranks > s.config.virtual_shards,
        lambda s: (
            f"ranks ({s.ranks}) must be a power of two and at most virtual_shards ({s.config.virtual_shards})"
        ),
    ),
    Rule(
        lambda s: bool(s.not_sharded),
        lambda s: (
            f'parallel.engine ("fsdp") with {s.not_sharded}: this is not built with sharded weights; leave '
            'it out, or set parallel.engine = "replicated"'
        ),
    ),
    Rule(
        lambda s: s.ranks > 1 and s.config.sampler != "native",
        lambda s: f'ranks: sampler "{s.config.sampler}" runs in one process; set sampler = "native"',
    ),
)


def check_settings(
    config: Config, device: str | None = None, vllm: str | None = None, ranks: int = 1
) -> None:
    """Raise ValueError for the first row of RULES that refuses the settings.

    device: "cpu" or "cuda". vllm: the installed version. See Setting.
    """
    setting = Setting(config, device, vllm, ranks)
    for rule in RULES:
        if rule.refused(setting):
            raise ValueError(f"config: {rule.message(setting)}")
